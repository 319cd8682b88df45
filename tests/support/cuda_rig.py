"""A CUDA executor for tests: on a GPU or, without one, with a driver that runs on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterpoint.device.cuda.attention import (
    Attention,
    DecodeKernel,
    TorchPlanner,
    choose_decode_kernel,
    choose_planner,
    reference_decode,
)
from counterpoint.device.cuda.decode_graphs import DecodeGraphs
from counterpoint.device.cuda.device_tables import DeviceTables, TableShape, buckets_for
from counterpoint.device.cuda.driver import CudaDriver, Driver
from counterpoint.device.cuda.executor import CudaExecutor, CudaRuntime
from counterpoint.device.cuda.gemm_autotune import GemmAutotuner
from counterpoint.device.cuda.green_contexts import Partitions
from counterpoint.device.cuda.kernels.floor import FilterFloor
from counterpoint.device.cuda.ops import Precision, cuda_ops, layer_kernels, make_decode_ops
from counterpoint.device.cuda.piecewise_graphs import GRAPH_SIZES, PiecewiseGraphs
from counterpoint.device.cuda.stream_partitions import (
    StreamPartition,
    StreamPartitions,
    make_stream_partitions,
)
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.model.checkpoint import RandomCheckpoint
from counterpoint.model.kv import KVPool
from counterpoint.model.ops import Ops, reference_ops
from counterpoint.model.weights import build_decoder
from counterpoint.spec import ModelSpec
from counterpoint.types import (
    BatchShape,
    Command,
    InitSlot,
    Lane,
    Role,
    Sampling,
    Segment,
    Step,
    StepDone,
)

HAS_GPU = torch.cuda.is_available()
PAGE = 16
TINY = ModelSpec(
    "tiny", "llama", 4, 64, 4, 2, 16, 128, 310, 256, tied_embeddings=True, eos_token_ids=(1,)
)
VOCAB = 300  # of the tokenizer: the rest is padding
LANES = (Lane(0, Role.DECODE, 2), Lane(1, Role.PREFILL, 2))
GREEDY = Sampling(max_tokens=16, temperature=0.0)
LEVELS = (16, 32)


class InPlaceDriver:
    """Runs everything at once. Events are host times, and a graph calls its body again."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def set_stream(self, stream: Any) -> None:
        pass

    def record_event(self, stream: Any) -> float:
        return time.monotonic()

    def wait_event(self, stream: Any, event: float) -> None:
        pass

    def synchronize(self, event: float) -> None:
        pass

    def elapsed_s(self, first: float, second: float) -> float:
        return second - first

    def upload(self, array: np.ndarray, to: Tensor | None = None) -> Tensor:
        source = torch.from_numpy(array.copy())
        return source if to is None else to.copy_(source)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def alloc_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, source: Tensor, to: Tensor) -> None:
        to.copy_(source)

    def take_staging(self) -> list[Tensor]:
        return []

    def free_staging(self, staging: list[Tensor]) -> None:
        pass

    def capture(self, stream: Any, body: Callable[[], None]) -> Callable[[], None]:
        body()
        return body


def in_place_ops() -> Ops:
    def gather(k_pages: Tensor, v_pages: Tensor, rows_L: Tensor) -> tuple[Tensor, Tensor]:
        return k_pages.flatten(0, 1)[rows_L.long()], v_pages.flatten(0, 1)[rows_L.long()]

    return dataclasses.replace(reference_ops(), name="in place", attention=Attention(gather))


@functools.cache
def shared_partitions(levels: tuple[int, ...]) -> Partitions:
    """One set of contexts per process: graphs and memory of their streams may outlive a test."""
    return Partitions(levels)


@dataclasses.dataclass(frozen=True, eq=False)
class CudaParts(CudaRuntime):
    """A model on a device, without its executor."""

    units: int
    close: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class PartsOptions:
    """`sizes`: row counts of piecewise graphs. The rest as in Precision and RandomCheckpoint."""

    spec: ModelSpec = TINY
    pages: int = 64
    slots: int = 8
    dtype: torch.dtype = torch.float32
    std: float = 0.15
    kv_dtype: torch.dtype | None = None
    quantise: bool = False
    invariant: bool = False
    sizes: Sequence[int] = GRAPH_SIZES

    @property
    def precision(self) -> Precision:
        return Precision(self.dtype, self.kv_dtype, self.quantise, self.invariant)


