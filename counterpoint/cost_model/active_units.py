"""How many units have work while a step runs: what a profiler shows as SM active.

The model uses the tiles, waves and times of the roofline. It serves metrics only: no policy sees
it.

A unit is active while it holds a tile. It idles in the last wave of a matrix product whose tiles do
not divide evenly over the units (wave quantisation: Bullet, arXiv 2504.19516, section 2), between
kernels, and while the host launches. Norms, rotary embedding, decode attention and the sampler are
assumed to reach every unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from counterpoint.cost_model.roofline import (
    KERNELS_PER_LAYER,
    KERNELS_PER_PASS,
    MatrixProduct,
    Roofline,
    busy_units,
    round_up_rows,
)
from counterpoint.types import BatchShape


class ActiveUnits:
    """For steps that run alone, as `roofline` prices them."""

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self._layer: Callable[[int, int], float] = lru_cache(1 << 14)(self._layer_unit_s)
        self._head: Callable[[int, int], float] = lru_cache(1 << 14)(self._head_unit_s)

    def __call__(self, work: BatchShape, units: int) -> float:
        """Units with work, on average over the step."""
        roofline = self.roofline
        parts = roofline.operator_costs(work, units)
        seconds = roofline.sum_costs(work, units, parts).seconds
        if not seconds:
            return 0.0
        _, reading, attention, _ = parts
        layer = self._layer(round_up_rows(work.prefill_tokens + work.decode_batch), units)
        if work.prefill_tokens:
            model, tile_rows = roofline.model, roofline.device.attention.tile_rows
            layer += (
                busy_units(model.heads * math.ceil(work.prefill_tokens / tile_rows), units)
                * attention.seconds
            )
        layer += units * reading.seconds
        active = layer * (work.last_layer - work.first_layer)
        if work.last_layer == work.layers and work.samples:
            active += self._head(work.samples, units)
        return min(units, active / seconds)

    def _layer_unit_s(self, rows: int, units: int) -> float:
        """Units times seconds of a layer without attention: its products and what lies between
        them."""
        roofline = self.roofline
        gaps_s = KERNELS_PER_LAYER * roofline.device.kernel_s
        tiled = [roofline.tiled_cost(product, rows, units) for product in roofline.layer_products]
        products_s = sum(cost.seconds for cost, _ in tiled)
        between_s = roofline.layer_cost(rows, units).seconds - gaps_s - products_s
        return sum(cost.seconds * busy for cost, busy in tiled) + units * between_s

    def _head_unit_s(self, samples: int, units: int) -> float:
        roofline = self.roofline
        cost, busy = roofline.tiled_cost(
            MatrixProduct(roofline.model.vocab, roofline.model.hidden), samples, units
        )
        sampler_s = (
            roofline.head_cost(samples, units).seconds
            - cost.seconds
            - KERNELS_PER_PASS * roofline.device.kernel_s
        )
        return cost.seconds * busy + units * sampler_s
