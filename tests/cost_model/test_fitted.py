"""The fitted estimator: near what was measured, never worse for few points, and cheap."""

from __future__ import annotations

import random
import statistics
import timeit
from collections.abc import Callable

import pytest
from calibration_tables import (
    LAYERS,
    LEVELS,
    OTHER,
    PRIOR,
    fuse,
    measured,
    off,
    pairs,
    table,
    works,
)
from msgspec.structs import replace as put

from counterpoint.cost_model.calibration import (
    CalibrationPoint,
)
from counterpoint.cost_model.fitted import Fitted
from counterpoint.types import BatchShape


def between(seed: int, count: int = 120) -> list[CalibrationPoint]:
    """Steps that were not measured, on measured units."""
    chance, found = random.Random(seed), []
    for number in range(count):
        n, r = int(2 ** chance.uniform(6, 13)), chance.choice((0, 1024, 5000))
        p = BatchShape.prefill(n, r, LAYERS)
        contexts = [chance.randrange(64, 6000) for _ in range(chance.randrange(1, 129))]
        d = BatchShape.decode(len(contexts), sum(contexts), LAYERS)
        level = chance.choice(LEVELS)
        beside: list[tuple[BatchShape, int, tuple[BatchShape, int] | None]] = [
            (p, chance.choice((132, 132 - level)), None),
            (d, chance.choice((132, level)), None),
            (p, 132 - level, (d, level)),
            (d, level, (p, 132 - level)),
            (fuse(p, d), 132, None),
        ]
        work, units, other = beside[number % len(beside)]
        found.append(CalibrationPoint(work, units, OTHER.seconds(work, units, other), other))
    return found


def test_measured_points_are_predicted_well():
    points = measured(OTHER)
    errors = off(Fitted(table(points), PRIOR), points)
    assert errors[len(errors) // 2] < 0.01
    assert errors[int(0.95 * len(errors))] < 0.04
    assert errors[-1] < 0.10


def test_unmeasured_steps_are_predicted_better_than_by_the_roofline():
    points = between(seed=1)
    fitted, bare = off(Fitted(table(measured(OTHER)), PRIOR), points), off(PRIOR, points)
    assert fitted[len(fitted) // 2] < 0.05 < bare[len(bare) // 2]
    assert fitted[int(0.95 * len(fitted))] < 0.15


def test_points_held_out_are_not_fitted():
    points = measured(OTHER)
    hidden = [CalibrationPoint(p.work, p.units, 10 * p.seconds, p.co_running, True) for p in points]
    work, units = works()[0]
    assert Fitted(table([*points, *hidden]), PRIOR).seconds(work, units) == Fitted(
        table(points), PRIOR
    ).seconds(work, units)
    assert Fitted(table(hidden), PRIOR).seconds(work, units) == PRIOR.seconds(work, units)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_few_points_do_not_make_it_worse_than_the_roofline(count: int):
    everything = [*measured(OTHER), *between(seed=2)]
    bare = statistics.mean(off(PRIOR, everything))
    fitted = [
        statistics.mean(
            off(Fitted(table(random.Random(seed).sample(everything, count)), PRIOR), everything)
        )
        for seed in range(20)
    ]
    assert statistics.mean(fitted) < bare
    assert max(fitted) < 1.25 * bare


def test_an_empty_table_gives_the_roofline():
    empty = Fitted(table([]), PRIOR)
    for work, units in works():
        assert empty.seconds(work, units) == pytest.approx(PRIOR.seconds(work, units))


def test_units_between_two_measured_ones_lie_between():
    fitted = Fitted(table(measured(OTHER)), PRIOR)
    work = BatchShape.decode(64, 64 * 4096, LAYERS)
    assert fitted.seconds(work, 24) > fitted.seconds(work, 32) > fitted.seconds(work, 48)


def test_a_decode_batch_costs_what_its_bucket_does():
    points = [
        CalibrationPoint(BatchShape.decode(b, b * 512, LAYERS), 132, s)
        for b, s in ((8, 0.005), (16, 0.006), (64, 0.009))
    ]
    fitted = Fitted(table(points, buckets=(8, 16, 64)), PRIOR)
    attention = fitted.seconds(BatchShape.decode(64, 64 * 512, LAYERS), 132) - fitted.seconds(
        BatchShape.decode(64, 64 * 256, LAYERS), 132
    )
    assert fitted.seconds(BatchShape.decode(17, 17 * 512, LAYERS), 132) == pytest.approx(
        0.009 - attention * 2 * 47 / 64, rel=0.02
    )


def test_layer_groups_add_up_to_the_pass():
    fitted = Fitted(table(measured(OTHER)), PRIOR)
    whole = BatchShape.prefill(2048, 512, LAYERS)
    parts = [put(whole, first_layer=a, last_layer=a + 8) for a in range(0, LAYERS, 8)]
    assert sum(fitted.seconds(part, 100) for part in parts) == pytest.approx(
        fitted.seconds(whole, 100)
    )


def test_no_step_is_faster_with_a_co_running_one():
    fitted = Fitted(
        table([*measured(OTHER), *(CalibrationPoint(w, u, 1e-6, b) for w, u, b in pairs())]), PRIOR
    )
    for work, units, beside in pairs():
        assert fitted.seconds(work, units, beside) >= fitted.seconds(work, units)


def test_too_many_units_are_refused():
    with pytest.raises(ValueError, match="133 units"):
        Fitted(table(measured(OTHER)), PRIOR).seconds(BatchShape.prefill(8, 0, LAYERS), 133)


def test_a_prediction_prices_the_roofline_a_few_times_at_most():
    """Counts work instead of time, which a shared machine would distort. No result is cached."""
    fitted = Fitted(table(measured(OTHER)), PRIOR)
    calls = 0

    def counted(inner: Callable[[BatchShape, int], object]) -> Callable[[BatchShape, int], object]:
        def call(work: BatchShape, units: int) -> object:
            nonlocal calls
            calls += 1
            return inner(work, units)

        return call

    fitted.prior.solo_cost = counted(fitted.prior.solo_cost)  # type: ignore[assignment]
    for point in between(seed=3):
        fitted.seconds(point.work, point.units, point.co_running)
    assert calls <= 2 * 120
    timeit.timeit(lambda: fitted.seconds(point.work, point.units, point.co_running), number=10)
