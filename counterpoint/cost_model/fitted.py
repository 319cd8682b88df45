"""The fitted estimator: the roofline, corrected by what was measured.

Owns: the fit. Promises: `seconds` takes some microseconds, never over 50; where nothing was measured it is the roofline's answer,
scaled like the measurements nearest to it: a few points never make it worse than none. Must not: measure, or read a file.

Per kind of step and number of units, times are linear in what the step holds, as in MuxWise (ASPLOS'26, section 4.2): prefill
a·Σn² + b·Σn·r + c(Σn)·Σn + d, decode a·Σcontext + c(batch)·batch + d. Each term is a term of the roofline times a factor, and the
time of the matrix products (c and d) is a curve over their rows, straight between the measured ones, because tiles make it anything
but a line. Factors are found by least squares of relative errors, with a pull towards the common factor of the kind that a single
clean measurement outweighs; a number of units that was never measured has its neighbours' factors.

    prefill    products(rows) · c(rows) + attention(n²) · a + attention(n·r) · b + head
    decode     (products(rows) + head) · c(rows) + attention(context) · a
    fused      the prefill of all its rows · p + attention(context) · a + head + d

Rows are filled up to their bucket where the device does so. No step takes less than its launch (cost_model/host_overhead.py), and one that waited
for the host tells nothing of the device.

Beside another step, both phases have a *contention factor*: the roofline's, corrected by measured pairs (cost_model/contention.py). A
neighbour that waits for the host slows a step only while it runs.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from counterpoint.cost_model.calibration import (
    CO_RUNNING_KIND,
    Calibration,
    CalibrationPoint,
    pad_rows,
)
from counterpoint.cost_model.contention import OCTAVES, BandwidthDemand, Contention, MeasuredPair
from counterpoint.cost_model.host_overhead import LaunchOverhead
from counterpoint.cost_model.regression import MIN_FACTOR, least_squares
from counterpoint.cost_model.roofline import KERNELS_PER_LAYER, Roofline, StepCost, round_up_rows
from counterpoint.types import BatchShape

PRIOR_SPREAD = 0.4  # how far, at a guess, a factor may be from its kind's common one
FREE_SPREAD = 20.0  # and one of which nothing is known beforehand


@dataclass(frozen=True, slots=True)
class FactorCurve:
    """Seconds of the products over their rows: `factors` times the roofline's (`prior_s`) at the measured rows, straight lines
    between them; beyond them the roofline's shape."""

    rows: tuple[int, ...]  # ascending
    prior_s: tuple[float, ...]
    factors: tuple[float, ...]

    def parts(self, rows: int, prior_s: float) -> tuple[tuple[int, float], ...]:
        """What the price of `rows`, by the roofline `prior_s`, is made of: (measured point, seconds to multiply by its factor)."""
        known = self.rows
        after = bisect.bisect_right(known, rows)
        if after == 0 or after == len(known):
            return ((max(0, after - 1), prior_s),)
        share = (rows - known[after - 1]) / (known[after] - known[after - 1])
        return (after - 1, (1 - share) * self.prior_s[after - 1]), (
            after,
            share * self.prior_s[after],
        )

    def seconds(self, rows: int, prior_s: float) -> float:
        total = 0.0
        for point, seconds in self.parts(rows, prior_s):
            total += self.factors[point] * seconds
        return total


@dataclass(frozen=True, slots=True)
class ProductFactors:
    """Of one kind of step on one number of units: of the products by rows, and of the other terms in the order of the kind."""

    products: FactorCurve
    others: tuple[float, ...]


class CostTerms(msgspec.Struct, frozen=True, gc=False):
    """A step as the fit sees it: products of `rows` rows, `times` times, at `products_s` each by the roofline; what else has a
    factor; and what has none."""

    rows: int
    repeats: int
    products_s: float
    others: tuple[float, ...]
    fixed_s: float

    @property
    def prior_s(self) -> float:
        """Of what has a factor."""
        return self.repeats * self.products_s + sum(self.others)


class SoloCost(msgspec.Struct, frozen=True, gc=False):
    """A step on its own. `cost`: its seconds on the device as fitted, and what it asks for meanwhile. Launched over and over it
    takes at least `floor_s`, and then the device is busy for the share `busy`."""

    cost: StepCost
    floor_s: float
    device_busy_share: float


