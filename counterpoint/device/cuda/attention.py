"""Attention of a pass: which kernel computes which rows.

Owns: the attention plan of a pass, and the kernels' workspaces.
Promises: the first rows of a pass, one token each, use a decode kernel that reads pages in place.
The other rows are prefill: their context is first gathered into contiguous memory, which costs far
less than attention over it and allows faster kernels. At most MAX_GATHERED_TOKENS are gathered at
once, which bounds memory. Planning happens once per pass and never waits.
Must not: know a request.

Prefill kernel: FlashInfer where it supports the shape (FlashAttention-3 on Hopper: Shah et al.,
arXiv:2407.08608), else torch, one segment at a time. Decode kernel: the one for few SMs
(kernels/attention.py) where it supports the shape, else Triton (triton_kernels.py).

Shapes: T rows of a pass, B of them decodes, L context tokens of the prefill segments, H query
heads, K KV heads, A head size, P pages of a block-table row.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from counterpoint.model.ops import Ops
from counterpoint.spec import ModelSpec

if TYPE_CHECKING:
    from counterpoint.device.cuda.kernels.attention import DecodeAttention

log = logging.getLogger(__name__)

# Context tokens gathered at once: 256 MiB for a layer of Llama-3.1-8B.
MAX_GATHERED_TOKENS = 1 << 16

# (q, k pages, v pages, block table, lengths) -> [B, H * A]
DecodeKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class PrefillAttention(Protocol):
    """Planned prefill attention of one pass."""

    def run(self, q_THA: Tensor, k_LKA: Tensor, v_LKA: Tensor, out_THA: Tensor) -> None:
        """Causal: a segment's queries are the last positions of its context."""
        ...

    def close(self) -> None:
        """The pass has finished on the device: the plan's buffers may be reused."""
        ...


class AttentionPlanner(Protocol):
    name: str

    def plan(self, queries: Sequence[int], contexts: Sequence[int]) -> PrefillAttention:
        """For segments with these numbers of new tokens and context tokens (new ones included)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """Rows [first, last) of a pass, from some prompts, and the pool rows of their context."""

    first: int
    last: int
    prefill: PrefillAttention
    context_L: Tensor  # int32


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Attention of one pass. The first `len(length_B)` rows are decodes, the others belong to
    `prompts`."""

    table_BP: Tensor  # int32
    length_B: Tensor  # int32
    decode: DecodeKernel
    prompts: tuple[PromptRows, ...] = ()

    def close(self) -> None:
        for some in self.prompts:
            some.prefill.close()


