"""The prefill side of a handoff, as pure state machines.

`PrefillSource` is the prefill: the request's pages here, how far they are computed, its first token. `HandoffSender` is one attempt to hand it
to a decode worker; when the decode side fails, the next attempt starts from the same source, without prefilling again.

    NEW --pages here: offer--> RUNNING ---reserve--> STREAMING --all written, first token known--> SENT --ack--> RELEASED
                                  | prefilled           ^
                                  v                     |    any state but RELEASED --> ABORTING --none in flight--> RELEASED
                                PARKED ----reserve------+

A handoff is offered only when it has its pages here, so a decode worker's pages never wait for pages of a prefill worker.

Owns: which page layers have been posted. Promises: nothing is posted after ABORTING; pages are released to the engine once, when
the request is decided here and no write reads them; `HandoffEnded` is said once per request.
Must not: wait for the decode worker to hear of an end. It may forget a handoff as soon as nothing of it is in flight: whoever
asks about a forgotten handoff is told Drained, which is then true.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

import counterpoint.disagg.messages as wire
from counterpoint.disagg.handoff_context import HandoffContext, LinkEnd
from counterpoint.disagg.handoff_events import (
    CancelWrite,
    HandoffEnded,
    HandoffOutcome,
    HandoffTimes,
    Reroute,
    SendMessage,
    ToEngine,
    TransferGranularity,
    WriteKv,
    engine_id,
)
from counterpoint.disagg.messages import HandoffId, SampledToken
from counterpoint.disagg.page_ledger import PageHold
from counterpoint.types import Abort as EngineAbort
from counterpoint.types import (
    AddRequest,
    Admitted,
    Computed,
    DisaggRole,
    FinishReason,
    OutputDelta,
    Release,
    ResumeDecode,
)


@dataclass(slots=True, eq=False)
class PrefillSource:
    """`id` is its first attempt, `sender` the current one (None between two). `deadline_s` is on this worker's clock."""

    desk: HandoffContext
    id: HandoffId
    arrive: AddRequest
    deadline_s: float
    started_s: float
    forget: Callable[[PrefillSource], None]
    grain: TransferGranularity = TransferGranularity.LAYER
    admitted_s: float = 0.0
    prefilled_s: float = 0.0
    sender: HandoffSender | None = None
    pages: tuple[int, ...] = ()
    tokens: int = 0  # [0, tokens) are computed in every layer,
    ahead: int = 0  # [tokens, ahead) in the first `layers`
    layers: int = 0
    first: SampledToken | None = None
    staying: bool = False
    over: HandoffOutcome | None = None
    in_flight: int = 0  # writes that read its pages
    hold: PageHold = PageHold.SENDING

    @property
    def total_tokens(self) -> int:
        return len(self.arrive.prompt) + len(self.arrive.generated_prefix)

    @property
    def complete(self) -> bool:
        return self.first is not None and self.tokens == self.total_tokens

    @property
    def name(self) -> str:
        return engine_id(self.id, DisaggRole.PREFILL)

    def begin(self) -> None:
        self.desk.do(
            ToEngine(
                msgspec.structs.replace(self.arrive, id=self.name, disagg_role=DisaggRole.PREFILL)
            )
        )

    def page_edge(self, tokens: int) -> int:
        """Pages that are finished when `tokens` tokens are: the last one may be partly filled."""
        return (
            len(self.pages)
            if tokens >= self.total_tokens
            else tokens // self.desk.geometry.page_tokens
        )

    # ------------------------------------------------------------ what the engine says

    def admitted(self, now: float, event: Admitted) -> None:
        if self.over is not None:
            return
        self.pages, self.admitted_s = event.pages, now
        self.tokens = self.ahead = event.cached_pages * self.desk.geometry.page_tokens
        self.desk.ledger.hold(self.name, self.hold, event.pages)
        self._advance(now)

    def computed(self, now: float, event: Computed) -> None:
        self.tokens, self.ahead, self.layers = (
            event.tokens,
            event.partial_tokens,
            event.partial_layers,
        )
        self._advance(now)

    def delta(self, now: float, delta: OutputDelta) -> None:
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.end(now, HandoffOutcome.FINISHED)
        elif delta.finish_reason is not None:
            self.end(
                now,
                HandoffOutcome.ABORTED
                if delta.finish_reason is FinishReason.ABORT
                else HandoffOutcome.FAILED,
                delta.error,
            )
        elif self.first is None and delta.tokens:  # what is told of the prompt comes before
            self.prefilled_s = now
            self.first = SampledToken(
                delta.tokens[0], delta.logprobs[0] if delta.logprobs else None, delta.cached_tokens
            )
            self._advance(now)

    def _advance(self, now: float) -> None:
        if self.sender is not None:
            self.sender.advance(now)
        self.keep()
        if self.staying:
            self.settle()

    # ------------------------------------------------------------ attempts

    def attempt_failed(self, handoff: HandoffId, reason: str) -> None:
        self.sender = None
        if self.over is None:
            self.keep()
            self.desk.do(Reroute(self.id, handoff, reason))

    def stay(self) -> None:
        """No further attempt: decode here, as soon as it is prefilled and no earlier attempt's write is in flight."""
        if self.over is None and self.sender is None:
            self.staying = True
            self.settle()

    def end(
        self,
        now: float,
        outcome: HandoffOutcome,
        reason: str = "",
        times: HandoffTimes | None = None,
        to: str = "",
    ) -> None:
        """The request is decided as far as this worker goes."""
        if self.over is not None:
            return
        self.over = outcome
        self.desk.do(
            HandoffEnded(
                self.id, DisaggRole.PREFILL, outcome, reason, times=times, decode_worker=to
            )
        )
        if outcome in (HandoffOutcome.ABORTED, HandoffOutcome.FAILED):
            self.desk.do(ToEngine(EngineAbort(self.name)))
        sender, self.sender = self.sender, None
        if sender is not None:
            sender.stop(now, reason or outcome.value)
        self.settle()

    def tick(self, now: float) -> None:
        if now >= self.deadline_s:
            self.end(now, HandoffOutcome.FAILED, "the handoff's deadline has passed")

    def keep(self) -> None:
        """Book the pages as parked while they are complete and nobody takes them."""
        waiting = self.complete and (self.sender is None or self.sender.state is SendState.PARKED)
        hold = PageHold.PARKED if waiting else PageHold.SENDING
        if hold is not self.hold and self.pages and self.over is None:
            self.hold = hold
            self.desk.ledger.change_hold(self.name, hold)

    def settle(self) -> None:
        """Leave the pages to the engine when nobody outside needs them."""
        if self.in_flight:
            return
        if self.over is not None:
            self._leave(Release(self.name))
        elif self.staying and self.complete and self.first is not None:
            self.over = HandoffOutcome.DECODED_IN_PLACE
            self.desk.do(HandoffEnded(self.id, DisaggRole.PREFILL, self.over))
            self._leave(ResumeDecode(self.name, self.first.token))

    def _leave(self, event: ResumeDecode | Release) -> None:
        self.desk.ledger.drop(self.name)
        self.desk.do(ToEngine(event))
        self.forget(self)


