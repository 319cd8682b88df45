"""Batch: the integers of one pass, as tensors.

Owns: the index arithmetic from segments to rows. Promises: no Python loop over segments or tokens; everything a layer needs
is computed once here, not per layer.
Must not: touch weights or KV values.

Shapes: T tokens of the pass, S segments, B sampled rows, P pages in a block-table row.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from counterpoint.model.ops import Ops


@dataclasses.dataclass(frozen=True, slots=True)
class PassTensors:
    """One forward pass. Token i has id `tokens_T[i]`, stands at `positions_T[i]` of its request, and its K and V go to flat row
    `kv_rows_T[i]` of the pool. The last hidden states of `sample_rows_B` are what the LM head sees. `attention` is the plan
    that `Ops.plan_attention` made: only `Ops.attention` looks inside."""

    tokens_T: Tensor
    positions_T: Tensor
    kv_rows_T: Tensor
    sample_rows_B: Tensor
    attention: Any


def make_batch(
    tokens_T: Tensor,
    start_S: Tensor,
    tokens_S: Tensor,
    sample_S: Tensor,
    block_table_SP: Tensor,
    page_tokens: int,
    ops: Ops,
) -> PassTensors:
    """Positions [start, start + tokens) of each segment become rows of one pass, segment after segment.

    Int64 CPU tensors in; `sample_S` is bool, or the indices of the sampled segments as int64. `block_table_SP[s]` names the
    pages of segment s's request from its first token on; entries beyond its pages may be anything within the pool.
    Raises IndexError if a block-table row is too short.
    """
    first_S = torch.cumsum(tokens_S, 0) - tokens_S
    segment_T = torch.repeat_interleave(tokens_S, output_size=tokens_T.shape[0])
    positions_T = torch.arange(tokens_T.shape[0]) + (start_S - first_S)[segment_T]
    page_T = block_table_SP[segment_T, positions_T // page_tokens]
    kv_rows_T = page_T * page_tokens + positions_T % page_tokens
    sample_rows_B = (first_S + tokens_S - 1)[sample_S]
    plan = ops.plan_attention(start_S, tokens_S, block_table_SP, page_tokens)
    return PassTensors(tokens_T, positions_T, kv_rows_T, sample_rows_B, plan)
