"""The expected duration of steps: an estimator, corrected by what steps really took.

A prediction costs one call of the estimator and a look-up. A correction moves slowly and is
bounded, so one odd step changes little. Simulated devices have cost models of their own.

Each cell has two corrections. One is the mean ratio of actual to predicted time. The other is a
*guard* on top of it (after MuxWise's contention guard, ASPLOS'26). The guard rises by 0.045 after a
step slower than guarded and falls by 0.005 after any other, so it tracks the 90th percentile. Only
how many steps are slow counts, not how slow they are (stochastic approximation of a quantile:
Robbins and Monro 1951).

The cell of a step that runs alone is (kind of step, units). Beside another step, it also has the
prompt tokens and the decode context of both, in powers of four. A cell that has learned nothing
uses the corrections of the nearest cell that has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from counterpoint.interfaces import CoRunning, Estimator
from counterpoint.types import BatchShape, Step, StepDone

RATIO_WEIGHT, FIRST_WEIGHT = 0.1, 0.5  # of the newest step in the mean ratio; of a cell's first
# The guard rises by QUANTILE * GUARD_RATE, or falls by (1 - QUANTILE) * GUARD_RATE.
QUANTILE, GUARD_RATE = 0.9, 0.05
# Every so many steps, the corrections of cells that none of them was in decay towards 1. Else an
# option that is never chosen could not be found to have become better.
DECAY_STEPS = 64
GUARD_DECAY = 0.5  # share of the guard above 1 that is left
RATIO_DECAY = 0.9  # exponent of the ratio
TOLERANCE = 0.005  # a step slower by no more than this is as expected
MIN_TIME_SHARE = 0.5  # of a step's time in one cell, for the step to count for that cell
MIN_RATIO, MAX_RATIO = 0.2, 5.0
# An outlier counts as this many times slower or faster than expected, no more.
MAX_OUTLIER, MAX_FIRST_OUTLIER = 1.5, 2.0
MAX_ERRORS = 512  # latest errors of each kind
VERSION_DRIFT = 0.05  # summed relative change of corrections that starts a new version
SMALL_BITS, SIZES = 11, 4  # size buckets: under 2K, 8K, 32K, and beyond
# One bucket up is as far away as this many units; alone against co-running is farther than all.
BUCKET_DISTANCE, ALONE_DISTANCE = 16, 1000


class CorrectionCell(msgspec.Struct, frozen=True, order=True, gc=False):
    """The buckets are of the prompt tokens and the decode context of both steps; -1: alone."""

    kind: str
    units: int
    tokens_bucket: int = -1
    context_bucket: int = -1

    def distance(self, other: CorrectionCell) -> int:
        alone = (self.tokens_bucket < 0) != (other.tokens_bucket < 0)
        sizes = abs(self.tokens_bucket - other.tokens_bucket) + abs(
            self.context_bucket - other.context_bucket
        )
        return abs(self.units - other.units) + (
            ALONE_DISTANCE if alone else BUCKET_DISTANCE * sizes
        )

    @property
    def name(self) -> str:
        if self.tokens_bucket < 0:
            return f"{self.kind} on {self.units}"
        prompts, context = SIZE_NAMES[self.tokens_bucket], SIZE_NAMES[self.context_bucket]
        return f"{self.kind} on {self.units}, prompts {prompts}, context {context}"


SIZE_NAMES = ("<2K", "<8K", "<32K", ">=32K")
SIZE_BY_BITS = tuple(min(SIZES - 1, max(0, (bits - SMALL_BITS + 1) // 2)) for bits in range(65))


def cell_of(work: BatchShape, units: int, co_running: CoRunning | None) -> CorrectionCell:
    if co_running is None:
        return CorrectionCell(work.kind, units)
    other = co_running[0]
    tokens = work.prefill_tokens + other.prefill_tokens
    context = work.decode_context + other.decode_context
    return CorrectionCell(
        work.kind, units, SIZE_BY_BITS[tokens.bit_length()], SIZE_BY_BITS[context.bit_length()]
    )


@dataclass(slots=True, eq=False)
class Correction:
    """Mean ratio of actual to predicted time in one cell, and the guard on top of it."""

    ratio: float = 1.0
    guard: float = 1.0
    used_recently: bool = True


class StepSpan(msgspec.Struct, frozen=True, gc=False):
    """When a step ran. `co_running_id`: the step that still ran on another lane at its end."""

    step: Step
    started_s: float
    ended_s: float
    failed: bool
    co_running_id: int | None


class OnlineCostModel:
    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.version = 0  # grows when corrections have moved by VERSION_DRIFT in all
        self._corrections: dict[CorrectionCell, Correction] = {}
        self._first_seen: set[CorrectionCell] = set()
        # Of cells without a correction: that of the nearest cell.
        self._nearest: dict[CorrectionCell, Correction] = {}
        self._errors: dict[str, deque[float]] = {}
        self._drift = 0.0
        # Steps to learn from later, and all that may have run beside one of them.
        self._pending: list[StepSpan] = []
        self._spans: list[StepSpan] = []
        self._observed_steps = 0

    def seconds(self, work: BatchShape, units: int, co_running: CoRunning | None = None) -> float:
        """Expected duration, in seconds."""
        correction = self._correction(cell_of(work, units, co_running))
        return self.estimator.seconds(work, units, co_running) * correction.ratio

    def expected_and_guarded_s(
        self, work: BatchShape, units: int, co_running: CoRunning | None = None
    ) -> tuple[float, float]:
        """Expected duration, and one that about 90 % of such steps stay under."""
        correction = self._correction(cell_of(work, units, co_running))
        expected_s = self.estimator.seconds(work, units, co_running) * correction.ratio
        return expected_s, expected_s * correction.guard

    def observe(self, step: Step, done: StepDone, co_running: Step | None) -> None:
        """A step has come back, while `co_running` still runs.

        The model learns from it once `co_running` has come back too: only then it is known since
        when they ran side by side.
        """
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
        if self._observed_steps % DECAY_STEPS == 0:
            self._decay_unused()

    def _learn(self, span: StepSpan) -> None:
        """Correct the cell in which the step ran the longest."""
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
        # Share of the step that should be done in the time it took; over 1: the step was slow.
        expected_share = elsewhere + progress[cell] / before
        errors = self._errors.setdefault(cell.kind, deque(maxlen=MAX_ERRORS))
        errors.append(abs(1 / expected_share - 1))
        own, weight, outlier = self._corrections.get(cell), RATIO_WEIGHT, MAX_OUTLIER
        if own is None:
            if cell not in self._first_seen:  # it may include work that is done only once
                self._first_seen.add(cell)
                return
            own, weight, outlier = Correction(), FIRST_WEIGHT, MAX_FIRST_OUTLIER
            self._corrections[cell] = own
            self._nearest.clear()
        actual = progress[cell] / max(1 - elsewhere, progress[cell] / MAX_RATIO)
        actual = max(MIN_RATIO, before / outlier, min(before * outlier, actual))
        own.ratio = before + weight * (actual - before)
        slow = expected_share > own.guard + TOLERANCE
        own.guard = max(1.0, own.guard + GUARD_RATE * (QUANTILE if slow else QUANTILE - 1))
        own.used_recently = True
        self._drift += abs(own.ratio / before - 1)
        if self._drift > VERSION_DRIFT:
            self._drift = 0.0
            self.version += 1

    def _time_by_cell(
        self, span: StepSpan, took_s: float
    ) -> tuple[dict[CorrectionCell, float], dict[CorrectionCell, float]]:
        """By cell: how long the step ran in it, and the share of the step that the estimator
        expects to be done in that time."""
        work, units = span.step.work, span.step.units
        ran_s: dict[CorrectionCell, float] = {}
        progress: dict[CorrectionCell, float] = {}
        alone_s = took_s
        for other in self._spans:
            both_s = min(span.ended_s, other.ended_s) - max(span.started_s, other.started_s)
            if both_s > 0 and other.step.lane != span.step.lane:
                co_running = (other.step.work, other.step.units)
                cell = cell_of(work, units, co_running)
                whole_s = self.estimator.seconds(work, units, co_running)
                ran_s[cell] = ran_s.get(cell, 0.0) + both_s
                progress[cell] = progress.get(cell, 0.0) + both_s / whole_s
                alone_s -= both_s
        if alone_s > 0:
            cell = cell_of(work, units, None)
            ran_s[cell], progress[cell] = alone_s, alone_s / self.estimator.seconds(work, units)
        return ran_s, progress

    def _decay_unused(self) -> None:
        for own in self._corrections.values():
            if not own.used_recently:
                before = own.ratio * own.guard
                own.ratio **= RATIO_DECAY
                own.guard = 1 + (own.guard - 1) * GUARD_DECAY
                self._drift += abs(own.ratio * own.guard / before - 1)
            own.used_recently = False

    def errors(self) -> tuple[tuple[str, float, float, int], ...]:
        """As stats.PolicyReport.errors, by kind of step."""
        return tuple(
            (kind, quantile(errors, 0.5), quantile(errors, 0.95), len(errors))
            for kind, errors in sorted(self._errors.items())
        )

    def cells(self) -> tuple[tuple[str, float, float], ...]:
        """Every correction: (cell, mean ratio of actual to predicted time, guard on top)."""
        return tuple(
            (cell.name, own.ratio, own.guard) for cell, own in sorted(self._corrections.items())
        )

    def _correction(self, cell: CorrectionCell) -> Correction:
        """Of the nearest cell of its kind, which may be itself; neutral if there is none."""
        found = self._nearest.get(cell)
        if found is None:
            near = (other for other in self._corrections if other.kind == cell.kind)
            nearest = min(near, key=cell.distance, default=None)
            found = Correction() if nearest is None else self._corrections[nearest]
            self._nearest[cell] = found
        return found


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
