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
from counterpoint.disagg.handoff_context import HandoffContext, LinkEnd, PageHold
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

    context: HandoffContext
    id: HandoffId
    request: AddRequest
    deadline_s: float
    started_s: float
    on_done: Callable[[PrefillSource], None]
    granularity: TransferGranularity = TransferGranularity.LAYER
    admitted_s: float = 0.0
    prefilled_s: float = 0.0
    sender: HandoffSender | None = None
    pages: tuple[int, ...] = ()
    tokens: int = 0  # [0, tokens) are computed in every layer,
    ahead: int = 0  # [tokens, ahead) in the first `layers`
    layers: int = 0
    first_token: SampledToken | None = None
    decode_in_place: bool = False
    outcome: HandoffOutcome | None = None
    in_flight: int = 0  # writes that read its pages
    page_hold: PageHold = PageHold.SENDING

    @property
    def total_tokens(self) -> int:
        return len(self.request.prompt) + len(self.request.generated_prefix)

    @property
    def complete(self) -> bool:
        return self.first_token is not None and self.tokens == self.total_tokens

    @property
    def engine_request_id(self) -> str:
        return engine_id(self.id, DisaggRole.PREFILL)

    def start(self) -> None:
        self.context.emit(
            ToEngine(
                msgspec.structs.replace(
                    self.request, id=self.engine_request_id, disagg_role=DisaggRole.PREFILL
                )
            )
        )

    def complete_pages(self, tokens: int) -> int:
        """Pages that are finished when `tokens` tokens are: the last one may be partly filled."""
        return (
            len(self.pages)
            if tokens >= self.total_tokens
            else tokens // self.context.geometry.page_tokens
        )

    # ------------------------------------------------------------ what the engine says

    def on_admitted(self, now: float, event: Admitted) -> None:
        if self.outcome is not None:
            return
        self.pages, self.admitted_s = event.pages, now
        self.tokens = self.ahead = event.cached_pages * self.context.geometry.page_tokens
        self.context.ledger.hold(self.engine_request_id, self.page_hold, event.pages)
        self._advance(now)

    def on_computed(self, now: float, event: Computed) -> None:
        self.tokens, self.ahead, self.layers = (
            event.tokens,
            event.partial_tokens,
            event.partial_layers,
        )
        self._advance(now)

    def on_output(self, now: float, delta: OutputDelta) -> None:
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
        elif self.first_token is None and delta.tokens:  # what is told of the prompt comes before
            self.prefilled_s = now
            self.first_token = SampledToken(
                delta.tokens[0], delta.logprobs[0] if delta.logprobs else None, delta.cached_tokens
            )
            self._advance(now)

    def _advance(self, now: float) -> None:
        if self.sender is not None:
            self.sender.advance(now)
        self.update_hold()
        if self.decode_in_place:
            self.release_if_unread()

    # ------------------------------------------------------------ attempts

    def on_attempt_failed(self, handoff: HandoffId, reason: str) -> None:
        self.sender = None
        if self.outcome is None:
            self.update_hold()
            self.context.emit(Reroute(self.id, handoff, reason))

    def keep_in_place(self) -> None:
        """No further attempt: decode here, as soon as it is prefilled and no earlier attempt's write is in flight."""
        if self.outcome is None and self.sender is None:
            self.decode_in_place = True
            self.release_if_unread()

    def end(
        self,
        now: float,
        outcome: HandoffOutcome,
        reason: str = "",
        times: HandoffTimes | None = None,
        decode_worker: str = "",
    ) -> None:
        """The request is decided as far as this worker goes."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        self.context.emit(
            HandoffEnded(
                self.id,
                DisaggRole.PREFILL,
                outcome,
                reason,
                times=times,
                decode_worker=decode_worker,
            )
        )
        if outcome in (HandoffOutcome.ABORTED, HandoffOutcome.FAILED):
            self.context.emit(ToEngine(EngineAbort(self.engine_request_id)))
        sender, self.sender = self.sender, None
        if sender is not None:
            sender.abort(now, reason or outcome.value)
        self.release_if_unread()

    def tick(self, now: float) -> None:
        if now >= self.deadline_s:
            self.end(now, HandoffOutcome.FAILED, "the handoff's deadline has passed")

    def update_hold(self) -> None:
        """Book the pages as parked while they are complete and nobody takes them."""
        waiting = self.complete and (self.sender is None or self.sender.state is SendState.PARKED)
        hold = PageHold.PARKED if waiting else PageHold.SENDING
        if hold is not self.page_hold and self.pages and self.outcome is None:
            self.page_hold = hold
            self.context.ledger.change_hold(self.engine_request_id, hold)

    def release_if_unread(self) -> None:
        """Leave the pages to the engine when nobody outside needs them."""
        if self.in_flight:
            return
        if self.outcome is not None:
            self._release(Release(self.engine_request_id))
        elif self.decode_in_place and self.complete and self.first_token is not None:
            self.outcome = HandoffOutcome.DECODED_IN_PLACE
            self.context.emit(HandoffEnded(self.id, DisaggRole.PREFILL, self.outcome))
            self._release(ResumeDecode(self.engine_request_id, self.first_token.token))

    def _release(self, event: ResumeDecode | Release) -> None:
        self.context.ledger.drop(self.engine_request_id)
        self.context.emit(ToEngine(event))
        self.on_done(self)


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

    context: HandoffContext
    id: HandoffId
    link: LinkEnd
    source: PrefillSource
    on_done: Callable[[HandoffSender], None]
    state: SendState = SendState.NEW
    acknowledged: bool = False
    repeat_s: float = 0.0
    lease_end_s: float = 0.0
    park_end_s: float = 0.0
    aborted_s: float = 0.0
    reserved_s: float = 0.0
    written_s: float = 0.0
    reservation: wire.PagesReserved | None = None
    posted_pages: int = 0
    partial_pages: int = 0
    partial_layers: int = 0
    writes: dict[int, int] = field(default_factory=dict)  # write in flight -> its page layers
    written_page_layers: int = 0  # page layers
    sending_since_s: float = 0.0  # writes have been in flight,
    sending_s: float = 0.0  # and were before
    checksum: int | None = 0
    reason: str = ""

    # ------------------------------------------------------------ what moves it on

    def advance(self, now: float) -> None:
        """The source has come further, a write has ended, or pages were reserved."""
        if self.state is SendState.NEW and self.source.pages:
            self.state = SendState.RUNNING
            self.lease_end_s = now + self.context.config.lease_s
            self._send_pending(now)
        if self.state is SendState.RUNNING and self.source.complete:
            self.state = SendState.PARKED
            self.park_end_s = now + self.context.config.park_timeout_s
        elif self.state is SendState.STREAMING:
            self._post_writes(now)
            if (
                self.source.complete
                and not self.writes
                and self.posted_pages == len(self.source.pages)
            ):
                self.state, self.written_s = SendState.SENT, now
                self._send_pending(now)

    def renew_lease(self, now: float) -> None:
        self.acknowledged = True
        self.lease_end_s = now + self.context.config.lease_s

    def on_reserved(self, now: float, message: wire.PagesReserved) -> None:
        self.renew_lease(now)
        if self.state in (SendState.RUNNING, SendState.PARKED):
            pages = self.context.num_pages(self.source.total_tokens)
            if message.cached + len(message.pages) != pages:
                self.fail(
                    now,
                    f"{message.cached} + {len(message.pages)} pages were reserved, the request has {pages}",
                )
                return
            self.reservation, self.reserved_s = message, now
            self.posted_pages = self.partial_pages = message.cached
            self.state = SendState.STREAMING
            self.source.update_hold()
        if self.reservation is not None and message.generation == self.reservation.generation:
            self._send(
                wire.TransferStarted(self.id, self.link.local, self.link.remote, message.generation)
            )
            self.advance(now)

    def on_write_done(self, now: float, op: int, error: str, checksum: int | None) -> None:
        self.written_page_layers += self._complete_write(op)
        if not self.writes:
            self.sending_s += now - self.sending_since_s
        self.checksum = (
            None
            if self.checksum is None or checksum is None
            else (self.checksum + checksum) & (1 << 63) - 1
        )
        if self.state is SendState.ABORTING:
            if not self.writes:
                self._release()
        elif error:
            self.fail(now, f"link to {self.link.worker}: {error}")
        else:
            self.advance(now)
        self.source.release_if_unread()

    def on_ack(self, now: float) -> None:
        if self.state is SendState.SENT:
            self.state = SendState.RELEASED
            self.on_done(self)
            self.source.sender = None
            self.source.end(
                now, HandoffOutcome.SENT, times=self._times(now), decode_worker=self.link.worker
            )

    def _times(self, now: float) -> HandoffTimes:
        source, began = self.source, self.source.started_s
        return HandoffTimes(
            admitted_s=source.admitted_s - began,
            reserved_s=self.reserved_s - began,
            prefilled_s=source.prefilled_s - began,
            written_s=self.written_s - began,
            adopted_s=now - began,
            page_layers=self.written_page_layers,
            sending_s=self.sending_s,
        )

    def tick(self, now: float) -> None:
        rules = self.context.config
        if self.state is SendState.ABORTING:
            if now >= self.aborted_s + rules.drain_timeout_s:
                self.context.condemned_links.append(self.link)
        elif self.state in (SendState.RUNNING, SendState.PARKED) and now >= self.lease_end_s:
            self.fail(now, f"{self.link.worker} has not named the handoff for {rules.lease_s} s")
        elif self.state is SendState.PARKED and now >= self.park_end_s:
            self.fail(now, f"{self.link.worker} had no room for {rules.park_timeout_s} s")
        elif self.state is SendState.NEW:
            return
        elif now >= self.repeat_s and (not self.acknowledged or self.state is SendState.SENT):
            self._send_pending(now)

    # ------------------------------------------------------------ ends

    def fail(self, now: float, reason: str) -> None:
        """The decode side or the link is at fault: another attempt may follow."""
        if self.state not in (SendState.ABORTING, SendState.RELEASED):
            self.abort(now, reason)
            self.source.on_attempt_failed(self.id, reason)

    def abort(self, now: float, reason: str) -> None:
        """Post nothing more; leave when nothing is in flight."""
        self.reason = reason[:500]
        self.state = SendState.ABORTING
        self.aborted_s = now
        for op in self.writes:
            self.context.emit(CancelWrite(op))
        if self.writes:
            self._send(
                wire.AbortHandoff(
                    self.id, self.link.local, self.link.remote, self._generation, self.reason
                )
            )
        else:
            self._release()

    def on_link_fenced(self, now: float) -> None:
        """The link is gone, and with it whatever was in flight."""
        for op in tuple(self.writes):
            self._complete_write(op)
        if self.state is SendState.ABORTING:
            self._release()
        self.source.release_if_unread()

    def _release(self) -> None:
        self.state = SendState.RELEASED
        self._send(
            wire.HandoffDrained(
                self.id, self.link.local, self.link.remote, self._generation, self.reason
            )
        )
        self.on_done(self)

    # ------------------------------------------------------------ posting

    def _post_writes(self, now: float) -> None:
        """Post what is computed and not posted yet, as far as the grain allows."""
        source, layers, grain = self.source, self.context.geometry.layers, self.source.granularity
        if not source.pages or (grain is TransferGranularity.PROMPT and not source.complete):
            return
        if not self.writes:
            self.sending_since_s = now
        full = source.complete_pages(source.tokens)
        if self.posted_pages < full and self.partial_pages > self.posted_pages:
            self._write(
                self.partial_layers, layers, self.posted_pages, min(self.partial_pages, full)
            )
            self.posted_pages = min(self.partial_pages, full)
        if self.posted_pages < full:
            self._write(0, layers, self.posted_pages, full)
            self.posted_pages = full
        if self.partial_pages <= self.posted_pages:
            self.partial_pages, self.partial_layers = self.posted_pages, 0
        ahead = source.complete_pages(source.ahead)
        if (
            grain is TransferGranularity.LAYER
            and ahead > self.posted_pages
            and source.layers > self.partial_layers
        ):
            if not self.partial_layers:
                self.partial_pages = ahead
            self._write(self.partial_layers, source.layers, self.posted_pages, self.partial_pages)
            self.partial_layers = source.layers

    def _write(self, first_layer: int, last_layer: int, first_page: int, last_page: int) -> None:
        """Post layers [first_layer, last_layer) of pages [first_page, last_page) of the request."""
        reservation, most = self.reservation, self.context.config.max_write_pages
        assert self.state is SendState.STREAMING and reservation is not None, (
            "a write is posted outside STREAMING"
        )
        if first_layer == last_layer:
            return
        for start in range(first_page, last_page, most):
            end = min(start + most, last_page)
            op = self.context.new_op(self.id)
            self.writes[op] = (end - start) * (last_layer - first_layer)
            self.source.in_flight += 1
            destinations = reservation.pages[start - reservation.cached : end - reservation.cached]
            sources = self.source.pages[start:end]
            self.context.emit(
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

    def _complete_write(self, op: int) -> int:
        self.source.in_flight -= 1
        self.context.writes.pop(op, None)
        return self.writes.pop(op)

    # ------------------------------------------------------------ talking

    @property
    def _generation(self) -> int:
        return 0 if self.reservation is None else self.reservation.generation

    def _send_pending(self, now: float) -> None:
        """Say (again) what the decode worker has not answered yet."""
        self.repeat_s = now + self.context.config.resend_interval_s
        ends = (self.id, self.link.local, self.link.remote, self._generation)
        if self.state is SendState.SENT:
            assert self.source.first_token is not None
            self._send(
                wire.TransferDone(
                    *ends, self.source.first_token, self.written_page_layers, self.checksum
                )
            )
        else:
            self._send(wire.HandoffOffer(*ends, self.source.request, self.source.deadline_s - now))

    def _send(self, message: wire.Message) -> None:
        if not self.link.dead:
            self.context.emit(SendMessage(self.link.local, message))
