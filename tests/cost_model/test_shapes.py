"""Mixtures, latent attention and tensor parallelism in the roofline: arithmetic that can be done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterpoint.config import Config
from counterpoint.cost_model.roofline import MatrixProduct, Roofline
from counterpoint.model.checkpoint import RandomCheckpoint
from counterpoint.model.ops import reference_ops
from counterpoint.model.weights import build_decoder
from counterpoint.simulator.machine import kv_pages
from counterpoint.spec.device import H200, device_spec
from counterpoint.spec.model import ModelError
from counterpoint.spec.presets import PRESETS
from counterpoint.types import BatchShape

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


def test_heads_are_shared_out_and_the_cache_with_them():
    shard = LLAMA70.sharded(8)
    assert (shard.heads, shard.kv_heads, shard.ffn, shard.vocab) == (8, 1, 3584, 16032)
    assert QWEN.sharded(8).kv_heads == 1  # four KV heads on eight devices: each is on two
    with pytest.raises(ModelError, match="3 devices"):
        LLAMA70.sharded(3)


def test_copies_of_kv_heads_take_room():
    one = kv_pages(QWEN, replace(device_spec("8xh200"), degree=4), Config())
    two = kv_pages(QWEN, device_spec("8xh200"), Config())
    assert one == pytest.approx(2 * two, rel=1e-3)


def test_groups_of_devices_have_names():
    assert device_spec("8xa100").memory_bytes == 8 * device_spec("a100").memory_bytes
    assert device_spec("8xa100").units == 108
    with pytest.raises(ValueError, match="unknown device '8xh300'"):
        device_spec("8xh300")


def test_shapes_that_are_not_run_are_refused():
    with pytest.raises(ModelError, match="to be simulated"):
        build_decoder(QWEN, RandomCheckpoint(0), reference_ops())


def test_a_product_of_one_expert_is_dense():
    roofline = Roofline(LLAMA70, H200)
    assert roofline.product_cost(MatrixProduct(512, 512, 1, 1), 100, 132) == roofline.product_cost(
        MatrixProduct(512, 512), 100, 132
    )
