"""The decode side of a handoff, as a pure state machine.

    QUEUED --pages--> RESERVED --transfer done--> (VERIFYING) --> adopted
       |                 |
       +-----------------+--> ABORTING: pages in quarantine until every writer has provably stopped

Owns: the reservation. Promises: pages go back to the engine only on proof that no write to them is
in flight: the prefill worker sends HandoffDrained, this end's transport proves it (PagesRevoked),
or the link is torn down (LinkFenced); never because time has passed. One HandoffEnded per handoff.
KV is read only when all of it is in place. Must not: forget a handoff before the prefill worker has
confirmed its end, or the link is gone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

import counterpoint.disagg.messages as wire
from counterpoint.disagg.handoff_context import HandoffContext, LinkEnd, PageHold
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
from counterpoint.types import AddRequest, Admitted, DisaggRole, OutputDelta, Release, ResumeDecode


class ReceiveState(enum.Enum):
    QUEUED = "queued"
    RESERVED = "reserved"
    VERIFYING = "verifying"
    ABORTING = "aborting"


@dataclass(slots=True, eq=False)
class HandoffReceiver:
    """`deadline_s` is on this worker's clock. `pages`: those that the peer may write, all but the
    request's first `cached`."""

    context: HandoffContext
    id: HandoffId
    link: LinkEnd
    request: AddRequest
    deadline_s: float
    on_done: Callable[[HandoffReceiver, bool], None]
    state: ReceiveState = ReceiveState.QUEUED
    pages: tuple[int, ...] = ()
    cached: int = 0
    generation: int = 0
    acknowledged: bool = False
    repeat_s: float = 0.0
    aborted_s: float = 0.0
    reason: str = ""
    first_token: SampledToken | None = None

    @property
    def engine_request_id(self) -> str:
        return engine_id(self.id, DisaggRole.DECODE)

    @property
    def is_active(self) -> bool:
        return self.state is not ReceiveState.ABORTING

    def start(self) -> None:
        self.context.emit(
            ToEngine(
                msgspec.structs.replace(
                    self.request, id=self.engine_request_id, disagg_role=DisaggRole.DECODE
                )
            )
        )
        self.on_offer()

    # ------------------------------------------------------------ progress

    def on_offer(self) -> None:
        if self.state is ReceiveState.QUEUED:
            self._send(wire.OfferQueued(*self._header))

    def on_admitted(self, now: float, event: Admitted) -> None:
        """The engine has pages for it."""
        if self.state is not ReceiveState.QUEUED:
            return
        self.generation = self.context.new_generation(self.id)
        self.cached, self.pages = event.cached_pages, event.pages[event.cached_pages :]
        self.context.ledger.hold(self.engine_request_id, PageHold.RECEIVING, self.pages)
        self.context.emit(GrantPages(self.link.local, self.generation, self.pages))
        self.state = ReceiveState.RESERVED
        self._send_pending(now)

    def on_output(self, now: float, delta: OutputDelta) -> None:
        """Before adoption, the engine's only output is that it refuses the request."""
        if delta.finish_reason is not None:
            self.abort(now, HandoffOutcome.FAILED, delta.error or delta.finish_reason.value)

    def on_transfer_started(self, message: wire.TransferStarted) -> None:
        self.acknowledged |= message.generation == self.generation

    def on_transfer_done(self, now: float, message: wire.TransferDone) -> None:
        if self.state is not ReceiveState.RESERVED or message.generation != self.generation:
            return
        self.first_token = message.first_token
        wanted = len(self.pages) * self.context.geometry.layers
        if message.page_layers != wanted:
            self.abort(
                now,
                HandoffOutcome.FAILED,
                f"{message.page_layers} page layers were written, not {wanted}",
            )
        elif message.checksum is None or not self.pages:
            self._adopt()
        else:
            self.state = ReceiveState.VERIFYING
            self.context.emit(VerifyPages(self.generation, self.pages, message.checksum))

    def on_verified(self, now: float, ok: bool) -> None:
        if self.state is ReceiveState.VERIFYING and ok:
            self._adopt()
        elif self.state is ReceiveState.VERIFYING:
            self.abort(
                now, HandoffOutcome.FAILED, "the pages do not have the content that was sent"
            )

    def _adopt(self) -> None:
        assert self.first_token is not None
        self.context.ledger.drop(self.engine_request_id)
        del self.context.grants[self.generation]
        self.context.emit(RevokePages(self.link.local, self.generation))
        self.context.emit(ToEngine(ResumeDecode(self.engine_request_id, self.first_token.token)))
        self.context.emit(
            HandoffEnded(
                self.id, DisaggRole.DECODE, HandoffOutcome.ADOPTED, first_token=self.first_token
            )
        )
        self._send(wire.TransferAck(*self._header))
        self.on_done(self, True)

    def tick(self, now: float) -> None:
        if self.is_active and now >= self.deadline_s:
            self.abort(now, HandoffOutcome.FAILED, "the handoff's deadline has passed")
        elif now >= self.repeat_s and (
            (self.state is ReceiveState.RESERVED and not self.acknowledged) or not self.is_active
        ):
            self._send_pending(now)
        if (
            not self.is_active
            and self.generation
            and now >= self.aborted_s + self.context.config.drain_timeout_s
        ):
            self.context.condemned_links.append(self.link)

    # ------------------------------------------------------------ ends

    def abort(self, now: float, outcome: HandoffOutcome, reason: str) -> None:
        """Pages that may still be written stay in quarantine."""
        if not self.is_active:
            return
        self.context.emit(HandoffEnded(self.id, DisaggRole.DECODE, outcome, reason))
        self.state = ReceiveState.ABORTING
        self.aborted_s, self.reason = now, reason[:500]
        if self.generation:
            self.context.ledger.change_hold(self.engine_request_id, PageHold.QUARANTINE)
            self.context.emit(RevokePages(self.link.local, self.generation))
        else:
            self.context.emit(ToEngine(Release(self.engine_request_id)))
        if not self.link.dead:
            self._send_pending(now)
        elif not self.generation:
            self.on_done(self, False)

    def on_revoked(self) -> None:
        """Proven: nothing can be written here any more."""
        if self.is_active:
            return
        self._free()
        if self.link.dead:
            self.on_done(self, False)

    def on_drained(self, now: float, reason: str) -> None:
        """The prefill worker has no write in flight and has forgotten the handoff."""
        if self.is_active:
            self.context.emit(
                HandoffEnded(self.id, DisaggRole.DECODE, HandoffOutcome.ABORTED, reason)
            )
            if self.generation:
                self.context.emit(RevokePages(self.link.local, self.generation))
            else:
                self.context.emit(ToEngine(Release(self.engine_request_id)))
        self._free()
        self.on_done(self, False)

    def on_link_fenced(self) -> None:
        self._free()
        self.on_done(self, False)

    def _free(self) -> None:
        if self.generation:
            del self.context.grants[self.generation]
            self.generation = 0
            self.context.ledger.drop(self.engine_request_id)
            self.context.emit(ToEngine(Release(self.engine_request_id)))

    # ------------------------------------------------------------ messages

    @property
    def _header(self) -> tuple[HandoffId, int, int, int]:
        return self.id, self.link.local, self.link.remote, self.generation

    def _send_pending(self, now: float) -> None:
        """Send (again) what the prefill worker has not answered yet."""
        self.repeat_s = now + self.context.config.resend_interval_s
        if self.is_active:
            self._send(wire.PagesReserved(*self._header, self.pages, self.cached))
        else:
            self._send(wire.AbortHandoff(*self._header, self.reason))

    def _send(self, message: wire.Message) -> None:
        if not self.link.dead:
            self.context.emit(SendMessage(self.link.local, message))
