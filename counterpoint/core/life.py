"""Life: a request as its record will tell of it.

Owns: the record. Promises: the same of an engine's request as of a pool's. Must not: know where a request stands, or who is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from counterpoint.types import AddRequest, FinishReason, RequestTiming


@dataclass(slots=True, eq=False)
class RequestLifetime:
    """`token_s`: of each output token."""

    input: AddRequest
    arrival_s: float
    admitted_s: float | None = None
    cached_tokens: int = 0  # of the prompt, at first admission
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