class Fitted:
    """ports.Estimator. `prior`: the roofline of the table's device and model."""

    def __init__(self, table: Calibration, prior: Roofline) -> None:
        self.table = table
        self.prior = prior
        self.launch_overhead = LaunchOverhead(table)
        self._sustained_co_running = table.on_and_on.get(CO_RUNNING_KIND, 1.0)
        # What is below under "products", remembered: a load has few sizes of batches.
        self._pass_products_s: Callable[[int, int, int, int], float] = lru_cache(1 << 14)(
            self._fit_pass_products_s
        )
        self._step_products_s: Callable[[int, int, bool, int, int], float] = lru_cache(1 << 14)(
            self._fit_step_products_s
        )
        telling = [
            p for p in table.points if not p.held_out and not self.launch_overhead.is_host_bound(p)
        ]
        solo = [p for p in telling if p.co_running is None]
        self.decodes = self._fit_kind(
            [p for p in solo if not p.work.prefill_tokens], self._decode_terms
        )
        self.prefills = self._fit_kind(
            [p for p in solo if not p.work.decode_batch], self._prefill_terms
        )
        self.mixed = self._fit_mixed(
            [p for p in solo if p.work.prefill_tokens and p.work.decode_batch]
        )
        self.solo_s: Callable[[BatchShape, int], float] = lru_cache(1 << 12)(self._solo_s)
        self.solo_cost: Callable[[BatchShape, int], SoloCost] = lru_cache(1 << 12)(self._solo_cost)
        pairs = [p for p in telling if p.co_running is not None]
        self._prefill_contention = Contention(
            [self._pair(p) for p in pairs if p.work.prefill_tokens]
        )
        self._decode_contention = Contention(
            [self._pair(p) for p in pairs if not p.work.prefill_tokens]
        )

    @property
    def levels(self) -> tuple[int, ...]:
        """Numbers of units on which something was measured, ascending."""
        return tuple(sorted({*self.decodes, *self.prefills}))

    def seconds(
        self, work: BatchShape, units: int, co_running: tuple[BatchShape, int] | None = None
    ) -> float:
        """Duration of `work` on `units` units, in seconds. Raises ValueError if the device has no such number of units."""
        if co_running is None:
            return self.solo_s(work, units)
        alone, (other, other_units) = self.solo_cost(work, units), co_running
        if not alone.cost.seconds:
            return alone.floor_s
        neighbour = self.solo_cost(other, other_units)
        slower = self.prior.slowdown(alone.cost, units, neighbour.cost, other_units)
        if work.prefill_tokens:
            slower *= self._prefill_contention.factor(
                other_units, bandwidth_demand(alone.cost, neighbour.cost, work.prefill_tokens)
            )
        else:
            slower *= self._decode_contention.factor(
                units, bandwidth_demand(alone.cost, neighbour.cost, other.prefill_tokens)
            )
        slower = 1 + max(0.0, slower - 1) * neighbour.device_busy_share
        return max(alone.floor_s, alone.cost.seconds * slower * self._sustained_co_running)

    # ------------------------------------------------------------ one step, alone

    def _solo_s(self, work: BatchShape, units: int) -> float:
        return max(
            self._device_s(work, units) * self.table.on_and_on.get(work.kind, 1.0),
            self.launch_overhead.floor_s(work),
        )

    def _solo_cost(self, work: BatchShape, units: int) -> SoloCost:
        seconds, floor_s, prior = (
            self._device_s(work, units),
            self.launch_overhead.floor_s(work),
            self.prior,
        )
        if not seconds:
            return SoloCost(StepCost(0.0, 0.0, 0.0), floor_s, 0.0)
        known = prior.solo_cost(
            work, prior.device.units
        )  # bytes and FLOPs are the same on any number of units
        pull, burn = (
            known.bytes / (seconds * prior.read_bandwidth[-1]),
            known.flops / (seconds * units * prior.unit_flops),
        )
        return SoloCost(
            StepCost(seconds, known.bytes, known.flops, pull, min(1.0, burn)),
            floor_s,
            seconds / max(seconds, floor_s),
        )

    def _device_s(self, work: BatchShape, units: int) -> float:
        """What the device takes for a step, however long the host does."""
        if not 1 <= units <= self.prior.device.units:
            raise ValueError(
                f"{units} units asked of {self.prior.device.name}, which has {self.prior.device.units}"
            )
        if not work.prefill_tokens:
            return self._interpolate_units(work, units, self.decodes, self._decode_s)
        if not work.decode_batch:
            return self._interpolate_units(work, units, self.prefills, self._prefill_s)
        return self._interpolate_units(work, units, self.mixed or self.prefills, self._mixed_s)

    def _interpolate_units(
        self,
        work: BatchShape,
        units: int,
        known: dict[int, ProductFactors],
        price: Callable[[BatchShape, int, int], float],
    ) -> float:
        """`price(work, units, level)` has the terms of `units` and the factors of `level`: of the nearest below and above, in the
        measure of their distance."""
        if units in known:
            return price(work, units, units)
        if not known:
            return self.prior.solo_cost(work, units).seconds
        below, above = neighbours(tuple(known), units)
        if below is None or above is None:
            level = below or above or units
            share = min(units, level) / max(units, level)  # the farther away, the less it tells
            return price(work, units, level) * share + self.prior.solo_cost(work, units).seconds * (
                1 - share
            )
        share = (units - below) / (above - below)
        return price(work, units, below) * (1 - share) + price(work, units, above) * share

    def _prefill_s(self, work: BatchShape, units: int, level: int) -> float:
        own, reused = self.prefills[level].others
        own_s, reused_s = self._attention_s(work, units)
        products_s = self._pass_products_s(
            self._pass_rows(work), work.last_layer - work.first_layer, units, level
        )
        return self._head_s(work, units) + products_s + own * own_s + reused * reused_s

    def _decode_s(self, work: BatchShape, units: int, level: int) -> float:
        (read,) = self.decodes[level].others
        rows, layers = (
            pad_rows(work.decode_batch, self.table.buckets),
            work.last_layer - work.first_layer,
        )
        products_s = self._step_products_s(
            rows, layers, work.last_layer == work.layers, units, level
        )
        return products_s + read * (layers * self.prior.decode_attention(work, units).seconds)

    def _mixed_s(self, work: BatchShape, units: int, level: int) -> float:
        head_s = self._head_s(work, units)
        prefill_s, read_s, kernels_s = self._mixed_others(work, units, head_s)
        known = self.mixed.get(level)
        if known is None:
            return prefill_s + read_s + kernels_s + head_s
        prefill, read, kernels = known.others
        return head_s + prefill * prefill_s + read * read_s + kernels * kernels_s

    # ------------------------------------------------------------ the terms: rows, what has a factor, what has none

    def _prefill_terms(self, work: BatchShape, units: int) -> CostTerms:
        rows, layers = self._pass_rows(work), work.last_layer - work.first_layer
        return CostTerms(
            rows,
            layers,
            self._layer_s(rows, units),
            self._attention_s(work, units),
            self._head_s(work, units),
        )

    def _decode_terms(self, work: BatchShape, units: int) -> CostTerms:
        rows, layers = (
            pad_rows(work.decode_batch, self.table.buckets),
            work.last_layer - work.first_layer,
        )
        products_s = self._layers_s(rows, layers, work.last_layer == work.layers, units)
        return CostTerms(
            rows, 1, products_s, (layers * self.prior.decode_attention(work, units).seconds,), 0.0
        )

    def _mixed_terms(self, work: BatchShape, units: int) -> CostTerms:
        head_s = self._head_s(work, units)
        return CostTerms(0, 1, 0.0, self._mixed_others(work, units, head_s), head_s)

    def _mixed_others(
        self, work: BatchShape, units: int, head_s: float
    ) -> tuple[float, float, float]:
        """All rows as a prefill, the decodes' attention, and the pauses of its kernels."""
        layers = work.last_layer - work.first_layer
        if self.prefills:
            prefill_s = (
                self._interpolate_units(work, units, self.prefills, self._prefill_s) - head_s
            )
        else:
            prefill_s = self._prefill_terms(work, units).prior_s
        known = self.decodes
        level = (
            units if units in known else min(known, key=lambda level: abs(level - units), default=0)
        )
        read_s = (
            layers
            * self.prior.decode_attention(work, units).seconds
            * (known[level].others[0] if known else 1.0)
        )
        return prefill_s, read_s, layers * KERNELS_PER_LAYER * self.prior.device.kernel_s

    def _head_s(self, work: BatchShape, units: int) -> float:
        ends = work.last_layer == work.layers and work.samples
        return self.prior.head_cost(work.samples, units).seconds if ends else 0.0

    def _attention_s(self, work: BatchShape, units: int) -> tuple[float, float]:
        """Of prompts: over their own tokens, and over reused ones."""
        prior, layers = self.prior, work.last_layer - work.first_layer
        own_s = layers * prior.prefill_attention(work, units, reused=False).seconds
        return own_s, layers * prior.prefill_attention(
            work, units
        ).seconds - own_s if work.prefill_reused else 0.0

    def _pass_rows(self, work: BatchShape) -> int:
        return pad_rows(work.prefill_tokens + work.decode_batch, self.table.pass_buckets)

    def _layer_s(self, rows: int, units: int) -> float:
        return self.prior.layer_cost(round_up_rows(rows), units).seconds

    def _layers_s(self, rows: int, layers: int, head: bool, units: int) -> float:
        """Of a step of decodes."""
        products_s = layers * self._layer_s(rows, units)
        return products_s + self.prior.head_cost(rows, units).seconds if head else products_s

    # ------------------------------------------------------------ products, with the factors of `level`

    def _fit_pass_products_s(self, rows: int, layers: int, units: int, level: int) -> float:
        factor_s = self.prefills[level].products.seconds(rows, self._layer_s(rows, level))
        return layers * factor_s * self._layer_s(rows, units) / self._layer_s(rows, level)

    def _fit_step_products_s(
        self, rows: int, layers: int, head: bool, units: int, level: int
    ) -> float:
        here_s = self._layers_s(rows, layers, head, level)
        if not here_s:
            return 0.0
        return (
            self.decodes[level].products.seconds(rows, here_s)
            * self._layers_s(rows, layers, head, units)
            / here_s
        )

    # ------------------------------------------------------------ fitting

    def _fit_kind(
        self, points: Sequence[CalibrationPoint], terms_of: Callable[[BatchShape, int], CostTerms]
    ) -> dict[int, ProductFactors]:
        """Factors by units, for those with at least one point."""
        seen: dict[int, list[tuple[CostTerms, float]]] = {}
        for point in points:
            seen.setdefault(point.units, []).append(
                (terms_of(point.work, point.units), point.seconds)
            )
        common = common_factor(
            [
                (seconds - terms.fixed_s) / terms.prior_s
                for found in seen.values()
                for terms, seconds in found
            ]
        )
        return {units: self._fit_level(found, common) for units, found in sorted(seen.items())}

    def _fit_level(self, found: Sequence[tuple[CostTerms, float]], common: float) -> ProductFactors:
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
            FactorCurve(rows, curve.prior_s, tuple(factors[: len(rows)])),
            tuple(factors[len(rows) :]),
        )

    def _fit_mixed(self, points: Sequence[CalibrationPoint]) -> dict[int, ProductFactors]:
        found: dict[int, list[tuple[list[float], float]]] = {}
        for point in points:
            terms = self._mixed_terms(point.work, point.units)
            found.setdefault(point.units, []).append(
                (list(terms.others), point.seconds - terms.fixed_s)
            )
        guesses = [(1.0, PRIOR_SPREAD), (1.0, PRIOR_SPREAD), (1.0, FREE_SPREAD)]
        return {
            units: ProductFactors(FactorCurve((), (), ()), tuple(least_squares(t, guesses)))
            for units, t in sorted(found.items())
        }

    # ------------------------------------------------------------ contention

    def _pair(self, point: CalibrationPoint) -> MeasuredPair:
        assert point.co_running is not None
        work, (other, other_units) = point.work, point.co_running
        cost, neighbour = (
            self.solo_cost(work, point.units).cost,
            self.solo_cost(other, other_units).cost,
        )
        slower = self.prior.slowdown(cost, point.units, neighbour, other_units)
        asked = bandwidth_demand(cost, neighbour, work.prefill_tokens + other.prefill_tokens)
        return MeasuredPair(
            other_units if work.prefill_tokens else point.units,
            asked,
            math.log(point.seconds / cost.seconds / slower),
        )


def bandwidth_demand(cost: StepCost, neighbour: StepCost, prefill_tokens: int) -> BandwidthDemand:
    return BandwidthDemand(
        cost.bandwidth_share,
        neighbour.bandwidth_share,
        cost.compute_share,
        neighbour.compute_share,
        math.log2(1 + prefill_tokens) / OCTAVES,
    )


def neighbours(levels: tuple[int, ...], units: int) -> tuple[int | None, int | None]:
    """The nearest of `levels` (ascending) below and above."""
    after = bisect.bisect_right(levels, units)
    below = bisect.bisect_left(levels, units) - 1
    return levels[below] if below >= 0 else None, levels[after] if after < len(levels) else None


def common_factor(ratios: Sequence[float], otherwise: float = 1.0) -> float:
    """The median of `ratios`, and with few of them nearer to `otherwise`."""
    if not ratios:
        return otherwise
    ordered = sorted(math.log(max(ratio, MIN_FACTOR)) for ratio in ratios)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    weight = len(ordered) / (len(ordered) + 0.5)
    return math.exp(weight * middle + (1 - weight) * math.log(otherwise))
