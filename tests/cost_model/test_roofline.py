"""The roofline: near what was measured, and shaped like a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.roofline_check import decode, prefill, rows
from counterpoint.config import Config
from counterpoint.cost_model.roofline import MatrixProduct, Roofline, busy_units, round_up_rows
from counterpoint.model.checkpoint import RandomCheckpoint
from counterpoint.model.ops import reference_ops
from counterpoint.model.weights import build_decoder
from counterpoint.simulator.machine import kv_pages
from counterpoint.spec.device import H200, device_spec
from counterpoint.spec.model import ModelError
from counterpoint.spec.presets import PRESETS
from counterpoint.types import BatchShape

LLAMA = PRESETS["llama-3.1-8b"]


ROOFLINE = Roofline(LLAMA, H200)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_prediction_is_near_the_measurement(row):
    assert row.ok, (
        f"{row.name}: predicted {row.predicted:.2f}, "
        f"measured {row.measured:.2f} {row.unit} ({row.error:+.1%})"
    )


works = st.builds(
    lambda tokens, reused, batch, context: (
        BatchShape.prefill(tokens, reused, 32, prompts=min(tokens, 1))
        + BatchShape.decode(batch, batch * context, 32)
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
def test_a_co_running_step_only_slows(work, other, units):
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
    work = BatchShape.prefill(tokens, context, 32)
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
    groups = [whole.over_layers(first, first + 8) for first in range(0, 32, 8)]
    times = [ROOFLINE.seconds(group, 100) for group in groups]
    assert sum(times) == pytest.approx(ROOFLINE.seconds(whole, 100))
    assert times[0] == times[1] == times[2] < times[3]


def test_a_mixed_batch_reads_the_weights_once():
    mixed = BatchShape.prefill(256, 0, 32) + BatchShape.decode(64, 64 * 512, 32)
    apart = ROOFLINE.seconds(prefill(256, 32, 32, 1), 132) + ROOFLINE.seconds(
        decode(64, 512, 32, 32), 132
    )
    assert ROOFLINE.seconds(mixed, 132) < 0.8 * apart


def test_reused_tokens_cost_attention_only():
    fresh, reusing = (
        prefill(512, 32, 32),
        BatchShape.prefill(512, 16384, 32, sampled=False),
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


def test_units_or_dtypes_the_device_lacks_are_rejected():
    with pytest.raises(ValueError, match="200 units asked of h200, which has 132"):
        ROOFLINE.seconds(decode(1, 1, 32, 32), 200)
    with pytest.raises(ValueError, match="h100 has no int3"):
        Roofline(LLAMA, device_spec("h100"), "int3")


QWEN, DEEPSEEK, LLAMA70 = (
    PRESETS["qwen3-235b-a22b"],
    PRESETS["deepseek-v3"],
    PRESETS["llama-3.1-70b"],
)


def test_a_token_takes_its_experts_alone():
    assert QWEN.flops_per_token(sampled=False) / 2e9 == pytest.approx(
        22 - 2 * 0.62, rel=0.04
    )  # A22B, without its embeddings
    assert DEEPSEEK.flops_per_token(sampled=False) / 2e9 == pytest.approx(37 - 0.9, rel=0.04)


def test_a_small_batch_reads_few_experts_and_a_large_one_all():
    roofline = Roofline(QWEN, H200)
    mixtures = [p for p in roofline.layer_products if p.experts > 1]
    one, many = (
        sum(roofline.product_cost(p, rows, 132).bytes for p in mixtures) for rows in (1, 4096)
    )
    each, rows = 2 * 3 * QWEN.hidden * QWEN.ffn, 2 * (2 * QWEN.hidden + 3 * QWEN.ffn)
    assert one == pytest.approx(8 * each + 8 * rows, rel=0.001)
    assert many == pytest.approx(128 * each + 4096 * 8 * rows, rel=0.001)


def test_latent_attention_keeps_576_numbers_a_token():
    assert DEEPSEEK.kv_bytes_per_token() == 61 * 576 * 2
    roofline = Roofline(DEEPSEEK, H200)
    read = roofline.decode_attention(BatchShape.decode(4, 4 * 1000, 61), 132)
    assert read.bytes == 4000 * 576 * 2
    assert read.flops == 2 * 4000 * 128 * (512 + 512 + 64)
    square = BatchShape.prefill(1000, 0, 61)
    assert roofline.prefill_attention(square, 132).flops == pytest.approx(
        2 * 128 * (128 + 64 + 128) * (1000 * 1001 / 2)
    )


def test_tensor_parallel_shards_do_the_whole_work_between_them():
    whole, shard = Roofline(LLAMA70, H200), Roofline(LLAMA70, device_spec("8xh200"))
    work = BatchShape.prefill(2048, 0, 80)
    assert 8 * shard.solo_cost(work, 132).flops == pytest.approx(
        whole.solo_cost(work, 132).flops, rel=0.01
    )
    assert whole.seconds(work, 132) / 8 < shard.seconds(work, 132) < whole.seconds(work, 132) / 4


def test_the_all_reduce_is_a_ring():
    device = replace(device_spec("4xh200"), link_bandwidth=100e9, link_s=1e-5)
    free = replace(device, link_bandwidth=float("inf"), link_s=0.0)
    with_links, without = (
        Roofline(LLAMA70, d).layer_cost(1024, 132).seconds for d in (device, free)
    )
    assert with_links - without == pytest.approx(2 * (1e-5 + 2 * 3 / 4 * 1024 * 8192 * 2 / 100e9))


def test_heads_and_cache_are_sharded():
    shard = LLAMA70.sharded(8)
    assert (shard.heads, shard.kv_heads, shard.ffn, shard.vocab) == (8, 1, 3584, 16032)
    assert QWEN.sharded(8).kv_heads == 1  # four KV heads on eight devices: each is on two
    with pytest.raises(ModelError, match="3 devices"):
        LLAMA70.sharded(3)


def test_copied_kv_heads_take_memory():
    one = kv_pages(QWEN, replace(device_spec("8xh200"), degree=4), Config())
    two = kv_pages(QWEN, device_spec("8xh200"), Config())
    assert one == pytest.approx(2 * two, rel=1e-3)


def test_groups_of_devices_have_names():
    assert device_spec("8xa100").memory_bytes == 8 * device_spec("a100").memory_bytes
    assert device_spec("8xa100").units == 108
    with pytest.raises(ValueError, match="unknown device '8xh300'"):
        device_spec("8xh300")


def test_models_that_only_simulate_are_rejected():
    with pytest.raises(ModelError, match="to be simulated"):
        build_decoder(QWEN, RandomCheckpoint(0), reference_ops())


def test_a_product_of_one_expert_is_dense():
    roofline = Roofline(LLAMA70, H200)
    assert roofline.product_cost(MatrixProduct(512, 512, 1, 1), 100, 132) == roofline.product_cost(
        MatrixProduct(512, 512), 100, 132
    )
