"""The fitted estimator: the roofline, corrected by what was measured.

Owns: the fit. Promises: `seconds` takes some microseconds, never over 50; where nothing was measured it is the roofline's answer,
scaled like the measurements nearest to it: a few points never make it worse than none. Must not: measure, or read a file.

Per kind of step and number of units, times are linear in what the step holds, as in MuxWise (ASPLOS'26, section 4.2): prefill
a·Σn² + b·Σn·r + c(Σn)·Σn + d, decode a·Σcontext + c(batch)·batch + d. Each term is a term of the roofline times a factor, and the
factor of the matrix products (c and d) is a curve over their rows, straight between the measured ones on a logarithmic axis: so
the steps that tiles make stay, and between two points the roofline's shape is kept. Factors are found by least squares of relative
errors, with a pull towards the common factor of the kind that a single clean measurement outweighs; a number of units that was
never measured has its neighbours' factors.

    prefill    products(rows) · c(rows) + attention(n²) · a + attention(n·r) · b + head
    decode     (products(rows) + head) · c(rows) + attention(context) · a           rows: the batch, filled up to its bucket
    fused      the prefill of all its rows · p + attention(context) · a + head + d

None is under the *floor* of its kind, the same on all units: small passes are launched one operation after another, and take as
long as the host takes for that.

Beside another step, both phases have a *contention factor* per coarse cell (prefill tokens and decode context to half an octave;
split): the roofline's, corrected by the nearest measured pairs.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from counterpoint.perf.roofline import KERNELS_PER_LAYER, Roofline, on_grid
from counterpoint.perf.table import Point, Table
from counterpoint.types import Work

NOISE = 0.02  # relative error of a measurement
PULL = 0.4  # how far, at a guess, a factor may be from its kind's common one
FREE = 20.0  # and one of which nothing is known beforehand
LEAST = 0.02  # of a factor
OCTAVES, UNITS = 1.5, 16.0  # how far a measured pair tells of others: in prefill tokens and decode context, in split units
CLEAR = 0.9  # of a time: work that should take less than so much is hidden behind it
DOUBT = 0.02  # weight of the bare roofline beside the pairs


@dataclass(frozen=True, slots=True)
class Bend:
    """A factor over `rows`: straight between the points on a logarithmic axis, flat outside them."""

    rows: tuple[float, ...]  # logarithms, ascending
    factors: tuple[float, ...]

    def shares(self, rows: int) -> tuple[int, float]:
        """The point at or before `rows`, and the share of the next one."""
        at, known = math.log(rows), self.rows
        after = bisect.bisect_right(known, at)
        if after == 0:
            return 0, 0.0
        if after == len(known):
            return after - 1, 0.0
        return after - 1, (at - known[after - 1]) / (known[after] - known[after - 1])

    def at(self, rows: int) -> float:
        first, share = self.shares(rows)
        if not share:
            return self.factors[first]
        return self.factors[first] * (1 - share) + self.factors[first + 1] * share


@dataclass(frozen=True, slots=True)
class Factors:
    """Of one kind of step on one number of units: of the products by rows, and of the other terms in the order of the kind.
    `floor_s`: the least that a layer takes."""

    products: Bend
    others: tuple[float, ...]
    floor_s: float = 0.0


class Seen(NamedTuple):
    """A measured step as the fit sees it: `seconds` without what has no factor."""

    units: int
    rows: int
    terms: tuple[float, ...]
    seconds: float
    layers: int


def units_of(seen: Sequence[Seen]) -> list[int]:
    return sorted({one.units for one in seen})


Terms = Callable[[Work, int], tuple[int, tuple[float, ...], float]]  # rows, what has a factor, what has none


class Fitted:
    """ports.Estimator. `prior`: the roofline of the table's device and model."""

    def __init__(self, table: Table, prior: Roofline) -> None:
        self.table = table
        self.prior = prior
        solo = [p for p in table.points if p.beside is None and not p.held_out]
        self.decodes = self._fit_kind([p for p in solo if not p.work.prefill_tokens], self._decode_terms)
        self.prefills = self._fit_kind([p for p in solo if not p.work.decode_batch], self._prefill_terms)
        self.mixed = self._fit_mixed([p for p in solo if p.work.prefill_tokens and p.work.decode_batch])
        self.alone: Callable[[Work, int], float] = lru_cache(1 << 12)(self._alone)
        self._pairs = [self._pair(p) for p in table.points if p.beside is not None and not p.held_out]
        self._corrections: dict[tuple[bool, int, int, int], float] = {}

    @property
    def levels(self) -> tuple[int, ...]:
        """Numbers of units on which something was measured, ascending."""
        return tuple(sorted({*self.decodes, *self.prefills}))

    def seconds(self, work: Work, units: int, beside: tuple[Work, int] | None = None) -> float:
        """Duration of `work` on `units` units, in seconds. Raises ValueError if the device has no such number of units."""
        alone_s = self.alone(work, units)
        if beside is None or not alone_s:
            return alone_s
        prior = self.prior
        slower = prior.slowdown(prior.alone(work, units), units, prior.alone(*beside), beside[1])
        return alone_s * max(1.0, slower * self._correction(work, units, *beside))

    # ------------------------------------------------------------ one step, alone

    def _alone(self, work: Work, units: int) -> float:
        if not 1 <= units <= self.prior.device.units:
            raise ValueError(f"{units} units asked of {self.prior.device.name}, which has {self.prior.device.units}")
        if not work.prefill_tokens:
            return self._by_levels(work, units, self.decodes, self._decode_s)
        if not work.decode_batch:
            return self._by_levels(work, units, self.prefills, self._prefill_s)
        return self._by_levels(work, units, self.mixed or self.prefills, self._mixed_s)

    def _by_levels(self, work: Work, units: int, known: dict[int, Factors], price: Callable[[Work, int, int], float]) -> float:
        """`price(work, units, level)` has the terms of `units` and the factors of `level`: of the nearest below and above, in the
        measure of their distance."""
        if units in known:
            return price(work, units, units)
        if not known:
            return self.prior.alone(work, units).seconds
        below = max((level for level in known if level < units), default=None)
        above = min((level for level in known if level > units), default=None)
        if below is None or above is None:
            level = below or above or units
            share = min(units, level) / max(units, level)  # the farther away, the less it tells
            return price(work, units, level) * share + self.prior.alone(work, units).seconds * (1 - share)
        share = (units - below) / (above - below)
        return price(work, units, below) * (1 - share) + price(work, units, above) * share

    def _prefill_s(self, work: Work, units: int, level: int) -> float:
        floor_s = self.prefills[level].floor_s * (work.last_layer - work.first_layer)
        return max(floor_s, self._prefill_work_s(work, units, level)) + self._head_s(work, units)

    def _prefill_work_s(self, work: Work, units: int, level: int) -> float:
        """What the device does for it, without the head."""
        rows, terms, _ = self._prefill_terms(work, units)
        return self._sum(self.prefills[level], rows, terms)

    def _decode_s(self, work: Work, units: int, level: int) -> float:
        rows, terms, rest = self._decode_terms(work, units)
        return self._sum(self.decodes[level], rows, terms) + rest

    def _mixed_s(self, work: Work, units: int, level: int) -> float:
        _, terms, rest = self._mixed_terms(work, units)
        known = self.mixed.get(level)
        others, floor_s = (known.others, known.floor_s) if known else ((1.0, 1.0, 1.0), self.prefills[level].floor_s)
        total = sum([factor * term for factor, term in zip(others, terms, strict=True)])
        return max(floor_s * (work.last_layer - work.first_layer), total) + rest

    @staticmethod
    def _sum(factors: Factors, rows: int, terms: tuple[float, ...]) -> float:
        total = factors.products.at(rows) * terms[0]
        for factor, term in zip(factors.others, terms[1:], strict=True):
            total += factor * term
        return total

    # ------------------------------------------------------------ the terms: rows, what has a factor, what has none

    def _prefill_terms(self, work: Work, units: int) -> tuple[int, tuple[float, ...], float]:
        prior, layers = self.prior, work.last_layer - work.first_layer
        rows = work.prefill_tokens + work.decode_batch
        products_s = layers * prior.layer_cost(on_grid(rows), units).seconds
        own_s = layers * prior.prefill_attention(work, units, reused=False).seconds
        reused_s = layers * prior.prefill_attention(work, units).seconds - own_s if work.prefill_reused else 0.0
        return rows, (products_s, own_s, reused_s), self._head_s(work, units)

    def _decode_terms(self, work: Work, units: int) -> tuple[int, tuple[float, ...], float]:
        prior, layers = self.prior, work.last_layer - work.first_layer
        rows = self._filled(work.decode_batch)
        products_s = layers * prior.layer_cost(on_grid(rows), units).seconds
        if work.last_layer == work.layers:
            products_s += prior.head_cost(rows, units).seconds
        return rows, (products_s, layers * prior.decode_attention(work, units).seconds), 0.0

    def _mixed_terms(self, work: Work, units: int) -> tuple[int, tuple[float, ...], float]:
        layers = work.last_layer - work.first_layer
        rest = self._head_s(work, units)
        if self.prefills:
            prefill_s = self._by_levels(work, units, self.prefills, self._prefill_work_s)
        else:
            prefill_s = sum(self._prefill_terms(work, units)[1])
        known = self.decodes
        level = units if units in known else min(known, key=lambda level: abs(level - units), default=0)
        read_s = layers * self.prior.decode_attention(work, units).seconds * (known[level].others[0] if known else 1.0)
        rows = work.prefill_tokens + work.decode_batch
        return rows, (prefill_s, read_s, layers * KERNELS_PER_LAYER * self.prior.device.kernel_s), rest

    def _head_s(self, work: Work, units: int) -> float:
        ends = work.last_layer == work.layers and work.samples
        return self.prior.head_cost(work.samples, units).seconds if ends else 0.0

    def _filled(self, batch: int) -> int:
        buckets = self.table.buckets
        at = bisect.bisect_left(buckets, batch)
        return buckets[at] if at < len(buckets) else batch

    # ------------------------------------------------------------ fitting

    def _fit_kind(self, points: Sequence[Point], terms_of: Terms) -> dict[int, Factors]:
        """Factors by units, for those with at least one point."""
        seen = self._seen(points, terms_of)
        common = common_factor([one.seconds / sum(one.terms) for one in seen])
        floor_s, clear = above_floor(seen, common)
        common = common_factor([one.seconds / sum(one.terms) for one in clear])
        return {units: self._fit_level([one for one in clear if one.units == units], common, floor_s) for units in units_of(clear)}

    @staticmethod
    def _seen(points: Sequence[Point], terms_of: Terms) -> list[Seen]:
        found = []
        for point in points:
            rows, terms, rest = terms_of(point.work, point.units)
            layers = point.work.last_layer - point.work.first_layer
            found.append(Seen(point.units, rows, terms, point.seconds - rest, layers))
        return found

    def _fit_level(self, found: Sequence[Seen], common: float, floor_s: float) -> Factors:
        here = common_factor([one.seconds / sum(one.terms) for one in found], common)
        knots = sorted({one.rows for one in found})
        bend = Bend(tuple(math.log(rows) for rows in knots), (here,) * len(knots))
        others = len(found[0].terms) - 1
        table = []
        for _, rows, terms, seconds, _ in found:
            line = [0.0] * (len(knots) + others)
            first, share = bend.shares(rows)
            line[first] = terms[0] * (1 - share)
            if share:
                line[first + 1] = terms[0] * share
            line[len(knots) :] = terms[1:]
            table.append((line, seconds))
        factors = least_squares(table, [(here, PULL * here)] * (len(knots) + others))
        return Factors(Bend(bend.rows, tuple(factors[: len(knots)])), tuple(factors[len(knots) :]), floor_s)

    def _fit_mixed(self, points: Sequence[Point]) -> dict[int, Factors]:
        guesses = [(1.0, PULL), (1.0, PULL), (1.0, FREE)]
        least_s = max((level.floor_s for level in self.prefills.values()), default=0.0)
        floor_s, clear = above_floor(self._seen(points, self._mixed_terms), 1.0, least_s)
        factors = {}
        for units in units_of(clear):
            table = [(list(one.terms), one.seconds) for one in clear if one.units == units]
            factors[units] = Factors(Bend((0.0,), (1.0,)), tuple(least_squares(table, guesses)), floor_s)
        return factors

    # ------------------------------------------------------------ contention

    def _pair(self, point: Point) -> tuple[bool, tuple[float, float, float], float]:
        """Whether it is the prefill that was measured, where the pair stands, and by how much the roofline's factor is off."""
        assert point.beside is not None
        prior, (other, other_units) = self.prior, point.beside
        slower = prior.slowdown(prior.alone(point.work, point.units), point.units, prior.alone(other, other_units), other_units)
        measured = point.seconds / self.alone(point.work, point.units)
        whose, place = standing(point.work, point.units, other, other_units)
        return whose, place, math.log(measured / slower)

    def _correction(self, work: Work, units: int, other: Work, other_units: int) -> float:
        whose, (tokens, context, split) = standing(work, units, other, other_units)
        cell = (whose, round(2 * tokens), round(2 * context), int(split))
        found = self._corrections.get(cell)
        if found is None:
            found = self._corrections[cell] = self._near(whose, cell[1] / 2, cell[2] / 2, split)
        return found

    def _near(self, whose: bool, tokens: float, context: float, split: float) -> float:
        """The correction at a place: the mean of the measured pairs, the near ones first."""
        total, weights = 0.0, DOUBT
        for of, (t, c, s), correction in self._pairs:
            if of is whose:
                far = ((t - tokens) / OCTAVES) ** 2 + ((c - context) / OCTAVES) ** 2 + ((s - split) / UNITS) ** 2
                weight = 1 / (0.05 + far) ** 2
                total += weight * correction
                weights += weight
        return math.exp(total / weights)


