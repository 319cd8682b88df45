"""Ops: the operators of a decoder as a record of functions, and a plain-torch reference of each.

Owns: the signatures. Every record computes what the reference computes, up to rounding. The
reference is written to be read: float32, one segment after another. Must not: hold weights or state
between calls, or set threads.

Shapes: T tokens of the pass, S segments, N tokens of one segment, L its context length, P pages in
a block-table row, D hidden, F ffn, V vocabulary, H query heads, K KV heads, A head size, E features
of the fused Q, K and V: (H + 2 * K) * A.
Formulas: RMS norm arXiv:1910.07467; RoPE arXiv:2104.09864 in the half-split layout; SwiGLU
arXiv:2002.05202.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Ops:
    """The operators of one device. Results may alias or overwrite the arguments called `x` and
    `delta`; everything else is read only.

    name              for logs and reports
    weight_dtype      dtype that weights are loaded in before `pack_linear`
    kv_dtype          dtype of the KV pool that `rope_and_append` and `attention` use
    pack_linear       (weight [out, in], bias [out] or None) -> packed
    pack_head         the same for the LM head's weight, where that differs
    linear            (x [T, in], packed) -> [T, out]; x may have the form in which this record's
                      own operators return it
    pack_embedding    (weight [V, D]) -> table
    embed             (tokens [T], table) -> [T, D]
    rms_norm          (x [T, D], weight [D], eps) -> [T, D]
    add_rms_norm      (x, delta [T, D], weight, eps) -> x + delta, its norm: the same bits as
                      `add`, then `rms_norm`
    add               (x, delta) -> x + delta
    silu_mul          (x [T, 2F]: gate, then up) -> silu(gate) * up [T, F]
    rope_angles       (positions [T], inverse frequencies [A/2], scale) -> angles, computed once
                      for all layers of a call
    rope_and_append   (x [T, E], angles, query norm, key norm [A] or None, eps, k pages, v pages,
                      kv rows [T]) -> Q [T, H, A]: splits the fused projection, norms and rotates
                      Q and K, writes K and V to their rows of the pool
    plan_attention    (start [S], tokens [S], block table [S, P], page tokens) -> plan, made once
                      for all layers of a pass
    attention         (Q [T, H, A], k pages, v pages, plan) -> [T, H * A]: causal, over positions
                      [0, start + tokens)
    """

    name: str
    weight_dtype: torch.dtype
    kv_dtype: torch.dtype
    pack_linear: Callable[[Tensor, Tensor | None], Any]
    linear: Callable[[Tensor, Any], Tensor]
    pack_embedding: Callable[[Tensor], Tensor]
    embed: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    add: Callable[[Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    rope_angles: Callable[[Tensor, Tensor, float], Any]
    rope_and_append: Callable[
        [Tensor, Any, Tensor | None, Tensor | None, float, Tensor, Tensor, Tensor], Tensor
    ]
    plan_attention: Callable[[Tensor, Tensor, Tensor, int], Any]
    attention: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    pack_head: Callable[[Tensor], Any] | None = None


def reference_ops() -> Ops:
    """Plain torch in float32; the other records are tested against it."""
    return Ops(
        name="reference",
        weight_dtype=torch.float32,
        kv_dtype=torch.float32,
        pack_linear=pack_linear,
        linear=linear,
        pack_embedding=pack_embedding,
        embed=embed,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        add=torch.add,
        silu_mul=silu_mul,
        rope_angles=rope_angles,
        rope_and_append=rope_and_append,
        plan_attention=plan_attention,
        attention=attention,
    )


def pack_linear(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.contiguous(), bias


def linear(x: Tensor, packed: tuple[Tensor, Tensor | None]) -> Tensor:
    return F.linear(x, *packed)


def pack_embedding(weight_VD: Tensor) -> Tensor:
    return weight_VD.contiguous()


def embed(tokens_T: Tensor, table_VD: Tensor) -> Tensor:
    return F.embedding(tokens_T, table_VD)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x + delta
    return x, rms_norm(x, weight, eps)


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rope_angles(
    positions_T: Tensor, inverse_frequencies: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, A/2], times `scale`."""
    angles = (positions_T.to(torch.float32)[:, None] * inverse_frequencies)[:, None]
    return angles.cos() * scale, angles.sin() * scale


def rotate(x_THA: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates each pair (i, i + A/2) of a head by its angle."""
    cos, sin = angles
    first, second = x_THA.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


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
    kv_heads, head_dim = k_pages.shape[2:]
    heads = x_TE.shape[1] // head_dim - 2 * kv_heads
    q, k, v = x_TE.unflatten(1, (-1, head_dim)).split([heads, kv_heads, kv_heads], 1)
    q = q if query_norm_A is None else rms_norm(q, query_norm_A, eps)
    k = k if key_norm_A is None else rms_norm(k, key_norm_A, eps)
    k_pages.flatten(0, 1)[kv_rows_T] = rotate(k, angles).to(k_pages.dtype)
    v_pages.flatten(0, 1)[kv_rows_T] = v.to(v_pages.dtype)
    return rotate(q, angles)


def plan_attention(
    start_S: Tensor, tokens_S: Tensor, block_table_SP: Tensor, page_tokens: int
) -> list[tuple[slice, int, int, Tensor]]:
    """Per segment: its rows of the pass, its start, its context length and its pages."""
    plan, first = [], 0
    for start, tokens, pages in zip(
        start_S.tolist(), tokens_S.tolist(), block_table_SP, strict=True
    ):
        length = start + tokens
        plan.append(
            (slice(first, first + tokens), start, length, pages[: -(-length // page_tokens)])
        )
        first += tokens
    return plan


def attention(
    q_THA: Tensor, k_pages: Tensor, v_pages: Tensor, plan: list[tuple[slice, int, int, Tensor]]
) -> Tensor:
    """Softmax(Q K^T / sqrt(A)) V, one segment after another."""
    out = torch.empty_like(q_THA)
    group = q_THA.shape[1] // k_pages.shape[2]
    for rows, start, length, pages in plan:
        k_HLA = k_pages[pages].flatten(0, 1)[:length].repeat_interleave(group, 1).transpose(0, 1)
        v_HLA = v_pages[pages].flatten(0, 1)[:length].repeat_interleave(group, 1).transpose(0, 1)
        scores_HNL = q_THA[rows].transpose(0, 1) @ k_HLA.transpose(1, 2) / q_THA.shape[2] ** 0.5
        seen_NL = torch.arange(length) <= torch.arange(start, length)[:, None]
        probabilities = scores_HNL.masked_fill(~seen_NL, -torch.inf).softmax(-1)
        out[rows] = (probabilities @ v_HLA).transpose(0, 1)
    return out.flatten(1)
