"""One request's way through the pool, as the frontend sees it.

Owns: which attempt counts, the retry budget, and the client's token stream. Promises: the client
gets each token once, in order, and one end; tokens of an abandoned attempt are never delivered; at
most `retries` further attempts are made. Must not: choose workers, know links, read a clock.

An attempt may run whole on one worker. Otherwise it has a *source*, the attempt that started its
prefill, and a decode worker. Attempts of one source differ only in the decode worker; a new one is
made only while none has adopted the request. When retries are used up, the request is decoded where
it was prefilled. When a worker that it depends on is lost, the request starts again after the
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
    """What happens when a worker is lost after the client has a token."""

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
    """To the client: the end. `worker_lost`: no worker could finish it; the request is valid."""

    finish: FinishReason
    error: str = ""
    stop_reason: int | None = None
    worker_lost: bool = False


class Restart(NamedTuple):
    """Choose workers and call `assign`, else `on_no_worker`. `avoid`: the worker that failed it."""

    handoff: HandoffId
    request: AddRequest
    avoid: str = ""


class RetryDecode(NamedTuple):
    """Choose another decode worker, call `assign` and send Redirect; else call `on_no_worker`."""

    prefill_worker: str
    source: HandoffId
    handoff: HandoffId
    avoid: str


class DecodeInPlace(NamedTuple):
    """Send StayInPlace."""

    prefill_worker: str
    source: HandoffId


class ReleaseSource(NamedTuple):
    """Send SettleSource."""

    prefill_worker: str
    source: HandoffId
    reason: str


class CancelAttempt(NamedTuple):
    """Send WithdrawRequest."""

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
    """`decode_in_place`: the prefill worker may decode what no decode worker takes. `tokens`: what
    the client has. `early_tokens`: by position, tokens that arrived before their predecessors.
    `prompt_logprobs_received`: how many from the current source."""

    request: AddRequest
    retries: int = 1
    on_loss: OnLoss = OnLoss.FAIL
    decode_in_place: bool = True
    attempt: int = 1
    source_attempt: int = 1
    prefill_worker: str = ""
    decode_worker: str = ""
    tokens: list[int] = field(default_factory=list)
    base_position: int = 0  # position of the first token of the current source
    early_tokens: dict[int, SampledToken] = field(default_factory=dict)
    prompt_logprobs_delivered: int = 0
    prompt_logprobs_received: int = 0
    settled: bool = False  # adopted, or decoded in place: no further attempt of this source
    lost_workers: set[str] = field(default_factory=set)  # of this attempt
    pending_finish: tuple[int, RequestFinished] | None = None  # and how many tokens precede it
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
        """The current attempt runs on these workers; if they are one, there is no handoff."""
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
        """An engine's tokens, from position `offset` after the source's first token. An abandoned
        attempt is ignored."""
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
        """In order. A restarted source repeats what the client already has, which is skipped."""
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
        """Tokens, which may come from another worker, wait until all of these are delivered."""
        return (
            self.request.sampling.prompt_logprobs is not None
            and self.prompt_logprobs_delivered < len(self.request.prompt) - 1
        )

    def _deliver(self) -> list[Action]:
        """Deliver the tokens that have no gap before them, and the end if nothing is missing."""
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

    # ------------------------------------------------------------ reports of workers

    def on_ended(self, report: HandoffEnded) -> list[Action]:
        """A failed decode worker needs no action here: the prefill worker notices and reports
        Reroute, and if that one is lost, `on_worker_lost` is called."""
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
        """The prefill worker can't hand it over, as far as it knows."""
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
        """For Restart or RetryDecode."""
        reason = "no worker can take the request"
        return (
            self._stay_in_place(reason)
            if self.source_attempt < self.attempt
            else self._fail(reason)
        )

    def on_worker_lost(self, worker: str) -> list[Action]:
        """Its process is gone. To be called for every unfinished request."""
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
        """Restart if a needed worker is lost: the decode worker once it has adopted the request;
        the prefill worker before that (it reports Reroute if the decode worker is lost) and until
        all prompt log-probabilities are delivered."""
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
        """Start again after the tokens that the client has, if that is allowed."""
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
