"""One pass as tensors: from its segments to the rows that a decoder computes.

Owns: the index arithmetic. There is no Python loop over segments or tokens, and what every layer
needs is computed once. Must not: touch weights or KV values.

Shapes: T tokens of the pass, S segments, B sampled rows, P pages in a block-table row.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from counterpoint.model.ops import Ops


class PassSegments(NamedTuple):
    """Segment s computes positions [start, start + tokens) of one request; int64 CPU tensors.

    `sample_S` is bool, or the int64 indices of the sampled segments. `block_table_SP[s]` lists the
    pages of the segment's request from its first token on. Entries beyond its pages may be any
    page of the pool.
    """

    start_S: Tensor
    tokens_S: Tensor
    sample_S: Tensor
    block_table_SP: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class PassTensors:
    """One forward pass.

    Token i has id `tokens_T[i]` and position `positions_T[i]` in its request; its K and V go to
    flat row `kv_rows_T[i]` of the pool. The LM head sees the hidden states of `sample_rows_B`.
    `attention` is the plan from `Ops.plan_attention`; only `Ops.attention` looks inside.

    `angles`: `Decoder.angles` of this pass, if already computed. `output_rows_B`: the only rows
    whose hidden states are needed after the model's last layer; None: all.
    """

    tokens_T: Tensor
    positions_T: Tensor
    kv_rows_T: Tensor
    sample_rows_B: Tensor
    attention: Any
    angles: Any = None
    output_rows_B: Tensor | None = None


def make_batch(tokens_T: Tensor, segments: PassSegments, page_tokens: int, ops: Ops) -> PassTensors:
    """The rows of one pass, segment after segment. `tokens_T`: int64 ids of all segments.

    Raises IndexError if a block-table row is too short.
    """
    start_S, tokens_S, sample_S, block_table_SP = segments
    first_S = torch.cumsum(tokens_S, 0) - tokens_S
    segment_T = torch.repeat_interleave(tokens_S, output_size=tokens_T.shape[0])
    positions_T = torch.arange(tokens_T.shape[0]) + (start_S - first_S)[segment_T]
    page_T = block_table_SP[segment_T, positions_T // page_tokens]
    kv_rows_T = page_T * page_tokens + positions_T % page_tokens
    sample_rows_B = (first_S + tokens_S - 1)[sample_S]
    plan = ops.plan_attention(start_S, tokens_S, block_table_SP, page_tokens)
    return PassTensors(tokens_T, positions_T, kv_rows_T, sample_rows_B, plan)