def standing(work: Work, units: int, other: Work, other_units: int) -> tuple[bool, tuple[float, float, float]]:
    """Of two steps side by side: whether `work` is the prefill, and the pair's place: octaves of prefill tokens and of decode
    context, units of the decode."""
    prefills = work.prefill_tokens > 0
    prefill, decode = (work, other) if prefills else (other, work)
    split = other_units if prefills else units
    return prefills, (math.log2(1 + prefill.prefill_tokens), math.log2(1 + decode.decode_context), float(split))


def above_floor(seen: Sequence[Seen], common: float, least_s: float = 0.0) -> tuple[float, list[Seen]]:
    """The floor per layer, at least `least_s`, and the steps clear of it. A step whose work should take less than the fastest step
    of all took only the host's time: the median of those is the floor; of steps with less work than that nothing can be fitted."""
    fastest_s = min((one.seconds for one in seen), default=0.0)
    idle = [one for one in seen if common * sum(one.terms) < CLEAR * fastest_s]
    floor_s = max(least_s, statistics.median(one.seconds / one.layers for one in idle) if len(idle) > 1 else 0.0)
    clear = [one for one in seen if common * sum(one.terms) >= CLEAR * floor_s * one.layers]
    return (floor_s, clear) if clear else (0.0, list(seen))


