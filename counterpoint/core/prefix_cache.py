"""Which pages hold the prefix of a request, and which running request is computing them.

A page is registered once all of it is computed, never before. The pool (core/page_pool.py) keeps
the references; this module neither adds nor releases any.
"""

from __future__ import annotations

from collections.abc import Iterable

from counterpoint.core.limits import EngineLimits
from counterpoint.core.page_pool import PagePool, page_hashes, root_hash
from counterpoint.core.request import Request
from counterpoint.types import DisaggRole

MAX_HASHED_TOKENS = 16_384  # of waiting requests, in one call of `update_matches`


class PrefixCache:
    def __init__(self, pages: PagePool, limits: EngineLimits) -> None:
        self._pool = pages
        self._page_tokens = limits.page_tokens
        self._enabled = limits.prefix_cache
        self._computing: dict[bytes, Request] = {}  # page hash -> who will register it

    def match(self, request: Request, tokens: int) -> list[int] | None:
        """Registered pages at the start of the request's first `tokens` tokens.

        None: another request is computing more of them.
        """
        if not self._enabled:
            return []
        self._hash_pages(request, tokens // self._page_tokens)
        usable = request.page_hashes[: self._max_reusable_pages(request, tokens)]
        hits = self._pool.match(usable)
        complete = len(hits) == len(usable) or is_transferred(request)
        return hits if complete or usable[len(hits)] not in self._computing else None

    def update_matches(self, waiting: Iterable[Request]) -> None:
        """Set `matched_tokens` of each waiting request: tokens in the cache or being computed.

        Hashing a long prompt takes milliseconds, so one call hashes only a few new requests.
        """
        size, budget = self._page_tokens, MAX_HASHED_TOKENS
        for request in waiting:
            tokens = request.prefill_target or len(request.input.prompt)
            if is_transferred(request):
                request.matched_tokens = tokens
                continue
            if not request.page_hashes:
                if budget <= 0 or not self._enabled:
                    continue
                budget -= tokens
                self._hash_pages(request, tokens // size)
            hashes, pages = request.page_hashes, request.matched_tokens // size
            max_pages = self._max_reusable_pages(request, tokens)
            while pages < max_pages and self._is_known(hashes[pages]):
                pages += 1
            while pages and not self._is_known(hashes[pages - 1]):
                pages -= 1
            request.matched_tokens = pages * size

    def mark_computing(self, request: Request) -> None:
        """`request` will compute those of its hashed pages that are not registered."""
        for page_hash in request.page_hashes[request.registered_pages :]:
            self._computing.setdefault(page_hash, request)

    def register(self, request: Request) -> None:
        """Offer the pages of `request` that are fully computed by now."""
        full = request.computed_tokens // self._page_tokens
        if not self._enabled or full <= request.registered_pages:
            return
        self._hash_pages(request, full)
        new = slice(request.registered_pages, full)
        for page, page_hash in zip(request.pages[new], request.page_hashes[new], strict=True):
            self._pool.register(page, page_hash)
            if self._computing.get(page_hash) is request:
                del self._computing[page_hash]
        request.registered_pages = full

    def unmark_computing(self, request: Request) -> None:
        """`request` will compute nothing more."""
        for page_hash in request.page_hashes[request.registered_pages :]:
            if self._computing.get(page_hash) is request:
                del self._computing[page_hash]

    def _max_reusable_pages(self, request: Request, tokens: int) -> int:
        """How many pages of its first `tokens` tokens it may take from the cache.

        At least one token must be computed, and every token whose log-probabilities are due.
        """
        if is_transferred(request):
            return tokens // self._page_tokens
        pages = (tokens - 1) // self._page_tokens
        if request.input.sampling.prompt_logprobs is not None:
            pages = min(pages, request.prompt_logprobs_sent // self._page_tokens)
        return pages

    def _is_known(self, page_hash: bytes) -> bool:
        return self._pool.contains(page_hash) or page_hash in self._computing

    def _hash_pages(self, request: Request, full: int) -> None:
        """Extend the request's hashes to its first `full` pages."""
        known, size = request.page_hashes, self._page_tokens
        if len(known) < full:
            parent = known[-1] if known else root_hash(request.input.salt)
            known += page_hashes(request.token_slice(len(known) * size, full * size), size, parent)


def is_transferred(request: Request) -> bool:
    """Whether another engine computes all of its prompt and transfers the KV."""
    return request.input.disagg_role is DisaggRole.DECODE and request.pinned
