"""The fitted estimator: the roofline, corrected by what was measured.

`seconds` takes some microseconds, never over 50. Where nothing was measured, it is the roofline's
answer, scaled like the nearest measurements. So a few points never make it worse than none.

Per kind of step and number of units, times are linear in what the step holds, as in MuxWise
(ASPLOS'26, section 4.2): prefill a·Σn² + b·Σn·r + c(Σn)·Σn + d, decode a·Σcontext + c(batch)·batch
+ d. The factors a, b, c, p and d multiply terms of the roofline (fit: factor_fit.py):

    prefill    products(rows) · c(rows) + attention(n²) · a + attention(n·r) · b + head
    decode     (products(rows) + head) · c(rows) + attention(context) · a
    fused      the prefill of all its rows · p + attention(context) · a + head + d

A number of units that was never measured gets the factors of its neighbours. Rows are padded to
their bucket where the device does so. No step takes less than its launch (host_overhead.py).

With a co-running step, both phases have a *contention factor*: the roofline's, corrected by
measured pairs (contention.py). A neighbour that waits for the host slows a step only while it runs.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from counterpoint.cost_model.calibration import (
    CO_RUNNING_KIND,
    Calibration,
    CalibrationPoint,
    pad_rows,
)
from counterpoint.cost_model.contention import OCTAVES, BandwidthDemand, Contention, MeasuredPair
from counterpoint.cost_model.factor_fit import (
    CostTerms,
    ProductFactors,
    fit_factors,
    fit_mixed_factors,
)
from counterpoint.cost_model.host_overhead import LaunchOverhead
from counterpoint.cost_model.roofline import KERNELS_PER_LAYER, Roofline, StepCost, round_up_rows
from counterpoint.interfaces import CoRunning
from counterpoint.types import BatchShape


class SoloCost(msgspec.Struct, frozen=True, gc=False):
    """A step on its own.

    `cost`: its fitted seconds on the device, and what it demands meanwhile. Launched repeatedly it
    takes at least `floor_s`, and the device is busy for the share `device_busy_share` of that.
    """

    cost: StepCost
    floor_s: float
    device_busy_share: float


class Fitted:
    """interfaces.Estimator. `prior`: the roofline of the table's device and model."""

    def __init__(self, table: Calibration, prior: Roofline) -> None:
        self.table = table
        self.prior = prior
        self.launch_overhead = LaunchOverhead(table)
        self._sustained_co_running = table.on_and_on.get(CO_RUNNING_KIND, 1.0)
        # Cached, because a load has few batch sizes.
        self._pass_products_s: Callable[[int, int, int, int], float] = lru_cache(1 << 14)(
            self._fit_pass_products_s
        )
        self._step_products_s: Callable[[int, int, bool, int, int], float] = lru_cache(1 << 14)(
            self._fit_step_products_s
        )
        # A step that waited for the host tells nothing of the device.
        points = [
            p for p in table.points if not p.held_out and not self.launch_overhead.is_host_bound(p)
        ]
        solo: dict[str, list[CalibrationPoint]] = {"decode": [], "prefill": [], "mixed": []}
        for point in points:
            if point.co_running is None:
                solo[point.work.kind].append(point)
        self.decodes = fit_factors(by_units(solo["decode"], self._decode_terms))
        self.prefills = fit_factors(by_units(solo["prefill"], self._prefill_terms))
        self.mixed = fit_mixed_factors(by_units(solo["mixed"], self._mixed_terms))
        self.solo_s: Callable[[BatchShape, int], float] = lru_cache(1 << 12)(self._solo_s)
        self.solo_cost: Callable[[BatchShape, int], SoloCost] = lru_cache(1 << 12)(self._solo_cost)
        pairs = [p for p in points if p.co_running is not None]
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

    def seconds(self, work: BatchShape, units: int, co_running: CoRunning | None = None) -> float:
        """Duration of `work` on `units` units, in seconds.

        Raises ValueError if the device does not have so many units.
        """
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
        seconds, prior = self._device_s(work, units), self.prior
        floor_s = self.launch_overhead.floor_s(work)
        if not seconds:
            return SoloCost(StepCost(0.0, 0.0, 0.0), floor_s, 0.0)
        # Bytes and FLOPs are the same on any number of units.
        known = prior.solo_cost(work, prior.device.units)
        bandwidth_share = known.bytes / (seconds * prior.read_bandwidth[-1])
        compute_share = min(1.0, known.flops / (seconds * units * prior.unit_flops))
        cost = StepCost(seconds, known.bytes, known.flops, bandwidth_share, compute_share)
        return SoloCost(cost, floor_s, seconds / max(seconds, floor_s))

    def _device_s(self, work: BatchShape, units: int) -> float:
        """Time on the device, however long the host takes."""
        if not 1 <= units <= self.prior.device.units:
            device = self.prior.device
            raise ValueError(f"{units} units asked of {device.name}, which has {device.units}")
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
        """Interpolate between the nearest measured numbers of units below and above.

        `price(work, units, level)` has the terms of `units` and the factors of `level`.
        """
        if units in known:
            return price(work, units, units)
        if not known:
            return self.prior.solo_cost(work, units).seconds
        below, above = neighbours(tuple(known), units)
        if below is None or above is None:
            level = below or above or units
            share = min(units, level) / max(units, level)  # less weight the farther away
            prior_s = self.prior.solo_cost(work, units).seconds
            return price(work, units, level) * share + prior_s * (1 - share)
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
        rows = pad_rows(work.decode_batch, self.table.buckets)
        layers = work.last_layer - work.first_layer
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

    # ------------------------------------------------------------ the terms

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
        rows = pad_rows(work.decode_batch, self.table.buckets)
        layers = work.last_layer - work.first_layer
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
        """All rows as a prefill, the decodes' attention, and the pauses between kernels."""
        layers = work.last_layer - work.first_layer
        if self.prefills:
            prefill_s = (
                self._interpolate_units(work, units, self.prefills, self._prefill_s) - head_s
            )
        else:
            prefill_s = self._prefill_terms(work, units).prior_s
        known = self.decodes
        nearest = min(known, key=lambda level: abs(level - units), default=0)
        factor = known[nearest].others[0] if known else 1.0
        read_s = layers * self.prior.decode_attention(work, units).seconds * factor
        return prefill_s, read_s, layers * KERNELS_PER_LAYER * self.prior.device.kernel_s

    def _head_s(self, work: BatchShape, units: int) -> float:
        ends = work.last_layer == work.layers and work.samples
        return self.prior.head_cost(work.samples, units).seconds if ends else 0.0

    def _attention_s(self, work: BatchShape, units: int) -> tuple[float, float]:
        """Of prompts: over their own tokens, and over reused ones."""
        prior, layers = self.prior, work.last_layer - work.first_layer
        own_s = layers * prior.prefill_attention(work, units, reused=False).seconds
        if not work.prefill_reused:
            return own_s, 0.0
        return own_s, layers * prior.prefill_attention(work, units).seconds - own_s

    def _pass_rows(self, work: BatchShape) -> int:
        return pad_rows(work.prefill_tokens + work.decode_batch, self.table.pass_buckets)

    def _layer_s(self, rows: int, units: int) -> float:
        return self.prior.layer_cost(round_up_rows(rows), units).seconds

    def _layers_s(self, rows: int, layers: int, head: bool, units: int) -> float:
        """Products of a step of decodes."""
        products_s = layers * self._layer_s(rows, units)
        return products_s + self.prior.head_cost(rows, units).seconds if head else products_s

    # ------------------------------------------------------------ products, by factors of `level`

    def _fit_pass_products_s(self, rows: int, layers: int, units: int, level: int) -> float:
        factor_s = self.prefills[level].products.seconds(rows, self._layer_s(rows, level))
        return layers * factor_s * self._layer_s(rows, units) / self._layer_s(rows, level)

    def _fit_step_products_s(
        self, rows: int, layers: int, head: bool, units: int, level: int
    ) -> float:
        here_s = self._layers_s(rows, layers, head, level)
        if not here_s:
            return 0.0
        factor_s = self.decodes[level].products.seconds(rows, here_s)
        return factor_s * self._layers_s(rows, layers, head, units) / here_s

    # ------------------------------------------------------------ contention

    def _pair(self, point: CalibrationPoint) -> MeasuredPair:
        assert point.co_running is not None
        work, (other, other_units) = point.work, point.co_running
        cost = self.solo_cost(work, point.units).cost
        neighbour = self.solo_cost(other, other_units).cost
        slower = self.prior.slowdown(cost, point.units, neighbour, other_units)
        demand = bandwidth_demand(cost, neighbour, work.prefill_tokens + other.prefill_tokens)
        return MeasuredPair(
            other_units if work.prefill_tokens else point.units,
            demand,
            math.log(point.seconds / cost.seconds / slower),
        )


def by_units(
    points: Sequence[CalibrationPoint], terms_of: Callable[[BatchShape, int], CostTerms]
) -> dict[int, list[tuple[CostTerms, float]]]:
    """(terms, measured seconds) of `points`, by their number of units."""
    found: dict[int, list[tuple[CostTerms, float]]] = {}
    for point in points:
        terms = terms_of(point.work, point.units)
        found.setdefault(point.units, []).append((terms, point.seconds))
    return found


def bandwidth_demand(cost: StepCost, neighbour: StepCost, prefill_tokens: int) -> BandwidthDemand:
    return BandwidthDemand(
        cost.bandwidth_share,
        neighbour.bandwidth_share,
        cost.compute_share,
        neighbour.compute_share,
        math.log2(1 + prefill_tokens) / OCTAVES,
    )


def neighbours(levels: tuple[int, ...], units: int) -> tuple[int | None, int | None]:
    """The nearest of `levels` (ascending) below and above `units`."""
    after = bisect.bisect_right(levels, units)
    below = bisect.bisect_left(levels, units) - 1
    return levels[below] if below >= 0 else None, levels[after] if after < len(levels) else None
