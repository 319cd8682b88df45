"""The prefill of a request that is to be handed over, as a pure state machine.

Owns: the request's pages here, how far they are computed, its first token. Promises: pages go back
to the engine once, when the request is decided here and no write reads them; one HandoffEnded per
request. When the decode side of an attempt fails, the next attempt (sender.py) starts from the same
source, without prefilling again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from counterpoint.disagg.handoff_context import HandoffContext, PageHold
from counterpoint.disagg.handoff_events import (
    HandoffEnded,
    HandoffOutcome,
    HandoffTimes,
    Reroute,
    ToEngine,
    TransferGranularity,
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

if TYPE_CHECKING:
    from counterpoint.disagg.sender import HandoffSender


@dataclass(slots=True, eq=False)
class PrefillSource:
    """`id` is its first attempt, `sender` the current one (None between two). `deadline_s` is on
    this worker's clock. Tokens [0, tokens) are computed in every layer, [tokens, ahead) in the
    first `layers`. `in_flight`: writes that read its pages."""

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
    tokens: int = 0
    ahead: int = 0
    layers: int = 0
    first_token: SampledToken | None = None
    decode_in_place: bool = False
    outcome: HandoffOutcome | None = None
    in_flight: int = 0
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
        part = msgspec.structs.replace(
            self.request, id=self.engine_request_id, disagg_role=DisaggRole.PREFILL
        )
        self.context.emit(ToEngine(part))

    def complete_pages(self, tokens: int) -> int:
        """Pages that are complete when `tokens` tokens are; the last one may be partly filled."""
        if tokens >= self.total_tokens:
            return len(self.pages)
        return tokens // self.context.geometry.page_tokens

    # ------------------------------------------------------------ engine

    def on_admitted(self, now: float, event: Admitted) -> None:
        if self.outcome is not None:
            return
        self.pages, self.admitted_s = event.pages, now
        self.tokens = self.ahead = event.cached_pages * self.context.geometry.page_tokens
        self.context.ledger.hold(self.engine_request_id, self.page_hold, event.pages)
        self._advance(now)

    def on_computed(self, now: float, event: Computed) -> None:
        self.tokens = event.tokens
        self.ahead, self.layers = event.partial_tokens, event.partial_layers
        self._advance(now)

    def on_output(self, now: float, delta: OutputDelta) -> None:
        reason = delta.finish_reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.end(now, HandoffOutcome.FINISHED)
        elif reason is not None:
            aborted = reason is FinishReason.ABORT
            outcome = HandoffOutcome.ABORTED if aborted else HandoffOutcome.FAILED
            self.end(now, outcome, delta.error)
        elif self.first_token is None and delta.tokens:  # prompt logprobs come before
            self.prefilled_s = now
            logprobs = delta.logprobs[0] if delta.logprobs else None
            self.first_token = SampledToken(delta.tokens[0], logprobs, delta.cached_tokens)
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
        """Decode here, when it is prefilled and no write of an earlier attempt is in flight."""
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
        """Pages are PARKED while they are complete and no decode worker takes them."""
        waiting = self.complete and (self.sender is None or self.sender.parked)
        hold = PageHold.PARKED if waiting else PageHold.SENDING
        if hold is not self.page_hold and self.pages and self.outcome is None:
            self.page_hold = hold
            self.context.ledger.change_hold(self.engine_request_id, hold)

    def release_if_unread(self) -> None:
        """Leave the pages to the engine if no write reads them and the request is decided."""
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
