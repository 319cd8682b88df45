"""A decoder's small operations, fused, in Triton.

Owns: norms, SiLU, RoPE with the write to the KV pool, the gather of a context, and decode attention
for shapes that no faster kernel supports.
Promises: each element is read and written once; arithmetic is float32, rounded once. `add_rms_norm`
equals an add and then `rms_norm`, bit for bit. No host synchronisation, so all can be captured.
Must not: be imported without Triton (ops.py imports it only for a GPU).

Shapes: T tokens, L context tokens, D features, F ffn, H query heads, K KV heads, A head size, E =
(H + 2 * K) * A, B sequences, P pages, C parts of a sequence. A pool is [pages, page tokens, K, A]
with any strides of the first three axes, the same for K and V; elements may be e4m3, of scale 1.
Split-KV decode attention: Flash-Decoding (Dao et al. 2023), softmax as in arXiv:1805.02867.
"""

# Pyright does not know Triton's builtins inside kernels.
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# ---------------------------------------------------------------- norms


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    tl.store(out_ptr + row + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(x_ptr, delta_ptr, weight_ptr, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # First rounded, then normed, as if by two kernels.
    rounded = (x + delta).to(x_ptr.dtype.element_ty)
    total = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 0) / size + eps)
    tl.store(x_ptr + row + at, rounded, mask=inside)
    tl.store(
        delta_ptr + row + at, (total * scale * weight).to(delta_ptr.dtype.element_ty), mask=inside
    )


