"""One request: what its timing record needs, and where it stands in the engine.

Only the engine changes a Request; policies read it. `computed_tokens` <= `scheduled_tokens`; the
tokens between them are in flight.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from counterpoint.types import AddRequest, FinishReason, RequestTiming


class Phase(enum.Enum):
    WAITING = "waiting"  # holds nothing
    PREFILL = "prefill"  # holds a slot and pages; computed_tokens < prefill_target
    DECODE = "decode"  # one token at a time
    HELD = "held"  # holds a slot and pages that others read or write (types.DisaggRole)
    DONE = "done"  # the client has its finish; steps in flight may still name a slot and pages


# For loops: looking up a member of an Enum is slow.
WAITING, PREFILL, DECODE, DONE = Phase.WAITING, Phase.PREFILL, Phase.DECODE, Phase.DONE


@dataclass(slots=True, eq=False)
class RequestLifetime:
    """What a request's timing record is made of, in an engine as in a pool.

    `token_s`: time of each output token. `cached_tokens`: of the prompt, at first admission.
    """

    input: AddRequest
    arrival_s: float
    admitted_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    token_s: list[float] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.input.id

    def to_timing(self, now: float, finish: FinishReason) -> RequestTiming:
        return RequestTiming(
            id=self.id,
            arrival_s=self.arrival_s,
            admitted_s=self.admitted_s,
            finished_s=now,
            prompt_tokens=len(self.input.prompt),
            cached_tokens=self.cached_tokens,
            token_s=tuple(self.token_s),
            finish_reason=finish,
            preemptions=self.preemptions,
        )


@dataclass(slots=True, eq=False)
class Request(RequestLifetime):
    """Tokens [0, computed_tokens) are in the KV cache.

    Those in [computed_tokens, scheduled_tokens) are in flight.
    """

    arrival_index: int = 0  # breaks ties between requests of one priority
    phase: Phase = Phase.WAITING
    output: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()  # with the end-of-sequence ids that count
    # Tokens to compute before decoding: the prompt, and after a preemption the output so far.
    prefill_target: int = 0
    scheduled_tokens: int = 0
    computed_tokens: int = 0
    open_passes: int = 0  # passes not yet complete that name this request
    lane: int = -1  # of its latest pass
    slot: int = -1
    slot_initialised: bool = False  # the executor has its row
    pages: list[int] = field(default_factory=list)  # block table
    pages_sent: int = 0  # of `pages`, those the executor knows
    # Of the full pages of prompt + output, as far as computed.
    page_hashes: list[bytes] = field(default_factory=list)
    registered_pages: int = 0  # pages offered to the prefix cache
    # Prompt tokens whose log-probabilities the client has, from the second on.
    prompt_logprobs_sent: int = 0
    # While it waits: tokens at its beginning that are cached or being computed, as last seen.
    matched_tokens: int = 0
    blocked_since_s: float | None = None  # since when it is first in line and does not fit
    preempt_pending: bool = False  # to be preempted when its passes are complete
    pinned: bool = False  # its pages stay until ResumeDecode or Release, whatever its phase
    # The next token may be scheduled before the last has come back, up to this output length.
    lookahead_limit: int = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.input.sampling
        self.lookahead_limit = 0 if sampling.is_synchronous else sampling.max_tokens - 1

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.input.prompt, *self.output) if self.output else self.input.prompt

    def token_slice(self, start: int, end: int) -> tuple[int, ...]:
        """tokens[start:end] without building the rest."""
        prompt = self.input.prompt
        if end <= len(prompt):
            return prompt[start:end]
        return (*prompt[start:], *self.output[max(0, start - len(prompt)) : end - len(prompt)])

    @property
    def reusable_tokens(self) -> int:
        """Tokens at its beginning that need no computation; while it waits, as last seen."""
        return self.computed_tokens or self.matched_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens to compute before its first output token; while it waits, as last seen."""
        return max(1, (self.prefill_target or len(self.input.prompt)) - self.reusable_tokens)

    @property
    def unscheduled_tokens(self) -> int:
        return self.prefill_target - self.scheduled_tokens

    @property
    def max_cache_tokens(self) -> int:
        """Cache positions it can ever need (the last token is never fed back)."""
        return len(self.input.prompt) + self.input.sampling.max_tokens - 1

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: higher priority first, then arrival."""
        return (-self.input.priority, self.arrival_index)
