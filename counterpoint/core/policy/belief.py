"""Belief: what a policy expects of a step, corrected by what steps really took.

Owns: the corrections. Promises: a prediction costs one call of the estimator and a look-up; a correction moves slowly and is
bounded, so one odd step changes little.
Must not: be the physics of anything (the simulator has its own).

Two corrections per cell (kind of step, units, alone or beside another): the mean ratio of actual to predicted time, and a *guard*
on top of it, which follows a high quantile of that ratio (the contention guard of MuxWise, ASPLOS'26): it rises fast when a
step took longer than guarded, and decays slowly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from counterpoint.ports import Estimator
from counterpoint.types import Step, StepDone, Work

Cell = tuple[str, int, bool]

LEARN = 0.1  # weight of the newest step in the mean ratio
RAISE, DECAY = 0.3, 0.01  # of the guard's distance to a slower, a faster step
LEAST, MOST = 0.2, 5.0  # bounds of a correction
KEPT = 512  # latest errors of each kind


class Belief:
    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.ratio: dict[Cell, float] = {}
        self.guard: dict[Cell, float] = {}
        self.version = 0  # grows when corrections have moved by some per cent
        self._errors: dict[str, deque[float]] = {}
        self._moved = 0.0

    def seconds(self, work: Work, units: int, beside: tuple[Work, int] | None = None) -> float:
        """Expected duration, in seconds."""
        return self.estimator.seconds(work, units, beside) * self._ratio((work.kind, units, beside is not None))

    def guarded(self, work: Work, units: int, beside: tuple[Work, int] | None = None) -> float:
        """A duration that most such steps stay under."""
        cell = (work.kind, units, beside is not None)
        return self.estimator.seconds(work, units, beside) * self._ratio(cell) * self.guard.get(cell, 1.0)

    def observe(self, step: Step, done: StepDone, beside: Step | None) -> None:
        took = done.ended_s - done.started_s
        if took <= 0 or done.error:
            return
        other = (beside.work, beside.units) if beside is not None else None
        raw = self.estimator.seconds(step.work, step.units, other)
        if raw <= 0:
            return
        kind = step.work.kind
        cell = (kind, step.units, other is not None)
        before = self._ratio(cell)
        expected = raw * before
        self._errors.setdefault(kind, deque(maxlen=KEPT)).append(abs(expected - took) / took)
        actual = min(MOST, max(LEAST, took / raw))
        known = cell in self.ratio
        self.ratio[cell] = before + LEARN * (actual - before) if known else before + 0.5 * (actual - before)
        over = took / expected
        guard = self.guard.get(cell, 1.0)
        self.guard[cell] = max(1.0, guard + (RAISE if over > guard else DECAY) * (min(over, 2.0) - guard))
        self._moved += abs(self.ratio[cell] / before - 1)
        if self._moved > 0.05:
            self._moved = 0.0
            self.version += 1

    def errors(self) -> tuple[tuple[str, float, float, int], ...]:
        """By kind of step: median and 95th percentile of |predicted - actual| / actual of the latest ones, and their number."""
        return tuple(
            (kind, _quantile(errors, 0.5), _quantile(errors, 0.95), len(errors)) for kind, errors in sorted(self._errors.items())
        )

    def cells(self) -> tuple[tuple[str, float, float], ...]:
        """Every correction: (cell, mean ratio of actual to predicted, guard on top of it)."""
        return tuple((_name(cell), self.ratio[cell], self.guard[cell]) for cell in sorted(self.ratio))

    def _ratio(self, cell: Cell) -> float:
        """The cell's correction; before it has one, that of the nearest units of its kind."""
        if cell in self.ratio:
            return self.ratio[cell]
        near = [known for known in self.ratio if known[0] == cell[0]]
        if not near:
            return 1.0
        return self.ratio[min(near, key=lambda known: (abs(known[1] - cell[1]), known[2] != cell[2]))]


def _name(cell: Cell) -> str:
    kind, units, beside = cell
    return f"{kind} on {units}{' beside' if beside else ''}"


def _quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
