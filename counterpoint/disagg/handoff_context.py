"""Desk: what all handoffs of one worker share, and one end of a link.

Owns: the command list, the numbering of writes and reservations, the page ledger. Promises: numbers are never given twice in the
life of a worker. Must not: decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from counterpoint.disagg.handoff_events import Command, HandoffConfig, KvGeometry
from counterpoint.disagg.messages import HandoffId
from counterpoint.disagg.page_ledger import PageLedger
from counterpoint.types import DisaggRole


@dataclass(slots=True, eq=False)
class LinkEnd:
    """This worker's end of a link. Messages carry `local` and `remote`; any other pair is not of this link. `ended`: handoffs
    that are over, and whether they were adopted; the oldest are forgotten first."""

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
    config: HandoffConfig
    geometry: KvGeometry
    ledger: PageLedger = field(default_factory=PageLedger)
    commands: list[Command] = field(default_factory=list)
    condemned_links: list[LinkEnd] = field(
        default_factory=list
    )  # to be given up: writes that should have ended have not
    writes: dict[int, HandoffId] = field(default_factory=dict)  # by op, while in flight
    grants: dict[int, HandoffId] = field(
        default_factory=dict
    )  # by generation, while a peer may write
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
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.geometry.page_tokens)
