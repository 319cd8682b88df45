"""Decode steps as CUDA graphs: one per stream partition, batch bucket and sampling mode.

Owns: the graphs and their input and output buffers.
Promises: a step of any batch size is one upload, one graph launch and one download. A graph is
captured on its partition's stream, which determines its SMs, either at start or when first needed.
Must not: know a request.

A batch is padded to its bucket with rows of the padding slot, whose results nobody reads.

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
from counterpoint.device.cuda.sampling import (
    MAX_TOP_LOGPROBS,
    SamplingMode,
    sample_in_graph,
    sampling_mode_for,
)
from counterpoint.device.cuda.stream_partitions import StreamPartition
from counterpoint.model.batch import PassTensors
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.model.sample import logprobs
from counterpoint.types import Segment

# Of B rows: the token's log-probability, the best ids and their log-probabilities [B, N].
GraphLogprobs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class HostBuffers:
    """Pinned memory of one step: its inputs (`inputs_numpy_3B` is a view of `inputs_3B`) and its
    outputs."""

    inputs_3B: Tensor
    inputs_numpy_3B: np.ndarray
    ids_B: Tensor
    logprobs: GraphLogprobs | None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGraph:
    """`inputs_3B` int32: slot, position and new page of each row (DeviceTables.fill_decode_inputs).
    A replay leaves the sampled ids in `ids_B` and (SamplingMode.LOGPROBS) their log-probabilities
    in `logprobs`, or (SamplingMode.EAGER) the logits in `logits_BV`. `idle_buffers`: those that no
    step in flight uses."""

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
        self, partition: StreamPartition, segments: Sequence[Segment]
    ) -> tuple[DecodeGraph, HostBuffers]:
        """Launch a decode step on the partition's stream, which must be current. The ids arrive in
        the buffers' `ids_B`, or the logits stay in the graph until its next launch. The caller
        returns the buffers to `graph.idle_buffers` once it has read them."""
        graph = self.graph(
            partition,
            self.tables.pad_to_bucket(len(segments)),
            self._sampling_mode([s.slot for s in segments]),
        )
        buffers = graph.idle_buffers.pop() if graph.idle_buffers else self._make_buffers(graph)
        self.tables.fill_decode_inputs(segments, buffers.inputs_numpy_3B)
        self.driver.copy(buffers.inputs_3B, graph.inputs_3B)
        graph.replay()
        if graph.logits_BV is None:
            self.driver.copy(graph.ids_B, buffers.ids_B)
        for source, target in zip(graph.logprobs or (), buffers.logprobs or (), strict=True):
            self.driver.copy(source, target)
        return graph, buffers

    def _sampling_mode(self, slots: list[int]) -> SamplingMode:
        rows = self.tables.sampling.rows
        mode = sampling_mode_for(int(np.bitwise_or.reduce(rows["stages"][slots])))
        return (
            SamplingMode.EAGER
            if mode & SamplingMode.LOGPROBS
            and int(rows["logprobs"][slots].max()) > MAX_TOP_LOGPROBS
            else mode
        )

    def capture(self, partitions: Iterable[StreamPartition], modes: Iterable[SamplingMode]) -> None:
        """Capture all buckets, largest first, so that smaller ones reuse its memory."""
        for partition in partitions:
            for mode in modes:
                for size in reversed(self.buckets):
                    self.graph(partition, size, mode)

    def graph(self, partition: StreamPartition, size: int, mode: SamplingMode) -> DecodeGraph:
        key = (partition.name, size, mode)
        graph = self._graphs.get(key)
        if graph is None:
            began_s = time.perf_counter()
            graph = self._graphs[key] = self._capture(partition, size, mode)
            self.capture_s += time.perf_counter() - began_s
        return graph

    def _capture(self, partition: StreamPartition, size: int, mode: SamplingMode) -> DecodeGraph:
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
            result_BV = self._run_model(slot_B, start_B, inputs_3B[2], partition)
            if logits_BV is not None:
                logits_BV.copy_(result_BV)
                return
            sampled_B = sample_in_graph(result_BV, slot_B, start_B + 1, self.tables, mode)
            self.tables.tokens[slot_B, start_B + 1] = sampled_B.clamp(min=0).to(torch.int32)
            ids_B.copy_(sampled_B)
            for source, target in zip(
                logprobs(result_BV, sampled_B, MAX_TOP_LOGPROBS, known) if chosen else (),
                chosen or (),
                strict=True,
            ):
                target.copy_(source)

        idle_rows = np.empty((3, size), np.int32)
        self.tables.fill_decode_inputs((), idle_rows)
        with self.driver.on_stream(partition.stream), torch.inference_mode():
            self.driver.upload(idle_rows, inputs_3B)
            replay = self.driver.capture(partition.stream, body)
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
        self, slot_B: Tensor, start_B: Tensor, page_B: Tensor, partition: StreamPartition
    ) -> Tensor:
        tables = self.tables
        size = tables.page_tokens
        index_B = start_B // size
        page_B = torch.where(page_B >= 0, page_B, tables.pages[slot_B, index_B])
        tables.pages[slot_B, index_B] = page_B
        plan = AttentionPlan(
            tables.pages[slot_B], (start_B + 1).to(torch.int32), partition.decode_kernel
        )
        every_B = torch.arange(slot_B.shape[0], device=slot_B.device)
        batch = PassTensors(
            tables.tokens[slot_B, start_B],
            start_B,
            page_B.long() * size + start_B % size,
            every_B,
            plan,
        )
        decoder = Decoder(self.decoder.spec, partition.decode_ops, self.decoder.weights)
        x_BD = decoder.run_layers(decoder.embed(batch), batch, self.kv, 0, decoder.spec.layers)
        return decoder.logits(x_BD, batch)
