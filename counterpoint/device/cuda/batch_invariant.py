"""Batch-invariant matrix products and attention in Triton, for --batch-invariant.

Owns: one kernel for all matrix products and one for all attention, each with one tile size.
Promises: a row's result depends only on that row and its context: not on the batch, on how a prompt
was chunked, on which rows are decodes, or on the SMs. No sum is split: K runs in blocks from first
to last; keys run in blocks of BLOCK from position 0. A block that a query does not see leaves its
sums exactly unchanged (times exp(0), plus 0).
Must not: be imported without Triton; choose anything by rows, lengths or units.

Cost: cuBLAS, FlashInfer and the kernels for few SMs are not used. A single request's long context
is read by only as many SMs as there are KV heads.

Shapes: R rows, K inputs, N outputs; T tokens, B decodes, L context tokens, I tiles, H query heads,
A head size.
"""

# Pyright does not know Triton's builtins inside kernels.
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from counterpoint.spec import ModelSpec

TILE = 64  # rows of a product's tile; queries x query heads per KV head of an attention tile
BLOCK = 64  # outputs, inputs and keys of a tile


# ---------------------------------------------------------------- products


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x_ptr, weight_ptr, out_ptr, rows, outputs, inputs, x_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        at = first + tl.arange(0, INPUTS)
        inside = at < inputs
        x = tl.load(
            x_ptr + row[:, None] * x_stride + at[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + output[None, :] * inputs + at[:, None],
            mask=(output < outputs)[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(x, weight, total, input_precision="ieee")
    to = out_ptr + row[:, None] * outputs + output[None, :]
    tl.store(
        to,
        total.to(out_ptr.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < outputs)[None, :],
    )


def matmul(x_RK: Tensor, weight_NK: Tensor) -> Tensor:
    rows, (outputs, inputs) = x_RK.shape[0], weight_NK.shape
    out_RN = x_RK.new_empty(rows, outputs)
    if rows:
        product_kernel[(triton.cdiv(outputs, BLOCK), triton.cdiv(rows, TILE))](
            x_RK,
            weight_NK,
            out_RN,
            rows,
            outputs,
            inputs,
            x_RK.stride(0),
            ROWS=TILE,
            OUTPUTS=BLOCK,
            INPUTS=BLOCK,
            num_warps=4,
        )
    return out_RN


def linear(x_RK: Tensor, packed: tuple[Tensor, Tensor | None]) -> Tensor:
    weight_NK, bias_N = packed
    out_RN = matmul(x_RK, weight_NK)
    return out_RN if bias_N is None else out_RN.add_(bias_N)


# ---------------------------------------------------------------- attention


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, first_ptr, count_ptr, position_ptr, owner_ptr, out_ptr,
    scale, heads, kv_heads, page_tokens, table_stride, page_stride, token_stride, head_stride,
    PAGED: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One tile: `count` queries from row `first`, at consecutive positions from `position`, of one
    KV head. Its context is row `owner` of the block table (PAGED), or starts at row `owner` of K
    and V."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(first_ptr + tile).to(tl.int64)
    count = tl.load(count_ptr + tile)
    position = tl.load(position_ptr + tile)
    owner = tl.load(owner_ptr + tile).to(tl.int64)

    group = heads // kv_heads
    m = tl.arange(0, GROUP * QUERIES)
    query = m // GROUP
    head = kv_head * group + m % GROUP
    a = tl.arange(0, SIZE_PAD)
    mine = ((query < count) & (m % GROUP < group))[:, None] & (a < SIZE)[None, :]
    place = ((first + query) * heads + head)[:, None] * SIZE + a[None, :]
    q = tl.load(q_ptr + place, mask=mine, other=0.0)

    top = tl.full([GROUP * QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([GROUP * QUERIES], tl.float32)
    out = tl.zeros([GROUP * QUERIES, SIZE_PAD], tl.float32)
    for begin in range(0, position + count, KEYS):
        at = begin + tl.arange(0, KEYS)
        inside = at < position + count
        if PAGED:
            page = tl.load(
                table_ptr + owner * table_stride + at // page_tokens, mask=inside, other=0
            ).to(tl.int64)
            row = page * page_stride + at % page_tokens * token_stride
        else:
            row = (owner + at) * token_stride
        offset = (row + kv_head * head_stride)[:, None] + a[None, :]
        mask = inside[:, None] & (a < SIZE)[None, :]
        k = tl.load(k_ptr + offset, mask=mask, other=0.0)
        v = tl.load(v_ptr + offset, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(at[None, :] <= (position + query)[:, None], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        kept = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * kept + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * kept[:, None], input_precision="ieee")
        top = higher
    tl.store(out_ptr + place, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=mine)


def tiled_attention(
    q_THA: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: tuple[Tensor, Tensor, Tensor, Tensor],
    table_BP: Tensor | None,
    strides: tuple[int, int, int],
    page_tokens: int,
    out: Tensor | None = None,
) -> Tensor:
    """[T, H * A], in `out` if given. `tiles`: first row, count, position and owner of each, int32
    [I]. `strides`: of a page, a token and a head."""
    heads, size = q_THA.shape[1:]
    kv_heads = k.shape[-2]
    out = q_THA.new_empty(q_THA.shape[0], heads * size) if out is None else out
    group = triton.next_power_of_2(heads // kv_heads)
    if tiles[0].shape[0]:
        attention_kernel[(tiles[0].shape[0], kv_heads)](
            q_THA, k, v, tiles[0] if table_BP is None else table_BP, *tiles, out,
            size**-0.5, heads, kv_heads, page_tokens,
            0 if table_BP is None else table_BP.stride(0), *strides,
            PAGED=table_BP is not None, GROUP=group, QUERIES=TILE // group, SIZE=size,
            SIZE_PAD=max(16, triton.next_power_of_2(size)), KEYS=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def decode_attention(
    q_BHA: Tensor, k_pages: Tensor, v_pages: Tensor, table_BP: Tensor, length_B: Tensor
) -> Tensor:
    """A DecodeKernel (attention.py)."""
    row_B = torch.arange(q_BHA.shape[0], dtype=torch.int32, device=q_BHA.device)
    tiles = row_B, torch.ones_like(row_B), length_B - 1, row_B
    page, token, head = k_pages.stride()[:3]
    return tiled_attention(
        q_BHA.contiguous(), k_pages, v_pages, tiles, table_BP, (page, token, head), k_pages.shape[1]
    )


@dataclass(frozen=True, slots=True, eq=False)
class InvariantPrefill:
    tiles: tuple[Tensor, Tensor, Tensor, Tensor]

    def run(self, q_THA: Tensor, k_LKA: Tensor, v_LKA: Tensor, out_THA: Tensor) -> None:
        token, head = k_LKA.stride()[:2]
        tiled_attention(
            q_THA.contiguous(), k_LKA, v_LKA, self.tiles, None, (0, token, head), 1, out_THA
        )

    def close(self) -> None:
        pass


class InvariantPlanner:
    """Prefill by the kernel that also decodes, over the gathered context."""

    name = "one kernel"

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        """Raises ValueError if a KV head's query heads do not fit a tile."""
        self._queries = TILE // triton.next_power_of_2(spec.heads // spec.kv_heads)
        if not self._queries:
            raise ValueError(
                f"{spec.heads} query heads on {spec.kv_heads} KV heads: at most {TILE} per KV head"
            )
        self._device = device

    def plan(self, queries: Sequence[int], contexts: Sequence[int]) -> InvariantPrefill:
        found: list[tuple[int, int, int, int]] = []
        row = begin = 0
        for count, context in zip(queries, contexts, strict=True):
            for offset in range(0, count, self._queries):
                found.append(
                    (
                        row + offset,
                        min(self._queries, count - offset),
                        context - count + offset,
                        begin,
                    )
                )
            row, begin = row + count, begin + context
        tiles_I4 = torch.tensor(found, dtype=torch.int32).reshape(-1, 4)
        if self._device.type == "cuda":
            tiles_I4 = tiles_I4.pin_memory()
        first, count, position, owner = tiles_I4.to(self._device, non_blocking=True).T.contiguous()
        return InvariantPrefill((first, count, position, owner))
