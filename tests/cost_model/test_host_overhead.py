"""Launch overhead: measured costs come back, outliers do not count, the rest is 0."""

from __future__ import annotations

import random

import msgspec
import pytest

from counterpoint.cost_model.calibration import (
    Calibration,
    CalibrationKey,
    CalibrationPoint,
    shape_key,
)
from counterpoint.cost_model.fitted import Fitted
from counterpoint.cost_model.host_overhead import LaunchOverhead
from counterpoint.cost_model.roofline import Roofline
from counterpoint.spec.device import H200
from counterpoint.spec.presets import PRESETS
from counterpoint.types import BatchShape

LLAMA = PRESETS["llama-3.1-8b"]
LAYERS = LLAMA.layers
PRIOR = Roofline(LLAMA, H200)
KEY = CalibrationKey(
    device="NVIDIA H200",
    units=132,
    model=shape_key(LLAMA),
    dtype="bfloat16",
    kv_dtype="bfloat16",
    kernels="k1",
)


def table(points: list[CalibrationPoint]) -> Calibration:
    return Calibration(key=KEY, pass_buckets=(512,), points=points)


def launch_s(work: BatchShape, steps: int = 1) -> float:
    if not work.prefill_tokens:
        return 3e-4 + 1e-6 * work.decode_batch
    return (
        (2e-3 if work.prefill_tokens <= 512 else 9e-3) + 5e-4 * steps + 1e-4 * work.prefill_requests
    )


def points(seconds: float = 1.0, noise: float = 0.0, hiccups: int = 0) -> list[CalibrationPoint]:
    chance = random.Random(0)
    works = [(BatchShape.decode(b, b * 100, LAYERS), 1) for b in (1, 8, 64, 200)]
    works += [
        (BatchShape.prefill(n, 0, LAYERS, prompts=k), steps)
        for n in (64, 200, 1000, 3000)
        for k in (1, 2)
        for steps in (1, 2, 8)
    ]
    found = []
    for number, (work, steps) in enumerate(works * 2):
        host_s = (
            launch_s(work, steps)
            * (1 + chance.uniform(-noise, noise))
            * (5 if number < hiccups else 1)
        )
        found.append(
            CalibrationPoint(work, 132, seconds, host_s=host_s, steps=steps, start_s=host_s / 2)
        )
    return found


@pytest.mark.parametrize("hiccups", [0, 1])
def test_launch_costs_are_recovered(hiccups: int):
    launching = LaunchOverhead(table(points(noise=0.05, hiccups=hiccups)))
    for work in (
        BatchShape.decode(100, 100 * 9, LAYERS),
        BatchShape.prefill(100, 0, LAYERS),
        BatchShape.prefill(4000, 0, LAYERS, prompts=4),
    ):
        assert launching.seconds(work) == pytest.approx(launch_s(work), rel=0.12)
    quarter = msgspec.structs.replace(
        BatchShape.prefill(4000, 0, LAYERS), first_layer=8, last_layer=16
    )
    assert launching.seconds(quarter) == pytest.approx(9e-3 / 4 + 5e-4, rel=0.12)
    assert launching.start_s(BatchShape.decode(1, 9, LAYERS)) == pytest.approx(1.8e-4, rel=0.3)


def test_a_table_without_host_times_gives_zero():
    launching = LaunchOverhead(
        table([CalibrationPoint(BatchShape.prefill(64, 0, LAYERS), 132, 0.01)])
    )
    assert not launching.is_measured
    assert (
        launching.seconds(BatchShape.prefill(64, 0, LAYERS))
        == launching.start_s(BatchShape.decode(1, 9, LAYERS))
        == 0.0
    )
    assert not launching.is_host_bound(launching_point(0.01, 0.0))


def launching_point(seconds: float, host_s: float) -> CalibrationPoint:
    return CalibrationPoint(BatchShape.prefill(1000, 0, LAYERS), 132, seconds, host_s=host_s)


def test_host_bound_steps_take_somewhat_longer_than_their_launch():
    """All took a twentieth longer than their launch: so does what was not measured."""
    bound = [msgspec.structs.replace(p, seconds=1.05 * p.host_s) for p in points()]
    launching = LaunchOverhead(table(bound))
    work = BatchShape.prefill(100, 0, LAYERS)
    assert launching.floor_s(work) == pytest.approx(1.05 * launching.seconds(work))
    assert all(launching.is_host_bound(p) for p in bound)
    assert not launching.is_host_bound(launching_point(0.02, 0.01))


def test_a_neighbour_that_waits_for_the_host_slows_less():
    """The slower a prefill is launched, the less of the time it runs."""
    prefill, decode = BatchShape.prefill(600, 0, LAYERS), BatchShape.decode(32, 32 * 1000, LAYERS)
    found = []
    for host_s in (1e-3, 0.04, 0.4):
        fitted = Fitted(
            table([CalibrationPoint(prefill, 100, max(0.02, host_s), host_s=host_s)] * 4), PRIOR
        )
        found.append(fitted.seconds(decode, 32, (prefill, 100)))
        assert fitted.seconds(prefill, 100) == pytest.approx(max(0.02, host_s), rel=0.15)
    alone_s = PRIOR.seconds(decode, 32)
    assert found[0] > found[1] > found[2] > alone_s
    assert found[2] < 1.05 * alone_s
