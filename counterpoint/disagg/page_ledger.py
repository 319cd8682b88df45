"""Ledger: the pages that handoffs hold, and what may happen to each.

Owns: for every page of the pool, who reads it and who may have it written. Promises: a page that a peer may write has exactly one
holder and no reader; each change is checked as it is made, so a mistake is an AssertionError and not another request's answer.
Must not: know what is free or what a plain request holds (core/page_pool.py does; `check` compares the two).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass


class PageHold(enum.Enum):
    SENDING = "sending"  # the request's own pages while it prefills and while they are read by writes in flight
    PARKED = "parked"  # prefilled, and no decode worker has room yet: kept under a lease
    RECEIVING = "receiving"  # reserved: a peer may write them
    QUARANTINE = "quarantine"  # given up, but a peer may still write them

    @property
    def written(self) -> bool:
        return self in (PageHold.RECEIVING, PageHold.QUARANTINE)


@dataclass(slots=True)
class PageClaim:
    hold: PageHold
    pages: tuple[int, ...]


class PageLedger:
    def __init__(self) -> None:
        self._claims: dict[Hashable, PageClaim] = {}
        self._writer: dict[int, Hashable] = {}
        self._readers: Counter[int] = Counter()
        self._pages: Counter[PageHold] = Counter()

    def hold(self, owner: Hashable, hold: PageHold, pages: tuple[int, ...]) -> None:
        """`owner`, who holds nothing, takes `pages` (distinct)."""
        assert owner not in self._claims, f"{owner} holds pages already"
        for page in pages:
            assert page not in self._writer, (
                f"page {page} is {owner}'s, but {self._writer[page]} may have it written"
            )
            if hold.written:
                assert not self._readers[page], f"page {page} would be written while it is read"
                self._writer[page] = owner
            else:
                self._readers[page] += 1
        self._claims[owner] = PageClaim(hold, pages)
        self._pages[hold] += len(pages)

    def change_hold(self, owner: Hashable, hold: PageHold) -> None:
        """SENDING <-> PARKED, RECEIVING -> QUARANTINE."""
        claim = self._claims[owner]
        assert claim.hold.written is hold.written and claim.hold is not PageHold.QUARANTINE
        self._pages[claim.hold] -= len(claim.pages)
        self._pages[hold] += len(claim.pages)
        claim.hold = hold

    def drop(self, owner: Hashable) -> None:
        """`owner` holds nothing any more; no harm if it never did."""
        claim = self._claims.pop(owner, None)
        if claim is None:
            return
        self._pages[claim.hold] -= len(claim.pages)
        for page in claim.pages:
            if claim.hold.written:
                del self._writer[page]
            elif self._readers[page] == 1:
                del self._readers[page]
            else:
                self._readers[page] -= 1

    def pages(self, hold: PageHold) -> int:
        """Pages held so; one that two handoffs read counts twice."""
        return self._pages[hold]

    @property
    def is_empty(self) -> bool:
        return not self._claims

    def check(self, held: Container[int], free: Iterable[int]) -> None:
        """Raise unless the ledger agrees with the engine: what handoffs hold, some request there holds too. For tests."""
        for owner, claim in self._claims.items():
            lost = [page for page in claim.pages if page not in held]
            assert not lost, f"{owner} has {claim.hold} {lost}, which no request holds"
        taken = {page for claim in self._claims.values() for page in claim.pages}
        assert taken.isdisjoint(free), "a page that a handoff holds is free"
        assert {page for page in taken if page in self._writer} == self._writer.keys()
        assert sum(self._pages.values()) == sum(len(claim.pages) for claim in self._claims.values())
