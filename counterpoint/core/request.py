"""Request: the one mutable noun of the core.

Owns: where a request stands. Promises: `computed` <= `scheduled`; what is between them is in flight.
Must not: be changed by anything but the engine; policies read it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from counterpoint.core.life import RequestLifetime


class Phase(enum.Enum):
    WAITING = "waiting"  # holds nothing
    PREFILL = "prefill"  # holds a slot and pages; computed < target
    DECODE = "decode"  # one token at a time
    HELD = "held"  # holds a slot and pages that others read or write (types.Part)
    DONE = "done"  # the client has its finish; a slot and pages may wait for steps in flight


WAITING, PREFILL, DECODE, DONE = (
    Phase.WAITING,
    Phase.PREFILL,
    Phase.DECODE,
    Phase.DONE,
)  # for loops: an Enum is slow to look into


@dataclass(slots=True, eq=False)
class Request(RequestLifetime):
    """Token positions are half-open: [0, computed) are in the KV cache, [computed, scheduled) are in flight."""

    arrival_index: int = 0  # order of arrival: breaks ties
    phase: Phase = Phase.WAITING
    output: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()  # those that end its answer
    prefill_target: int = 0  # tokens that must be computed before decoding: the prompt, and after a preemption the output so far
    scheduled_tokens: int = 0
    computed_tokens: int = 0
    open_passes: int = 0  # passes not yet complete that name this request
    lane: int = -1  # of its latest pass
    slot: int = -1
    slot_initialised: bool = False  # the executor has its row
    pages: list[int] = field(default_factory=list)  # block table
    pages_sent: int = 0  # of `pages`, those the executor knows
    page_hashes: list[bytes] = field(
        default_factory=list
    )  # of the full pages of prompt + output, as far as computed
    registered_pages: int = 0  # pages offered to the prefix index
    prompt_logprobs_sent: int = (
        0  # prompt tokens whose log-probabilities the client has, from the second on
    )
    matched_tokens: int = 0  # of one that waits: tokens at its beginning that are in the cache or soon will be, as last seen
    blocked_since_s: float | None = None  # since when it is first in line and does not fit
    preempt_pending: bool = False  # to be preempted when its passes are complete
    pinned: bool = False  # its pages stay until Adopt or Release, whatever becomes of it
    lookahead_limit: int = field(
        init=False
    )  # tokens of its answer up to which the next may be scheduled before the last has come back

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
        """Tokens at its beginning that need not be computed any more; of one that waits, as far as is known."""
        return self.computed_tokens or self.matched_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens still to be computed before its first one; of one that waits, as far as is known."""
        return max(1, (self.prefill_target or len(self.input.prompt)) - self.reusable_tokens)

    @property
    def unscheduled_tokens(self) -> int:
        return self.prefill_target - self.scheduled_tokens

    @property
    def max_cache_tokens(self) -> int:
        """Positions it can ever need in the cache (the last token is never fed back)."""
        return len(self.input.prompt) + self.input.sampling.max_tokens - 1

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: higher priority first, then arrival."""
        return (-self.input.priority, self.arrival_index)
