"""The fitted estimator: what was measured comes back, few points do no harm, and a prediction is cheap."""

from __future__ import annotations

import random
import statistics
import timeit
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from msgspec.structs import replace as put

from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.calibration import (
    Calibration,
    CalibrationKey,
    CalibrationPoint,
    decode,
    encode,
    file_name,
    shape_key,
)
from counterpoint.cost_model.fitted import Fitted
from counterpoint.cost_model.regression import least_squares, solve
from counterpoint.cost_model.roofline import Roofline
from counterpoint.interfaces import Estimator
from counterpoint.spec.device import H200, Curve
from counterpoint.spec.presets import PRESETS
from counterpoint.types import BatchShape

LLAMA = PRESETS["llama-3.1-8b"]
PRIOR = Roofline(LLAMA, H200)
LAYERS = LLAMA.layers
LEVELS = (24, 48)
KEY = CalibrationKey(
    device="NVIDIA H200",
    units=132,
    model=shape_key(LLAMA),
    dtype="bfloat16",
    kv_dtype="bfloat16",
    kernels="k1",
)

# A device that is not the one the roofline knows: other efficiencies, another attention kernel, more contention.
OTHER = Roofline(
    LLAMA,
    replace(
        H200,
        gemm=replace(H200.gemm, efficiency=Curve(((24, 0.7), (132, 0.5))), read_fraction=0.7),
        attention=replace(H200.attention, efficiency=0.4, read_bandwidth=H200.read_bandwidth),
        contention=replace(H200.contention, bandwidth=1.0, compute=0.6),
        kernel_s=6e-6,
        layer_launch_s=0.0,
    ),
)


def fuse(prefill: BatchShape, decode: BatchShape) -> BatchShape:
    """A piece of a prompt, which is not sampled, and decodes in one pass."""
    return put(prefill, samples=0) + decode


def works() -> list[tuple[BatchShape, int]]:
    prefills = [
        BatchShape.prefill(n, r, LAYERS) for n in (64, 256, 1024, 4096, 8192) for r in (0, 4096)
    ]
    decodes = [BatchShape.decode(b, b * c, LAYERS) for b in (1, 16, 64, 128) for c in (512, 4096)]
    fused = [fuse(p, d) for p in prefills[::3] for d in decodes[1::3]]
    found = [(w, units) for w in prefills for units in (132, *(132 - level for level in LEVELS))]
    found += [(w, units) for w in decodes for units in (132, *LEVELS)]
    return found + [(w, 132) for w in fused]


def pairs() -> list[tuple[BatchShape, int, tuple[BatchShape, int]]]:
    found = []
    for level in LEVELS:
        for n in (512, 4096):
            for b, c in ((8, 1024), (64, 4096)):
                p, d = BatchShape.prefill(n, 0, LAYERS), BatchShape.decode(b, b * c, LAYERS)
                found += [(d, level, (p, 132 - level)), (p, 132 - level, (d, level))]
    return found


def measured(device: Estimator) -> list[CalibrationPoint]:
    alone = [CalibrationPoint(w, units, device.seconds(w, units)) for w, units in works()]
    return alone + [
        CalibrationPoint(w, units, device.seconds(w, units, beside), beside)
        for w, units, beside in pairs()
    ]


def table(points: Sequence[CalibrationPoint], buckets: tuple[int, ...] = ()) -> Calibration:
    return Calibration(key=KEY, about={"date": "today"}, buckets=buckets, points=list(points))


def off(estimator: Estimator, points: Sequence[CalibrationPoint]) -> list[float]:
    return sorted(
        abs(estimator.seconds(p.work, p.units, p.co_running) / p.seconds - 1) for p in points
    )


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


def test_what_was_measured_comes_back():
    points = measured(OTHER)
    errors = off(Fitted(table(points), PRIOR), points)
    assert errors[len(errors) // 2] < 0.01
    assert errors[int(0.95 * len(errors))] < 0.04
    assert errors[-1] < 0.10


def test_what_was_not_measured_is_near():
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


def test_nothing_measured_is_the_roofline():
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


def test_nobody_is_faster_beside_another():
    fitted = Fitted(
        table([*measured(OTHER), *(CalibrationPoint(w, u, 1e-6, b) for w, u, b in pairs())]), PRIOR
    )
    for work, units, beside in pairs():
        assert fitted.seconds(work, units, beside) >= fitted.seconds(work, units)


def test_too_many_units_are_refused():
    with pytest.raises(ValueError, match="133 units"):
        Fitted(table(measured(OTHER)), PRIOR).seconds(BatchShape.prefill(8, 0, LAYERS), 133)


def test_a_prediction_is_cheap():
    """No bound on time is asserted on this shared machine: the work done is. Nothing remembered, no step prices the roofline more
    than a few times."""
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


# ---------------------------------------------------------------- the table


@pytest.fixture
def none_shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_store, "SHIPPED", tmp_path / "shipped")