class SendState(enum.Enum):
    NEW = "new"
    RUNNING = "running"
    PARKED = "parked"
    STREAMING = "streaming"
    SENT = "sent"
    ABORTING = "aborting"
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class HandoffSender:
    """One attempt. Of the pages that the decode worker lacks, [cached, sent) are posted in every layer, and [sent, edge) in the
    first `edge_layers`."""

    desk: HandoffContext
    id: HandoffId
    link: LinkEnd
    source: PrefillSource
    forget: Callable[[HandoffSender], None]
    state: SendState = SendState.NEW
    heard: bool = False
    repeat_s: float = 0.0
    lease_end_s: float = 0.0
    park_end_s: float = 0.0
    stopped_s: float = 0.0
    reserved_s: float = 0.0
    written_s: float = 0.0
    reservation: wire.PagesReserved | None = None
    sent: int = 0
    edge: int = 0
    edge_layers: int = 0
    ops: dict[int, int] = field(default_factory=dict)  # write in flight -> its page layers
    written: int = 0  # page layers
    since_s: float = 0.0  # writes have been in flight,
    sending_s: float = 0.0  # and were before
    checksum: int | None = 0
    reason: str = ""

    # ------------------------------------------------------------ what moves it on

    def advance(self, now: float) -> None:
        """The source has come further, a write has ended, or pages were reserved."""
        if self.state is SendState.NEW and self.source.pages:
            self.state = SendState.RUNNING
            self.lease_end_s = now + self.desk.rules.lease_s
            self._say(now)
        if self.state is SendState.RUNNING and self.source.complete:
            self.state = SendState.PARKED
            self.park_end_s = now + self.desk.rules.park_s
        elif self.state is SendState.STREAMING:
            self._post(now)
            if self.source.complete and not self.ops and self.sent == len(self.source.pages):
                self.state, self.written_s = SendState.SENT, now
                self._say(now)

    def leased(self, now: float) -> None:
        self.heard = True
        self.lease_end_s = now + self.desk.rules.lease_s

    def reserved(self, now: float, message: wire.PagesReserved) -> None:
        self.leased(now)
        if self.state in (SendState.RUNNING, SendState.PARKED):
            pages = self.desk.pages_of(self.source.total_tokens)
            if message.cached + len(message.pages) != pages:
                self.fail(
                    now,
                    f"{message.cached} + {len(message.pages)} pages were reserved, the request has {pages}",
                )
                return
            self.reservation, self.reserved_s = message, now
            self.sent = self.edge = message.cached
            self.state = SendState.STREAMING
            self.source.keep()
        if self.reservation is not None and message.generation == self.reservation.generation:
            self._send(
                wire.TransferStarted(self.id, self.link.local, self.link.remote, message.generation)
            )
            self.advance(now)

    def wrote(self, now: float, op: int, error: str, checksum: int | None) -> None:
        self.written += self._landed(op)
        if not self.ops:
            self.sending_s += now - self.since_s
        self.checksum = (
            None
            if self.checksum is None or checksum is None
            else (self.checksum + checksum) & (1 << 63) - 1
        )
        if self.state is SendState.ABORTING:
            if not self.ops:
                self._leave()
        elif error:
            self.fail(now, f"link to {self.link.worker}: {error}")
        else:
            self.advance(now)
        self.source.settle()

    def acked(self, now: float) -> None:
        if self.state is SendState.SENT:
            self.state = SendState.RELEASED
            self.forget(self)
            self.source.sender = None
            self.source.end(now, HandoffOutcome.SENT, times=self._times(now), to=self.link.worker)

    def _times(self, now: float) -> HandoffTimes:
        source, began = self.source, self.source.started_s
        return HandoffTimes(
            admitted_s=source.admitted_s - began,
            reserved_s=self.reserved_s - began,
            prefilled_s=source.prefilled_s - began,
            written_s=self.written_s - began,
            adopted_s=now - began,
            page_layers=self.written,
            sending_s=self.sending_s,
        )

    def tick(self, now: float) -> None:
        rules = self.desk.rules
        if self.state is SendState.ABORTING:
            if now >= self.stopped_s + rules.drain_s:
                self.desk.condemned.append(self.link)
        elif self.state in (SendState.RUNNING, SendState.PARKED) and now >= self.lease_end_s:
            self.fail(now, f"{self.link.worker} has not named the handoff for {rules.lease_s} s")
        elif self.state is SendState.PARKED and now >= self.park_end_s:
            self.fail(now, f"{self.link.worker} had no room for {rules.park_s} s")
        elif self.state is SendState.NEW:
            return
        elif now >= self.repeat_s and (not self.heard or self.state is SendState.SENT):
            self._say(now)

    # ------------------------------------------------------------ ends

    def fail(self, now: float, reason: str) -> None:
        """The decode side or the link is at fault: another attempt may follow."""
        if self.state not in (SendState.ABORTING, SendState.RELEASED):
            self.stop(now, reason)
            self.source.attempt_failed(self.id, reason)

    def stop(self, now: float, reason: str) -> None:
        """Post nothing more; leave when nothing is in flight."""
        self.reason = reason[:500]
        self.state = SendState.ABORTING
        self.stopped_s = now
        for op in self.ops:
            self.desk.do(CancelWrite(op))
        if self.ops:
            self._send(
                wire.AbortHandoff(
                    self.id, self.link.local, self.link.remote, self._generation, self.reason
                )
            )
        else:
            self._leave()

    def fenced(self, now: float) -> None:
        """The link is gone, and with it whatever was in flight."""
        for op in tuple(self.ops):
            self._landed(op)
        if self.state is SendState.ABORTING:
            self._leave()
        self.source.settle()

    def _leave(self) -> None:
        self.state = SendState.RELEASED
        self._send(
            wire.HandoffDrained(
                self.id, self.link.local, self.link.remote, self._generation, self.reason
            )
        )
        self.forget(self)

    # ------------------------------------------------------------ posting

    def _post(self, now: float) -> None:
        """Post what is computed and not posted yet, as far as the grain allows."""
        source, layers, grain = self.source, self.desk.geometry.layers, self.source.grain
        if not source.pages or (grain is TransferGranularity.PROMPT and not source.complete):
            return
        if not self.ops:
            self.since_s = now
        full = source.page_edge(source.tokens)
        if self.sent < full and self.edge > self.sent:
            self._write(self.edge_layers, layers, self.sent, min(self.edge, full))
            self.sent = min(self.edge, full)
        if self.sent < full:
            self._write(0, layers, self.sent, full)
            self.sent = full
        if self.edge <= self.sent:
            self.edge, self.edge_layers = self.sent, 0
        ahead = source.page_edge(source.ahead)
        if (
            grain is TransferGranularity.LAYER
            and ahead > self.sent
            and source.layers > self.edge_layers
        ):
            if not self.edge_layers:
                self.edge = ahead
            self._write(self.edge_layers, source.layers, self.sent, self.edge)
            self.edge_layers = source.layers

    def _write(self, first_layer: int, last_layer: int, first_page: int, last_page: int) -> None:
        """Post layers [first_layer, last_layer) of pages [first_page, last_page) of the request."""
        reservation, most = self.reservation, self.desk.rules.write_pages
        assert self.state is SendState.STREAMING and reservation is not None, (
            "a write is posted outside STREAMING"
        )
        if first_layer == last_layer:
            return
        for start in range(first_page, last_page, most):
            end = min(start + most, last_page)
            op = self.desk.new_op(self.id)
            self.ops[op] = (end - start) * (last_layer - first_layer)
            self.source.in_flight += 1
            destinations = reservation.pages[start - reservation.cached : end - reservation.cached]
            sources = self.source.pages[start:end]
            self.desk.do(
                WriteKv(
                    op,
                    self.link.local,
                    reservation.generation,
                    first_layer,
                    last_layer,
                    sources,
                    destinations,
                )
            )

    def _landed(self, op: int) -> int:
        self.source.in_flight -= 1
        self.desk.writes.pop(op, None)
        return self.ops.pop(op)

    # ------------------------------------------------------------ talking

    @property
    def _generation(self) -> int:
        return 0 if self.reservation is None else self.reservation.generation

    def _say(self, now: float) -> None:
        """Say (again) what the decode worker has not answered yet."""
        self.repeat_s = now + self.desk.rules.resend_s
        ends = (self.id, self.link.local, self.link.remote, self._generation)
        if self.state is SendState.SENT:
            assert self.source.first is not None
            self._send(wire.TransferDone(*ends, self.source.first, self.written, self.checksum))
        else:
            self._send(wire.HandoffOffer(*ends, self.source.arrive, self.source.deadline_s - now))

    def _send(self, message: wire.Message) -> None:
        if not self.link.dead:
            self.desk.do(SendMessage(self.link.local, message))
