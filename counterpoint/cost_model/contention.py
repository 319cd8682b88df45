"""How two co-running steps slow each other, fitted to measured pairs.

Without a pair it changes nothing, and a few pairs never move it far. A factor costs a handful of
multiplications.

Steps slow each other by what they demand of shared resources: memory and power. So, separately for
prefills and for decodes,

    log(slowdown / slowdown of the roofline) = a(split) + b · (demand - mean demand)

There is one a for each measured split, with straight lines between them, and one b for all. Ridge
regression (least squares with a penalty towards 0) finds them. A demand has: the step's and its
neighbour's share of the memory bandwidth, both also times the decode's share of the units; their
shares of the peak of their units, when alone; and log2 of the prompt tokens, because a short pass
has more pauses in which it takes nothing. Demands are clamped to the measured range. The terms were
chosen by leave-one-out cross-validation.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from counterpoint.cost_model.regression import solve

OCTAVES = 10.0  # of prompt tokens: they weigh as much as the whole bandwidth
# Ridge penalties of a and b: variance of a pair over the prior variance. Chosen by leave-one-out
# cross-validation on one H200.
SPLIT_PENALTY, DEMAND_PENALTY = 0.03, 0.02
MAX_FACTOR = 3.0  # bound of the factor, and of its inverse


class BandwidthDemand(NamedTuple):
    """Of a step and its neighbour, when alone.

    `bandwidth_share`: bytes/s over the memory's. `compute_share`: FLOP/s over the peak of their
    units. `token_octaves`: log2 of the prompt tokens, over OCTAVES.
    """

    bandwidth_share: float
    other_bandwidth_share: float
    compute_share: float
    other_compute_share: float
    token_octaves: float


class MeasuredPair(NamedTuple):
    """A step measured with a co-running one.

    `split`: units of the decode. `log_ratio`: log(slowdown / slowdown of the roofline).
    """

    split: int
    demand: BandwidthDemand
    log_ratio: float


class Contention:
    """Slowdown of the steps of one phase by those of the other."""

    def __init__(self, pairs: Sequence[MeasuredPair]) -> None:
        self._splits = sorted({pair.split for pair in pairs})
        self._forms: dict[int, RegressionForm] = {}
        if not pairs:
            return
        self._bounds = [
            (min(column), max(column))
            for column in zip(*(pair.demand for pair in pairs), strict=True)
        ]
        terms = [with_split_terms(pair.demand, self._split_share(pair.split)) for pair in pairs]
        self._means = [statistics.fmean(column) for column in zip(*terms, strict=True)]
        size, splits = len(self._splits) + len(self._means), len(self._splits)
        matrix = [[0.0] * size for _ in range(size)]
        right = [0.0] * size
        for i in range(size):
            matrix[i][i] = SPLIT_PENALTY if i < splits else DEMAND_PENALTY
        for pair, values in zip(pairs, terms, strict=True):
            line = [float(pair.split == split) for split in self._splits]
            line += [value - mean for value, mean in zip(values, self._means, strict=True)]
            for i, a in enumerate(line):
                right[i] += a * pair.log_ratio
                for j, b in enumerate(line):
                    matrix[i][j] += a * b
        found = solve(matrix, right)
        self._by_split, self._weights = found[:splits], found[splits:]

    def factor(self, split: int, demand: BandwidthDemand) -> float:
        """Slowdown over that of the roofline."""
        if not self._splits:
            return 1.0
        form = self._forms.get(split)
        if form is None:
            form = self._forms[split] = self._regression_form(split)
        log_factor = form.constant
        for value, (low, high, weight) in zip(demand, form.terms, strict=True):
            log_factor += weight * (low if value < low else high if value > high else value)
        return min(MAX_FACTOR, max(1 / MAX_FACTOR, math.exp(log_factor)))

    def _split_share(self, split: int) -> float:
        """Units over those of the largest split."""
        return min(self._splits[-1], max(self._splits[0], split)) / self._splits[-1]

    def _regression_form(self, split: int) -> RegressionForm:
        """The regression at one split, where every term is a weight of a demand."""
        share, weights = self._split_share(split), self._weights
        combined = [
            weights[0] + share * weights[-2],
            weights[1] + share * weights[-1],
            *weights[2:-2],
        ]
        constant = self._split_constant(split) - sum(
            [mean * weight for mean, weight in zip(self._means, weights, strict=True)]
        )
        return RegressionForm(
            constant,
            tuple((*bound, weight) for bound, weight in zip(self._bounds, combined, strict=True)),
        )

    def _split_constant(self, split: int) -> float:
        known, values = self._splits, self._by_split
        after = bisect.bisect_left(known, split)
        if after == len(known) or known[after] == split or after == 0:
            return values[min(after, len(known) - 1)]
        share = (split - known[after - 1]) / (known[after] - known[after - 1])
        return values[after - 1] * (1 - share) + values[after] * share


class RegressionForm(NamedTuple):
    """log of the factor at a split: `constant`, and (least, most, weight) of each demand."""

    constant: float
    terms: tuple[tuple[float, float, float], ...]


def with_split_terms(demand: BandwidthDemand, share: float) -> tuple[float, ...]:
    """The demands, and both bandwidth shares once more times the split's share of units."""
    return *demand, share * demand.bandwidth_share, share * demand.other_bandwidth_share
