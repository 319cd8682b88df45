"""Steps by hand: what measurements of the CUDA device are made with.

Owns: a device with steps that no engine made, a tap between loop and device, the card's clock and power meanwhile. Promises: random
KV contents; times are the device's own (StepDone).
Must not: be imported by what serves.
"""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from counterpoint.device.cuda.device_setup import CudaDevice
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.model.fp8 import to_fp8
from counterpoint.types import (
    BatchShape,
    Command,
    Event,
    FreeSlot,
    InitSlot,
    Lane,
    Role,
    Sampling,
    Segment,
    Step,
    StepDone,
)

LANES = (Lane(0, Role.DECODE, 2), Lane(1, Role.PREFILL, 2))
GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)
PREFILL_SLOT = 0


@dataclass
class Bench:
    """A device, an executor and steps by hand. Decode rows are slots 1, 2, …, over shuffled pages; slot 0 is for prefills."""

    device: CudaDevice
    inbox: WallClockEventQueue = field(default_factory=WallClockEventQueue)
    serial: int = 0
    context: int = 0

    def __post_init__(self) -> None:
        self.executor = self.device.executor(LANES, self.inbox)
        self.layers = self.device.spec.layers
        self.size = self.device.tables.page_tokens
        torch.manual_seed(0)
        for pool in (*self.device.kv.k, *self.device.kv.v):
            fill(pool)
        torch.cuda.synchronize()
        self.order = torch.randperm(self.device.pages).tolist()

    def use(self, device: CudaDevice) -> None:
        """The same device with other settings: nothing is in flight."""
        self.executor.close()
        self.device, self.executor = device, device.executor(LANES, self.inbox)

    # ---------------------------------------------------------------- setting up

    def open_batch(self, batch: int, context: int, sampling: Sampling = GREEDY) -> None:
        """Slots 1 to `batch` with `context` tokens each, in the cache."""
        per_slot = -(-(context + 1) // self.size)
        for slot in range(1, batch + 1):
            pages = tuple(self.order[-slot * per_slot :][:per_slot])
            tokens = [random.randrange(1000, 30000) for _ in range(context)]
            self.executor.submit(InitSlot(slot, tuple(tokens), context, pages, sampling))
        self.context = context

    def open_prefill(self, tokens: int) -> tuple[int, ...]:
        """Slot 0 with a random prompt; its pages."""
        prompt = tuple(random.randrange(1000, 30000) for _ in range(tokens))
        self.executor.submit(FreeSlot(PREFILL_SLOT))
        self.executor.submit(InitSlot(PREFILL_SLOT, prompt, tokens, (), GREEDY))
        return tuple(self.order[: -(-tokens // self.size)])

    # ---------------------------------------------------------------- steps

    def decode_step(self, batch: int, units: int) -> Step:
        """Always at the same position: the context does not grow while it is measured."""
        segments = tuple(Segment(slot, self.context - 1, 1, True) for slot in range(1, batch + 1))
        work = BatchShape.decode(batch, batch * self.context, self.layers)
        return self.made(0, None, 0, self.layers, units, segments, work)

    def prefill_steps(self, tokens: int, units: int, group: int) -> list[Step]:
        segments = (Segment(PREFILL_SLOT, 0, tokens, True, self.open_prefill(tokens)),)
        work = BatchShape.prefill(tokens, 0, self.layers)
        self.serial += 1
        batch, edges = self.serial, range(0, self.layers, group)
        return [
            self.made(1, batch, a, min(a + group, self.layers), units, segments, work)
            for a in edges
        ]

    def prompts(self, count: int, tokens: int) -> list[Step]:
        """Whole prompts in slots 0, 1, …, each a pass of the full device."""
        work = BatchShape.prefill(tokens, 0, self.layers)
        each, steps = -(-tokens // self.size), []
        for slot in range(count):
            self.executor.submit(FreeSlot(slot))
            prompt = tuple(random.randrange(1000, 30000) for _ in range(tokens))
            self.executor.submit(InitSlot(slot, prompt, tokens, (), GREEDY))
            pages = tuple(self.order[slot * each :][:each])
            segments = (Segment(slot, 0, tokens, True, pages),)
            steps.append(self.made(1, None, 0, self.layers, self.device.units, segments, work))
        return steps

    def made(
        self,
        lane: int,
        batch: int | None,
        first: int,
        last: int,
        units: int,
        segments: Any,
        work: BatchShape,
    ) -> Step:
        self.serial += 1
        return Step(
            self.serial,
            lane,
            self.serial if batch is None else batch,
            first,
            last,
            units,
            segments,
            work,
        )

    def done(self) -> list[StepDone]:
        got = self.inbox.get()
        assert got is not None
        dones = [event for event in got[1] if isinstance(event, StepDone)]
        for done in dones:
            if done.error:
                raise RuntimeError(done.error)
        return dones

    def play(self, steps: Sequence[Step], depth: int = 2) -> list[StepDone]:
        """One lane, `depth` steps in flight."""
        waiting, finished = list(steps), []
        for _ in range(min(depth, len(waiting))):
            self.executor.submit(waiting.pop(0))
        while len(finished) < len(steps):
            for done in self.done():
                finished.append(done)
                if waiting:
                    self.executor.submit(waiting.pop(0))
        return finished

    # ---------------------------------------------------------------- what is measured

    def decode_s(self, batch: int, units: int, steps: int = 16) -> float:
        """A decode step, one always queued ahead: from end to end."""
        dones = self.play([self.decode_step(batch, units) for _ in range(steps)])
        ends = [done.ended_s for done in dones[2:]]
        return statistics.median(b - a for a, b in itertools.pairwise(ends))

    def prefill_flops(self, tokens: int) -> float:
        """Of a pass: matrices, causal attention, and the LM head once."""
        spec = self.device.spec
        return (
            tokens * spec.flops_per_token((tokens + 1) // 2, sampled=False)
            + 2 * spec.vocab * spec.hidden
        )

    def prefill_s(self, tokens: int, units: int, group: int | None = None, times: int = 3) -> float:
        took = []
        for _ in range(times + 1):
            dones = self.play(self.prefill_steps(tokens, units, group or self.layers))
            took.append(dones[-1].ended_s - dones[0].started_s)
        return statistics.median(took[1:])

    def together(
        self, batch: int, level: int, tokens: int, group: int, passes: int = 3
    ) -> dict[str, float]:
        """Prefills one after another on the rest of the device, decode steps all the while on `level` SMs."""
        rest = self.device.units - level
        queue = [step for _ in range(passes) for step in self.prefill_steps(tokens, rest, group)]
        total, prefill_dones, decode_dones = len(queue), [], []
        for _ in range(2):
            self.executor.submit(self.decode_step(batch, level))
            self.executor.submit(queue.pop(0))
        in_flight = 2
        while len(prefill_dones) < total or in_flight:
            for done in self.done():
                if done.lane == 1:
                    prefill_dones.append(done)
                    if queue:
                        self.executor.submit(queue.pop(0))
                    continue
                decode_dones.append(done)
                in_flight -= 1
                if len(prefill_dones) < total:
                    self.executor.submit(self.decode_step(batch, level))
                    in_flight += 1
        began, ended = prefill_dones[0].started_s, prefill_dones[-1].ended_s
        ends = [done.ended_s for done in decode_dones if began <= done.ended_s <= ended]
        period = (ends[-1] - ends[0]) / (len(ends) - 1)
        return {"prefill_s": (ended - began) / passes, "decode_s": period}


def fill(pool: torch.Tensor, pages: int = 4096) -> None:
    """Random numbers, some pages at a time: of what e4m3 has, if it is such a pool."""
    for part in pool.split(pages):
        if part.dtype.itemsize > 1:
            part.normal_()
        else:
            part.copy_(to_fp8(torch.randn(part.shape, device=part.device)))


class Meter:
    """The card's SM clock and power, read every few milliseconds by a thread of its own, as NVML has them."""

    EVERY_S = 0.004

    def __init__(self, device: int = 0) -> None:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._card = pynvml.nvmlDeviceGetHandleByIndex(device)
        self.limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(self._card) / 1e3
        self._over = threading.Event()
        self._read: list[tuple[float, float]] = []  # MHz, W
        self._reasons = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Meter:
        self._read, self._reasons = [], 0
        self._over.clear()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        assert self._thread is not None
        self._thread.join()

    @property
    def seen(self) -> dict[str, float]:
        """Medians, the share of readings at which the power limit held the clock down as NVML says so, since the last entering."""
        if not self._read:
            return {}
        clocks, watts = zip(*self._read, strict=True)
        return {
            "MHz": statistics.median(clocks),
            "W": statistics.median(watts),
            "power-capped %": 100 * self._reasons / len(clocks),
        }

    def _loop(self) -> None:
        nvml, card = self._nvml, self._card
        while not self._over.wait(self.EVERY_S):
            clock = nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)
            self._read.append((clock, nvml.nvmlDeviceGetPowerUsage(card) / 1e3))
            self._reasons += bool(
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)
                & nvml.nvmlClocksThrottleReasonSwPowerCap
            )


class Tap:
    """Stands between loop and device, and keeps what passes."""

    def __init__(self, device: CudaDevice, lanes: Sequence[Lane]) -> None:
        self.inbox = WallClockEventQueue()
        self.executor = device.executor(lanes, self.inbox)
        self.steps: dict[int, Step] = {}
        self.dones: list[StepDone] = []
        self.submit_s: list[float] = []

    def get(self) -> tuple[float, Sequence[Event]] | None:
        got = self.inbox.get()
        self.dones += [event for event in got[1] if isinstance(event, StepDone)] if got else []
        return got

    def submit(self, command: Command) -> None:
        began_s = time.perf_counter()
        self.executor.submit(command)
        if isinstance(command, Step):
            self.steps[command.id] = command
            if not command.work.prefill_tokens:
                self.submit_s.append(time.perf_counter() - began_s)

    def close(self) -> None:
        self.executor.close()


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"\n{title}\n{'':36s}" + "".join(f"{name.rstrip('.'):>18s}" for name in columns))
    for label, row in rows.items():
        print(
            f"{label:36s}"
            + "".join(f"{row[name]:18.3f}" if name in row else " " * 18 for name in columns),
            flush=True,
        )
