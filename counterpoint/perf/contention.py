"""What two steps side by side cost each other, by measured pairs.

Owns: the fit of it. Promises: without a pair it changes nothing; a few pairs never move it far; the price of a pair is a handful of
multiplications. Must not: price a step alone.

Steps slow each other by what they ask of what they share: memory, and power. So, apart for prefills and for decodes,

    log(slower / slower by the roofline) = a(split) + b · (demand - mean demand)

with a for each measured split (straight lines between them) and one b for all, found by least squares with a pull towards 0 (ridge
regression). A demand is a step's own and its neighbour's share of the memory's bandwidth, and of the peak of its units, as they are
alone; and the octaves of prompt tokens: a short pass has more pauses in which it takes nothing. Demands keep to what was measured.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from counterpoint.perf.regression import solve

OCTAVES = 10.0  # of prompt tokens, that count as much as a whole bandwidth
# Squares of a pair's scatter over those of what a and b may be at a guess; by leaving out each pair in turn (one H200).
SPLIT_PULL, DEMAND_PULL = 0.03, 0.02
MOST = 3.0  # no pair is slower than so many times what the roofline says, or faster


class Demand(NamedTuple):
    """Of a step and of its neighbour, when alone: bytes/s as a share of the memory's, FLOP/s as a share of the units' peak; and of
    the pass with prompts, log2 of its tokens over OCTAVES."""

    pull: float
    other_pull: float
    burn: float
    other_burn: float
    octaves: float


class Pair(NamedTuple):
    """A step that was measured beside another: units of the decode, what both ask for, log(slower / slower by the roofline)."""

    split: int
    demand: Demand
    off: float


class Contention:
    """Of one phase beside the other."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._splits = sorted({pair.split for pair in pairs})
        if not pairs:
            return
        columns = list(zip(*(pair.demand for pair in pairs), strict=True))
        bounds = [(min(column), max(column)) for column in columns]
        means = [statistics.fmean(column) for column in columns]
        size, splits = len(self._splits) + len(columns), len(self._splits)
        matrix = [[0.0] * size for _ in range(size)]
        right = [0.0] * size
        for i in range(size):
            matrix[i][i] = SPLIT_PULL if i < splits else DEMAND_PULL
        for pair in pairs:
            line = [float(pair.split == split) for split in self._splits]
            line += [value - mean for value, mean in zip(pair.demand, means, strict=True)]
            for i, a in enumerate(line):
                right[i] += a * pair.off
                for j, b in enumerate(line):
                    matrix[i][j] += a * b
        found = solve(matrix, right)
        self._by_split = found[:splits]
        self._by_demand = [(*ends, mean, weight) for ends, mean, weight in zip(bounds, means, found[splits:], strict=True)]

    def factor(self, split: int, demand: Demand) -> float:
        """How many times slower than the roofline says."""
        if not self._splits:
            return 1.0
        off = self._at(split)
        for value, (low, high, mean, weight) in zip(demand, self._by_demand, strict=True):
            off += weight * ((low if value < low else high if value > high else value) - mean)
        return min(MOST, max(1 / MOST, math.exp(off)))

    def _at(self, split: int) -> float:
        known, values = self._splits, self._by_split
        after = bisect.bisect_left(known, split)
        if after == 0 or after == len(known):
            return values[min(after, len(known) - 1)]
        share = (split - known[after - 1]) / (known[after] - known[after - 1])
        return values[after - 1] * (1 - share) + values[after] * share
