"""Which pages hold the beginning of a request, and which running request is computing them.

Owns: the names of requests' pages, who will publish a name that is not there yet, and how much of a waiting request is known.
Promises: a page is published when all of it is computed, never before. Must not: hold or free pages (core/page_pool.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from counterpoint.core.limits import EngineLimits
from counterpoint.core.page_pool import PagePool, page_hashes, root_hash
from counterpoint.core.request import Request
from counterpoint.types import DisaggRole

MAX_HASHED_TOKENS = 16_384  # of requests that wait, in one look


class PrefixCache:
    def __init__(self, pages: PagePool, limits: EngineLimits) -> None:
        self._pool = pages
        self._page_tokens = limits.page_tokens
        self._enabled = limits.prefix_cache
        self._computing: dict[
            bytes, Request
        ] = {}  # page name -> the running request that will publish it

    def match(self, request: Request, tokens: int) -> list[int] | None:
        """Published pages with the first of the request's `tokens` tokens; None: another request is computing more of them."""
        if not self._enabled:
            return []
        self._hash_pages(request, tokens // self._page_tokens)
        fetched = is_transferred(request)
        usable = request.page_hashes[: self._max_reusable_pages(request, tokens)]
        hits = self._pool.match(usable)
        if not fetched and len(hits) < len(usable) and usable[len(hits)] in self._computing:
            return None
        return hits

    def update_matches(self, waiting: Iterable[Request]) -> None:
        """See how much of each of the `waiting` is known by now, or is being computed by another. Pages of a few new ones are named
        in one call: names of long prompts take milliseconds."""
        size, room = self._page_tokens, MAX_HASHED_TOKENS
        for request in waiting:
            tokens = request.prefill_target or len(request.input.prompt)
            if is_transferred(request):
                request.matched_tokens = tokens
                continue
            if not request.page_hashes:
                if room <= 0 or not self._enabled:
                    continue
                room -= tokens
                self._hash_pages(request, tokens // size)
            names, found, most = (
                request.page_hashes,
                request.matched_tokens // size,
                self._max_reusable_pages(request, tokens),
            )
            while found < most and self._is_known(names[found]):
                found += 1
            while found and not self._is_known(names[found - 1]):
                found -= 1
            request.matched_tokens = found * size

    def mark_computing(self, request: Request) -> None:
        """`request` is going to compute those of its named pages that are not published."""
        for name in request.page_hashes[request.registered_pages :]:
            self._computing.setdefault(name, request)

    def register(self, request: Request) -> None:
        """Offer the pages that are now wholly computed."""
        full = request.computed_tokens // self._page_tokens
        if not self._enabled or full <= request.registered_pages:
            return
        self._hash_pages(request, full)
        fresh = slice(request.registered_pages, full)
        for page, name in zip(request.pages[fresh], request.page_hashes[fresh], strict=True):
            self._pool.register(page, name)
            if self._computing.get(name) is request:
                del self._computing[name]
        request.registered_pages = full

    def unmark_computing(self, request: Request) -> None:
        """`request` will compute nothing more."""
        for name in request.page_hashes[request.registered_pages :]:
            if self._computing.get(name) is request:
                del self._computing[name]

    def _max_reusable_pages(self, request: Request, tokens: int) -> int:
        """Of its pages with the first `tokens` tokens, how many it may take from the cache: one token at least is computed, here or
        elsewhere, and so is what is to be told of."""
        if is_transferred(request):
            return tokens // self._page_tokens
        most = (tokens - 1) // self._page_tokens
        if request.input.sampling.prompt_logprobs is not None:
            most = min(most, request.prompt_logprobs_sent // self._page_tokens)
        return most

    def _is_known(self, name: bytes) -> bool:
        return self._pool.contains(name) or name in self._computing

    def _hash_pages(self, request: Request, full: int) -> None:
        """Make sure that the first `full` pages of the request have names."""
        known, size = request.page_hashes, self._page_tokens
        if len(known) < full:
            last = known[-1] if known else root_hash(request.input.salt)
            known += page_hashes(request.token_slice(len(known) * size, full * size), size, last)


def is_transferred(request: Request) -> bool:
    """Whether all of its prompt comes from elsewhere, computed."""
    return request.input.disagg_role is DisaggRole.DECODE and request.pinned
