"""Passes with prompt tokens: small ones as CUDA graphs, so that the device sets their pace and not the host that launches them.

Owns: the graphs, the buffers between them, and which passes take them. Promises: the results of the same operations launched one by
one, up to what another number of rows changes in a product (nothing, with --batch-invariant); a pass may stop behind any layer and
go on later, in another place too, and other passes may run in between; captured when first needed, or at start.
Must not: know a request.

What lies between the attentions of two layers is one graph, a *piece*, for each place and number of rows: piece n ends layer n - 1
and begins layer n, up to its queries and the keys and values in the pool. Attention itself depends on every length in the pass and
is planned for each: it is launched between the pieces, from and into buffers that all of a place's pieces share. What follows the
last attention is for sampled rows alone, and launched as it always was. A pass that stops behind layer n has thus begun layer n
already, so stopping costs nothing.

A pass is filled up to the next of SIZES, or beyond them of the `larger` ones, with rows that write to the spare page: they compute,
and nobody reads what they compute. So there are few numbers of rows, for each of which cuBLAS may have a kernel of its own, and all
can be rehearsed (rehearsal.py).

Shapes: T tokens of the pass, R rows of a graph, D hidden, H query heads, A head size, E = H * A, B sampled rows.
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

# Rows. Not 448: cuBLAS takes a third longer for them than for 512 on an H200 (14.9 and 11.3 ms; Llama-3.1-8B, bfloat16).
SIZES = (
    16,
    32,
    48,
    64,
    96,
    128,
    *range(192, 385, 64),
    *range(512, 1025, 64),
    *range(1152, 2049, 128),
)
FILL = 128  # the height of a matrix product's tiles: rows up to there cost it nothing
MOST_PRODUCTS = (
    2**39
)  # multiplications in a layer, about: more keep the device busy for longer than it takes to launch the layer


def sizes_for(max_pass_tokens: int, spec: ModelSpec) -> tuple[int, ...]:
    """Those of SIZES that passes of up to so many tokens need, as far as graphs help this model: the larger its layers, the fewer
    rows keep the device busy (2,048 of Llama-3.1-8B, 640 of 70B)."""
    busy = MOST_PRODUCTS // spec.layer_matrix_parameters
    rows = max(bisect.bisect_right(SIZES, busy), 1)
    return SIZES[: min(rows, bisect.bisect_left(SIZES, max_pass_tokens) + 1)]


def next_larger(rows: int) -> int:
    """To how many rows a pass that is no graph is filled up: a multiple of FILL, beyond 8,192 rows of twice as much, and so on: at
    most 3 % more, from 4,096 on."""
    step = max(FILL, 1 << max(0, (rows - 1).bit_length() - 6))
    return -(-rows // step) * step


def pad_rows(rows: int, sizes: Sequence[int]) -> int:
    """To how many rows so many are filled up, where passes of `sizes` are graphs (none: not at all)."""
    if not sizes:
        return rows
    return next_larger(rows) if rows > sizes[-1] else sizes[bisect.bisect_left(sizes, rows)]


class PrefillPass(Protocol):
    """A pass on its way through the layers."""

    inputs: PassInputs

    def run(
        self, place: StreamPartition, first_layer: int, last_layer: int, only_B: Tensor | None
    ) -> Tensor | None:
        """Launch layers [first_layer, last_layer) on the place's stream (which is current). Behind the model's last layer, its
        hidden states: of the rows `only_B`, or of all [T, D]."""
        ...


class EagerPass:
    """Launched one operation after another."""

    def __init__(
        self, decoder: Decoder, kv: KVPool, tables: DeviceTables, inputs: PassInputs
    ) -> None:
        self.inputs = inputs
        self._decoder = decoder
        self._kv = kv
        self._batch = tables.batch(inputs)
        self._angles = decoder.angles(self._batch)
        self._x_TD = decoder.embed(self._batch)

    def run(
        self, place: StreamPartition, first_layer: int, last_layer: int, only_B: Tensor | None
    ) -> Tensor | None:
        batch = replace(self._batch, angles=self._angles, output_rows_B=only_B)
        layers = (first_layer, last_layer)
        self._x_TD = self._decoder.run_layers(self._x_TD, batch, self._kv, *layers)
        return self._x_TD if last_layer == self._decoder.spec.layers else None


@dataclass(slots=True, eq=False, weakref_slot=True)
class CapturedPass:
    """Launched as graphs. What it has computed is in its `seat`; without one, in `kept`."""

    passes: PiecewiseGraphs
    inputs: PassInputs
    size: int  # rows of its graphs
    seat: GraphBuffers | None = None
    kept: tuple[Tensor, ...] = ()

    def run(
        self, place: StreamPartition, first_layer: int, last_layer: int, only_B: Tensor | None
    ) -> Tensor | None:
        decoder, kv, rows = self.passes.decoder, self.passes.kv, self.size
        ends = last_layer == decoder.spec.layers
        pieces, seat = self.passes.pieces(place, self.size)
        seat.take(self)
        x_TD, q_THA, attended_TE = seat.x_RD[:rows], seat.q_RHA[:rows], seat.attended_RE[:rows]
        assert isinstance(decoder.ops.attention, Attention)
        attend = decoder.ops.attention.over_layers(
            q_THA, kv.k[first_layer], kv.v[first_layer], self.inputs.plan, attended_TE
        )
        if first_layer == 0:
            seat.place_2R[:, :rows] = self.inputs.place_2T
            pieces[0]()
        for index in range(first_layer, last_layer - ends):
            attend(kv.k[index], kv.v[index])
            pieces[index + 1]()
        if not ends:
            return None
        seat.leave()
        if only_B is not None and not len(only_B):
            return x_TD[:0]
        attend(kv.k[last_layer - 1], kv.v[last_layer - 1])
        if only_B is not None:
            x_TD, attended_TE = x_TD[only_B], attended_TE[only_B]
        x_TD, ffn_TD = decoder.after_attention(x_TD, attended_TE, last_layer - 1)
        return decoder.ops.add(x_TD, ffn_TD)


@dataclass(slots=True, eq=False)
class GraphBuffers:
    """What the pieces of a place read and write, and whose it is just now (nobody's, once that pass is forgotten)."""

    place_2R: Tensor
    kv_rows_R: Tensor
    angles: tuple[Tensor, ...]  # as Ops.rope_angles has them on a GPU: a row for each token
    x_RD: Tensor
    q_RHA: Tensor
    attended_RE: Tensor
    sitting: Callable[[], CapturedPass | None] = lambda: None

    def take(self, guest: CapturedPass) -> None:
        if guest.seat is self:
            return
        self.clear()
        if guest.seat is not None:
            guest.seat.clear()
        if guest.kept:
            for buffer, kept in zip(self._lasting, guest.kept, strict=True):
                buffer[: guest.size] = kept
        guest.seat, guest.kept, self.sitting = self, (), weakref.ref(guest)

    def leave(self) -> None:
        self.sitting = lambda: None

    def clear(self) -> None:
        """Whoever sits here takes along what it has computed."""
        guest = self.sitting()
        if guest is not None:
            guest.kept, guest.seat = (
                tuple(buffer[: guest.size].clone() for buffer in self._lasting),
                None,
            )
        self.leave()

    @property
    def _lasting(self) -> tuple[Tensor, ...]:
        return (self.kv_rows_R, *self.angles, self.x_RD, self.q_RHA)


class PiecewiseGraphs:
    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        tables: DeviceTables,
        driver: Driver,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        """`sizes`: of the graphs, ascending; with none, every pass is launched operation by operation."""
        self.decoder = decoder
        self.kv = kv
        self.tables = tables
        self.driver = driver
        self.sizes = tuple(sizes)
        self.capture_s = 0.0
        self._seats: dict[str, GraphBuffers] = {}
        self._pieces: dict[tuple[str, int], list[Callable[[], None]]] = {}

    @property
    def count(self) -> int:
        return sum(len(pieces) for pieces in self._pieces.values())

    def size(self, rows: int) -> int:
        return pad_rows(rows, self.sizes)

    def start(self, inputs: PassInputs) -> PrefillPass:
        """`inputs`: filled up."""
        size = inputs.place_2T.shape[1]
        if size in self.sizes:
            return CapturedPass(self, inputs, size)
        return EagerPass(self.decoder, self.kv, self.tables, inputs)

    # ------------------------------------------------------------ capturing

    def capture(self, places: Iterable[StreamPartition]) -> None:
        """Capture all sizes in these places, the largest first: the smaller ones then find their memory already there."""
        for place in places:
            for size in reversed(self.sizes):
                self.pieces(place, size)

    def pieces(
        self, place: StreamPartition, size: int
    ) -> tuple[list[Callable[[], None]], GraphBuffers]:
        """The pieces of `size` rows, and what they read and write."""
        pieces = self._pieces.get((place.name, size))
        if pieces is None:
            began_s = time.perf_counter()
            with self.driver.on(place.stream), torch.inference_mode():
                pieces = self._pieces[place.name, size] = self._capture(place, size)
            self.capture_s += time.perf_counter() - began_s
        return pieces, self._seats[place.name]

    def _capture(self, place: StreamPartition, size: int) -> list[Callable[[], None]]:
        if place.name not in self._seats:
            self._seats[place.name] = self._seat()
        seat = self._seats[place.name]
        seat.clear()
        seat.place_2R[0], seat.place_2R[1] = (
            self.tables.spare_slot,
            0,
        )  # a capture runs each piece once
        seat.attended_RE.zero_()
        decoder = Decoder(self.decoder.spec, place.ops, self.decoder.weights)
        return [
            self.driver.capture(place.stream, self._piece(decoder, seat, size, n))
            for n in range(decoder.spec.layers)
        ]

    def _piece(
        self, decoder: Decoder, seat: GraphBuffers, size: int, index: int
    ) -> Callable[[], None]:
        ops, eps, norm_D = (
            decoder.ops,
            decoder.spec.norm_eps,
            decoder.weights.layers[index].attention_norm_D,
        )
        x_RD, kv_rows_R, angles = (
            seat.x_RD[:size],
            seat.kv_rows_R[:size],
            tuple(part[:size] for part in seat.angles),
        )

        def begin() -> Tensor:
            tokens_R, found_R = self.tables.look_up(seat.place_2R[:, :size])
            kv_rows_R.copy_(found_R)
            for kept, made in zip(angles, self._angles(seat.place_2R[1, :size]), strict=True):
                kept.copy_(made)
            x_RD.copy_(ops.embed(tokens_R, decoder.weights.embedding_VD))
            return ops.rms_norm(x_RD, norm_D, eps)

        def go_on() -> Tensor:
            ended_RD, ffn_RD = decoder.after_attention(x_RD, seat.attended_RE[:size], index - 1)
            ended_RD, normed_RD = ops.add_rms_norm(ended_RD, ffn_RD, norm_D, eps)
            if ended_RD.data_ptr() != x_RD.data_ptr():
                x_RD.copy_(ended_RD)
            return normed_RD

        def piece() -> None:
            normed_RD = go_on() if index else begin()
            seat.q_RHA[:size] = decoder.before_attention(
                normed_RD, self.kv, index, angles, kv_rows_R
            )

        return piece

    def _angles(self, position_R: Tensor) -> tuple[Tensor, ...]:
        weights = self.decoder.weights
        return self.decoder.ops.rope_angles(
            position_R, weights.inverse_frequencies, weights.rope_scale
        )

    def _seat(self) -> GraphBuffers:
        spec, device, most = self.decoder.spec, self.driver.device, self.sizes[-1]
        place_2R = torch.zeros(2, most, dtype=torch.int64, device=device)
        x_RD = self.decoder.ops.embed(place_2R[1], self.decoder.weights.embedding_VD)
        q_RHA = x_RD.new_zeros(most, spec.heads, spec.head_dim)
        attended_RE = x_RD.new_zeros(most, spec.heads * spec.head_dim)
        kv_rows_R = torch.zeros_like(place_2R[0])
        place_2R[0] = self.tables.spare_slot
        return GraphBuffers(
            place_2R, kv_rows_R, self._angles(place_2R[1]), x_RD, q_RHA, attended_RE
        )
