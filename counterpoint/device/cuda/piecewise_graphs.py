"""Passes with prompt tokens: small ones run as piecewise CUDA graphs, so launching is not the
limit.

Owns: the graphs, their buffers, and which passes use them.
Promises: the same results as eager launches, up to a product's rounding at another row count (none
with --batch-invariant). A pass may stop after any layer and continue later, also on another
partition, while other passes run in between. Graphs are captured at start or when first needed.
Must not: know a request.

The work between the attentions of two layers is one graph, a *piece*, per stream partition and row
count: piece n ends layer n - 1 and starts layer n, up to its queries and its keys and values in the
pool. Attention depends on every length in the pass, so it is planned per pass and launched between
the pieces, on buffers that all pieces of a partition share. What follows the last attention
concerns sampled rows only and is launched eagerly. A pass that stops after layer n has already
started layer n, so stopping costs nothing.

A pass is padded to the next of GRAPH_SIZES, or beyond them to `next_larger`. Padding rows write to
the padding page and nobody reads them. So there are few row counts, each of which may have its own
cuBLAS kernel, and warmup.py can run them all.

Shapes: T tokens of the pass, R rows of a graph, D hidden, H query heads, A head size, E = H * A, B
sampled rows.
"""

from __future__ import annotations

import bisect
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from counterpoint.device.cuda.attention import Attention
from counterpoint.device.cuda.device_tables import DeviceTables, PassInputs
from counterpoint.device.cuda.driver import Driver
from counterpoint.device.cuda.stream_partitions import StreamPartition
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.spec import ModelSpec

# Rows. Not 448: cuBLAS takes longer for them than for 512 on an H200 (14.9 and 11.3 ms;
# Llama-3.1-8B, bfloat16).
GRAPH_SIZES = (
    *(16, 32, 48, 64, 96, 128),
    *range(192, 385, 64),
    *range(512, 1025, 64),
    *range(1152, 2049, 128),
)
TILE_ROWS = 128  # height of a matrix product's tiles: padding up to it is free
# Multiplications per layer and pass. Beyond about this many, a layer runs longer than its launch.
MAX_MULTIPLICATIONS = 2**39


def graph_sizes_for(max_pass_tokens: int, spec: ModelSpec) -> tuple[int, ...]:
    """The GRAPH_SIZES for passes of up to `max_pass_tokens`. Large layers keep the device busy at
    fewer rows, so graphs help only below (2,048 rows of Llama-3.1-8B, 640 of 70B)."""
    busy = MAX_MULTIPLICATIONS // spec.layer_matrix_parameters
    rows = max(bisect.bisect_right(GRAPH_SIZES, busy), 1)
    return GRAPH_SIZES[: min(rows, bisect.bisect_left(GRAPH_SIZES, max_pass_tokens) + 1)]


