"""Every plan for every pair of cuts, against moving heads one by one."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from counterpoint.kv_transfer.head_mapping import HeadLayout, plan_slices

SIZES = (1, 2, 4, 8, 16)
CASES = [(p, d, h, False) for p, d, h in itertools.product(SIZES, SIZES, (1, 2, 4, 8))]
CASES += [(p, d, 8, True) for p, d in itertools.product(SIZES, SIZES)]
CASES += [(3, 6, 12, False), (6, 3, 3, False), (12, 3, 6, False)]


def owned(kv_heads: int, tp: int, rank: int) -> list[int]:
    """By hand: deal the heads out, or give each to several ranks in a row."""
    if tp <= kv_heads:
        return [head for head in range(kv_heads) if head * tp // kv_heads == rank]
    return [
        head
        for head in range(kv_heads)
        if rank in range(head * (tp // kv_heads), (head + 1) * (tp // kv_heads))
    ]


@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads", "mla"), CASES)
def test_each_head_arrives_once_in_its_place(p_tp, d_tp, kv_heads, mla):
    heads = 1 if mla else kv_heads
    load = Counter(dict.fromkeys(range(p_tp), 0))
    for d_rank in range(d_tp):
        want = owned(heads, d_tp, d_rank)
        pool: list[int | None] = [None] * len(want)
        for p_rank in range(p_tp):
            here = owned(heads, p_tp, p_rank)
            assert here == list(HeadLayout(heads, p_tp).heads(p_rank))
            for source, count, target in plan_slices(p_tp, d_tp, p_rank, d_rank, kv_heads, mla):
                load[p_rank] += count
                for offset in range(count):
                    assert pool[target + offset] is None, "a head came twice"
                    pool[target + offset] = here[source + offset]
        assert pool == want
    if d_tp >= p_tp:
        assert len(set(load.values())) == 1, f"uneven work: {load}"


def test_more_prefill_ranks_than_needed_are_used_evenly():
    busy = [p for p in range(8) if any(plan_slices(8, 4, p, d, 1, True) for d in range(4))]
    assert len(busy) == 4, "four decode ranks read from four of the eight copies"


@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), [(3, 2, 6), (2, 2, 3), (4, 4, 6), (0, 1, 1)])
def test_sizes_that_do_not_divide_are_refused(p_tp, d_tp, kv_heads):
    with pytest.raises(ValueError, match="must be a multiple"):
        plan_slices(p_tp, d_tp, 0, 0, kv_heads)
