"""Which KV heads go from which prefill rank to which decode rank (tensor parallelism).

Owns: the layout of KV heads over ranks, and the plan. Promises: pure; each head of a decode rank
comes from exactly one prefill rank, and replicas share the work.
Must not: know bytes (sharded.py turns slices into spans).

With `kv_heads` heads over `tp` ranks, rank r holds heads [r * n, (r + 1) * n), n = kv_heads / tp.
With more ranks than heads, head h is replicated on ranks [h * c, (h + 1) * c), c = tp / kv_heads.
Latent attention (MLA) keeps one latent "head" on every rank: kv_heads = 1.
"""

from __future__ import annotations

from typing import NamedTuple


class HeadSlice(NamedTuple):
    """`heads` heads, from index `source` of the prefill rank to index `target` of the decode
    rank."""

    source: int
    heads: int
    target: int


class HeadLayout(NamedTuple):
    kv_heads: int
    tp: int

    @property
    def copies(self) -> int:
        """Ranks that hold the same head."""
        return max(1, self.tp // self.kv_heads)

    def heads(self, rank: int) -> range:
        """The heads on `rank`."""
        count = max(1, self.kv_heads // self.tp)
        first = rank // self.copies * count
        return range(first, first + count)


def plan_slices(
    source: HeadLayout, target: HeadLayout, source_rank: int, target_rank: int
) -> list[HeadSlice]:
    """What prefill rank `source_rank` writes to decode rank `target_rank`: one run of heads, or
    none. Raises ValueError for sizes that do not divide."""
    check_divisible(source.tp, target.tp, source.kv_heads)
    here, there = source.heads(source_rank), target.heads(target_rank)
    first, last = max(here.start, there.start), min(here.stop, there.stop)
    if first >= last or source_rank % source.copies != chosen_copy(source, target, target_rank):
        return []
    return [HeadSlice(first - here.start, last - first, first - there.start)]


def check_divisible(source_tp: int, target_tp: int, kv_heads: int) -> None:
    """Raises ValueError, naming the numbers, unless one of each pair divides the other."""
    for name, a, b in (
        ("prefill and decode tensor parallelism", source_tp, target_tp),
        ("prefill tensor parallelism and KV heads", source_tp, kv_heads),
        ("decode tensor parallelism and KV heads", target_tp, kv_heads),
    ):
        if min(a, b) < 1 or max(a, b) % min(a, b):
            raise ValueError(f"{name} are {a} and {b}: one must be a multiple of the other")


def chosen_copy(source: HeadLayout, target: HeadLayout, target_rank: int) -> int:
    """Which of the prefill ranks that hold a head serves `target_rank`. The replicas take turns."""
    if target.copies > 1:
        return target_rank % target.copies * source.copies // target.copies
    return target_rank % source.copies
