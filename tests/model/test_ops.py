"""The CPU's ops against the reference, and their batch invariance."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import pytest
import torch
from model_builders import PAGE, Run, prompts
from torch import Tensor

from counterpoint.config import ConfigError
from counterpoint.model import (
    Decoder,
    KVPool,
    Ops,
    PassSegments,
    cpu_ops,
    make_batch,
    native,
    reference_ops,
)
from counterpoint.model import ops as reference
from counterpoint.model.checkpoint import RandomCheckpoint
from counterpoint.model.native import Kernels, load_kernels, plan_tiles
from counterpoint.model.paged_sdpa import gathered_attention, group_by_length, plan_gather
from counterpoint.model.weights import build_decoder
from counterpoint.spec import ModelSpec

SPEC = ModelSpec("tiny", "qwen3", 4, 48, 6, 2, 16, 80, 150, 512, qk_norm=True)
DTYPES = ["float32", "float16", "bfloat16"]


def make(dtype: str, cache: Path | None, spec: ModelSpec = SPEC) -> Decoder:
    try:
        ops = cpu_ops(dtype, spec.head_dim, cache=cache)
    except ConfigError as error:
        pytest.skip(str(error))
    return build_decoder(spec, RandomCheckpoint(7, deviation=0.2), ops)


@pytest.fixture(scope="module")
def compiled(kernels: Path) -> Kernels:
    found = load_kernels(kernels)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("native", [True, False], ids=["C kernels", "torch"])
def test_every_record_computes_what_the_reference_computes(dtype: str, native: bool, kernels: Path):
    requests = prompts(SPEC.vocab, 40, 70, 5)
    run = Run(make(dtype, kernels if native else None), requests)
    truth = Run(build_decoder(SPEC, RandomCheckpoint(7, deviation=0.2), reference_ops()), requests)
    passes = [
        ((0, 0, 39), (1, 0, 20)),
        ((0, 39, 40), (2, 0, 1), (1, 20, 70)),
        ((2, 1, 2),),
        ((2, 2, 5),),
    ]
    error = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.3}[
        dtype
    ]  # of logits whose deviation is about 1.5
    for segments in passes:
        torch.testing.assert_close(run.step(*segments), truth.step(*segments), atol=error, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("native", [True, False], ids=["C kernels", "torch"])
def test_a_pass_in_layer_groups_is_the_same_bit_for_bit(dtype: str, native: bool, kernels: Path):
    decoder = make(dtype, kernels if native else None)
    requests = prompts(SPEC.vocab, 60, 21)
    logits = []
    for groups in [(), (1,), (1, 2, 3), (3,)]:
        run = Run(decoder, requests)
        run.step((0, 0, 10), groups=groups)
        logits.append(run.step((0, 10, 60), (1, 0, 21), groups=groups))
    assert all(torch.equal(logits[0], other) for other in logits[1:])


def test_what_shares_a_pass_does_not_matter_bit_for_bit(kernels: Path, compiled: Kernels):
    """One request alone, token by token, in chunks, and beside others, on one thread and on two."""
    decoder = make("float16", kernels)
    requests = prompts(SPEC.vocab, 200, 37, 90, 3)
    alone = Run(decoder, requests).step((0, 0, 200))
    by_token = Run(decoder, requests)
    for at in range(200):
        last = by_token.step((0, at, at + 1))
    assert torch.equal(last, alone)
    chunks = Run(decoder, requests)
    for start, stop in [(0, 3), (3, 64), (64, 65), (65, 199)]:
        chunks.step((1, 0, 37), (0, start, stop), (3, 0, 2))
    assert torch.equal(chunks.step((3, 2, 3), (2, 0, 90), (0, 199, 200))[2:], alone)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(Run(decoder, requests).step((0, 0, 200)), alone)
    finally:
        torch.set_num_threads(threads)


def test_random_passes_of_attention(compiled: Kernels):
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    for _ in range(40):
        kv_heads, group, dim = int(draw(1, 4, 1)), int(draw(1, 6, 1)), 16 * int(draw(1, 9, 1))
        page, segments = [1, 3, 16, 20][int(draw(0, 4, 1))], int(draw(1, 9, 1))
        start_S = torch.where(draw(0, 2, segments) == 0, 0, draw(0, 300, segments))
        tokens_S = torch.where(draw(0, 3, segments) == 0, draw(1, 120, segments), 1)
        width = -(-int((start_S + tokens_S).max()) // page)
        table = torch.randperm(segments * width, generator=generator).view(segments, width)
        k, v = (
            torch.randn(segments * width, page, kv_heads, dim, generator=generator)
            for _ in range(2)
        )
        q = torch.randn(int(tokens_S.sum()), kv_heads * group, dim, generator=generator)
        truth = reference.attention(
            q, k, v, reference.plan_attention(start_S, tokens_S, table, page)
        )
        ours = compiled.attention(q, k, v, plan_tiles(start_S, tokens_S, table, page))
        torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-4)
        half = compiled.attention(q, k.half(), v.half(), plan_tiles(start_S, tokens_S, table, page))
        torch.testing.assert_close(half, truth, atol=1e-2, rtol=1e-2)
        plain = gathered_attention(q, k, v, plan_gather(start_S, tokens_S, table, page))
        torch.testing.assert_close(plain, truth, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are of x86-64")
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors(
    flag: str, compiled: Kernels, kernels: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, flag))
    narrow = load_kernels(kernels)
    assert isinstance(narrow, Kernels) and len(list(kernels.glob("*.so"))) > 1
    start, tokens, table = (
        torch.tensor([0, 70]),
        torch.tensor([100, 1]),
        torch.randperm(14).view(2, 7),
    )
    q, k, v = torch.randn(101, 6, 48), torch.randn(14, 16, 2, 48), torch.randn(14, 16, 2, 48)
    plan = plan_tiles(start, tokens, table, 16)
    torch.testing.assert_close(
        narrow.attention(q, k, v, plan), compiled.attention(q, k, v, plan), atol=1e-5, rtol=1e-4
    )
    if narrow.kv_dtype is torch.float16:
        pools = k.half(), v.half()
        torch.testing.assert_close(
            narrow.attention(q, *pools, plan),
            compiled.attention(q, *pools, plan),
            atol=1e-5,
            rtol=1e-4,
        )
    x = torch.randn(3, 10 * 48)
    turned = []
    for each in (narrow, compiled):
        pools = torch.zeros_like(k, dtype=each.kv_dtype), torch.zeros_like(v, dtype=each.kv_dtype)
        angles = reference.rope_angles(
            torch.tensor([0, 5, 90]),
            torch.rand(24, generator=torch.Generator().manual_seed(0)),
            1.0,
        )
        q_THA = each.rope_and_append(
            x.clone(), angles, None, torch.ones(48), 1e-5, *pools, torch.tensor([3, 50, 7])
        )
        turned.append((q_THA, *(pool.float() for pool in pools)))
    for got, want in zip(*turned, strict=True):
        torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)


def test_large_scores_do_not_overflow(compiled: Kernels):
    start, tokens, table = torch.tensor([0]), torch.tensor([100]), torch.arange(7)[None]
    q, k, v = (
        torch.randn(100, 4, 16) * 300,
        torch.randn(7, 16, 2, 16) * 300,
        torch.randn(7, 16, 2, 16),
    )
    truth = reference.attention(q, k, v, reference.plan_attention(start, tokens, table, 16))
    torch.testing.assert_close(
        compiled.attention(q, k, v, plan_tiles(start, tokens, table, 16)),
        truth,
        atol=1e-3,
        rtol=1e-3,
    )


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("width", [48, 50])
def test_kernels_between_the_products(compiled: Kernels, rows: int, width: int):
    torch.manual_seed(0)
    x, delta, weight, gate_up = (
        torch.randn(rows, width),
        torch.randn(rows, width),
        torch.randn(width),
        torch.randn(rows, 2 * width),
    )
    gate_up[0, :4] = torch.tensor([-1e4, -88.0, 88.0, 1e4])
    torch.testing.assert_close(
        compiled.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
    )
    torch.testing.assert_close(
        compiled.silu_mul(gate_up), reference.silu_mul(gate_up), atol=1e-6, rtol=1e-5
    )
    want = reference.add_rms_norm(x, delta, weight, 1e-5)
    for got, expected in zip(
        compiled.add_rms_norm(x.clone(), delta, weight, 1e-5), want, strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("native", [True, False], ids=["C kernels", "torch"])
def test_a_failed_request_does_not_spoil_the_next_owner_of_its_pages(native: bool, kernels: Path):
    """NaN and infinity stay within the request that produced them."""
    decoder = make("float16", kernels if native else None)
    good = prompts(SPEC.vocab, 7)[0]
    want = Run(decoder, [good]).step((0, 0, 7))
    table = decoder.weights.embedding_VD
    bad_id = next(token for token in range(SPEC.vocab) if token not in good.tolist())
    kept, table[bad_id] = table[bad_id].clone(), torch.nan
    try:
        run = Run(decoder, [torch.full((40,), bad_id), good, good])
        run.table[2, :10] = run.table[0, :10]
        logits = run.step((0, 0, 39), (1, 0, 6))
        assert logits[0].isnan().any() and logits[1].isfinite().all()
        logits = run.step((0, 39, 40), (1, 6, 7))
        assert logits[0].isnan().any()
        torch.testing.assert_close(logits[1:], want, atol=1e-3, rtol=0)
        run.step((2, 0, 6))
        torch.testing.assert_close(run.step((2, 6, 7), (1, 6, 7))[:1], want, atol=1e-3, rtol=0)
    finally:
        table[bad_id] = kept


def test_a_batch_is_the_segments_row_by_row():
    ops = dataclasses.replace(reference_ops(), plan_attention=lambda *plan: plan)
    start, tokens = torch.tensor([5, 0, 9]), torch.tensor([3, 1, 2])
    table = torch.tensor([[10, 11, 12], [20, 0, 0], [30, 31, 32]])
    sampled = torch.tensor([True, False, True])
    segments = PassSegments(start, tokens, sampled, table)
    batch = make_batch(torch.arange(6), segments, PAGE, ops)
    assert batch.positions_T.tolist() == [5, 6, 7, 0, 9, 10]
    assert batch.kv_rows_T.tolist() == [45, 46, 47, 80, 129, 130]
    assert batch.sample_rows_B.tolist() == [2, 5]
    some = segments._replace(sample_S=torch.tensor([2, 0]))
    by_index = make_batch(torch.arange(6), some, PAGE, ops)
    assert by_index.sample_rows_B.tolist() == [5, 2]
    with pytest.raises(IndexError):
        make_batch(torch.arange(6), segments._replace(start_S=start + 4), PAGE, ops)


def test_decodes_of_very_uneven_lengths_are_gathered_in_groups():
    index = torch.arange(6)
    assert len(group_by_length(index, torch.tensor([100, 110, 120, 100, 90, 100]))) == 1
    groups = group_by_length(index, torch.tensor([10, 12, 4000, 9, 16, 3000]))
    assert sorted(map(len, groups)) == [2, 4]
    assert sorted(torch.cat(groups).tolist()) == list(range(6))


@pytest.mark.parametrize("bad", ["missing", "failing"])
def test_without_a_compiler_torch_takes_over(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if bad == "failing":
        (tmp_path / "cc").write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
        (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = load_kernels(tmp_path / "cache")
    assert isinstance(reason, str) and (
        "compiler" in reason if bad == "missing" else "no such luck" in reason
    )
    ops = cpu_ops("float32", cache=tmp_path / "cache")
    assert ops.attention is gathered_attention


def test_a_head_size_that_the_kernels_do_not_take(kernels: Path):
    def check(dim: int) -> Ops:
        return cpu_ops("float32", dim, cache=kernels)

    assert check(24).attention is gathered_attention
    assert check(80).attention is not gathered_attention or isinstance(load_kernels(kernels), str)


def test_a_checkpoint_in_bfloat16_stays_so_where_the_cpu_multiplies_it(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert "bfloat16" not in cpu_ops("auto", checkpoint_dtype=torch.bfloat16, cache=kernels).name
    with pytest.raises(ConfigError, match="avx512_bf16"):
        cpu_ops("bfloat16", cache=kernels)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert "bfloat16" in cpu_ops("auto", checkpoint_dtype=torch.bfloat16, cache=kernels).name
    assert "bfloat16" not in cpu_ops("auto", checkpoint_dtype=torch.float32, cache=kernels).name


def test_only_output_rows_are_computed_after_the_last_attention():
    """The output rows equal those of a full pass, in any order. Without any, the cache is still
    written."""
    decoder = build_decoder(SPEC, RandomCheckpoint(7, deviation=0.2), reference_ops())
    requests = prompts(SPEC.vocab, 21)

    def hidden(only: list[int] | None) -> tuple[Tensor, KVPool]:
        run = Run(decoder, requests)
        begin, end = torch.tensor([0]), torch.tensor([21])
        segments = PassSegments(begin, end, torch.tensor([True]), run.table)
        batch = make_batch(requests[0], segments, run.kv.page_tokens, decoder.ops)
        rows_B = None if only is None else torch.tensor(only, dtype=torch.int64)
        batch = dataclasses.replace(batch, output_rows_B=rows_B)
        x_TD = decoder.run_layers(decoder.embed(batch), batch, run.kv, 0, 2)
        return decoder.run_layers(x_TD, batch, run.kv, 2, SPEC.layers), run.kv

    whole, kv = hidden(None)
    for only in ([20], [3, 0, 20], []):
        got, written = hidden(only)
        torch.testing.assert_close(got, whole[only], atol=1e-4, rtol=0)
        for ours, theirs in zip((*written.k, *written.v), (*kv.k, *kv.v), strict=True):
            assert torch.equal(ours, theirs)
