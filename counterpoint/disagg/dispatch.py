"""Dispatch: one request's way through the pools, seen from the front.

Owns: which attempt counts, the retry budget, and the client's token stream. Promises: the client gets each token once, in order,
and one end; tokens of an attempt that was given up are never delivered; at most `retries` further attempts are made.
Must not: choose workers (router.py does), know links, read a clock.

An attempt may run whole on one worker. Otherwise it has a *source* (the attempt that started its prefill, on worker `prefill`) and
a decode worker. Attempts of one source differ only in the decode worker, and are made only while none has adopted it; when they are
used up, the request stays where it was prefilled. When a worker is lost on which it depends, the request starts again behind the
tokens that the client has (`AddRequest.generated_prefix`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from counterpoint.disagg.handoff_events import HandoffEnded, HandoffOutcome, Reroute
from counterpoint.disagg.messages import HandoffId, SampledToken
from counterpoint.types import AddRequest, DisaggRole, FinishReason, TokenLogprobs


class OnLoss(enum.StrEnum):
    """What happens when a worker is lost after the client has seen a token."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


class DeliverTokens(NamedTuple):
    """To the client: tokens from position `start` of the answer."""

    start: int
    tokens: tuple[SampledToken, ...]


class DeliverPromptLogprobs(NamedTuple):
    """To the client: log-probabilities of the prompt's next tokens."""

    prompt_logprobs: tuple[TokenLogprobs, ...]


class RequestFinished(NamedTuple):
    """To the client: the end. `lost`: no worker could finish it; the request itself is not to blame."""

    finish: FinishReason
    error: str = ""
    stop_reason: int | None = None
    worker_lost: bool = False


class Restart(NamedTuple):
    """Choose a prefill and a decode worker and say `sent_to`, or `no_worker`. `avoid`: what just failed it."""

    handoff: HandoffId
    request: AddRequest
    avoid: str = ""


class RetryDecode(NamedTuple):
    """Choose another decode worker, say `sent_to` and tell `prefill` with Redirect; or say `no_worker`."""

    prefill_worker: str
    source: HandoffId
    handoff: HandoffId
    avoid: str


class DecodeInPlace(NamedTuple):
    """Tell `prefill` with Stay."""

    prefill_worker: str
    source: HandoffId


class ReleaseSource(NamedTuple):
    """Tell `prefill` with Settle."""

    prefill_worker: str
    source: HandoffId
    reason: str


class CancelAttempt(NamedTuple):
    """Tell `worker` with Withdraw."""

    worker: str
    handoff: HandoffId


Action = (
    DeliverTokens
    | DeliverPromptLogprobs
    | RequestFinished
    | Restart
    | RetryDecode
    | DecodeInPlace
    | ReleaseSource
    | CancelAttempt
)


