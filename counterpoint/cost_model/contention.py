"""What two steps side by side cost each other, by measured pairs.

Owns: the fit of it. Promises: without a pair it changes nothing; a few pairs never move it far; the price of a pair is a handful of
multiplications. Must not: price a step alone.

Steps slow each other by what they ask of what they share: memory, and power. So, apart for prefills and for decodes,

    log(slower / slower by the roofline) = a(split) + b · (demand - mean demand)

with a for each measured split (straight lines between them) and one b for all, found by least squares with a pull towards 0 (ridge
regression). A demand is a step's own and its neighbour's share of the memory's bandwidth, both also times the decode's share of the
units, and of the peak of their units, as they are alone; and the octaves of prompt tokens: a short pass has more pauses in which it
takes nothing. Demands keep to what was measured. Which of them are in the form was chosen by leaving out each pair in turn.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from counterpoint.cost_model.regression import solve

OCTAVES = 10.0  # of prompt tokens, that count as much as a whole bandwidth
# Squares of a pair's scatter over those of what a and b may be at a guess; by leaving out each pair in turn (one H200).
SPLIT_PULL, DEMAND_PULL = 0.03, 0.02
MAX_FACTOR = 3.0  # no pair is slower than so many times what the roofline says, or faster


class BandwidthDemand(NamedTuple):
    """Of a step and of its neighbour, when alone: bytes/s as a share of the memory's, FLOP/s as a share of the units' peak; and of
    the pass with prompts, log2 of its tokens over OCTAVES."""

    bandwidth_share: float
    other_bandwidth_share: float
    compute_share: float
    other_compute_share: float
    token_octaves: float


class MeasuredPair(NamedTuple):
    """A step that was measured beside another: units of the decode, what both ask for, log(slower / slower by the roofline)."""

    split: int
    demand: BandwidthDemand
    log_ratio: float


class Contention:
    """Of one phase beside the other."""

    def __init__(self, pairs: Sequence[MeasuredPair]) -> None:
        self._splits = sorted({pair.split for pair in pairs})
        self._forms: dict[int, RegressionForm] = {}
        if not pairs:
            return
        self._bounds = [
            (min(column), max(column))
            for column in zip(*(pair.demand for pair in pairs), strict=True)
        ]
        asked = [with_split_terms(pair.demand, self._split_share(pair.split)) for pair in pairs]
        self._means = [statistics.fmean(column) for column in zip(*asked, strict=True)]
        size, splits = len(self._splits) + len(self._means), len(self._splits)
        matrix = [[0.0] * size for _ in range(size)]
        right = [0.0] * size
        for i in range(size):
            matrix[i][i] = SPLIT_PULL if i < splits else DEMAND_PULL
        for pair, values in zip(pairs, asked, strict=True):
            line = [float(pair.split == split) for split in self._splits]
            line += [value - mean for value, mean in zip(values, self._means, strict=True)]
            for i, a in enumerate(line):
                right[i] += a * pair.log_ratio
                for j, b in enumerate(line):
                    matrix[i][j] += a * b
        found = solve(matrix, right)
        self._by_split, self._weights = found[:splits], found[splits:]

    def factor(self, split: int, demand: BandwidthDemand) -> float:
        """How many times slower than the roofline says."""
        if not self._splits:
            return 1.0
        form = self._forms.get(split)
        if form is None:
            form = self._forms[split] = self._regression_form(split)
        off = form.constant
        for value, (low, high, weight) in zip(demand, form.terms, strict=True):
            off += weight * (low if value < low else high if value > high else value)
        return min(MAX_FACTOR, max(1 / MAX_FACTOR, math.exp(off)))

    def _split_share(self, split: int) -> float:
        """Of the largest split."""
        return min(self._splits[-1], max(self._splits[0], split)) / self._splits[-1]

    def _regression_form(self, split: int) -> RegressionForm:
        """At one split, everything is a weight of a demand."""
        share, weights = self._split_share(split), self._weights
        whole = [weights[0] + share * weights[-2], weights[1] + share * weights[-1], *weights[2:-2]]
        constant = self._split_constant(split) - sum(
            [mean * weight for mean, weight in zip(self._means, weights, strict=True)]
        )
        return RegressionForm(
            constant,
            tuple((*bound, weight) for bound, weight in zip(self._bounds, whole, strict=True)),
        )

    def _split_constant(self, split: int) -> float:
        known, values = self._splits, self._by_split
        after = bisect.bisect_left(known, split)
        if after == len(known) or known[after] == split or after == 0:
            return values[min(after, len(known) - 1)]
        share = (split - known[after - 1]) / (known[after] - known[after - 1])
        return values[after - 1] * (1 - share) + values[after] * share


class RegressionForm(NamedTuple):
    """log of the factor at a split: `constant` and, of each demand, the (least, most) that was measured times a weight."""

    constant: float
    terms: tuple[tuple[float, float, float], ...]


def with_split_terms(demand: BandwidthDemand, share: float) -> tuple[float, ...]:
    """What has a weight: the demands, and both pulls once more in the measure of the split."""
    return *demand, share * demand.bandwidth_share, share * demand.other_bandwidth_share
