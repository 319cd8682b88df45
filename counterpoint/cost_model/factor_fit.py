"""The fit of measured steps: factors on the terms of the roofline.

Each term of a step is a term of the roofline times a factor. The time of the matrix products is a
curve over their rows, straight between the measured ones, because tiles make it anything but a
line. Least squares of relative errors finds the factors, with a penalty towards the common factor
of the kind of step. One clean measurement outweighs that penalty.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from counterpoint.cost_model.regression import MIN_FACTOR, least_squares

PRIOR_SPREAD = 0.4  # prior deviation of a factor from the common one of its kind, relative
FREE_SPREAD = 20.0  # of a factor without a prior guess


@dataclass(frozen=True, slots=True)
class FactorCurve:
    """Seconds of the products over their rows.

    At the measured rows: `factors` times the roofline's `prior_s`. Between them: straight lines.
    Beyond them: the shape of the roofline.
    """

    rows: tuple[int, ...]  # ascending
    prior_s: tuple[float, ...]
    factors: tuple[float, ...]

    def parts(self, rows: int, prior_s: float) -> tuple[tuple[int, float], ...]:
        """(index of a measured point, seconds to multiply by its factor), which sum to the time of
        `rows` rows. `prior_s`: that time by the roofline."""
        known = self.rows
        after = bisect.bisect_right(known, rows)
        if after == 0 or after == len(known):
            return ((max(0, after - 1), prior_s),)
        before = after - 1
        share = (rows - known[before]) / (known[after] - known[before])
        return (before, (1 - share) * self.prior_s[before]), (after, share * self.prior_s[after])

    def seconds(self, rows: int, prior_s: float) -> float:
        total = 0.0
        for point, seconds in self.parts(rows, prior_s):
            total += self.factors[point] * seconds
        return total


@dataclass(frozen=True, slots=True)
class ProductFactors:
    """Factors of one kind of step on one number of units.

    `others`: of the terms besides the products, in the order of the kind.
    """

    products: FactorCurve
    others: tuple[float, ...]


class CostTerms(msgspec.Struct, frozen=True, gc=False):
    """A step as the fit sees it, in seconds of the roofline.

    Products of `rows` rows run `repeats` times and take `products_s` each. `others` have factors
    too; `fixed_s` has none.
    """

    rows: int
    repeats: int
    products_s: float
    others: tuple[float, ...]
    fixed_s: float

    @property
    def prior_s(self) -> float:
        """Sum of the terms that have a factor."""
        return self.repeats * self.products_s + sum(self.others)


Samples = Mapping[int, Sequence[tuple[CostTerms, float]]]  # units -> (terms, measured seconds)


def fit_factors(samples: Samples) -> dict[int, ProductFactors]:
    """Factors by number of units, of prefills or of decodes."""
    common = common_factor(
        [
            (seconds - terms.fixed_s) / terms.prior_s
            for found in samples.values()
            for terms, seconds in found
        ]
    )
    return {units: _fit_units(found, common) for units, found in sorted(samples.items())}


def _fit_units(found: Sequence[tuple[CostTerms, float]], common: float) -> ProductFactors:
    here = common_factor(
        [(seconds - terms.fixed_s) / terms.prior_s for terms, seconds in found], common
    )
    priors = {terms.rows: terms.products_s for terms, _ in found}
    rows = tuple(sorted(priors))
    curve = FactorCurve(rows, tuple(priors[n] for n in rows), (here,) * len(rows))
    others = len(found[0][0].others)
    table = []
    for terms, seconds in found:
        line = [0.0] * len(rows) + list(terms.others)
        for point, part_s in curve.parts(terms.rows, terms.products_s):
            line[point] = terms.repeats * part_s
        table.append((line, seconds - terms.fixed_s))
    factors = least_squares(table, [(here, PRIOR_SPREAD * here)] * (len(rows) + others))
    return ProductFactors(
        FactorCurve(rows, curve.prior_s, tuple(factors[: len(rows)])), tuple(factors[len(rows) :])
    )


def fit_mixed_factors(samples: Samples) -> dict[int, ProductFactors]:
    """Factors of mixed steps: of all rows as a prefill, the decodes' attention, and the kernels."""
    guesses = [(1.0, PRIOR_SPREAD), (1.0, PRIOR_SPREAD), (1.0, FREE_SPREAD)]
    found = {}
    for units, points in sorted(samples.items()):
        table = [(list(terms.others), seconds - terms.fixed_s) for terms, seconds in points]
        factors = tuple(least_squares(table, guesses))
        found[units] = ProductFactors(FactorCurve((), (), ()), factors)
    return found


def common_factor(ratios: Sequence[float], otherwise: float = 1.0) -> float:
    """The median of `ratios`, drawn towards `otherwise` when they are few."""
    if not ratios:
        return otherwise
    ordered = sorted(math.log(max(ratio, MIN_FACTOR)) for ratio in ratios)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    weight = len(ordered) / (len(ordered) + 0.5)
    return math.exp(weight * middle + (1 - weight) * math.log(otherwise))
