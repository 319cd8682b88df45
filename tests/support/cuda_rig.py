"""A CUDA executor for tests, on a GPU or in place: without one, a driver that runs everything at once on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterpoint.core.engine import Engine
from counterpoint.core.limits import EngineLimits
from counterpoint.core.loop import run
from counterpoint.device.contract_checker import ContractChecker
from counterpoint.device.cuda.attention import (
    Attention,
    TorchPlanner,
    best_decode,
    best_planner,
    decode_by_torch,
)
from counterpoint.device.cuda.decode_graphs import DecodeGraphs
from counterpoint.device.cuda.device_tables import DeviceTables, buckets_for
from counterpoint.device.cuda.driver import CudaDriver, Driver
from counterpoint.device.cuda.executor import CudaExecutor
from counterpoint.device.cuda.gemm_autotune import GemmAutotuner
from counterpoint.device.cuda.green_contexts import Partitions
from counterpoint.device.cuda.kernels.floor import FilterFloor
from counterpoint.device.cuda.ops import cuda_ops, decode_ops, layer_kernels
from counterpoint.device.cuda.piecewise_graphs import SIZES, PiecewiseGraphs
from counterpoint.device.cuda.stream_partitions import (
    StreamPartition,
    StreamPartitions,
    make_stream_partitions,
)
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.interfaces import Policy
from counterpoint.model.checkpoint import RandomCheckpoint
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.model.ops import Ops, reference_ops
from counterpoint.model.weights import build_decoder
from counterpoint.spec import ModelSpec
from counterpoint.types import (
    Abort,
    AddRequest,
    BatchShape,
    Command,
    FinishReason,
    InitSlot,
    Lane,
    Output,
    OutputDelta,
    Role,
    Sampling,
    Segment,
    Step,
    StepDone,
    TokenLogprobs,
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
    """Runs what it is given at once; its events are moments of the host's clock, and its graphs call what they recorded."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def use(self, stream: Any) -> None:
        pass

    def mark(self, stream: Any) -> float:
        return time.monotonic()

    def follow(self, stream: Any, event: float) -> None:
        pass

    def wait(self, event: float) -> None:
        pass

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def upload(self, array: np.ndarray, to: Tensor | None = None) -> Tensor:
        source = torch.from_numpy(array.copy())
        return source if to is None else to.copy_(source)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def keep(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, source: Tensor, to: Tensor) -> None:
        to.copy_(source)

    def borrowed(self) -> list[Tensor]:
        return []

    def give_back(self, borrowed: list[Tensor]) -> None:
        pass

    def capture(self, stream: Any, body: Callable[[], None]) -> Callable[[], None]:
        body()
        return body


def in_place_ops() -> Ops:
    def gather(k_pages: Tensor, v_pages: Tensor, rows_L: Tensor) -> tuple[Tensor, Tensor]:
        return k_pages.flatten(0, 1)[rows_L.long()], v_pages.flatten(0, 1)[rows_L.long()]

    return dataclasses.replace(reference_ops(), name="in place", attention=Attention(gather))


@functools.cache
def made_once(levels: tuple[int, ...]) -> Partitions:
    """The same contexts for all tests of a process: what was captured or allocated on their streams may outlive a test."""
    return Partitions(levels)


@dataclasses.dataclass
class Parts:
    """A model on a device, without its executor."""

    decoder: Decoder
    kv: KVPool
    tables: DeviceTables
    graphs: DecodeGraphs
    passes: PiecewiseGraphs
    places: StreamPartitions
    driver: Driver
    units: int
    close: Callable[[], None]

    def executor(self, lanes: Sequence[Lane], inbox: WallClockEventQueue) -> CudaExecutor:
        return CudaExecutor(
            self.decoder,
            self.kv,
            self.tables,
            self.graphs,
            self.passes,
            self.places,
            lanes,
            self.driver,
            inbox,
        )