@dataclass(slots=True, eq=False)
class RequestDispatch:
    """`tokens`: those the client has. `held`: tokens that overtook one before them, by position. `may_stay`: prefill workers may
    decode what nobody takes. `prompt_told`: prompt tokens of whose log-probabilities the client knows, `prompt_heard` those the
    current source has told."""

    request: AddRequest
    retries: int = 1
    on_loss: OnLoss = OnLoss.FAIL
    decode_in_place: bool = True
    attempt: int = 1
    source_attempt: int = 1
    prefill_worker: str = ""
    decode_worker: str = ""
    tokens: list[int] = field(default_factory=list)
    base_position: int = 0  # position of the token that the current source samples
    early_tokens: dict[int, SampledToken] = field(default_factory=dict)
    prompt_logprobs_delivered: int = 0
    prompt_logprobs_received: int = 0
    settled: bool = False  # adopted, or it stays: no attempt of this source follows
    lost_workers: set[str] = field(default_factory=set)  # workers of this attempt that were lost
    pending_finish: tuple[int, RequestFinished] | None = None  # and how many tokens come before it
    is_over: bool = False

    @property
    def handoff(self) -> HandoffId:
        return HandoffId(self.request.id, self.attempt)

    @property
    def source_id(self) -> HandoffId:
        return HandoffId(self.request.id, self.source_attempt)

    def start(self) -> list[Action]:
        return [Restart(self.handoff, self.request)]

    def assign(self, prefill: str, decode: str) -> None:
        """The current attempt runs on these workers; one and the same does all of it, and nothing is handed on."""
        self.prefill_worker, self.decode_worker = prefill, decode
        self.settled = prefill == decode

    # ------------------------------------------------------------ tokens

    def on_tokens(
        self,
        handoff: HandoffId,
        part: DisaggRole,
        offset: int,
        tokens: tuple[SampledToken, ...],
        finish: RequestFinished | None = None,
    ) -> list[Action]:
        """What an engine says of its part: tokens, counted from the prefill worker's first (`offset` 0), and maybe the end. An
        attempt that does not count any more is not listened to."""
        counts = self.source_attempt if part is DisaggRole.PREFILL else self.attempt
        if self.is_over or handoff.attempt != counts:
            return []
        for position, token in enumerate(tokens, self.base_position + offset):
            if position >= len(self.tokens):
                self.early_tokens[position] = token
        if finish is not None:
            self.pending_finish = (self.base_position + offset + len(tokens), finish)
        return self._deliver()

    def on_prompt_logprobs(
        self, handoff: HandoffId, part: DisaggRole, prompt_logprobs: tuple[TokenLogprobs, ...]
    ) -> list[Action]:
        """What an engine says of the prompt, in order. A source that starts again tells what the client knows already."""
        if self.is_over or handoff.attempt != (
            self.source_attempt if part is DisaggRole.PREFILL else self.attempt
        ):
            return []
        fresh = prompt_logprobs[
            max(0, self.prompt_logprobs_delivered - self.prompt_logprobs_received) :
        ]
        self.prompt_logprobs_received += len(prompt_logprobs)
        self.prompt_logprobs_delivered = max(
            self.prompt_logprobs_delivered, self.prompt_logprobs_received
        )
        return [DeliverPromptLogprobs(fresh), *self._deliver()] if fresh else []

    @property
    def prompt_logprobs_pending(self) -> bool:
        """Something is still to be told of the prompt: tokens, which may come another way, wait for it."""
        return (
            self.request.sampling.prompt_logprobs is not None
            and self.prompt_logprobs_delivered < len(self.request.prompt) - 1
        )

    def _deliver(self) -> list[Action]:
        """Deliver what has become continuous, and the end if nothing is missing before it."""
        if self.prompt_logprobs_pending and (
            self.pending_finish is None
            or self.pending_finish[1].finish in (FinishReason.STOP, FinishReason.LENGTH)
        ):
            return []
        start, new = len(self.tokens), []
        while (token := self.early_tokens.pop(len(self.tokens), None)) is not None:
            self.tokens.append(token.token)
            new.append(token)
        actions: list[Action] = [DeliverTokens(start, tuple(new))] if new else []
        if self.pending_finish is not None and len(self.tokens) >= self.pending_finish[0]:
            self.is_over = True
            actions.append(self.pending_finish[1])
        return actions

    # ------------------------------------------------------------ what workers report

    def on_ended(self, report: HandoffEnded) -> list[Action]:
        """A worker's word on its part. That a decode worker failed is no news: the prefill worker hears of it and says Reroute,
        and when that one is lost, `lost` is called."""
        if self.is_over or report.handoff.attempt != (
            self.source_attempt if report.disagg_role is DisaggRole.PREFILL else self.attempt
        ):
            return []
        if report.outcome in (HandoffOutcome.ADOPTED, HandoffOutcome.SENT):
            self.settled = True
            first = () if report.first_token is None else (report.first_token,)
            actions = self.on_tokens(self.source_id, DisaggRole.PREFILL, 0, first)
            return actions if self.is_over else [*actions, *self._check_lost()]
        adopted = self.settled and self.decode_worker != self.prefill_worker
        if (
            report.disagg_role is DisaggRole.PREFILL
            and report.outcome in (HandoffOutcome.FAILED, HandoffOutcome.ABORTED)
            and not adopted
        ):
            return self._retry(report.reason or report.outcome.value, self.prefill_worker)
        return []

    def on_reroute(self, report: Reroute) -> list[Action]:
        """The prefill worker can't hand it over, as far as it sees."""
        if self.is_over or report.handoff.attempt != self.attempt or self.settled:
            return [ReleaseSource(self.prefill_worker, report.source, "decided otherwise")]
        failed, stale = self.decode_worker, self.handoff
        self.attempt += 1
        self.early_tokens.clear()
        self.lost_workers.discard(failed)
        if self.retries <= 0:
            return [CancelAttempt(failed, stale), *self._stay_in_place(report.reason)]
        self.retries -= 1
        return [
            CancelAttempt(failed, stale),
            RetryDecode(self.prefill_worker, self.source_id, self.handoff, failed),
        ]

    def on_no_worker(self) -> list[Action]:
        """Nobody was found for Again or Elsewhere."""
        reason = "no worker can take the request"
        return (
            self._stay_in_place(reason)
            if self.source_attempt < self.attempt
            else self._fail(reason)
        )

    def on_worker_lost(self, worker: str) -> list[Action]:
        """A worker's process is gone, and whatever it did not report never will be. To be called for every living request."""
        if self.is_over or worker not in (self.prefill_worker, self.decode_worker):
            return []
        self.lost_workers.add(worker)
        return self._check_lost()

    def abort(self) -> list[Action]:
        """The client is gone."""
        if self.is_over:
            return []
        self.is_over = True
        return self._cancel_attempts()

    # ------------------------------------------------------------ what follows

    def _check_lost(self) -> list[Action]:
        """Who must be there for the request to go on: the decode worker once it has adopted it, before that the prefill worker
        (which will say Reroute if it is the decode worker that is lost), and while it has not told all of the prompt."""
        for needed in (
            self.decode_worker if self.settled else self.prefill_worker,
            *([self.prefill_worker] if self.prompt_logprobs_pending else []),
        ):
            if needed in self.lost_workers:
                return self._retry(f"worker {needed} was lost", needed)
        return []

    def _stay_in_place(self, reason: str) -> list[Action]:
        if not self.decode_in_place:
            return [ReleaseSource(self.prefill_worker, self.source_id, reason), *self._fail(reason)]
        self.settled, self.decode_worker = True, self.prefill_worker
        return [DecodeInPlace(self.prefill_worker, self.source_id), *self._check_lost()]

    def _retry(self, reason: str, avoid: str) -> list[Action]:
        """Start again from the tokens that the client has, if that is allowed."""
        if self.retries <= 0 or (self.tokens and self.on_loss is OnLoss.FAIL):
            return self._fail(reason)
        self.retries -= 1
        drops = self._cancel_attempts()
        self.attempt += 1
        self.source_attempt = self.attempt
        self.base_position = len(self.tokens)
        self.early_tokens.clear()
        self.lost_workers.clear()
        self.settled, self.pending_finish, self.prompt_logprobs_received = False, None, 0
        return [
            *drops,
            Restart(
                self.handoff,
                msgspec.structs.replace(self.request, generated_prefix=tuple(self.tokens)),
                avoid,
            ),
        ]

    def _cancel_attempts(self) -> list[Action]:
        parts = ((self.prefill_worker, self.source_id), (self.decode_worker, self.handoff))
        return [CancelAttempt(worker, handoff) for worker, handoff in parts if worker]

    def _fail(self, reason: str) -> list[Action]:
        self.is_over = True
        return [
            *self._cancel_attempts(),
            RequestFinished(FinishReason.ERROR, reason, worker_lost=True),
        ]