def warps_for(block: int) -> int:
    return min(16, max(1, block // 512))


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x_TD = x_TD.contiguous()
    rows, size = x_TD.shape
    out_TD = torch.empty_like(x_TD)
    block = triton.next_power_of_2(size)
    if rows:
        rms_norm_kernel[(rows,)](
            x_TD, weight_D, out_TD, size, eps, BLOCK=block, num_warps=warps_for(block)
        )
    return out_TD


def add_rms_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + delta in place of x, and its norm in place of delta."""
    rows, size = x_TD.shape
    block = triton.next_power_of_2(size)
    if rows:
        add_rms_norm_kernel[(rows,)](
            x_TD, delta_TD, weight_D, size, eps, BLOCK=block, num_warps=warps_for(block)
        )
    return x_TD, delta_TD


# ---------------------------------------------------------------- feed-forward


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x_ptr + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(x_T2F: Tensor) -> Tensor:
    rows, size = x_T2F.shape[0], x_T2F.shape[1] // 2
    out_TF = x_T2F.new_empty(rows, size)
    block = min(2048, triton.next_power_of_2(size))
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(size, block))](
            x_T2F, out_TF, size, BLOCK=block, num_warps=4
        )
    return out_TF


# ---------------------------------------------------------------- RoPE and the KV pool


@triton.jit
def turn_heads(
    x_ptr, out_ptr, out_stride, norm_ptr, cos, sin, heads, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Norm and rotate `heads` contiguous heads at x_ptr, to out_ptr, `out_stride` apart."""
    head = tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF_PAD)[None, :]
    inside = (head < heads) & (at < HALF)
    offset = head * (2 * HALF) + at
    first = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = 1.0 / tl.sqrt(square / (2 * HALF) + eps)
        in_half = at < HALF
        first = (
            first * scale[:, None] * tl.load(norm_ptr + at, mask=in_half, other=0.0).to(tl.float32)
        )
        second = (
            second
            * scale[:, None]
            * tl.load(norm_ptr + HALF + at, mask=in_half, other=0.0).to(tl.float32)
        )
    to = head * out_stride + at
    tl.store(out_ptr + to, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(
        out_ptr + to + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def rope_and_append_kernel(
    x_ptr, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr, q_ptr, k_ptr, v_ptr, row_ptr,
    heads, kv_heads, eps, page_tokens, page_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    size = 2 * HALF
    at = tl.arange(0, HALF_PAD)
    cos = tl.load(cos_ptr + token * HALF + at, mask=at < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + at, mask=at < HALF, other=0.0)[None, :]
    x_ptr += token * (heads + 2 * kv_heads) * size
    turn_heads(
        x_ptr,
        q_ptr + token * heads * size,
        size,
        query_norm_ptr,
        cos,
        sin,
        heads,
        eps,
        HEADS,
        HALF,
        HALF_PAD,
        NORM,
    )
    row = tl.load(row_ptr + token).to(tl.int64)
    to = row // page_tokens * page_stride + row % page_tokens * token_stride
    x_ptr += heads * size
    turn_heads(
        x_ptr,
        k_ptr + to,
        head_stride,
        key_norm_ptr,
        cos,
        sin,
        kv_heads,
        eps,
        KV_HEADS,
        HALF,
        HALF_PAD,
        NORM,
    )
    head = tl.arange(0, KV_HEADS)[:, None]
    column = tl.arange(0, 2 * HALF_PAD)[None, :]
    inside = (head < kv_heads) & (column < size)
    v = tl.load(x_ptr + (kv_heads + head) * size + column, mask=inside, other=0.0)
    tl.store(v_ptr + to + head * head_stride + column, v.to(v_ptr.dtype.element_ty), mask=inside)


def rope_and_append(
    x_TE: Tensor,
    angles: tuple[Tensor, Tensor],
    query_norm_A: Tensor | None,
    key_norm_A: Tensor | None,
    eps: float,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_rows_T: Tensor,
) -> Tensor:
    """`angles`: cosines and sines, float32 [T, A / 2], contiguous."""
    cos, sin = angles
    kv_heads, head_dim = k_pages.shape[2:]
    rows = x_TE.shape[0]
    heads = x_TE.shape[1] // head_dim - 2 * kv_heads
    q_THA = x_TE.new_empty(rows, heads, head_dim)
    half = head_dim // 2
    if rows:
        rope_and_append_kernel[(rows,)](
            x_TE, cos, sin, cos if query_norm_A is None else query_norm_A,
            cos if key_norm_A is None else key_norm_A, q_THA, k_pages, v_pages, kv_rows_T,
            heads, kv_heads, eps, k_pages.shape[1], *k_pages.stride()[:3],
            HEADS=triton.next_power_of_2(heads), KV_HEADS=triton.next_power_of_2(kv_heads),
            HALF=half, HALF_PAD=triton.next_power_of_2(half), NORM=query_norm_A is not None,
            num_warps=4,
        )  # fmt: skip
    return q_THA


@triton.jit
def gather_kernel(
    k_ptr, v_ptr, row_ptr, k_out_ptr, v_out_ptr,
    page_tokens, page_stride, token_stride, head_stride,
    KV_HEADS: tl.constexpr, KV_HEADS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + token).to(tl.int64)
    head = tl.arange(0, KV_HEADS_PAD)[:, None]
    at = tl.arange(0, SIZE_PAD)[None, :]
    inside = (head < KV_HEADS) & (at < SIZE)
    offset = (
        row // page_tokens * page_stride
        + row % page_tokens * token_stride
        + head * head_stride
        + at
    )
    to = (token * KV_HEADS + head) * SIZE + at
    tl.store(
        k_out_ptr + to,
        tl.load(k_ptr + offset, mask=inside).to(k_out_ptr.dtype.element_ty),
        mask=inside,
    )
    tl.store(
        v_out_ptr + to,
        tl.load(v_ptr + offset, mask=inside).to(v_out_ptr.dtype.element_ty),
        mask=inside,
    )


def gather_context(
    k_pages: Tensor, v_pages: Tensor, rows_L: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """These pool rows (page * page tokens + offset), contiguous: [L, K, A] of K and of V, in
    `dtype` (None: the pool's)."""
    page_tokens, kv_heads, head_dim = k_pages.shape[1:]
    k_LKA, v_LKA = (
        k_pages.new_empty(rows_L.shape[0], kv_heads, head_dim, dtype=dtype or k_pages.dtype)
        for _ in range(2)
    )
    if rows_L.shape[0]:
        gather_kernel[(rows_L.shape[0],)](
            k_pages, v_pages, rows_L, k_LKA, v_LKA, page_tokens, *k_pages.stride()[:3],
            KV_HEADS=kv_heads, KV_HEADS_PAD=triton.next_power_of_2(kv_heads),
            SIZE=head_dim, SIZE_PAD=triton.next_power_of_2(head_dim), num_warps=4,
        )  # fmt: skip
    return k_LKA, v_LKA


# ---------------------------------------------------------------- decode attention for any shape


@triton.jit
def decode_part_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, top_ptr, sum_ptr,
    scale, heads, kv_heads, parts, page_tokens,
    table_stride, page_stride, token_stride, head_stride,
    GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of a sequence, for one KV head's queries. Writes softmax numerators and sums."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(length_ptr + sequence)
    each = tl.cdiv(tl.cdiv(length, parts), BLOCK) * BLOCK
    begin = part * each
    end = tl.minimum(begin + each, length)

    group = heads // kv_heads
    g = tl.arange(0, GROUP)
    a = tl.arange(0, SIZE_PAD)
    head = kv_head * group + g
    q_mask = (g < group)[:, None] & (a < SIZE)[None, :]
    q = tl.load(
        q_ptr + (sequence * heads + head)[:, None] * SIZE + a[None, :], mask=q_mask, other=0.0
    )

    top = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, SIZE_PAD], tl.float32)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < end
        page = tl.load(
            table_ptr + sequence * table_stride + at // page_tokens, mask=inside, other=0
        ).to(tl.int64)
        row = page * page_stride + at % page_tokens * token_stride + kv_head * head_stride
        offset = row[:, None] + a[None, :]
        mask = inside[:, None] & (a < SIZE)[None, :]
        k = tl.load(k_ptr + offset, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + offset, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        kept = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * kept + tl.sum(weights, 1)
        out = out * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher

    entry = (sequence * heads + head) * parts + part
    tl.store(out_ptr + entry[:, None] * SIZE + a[None, :], out, mask=q_mask)
    tl.store(top_ptr + entry, top, mask=g < group)
    tl.store(sum_ptr + entry, total, mask=g < group)


@triton.jit
def decode_merge_kernel(
    part_ptr,
    top_ptr,
    sum_ptr,
    out_ptr,
    parts,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    PARTS: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)  # sequence and head
    c = tl.arange(0, PARTS)
    a = tl.arange(0, SIZE_PAD)
    top = tl.load(top_ptr + entry * parts + c, mask=c < parts, other=-float("inf"))
    total = tl.load(sum_ptr + entry * parts + c, mask=c < parts, other=0.0)
    weight = tl.exp(top - tl.max(top, 0))
    mask = (c < parts)[:, None] & (a < SIZE)[None, :]
    out = tl.load(part_ptr + (entry * parts + c)[:, None] * SIZE + a[None, :], mask=mask, other=0.0)
    merged = tl.sum(out * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out_ptr + entry * SIZE + a, merged.to(out_ptr.dtype.element_ty), mask=a < SIZE)


def decode_attention(
    q_BHA: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table_BP: Tensor,
    length_B: Tensor,
    units: int,
    out: Tensor | None = None,
) -> Tensor:
    """Softmax(q K^T / sqrt(A)) V over positions [0, length), every length at least 1; [B, H * A].
    `units`: SMs to fill. The host fixes the number of parts, the device where each ends, so a
    captured launch stays valid as lengths grow."""
    page_tokens, kv_heads, head_dim = k_pages.shape[1:]
    rows, heads = q_BHA.shape[:2]
    parts = max(1, min(64, 4 * units // max(1, rows * kv_heads)))
    pieces = q_BHA.new_empty(rows, heads, parts, head_dim, dtype=torch.float32)
    tops, sums = (q_BHA.new_empty(rows, heads, parts, dtype=torch.float32) for _ in range(2))
    out = q_BHA.new_empty(rows, heads * head_dim) if out is None else out
    if rows:
        size_pad = max(16, triton.next_power_of_2(head_dim))
        decode_part_kernel[(rows, kv_heads, parts)](
            q_BHA, k_pages, v_pages, table_BP, length_B, pieces, tops, sums,
            head_dim**-0.5, heads, kv_heads, parts, page_tokens,
            table_BP.stride(0), *k_pages.stride()[:3],
            GROUP=max(16, triton.next_power_of_2(heads // kv_heads)),
            SIZE=head_dim, SIZE_PAD=size_pad, BLOCK=64, num_warps=4,
        )  # fmt: skip
        decode_merge_kernel[(rows * heads,)](
            pieces,
            tops,
            sums,
            out,
            parts,
            SIZE=head_dim,
            SIZE_PAD=size_pad,
            PARTS=triton.next_power_of_2(parts),
            num_warps=1,
        )
    return out