def make_parts(**options: Any) -> CudaParts:
    """By PartsOptions. Without a GPU the device has 8 units, splits of 2 and 4, and float32."""
    chosen = PartsOptions(**options)
    driver: Driver = CudaDriver() if HAS_GPU else InPlaceDriver()
    make = gpu_partitions if HAS_GPU else in_place_partitions
    stream_partitions, ops, units = make(chosen)
    close = torch.cuda.synchronize if HAS_GPU else lambda: None
    spec, pages = chosen.spec, chosen.pages
    decoder = build_decoder(spec, RandomCheckpoint(3, deviation=chosen.std), ops, driver.device)
    kv = KVPool(spec, pages + 1, PAGE, ops.kv_dtype, driver.device)
    shape = TableShape(chosen.slots, spec.max_context_tokens, PAGE, VOCAB, padding_page=pages)
    floor = FilterFloor() if HAS_GPU else None
    tables = DeviceTables(shape, spec.eos_token_ids, driver, floor)
    close()  # the partitions' streams may now use what this stream allocated
    graphs = DecodeGraphs(decoder, kv, tables, driver)
    passes = PiecewiseGraphs(decoder, kv, tables, driver, chosen.sizes)
    return CudaParts(decoder, kv, tables, graphs, passes, stream_partitions, driver, units, close)


def gpu_partitions(options: PartsOptions) -> tuple[StreamPartitions, Ops, int]:
    spec, dtype, device = options.spec, options.dtype, torch.device("cuda", 0)
    partitions = shared_partitions(LEVELS)
    ops, planner = cuda_ops(spec, options.precision, device)
    planners = (planner, planner if options.invariant else choose_planner(spec, dtype, device))
    max_rows = buckets_for(options.slots)[-1]

    def make_kernels(sms: int) -> tuple[DecodeKernel, Ops]:
        if options.invariant:
            from counterpoint.device.cuda import batch_invariant

            return batch_invariant.decode_attention, ops
        layer = layer_kernels(spec, dtype, device, sms, chained=True)
        tuner = GemmAutotuner(sms, layer, device, chained=True)
        kernel = choose_decode_kernel(spec, ops, device, sms, max_rows)[1]
        return kernel, make_decode_ops(ops, layer, tuner)

    full = (partitions.full.stream, partitions.full_high_priority.stream)
    units = partitions.total_sms
    made = make_stream_partitions(full, units, partitions, make_kernels, planners)
    return made, ops, units


def in_place_partitions(options: PartsOptions) -> tuple[StreamPartitions, Ops, int]:
    ops = in_place_ops()
    decode, prefill = (
        {
            n: StreamPartition(f"{name} {n}", (name, n), n, reference_decode, TorchPlanner(), ops)
            for n in (2, 4, 8)
        }
        for name in ("decode", "prefill")
    )
    return StreamPartitions(decode, prefill), ops, 8


@dataclasses.dataclass
class StepRig:
    """An executor, and steps as an engine would schedule them."""

    parts: CudaParts
    executor: CudaExecutor
    inbox: WallClockEventQueue
    ids: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))
    finished: dict[int, StepDone] = dataclasses.field(default_factory=dict)

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        sampling: Sampling = GREEDY,
        pages: tuple[int, ...] = (),
    ) -> None:
        self.submit(InitSlot(slot, tuple(tokens), len(tokens), pages, sampling))

    def submit(self, command: Command) -> None:
        self.executor.submit(command)

    def submit_step(
        self,
        segments: list[Segment],
        lane: int = 0,
        units: int | None = None,
        layers: tuple[int, int] | None = None,
        **kind: Any,
    ) -> int:
        """`kind`: `decode` for a step of decodes, `pass_id` of a pass in several steps."""
        step = next(self.ids)
        work = (
            BatchShape(decode_batch=len(segments))
            if kind.get("decode")
            else BatchShape(prefill_tokens=sum(s.tokens for s in segments))
        )
        first, last = layers or (0, self.parts.decoder.spec.layers)
        pass_id, units = kind.get("pass_id", step), units or self.parts.units
        self.submit(Step(step, lane, pass_id, first, last, units, tuple(segments), work))
        return step

    def wait(self, step: int) -> StepDone:
        while step not in self.finished:
            got = self.inbox.get()
            assert got is not None
            for event in got[1]:
                assert isinstance(event, StepDone)
                self.finished[event.step] = event
        return self.finished[step]

    def run(self, segments: list[Segment], **how: Any) -> StepDone:
        done = self.wait(self.submit_step(segments, **how))
        assert not done.error
        return done

    def generate(
        self, slot: int, length: int, count: int, first_page: int = 0, **how: Any
    ) -> list[StepDone]:
        """Prefill a slot of `length` tokens into pages of its own, then decode: `count` tokens."""
        pages = list(range(first_page, first_page + -(-(length + count) // PAGE)))
        held = -(-length // PAGE)
        dones = [self.run([Segment(slot, 0, length, True, tuple(pages[:held]))], lane=1)]
        for at in range(length, length + count - 1):
            more = (pages[at // PAGE],) if at // PAGE >= held else ()
            held += len(more)
            dones.append(self.run([Segment(slot, at, 1, True, more)], decode=True, **how))
        return dones


@contextlib.contextmanager
def rig(**how: Any) -> Iterator[StepRig]:
    parts = make_parts(**how)
    inbox = WallClockEventQueue()
    executor = parts.executor(LANES, inbox)
    try:
        yield StepRig(parts, executor, inbox)
    finally:
        executor.close()
        parts.close()
