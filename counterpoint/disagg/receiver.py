"""The decode side of a handoff, as a pure state machine.

    QUEUED --pages--> RESERVED --done--> (VERIFYING) --> adopted
       |                 |
       +-----------------+--> ABORTING: the pages are in quarantine until every writer is proven to have stopped --> freed

Owns: the reservation. Promises: pages go back to the engine only on proof that no write to them is in flight: the prefill worker
says Drained, this end's own mover says so (Revoked), or the link is torn down (Fenced); never because time has passed. `HandoffEnded`
is said once. KV is read (adopted) only when all of it is in place.
Must not: forget a handoff before the prefill worker has said that it has, or the link is gone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

import counterpoint.disagg.messages as wire
from counterpoint.disagg.handoff_context import HandoffContext, LinkEnd
from counterpoint.disagg.handoff_events import (
    GrantPages,
    HandoffEnded,
    HandoffOutcome,
    RevokePages,
    SendMessage,
    ToEngine,
    VerifyPages,
    engine_id,
)
from counterpoint.disagg.messages import HandoffId, SampledToken
from counterpoint.disagg.page_ledger import PageHold
from counterpoint.types import AddRequest, Admitted, DisaggRole, OutputDelta, Release, ResumeDecode


class ReceiveState(enum.Enum):
    QUEUED = "queued"
    RESERVED = "reserved"
    VERIFYING = "verifying"
    ABORTING = "aborting"


@dataclass(slots=True, eq=False)
class HandoffReceiver:
    """`deadline_s` is on this worker's clock. `pages` are those that the peer may write: all but the request's first `cached`."""

    desk: HandoffContext
    id: HandoffId
    link: LinkEnd
    arrive: AddRequest
    deadline_s: float
    forget: Callable[[HandoffReceiver, bool], None]
    state: ReceiveState = ReceiveState.QUEUED
    pages: tuple[int, ...] = ()
    cached: int = 0
    generation: int = 0
    answered: bool = False
    repeat_s: float = 0.0
    stopped_s: float = 0.0
    reason: str = ""
    first: SampledToken | None = None

    @property
    def name(self) -> str:
        return engine_id(self.id, DisaggRole.DECODE)

    @property
    def alive(self) -> bool:
        return self.state is not ReceiveState.ABORTING

    def begin(self) -> None:
        self.desk.do(
            ToEngine(
                msgspec.structs.replace(self.arrive, id=self.name, disagg_role=DisaggRole.DECODE)
            )
        )
        self.offered()

    # ------------------------------------------------------------ what moves it on

    def offered(self) -> None:
        if self.state is ReceiveState.QUEUED:
            self._send(wire.OfferQueued(*self._ends))

    def admitted(self, now: float, event: Admitted) -> None:
        """The engine has pages for it."""
        if self.state is not ReceiveState.QUEUED:
            return
        self.generation = self.desk.new_generation(self.id)
        self.cached, self.pages = event.cached_pages, event.pages[event.cached_pages :]
        self.desk.ledger.hold(self.name, PageHold.RECEIVING, self.pages)
        self.desk.do(GrantPages(self.link.local, self.generation, self.pages))
        self.state = ReceiveState.RESERVED
        self._say(now)

    def delta(self, now: float, delta: OutputDelta) -> None:
        """Before it is adopted, the engine only speaks of a request that it can't take."""
        if delta.finish_reason is not None:
            self.stop(now, HandoffOutcome.FAILED, delta.error or delta.finish_reason.value)

    def streaming(self, message: wire.TransferStarted) -> None:
        self.answered |= message.generation == self.generation

    def done(self, now: float, message: wire.TransferDone) -> None:
        if self.state is not ReceiveState.RESERVED or message.generation != self.generation:
            return
        self.first = message.first
        wanted = len(self.pages) * self.desk.geometry.layers
        if message.page_layers != wanted:
            self.stop(
                now,
                HandoffOutcome.FAILED,
                f"{message.page_layers} page layers were written, not {wanted}",
            )
        elif message.checksum is None or not self.pages:
            self._adopt()
        else:
            self.state = ReceiveState.VERIFYING
            self.desk.do(VerifyPages(self.generation, self.pages, message.checksum))

    def verified(self, now: float, ok: bool) -> None:
        if self.state is ReceiveState.VERIFYING and ok:
            self._adopt()
        elif self.state is ReceiveState.VERIFYING:
            self.stop(now, HandoffOutcome.FAILED, "the pages do not have the content that was sent")

    def _adopt(self) -> None:
        assert self.first is not None
        self.desk.ledger.drop(self.name)
        del self.desk.grants[self.generation]
        self.desk.do(RevokePages(self.link.local, self.generation))
        self.desk.do(ToEngine(ResumeDecode(self.name, self.first.token)))
        self.desk.do(
            HandoffEnded(self.id, DisaggRole.DECODE, HandoffOutcome.ADOPTED, first_token=self.first)
        )
        self._send(wire.TransferAck(*self._ends))
        self.forget(self, True)

    def tick(self, now: float) -> None:
        if self.alive and now >= self.deadline_s:
            self.stop(now, HandoffOutcome.FAILED, "the handoff's deadline has passed")
        elif now >= self.repeat_s and (
            (self.state is ReceiveState.RESERVED and not self.answered) or not self.alive
        ):
            self._say(now)
        if not self.alive and self.generation and now >= self.stopped_s + self.desk.rules.drain_s:
            self.desk.condemned.append(self.link)

    # ------------------------------------------------------------ ends

    def stop(self, now: float, outcome: HandoffOutcome, reason: str) -> None:
        """Give it up. Whatever may still be written stays in quarantine."""
        if not self.alive:
            return
        self.desk.do(HandoffEnded(self.id, DisaggRole.DECODE, outcome, reason))
        self.state = ReceiveState.ABORTING
        self.stopped_s, self.reason = now, reason[:500]
        if self.generation:
            self.desk.ledger.change_hold(self.name, PageHold.QUARANTINE)
            self.desk.do(RevokePages(self.link.local, self.generation))
        else:
            self.desk.do(ToEngine(Release(self.name)))
        if not self.link.dead:
            self._say(now)
        elif not self.generation:
            self.forget(self, False)

    def revoked(self) -> None:
        """Nothing can be written here any more, whatever the prefill worker still does."""
        if self.alive:
            return
        self._free()
        if self.link.dead:
            self.forget(self, False)

    def drained(self, now: float, reason: str) -> None:
        """The prefill worker has nothing in flight and has forgotten the handoff."""
        if self.alive:
            self.desk.do(HandoffEnded(self.id, DisaggRole.DECODE, HandoffOutcome.ABORTED, reason))
            if self.generation:
                self.desk.do(RevokePages(self.link.local, self.generation))
            else:
                self.desk.do(ToEngine(Release(self.name)))
        self._free()
        self.forget(self, False)

    def fenced(self) -> None:
        self._free()
        self.forget(self, False)

    def _free(self) -> None:
        if self.generation:
            del self.desk.grants[self.generation]
            self.generation = 0
            self.desk.ledger.drop(self.name)
            self.desk.do(ToEngine(Release(self.name)))

    # ------------------------------------------------------------ talking

    @property
    def _ends(self) -> tuple[HandoffId, int, int, int]:
        return self.id, self.link.local, self.link.remote, self.generation

    def _say(self, now: float) -> None:
        """Say (again) what the prefill worker has not answered yet."""
        self.repeat_s = now + self.desk.rules.resend_s
        if self.alive:
            self._send(wire.PagesReserved(*self._ends, self.pages, self.cached))
        else:
            self._send(wire.AbortHandoff(*self._ends, self.reason))

    def _send(self, message: wire.Message) -> None:
        if not self.link.dead:
            self.desk.do(SendMessage(self.link.local, message))
