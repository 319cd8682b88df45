"""Belief: what a policy expects of a step, corrected by what steps really took.

Owns: the corrections. Promises: a prediction costs one call of the estimator and a look-up; a correction moves slowly and is
bounded, so one odd step changes little.
Must not: be the physics of anything (the simulator has its own).

Two corrections per cell: the mean ratio of actual to predicted time, and a *guard* on top of it, which follows a high quantile of
that ratio (after MuxWise's contention guard, ASPLOS'26): it rises by much when a step took longer than guarded, and sinks by little
when not, so how many are slow counts, not how slow they are (stochastic approximation of a quantile: Robbins and Monro 1951).
A cell is (kind of step, units) for a step alone; beside another also the prompt tokens and the decode context that meet, in powers
of four. A cell that has learned nothing yet takes over from the nearest one that has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from counterpoint.interfaces import Estimator
from counterpoint.types import BatchShape, Step, StepDone

LEARN, FIRST = 0.1, 0.5  # weight of the newest step in the mean ratio; of the first one that counts
HIGH, PACE = (
    0.9,
    0.05,
)  # the quantile that the guard follows; a slower step raises it by HIGH * PACE, others lower it by the rest
FADES, FADE = (
    64,
    0.5,
)  # every so many steps, what is left of the guard of a cell that none of them was in
RATIO_DECAY = 0.9  # and of its ratio, as a power: what is never chosen would else never be found to have become better
TOLERANCE = 0.005  # a step that is slower by no more than so much is as expected
MIN_TIME_SHARE = 0.5  # share of a step's time from which on it says something about the cell
LEAST, MOST = 0.2, 5.0  # bounds of a correction
ODD, ODD_FIRST = (
    1.5,
    2.0,
)  # what took so many times longer or shorter than expected teaches no more than what took just that
MAX_ERRORS = 512  # latest errors of each kind
SMALL_BITS, SIZES = 11, 4  # sizes: under 2K, 8K, 32K, and beyond
BUCKET_DISTANCE = (
    16  # one size up is as far away as so many units, another kind of company as all of them
)

CoRunning = tuple[BatchShape, int]


class CorrectionCell(msgspec.Struct, frozen=True, order=True, gc=False):
    """`tokens`, `context`: sizes of what meets, -1 for a step alone."""

    kind: str
    units: int
    tokens_bucket: int = -1
    context_bucket: int = -1

    def distance(self, other: CorrectionCell) -> int:
        alone = (self.tokens_bucket < 0) != (other.tokens_bucket < 0)
        sizes = abs(self.tokens_bucket - other.tokens_bucket) + abs(
            self.context_bucket - other.context_bucket
        )
        return abs(self.units - other.units) + (1000 if alone else BUCKET_DISTANCE * sizes)

    @property
    def name(self) -> str:
        if self.tokens_bucket < 0:
            return f"{self.kind} on {self.units}"
        return f"{self.kind} on {self.units}, prompts {SIZE_NAMES[self.tokens_bucket]}, context {SIZE_NAMES[self.context_bucket]}"


SIZE_NAMES = ("<2K", "<8K", "<32K", ">=32K")
SIZE_BY_BITS = tuple(min(SIZES - 1, max(0, (bits - SMALL_BITS + 1) // 2)) for bits in range(65))


def cell_of(work: BatchShape, units: int, co_running: CoRunning | None) -> CorrectionCell:
    if co_running is None:
        return CorrectionCell(work.kind, units)
    other = co_running[0]
    tokens, context = (
        work.prefill_tokens + other.prefill_tokens,
        work.decode_context + other.decode_context,
    )
    return CorrectionCell(
        work.kind, units, SIZE_BY_BITS[tokens.bit_length()], SIZE_BY_BITS[context.bit_length()]
    )


@dataclass(slots=True, eq=False)
class Correction:
    """Of one cell: mean ratio of actual to predicted time, and the guard on top of it."""

    ratio: float = 1.0
    guard: float = 1.0
    used_recently: bool = True  # has been met lately


class StepSpan(msgspec.Struct, frozen=True, gc=False):
    """When a step ran. `until`: the id of the step that ran beside it at its end, if one did."""

    step: Step
    started_s: float
    ended_s: float
    failed: bool
    co_running_id: int | None


class OnlineCostModel:
    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.version = 0  # grows when corrections have moved by some per cent
        self._corrections: dict[CorrectionCell, Correction] = {}
        self._first_seen: set[CorrectionCell] = set()
        self._nearest: dict[
            CorrectionCell, Correction
        ] = {}  # of the known cell that speaks for this one
        self._errors: dict[str, deque[float]] = {}
        self._drift = 0.0
        self._spans: list[
            StepSpan
        ] = []  # of the steps that may have run beside one that is not yet judged
        self._pending: list[StepSpan] = []
        self._observed_steps = 0

    def seconds(self, work: BatchShape, units: int, co_running: CoRunning | None = None) -> float:
        """Expected duration, in seconds."""
        return (
            self.estimator.seconds(work, units, co_running)
            * self._correction(cell_of(work, units, co_running)).ratio
        )

    def expected_and_guarded_s(
        self, work: BatchShape, units: int, co_running: CoRunning | None = None
    ) -> tuple[float, float]:
        """Expected duration, and one that most such steps stay under."""
        correction = self._correction(cell_of(work, units, co_running))
        expected_s = self.estimator.seconds(work, units, co_running) * correction.ratio
        return expected_s, expected_s * correction.guard

    def observe(self, step: Step, done: StepDone, co_running: Step | None) -> None:
        """A step has come back, while `beside` still runs. It is judged when the latter has come back too: only then it is known
        since when they ran side by side."""
        own = StepSpan(
            step,
            done.started_s,
            done.ended_s,
            bool(done.error),
            co_running.id if co_running is not None else None,
        )
        self._spans.append(own)
        waiting: list[StepSpan] = []
        for span in (*self._pending, own):
            if span.co_running_id is None or span.co_running_id == step.id:
                self._learn(span)
            else:
                waiting.append(span)
        self._pending = waiting
        since_s = min([span.started_s for span in waiting], default=done.ended_s)
        self._spans = [span for span in self._spans if span.ended_s > since_s]
        self._observed_steps += 1
        if self._observed_steps % FADES == 0:
            self._decay_unused()

    def _learn(self, span: StepSpan) -> None:
        """Learn from a step what the state in which it ran the longest, alone or beside another, does to it."""
        took_s = span.ended_s - span.started_s
        if took_s <= 0 or span.failed:
            return
        ran_s, progress = self._time_by_cell(span, took_s)
        cell = max(ran_s, key=lambda each: ran_s[each])
        if ran_s[cell] < MIN_TIME_SHARE * took_s:
            return
        before = self._correction(cell).ratio
        elsewhere = sum(
            [
                share / self._correction(each).ratio
                for each, share in progress.items()
                if each != cell
            ]
        )
        over = (
            elsewhere + progress[cell] / before
        )  # the share of the step that was expected to be done by now: over 1, it is slow
        self._errors.setdefault(cell.kind, deque(maxlen=MAX_ERRORS)).append(abs(1 / over - 1))
        own, learn, odd = self._corrections.get(cell), LEARN, ODD
        if own is None:
            if (
                cell not in self._first_seen
            ):  # the first of its kind may have waited for what is done once
                self._first_seen.add(cell)
                return
            own, learn, odd = self._corrections.setdefault(cell, Correction()), FIRST, ODD_FIRST
            self._nearest.clear()
        actual = progress[cell] / max(1 - elsewhere, progress[cell] / MOST)
        own.ratio = before + learn * (max(LEAST, before / odd, min(before * odd, actual)) - before)
        own.guard = max(
            1.0, own.guard + PACE * (HIGH if over > own.guard + TOLERANCE else HIGH - 1)
        )
        own.used_recently = True
        self._drift += abs(own.ratio / before - 1)
        if self._drift > 0.05:
            self._drift = 0.0
            self.version += 1

    def _time_by_cell(
        self, span: StepSpan, took_s: float
    ) -> tuple[dict[CorrectionCell, float], dict[CorrectionCell, float]]:
        """Of a step: how long it ran in which cell, and which share of it the estimator says is done in that time."""
        work, units = span.step.work, span.step.units
        ran_s: dict[CorrectionCell, float] = {}
        progress: dict[CorrectionCell, float] = {}
        alone_s = took_s
        for other in self._spans:
            both_s = min(span.ended_s, other.ended_s) - max(span.started_s, other.started_s)
            if both_s > 0 and other.step.lane != span.step.lane:
                beside = (other.step.work, other.step.units)
                cell = cell_of(work, units, beside)
                ran_s[cell] = ran_s.get(cell, 0.0) + both_s
                progress[cell] = progress.get(cell, 0.0) + both_s / self.estimator.seconds(
                    work, units, beside
                )
                alone_s -= both_s
        if alone_s > 0:
            cell = cell_of(work, units, None)
            ran_s[cell], progress[cell] = alone_s, alone_s / self.estimator.seconds(work, units)
        return ran_s, progress

    def _decay_unused(self) -> None:
        """What has not been tried lately: a bad experience must not rule it out for good."""
        for own in self._corrections.values():
            if not own.used_recently:
                before = own.ratio * own.guard
                own.ratio **= RATIO_DECAY
                own.guard = 1 + (own.guard - 1) * FADE
                self._drift += abs(own.ratio * own.guard / before - 1)
            own.used_recently = False

    def errors(self) -> tuple[tuple[str, float, float, int], ...]:
        """By kind of step: median and 95th percentile of |predicted - actual| / actual of the latest ones, and their number."""
        return tuple(
            (kind, _quantile(errors, 0.5), _quantile(errors, 0.95), len(errors))
            for kind, errors in sorted(self._errors.items())
        )

    def cells(self) -> tuple[tuple[str, float, float], ...]:
        """Every correction: (cell, mean ratio of actual to predicted, guard on top of it)."""
        return tuple(
            (cell.name, own.ratio, own.guard) for cell, own in sorted(self._corrections.items())
        )

    def _correction(self, cell: CorrectionCell) -> Correction:
        """Of the cell itself if it is known, else of the nearest known one of its kind, if there is one."""
        found = self._nearest.get(cell)
        if found is None:
            near = (other for other in self._corrections if other.kind == cell.kind)
            nearest = min(near, key=cell.distance, default=None)
            found = self._nearest[cell] = (
                Correction() if nearest is None else self._corrections[nearest]
            )
        return found


def _quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
