"""Attention over paged KV with torch's own kernels, for a CPU without a C compiler.

Owns: the gathering of pages and the masks. Memory is linear in the context (no [T, T] scores).
Python loops run over prefill segments, blocks of queries and groups of similar lengths, never over
decoding requests. Must not: write to the pool.

Shapes: as in ops; G requests of one group, L their longest context, N tokens of a segment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 64  # queries per call in a prefill; small blocks skip most masked positions


class DecodeGroup(NamedTuple):
    rows_G: Tensor
    pages: Tensor  # [G * L / page_tokens], request by request
    mask_G11L: Tensor


class PrefillSegment(NamedTuple):
    first_row: int
    tokens: int
    length: int
    pages: Tensor


class GatherPlan(NamedTuple):
    decode: list[DecodeGroup]
    prefill: list[PrefillSegment]
    causal_NL: Tensor  # mask of the last N of L positions; shorter contexts use its right end


def plan_gather(
    start_S: Tensor, tokens_S: Tensor, block_table_SP: Tensor, page_tokens: int
) -> GatherPlan:
    length_S = start_S + tokens_S
    first_row_S = torch.cumsum(tokens_S, 0) - tokens_S
    prefill = [
        PrefillSegment(
            int(first_row_S[s]),
            int(tokens_S[s]),
            int(length_S[s]),
            block_table_SP[s, : -(-int(length_S[s]) // page_tokens)],
        )
        for s in torch.nonzero(tokens_S > 1).flatten().tolist()
    ]
    longest = max((segment.length for segment in prefill), default=0)
    block = min(QUERY_BLOCK, max((segment.tokens for segment in prefill), default=0))
    causal_NL = torch.zeros(block, longest)
    causal_NL[:, longest - block :] = torch.full((block, block), -torch.inf).triu_(1)
    decode_S = torch.nonzero(tokens_S == 1).flatten()
    groups = [
        plan_group(first_row_S[index_G], length_S[index_G], block_table_SP[index_G], page_tokens)
        for index_G in group_by_length(decode_S, length_S)
    ]
    return GatherPlan(groups, prefill, causal_NL)


def group_by_length(index_S: Tensor, length_S: Tensor) -> list[Tensor]:
    """One group; or one per power of two of the length, if padding to the longest wastes over a
    third of the positions read."""
    if not len(index_S):
        return []
    length = length_S[index_S]
    if len(length) * int(length.max()) <= 1.5 * int(length.sum()):
        return [index_S]
    scale = torch.log2(length.to(torch.float32)).ceil()
    return [index_S[scale == value] for value in scale.unique()]


def plan_group(
    rows_G: Tensor, length_G: Tensor, block_table_GP: Tensor, page_tokens: int
) -> DecodeGroup:
    pages = -(-int(length_G.max()) // page_tokens)
    position_P = torch.arange(pages) * page_tokens
    # Beyond its own pages a request reads its first page again (masked), never another request's.
    table = torch.where(
        position_P < length_G[:, None], block_table_GP[:, :pages], block_table_GP[:, :1]
    )
    seen_GL = torch.arange(pages * page_tokens) < length_G[:, None]
    mask = torch.zeros(seen_GL.shape).masked_fill_(~seen_GL, -torch.inf)
    return DecodeGroup(rows_G, table.flatten(), mask[:, None, None])


def gathered_attention(q_THA: Tensor, k_pages: Tensor, v_pages: Tensor, plan: GatherPlan) -> Tensor:
    out_THA = torch.empty(q_THA.shape)
    for group in plan.decode:
        attend_group(out_THA, q_THA, k_pages, v_pages, group)
    for first_row, tokens, length, pages in plan.prefill:
        rows = slice(first_row, first_row + tokens)
        k_LKA = k_pages.index_select(0, pages).flatten(0, 1)[:length]
        v_LKA = v_pages.index_select(0, pages).flatten(0, 1)[:length]
        attend_segment(out_THA[rows], q_THA[rows], k_LKA, v_LKA, plan.causal_NL)
    return out_THA.flatten(1)


def attend_group(
    out_THA: Tensor, q_THA: Tensor, k_pages: Tensor, v_pages: Tensor, group: DecodeGroup
) -> None:
    """All requests in one call. Each has one query, so the query heads of a KV head take the place
    of queries."""
    count, kv_heads, dim = len(group.rows_G), *k_pages.shape[2:]
    k = k_pages.index_select(0, group.pages).view(count, -1, kv_heads, dim).transpose(1, 2)
    v = v_pages.index_select(0, group.pages).view(count, -1, kv_heads, dim).transpose(1, 2)
    q = q_THA[group.rows_G].unflatten(1, (kv_heads, -1))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask_G11L)
    out_THA[group.rows_G] = out.flatten(1, 2)


def attend_segment(
    out_NHA: Tensor, q_NHA: Tensor, k_LKA: Tensor, v_LKA: Tensor, causal_NL: Tensor
) -> None:
    """Blocks of queries, each against the context up to its own last position."""
    tokens, length = len(q_NHA), len(k_LKA)
    k, v = k_LKA.transpose(0, 1)[None], v_LKA.transpose(0, 1)[None]
    q, out = q_NHA.transpose(0, 1)[None], out_NHA.transpose(0, 1)[None]
    for first in range(0, tokens, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, tokens)
        seen = length - tokens + last
        mask = causal_NL[causal_NL.shape[0] - (last - first) :, causal_NL.shape[1] - seen :]
        out[:, :, first:last] = F.scaled_dot_product_attention(
            q[:, :, first:last], k[:, :, :seen], v[:, :, :seen], attn_mask=mask, enable_gqa=True
        )
