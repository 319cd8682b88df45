"""Decode attention in each partition: our kernel and FlashInfer's (for cuda_kernels.py).

Promises: every timed output is also compared with a float32 reference.
Must not: be imported by code that serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.cuda_timing import capture_calls, time_interleaved
from counterpoint.device.cuda.green_contexts import SmPartition
from counterpoint.device.cuda.kernels.attention import AttentionShape, DecodeAttention, Layout
from counterpoint.model.fp8 import to_fp8

HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 32, 8, 128, 16  # Llama-3.1-8B


class AttentionProblem:
    """Decode attention of `batch` sequences of `context` tokens in shuffled pages, with `sets` KV
    pools."""

    def __init__(self, batch: int, context: int, sets: int, layout: Layout) -> None:
        pages = -(-context // PAGE_TOKENS)
        inner = (KV_HEADS, PAGE_TOKENS) if layout == "HND" else (PAGE_TOKENS, KV_HEADS)
        self.layout: Layout = layout
        self.batch, self.context = batch, context
        self.kv = [
            torch.randn(batch * pages + 8, 2, *inner, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
            for _ in range(sets)
        ]
        self.order = torch.randperm(batch * pages + 8)[: batch * pages].to(torch.int32)
        self.tables = self.order.view(batch, pages).cuda()
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.q = torch.randn(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.bytes = batch * context * KV_HEADS * HEAD_DIM * 2 * 2

    def reference(self, i: int, sequences: Sequence[int]) -> torch.Tensor:
        """Float32 attention of some sequences on pool i: [sequences, heads, head_dim]."""
        rows = []
        for s in sequences:
            kv = self.kv[i][self.tables[s].long()].float()
            if self.layout == "HND":
                kv = kv.transpose(2, 3)
            k, v = (kv[:, j].reshape(-1, KV_HEADS, HEAD_DIM)[: self.context] for j in (0, 1))
            q = self.q[s].float().view(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
            weights = (torch.einsum("kgd,tkd->kgt", q, k) / HEAD_DIM**0.5).softmax(-1)
            rows.append(torch.einsum("kgt,tkd->kgd", weights, v).reshape(HEADS, HEAD_DIM))
        return torch.stack(rows)


def flashinfer_decode(problem: AttentionProblem) -> Callable[[int, torch.Tensor], Any]:
    """FlashInfer's tensor-core decode as released, planned once without regard to partitions."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, problem.layout, use_tensor_cores=True, backend="fa2"
    )
    pages = problem.tables.shape[1]
    indptr = torch.arange(problem.batch + 1, dtype=torch.int32) * pages
    last = torch.full((problem.batch,), (problem.context - 1) % PAGE_TOKENS + 1, dtype=torch.int32)
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(
        indptr, problem.order.cuda(), last, HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS, **kinds
    )
    return lambda i, out: wrapper.run(problem.q, problem.kv[i], out=out)


def time_attention(
    parts: dict[str, SmPartition],
    problems: Sequence[tuple[int, int]],
    layouts: Sequence[Layout],
    fp8: bool,
) -> dict[str, dict[str, float]]:
    """GB/s of KV cache that decode attention reads in each partition, for (batch, context)
    problems. `fp8`: of e4m3, our kernel only."""
    table: dict[str, dict[str, float]] = {name: {} for name in parts}
    for layout in layouts:
        for batch, context in problems:
            sets = max(2, min(24, -(-(256 << 20) // (batch * context * KV_HEADS * HEAD_DIM * 4))))
            problem = AttentionProblem(batch, context, sets, layout)
            for name, row in (
                attention_fp8(parts, problem) if fp8 else attention_times(parts, problem)
            ).items():
                table[name] |= row
    return table


def attention_fp8(
    parts: dict[str, SmPartition], problem: AttentionProblem
) -> dict[str, dict[str, float]]:
    problem.kv = [to_fp8(kv) for kv in problem.kv]
    problem.bytes //= 2
    sets, some = len(problem.kv), sorted({0, problem.batch // 2, problem.batch - 1})
    reference, label = (
        problem.reference(0, some),
        f"{problem.layout} {problem.batch} x {problem.context} e4m3",
    )
    table = {}
    for name, part in parts.items():
        run, out = make_our_decode(problem, part), torch.full_like(problem.q, float("nan"))
        torch.cuda.synchronize()
        time = time_interleaved(
            {"ours": capture_calls(bind_output(run, out, sets), sets, part.stream)}, part.stream
        )["ours"]
        table[name] = {
            f"{label} GB/s": problem.bytes * sets / time / 1e6,
            f"{label} us": time / sets * 1e3,
        }
        with torch.cuda.stream(part.stream):
            run(0, out.fill_(float("nan")))
        part.stream.synchronize()
        check_output(f"{label} on {name} SMs", out[some], reference, 6e-3)
    return table


def attention_times(
    parts: dict[str, SmPartition], problem: AttentionProblem
) -> dict[str, dict[str, float]]:
    sets = len(problem.kv)
    some = sorted({0, problem.batch // 2, problem.batch - 1})
    reference = problem.reference(0, some)
    try:
        rival = flashinfer_decode(problem)
    except ImportError:
        rival = None
        print("FlashInfer is not installed: measured without it")
    table: dict[str, dict[str, float]] = {}
    for name, part in parts.items():
        runs = {"ours": make_our_decode(problem, part)}
        if rival is not None:
            runs["FlashInfer"] = rival
        outs = {who: torch.full_like(problem.q, float("nan")) for who in runs}
        torch.cuda.synchronize()
        graphs = {
            who: capture_calls(bind_output(run, outs[who], sets), sets, part.stream)
            for who, run in runs.items()
        }
        table[name] = {}
        for who, time in time_interleaved(graphs, part.stream).items():
            label = f"{problem.layout} {problem.batch} x {problem.context} {who}"
            table[name] |= {
                f"{label} GB/s": problem.bytes * sets / time / 1e6,
                f"{label} us": time / sets * 1e3,
            }
            with torch.cuda.stream(part.stream):
                runs[who](0, outs[who].fill_(float("nan")))
            part.stream.synchronize()
            check_output(f"{label} on {name} SMs", outs[who][some], reference, 6e-3)
    return table


def make_our_decode(
    problem: AttentionProblem, part: SmPartition, chained: bool = False
) -> Callable[[int, torch.Tensor], object]:
    dtype, kv_dtype = torch.bfloat16, problem.kv[0].dtype
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, dtype, kv_dtype, problem.layout)
    kernel = DecodeAttention(shape, sms=part.sms, max_seqs=problem.batch, chained=chained)

    def run(i: int, out: torch.Tensor) -> object:
        kv = problem.kv[i]
        return kernel(problem.q, kv[:, 0], kv[:, 1], problem.tables, problem.lengths, out)

    return run


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.float() - reference).norm() / reference.norm())


def check_output(what: str, out: torch.Tensor, reference: torch.Tensor, limit: float) -> None:
    error = relative_error(out, reference)
    if not error < limit:
        print(f"WRONG: {what}: relative error {error:.2e}")


def bind_output(
    run: Callable[[int, torch.Tensor], object], out: torch.Tensor, sets: int
) -> Callable[[int], object]:
    return lambda i: run(i % sets, out)
