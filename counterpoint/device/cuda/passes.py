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

A pass is filled up to the next of SIZES with rows that write to the spare page: they compute, and nobody reads what they compute.

Shapes: T tokens of the pass, R rows of a graph, D hidden, H query heads, A head size, E = H * A, B sampled rows.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.device.cuda.driver import Driver
from counterpoint.device.cuda.places import Place
from counterpoint.device.cuda.tables import DeviceTables
from counterpoint.model.batch import Batch
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool

Angles = tuple[Tensor, ...]  # as Ops.rope_angles of a GPU has them: a row for each token
SIZES = (16, 32, 48, 64, 96, 128, *range(192, 1025, 64), *range(1152, 2049, 128))  # rows; larger passes keep the device busy anyway


def sizes_for(max_pass_tokens: int) -> tuple[int, ...]:
    """Those of SIZES that passes of up to so many tokens need."""
    return SIZES[: bisect.bisect_left(SIZES, max_pass_tokens) + 1]


@dataclass(slots=True, eq=False, weakref_slot=True)
class PassState:
    """How far a pass has come. `x_TD` are its hidden states and, once a graph has begun a layer, `q_THA` that layer's queries; both
    are stale while it has a `seat`."""

    x_TD: Tensor
    angles: Angles
    q_THA: Tensor | None = None
    seat: Seat | None = None


@dataclass(slots=True, eq=False)
class Seat:
    """What the pieces of a place read and write, and whose it is just now (nobody's, once that pass is forgotten)."""

    x_RD: Tensor
    q_RHA: Tensor
    attended_RE: Tensor
    kv_rows_R: Tensor
    angles: Angles
    sitting: Callable[[], PassState | None] = lambda: None

    def clear(self) -> None:
        """Whoever sits here takes along what it needs."""
        guest = self.sitting()
        if guest is not None:
            rows = guest.x_TD.shape[0]
            guest.x_TD, guest.q_THA, guest.seat = self.x_RD[:rows].clone(), self.q_RHA[:rows].clone(), None
        self.sitting = lambda: None

    def take(self, state: PassState, kv_rows_T: Tensor, spare_row: int) -> None:
        if state.seat is self:
            return
        self.clear()
        if state.seat is not None:
            state.seat.clear()
        rows = kv_rows_T.shape[0]
        self.x_RD[:rows] = state.x_TD
        if state.q_THA is not None:
            self.q_RHA[:rows] = state.q_THA
        self.kv_rows_R[:rows] = kv_rows_T
        self.kv_rows_R[rows:] = spare_row
        for kept, made in zip(self.angles, state.angles, strict=True):
            kept[:rows] = made
        state.seat, self.sitting = self, weakref.ref(state)