def make_parts(
    spec: ModelSpec = TINY,
    pages: int = 64,
    slots: int = 8,
    dtype: torch.dtype = torch.float32,
    vocab: int = VOCAB,
    gpu: bool = HAS_GPU,
    deviation: float = 0.15,
    split: bool = True,
    kv_dtype: torch.dtype | None = None,
    quantise: bool = False,
    fixed: bool = False,
    sizes: Sequence[int] = SIZES,
) -> Parts:
    """`kv_dtype`, `quantise` and `fixed` (on a GPU) as `cuda_ops` has them; `sizes`: of the graphs of passes. `split` makes
    partitions; in place, the device has 8 units and splits of 2 and 4."""
    rows = buckets_for(slots)[-1]
    if gpu:
        driver: Driver = CudaDriver()
        partitions = made_once(LEVELS if split else ())
        ops, planner = cuda_ops(spec, dtype, driver.device, kv_dtype, quantise, fixed)
        planners = (planner, planner if fixed else best_planner(spec, dtype, driver.device))
        units = partitions.total_sms
        full = (partitions.full.stream, partitions.full_urgent.stream)

        def kernels(sms: int):
            if fixed:
                from counterpoint.device.cuda import batch_invariant

                return batch_invariant.decode, ops
            layer = layer_kernels(spec, dtype, driver.device, sms, chained=True)
            products = GemmAutotuner(sms, layer, driver.device, chained=True)
            kernel = best_decode(
                spec, dtype, driver.device, sms, rows, chained=True, kv_dtype=kv_dtype
            )[1]
            return kernel, decode_ops(ops, layer, products)

        places = make_stream_partitions(full, units, partitions, kernels, planners)
        close = torch.cuda.synchronize
    else:
        driver, ops, units = InPlaceDriver(), in_place_ops(), 8
        sides = (2, 4, 8) if split else (8,)
        both = [
            {
                n: StreamPartition(
                    f"{name} {n}", (name, n), n, decode_by_torch, TorchPlanner(), ops
                )
                for n in sides
            }
            for name in ("decode", "prefill")
        ]
        places = StreamPartitions(*both)
        close = lambda: None
    decoder = build_decoder(spec, RandomCheckpoint(3, deviation=deviation), ops, driver.device)
    kv = KVPool(spec, pages + 1, PAGE, ops.kv_dtype, driver.device)
    tables = DeviceTables(
        slots,
        spec.max_context_tokens,
        PAGE,
        vocab,
        spec.eos_token_ids,
        pages,
        driver,
        FilterFloor() if gpu else None,
    )
    close()  # what was made on this stream is there for those of the places
    graphs = DecodeGraphs(decoder, kv, tables, driver)
    passes = PiecewiseGraphs(decoder, kv, tables, driver, sizes)
    return Parts(decoder, kv, tables, graphs, passes, places, driver, units, close)


