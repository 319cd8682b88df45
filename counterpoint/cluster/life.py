"""Life: a request of a pool, as who sent it sees it.

Owns: what its record will say. Promises: pure. Must not: know workers, or who is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from counterpoint.types import Arrive, Finish, Record


@dataclass(slots=True, eq=False)
class Life:
    """Times are those of the front's clock."""

    arrive: Arrive
    arrival_s: float
    admitted_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    token_s: list[float] = field(default_factory=list)

    def record(self, now: float, finish: Finish) -> Record:
        return Record(
            id=self.arrive.id,
            arrival_s=self.arrival_s,
            admitted_s=self.admitted_s,
            finished_s=now,
            prompt_tokens=len(self.arrive.prompt),
            cached_tokens=self.cached_tokens,
            token_s=tuple(self.token_s),
            finish=finish,
            preemptions=self.preemptions,
        )