def group_for_gather(contexts: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges [first, last) of prompts to gather together: at most MAX_GATHERED_TOKENS, or one
    prompt."""
    edges, total = [0], 0
    for number, context in enumerate(contexts):
        if total and total + context > MAX_GATHERED_TOKENS:
            edges.append(number)
            total = 0
        total += context
    return list(itertools.pairwise([*edges, len(contexts)]))


Gather = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
RunLayer = Callable[[Tensor, Tensor], None]  # k pages, v pages of a layer


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """The operator. `gather` copies pool rows into contiguous memory."""

    gather: Gather

    def __call__(
        self, q_THA: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """[T, H * A]. Padding rows, which the plan does not cover, hold arbitrary values."""
        if len(plan.length_B) == len(q_THA):
            return plan.decode(q_THA, k_pages, v_pages, plan.table_BP, plan.length_B)
        out_TE = torch.empty_like(q_THA).flatten(1)
        self.prepare_layers(q_THA, k_pages, v_pages, plan, out_TE)(k_pages, v_pages)
        return out_TE

    def prepare_layers(
        self, q_THA: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, out_TE: Tensor
    ) -> RunLayer:
        """Attention for one layer after another, with the same query and output memory and pools of
        equal shape: checks and arguments are prepared once."""
        decodes, out_THA = plan.length_B.shape[0], out_TE.view(q_THA.shape)
        parts = [
            (p.prefill.run, q_THA[p.first : p.last], p.context_L, out_THA[p.first : p.last])
            for p in plan.prompts
        ]
        decode = (
            prepare_decode_layers(q_THA[:decodes], k_pages, v_pages, plan, out_THA[:decodes])
            if decodes
            else None
        )

        def attend(k_pages: Tensor, v_pages: Tensor) -> None:
            for prefill, some_THA, context_L, results_THA in parts:
                prefill(some_THA, *self.gather(k_pages, v_pages, context_L), results_THA)
            if decode is not None:
                decode(k_pages, v_pages)

        return attend


def prepare_decode_layers(
    q_BHA: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, out_BHA: Tensor
) -> RunLayer:
    if isinstance(plan.decode, FewSmDecode):
        return plan.decode.kernel.prepare_layers(
            q_BHA, k_pages, v_pages, plan.table_BP, plan.length_B, out_BHA
        )
    out_BE = out_BHA.flatten(1)

    def attend(k_pages: Tensor, v_pages: Tensor) -> None:
        out_BE.copy_(plan.decode(q_BHA, k_pages, v_pages, plan.table_BP, plan.length_B))

    return attend


# ---------------------------------------------------------------- prefill by torch


@dataclass(frozen=True, slots=True)
class TorchPrefill:
    queries: tuple[int, ...]
    contexts: tuple[int, ...]

    def run(self, q_THA: Tensor, k_LKA: Tensor, v_LKA: Tensor, out_THA: Tensor) -> None:
        group = q_THA.shape[1] // k_LKA.shape[1]
        row = begin = 0
        for queries, context in zip(self.queries, self.contexts, strict=True):
            q, k, v = (
                q_THA[row : row + queries],
                k_LKA[begin : begin + context],
                v_LKA[begin : begin + context],
            )
            q, k, v = (
                x.transpose(0, 1)[None]
                for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
            )
            if queries == context:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=causal_lower_right(queries, context)
                )
            out_THA[row : row + queries] = out[0].transpose(0, 1)
            row, begin = row + queries, begin + context

    def close(self) -> None:
        pass


class TorchPlanner:
    name = "torch"

    def plan(self, queries: Sequence[int], contexts: Sequence[int]) -> PrefillAttention:
        return TorchPrefill(tuple(queries), tuple(contexts))


# ---------------------------------------------------------------- prefill by FlashInfer


class FlashInferPlanner:
    """Reuses plans. Copies read a plan's host buffers in stream order, so a plan must not serve a
    second pass before the first has finished."""

    WORKSPACE_BYTES = 128 << 20

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        """Raises FlashInfer's own error where it is missing or has no kernel for the shape."""
        import flashinfer  # pyright: ignore[reportMissingImports]

        self._wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        self._shape = (spec.heads, spec.kv_heads, spec.head_dim)
        self._dtype = dtype
        self._backend = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "auto"
        self.name = f"FlashInfer {flashinfer.__version__} {self._backend}"
        self._workspace = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._idle: list[ReusablePlan] = []
        self._self_test(spec, device)

    def plan(self, queries: Sequence[int], contexts: Sequence[int]) -> FlashInferPrefill:
        plan = (
            self._idle.pop()
            if self._idle
            else ReusablePlan(self._wrapper(self._workspace, "NHD", backend=self._backend))
        )
        ends = plan.indptrs(queries, contexts)
        plan.wrapper.plan(
            *ends, *self._shape, causal=True, q_data_type=self._dtype, kv_data_type=self._dtype
        )
        return FlashInferPrefill(plan, self._idle)

    def _self_test(self, spec: ModelSpec, device: torch.device) -> None:
        q, k, v = (
            torch.zeros(4, n, spec.head_dim, dtype=self._dtype, device=device)
            for n in (spec.heads, *[spec.kv_heads] * 2)
        )
        planned = self.plan([2, 2], [2, 2])
        planned.run(q, k, v, torch.empty_like(q))
        torch.cuda.synchronize(device)
        planned.close()


class ReusablePlan:
    """FlashInfer's wrapper, with pinned memory for its arguments. It starts with room for CAPACITY
    prompts, since allocating pinned memory waits for the device."""

    CAPACITY = 1024

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._indptr_2S = self._pinned(self.CAPACITY)

    def indptrs(self, queries: Sequence[int], contexts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Cumulative sums [0, a, a + b, …] of queries and contexts, int32, in pinned memory."""
        if len(queries) >= self._indptr_2S.shape[1]:
            self._indptr_2S = self._pinned(2 * len(queries))
        ends_2S = self._indptr_2S[:, : len(queries) + 1]
        torch.cumsum(
            torch.tensor([queries, contexts], dtype=torch.int32),
            1,
            dtype=torch.int32,
            out=ends_2S[:, 1:],
        )
        return ends_2S[0], ends_2S[1]

    def _pinned(self, prompts: int) -> Tensor:
        with torch.inference_mode(False):  # so that it is writable in any mode
            return torch.zeros(2, prompts + 1, dtype=torch.int32, pin_memory=True)


@dataclass(frozen=True, slots=True)
class FlashInferPrefill:
    plan: ReusablePlan
    idle: list[ReusablePlan]

    def run(self, q_THA: Tensor, k_LKA: Tensor, v_LKA: Tensor, out_THA: Tensor) -> None:
        self.plan.wrapper.run(q_THA, k_LKA, v_LKA, out=out_THA)

    def close(self) -> None:
        self.idle.append(self.plan)


def choose_planner(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> AttentionPlanner:
    """FlashInfer if it supports the shape, else torch."""
    try:
        return FlashInferPlanner(spec, dtype, device)
    except Exception as error:
        # FlashInfer is optional: any failure falls back to torch.
        log.warning(
            "prefill attention by torch, not by FlashInfer: %s: %s",
            type(error).__name__,
            str(error).split("\n")[0],
        )
        return TorchPlanner()


# ---------------------------------------------------------------- decode


def choose_decode_kernel(
    spec: ModelSpec, ops: Ops, device: torch.device, units: int, max_rows: int
) -> tuple[str, DecodeKernel]:
    """The name of a decode kernel, and the kernel, for `units` SMs and at most `max_rows` rows. It
    owns a workspace, so each stream needs its own."""
    from counterpoint.device.cuda import triton_kernels
    from counterpoint.device.cuda.kernels.attention import AttentionShape, DecodeAttention
    from counterpoint.device.cuda.kernels.nvcc import KernelError

    def by_triton(q: Tensor, k: Tensor, v: Tensor, table_BP: Tensor, length_B: Tensor) -> Tensor:
        return triton_kernels.decode_attention(q, k, v, table_BP, length_B, units)

    try:
        shape = AttentionShape(
            spec.heads, spec.kv_heads, spec.head_dim, ops.weight_dtype, ops.kv_dtype, "NHD"
        )
        kernel = DecodeAttention(
            shape, sms=units, max_seqs=max_rows, device=device.index or 0, chained=True
        )
    except (ValueError, KernelError) as error:
        log.warning("decode attention by Triton: %s", error)
        return "Triton", by_triton

    return "few SMs", FewSmDecode(kernel)


@dataclass(frozen=True, slots=True, eq=False)
class FewSmDecode:
    """The kernel for few SMs (kernels/attention.py), as a DecodeKernel."""

    kernel: DecodeAttention

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, table_BP: Tensor, length_B: Tensor
    ) -> Tensor:
        return self.kernel(q, k, v, table_BP, length_B).flatten(1)


def reference_decode(
    q_BHA: Tensor, k_pages: Tensor, v_pages: Tensor, table_BP: Tensor, length_B: Tensor
) -> Tensor:
    """The reference of every decode kernel: float32, one sequence at a time. Synchronises."""
    page_tokens = k_pages.shape[1]
    group = q_BHA.shape[1] // k_pages.shape[2]
    out_BHA = torch.empty_like(q_BHA)
    for row, length in enumerate(length_B.tolist()):
        pages = table_BP[row, : -(-length // page_tokens)].long()
        k_HLA, v_HLA = (
            x[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1).transpose(0, 1)
            for x in (k_pages, v_pages)
        )
        scores_H1L = q_BHA[row].float()[:, None] @ k_HLA.transpose(1, 2) / q_BHA.shape[2] ** 0.5
        out_BHA[row] = (scores_H1L.softmax(-1) @ v_HLA)[:, 0].to(q_BHA.dtype)
    return out_BHA.flatten(1)
