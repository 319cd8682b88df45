"""What all handoffs of one worker share: the pages they hold, their links, and the command list.

Owns: for every page that a handoff holds, who reads it and who may have it written; the numbers of
writes and reservations. Promises: a page that a peer may write has exactly one holder and no
reader, and every change is checked as it is made; a worker never uses a number twice.
Must not: know which pages are free or held by plain requests (core/page_pool.py does).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass, field

from counterpoint.disagg.handoff_events import Command, HandoffConfig, KvGeometry
from counterpoint.disagg.messages import HandoffId
from counterpoint.types import DisaggRole


class PageHold(enum.Enum):
    SENDING = "sending"  # read by the request's prefill and by writes in flight
    PARKED = "parked"  # prefilled, waiting under a lease for a decode worker with room
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
        """`owner` must hold nothing yet, and `pages` must be distinct."""
        assert owner not in self._claims, f"{owner} already holds pages"
        for page in pages:
            writer = self._writer.get(page)
            assert writer is None, f"{owner} claims page {page}, which {writer} may have written"
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
        """Forget what `owner` holds, if anything."""
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
        """Pages held this way; a page that two handoffs read counts twice."""
        return self._pages[hold]

    @property
    def is_empty(self) -> bool:
        return not self._claims

    def check(self, held: Container[int], free: Iterable[int]) -> None:
        """Raise unless some request of the engine holds what handoffs hold. For tests."""
        for owner, claim in self._claims.items():
            lost = [page for page in claim.pages if page not in held]
            assert not lost, f"{owner} has {claim.hold} {lost}, which no request holds"
        taken = {page for claim in self._claims.values() for page in claim.pages}
        assert taken.isdisjoint(free), "a page that a handoff holds is free"
        assert {page for page in taken if page in self._writer} == self._writer.keys()
        assert sum(self._pages.values()) == sum(len(claim.pages) for claim in self._claims.values())


@dataclass(slots=True, eq=False)
class LinkEnd:
    """This worker's end of a link. A message of the link carries `local` and `remote`.

    `ended` maps each finished handoff to whether it was adopted; the oldest is forgotten first.
    """

    local: int
    remote: int
    worker: str
    disagg_role: DisaggRole
    last_heard_s: float
    last_heartbeat_s: float
    dead: bool = False
    ended: dict[HandoffId, bool] = field(default_factory=dict)

    def remember(self, handoff: HandoffId, adopted: bool, max_entries: int) -> None:
        if len(self.ended) >= max_entries:
            del self.ended[next(iter(self.ended))]
        self.ended[handoff] = adopted


@dataclass(slots=True, eq=False)
class HandoffContext:
    """`writes` are those in flight by op; `grants` are reservations in force by generation.
    `condemned_links` have writes that did not end in time; they are to be torn down."""

    config: HandoffConfig
    geometry: KvGeometry
    ledger: PageLedger = field(default_factory=PageLedger)
    commands: list[Command] = field(default_factory=list)
    condemned_links: list[LinkEnd] = field(default_factory=list)
    writes: dict[int, HandoffId] = field(default_factory=dict)
    grants: dict[int, HandoffId] = field(default_factory=dict)
    last_op: int = 0
    last_generation: int = 0

    def emit(self, command: Command) -> None:
        self.commands.append(command)

    def new_op(self, handoff: HandoffId) -> int:
        self.last_op += 1
        self.writes[self.last_op] = handoff
        return self.last_op

    def new_generation(self, handoff: HandoffId) -> int:
        self.last_generation += 1
        self.grants[self.last_generation] = handoff
        return self.last_generation

    def num_pages(self, tokens: int) -> int:
        return -(-tokens // self.geometry.page_tokens)
