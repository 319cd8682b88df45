"""The roofline: near what was measured, and shaped like a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.roofline_check import decode, prefill, rows
from counterpoint.cost_model.perturbed import Perturbed
from counterpoint.cost_model.roofline import MatrixProduct, Roofline, busy_units, round_up_rows
from counterpoint.spec.device import H200, Curve, device_spec
from counterpoint.spec.presets import PRESETS
from counterpoint.types import BatchShape

LLAMA = PRESETS["llama-3.1-8b"]
ROOFLINE = Roofline(LLAMA, H200)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_prediction_is_near_the_measurement(row):
    assert row.ok, (
        f"{row.name}: predicted {row.predicted:.2f}, measured {row.measured:.2f} {row.unit} ({row.error:+.1%})"
    )


# ---------------------------------------------------------------- shape

works = st.builds(
    lambda tokens, reused, batch, context: BatchShape(
        tokens,
        tokens * tokens,
        tokens * reused,
        min(tokens, 1),
        batch,
        batch * context,
        batch + min(tokens, 1),
        0,
        32,
        32,
    ),
    st.integers(0, 9000),
    st.integers(0, 9000),
    st.integers(0, 300),
    st.integers(1, 9000),
).filter(lambda work: work.samples > 0)


@settings(max_examples=60, deadline=None)
@given(works, st.integers(1, 132), st.integers(1, 132))
def test_more_units_are_never_slower_alone(work, units, others):
    few, many = sorted((units, others))
    assert ROOFLINE.seconds(work, many) <= ROOFLINE.seconds(work, few) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(works, st.integers(1, 132), st.floats(1.0, 3.0))
def test_more_bandwidth_or_compute_is_never_slower(work, units, factor):
    wide = replace(
        H200,
        read_bandwidth=H200.read_bandwidth.scaled(1, factor),
        attention=replace(
            H200.attention, read_bandwidth=H200.attention.read_bandwidth.scaled(1, factor)
        ),
    )
    strong = replace(
        H200, peak_flops=tuple((dtype, flops * factor) for dtype, flops in H200.peak_flops)
    )
    here = ROOFLINE.seconds(work, units)
    assert Roofline(LLAMA, wide).seconds(work, units) <= here * (1 + 1e-9)
    assert Roofline(LLAMA, strong).seconds(work, units) <= here * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(works, works, st.integers(8, 124))
def test_a_neighbour_slows_and_never_speeds(work, other, units):
    alone, together = (
        ROOFLINE.seconds(work, units),
        ROOFLINE.seconds(work, units, (other, 132 - units)),
    )
    assert alone <= together <= 2.5 * alone


def test_steps_that_share_units_take_turns():
    step, other = decode(64, 2048, 32, 32), prefill(2048, 32, 32)
    apart, sharing = (
        ROOFLINE.seconds(step, 66, (other, 66)),
        ROOFLINE.seconds(step, 66, (other, 132)),
    )
    assert sharing > 1.4 * apart


def test_two_readers_share_the_memory():
    """Each wants nearly all of it, so together neither gets more than half."""
    step = decode(1, 100_000, 32, 32)
    together = ROOFLINE.seconds(step, 66, (step, 66))
    assert 2 * ROOFLINE.solo_cost(step, 66).bytes / together <= 1.001 * H200.read_bandwidth.at(132)


def test_waves_leave_units_idle_in_the_last_one():
    assert busy_units(264, 132) == 132
    assert busy_units(133, 132) == 66.5
    assert busy_units(50, 132) == 50
    plain = replace(H200, gemm=replace(H200.gemm, tiles=((128, 128, 1.0),), splits=(1,)))
    roofline, product = Roofline(LLAMA, plain), MatrixProduct(128 * 132, 4096)
    full, spilled = (
        roofline.product_cost(product, 8 * 128, 132),
        roofline.product_cost(product, 8 * 128 + 1, 132),
    )
    assert spilled.seconds == pytest.approx(full.seconds * 9 / 8, rel=0.03), (
        "one row more costs a whole wave"
    )


def test_the_grid_of_row_counts_is_fine_and_ascending():
    grid = [round_up_rows(rows) for rows in range(1, 5000)]
    assert grid == sorted(grid) and grid[:63] == list(range(1, 64))
    assert all(rows <= point < rows * 1.032 for rows, point in enumerate(grid, 1))


def test_flops_are_those_of_the_model():
    tokens, context = 512, 1024
    work = BatchShape(tokens, tokens * tokens, tokens * context, 1, 0, 0, 1, 0, 32, 32)
    by_hand = sum(
        LLAMA.flops_per_token(context + i + 1, sampled=i == tokens - 1) for i in range(tokens)
    )
    assert ROOFLINE.solo_cost(work, 132).flops == pytest.approx(by_hand, rel=1e-9)
    step = decode(16, 2000, 32, 32)
    assert ROOFLINE.solo_cost(step, 132).flops == pytest.approx(
        16 * LLAMA.flops_per_token(2000), rel=1e-9
    )


def test_a_decode_step_reads_weights_and_cache_once():
    cost = ROOFLINE.solo_cost(decode(64, 2048, 32, 32), 132)
    weights = 2 * (LLAMA.layers * LLAMA.layer_matrix_parameters + LLAMA.vocab * LLAMA.hidden)
    cache = 64 * 2048 * LLAMA.kv_bytes_per_token()
    assert weights + cache < cost.bytes < 1.05 * (weights + cache)


def test_layer_groups_add_up_and_only_the_last_has_the_head():
    whole = prefill(2048, 32, 32, samples=1)
    groups = [BatchShape(*_fields(whole)[:7], first, first + 8, 32) for first in range(0, 32, 8)]
    times = [ROOFLINE.seconds(group, 100) for group in groups]
    assert sum(times) == pytest.approx(ROOFLINE.seconds(whole, 100))
    assert times[0] == times[1] == times[2] < times[3]


def _fields(work: BatchShape) -> list[int]:
    return [getattr(work, name) for name in work.__struct_fields__]


def test_a_mixed_batch_reads_the_weights_once():
    mixed = BatchShape(256, 256 * 256, 0, 1, 64, 64 * 512, 65, 0, 32, 32)
    apart = ROOFLINE.seconds(prefill(256, 32, 32, 1), 132) + ROOFLINE.seconds(
        decode(64, 512, 32, 32), 132
    )
    assert ROOFLINE.seconds(mixed, 132) < 0.8 * apart


def test_reused_tokens_cost_attention_only():
    fresh, reusing = (
        prefill(512, 32, 32),
        BatchShape(512, 512 * 512, 512 * 16384, 1, 0, 0, 0, 0, 32, 32),
    )
    more = ROOFLINE.seconds(reusing, 132) / ROOFLINE.seconds(fresh, 132)
    assert (
        1.1
        < more
        < ROOFLINE.seconds(prefill(512 + 16384, 32, 32), 132) / ROOFLINE.seconds(fresh, 132)
    )


def test_experts_cost_what_is_reached():
    sizes = {"name": "moe", "ffn": 1536, "experts": 128, "experts_per_token": 8}
    roofline = Roofline(replace(LLAMA, **sizes), H200)
    one, all_of_them = (
        roofline.solo_cost(decode(1, 1, 32, 32), 132),
        roofline.solo_cost(decode(256, 1, 32, 32), 132),
    )
    expert = 3 * 1536 * 4096 * 2
    assert (
        10 < (all_of_them.bytes - one.bytes) / (32 * 8 * expert) < 16
    )  # nearly all of 128 against 8


def test_fp8_halves_what_is_read():
    step = decode(1, 1, 32, 32)
    assert Roofline(LLAMA, H200, "fp8").solo_cost(step, 132).bytes == pytest.approx(
        ROOFLINE.solo_cost(step, 132).bytes / 2, rel=0.02
    )


def test_what_the_device_has_not_is_refused():
    with pytest.raises(ValueError, match="200 units asked of h200, which has 132"):
        ROOFLINE.seconds(decode(1, 1, 32, 32), 200)
    with pytest.raises(ValueError, match="h100 has no int3"):
        Roofline(LLAMA, device_spec("h100"), "int3")


# ---------------------------------------------------------------- on purpose wrong


def test_perturbed_is_a_bounded_lasting_bias():
    wrong, again, other = (
        Perturbed(ROOFLINE, 0.2, seed=1),
        Perturbed(ROOFLINE, 0.2, seed=1),
        Perturbed(ROOFLINE, 0.2, seed=2),
    )
    steps = [(decode(1 << i, 1000, 32, 32), units) for i in range(9) for units in (16, 48, 132)]
    factors = [wrong.seconds(*step) / ROOFLINE.seconds(*step) for step in steps]
    assert all(0.8 <= factor <= 1.2 for factor in factors)
    assert max(factors) > 1.1 and min(factors) < 0.9
    assert factors == [again.seconds(*step) / ROOFLINE.seconds(*step) for step in steps]
    assert factors != [other.seconds(*step) / ROOFLINE.seconds(*step) for step in steps]
    by_units = [
        wrong.seconds(steps[0][0], units) / ROOFLINE.seconds(steps[0][0], units)
        for units in (16, 24, 32, 48)
    ]
    assert len({round(factor, 6) for factor in by_units}) == 4, "another split, another error"
    near = decode(2, 1001, 32, 32), 16
    assert wrong.seconds(*near) / ROOFLINE.seconds(*near) == pytest.approx(factors[3]), (
        "one cell, one factor"
    )


def test_perturbed_by_nothing_is_the_same():
    step = decode(8, 1000, 32, 32)
    assert Perturbed(ROOFLINE, 0.0).seconds(step, 64) == ROOFLINE.seconds(step, 64)
    with pytest.raises(ValueError, match="error is 1"):
        Perturbed(ROOFLINE, 1.0)


def test_a_curve_can_be_a_constant():
    assert Curve(((1, 5.0),)).at(100) == 5.0
