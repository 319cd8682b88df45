"""Decode steps as CUDA graphs: one per place, batch bucket and way of sampling.

Owns: the graphs and the buffers through which they are fed. Promises: a step of any batch is one upload, one launch and one
download; a graph is captured on its place's own stream, which is what decides its SMs; captured when first needed, or all at start.
Must not: know a request.

A batch is filled up to its bucket with rows of the spare slot: they compute, and nobody reads what they compute.

Shapes: B rows of the bucket, P pages of a block-table row, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from counterpoint.device.cuda.attention import AttentionPlan
from counterpoint.device.cuda.device_tables import DeviceTables
from counterpoint.device.cuda.driver import Driver
from counterpoint.device.cuda.sampling import MAX_TOP_LOGPROBS, SamplingMode, sample_in_graph, sampling_mode_for
from counterpoint.device.cuda.stream_partitions import StreamPartition
from counterpoint.model.batch import PassTensors
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.model.sample import logprobs
from counterpoint.types import Segment

GraphLogprobs = tuple[
    Tensor, Tensor, Tensor
]  # of B rows: the token's log-probability, the best ids and their log-probabilities [B, N]


@dataclass(frozen=True, slots=True, eq=False)
class HostBuffers:
    """Host memory of one step: what goes in (`rows_3B` is `inputs_3B` for numpy) and what comes out."""

    inputs_3B: Tensor
    inputs_numpy_3B: np.ndarray
    ids_B: Tensor
    logprobs: GraphLogprobs | None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGraph:
    """`inputs_3B` int32: slot, position and new page of each row (DeviceTables.decode_inputs). After a replay the sampled ids are
    in `ids_B` and (Tail.LOGPROBS) their log-probabilities in `chosen`, or (Tail.ANY) the logits in `logits_BV`. `idle`: feeds that
    no step on its way uses."""

    inputs_3B: Tensor
    ids_B: Tensor
    logprobs: GraphLogprobs | None
    logits_BV: Tensor | None
    replay: Callable[[], None]
    idle_buffers: list[HostBuffers]


class DecodeGraphs:
    def __init__(self, decoder: Decoder, kv: KVPool, tables: DeviceTables, driver: Driver) -> None:
        self.decoder = decoder
        self.kv = kv
        self.tables = tables
        self.driver = driver
        self.buckets = tables.buckets
        self.capture_s = 0.0
        self._graphs: dict[tuple[str, int, SamplingMode], DecodeGraph] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def launch(
        self, place: StreamPartition, segments: Sequence[Segment]
    ) -> tuple[DecodeGraph, HostBuffers]:
        """Launch a step of decodes on the place's stream (which is current). The ids come to the feed's `ids_B`, or the logits
        stay in the graph's, until its next launch. The feed goes back to `graph.idle` when it has been read."""
        graph = self.graph(
            place, self.tables.pad_to_bucket(len(segments)), self._sampling_mode([s.slot for s in segments])
        )
        feed = graph.idle_buffers.pop() if graph.idle_buffers else self._make_buffers(graph)
        self.tables.fill_decode_inputs(segments, feed.inputs_numpy_3B)
        self.driver.copy(feed.inputs_3B, graph.inputs_3B)
        graph.replay()
        if graph.logits_BV is None:
            self.driver.copy(graph.ids_B, feed.ids_B)
        for made, kept in zip(graph.logprobs or (), feed.logprobs or (), strict=True):
            self.driver.copy(made, kept)
        return graph, feed

    def _sampling_mode(self, slots: list[int]) -> SamplingMode:
        rows = self.tables.sampling.rows
        tail = sampling_mode_for(int(np.bitwise_or.reduce(rows["stages"][slots])))
        return (
            SamplingMode.EAGER
            if tail & SamplingMode.LOGPROBS and int(rows["logprobs"][slots].max()) > MAX_TOP_LOGPROBS
            else tail
        )

    def capture(self, places: Iterable[StreamPartition], modes: Iterable[SamplingMode]) -> None:
        """Capture all buckets of these, the largest first: the smaller ones then find their memory already there."""
        for place in places:
            for tail in modes:
                for size in reversed(self.buckets):
                    self.graph(place, size, tail)

    def graph(self, place: StreamPartition, size: int, mode: SamplingMode) -> DecodeGraph:
        key = (place.name, size, mode)
        graph = self._graphs.get(key)
        if graph is None:
            began_s = time.perf_counter()
            graph = self._graphs[key] = self._capture(place, size, mode)
            self.capture_s += time.perf_counter() - began_s
        return graph

    def _capture(self, place: StreamPartition, size: int, mode: SamplingMode) -> DecodeGraph:
        device, vocab = self.driver.device, self.decoder.spec.vocab
        inputs_3B = torch.empty(3, size, dtype=torch.int32, device=device)
        ids_B = torch.empty(size, dtype=torch.int64, device=device)
        logits_BV = (
            torch.empty(size, vocab, dtype=torch.float32, device=device)
            if mode is SamplingMode.EAGER
            else None
        )
        known = self.tables.sampling.vocab
        chosen = None
        if mode & SamplingMode.LOGPROBS:
            top = min(MAX_TOP_LOGPROBS, known)
            own_B = torch.empty(size, dtype=torch.float32, device=device)
            ids_BN = torch.empty(size, top, dtype=torch.int64, device=device)
            chosen = (own_B, ids_BN, torch.empty(size, top, dtype=torch.float32, device=device))

        def body() -> None:
            slot_B, start_B = inputs_3B[0].long(), inputs_3B[1].long()
            result_BV = self._run_model(slot_B, start_B, inputs_3B[2], place)
            if logits_BV is not None:
                logits_BV.copy_(result_BV)
                return
            sampled_B = sample_in_graph(result_BV, slot_B, start_B + 1, self.tables, mode)
            self.tables.tokens[slot_B, start_B + 1] = sampled_B.clamp(min=0).to(torch.int32)
            ids_B.copy_(sampled_B)
            for made, kept in zip(
                logprobs(result_BV, sampled_B, MAX_TOP_LOGPROBS, known) if chosen else (),
                chosen or (),
                strict=True,
            ):
                kept.copy_(made)

        idle_rows = np.empty((3, size), np.int32)
        self.tables.fill_decode_inputs((), idle_rows)
        with self.driver.on_stream(place.stream), torch.inference_mode():
            self.driver.upload(idle_rows, inputs_3B)
            replay = self.driver.capture(place.stream, body)
        return DecodeGraph(inputs_3B, ids_B, chosen, logits_BV, replay, [])

    def _make_buffers(self, graph: DecodeGraph) -> HostBuffers:
        def like(tensor: Tensor) -> Tensor:
            return self.driver.alloc_pinned(tuple(tensor.shape), tensor.dtype)

        inputs_3B = like(graph.inputs_3B)
        own_B, *tops = map(like, graph.logprobs or (graph.ids_B,))
        return HostBuffers(
            inputs_3B,
            inputs_3B.numpy(),
            like(graph.ids_B),
            (own_B, tops[0], tops[1]) if graph.logprobs else None,
        )

    def _run_model(
        self, slot_B: Tensor, start_B: Tensor, page_B: Tensor, place: StreamPartition
    ) -> Tensor:
        tables = self.tables
        size = tables.page_tokens
        index_B = start_B // size
        page_B = torch.where(page_B >= 0, page_B, tables.pages[slot_B, index_B])
        tables.pages[slot_B, index_B] = page_B
        plan = AttentionPlan(tables.pages[slot_B], (start_B + 1).to(torch.int32), place.decode_kernel)
        every_B = torch.arange(slot_B.shape[0], device=slot_B.device)
        batch = PassTensors(
            tables.tokens[slot_B, start_B],
            start_B,
            page_B.long() * size + start_B % size,
            every_B,
            plan,
        )
        decoder = Decoder(self.decoder.spec, place.decode_ops, self.decoder.weights)
        x_BD = decoder.run_layers(decoder.embed(batch), batch, self.kv, 0, decoder.spec.layers)
        return decoder.logits(x_BD, batch)