def test_a_table_survives_the_file(tmp_path):
    kept = table(measured(OTHER), (1, 2, 4))
    assert decode(encode(kept)) == kept
    calibration_store.save(kept, tmp_path / "sub" / "t.json")
    assert calibration_store.load(tmp_path / "sub" / "t.json") == kept
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b'{"key": 3}',
        encode(Calibration(key=KEY, points=[CalibrationPoint(BatchShape(), 1, 0.0)])),
    ],
)
def test_a_broken_table_is_refused(text: bytes):
    with pytest.raises(ValueError, match="not a calibration"):
        decode(text)


def test_own_before_shipped_before_roofline(tmp_path, none_shipped):
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    assert calibration_store.find_calibration(KEY, PRIOR, own).estimator is PRIOR
    assert "calibrate" in calibration_store.find_calibration(KEY, PRIOR, own).note
    calibration_store.save(table(measured(OTHER)), shipped / file_name(KEY))
    assert "shipped calibration" in calibration_store.find_calibration(KEY, PRIOR, own).note
    calibration_store.save(table(measured(OTHER)[:20]), own / file_name(KEY))
    found = calibration_store.find_calibration(KEY, PRIOR, own)
    assert "own calibration of today, 20 points" in found.note
    assert isinstance(found.estimator, Fitted)
    (own / file_name(KEY)).write_text("{")
    assert "shipped" in calibration_store.find_calibration(KEY, PRIOR, own).note
    assert "passed over" in calibration_store.find_calibration(KEY, PRIOR, own).note


def test_other_kernels_are_told_and_another_model_is_not_taken(tmp_path, none_shipped):
    calibration_store.save(table(measured(OTHER)), tmp_path / file_name(KEY))
    import msgspec

    other = msgspec.structs.replace(KEY, kernels="k2")
    assert "other kernels (k1)" in calibration_store.find_calibration(other, PRIOR, tmp_path).note
    another = msgspec.structs.replace(KEY, model=shape_key(PRESETS["qwen3-8b"]))
    assert calibration_store.find_calibration(another, PRIOR, tmp_path).estimator is PRIOR


def test_a_run_that_had_hardly_begun_is_not_used(tmp_path, none_shipped):
    calibration_store.save(table(measured(OTHER)[:3]), tmp_path / file_name(KEY))
    assert calibration_store.find_calibration(KEY, PRIOR, tmp_path).estimator is PRIOR


# ---------------------------------------------------------------- the arithmetic


def test_solve():
    assert solve([[4.0, 1.0], [1.0, 3.0]], [1.0, 2.0]) == pytest.approx([1 / 11, 7 / 11])


def test_least_squares_follows_the_points_and_stays_where_there_are_none():
    found = least_squares([([1.0, 0.0], 3.0), ([2.0, 0.0], 6.0)], [(1.0, 0.4), (1.5, 0.4)])
    assert found[0] == pytest.approx(3.0, rel=0.02)
    assert found[1] == pytest.approx(1.5)


def test_the_shipped_tables_are_whole_and_better_than_the_roofline():
    found = sorted(calibration_store.SHIPPED.glob("*.json"))
    assert found
    for path in found:
        kept = calibration_store.load(path)
        assert path.name == file_name(kept.key)
        judges = [p for p in kept.points if p.held_out]
        assert len(judges) >= 50
        model = next(spec for spec in PRESETS.values() if shape_key(spec) == kept.key.model)
        prior = Roofline(model, H200, kept.key.dtype, kept.key.kv_dtype)
        errors = off(Fitted(kept, prior), judges)
        assert errors[len(errors) // 2] < 0.05 < off(prior, judges)[len(judges) // 2]


def test_the_simulator_finds_the_shipped_table():
    assert calibration_store.shipped_calibration(H200, LLAMA, "bfloat16", "bfloat16") is not None
    assert calibration_store.shipped_calibration(H200, LLAMA, "fp8", "bfloat16") is None
    assert (
        calibration_store.shipped_calibration(H200, PRESETS["qwen3-8b"], "bfloat16", "bfloat16")
        is None
    )
