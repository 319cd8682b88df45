"""Kernels against a float32 torch reference: random inputs, odd sizes, poisoned outputs, every
partition, eager and in a graph."""

from __future__ import annotations

import math

import pytest
import torch

from counterpoint.device.cuda.kernels.attention import AttentionShape, DecodeAttention, check_shape
from counterpoint.device.cuda.kernels.gemm import fit_tile
from counterpoint.model.fp8 import FP8, quantise_rows, to_fp8

pytest_gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
NAN = float("nan")
ATTENTION_BOUND = {
    torch.bfloat16: 5e-3,
    torch.float16: 1e-3,
}  # operands and probabilities are rounded to the dtype
GEMM_BOUND = 4e-3  # the result is rounded to bfloat16: at most 2 ** -8
GEMM_BOUND_FP8 = 1e-2  # of the same e4m3 product: tensor cores keep some 14 bits of its sums


# ---- without a GPU


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 3, 128), (72, 8, 128), (32, 8, 96), (8, 0, 64)]
)
def test_unsupported_attention_shapes_are_rejected(heads, kv_heads, head_dim):
    with pytest.raises((ValueError, ZeroDivisionError)):
        check_shape(heads, kv_heads, head_dim, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("sms", [8, 16, 24, 32, 48, 64, 100, 132])
@pytest.mark.parametrize("n", [4096, 6144, 28672, 128256])
@pytest.mark.parametrize("m", [1, 64, 128])
def test_the_fitted_tile_balances_sms_within_a_tenth(n, sms, m):
    tile = fit_tile(n, sms, m)
    rows = tile.rows(m > 64)
    assert tile.height % 8 == 0 and 32 <= tile.height <= 256
    per_sm = math.ceil(math.ceil(n / rows) / sms) * rows
    if n / sms >= 32:  # else there are fewer tiles than SMs
        assert per_sm <= 1.1 * n / sms + 8


# ---- on the device


@pytest.fixture(scope="module")
def partitions():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    from counterpoint.device.cuda.green_contexts import Partitions

    made = Partitions([8, 16, 24, 32, 64])
    yield made
    made.close()


def stream_of(partitions, sms):
    return partitions.full if sms == partitions.total_sms else partitions.pair(sms).decode


class Cache:
    """A paged KV cache that is NaN wherever no sequence owns it. For e4m3, K and V are
    representable."""

    def __init__(
        self, lengths, kv_heads, head_dim, dtype, layout, page_tokens=16, table_pages=None
    ):
        final, dtype = dtype, torch.bfloat16 if dtype == FP8 else dtype
        self.lengths, self.layout, self.page_tokens = lengths, layout, page_tokens
        pages = [-(-n // page_tokens) for n in lengths]
        total, width = sum(pages) + 3, table_pages or max(1, *pages)
        inner = (kv_heads, page_tokens) if layout == "HND" else (page_tokens, kv_heads)
        self.pool = torch.full((total, 2, *inner, head_dim), NAN, dtype=dtype, device="cuda")
        order = torch.randperm(total)
        self.tables = torch.full(
            (len(lengths), width), 2**30, dtype=torch.int32
        )  # an entry past the end must not be read
        self.k, self.v, at = [], [], 0
        for s, (n, count) in enumerate(zip(lengths, pages, strict=True)):
            mine = order[at : at + count]
            at += count
            self.tables[s, :count] = mine.to(torch.int32)
            k, v = (torch.randn(n, kv_heads, head_dim, device="cuda").to(dtype) for _ in range(2))
            k, v = (to_fp8(x).to(dtype) for x in (k, v)) if final == FP8 else (k, v)
            self.k.append(k.float())
            self.v.append(v.float())
            for side, x in ((0, k), (1, v)):
                padded = torch.full(
                    (count * page_tokens, kv_heads, head_dim), NAN, dtype=dtype, device="cuda"
                )
                padded[:n] = x
                padded = padded.view(count, page_tokens, kv_heads, head_dim)
                self.pool[mine.cuda(), side] = padded.transpose(1, 2) if layout == "HND" else padded
        self.pool = self.pool.to(final)
        self.tables = self.tables.cuda()
        self.lengths_S = torch.tensor(lengths, dtype=torch.int32, device="cuda")

    def reference(self, q, lengths=None):
        rows = []
        for s, n in enumerate(lengths if lengths is not None else self.lengths):
            k, v = self.k[s][:n], self.v[s][:n]
            kv_heads, head_dim = k.shape[1:]
            x = q[s].float().view(kv_heads, -1, head_dim)
            if n == 0:
                rows.append(torch.zeros_like(q[s], dtype=torch.float32))
                continue
            weights = (torch.einsum("kgd,tkd->kgt", x, k) * head_dim**-0.5).softmax(-1)
            rows.append(torch.einsum("kgt,tkd->kgd", weights, v).reshape(q.shape[1], head_dim))
        return torch.stack(rows)


def assert_close(out, reference, bound, what):
    assert torch.isfinite(out.float()).all(), f"{what}: not finite"
    error = float((out.float() - reference).norm() / reference.norm().clamp_min(1e-20))
    assert error < bound, f"{what}: relative error {error:.2e}"
    worst = (out.float() - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(
        dim=1
    ).clamp_min(1e-20)
    assert float(worst.max()) < 3 * bound, (
        f"{what}: row {int(worst.argmax())} has relative error {float(worst.max()):.2e}"
    )


UNEVEN = [1, 15, 16, 17, 0, 4097, 33, 2, 511, 64, 1000, 31, 32, 300]
LONG = [97 * i * i % 5000 + 1 for i in range(40)]
SHAPES = [
    (8, 8),
    (9, 3),
    (32, 8),
    (14, 2),
    (8, 1),
    (5, 1),
    (6, 3),
    (32, 16),
    (12, 4),
    (12, 12),
]  # query heads, KV heads
HUNDRED = [(37 * i * i + 11 * i) % 700 + 1 for i in range(100)]


@pytest_gpu
@needs_gpu
class TestAttention:
    def run(
        self,
        partitions,
        sms,
        lengths,
        heads=32,
        kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        layout="HND",
        kv=None,
        **kinds,
    ):
        torch.seed()
        cache = Cache(lengths, kv_heads, head_dim, dtype if kv is None else kv, layout, **kinds)
        q = torch.randn(len(lengths), heads, head_dim, device="cuda").to(dtype)
        part = stream_of(partitions, sms)
        shape = AttentionShape(heads, kv_heads, head_dim, dtype, kv, layout)
        kernel = DecodeAttention(shape, sms=sms, max_seqs=len(lengths))
        reference = cache.reference(q)
        for turn in range(2):  # the second finds the workspace as the first left it
            out = torch.full_like(q, NAN)
            torch.cuda.synchronize()
            with torch.cuda.stream(part.stream):
                kernel(q, cache.pool[:, 0], cache.pool[:, 1], cache.tables, cache.lengths_S, out)
            part.stream.synchronize()
            assert_close(out, reference, ATTENTION_BOUND[dtype], f"{sms} SMs, turn {turn}")

    @pytest.mark.parametrize("sms", [8, 16, 24, 32, 64, 132])
    @pytest.mark.parametrize(
        "lengths",
        [[1], [16], [4096], UNEVEN, HUNDRED, LONG, [0, 0, 5], [33, 16, 47, 48, 49] * 9],
        ids=str,
    )
    def test_every_partition(self, partitions, sms, lengths):
        self.run(partitions, sms, lengths)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize(
        ("heads", "kv_heads"),
        [(8, 8), (9, 3), (32, 8), (14, 2), (8, 1), (5, 1), (6, 3), (32, 16), (12, 4), (12, 12)],
    )
    def test_every_shape(self, partitions, heads, kv_heads, head_dim, layout, dtype):
        for sms in (8, 132):  # many units for a warp, and few
            self.run(partitions, sms, UNEVEN, heads, kv_heads, head_dim, dtype, layout)

    @pytest.mark.parametrize("sms", [8, 24, 132])
    @pytest.mark.parametrize(
        "lengths",
        [[1], [4096], UNEVEN, HUNDRED, LONG, [0, 0, 5], [33, 16, 47, 48, 49] * 9],
        ids=str,
    )
    def test_e4m3_cache_in_every_partition(self, partitions, sms, lengths):
        self.run(partitions, sms, lengths, kv=FP8)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    @pytest.mark.parametrize(
        ("heads", "kv_heads"), [(8, 8), (9, 3), (14, 2), (8, 1), (5, 1), (12, 12), (64, 8)]
    )
    def test_every_e4m3_shape(self, partitions, heads, kv_heads, layout, dtype):
        for sms in (8, 132):
            self.run(partitions, sms, UNEVEN, heads, kv_heads, 128, dtype, layout, kv=FP8)
        self.run(
            partitions, 32, UNEVEN, heads, kv_heads, 128, dtype, layout, kv=FP8, page_tokens=64
        )

    @pytest.mark.parametrize("page_tokens", [32, 64])
    def test_larger_pages(self, partitions, page_tokens):
        self.run(partitions, 32, UNEVEN, page_tokens=page_tokens, layout="NHD")
        self.run(partitions, 32, UNEVEN, page_tokens=page_tokens, layout="HND")

    @pytest.mark.parametrize("sms", [24, 132])
    def test_a_graph_follows_changed_lengths(self, partitions, sms):
        longest = [2000] * 20
        cache = Cache(longest, 8, 128, torch.bfloat16, "HND")
        q = torch.randn(20, 32, 128, device="cuda").to(torch.bfloat16)
        out = torch.full_like(q, NAN)
        kernel = DecodeAttention(AttentionShape(32, 8, 128), sms=sms, max_seqs=20)
        part, lengths_S = stream_of(partitions, sms), cache.lengths_S.clone()
        arguments = (q, cache.pool[:, 0], cache.pool[:, 1], cache.tables, lengths_S, out)
        torch.cuda.synchronize()
        with torch.cuda.stream(part.stream):
            kernel(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=part.stream):
            kernel(*arguments)
        for lengths in (
            [1] * 20,
            [(i * 97) % 2000 for i in range(20)],
            longest,
            [0] * 19 + [1777],
            [16 * i for i in range(20)],
        ):
            lengths_S.copy_(torch.tensor(lengths, dtype=torch.int32))
            q.copy_(torch.randn_like(q))
            out.fill_(NAN)
            torch.cuda.synchronize()
            with torch.cuda.stream(part.stream):
                graph.replay()
            part.stream.synchronize()
            assert_close(
                out,
                cache.reference(q, lengths),
                ATTENTION_BOUND[torch.bfloat16],
                f"{sms} SMs, {lengths}",
            )

    def test_scale_and_large_scores(self, partitions):
        cache = Cache([700, 3], 2, 128, torch.bfloat16, "HND")
        q = 30 * torch.randn(2, 8, 128, device="cuda").to(torch.bfloat16)
        kernel = DecodeAttention(AttentionShape(8, 2, 128), sms=16, max_seqs=2)
        with torch.cuda.stream(partitions.pair(16).decode.stream):
            out = kernel(q, cache.pool[:, 0], cache.pool[:, 1], cache.tables, cache.lengths_S)
        torch.cuda.synchronize()
        assert_close(out, cache.reference(q), ATTENTION_BOUND[torch.bfloat16], "large scores")

    def test_tensors_that_do_not_fit_are_rejected(self, partitions):
        cache = Cache([20, 3], 2, 128, torch.bfloat16, "HND")
        q = torch.randn(2, 8, 128, device="cuda").to(torch.bfloat16)
        kernel = DecodeAttention(AttentionShape(8, 2, 128), sms=16, max_seqs=1)
        k, v = cache.pool[:, 0], cache.pool[:, 1]
        with pytest.raises(ValueError, match="max_seqs"):
            kernel(q, k, v, cache.tables, cache.lengths_S)
        kernel = DecodeAttention(AttentionShape(8, 2, 128), sms=16, max_seqs=2)
        with pytest.raises(ValueError, match="lengths_S"):
            kernel(q, k, v, cache.tables, cache.lengths_S.long())
        with pytest.raises(ValueError, match="k_pool"):
            kernel(q, k.transpose(1, 2), v, cache.tables, cache.lengths_S)
        with pytest.raises(ValueError, match="q_SHD"):
            kernel(q.float(), k, v, cache.tables, cache.lengths_S)


@pytest_gpu
@needs_gpu
class TestGemm:
    @pytest.mark.parametrize("m", [1, 3, 8, 17, 63, 64, 65, 100, 128])
    @pytest.mark.parametrize(
        ("n", "k"), [(4096, 4096), (6144, 512), (4104, 64), (8, 128), (1000, 1088)]
    )
    def test_every_partition(self, partitions, m, n, k):
        from counterpoint.device.cuda.kernels.gemm import SkinnyGemm

        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("for Hopper")
        torch.seed()
        x, w = (
            torch.randn(m, k, device="cuda").bfloat16(),
            torch.randn(n, k, device="cuda").bfloat16(),
        )
        reference = x.float() @ w.float().T
        for sms in (24, 132):
            part, kernel, out = (
                stream_of(partitions, sms),
                SkinnyGemm(sms),
                torch.full((m, n), NAN, device="cuda").bfloat16(),
            )
            torch.cuda.synchronize()
            with torch.cuda.stream(part.stream):
                kernel(x, w, out)
            part.stream.synchronize()
            assert_close(out, reference, GEMM_BOUND, f"{m} x {n} x {k} on {sms} SMs")

    @pytest.mark.parametrize("m", [1, 3, 17, 64, 65, 128])
    @pytest.mark.parametrize(
        ("n", "k"), [(4096, 4096), (6144, 512), (4112, 128), (16, 256), (1008, 1152), (1024, 28672)]
    )
    def test_e4m3(self, partitions, m, n, k):
        from counterpoint.device.cuda.gemm_autotune import scaled_matmul
        from counterpoint.device.cuda.kernels.gemm import SkinnyGemm

        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("for Hopper")
        torch.seed()
        x = quantise_rows(torch.randn(m, k, device="cuda") * torch.rand(m, 1, device="cuda") * 10)
        w = quantise_rows(torch.randn(n, k, device="cuda") * 0.02)
        reference = x.dequantise() @ w.dequantise().T
        for sms in (24, 132):
            part, kernel, out = (
                stream_of(partitions, sms),
                SkinnyGemm(sms),
                torch.full((m, n), NAN, device="cuda").bfloat16(),
            )
            torch.cuda.synchronize()
            with torch.cuda.stream(part.stream):
                kernel(x, w, out)
                by_torch = scaled_matmul(x, w)
            part.stream.synchronize()
            assert_close(out, reference, GEMM_BOUND_FP8, f"{m} x {n} x {k} on {sms} SMs")
            assert_close(
                by_torch, reference, GEMM_BOUND_FP8, f"torch's, {m} x {n} x {k} on {sms} SMs"
            )

    @pytest.mark.parametrize("sms", [24, 132])
    def test_chained_launches_wait_for_what_they_read(self, partitions, sms):
        """Programmatic dependent launch, eager and in a graph: each kernel reads the previous one's
        output."""
        from counterpoint.device.cuda.kernels.gemm import SkinnyGemm

        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("for Hopper")
        part, gemm = stream_of(partitions, sms), SkinnyGemm(sms, chained=True)
        lengths = [600, 33, 1, 2000]
        cache = Cache(lengths, 8, 128, torch.bfloat16, "HND")
        shape = AttentionShape(16, 8, 128)
        attend = DecodeAttention(shape, sms=sms, max_seqs=4, chained=True)
        w1, w2 = (torch.randn(2048, 2048, device="cuda").bfloat16() / 45 for _ in range(2))
        x, q, a, y = (torch.empty(4, 2048, device="cuda").bfloat16() for _ in range(4))

        def chain():
            gemm(x, w1, q)
            attend(
                q.view(4, 16, 128),
                cache.pool[:, 0],
                cache.pool[:, 1],
                cache.tables,
                cache.lengths_S,
                a.view(4, 16, 128),
            )
            gemm(a, w2, y)

        def check(what):
            reference_q = x.float() @ w1.float().T
            assert_close(q, reference_q, GEMM_BOUND, what)
            reference_a = cache.reference(q.view(4, 16, 128))
            assert_close(a.view(4, 16, 128), reference_a, ATTENTION_BOUND[torch.bfloat16], what)
            assert_close(y, a.float() @ w2.float().T, GEMM_BOUND, what)

        x.copy_(torch.randn_like(x))
        torch.cuda.synchronize()
        with torch.cuda.stream(part.stream):
            chain()
        torch.cuda.synchronize()
        check("eager")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=part.stream):
            for _ in range(3):
                chain()
        for turn in range(5):
            for t in (q, a, y):
                t.fill_(NAN)
            x.copy_(torch.randn_like(x))
            torch.cuda.synchronize()
            with torch.cuda.stream(part.stream):
                graph.replay()
            torch.cuda.synchronize()
            check(f"replay {turn}")
