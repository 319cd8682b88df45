"""Every plan for every pair of tensor-parallel sizes, against moving heads one by one."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from counterpoint.kv_transfer.head_mapping import HeadLayout, plan_slices

SIZES = (1, 2, 4, 8, 16)
CASES = list(itertools.product(SIZES, SIZES, (1, 2, 4, 8)))  # 1 KV head: latent attention too
CASES += [(3, 6, 12), (6, 3, 3), (12, 3, 6)]


def owned(kv_heads: int, tp: int, rank: int) -> list[int]:
    """Deal the heads out, or give each to several ranks in a row."""
    if tp <= kv_heads:
        return [head for head in range(kv_heads) if head * tp // kv_heads == rank]
    copies = tp // kv_heads
    return [head for head in range(kv_heads) if rank in range(head * copies, (head + 1) * copies)]


@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), CASES)
def test_each_head_arrives_once_in_its_place(p_tp, d_tp, kv_heads):
    prefill, decode = HeadLayout(kv_heads, p_tp), HeadLayout(kv_heads, d_tp)
    load = Counter(dict.fromkeys(range(p_tp), 0))
    for d_rank in range(d_tp):
        want = owned(kv_heads, d_tp, d_rank)
        pool: list[int | None] = [None] * len(want)
        for p_rank in range(p_tp):
            here = owned(kv_heads, p_tp, p_rank)
            assert here == list(prefill.heads(p_rank))
            for source, count, target in plan_slices(prefill, decode, p_rank, d_rank):
                load[p_rank] += count
                for offset in range(count):
                    assert pool[target + offset] is None, "a head came twice"
                    pool[target + offset] = here[source + offset]
        assert pool == want
    if d_tp >= p_tp:
        assert len(set(load.values())) == 1, f"uneven work: {load}"


def test_more_prefill_ranks_than_needed_are_used_evenly():
    prefill, decode = HeadLayout(1, 8), HeadLayout(1, 4)
    busy = [p for p in range(8) if any(plan_slices(prefill, decode, p, d) for d in range(4))]
    assert len(busy) == 4, "four decode ranks read from four of the eight copies"


@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), [(3, 2, 6), (2, 2, 3), (4, 4, 6), (0, 1, 1)])
def test_sizes_that_do_not_divide_are_refused(p_tp, d_tp, kv_heads):
    with pytest.raises(ValueError, match="must be a multiple"):
        plan_slices(HeadLayout(kv_heads, p_tp), HeadLayout(kv_heads, d_tp), 0, 0)
