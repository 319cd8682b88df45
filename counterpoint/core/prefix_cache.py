"""Which pages hold the beginning of a request, and which running request is computing them.

Owns: the names of requests' pages, who will publish a name that is not there yet, and how much of a waiting request is known.
Promises: a page is published when all of it is computed, never before. Must not: hold or free pages (core/page_pool.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from counterpoint.core.limits import EngineLimits
from counterpoint.core.page_pool import PagePool, page_names, root_name
from counterpoint.core.request import Request
from counterpoint.types import DisaggRole

NAMED_TOKENS = 16_384  # of requests that wait, in one look


class PrefixCache:
    def __init__(self, pages: PagePool, limits: EngineLimits) -> None:
        self._pages = pages
        self._page_tokens = limits.page_tokens
        self._on = limits.prefix_cache
        self._computing: dict[
            bytes, Request
        ] = {}  # page name -> the running request that will publish it

    def find(self, request: Request, tokens: int) -> list[int] | None:
        """Published pages with the first of the request's `tokens` tokens; None: another request is computing more of them."""
        if not self._on:
            return []
        self._name(request, tokens // self._page_tokens)
        fetched = is_fetched(request)
        usable = request.names[: self._usable(request, tokens)]
        hits = self._pages.find(usable)
        if not fetched and len(hits) < len(usable) and usable[len(hits)] in self._computing:
            return None
        return hits

    def look(self, waiting: Iterable[Request]) -> None:
        """See how much of each of the `waiting` is known by now, or is being computed by another. Pages of a few new ones are named
        in one call: names of long prompts take milliseconds."""
        size, room = self._page_tokens, NAMED_TOKENS
        for request in waiting:
            tokens = request.target or len(request.arrive.prompt)
            if is_fetched(request):
                request.found = tokens
                continue
            if not request.names:
                if room <= 0 or not self._on:
                    continue
                room -= tokens
                self._name(request, tokens // size)
            names, found, most = request.names, request.found // size, self._usable(request, tokens)
            while found < most and self._known(names[found]):
                found += 1
            while found and not self._known(names[found - 1]):
                found -= 1
            request.found = found * size

    def expect(self, request: Request) -> None:
        """`request` is going to compute those of its named pages that are not published."""
        for name in request.names[request.published :]:
            self._computing.setdefault(name, request)

    def publish(self, request: Request) -> None:
        """Offer the pages that are now wholly computed."""
        full = request.computed // self._page_tokens
        if not self._on or full <= request.published:
            return
        self._name(request, full)
        fresh = slice(request.published, full)
        for page, name in zip(request.pages[fresh], request.names[fresh], strict=True):
            self._pages.publish(page, name)
            if self._computing.get(name) is request:
                del self._computing[name]
        request.published = full

    def forget(self, request: Request) -> None:
        """`request` will compute nothing more."""
        for name in request.names[request.published :]:
            if self._computing.get(name) is request:
                del self._computing[name]

    def _usable(self, request: Request, tokens: int) -> int:
        """Of its pages with the first `tokens` tokens, how many it may take from the cache: one token at least is computed, here or
        elsewhere, and so is what is to be told of."""
        if is_fetched(request):
            return tokens // self._page_tokens
        most = (tokens - 1) // self._page_tokens
        if request.arrive.sampling.prompt_logprobs is not None:
            most = min(most, request.prompt_told // self._page_tokens)
        return most

    def _known(self, name: bytes) -> bool:
        return self._pages.knows(name) or name in self._computing

    def _name(self, request: Request, full: int) -> None:
        """Make sure that the first `full` pages of the request have names."""
        known, size = request.names, self._page_tokens
        if len(known) < full:
            last = known[-1] if known else root_name(request.arrive.salt)
            known += page_names(request.slice(len(known) * size, full * size), size, last)


def is_fetched(request: Request) -> bool:
    """Whether all of its prompt comes from elsewhere, computed."""
    return request.arrive.part is DisaggRole.DECODE and request.kept
