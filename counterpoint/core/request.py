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

    serial: int = 0  # order of arrival: breaks ties
    phase: Phase = Phase.WAITING
    output: list[int] = field(default_factory=list)
    last_tokens: frozenset[int] = frozenset()  # those that end its answer
    target: int = 0  # tokens that must be computed before decoding: the prompt, and after a preemption the output so far
    scheduled: int = 0
    computed: int = 0
    passes: int = 0  # passes not yet complete that name this request
    lane: int = -1  # of its latest pass
    slot: int = -1
    opened: bool = False  # the executor has its row
    pages: list[int] = field(default_factory=list)  # block table
    pages_sent: int = 0  # of `pages`, those the executor knows
    names: list[bytes] = field(
        default_factory=list
    )  # of the full pages of prompt + output, as far as computed
    published: int = 0  # pages offered to the prefix index
    prompt_told: int = 0  # prompt tokens whose log-probabilities the client has, from the second on
    found: int = 0  # of one that waits: tokens at its beginning that are in the cache or soon will be, as last seen
    blocked_s: float | None = None  # since when it is first in line and does not fit
    yielding: bool = False  # to be preempted when its passes are complete
    kept: bool = False  # its pages stay until Adopt or Release, whatever becomes of it
    runs_ahead: int = field(
        init=False
    )  # tokens of its answer up to which the next may be scheduled before the last has come back

    def __post_init__(self) -> None:
        sampling = self.arrive.sampling
        self.runs_ahead = 0 if sampling.lockstep else sampling.max_tokens - 1

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.arrive.prompt, *self.output) if self.output else self.arrive.prompt

    def slice(self, start: int, end: int) -> tuple[int, ...]:
        """tokens[start:end] without building the rest."""
        prompt = self.arrive.prompt
        if end <= len(prompt):
            return prompt[start:end]
        return (*prompt[start:], *self.output[max(0, start - len(prompt)) : end - len(prompt)])

    @property
    def covered(self) -> int:
        """Tokens at its beginning that need not be computed any more; of one that waits, as far as is known."""
        return self.computed or self.found

    @property
    def left(self) -> int:
        """Tokens still to be computed before its first one; of one that waits, as far as is known."""
        return max(1, (self.target or len(self.arrive.prompt)) - self.covered)

    @property
    def remaining_prefill(self) -> int:
        return self.target - self.scheduled

    @property
    def most_tokens(self) -> int:
        """Positions it can ever need in the cache (the last token is never fed back)."""
        return len(self.arrive.prompt) + self.arrive.sampling.max_tokens - 1

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: higher priority first, then arrival."""
        return (-self.arrive.priority, self.serial)