@dataclasses.dataclass
class Rig:
    """An executor, and the steps an engine would make."""

    parts: Parts
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

    def step(
        self,
        segments: list[Segment],
        lane: int = 0,
        units: int | None = None,
        layers: tuple[int, int] | None = None,
        batch: int | None = None,
        decode: bool = False,
    ) -> int:
        step = next(self.ids)
        work = (
            BatchShape(decode_batch=len(segments))
            if decode
            else BatchShape(prefill_tokens=sum(s.tokens for s in segments))
        )
        first, last = layers or (0, self.parts.decoder.spec.layers)
        units = units or self.parts.units
        self.submit(
            Step(
                step,
                lane,
                step if batch is None else batch,
                first,
                last,
                units,
                tuple(segments),
                work,
            )
        )
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
        done = self.wait(self.step(segments, **how))
        assert not done.error
        return done

    def generate(
        self, slot: int, length: int, count: int, first_page: int = 0, **how: Any
    ) -> list[StepDone]:
        """Prefill an opened slot of `length` tokens, then decode: `count` tokens in all. It gets pages of its own."""
        pages = list(range(first_page, first_page + -(-(length + count) // PAGE)))
        held = -(-length // PAGE)
        dones = [self.run([Segment(slot, 0, length, True, tuple(pages[:held]))], lane=1)]
        for at in range(length, length + count - 1):
            more = (pages[at // PAGE],) if at // PAGE >= held else ()
            held += len(more)
            dones.append(self.run([Segment(slot, at, 1, True, more)], decode=True, **how))
        return dones


@contextlib.contextmanager
def rig(**how: Any) -> Iterator[Rig]:
    parts = make_parts(**how)
    inbox = WallClockEventQueue()
    executor = parts.executor(LANES, inbox)
    try:
        yield Rig(parts, executor, inbox)
    finally:
        executor.close()
        parts.close()


def requests(
    count: int = 32, vocab: int = VOCAB, seed: int = 4, longest: int = 60, most_tokens: int = 12
) -> list[AddRequest]:
    """Greedy and seeded requests of 3 tokens and more; half begin alike."""
    chance = random.Random(seed)
    beginning = [chance.randrange(vocab) for _ in range(40)]
    arrivals = []
    for n in range(count):
        prompt = [chance.randrange(vocab) for _ in range(chance.randrange(3, longest))]
        sampling = Sampling(
            max_tokens=most_tokens, temperature=0.8 * (n % 4 == 3), seed=n, ignore_eos=n % 2 == 0
        )
        arrivals.append(
            AddRequest(id=f"r{n}", prompt=tuple(beginning * (n % 2) + prompt), sampling=sampling)
        )
    return arrivals


class Service:
    """An engine's thread with its device, as a server has it."""

    def __init__(
        self,
        parts: Parts,
        policy: Policy,
        slots: int = 8,
        max_pass_tokens: int = 160,
        overlap: bool = False,
    ) -> None:
        spec, pages = parts.decoder.spec, parts.kv.pages - 1
        self.inbox = WallClockEventQueue()
        executor = parts.executor(policy.lanes, self.inbox)
        self.engine = Engine(
            EngineLimits(
                pages=pages,
                page_tokens=PAGE,
                max_running=slots,
                max_context_tokens=spec.max_context_tokens,
                max_pass_tokens=max_pass_tokens,
                eos_token_ids=spec.eos_token_ids,
                units=parts.units,
                layers=spec.layers,
                overlap=overlap,
            ),
            policy,
        )
        limits = self.engine.limits
        self.watch = ContractChecker(executor, self.inbox, limits, policy.lanes)
        self.answers: dict[str, list[int]] = {}
        self.chances: dict[str, list[TokenLogprobs | None]] = {}
        self.finishes: dict[str, FinishReason] = {}
        self.errors: list[str] = []
        self.abort_after: dict[str, int] = {}  # id -> tokens after which it is aborted
        self.expected = 0
        self.all_there = threading.Event()
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        try:
            run(self.engine, self.watch, self.watch, self._deliver)
        except BaseException as error:
            self.errors.append(repr(error))
            self.all_there.set()
            raise

    def _deliver(self, outputs: list[Output], engine: Engine) -> None:
        for output in outputs:
            if isinstance(output, OutputDelta):
                self.answers.setdefault(output.id, []).extend(output.tokens)
                self.chances.setdefault(output.id, []).extend(output.logprobs)
                if (
                    output.id in self.abort_after
                    and len(self.answers[output.id]) >= self.abort_after[output.id]
                ):
                    self.inbox.put(Abort(output.id))
                if output.error:
                    self.errors.append(output.error)
                if output.finish_reason:
                    self.finishes[output.id] = output.finish_reason
        if self.expected and len(self.finishes) == self.expected and engine.idle:
            self.all_there.set()

    def ask(
        self, arrivals: Sequence[Any], expected: int | None = None, timeout_s: float = 120
    ) -> dict[str, list[int]]:
        """Send events, wait until every request has its finish; the answers."""
        self.answers, self.chances, self.finishes = {}, {}, {}
        self.expected = len(arrivals) if expected is None else expected
        for arrive in arrivals:
            self.inbox.put(arrive)
        assert self.all_there.wait(timeout_s), "requests are missing their finish"
        self.all_there.clear()
        assert not self.errors, self.errors
        return self.answers

    def close(self) -> None:
        self.inbox.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.watch.close()
        self.watch.check_idle()
        stats = self.engine.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total, "pages leaked"
