"""The host's part of a step: how long a launch keeps the host busy, and the start on an idle
device.

Both are fitted to measurements; what was not measured is 0. The device's part is in fitted.py.

A pass costs the host something per step, per layer launched, per prompt, and for decodes in the
same pass. A step of decodes alone, which is one CUDA graph, costs something per step and row.
Passes padded to a bucket are captured in pieces and launch faster than larger ones: they are a kind
of their own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from counterpoint.cost_model.calibration import Calibration, CalibrationPoint
from counterpoint.cost_model.regression import least_squares
from counterpoint.types import BatchShape

# Prior guesses, in seconds.
DECODE = (3e-4, 2e-4)  # a step; 256 rows of it
PASS = (1e-3, 8e-3, 2e-4, 2e-3)  # a step; all layers; a prompt; decodes in the pass
PRIOR_SPREAD = 20.0  # prior deviation from the guess, relative
KEPT_SHARE = 0.85  # of the points nearest to a first fit; drops outliers of a busy host
HOST_BOUND_RATIO = 1.1  # a step is host-bound below this many times its launch
MIN_POINTS = 4  # host-bound steps, to know how much longer than its launch they take


class LaunchOverhead:
    """Of the steps of `table`. All zero if the table has no host times."""

    def __init__(self, table: Calibration) -> None:
        self._largest = table.pass_buckets[-1] if table.pass_buckets else 0
        seen: dict[str, list[CalibrationPoint]] = {}
        for point in table.points:
            if point.host_s and not point.held_out:
                seen.setdefault(self.kind(point.work), []).append(point)
        self._costs = {kind: fit_launch_costs(points) for kind, points in seen.items()}
        starts = {
            kind: [p.start_s for p in points if p.start_s and not p.co_running]
            for kind, points in seen.items()
        }
        self._starts = {kind: statistics.median(some) for kind, some in starts.items() if some}
        bound = [
            p.seconds / p.host_s
            for points in seen.values()
            for p in points
            if p.seconds < HOST_BOUND_RATIO * p.host_s and not p.co_running
        ]
        self.host_bound_factor = (
            max(1.0, statistics.median(bound)) if len(bound) >= MIN_POINTS else 1.0
        )

    @property
    def is_measured(self) -> bool:
        return bool(self._costs)

    def kind(self, work: BatchShape) -> str:
        """decode; or a pass with prompt tokens: filled (up to a bucket) or large."""
        if not work.prefill_tokens:
            return "decode"
        return "filled" if work.prefill_tokens + work.decode_batch <= self._largest else "large"

    def seconds(self, work: BatchShape) -> float:
        """How long the host is busy launching a step."""
        found = self._costs.get(self.kind(work))
        if found is None:
            return 0.0
        if not work.prefill_tokens:
            return found[0] + found[1] * work.decode_batch / 256
        seconds = found[0] + found[1] * (work.last_layer - work.first_layer) / work.layers
        if work.first_layer == 0:
            seconds += found[2] * work.prefill_requests + (found[3] if work.decode_batch else 0.0)
        return seconds

    def floor_s(self, work: BatchShape) -> float:
        """The least time of a step among others: the host can't launch faster."""
        return self.host_bound_factor * self.seconds(work)

    def start_s(self, work: BatchShape) -> float:
        """How much longer a step takes on an idle device than behind another."""
        return self._starts.get(self.kind(work), 0.0)

    def is_host_bound(self, point: CalibrationPoint) -> bool:
        """Whether the host set the pace of what was measured."""
        return point.seconds < HOST_BOUND_RATIO * self.host_bound_factor * point.host_s


def fit_launch_costs(points: Sequence[CalibrationPoint]) -> tuple[float, ...]:
    """The costs of a launch, from points of one kind, in the order of DECODE or PASS."""
    decodes = not points[0].work.prefill_tokens
    guesses = DECODE if decodes else PASS
    table = []
    for p in points:
        work = p.work
        if decodes:
            sizes = (1.0, work.decode_batch / 256)
        else:
            sizes = (
                float(p.steps),
                1.0,
                float(work.prefill_requests),
                float(work.decode_batch > 0),
            )
        table.append(([size * guess for size, guess in zip(sizes, guesses, strict=True)], p.host_s))
    found = least_squares(table, [(1.0, PRIOR_SPREAD)] * len(guesses))
    table.sort(
        key=lambda row: abs(sum(a * b for a, b in zip(row[0], found, strict=True)) / row[1] - 1)
    )
    found = least_squares(
        table[: math.ceil(KEPT_SHARE * len(table))], [(1.0, PRIOR_SPREAD)] * len(guesses)
    )
    return tuple(factor * guess for factor, guess in zip(found, guesses, strict=True))
