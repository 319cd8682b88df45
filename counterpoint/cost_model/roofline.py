"""The roofline: how long a step takes on some units, from the shapes of model and device alone.

It prices each operator, and the slowdown of two co-running steps. `seconds` is pure and takes some
microseconds (under 50 when nothing is cached). A step alone never takes longer on more units or
with more bandwidth. The roofline is never fitted: fitted.py corrects it.

Per operator, after the SM-scaling roofline of Bullet (arXiv 2504.19516, section 4.1):

    products    tiles of the output over the units, wave by wave, so that busy = tiles / waves
                units work on average. The rounded maximum of two times: bytes over the bandwidth
                of the busy units, and FLOPs (of whole tiles) over their peak
    attention   prefill: causal FLOPs, query tiles x heads over the units in the same way. Decode:
                bytes of the KV cache over what a decode kernel reads with so many units
    the rest    norms, rotary embedding, activation: bytes over bandwidth
    overhead    a constant per kernel; at least the host's launch time per layer when the step
                holds prefill

The *rounded* maximum of a and b is (a^3 + b^3)^(1/3): a kernel near the ridge loses on both sides.
On an H200, products of 64 rows reach 70 % of either limit there. The cube fits 8 to 132 SMs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import msgspec

from counterpoint.interfaces import CoRunning
from counterpoint.spec.device import DeviceSpec
from counterpoint.spec.model import ModelSpec
from counterpoint.types import BatchShape

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
KERNELS_PER_LAYER = 9  # norm, qkv, rotary + append, attention, o, norm, gate-up, activation, down
STEPS_PER_UNIT = 8  # steps per unit of the tables over busy units
KERNELS_PER_PASS = 4  # embedding; final norm, head, sampler


class StepCost(msgspec.Struct, frozen=True, gc=False):
    """Of a step alone: duration, bytes moved and FLOPs done, as the model counts them (no padding).

    Of a whole step also what it takes from others: `bandwidth_share` of the device's, and
    `compute_share` of the peak of its own units.
    """

    seconds: float
    bytes: float
    flops: float
    bandwidth_share: float = 0.0
    compute_share: float = 0.0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.seconds + other.seconds, self.bytes + other.bytes, self.flops + other.flops
        )


NO_COST = StepCost(0.0, 0.0, 0.0)
# In a layer: products and what lies between, decode attention, prefill attention. Then the head.
OperatorCosts = tuple[StepCost, StepCost, StepCost, StepCost]


class MatrixProduct(NamedTuple):
    """A weight matrix: `columns` outputs from `inner` inputs.

    There are `experts` of them, and each row takes `taken`.
    """

    columns: int
    inner: int
    experts: int = 1
    taken: int = 1


def rounded_max(a: float, b: float) -> float:
    return (a * a * a + b * b * b) ** (1 / 3)


def busy_units(tiles: int, units: int) -> float:
    """Mean number of busy units while `tiles` equal tiles go over `units` units in waves."""
    return tiles / -(-tiles // units)


def round_up_rows(rows: int) -> int:
    """`rows`, up to 3 % more, so that one cached cost serves many batches.

    Tiles are coarser, so the cost hardly changes.
    """
    step = 1 << max(0, rows.bit_length() - 6)
    return -(-rows // step) * step


class Roofline:
    """interfaces.Estimator of `model` on `device`.

    Weights and arithmetic are in `dtype`, the KV cache in `kv_dtype` (None: `dtype`). Raises
    ValueError for a dtype that the device lacks.
    """

    def __init__(
        self,
        model: ModelSpec,
        device: DeviceSpec,
        dtype: str = "bfloat16",
        kv_dtype: str | None = None,
    ) -> None:
        self.model = model = model.sharded(device.degree)
        self.device = device
        self.unit_flops = device.peak(dtype) / device.units
        self.weight_bytes = ELEMENT_BYTES[dtype]
        # Of a token in a layer: its KV, and its query and output.
        self.kv_bytes = ELEMENT_BYTES[kv_dtype or dtype] * model.cached_features
        self.query_bytes = 2 * self.weight_bytes * model.heads * model.head_dim
        self.prefill_width, self.decode_width = attention_widths(model)
        self.prefill_flops = 2.0 * self.prefill_width  # of a query and a key
        self.query_heads, self.query_rows = model.heads, device.attention.tile_rows  # of the tiles
        # By units, in bytes/s.
        counts = range(device.units + 1)
        self.read_bandwidth = [device.read_bandwidth.at(count) for count in counts]
        self.attention_read = [device.attention.read_bandwidth.at(count) for count in counts]
        self.attention_flops = self.unit_flops * device.attention.efficiency  # of a unit
        # By busy units in small steps, in bytes/s and FLOP/s.
        steps = [step / STEPS_PER_UNIT for step in range(STEPS_PER_UNIT * device.units + 1)]
        self.gemm_read = [
            device.gemm.read_fraction * device.read_bandwidth.at(busy) for busy in steps
        ]
        self.gemm_flops = [
            busy * self.unit_flops * device.gemm.efficiency.at(busy) for busy in steps
        ]
        self.layer_products = layer_products(model)
        self.elementwise_bytes = elementwise_bytes(model)
        self.layer_cost: Callable[[int, int], StepCost] = lru_cache(1 << 16)(
            self._layer_products_cost
        )
        self.head_cost: Callable[[int, int], StepCost] = lru_cache(1 << 14)(self._head_cost)
        self.solo_cost: Callable[[BatchShape, int], StepCost] = lru_cache(1 << 12)(self._solo_cost)

    def seconds(self, work: BatchShape, units: int, co_running: CoRunning | None = None) -> float:
        """Duration of `work` on `units` units, in seconds.

        Raises ValueError if the device does not have so many units.
        """
        cost = self.solo_cost(work, units)
        if co_running is None:
            return cost.seconds
        other, other_units = co_running
        return cost.seconds * self.slowdown(
            cost, units, self.solo_cost(other, other_units), other_units
        )

    def slowdown(self, cost: StepCost, units: int, other: StepCost, other_units: int) -> float:
        """How many times longer a step takes with a co-running one (formula:
        spec.device.ContentionSpec).

        Steps that want more units than there are take turns on them.
        """
        if not cost.seconds or not other.seconds:
            return 1.0
        contention, turns = self.device.contention, (units + other_units) / self.device.units
        slower = (
            1
            + contention.bandwidth * other.bandwidth_share
            + contention.compute * other.compute_share * (1 - cost.compute_share)
        )
        return max(slower, cost.bandwidth_share + other.bandwidth_share) * max(1.0, turns)

    # ------------------------------------------------------------ one step, alone

    def operator_costs(self, work: BatchShape, units: int) -> OperatorCosts:
        if not 1 <= units <= self.device.units:
            raise ValueError(
                f"{units} units asked of {self.device.name}, which has {self.device.units}"
            )
        return (
            self.layer_cost(round_up_rows(work.prefill_tokens + work.decode_batch), units),
            self.decode_attention(work, units) if work.decode_batch else NO_COST,
            self.prefill_attention(work, units) if work.prefill_tokens else NO_COST,
            self.head_cost(work.samples, units)
            if work.last_layer == work.layers and work.samples
            else NO_COST,
        )

    def sum_costs(self, work: BatchShape, units: int, parts: OperatorCosts) -> StepCost:
        layer, reading, attention, head = parts
        seconds = layer.seconds + reading.seconds + attention.seconds
        if work.prefill_tokens:
            seconds = max(seconds, self.device.layer_launch_s)
        layers = work.last_layer - work.first_layer
        seconds = layers * seconds + head.seconds
        if not seconds:
            return NO_COST
        moved = layers * (layer.bytes + reading.bytes + attention.bytes) + head.bytes
        flops = layers * (layer.flops + reading.flops + attention.flops) + head.flops
        burn = min(1.0, flops / seconds / (units * self.unit_flops))
        return StepCost(seconds, moved, flops, moved / seconds / self.read_bandwidth[-1], burn)

    def _solo_cost(self, work: BatchShape, units: int) -> StepCost:
        return self.sum_costs(work, units, self.operator_costs(work, units))

    def _layer_products_cost(self, rows: int, units: int) -> StepCost:
        """The products of one layer and what lies between them, without attention."""
        total = StepCost(KERNELS_PER_LAYER * self.device.kernel_s, 0.0, 0.0)
        for product in self.layer_products:
            total += self.product_cost(product, rows, units)
        moved = rows * self.elementwise_bytes
        return total + StepCost(
            moved / self.read_bandwidth[units] + self._reduce_s(rows), moved, 0.0
        )

    def _reduce_s(self, rows: int) -> float:
        """The two all-reduces of a layer in tensor parallelism, each as a ring, with 2-byte
        elements."""
        device = self.device
        if device.degree == 1:
            return 0.0
        moved = 2 * (device.degree - 1) / device.degree * 2.0 * rows * self.model.hidden
        return 2 * (device.link_s + moved / device.link_bandwidth)

    def _head_cost(self, samples: int, units: int) -> StepCost:
        """Logits of `samples` rows; the sampler reads them about three times in float32."""
        moved = 3.0 * 4 * samples * self.model.vocab
        sampler = StepCost(
            KERNELS_PER_PASS * self.device.kernel_s + moved / self.read_bandwidth[units], moved, 0.0
        )
        return (
            self.product_cost(MatrixProduct(self.model.vocab, self.model.hidden), samples, units)
            + sampler
        )

    def product_cost(self, product: MatrixProduct, rows: int, units: int) -> StepCost:
        """`rows` rows times a weight matrix, on the fastest tile.

        Experts are a group of equal products over the expected number of experts that rows reach,
        with uniform routing.
        """
        return self.tiled_cost(product, rows, units)[0]

    def tiled_cost(self, product: MatrixProduct, rows: int, units: int) -> tuple[StepCost, float]:
        """The cost of `product`, and how many units have a tile on average."""
        if rows == 0:
            return StepCost(0.0, 0.0, 0.0), 0.0
        reached = 1.0  # expected number of experts
        if product.experts > 1:
            reached = product.experts * (1 - (1 - product.taken / product.experts) ** rows)
        each = rows * product.taken / reached
        columns, inner = product.columns, product.inner
        moved = self.weight_bytes * (
            reached * columns * inner + rows * product.taken * (columns + inner)
        )
        flops = 2.0 * rows * product.taken * columns * inner
        gemm, gemm_read, gemm_flops = self.device.gemm, self.gemm_read, self.gemm_flops
        least_read_s = moved / gemm_read[STEPS_PER_UNIT * units]
        peak = gemm_flops[STEPS_PER_UNIT * units]
        least_cube = least_read_s * least_read_s * least_read_s
        best, best_busy = math.inf, 0  # cubes of the rounded maximum, so that one root suffices
        # Large tiles first: then the bound below skips most others.
        for tile_rows, tile_columns, efficiency in reversed(gemm.tiles):
            if each <= tile_rows // 2 and tile_rows > gemm.tiles[0][0]:
                continue  # a smaller tile holds all the rows
            tiles = math.ceil(
                reached * math.ceil(each / tile_rows) * math.ceil(columns / tile_columns)
            )
            padded = 2.0 * tile_rows * tile_columns * inner * tiles / efficiency
            least_s = padded / peak
            if least_cube + least_s * least_s * least_s >= best:
                continue  # slower even with every unit at work
            for split in gemm.splits:
                if split > 1 and (tiles > 4 * units or inner < split * gemm.least_inner):
                    break
                # float32 partial sums, written and read
                spill = 0.0 if split == 1 else 8.0 * rows * product.taken * columns * split
                pieces = tiles * split
                busy = int(STEPS_PER_UNIT * (pieces / -(-pieces // units)))
                read_s, compute_s = (moved + spill) / gemm_read[busy], padded / gemm_flops[busy]
                cube = read_s * read_s * read_s + compute_s * compute_s * compute_s
                if cube < best:
                    best, best_busy = cube, busy
        return StepCost(best ** (1 / 3), moved, flops), best_busy / STEPS_PER_UNIT

    def prefill_attention(self, work: BatchShape, units: int, reused: bool = True) -> StepCost:
        """One layer, over reused tokens too if `reused`.

        BatchShape has no reused tokens per request: sum n*r over sum n is their mean, weighted by
        n.
        """
        tokens, products = work.prefill_tokens, work.prefill_reused if reused else 0
        flops = self.prefill_flops * ((work.prefill_squares + tokens) / 2 + products)
        read_again = work.prefill_requests * products / tokens
        moved = self.kv_bytes * (tokens + read_again) + self.query_bytes * tokens
        busy = busy_units(self.query_heads * -(-tokens // self.query_rows), units)
        compute_s = flops / (busy * self.attention_flops)
        return StepCost(rounded_max(moved / self.attention_read[units], compute_s), moved, flops)

    def decode_attention(self, work: BatchShape, units: int) -> StepCost:
        """One layer, split over the KV cache so that all units read."""
        flops = 2.0 * self.decode_width * work.decode_context
        moved = float(self.kv_bytes * work.decode_context)
        compute_s = flops / (units * self.attention_flops)
        return StepCost(rounded_max(moved / self.attention_read[units], compute_s), moved, flops)


def layer_products(model: ModelSpec) -> tuple[MatrixProduct, ...]:
    """The weight matrices of one layer: attention, gate-up, down (per expert for a mixture)."""
    experts, taken = (model.experts, model.experts_per_token) if model.experts else (1, 1)
    return (
        *(MatrixProduct(outputs, inputs) for outputs, inputs in model.attention_matrices),
        MatrixProduct(2 * model.ffn, model.hidden, experts, taken),
        MatrixProduct(model.hidden, model.ffn, experts, taken),
    )


def attention_widths(model: ModelSpec) -> tuple[int, int]:
    """Multiplications per query and key over all heads, in prefill and in decode.

    Prefill expands latent attention per head. In decode its heads work on the latent vectors
    (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
    """
    if model.latent is None:
        width = 2 * model.heads * model.head_dim
        return width, width
    latent = model.latent
    spelled_out = latent.nope_dim + latent.rope_dim + latent.value_dim
    return model.heads * spelled_out, model.heads * (2 * latent.kv_rank + latent.rope_dim)


def elementwise_bytes(model: ModelSpec) -> float:
    """Bytes that one token moves in one layer outside products and attention; 2-byte elements.

    They are two norms with their residual (read twice, written twice), the rotary embedding on Q
    and K, the append to the cache, and the gated activation.
    """
    taken = model.experts_per_token if model.experts else 1
    return 2.0 * (8 * model.hidden + 2 * model.qkv_features + 3 * model.ffn * taken)