def common_factor(ratios: Sequence[float], otherwise: float = 1.0) -> float:
    """The median of `ratios`, and with few of them nearer to `otherwise`."""
    if not ratios:
        return otherwise
    ordered = sorted(math.log(max(ratio, LEAST)) for ratio in ratios)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    weight = len(ordered) / (len(ordered) + 0.5)
    return math.exp(weight * middle + (1 - weight) * math.log(otherwise))


def least_squares(table: Sequence[tuple[list[float], float]], guesses: Sequence[tuple[float, float]]) -> list[float]:
    """Factors x that make row·x near each row's seconds, relatively, and stay near their (guess, spread); none under LEAST.

    The minimum of Σ ((row·x - s) / (NOISE s))² + Σ ((x - guess) / spread)²: linear regression with a normal prior (Bishop, Pattern
    Recognition and Machine Learning, section 3.3)."""
    size = len(guesses)
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for line, seconds in table:
        scaled = [value / (NOISE * seconds) for value in line]
        for i, a in enumerate(scaled):
            if a:
                right[i] += a / NOISE
                for j, b in enumerate(scaled):
                    matrix[i][j] += a * b
    for i, (guess, spread) in enumerate(guesses):
        matrix[i][i] += 1 / spread**2
        right[i] += guess / spread**2
    return [max(LEAST, value) for value in solve(matrix, right)]


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x with matrix·x = right, of a symmetric positive definite matrix (elimination needs no pivots there)."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            times = rows[j][i] / rows[i][i]
            if times:
                rows[j] = [b - times * a for a, b in zip(rows[i], rows[j], strict=True)]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (rows[i][size] - sum(rows[i][j] * x[j] for j in range(i + 1, size))) / rows[i][i]
    return x
