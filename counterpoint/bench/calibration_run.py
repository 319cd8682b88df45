"""Runs calibration jobs into a table, within a time budget.

Every point is saved as soon as it is measured. Must not: fit (cost_model/fitted.py does), choose
the jobs, or run a step by itself (device/step_probe.py does).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from counterpoint.bench.calibration_plan import (
    ROWS,
    SUSTAINED,
    CalibrationJob,
    DeviceCapacity,
    uneven_contexts,
)
from counterpoint.cost_model.calibration import (
    CO_RUNNING_KIND,
    Calibration,
    CalibrationPoint,
)
from counterpoint.cost_model.fitted import Fitted
from counterpoint.cost_model.roofline import Roofline
from counterpoint.device.step_probe import CoRun, ProbeTiming, StepProbe
from counterpoint.interfaces import Estimator
from counterpoint.types import BatchShape

SUSTAINED_SHARE, SUSTAINED_MAX_S = 0.02, 6.0  # of the budget, for each; and at most so long
HELD_OUT_SHARE = 0.2  # of the budget, reserved for held-out jobs
MAX_JOB_SHARE = 0.04  # of the budget; a job that needs more is skipped

PointKey = tuple[BatchShape, int, tuple[BatchShape, int] | None]  # work, units, co-running step


class CalibrationRun:
    """Measures jobs into `table`, and calls `save` after each."""

    def __init__(
        self,
        probe: StepProbe,
        table: Calibration,
        prior: Roofline,
        save: Callable[[Calibration], None],
    ) -> None:
        self.probe = probe
        self.table = table
        self.prior = prior
        self.save = save
        self._estimator: Estimator = prior
        self._num_fitted = 0

    def is_measured(self, job: CalibrationJob) -> bool:
        measured = {(p.work, p.units, p.co_running) for p in self.table.points}
        return measured.issuperset(self._point_keys(job))

    def _point_keys(self, job: CalibrationJob) -> list[PointKey]:
        prefill, decode = job.shapes(self.probe.layers)
        if prefill is None or decode is None:
            return [(prefill or decode or BatchShape(), job.units, None)]
        rest = self.probe.units - job.units
        return [(decode, job.units, (prefill, rest)), (prefill, rest, (decode, job.units))]

    def expected_s(self, job: CalibrationJob) -> float:
        """About how long the measurement will take."""
        estimator = self._current_estimator()
        seconds = [estimator.seconds(*key) for key in self._point_keys(job)]
        if len(seconds) == 1:
            return 3.5 * seconds[0]
        decode_s, prefill_s = seconds
        return 4.0 * max(prefill_s, 2.5 * decode_s)

    def measure(self, job: CalibrationJob) -> None:
        timings = self._time(job)
        for (work, units, co_running), timing in zip(self._point_keys(job), timings, strict=True):
            point = CalibrationPoint(
                work,
                units,
                timing.seconds,
                co_running,
                job.held_out,
                timing.host_s,
                timing.steps,
                timing.start_s,
            )
            self.table.points.append(point)
        self.save(self.table)

    def _time(self, job: CalibrationJob) -> Sequence[ProbeTiming]:
        prefill, decode = job.shapes(self.probe.layers)
        if job.contexts:
            self.probe.set_decode_batch(job.contexts)
        if prefill is None and decode is not None:
            return [self.probe.time_decode(decode, job.units)]
        assert prefill is not None
        if job.fused:
            return [self.probe.time_fused(prefill, job.prompts)]
        if decode is None:
            return [self.probe.time_prefill(prefill, job.prompts, job.units)]
        guess = self._solo_s(decode, prefill, job.units)
        return self.probe.time_co_running(CoRun(decode, job.units, prefill, job.prompts, guess))

    def measure_sustained(
        self, capacity: DeviceCapacity, levels: Sequence[int], budget_s: float
    ) -> None:
        """Measure the kinds of SUSTAINED that the table lacks, each within its share of the budget.
        Both steps of a pair count alike, on the middle one of the `levels`."""
        for_s = min(SUSTAINED_MAX_S, SUSTAINED_SHARE * budget_s)
        for kind, prompt, batch in SUSTAINED:
            contexts = uneven_contexts(min(batch[0], capacity.batch), batch[1]) if batch else ()
            units = levels[len(levels) // 2] if kind == CO_RUNNING_KIND else self.probe.units
            job = CalibrationJob((prompt,), contexts, units, fused=kind == "mixed")
            if (
                kind in self.table.on_and_on
                or not capacity.fits(job)
                or self.expected_s(job) > MAX_JOB_SHARE * budget_s
            ):
                continue
            if contexts:
                self.probe.set_decode_batch(contexts)
            self.table.on_and_on[kind] = self._sustained_slowdown(job, for_s)
            self.save(self.table)

    def _sustained_slowdown(self, job: CalibrationJob, for_s: float) -> float:
        prefill, decode = job.shapes(self.probe.layers)
        assert prefill is not None
        if decode is None:
            return self.probe.sustained_slowdown(prefill, job.prompts, for_s)
        guess = self._solo_s(decode, prefill, job.units)
        short, long = (
            self.probe.time_co_running(CoRun(decode, job.units, prefill, job.prompts, guess), s)
            for s in (0.0, for_s)
        )
        return math.sqrt(long[0].seconds / short[0].seconds * long[1].seconds / short[1].seconds)

    def _solo_s(
        self, decode: BatchShape, prefill: BatchShape, decode_units: int
    ) -> tuple[float, float]:
        """Expected seconds of decode and prefill on their units, each alone."""
        estimator, rest = self._current_estimator(), self.probe.units - decode_units
        return estimator.seconds(decode, decode_units), estimator.seconds(prefill, rest)

    def _current_estimator(self) -> Estimator:
        """Fitted to the points measured so far; refitted whenever they are a fifth more."""
        num_points = len(self.table.points)
        if num_points >= max(8, 1.2 * self._num_fitted):
            self._estimator, self._num_fitted = Fitted(self.table, self.prior), num_points
        return self._estimator

    def max_measurable_tokens(self, capacity: DeviceCapacity, budget_s: float) -> int:
        """The longest prompt whose prefill fits a job's share of the budget on an eighth of the
        device."""
        lengths = [n for n in sorted(ROWS) if n <= capacity.rows]
        fitting = [
            n
            for n in lengths
            if 8 * self.prior.seconds(BatchShape.prefill(n, 0, self.probe.layers), self.probe.units)
            <= MAX_JOB_SHARE * budget_s
        ]
        return max(fitting, default=lengths[0])


def run_jobs(
    run: CalibrationRun,
    jobs: Sequence[CalibrationJob],
    held_out: Sequence[CalibrationJob],
    budget_s: float,
    on_progress: Callable[[int, int], None],
) -> int:
    """Measure within `budget_s`; returns how many jobs were skipped for lack of time. Calls
    `on_progress(done, total)` after each job."""
    start_s, num_skipped, done = time.monotonic(), 0, 0
    for some, until_s in ((jobs, budget_s * (1 - HELD_OUT_SHARE)), (held_out, budget_s)):
        for job in some:
            done += 1
            if not run.is_measured(job):
                job_s = run.expected_s(job)
                elapsed_s = time.monotonic() - start_s
                if job_s > MAX_JOB_SHARE * budget_s or elapsed_s + job_s > until_s:
                    num_skipped += 1
                else:
                    run.measure(job)
            on_progress(done, len(jobs) + len(held_out))
    return num_skipped