def next_larger(rows: int) -> int:
    """Padded row count of an eager pass: a multiple of TILE_ROWS, of twice that above 8,192 rows,
    and so on. Padding is at most 3 % from 4,096 rows on."""
    step = max(TILE_ROWS, 1 << max(0, (rows - 1).bit_length() - 6))
    return -(-rows // step) * step


def pad_rows(rows: int, sizes: Sequence[int]) -> int:
    """Padded row count, where passes of `sizes` are graphs (empty: no padding)."""
    if not sizes:
        return rows
    return next_larger(rows) if rows > sizes[-1] else sizes[bisect.bisect_left(sizes, rows)]


class PrefillPass(Protocol):
    """A pass in progress through the layers."""

    inputs: PassInputs

    def run(
        self,
        partition: StreamPartition,
        first_layer: int,
        last_layer: int,
        last_rows_B: Tensor | None,
    ) -> Tensor | None:
        """Launch layers [first_layer, last_layer) on the partition's stream, which must be current.
        After the model's last layer, returns the hidden states of `last_rows_B`, or of all rows [T,
        D]."""
        ...


class EagerPass:
    """Launches each operation."""

    def __init__(
        self, decoder: Decoder, kv: KVPool, tables: DeviceTables, inputs: PassInputs
    ) -> None:
        self.inputs = inputs
        self._decoder = decoder
        self._kv = kv
        self._batch = tables.make_batch(inputs)
        self._angles = decoder.angles(self._batch)
        self._x_TD = decoder.embed(self._batch)

    def run(
        self,
        partition: StreamPartition,
        first_layer: int,
        last_layer: int,
        last_rows_B: Tensor | None,
    ) -> Tensor | None:
        batch = replace(self._batch, angles=self._angles, output_rows_B=last_rows_B)
        layers = (first_layer, last_layer)
        self._x_TD = self._decoder.run_layers(self._x_TD, batch, self._kv, *layers)
        return self._x_TD if last_layer == self._decoder.spec.layers else None


@dataclass(slots=True, eq=False, weakref_slot=True)
class CapturedPass:
    """Launches graphs. Its state is in `buffers`, or in `saved` while another pass uses the
    buffers."""

    passes: PiecewiseGraphs
    inputs: PassInputs
    size: int  # rows, padded
    buffers: GraphBuffers | None = None
    saved: tuple[Tensor, ...] = ()

    def run(
        self,
        partition: StreamPartition,
        first_layer: int,
        last_layer: int,
        last_rows_B: Tensor | None,
    ) -> Tensor | None:
        decoder, kv, rows = self.passes.decoder, self.passes.kv, self.size
        ends = last_layer == decoder.spec.layers
        pieces, buffers = self.passes.pieces(partition, self.size)
        buffers.acquire(self)
        x_TD, q_THA, attended_TE = (
            buffers.x_RD[:rows],
            buffers.q_RHA[:rows],
            buffers.attention_out_RE[:rows],
        )
        assert isinstance(decoder.ops.attention, Attention)
        attend = decoder.ops.attention.prepare_layers(
            q_THA, kv.k[first_layer], kv.v[first_layer], self.inputs.plan, attended_TE
        )
        if first_layer == 0:
            buffers.slot_position_2R[:, :rows] = self.inputs.slot_position_2T
            pieces[0]()
        for index in range(first_layer, last_layer - ends):
            attend(kv.k[index], kv.v[index])
            pieces[index + 1]()
        if not ends:
            return None
        buffers.release()
        if last_rows_B is not None and not len(last_rows_B):
            return x_TD[:0]
        attend(kv.k[last_layer - 1], kv.v[last_layer - 1])
        if last_rows_B is not None:
            x_TD, attended_TE = x_TD[last_rows_B], attended_TE[last_rows_B]
        x_TD, ffn_TD = decoder.after_attention(x_TD, attended_TE, last_layer - 1)
        return decoder.ops.add(x_TD, ffn_TD)


@dataclass(slots=True, eq=False)
class GraphBuffers:
    """Inputs and outputs of a partition's pieces. `owner`: the pass whose state they hold; None
    once that pass is forgotten."""

    slot_position_2R: Tensor
    kv_rows_R: Tensor
    angles: tuple[Tensor, ...]  # of Ops.rope_angles: a row per token
    x_RD: Tensor
    q_RHA: Tensor
    attention_out_RE: Tensor
    owner: Callable[[], CapturedPass | None] = lambda: None

    def acquire(self, prefill: CapturedPass) -> None:
        if prefill.buffers is self:
            return
        self.evict()
        if prefill.buffers is not None:
            prefill.buffers.evict()
        if prefill.saved:
            for buffer, saved in zip(self._pass_state, prefill.saved, strict=True):
                buffer[: prefill.size] = saved
        prefill.buffers, prefill.saved, self.owner = self, (), weakref.ref(prefill)

    def release(self) -> None:
        self.owner = lambda: None

    def evict(self) -> None:
        """Save the owner's state to memory of its own."""
        owner = self.owner()
        if owner is not None:
            owner.saved, owner.buffers = (
                tuple(buffer[: owner.size].clone() for buffer in self._pass_state),
                None,
            )
        self.release()

    @property
    def _pass_state(self) -> tuple[Tensor, ...]:
        return (self.kv_rows_R, *self.angles, self.x_RD, self.q_RHA)


class PiecewiseGraphs:
    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        tables: DeviceTables,
        driver: Driver,
        sizes: Sequence[int] = GRAPH_SIZES,
    ) -> None:
        """`sizes`: row counts of graphs, ascending; empty: every pass is eager."""
        self.decoder = decoder
        self.kv = kv
        self.tables = tables
        self.driver = driver
        self.sizes = tuple(sizes)
        self.capture_s = 0.0
        self._buffers: dict[str, GraphBuffers] = {}
        self._pieces: dict[tuple[str, int], list[Callable[[], None]]] = {}

    @property
    def num_graphs(self) -> int:
        return sum(len(pieces) for pieces in self._pieces.values())

    def pad_rows(self, rows: int) -> int:
        return pad_rows(rows, self.sizes)

    def start_pass(self, inputs: PassInputs) -> PrefillPass:
        """`inputs` must be padded."""
        size = inputs.slot_position_2T.shape[1]
        if size in self.sizes:
            return CapturedPass(self, inputs, size)
        return EagerPass(self.decoder, self.kv, self.tables, inputs)

    # ------------------------------------------------------------ capturing

    def capture(self, partitions: Iterable[StreamPartition]) -> None:
        """Capture all sizes, largest first, so that smaller ones reuse its memory."""
        for partition in partitions:
            for size in reversed(self.sizes):
                self.pieces(partition, size)

    def pieces(
        self, partition: StreamPartition, size: int
    ) -> tuple[list[Callable[[], None]], GraphBuffers]:
        """The pieces of `size` rows, and their buffers."""
        pieces = self._pieces.get((partition.name, size))
        if pieces is None:
            began_s = time.perf_counter()
            with self.driver.on_stream(partition.stream), torch.inference_mode():
                pieces = self._pieces[partition.name, size] = self._capture(partition, size)
            self.capture_s += time.perf_counter() - began_s
        return pieces, self._buffers[partition.name]

    def _capture(self, partition: StreamPartition, size: int) -> list[Callable[[], None]]:
        if partition.name not in self._buffers:
            self._buffers[partition.name] = self._make_buffers()
        buffers = self._buffers[partition.name]
        buffers.evict()
        # A capture runs each piece once.
        buffers.slot_position_2R[0], buffers.slot_position_2R[1] = self.tables.padding_slot, 0
        buffers.attention_out_RE.zero_()
        decoder = Decoder(self.decoder.spec, partition.decode_ops, self.decoder.weights)
        return [
            self.driver.capture(partition.stream, self._make_piece(decoder, buffers, size, n))
            for n in range(decoder.spec.layers)
        ]

    def _make_piece(
        self, decoder: Decoder, buffers: GraphBuffers, size: int, index: int
    ) -> Callable[[], None]:
        ops, eps, norm_D = (
            decoder.ops,
            decoder.spec.norm_eps,
            decoder.weights.layers[index].attention_norm_D,
        )
        x_RD, kv_rows_R, angles = (
            buffers.x_RD[:size],
            buffers.kv_rows_R[:size],
            tuple(part[:size] for part in buffers.angles),
        )

        def begin() -> Tensor:
            tokens_R, found_R = self.tables.lookup_tokens(buffers.slot_position_2R[:, :size])
            kv_rows_R.copy_(found_R)
            for target, source in zip(
                angles, self._angles(buffers.slot_position_2R[1, :size]), strict=True
            ):
                target.copy_(source)
            x_RD.copy_(ops.embed(tokens_R, decoder.weights.embedding_VD))
            return ops.rms_norm(x_RD, norm_D, eps)

        def go_on() -> Tensor:
            ended_RD, ffn_RD = decoder.after_attention(
                x_RD, buffers.attention_out_RE[:size], index - 1
            )
            ended_RD, normed_RD = ops.add_rms_norm(ended_RD, ffn_RD, norm_D, eps)
            if ended_RD.data_ptr() != x_RD.data_ptr():
                x_RD.copy_(ended_RD)
            return normed_RD

        def piece() -> None:
            normed_RD = go_on() if index else begin()
            buffers.q_RHA[:size] = decoder.before_attention(
                normed_RD, self.kv, index, angles, kv_rows_R
            )

        return piece

    def _angles(self, position_R: Tensor) -> tuple[Tensor, ...]:
        weights = self.decoder.weights
        return self.decoder.ops.rope_angles(
            position_R, weights.inverse_frequencies, weights.rope_scale
        )

    def _make_buffers(self) -> GraphBuffers:
        spec, device, most = self.decoder.spec, self.driver.device, self.sizes[-1]
        place_2R = torch.zeros(2, most, dtype=torch.int64, device=device)
        x_RD = self.decoder.ops.embed(place_2R[1], self.decoder.weights.embedding_VD)
        q_RHA = x_RD.new_zeros(most, spec.heads, spec.head_dim)
        attended_RE = x_RD.new_zeros(most, spec.heads * spec.head_dim)
        kv_rows_R = torch.zeros_like(place_2R[0])
        place_2R[0] = self.tables.padding_slot
        return GraphBuffers(
            place_2R, kv_rows_R, self._angles(place_2R[1]), x_RD, q_RHA, attended_RE
        )
