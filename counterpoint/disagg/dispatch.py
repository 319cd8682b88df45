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
    arrive: AddRequest
    avoid: str = ""


class RetryDecode(NamedTuple):
    """Choose another decode worker, say `sent_to` and tell `prefill` with Redirect; or say `no_worker`."""

    prefill: str
    source: HandoffId
    handoff: HandoffId
    avoid: str


class DecodeInPlace(NamedTuple):
    """Tell `prefill` with Stay."""

    prefill: str
    source: HandoffId


class ReleaseSource(NamedTuple):
    """Tell `prefill` with Settle."""

    prefill: str
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

    arrive: AddRequest
    retries: int = 1
    on_loss: OnLoss = OnLoss.FAIL
    may_stay: bool = True
    attempt: int = 1
    source: int = 1
    prefill: str = ""
    decode: str = ""
    tokens: list[int] = field(default_factory=list)
    base: int = 0  # position of the token that the current source samples
    held: dict[int, SampledToken] = field(default_factory=dict)
    prompt_told: int = 0
    prompt_heard: int = 0
    settled: bool = False  # adopted, or it stays: no attempt of this source follows
    gone: set[str] = field(default_factory=set)  # workers of this attempt that were lost
    end: tuple[int, RequestFinished] | None = None  # and how many tokens come before it
    over: bool = False

    @property
    def handoff(self) -> HandoffId:
        return HandoffId(self.arrive.id, self.attempt)

    @property
    def source_id(self) -> HandoffId:
        return HandoffId(self.arrive.id, self.source)

    def begin(self) -> list[Action]:
        return [Restart(self.handoff, self.arrive)]

    def sent_to(self, prefill: str, decode: str) -> None:
        """The current attempt runs on these workers; one and the same does all of it, and nothing is handed on."""
        self.prefill, self.decode = prefill, decode
        self.settled = prefill == decode

    # ------------------------------------------------------------ tokens

    def took(
        self,
        handoff: HandoffId,
        part: DisaggRole,
        offset: int,
        tokens: tuple[SampledToken, ...],
        finish: RequestFinished | None = None,
    ) -> list[Action]:
        """What an engine says of its part: tokens, counted from the prefill worker's first (`offset` 0), and maybe the end. An
        attempt that does not count any more is not listened to."""
        counts = self.source if part is DisaggRole.PREFILL else self.attempt
        if self.over or handoff.attempt != counts:
            return []
        for position, token in enumerate(tokens, self.base + offset):
            if position >= len(self.tokens):
                self.held[position] = token
        if finish is not None:
            self.end = (self.base + offset + len(tokens), finish)
        return self._flow()

    def told(
        self, handoff: HandoffId, part: DisaggRole, prompt_logprobs: tuple[TokenLogprobs, ...]
    ) -> list[Action]:
        """What an engine says of the prompt, in order. A source that starts again tells what the client knows already."""
        if self.over or handoff.attempt != (
            self.source if part is DisaggRole.PREFILL else self.attempt
        ):
            return []
        fresh = prompt_logprobs[max(0, self.prompt_told - self.prompt_heard) :]
        self.prompt_heard += len(prompt_logprobs)
        self.prompt_told = max(self.prompt_told, self.prompt_heard)
        return [DeliverPromptLogprobs(fresh), *self._flow()] if fresh else []

    @property
    def untold(self) -> bool:
        """Something is still to be told of the prompt: tokens, which may come another way, wait for it."""
        return (
            self.arrive.sampling.prompt_logprobs is not None
            and self.prompt_told < len(self.arrive.prompt) - 1
        )

    def _flow(self) -> list[Action]:
        """Deliver what has become continuous, and the end if nothing is missing before it."""
        if self.untold and (
            self.end is None or self.end[1].finish in (FinishReason.STOP, FinishReason.LENGTH)
        ):
            return []
        start, new = len(self.tokens), []
        while (token := self.held.pop(len(self.tokens), None)) is not None:
            self.tokens.append(token.token)
            new.append(token)
        actions: list[Action] = [DeliverTokens(start, tuple(new))] if new else []
        if self.end is not None and len(self.tokens) >= self.end[0]:
            self.over = True
            actions.append(self.end[1])
        return actions

    # ------------------------------------------------------------ what workers report

    def ended(self, report: HandoffEnded) -> list[Action]:
        """A worker's word on its part. That a decode worker failed is no news: the prefill worker hears of it and says Reroute,
        and when that one is lost, `lost` is called."""
        if self.over or report.handoff.attempt != (
            self.source if report.part is DisaggRole.PREFILL else self.attempt
        ):
            return []
        if report.outcome in (HandoffOutcome.ADOPTED, HandoffOutcome.SENT):
            self.settled = True
            first = () if report.first_token is None else (report.first_token,)
            actions = self.took(self.source_id, DisaggRole.PREFILL, 0, first)
            return actions if self.over else [*actions, *self._check_lost()]
        adopted = self.settled and self.decode != self.prefill
        if (
            report.part is DisaggRole.PREFILL
            and report.outcome in (HandoffOutcome.FAILED, HandoffOutcome.ABORTED)
            and not adopted
        ):
            return self._retry(report.reason or report.outcome.value, self.prefill)
        return []

    def rerouted(self, report: Reroute) -> list[Action]:
        """The prefill worker can't hand it over, as far as it sees."""
        if self.over or report.handoff.attempt != self.attempt or self.settled:
            return [ReleaseSource(self.prefill, report.source, "decided otherwise")]
        failed, stale = self.decode, self.handoff
        self.attempt += 1
        self.held.clear()
        self.gone.discard(failed)
        if self.retries <= 0:
            return [CancelAttempt(failed, stale), *self._stay(report.reason)]
        self.retries -= 1
        return [
            CancelAttempt(failed, stale),
            RetryDecode(self.prefill, self.source_id, self.handoff, failed),
        ]

    def no_worker(self) -> list[Action]:
        """Nobody was found for Again or Elsewhere."""
        reason = "no worker can take the request"
        return self._stay(reason) if self.source < self.attempt else self._fail(reason)

    def lost(self, worker: str) -> list[Action]:
        """A worker's process is gone, and whatever it did not report never will be. To be called for every living request."""
        if self.over or worker not in (self.prefill, self.decode):
            return []
        self.gone.add(worker)
        return self._check_lost()

    def withdrawn(self) -> list[Action]:
        """The client is gone."""
        if self.over:
            return []
        self.over = True
        return self._drops()

    # ------------------------------------------------------------ what follows

    def _check_lost(self) -> list[Action]:
        """Who must be there for the request to go on: the decode worker once it has adopted it, before that the prefill worker
        (which will say Reroute if it is the decode worker that is lost), and while it has not told all of the prompt."""
        for needed in (
            self.decode if self.settled else self.prefill,
            *([self.prefill] if self.untold else []),
        ):
            if needed in self.gone:
                return self._retry(f"worker {needed} was lost", needed)
        return []

    def _stay(self, reason: str) -> list[Action]:
        if not self.may_stay:
            return [ReleaseSource(self.prefill, self.source_id, reason), *self._fail(reason)]
        self.settled, self.decode = True, self.prefill
        return [DecodeInPlace(self.prefill, self.source_id), *self._check_lost()]

    def _retry(self, reason: str, avoid: str) -> list[Action]:
        """Start again from the tokens that the client has, if that is allowed."""
        if self.retries <= 0 or (self.tokens and self.on_loss is OnLoss.FAIL):
            return self._fail(reason)
        self.retries -= 1
        drops = self._drops()
        self.attempt += 1
        self.source = self.attempt
        self.base = len(self.tokens)
        self.held.clear()
        self.gone.clear()
        self.settled, self.end, self.prompt_heard = False, None, 0
        return [
            *drops,
            Restart(
                self.handoff,
                msgspec.structs.replace(self.arrive, generated_prefix=tuple(self.tokens)),
                avoid,
            ),
        ]

    def _drops(self) -> list[Action]:
        parts = ((self.prefill, self.source_id), (self.decode, self.handoff))
        return [CancelAttempt(worker, handoff) for worker, handoff in parts if worker]

    def _fail(self, reason: str) -> list[Action]:
        self.over = True
        return [*self._drops(), RequestFinished(FinishReason.ERROR, reason, worker_lost=True)]
