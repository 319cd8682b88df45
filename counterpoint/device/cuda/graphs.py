"""Decode steps as CUDA graphs: one per place, batch bucket and way of sampling.

Owns: the graphs and the buffers through which they are fed. Promises: a step of any batch is one upload, one launch and one
download; a graph is captured on its place's own stream, which is what decides its SMs; captured when first needed, or all at start.
Must not: know a request.

A batch is filled up to its bucket with rows of the spare slot: they compute, and nobody reads what they compute.

Shapes: B rows of the bucket, P pages of a block-table row, V vocabulary.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from counterpoint.device.cuda.attend import Plan
from counterpoint.device.cuda.driver import Driver
from counterpoint.device.cuda.places import Place
from counterpoint.device.cuda.sampling import Tail, sample_in_graph
from counterpoint.device.cuda.tables import DeviceTables
from counterpoint.model.batch import Batch
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def buckets_for(max_rows: int) -> tuple[int, ...]:
    """The bucket sizes up to `max_rows`, and multiples of 64 above the largest named."""
    sizes = [*BUCKETS, *range(BUCKETS[-1] + 64, max_rows + 64, 64)]
    return tuple(sizes[: bisect.bisect_left(sizes, max_rows) + 1])


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """`inputs_3B` int32: slot, position and new page of each row (DeviceTables.decode_inputs). After a replay the sampled ids are
    in `ids_B`, or (Tail.ANY) the logits in `logits_BV`."""

    inputs_3B: Tensor
    ids_B: Tensor
    logits_BV: Tensor | None
    replay: Callable[[], None]


class DecodeGraphs:
    def __init__(self, decoder: Decoder, kv: KVPool, tables: DeviceTables, driver: Driver, max_rows: int) -> None:
        self.decoder = decoder
        self.kv = kv
        self.tables = tables
        self.driver = driver
        self.buckets = buckets_for(max_rows)
        self.capture_s = 0.0
        self._graphs: dict[tuple[str, int, Tail], Graph] = {}

    @property
    def count(self) -> int:
        return len(self._graphs)

    def bucket(self, rows: int) -> int:
        return self.buckets[bisect.bisect_left(self.buckets, rows)]

    def launch(self, place: Place, inputs_3B: np.ndarray, tail: Tail) -> Graph:
        """Launch the step on the place's stream (which is current); the graph, whose results hold until its next launch."""
        graph = self.graph(place, inputs_3B.shape[1], tail)
        self.driver.upload(inputs_3B, graph.inputs_3B)
        graph.replay()
        return graph

    def capture(self, places: Iterable[Place], tails: Iterable[Tail]) -> None:
        """Capture all buckets of these, the largest first: the smaller ones then find their memory already there."""
        for place in places:
            for tail in tails:
                for size in reversed(self.buckets):
                    self.graph(place, size, tail)

    def graph(self, place: Place, size: int, tail: Tail) -> Graph:
        key = (place.name, size, tail)
        graph = self._graphs.get(key)
        if graph is None:
            began_s = time.perf_counter()
            graph = self._graphs[key] = self._capture(place, size, tail)
            self.capture_s += time.perf_counter() - began_s
        return graph

    def _capture(self, place: Place, size: int, tail: Tail) -> Graph:
        device, vocab = self.driver.device, self.decoder.spec.vocab
        inputs_3B = torch.empty(3, size, dtype=torch.int32, device=device)
        ids_B = torch.empty(size, dtype=torch.int64, device=device)
        logits_BV = torch.empty(size, vocab, dtype=torch.float32, device=device) if tail is Tail.ANY else None

        def body() -> None:
            slot_B, start_B = inputs_3B[0].long(), inputs_3B[1].long()
            result_BV = self._logits(slot_B, start_B, inputs_3B[2], place)
            if logits_BV is not None:
                logits_BV.copy_(result_BV)
                return
            sampled_B = sample_in_graph(result_BV, slot_B, start_B + 1, self.tables, tail)
            self.tables.tokens[slot_B, start_B + 1] = sampled_B.clamp(min=0).to(torch.int32)
            ids_B.copy_(sampled_B)

        with self.driver.on(place.stream), torch.inference_mode():
            self.driver.upload(self.tables.decode_inputs((), size), inputs_3B)
            replay = self.driver.capture(place.stream, body)
        return Graph(inputs_3B, ids_B, logits_BV, replay)

    def _logits(self, slot_B: Tensor, start_B: Tensor, page_B: Tensor, place: Place) -> Tensor:
        tables = self.tables
        size = tables.page_tokens
        index_B = start_B // size
        page_B = torch.where(page_B >= 0, page_B, tables.pages[slot_B, index_B])
        tables.pages[slot_B, index_B] = page_B
        plan = Plan(tables.pages[slot_B], (start_B + 1).to(torch.int32), place.decode)
        every_B = torch.arange(slot_B.shape[0], device=slot_B.device)
        batch = Batch(tables.tokens[slot_B, start_B], start_B, page_B.long() * size + start_B % size, every_B, plan)
        decoder = Decoder(self.decoder.spec, place.ops, self.decoder.weights)
        x_BD = decoder.run_layers(decoder.embed(batch), batch, self.kv, 0, decoder.spec.layers)
        return decoder.logits(x_BD, batch)