class Passes:
    """`start`, then `run` once or in consecutive groups of layers."""

    def __init__(self, decoder: Decoder, kv: KVPool, tables: DeviceTables, driver: Driver, sizes: Sequence[int] = SIZES) -> None:
        """`sizes`: of the graphs, ascending; with none, every pass is launched operation by operation."""
        self.decoder = decoder
        self.kv = kv
        self.driver = driver
        self.sizes = tuple(sizes)
        self.capture_s = 0.0
        self._spare_row = tables.spare_page * tables.page_tokens
        self._seats: dict[str, Seat] = {}
        self._pieces: dict[tuple[str, int], list[Callable[[], None]]] = {}

    @property
    def count(self) -> int:
        return sum(len(pieces) for pieces in self._pieces.values())

    def start(self, batch: Batch) -> PassState:
        return PassState(self.decoder.embed(batch), self.decoder.angles(batch))

    def run(
        self, place: Place, batch: Batch, state: PassState, first_layer: int, last_layer: int, only_B: Tensor | None
    ) -> Tensor | None:
        """Launch layers [first_layer, last_layer) on the place's stream (which is current). Behind the model's last layer, its
        hidden states: of the rows `only_B`, or of all [T, D]."""
        ends = last_layer == self.decoder.spec.layers
        if not self.sizes or batch.tokens_T.shape[0] > self.sizes[-1]:
            layers = (first_layer, last_layer, state.angles, only_B)
            state.x_TD = self.decoder.run_layers(state.x_TD, batch, self.kv, *layers)
            return state.x_TD if ends else None
        rows = batch.tokens_T.shape[0]
        pieces = self.pieces(place, self.sizes[bisect.bisect_left(self.sizes, rows)])
        seat = self._seats[place.name]
        seat.take(state, batch.kv_rows_T, self._spare_row)
        q_THA, attended_TE = seat.q_RHA[:rows], seat.attended_RE[:rows]
        plan, attention = dataclasses.replace(batch.attention, out_TE=attended_TE), self.decoder.ops.attention
        if first_layer == 0:
            pieces[0]()
        for index in range(first_layer, last_layer - ends):
            attention(q_THA, self.kv.k[index], self.kv.v[index], plan)
            pieces[index + 1]()
        if not ends:
            return None
        x_TD = seat.x_RD[:rows]
        if only_B is not None and not len(only_B):
            return x_TD[:0]
        attention(q_THA, self.kv.k[last_layer - 1], self.kv.v[last_layer - 1], plan)
        if only_B is not None:
            x_TD, attended_TE = x_TD[only_B], attended_TE[only_B]
        x_TD, ffn_TD = self.decoder.behind_attention(x_TD, attended_TE, last_layer - 1)
        return self.decoder.ops.add(x_TD, ffn_TD)

    # ------------------------------------------------------------ capturing

    def capture(self, places: Iterable[Place]) -> None:
        """Capture all sizes in these places, the largest first: the smaller ones then find their memory already there."""
        for place in places:
            for size in reversed(self.sizes):
                self.pieces(place, size)

    def pieces(self, place: Place, size: int) -> list[Callable[[], None]]:
        pieces = self._pieces.get((place.name, size))
        if pieces is None:
            began_s = time.perf_counter()
            with self.driver.on(place.stream), torch.inference_mode():
                pieces = self._pieces[place.name, size] = self._capture(place, size)
            self.capture_s += time.perf_counter() - began_s
        return pieces

    def _capture(self, place: Place, size: int) -> list[Callable[[], None]]:
        seat = self._seats.get(place.name)
        if seat is None:
            seat = self._seats[place.name] = self._seat()
        seat.clear()  # a capture runs each piece once
        seat.kv_rows_R.fill_(self._spare_row)
        for buffer in (seat.x_RD, seat.attended_RE, seat.q_RHA):
            buffer.zero_()
        decoder = Decoder(self.decoder.spec, place.ops, self.decoder.weights)
        return [self.driver.capture(place.stream, self._body(decoder, seat, size, n)) for n in range(decoder.spec.layers)]

    def _body(self, decoder: Decoder, seat: Seat, size: int, index: int) -> Callable[[], None]:
        ops, eps, norm_D = decoder.ops, decoder.spec.norm_eps, decoder.weights.layers[index].attention_norm_D
        x_RD, angles = seat.x_RD[:size], tuple(part[:size] for part in seat.angles)

        def body() -> None:
            if index:
                ended_RD, ffn_RD = decoder.behind_attention(x_RD, seat.attended_RE[:size], index - 1)
                ended_RD, normed_RD = ops.add_rms_norm(ended_RD, ffn_RD, norm_D, eps)
                if ended_RD.data_ptr() != x_RD.data_ptr():
                    x_RD.copy_(ended_RD)
            else:
                normed_RD = ops.rms_norm(x_RD, norm_D, eps)
            q_RHA = decoder.before_attention(normed_RD, self.kv, index, angles, seat.kv_rows_R[:size])
            seat.q_RHA[:size] = q_RHA

        return body

    def _seat(self) -> Seat:
        spec, device, most = self.decoder.spec, self.driver.device, self.sizes[-1]
        position_R = torch.zeros(most, dtype=torch.int64, device=device)
        x_RD = self.decoder.ops.embed(position_R, self.decoder.weights.embedding_VD)
        weights = self.decoder.weights
        angles = self.decoder.ops.rope_angles(position_R, weights.inverse_frequencies, weights.rope_scale)
        q_RHA = x_RD.new_zeros(most, spec.heads, spec.head_dim)
        return Seat(x_RD, q_RHA, q_RHA.new_zeros(most, spec.heads * spec.head_dim), position_R, angles)
