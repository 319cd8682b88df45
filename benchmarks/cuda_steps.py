"""Steps on a CUDA device without an engine, as the CUDA benchmarks need them.

Owns: a device with an executor, made-up steps, and a recorder between engine and executor.
Promises: random KV contents; times are device times (StepDone).
Must not: be imported by code that serves.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

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
class StepBench:
    """An executor and its steps. Decode rows use slots 1, 2, … with shuffled pages; slot 0 is for
    prefills."""

    device: CudaDevice
    inbox: WallClockEventQueue = field(default_factory=WallClockEventQueue)
    last_id: int = 0
    context: int = 0

    def __post_init__(self) -> None:
        self.executor = self.device.executor(LANES, self.inbox)
        self.layers = self.device.spec.layers
        self.page_tokens = self.device.tables.page_tokens
        torch.manual_seed(0)
        for pool in (*self.device.kv.k, *self.device.kv.v):
            fill_random(pool)
        torch.cuda.synchronize()
        self.page_order = torch.randperm(self.device.pages).tolist()

    def use_device(self, device: CudaDevice) -> None:
        """The same device with other settings, while nothing is in flight."""
        self.executor.close()
        self.device, self.executor = device, device.executor(LANES, self.inbox)

    # ---------------------------------------------------------------- setting up

    def open_decode_batch(self, batch: int, context: int, sampling: Sampling = GREEDY) -> None:
        """Initialise slots 1 to `batch`, with `context` cached tokens each."""
        per_slot = -(-(context + 1) // self.page_tokens)
        for slot in range(1, batch + 1):
            pages = tuple(self.page_order[-slot * per_slot :][:per_slot])
            tokens = [random.randrange(1000, 30000) for _ in range(context)]
            self.executor.submit(InitSlot(slot, tuple(tokens), context, pages, sampling))
        self.context = context

    def open_prefill(self, tokens: int) -> tuple[int, ...]:
        """Initialise slot 0 with a random prompt. Returns its pages."""
        prompt = tuple(random.randrange(1000, 30000) for _ in range(tokens))
        self.executor.submit(FreeSlot(PREFILL_SLOT))
        self.executor.submit(InitSlot(PREFILL_SLOT, prompt, tokens, (), GREEDY))
        return tuple(self.page_order[: -(-tokens // self.page_tokens)])

    # ---------------------------------------------------------------- steps

    def decode_step(self, batch: int, units: int) -> Step:
        """Always at the same position: the context does not grow while measuring."""
        segments = tuple(Segment(slot, self.context - 1, 1, True) for slot in range(1, batch + 1))
        work = BatchShape.decode(batch, batch * self.context, self.layers)
        return self.make_step(segments, work, units, lane=0)

    def prefill_steps(self, tokens: int, units: int, group: int) -> list[Step]:
        segments = (Segment(PREFILL_SLOT, 0, tokens, True, self.open_prefill(tokens)),)
        work = BatchShape.prefill(tokens, 0, self.layers)
        self.last_id += 1
        pass_id, ends = self.last_id, [*range(group, self.layers, group), self.layers]
        return [
            self.make_step(
                segments, work, units, lane=1, pass_id=pass_id, first_layer=first, last_layer=last
            )
            for first, last in zip([0, *ends], ends, strict=False)
        ]

    def prompt_steps(self, count: int, tokens: int) -> list[Step]:
        """Whole prompts in slots 0, 1, …, each one pass on the full device."""
        work = BatchShape.prefill(tokens, 0, self.layers)
        each, steps = -(-tokens // self.page_tokens), []
        for slot in range(count):
            self.executor.submit(FreeSlot(slot))
            prompt = tuple(random.randrange(1000, 30000) for _ in range(tokens))
            self.executor.submit(InitSlot(slot, prompt, tokens, (), GREEDY))
            pages = tuple(self.page_order[slot * each :][:each])
            segments = (Segment(slot, 0, tokens, True, pages),)
            steps.append(self.make_step(segments, work, self.device.units, lane=1))
        return steps

    def make_step(
        self, segments: Sequence[Segment], work: BatchShape, units: int, lane: int, **fields: int
    ) -> Step:
        """A step of all layers and a pass of its own, unless `fields` of Step say otherwise."""
        self.last_id += 1
        defaults = {"pass_id": self.last_id, "first_layer": 0, "last_layer": self.layers}
        return Step(
            id=self.last_id,
            lane=lane,
            units=units,
            segments=tuple(segments),
            work=work,
            **(defaults | fields),
        )

    def wait_done(self) -> list[StepDone]:
        got = self.inbox.get()
        assert got is not None
        dones = [event for event in got[1] if isinstance(event, StepDone)]
        for done in dones:
            if done.error:
                raise RuntimeError(done.error)
        return dones

    def run_steps(self, steps: Sequence[Step], depth: int = 2) -> list[StepDone]:
        """Run steps on one lane, `depth` of them in flight."""
        waiting, finished = list(steps), []
        for _ in range(min(depth, len(waiting))):
            self.executor.submit(waiting.pop(0))
        while len(finished) < len(steps):
            for done in self.wait_done():
                finished.append(done)
                if waiting:
                    self.executor.submit(waiting.pop(0))
        return finished

    # ---------------------------------------------------------------- what is measured

    def measure_decode_s(self, batch: int, units: int, steps: int = 16) -> float:
        """Period of decode steps, with one always queued ahead."""
        dones = self.run_steps([self.decode_step(batch, units) for _ in range(steps)])
        ends = [done.ended_s for done in dones[2:]]
        return statistics.median(b - a for a, b in itertools.pairwise(ends))

    def prefill_flops(self, tokens: int) -> float:
        """FLOPs of a pass: matrices, causal attention, and the LM head once."""
        spec = self.device.spec
        return (
            tokens * spec.flops_per_token((tokens + 1) // 2, sampled=False)
            + 2 * spec.vocab * spec.hidden
        )

    def measure_prefill_s(
        self, tokens: int, units: int, group: int | None = None, times: int = 3
    ) -> float:
        took = []
        for _ in range(times + 1):
            dones = self.run_steps(self.prefill_steps(tokens, units, group or self.layers))
            took.append(dones[-1].ended_s - dones[0].started_s)
        return statistics.median(took[1:])

    def measure_overlap(
        self, batch: int, level: int, tokens: int, group: int, passes: int = 3
    ) -> dict[str, float]:
        """Back-to-back prefills on the rest of the device, with decode steps on `level` SMs
        throughout."""
        rest = self.device.units - level
        queue = [step for _ in range(passes) for step in self.prefill_steps(tokens, rest, group)]
        total, prefill_dones, decode_dones = len(queue), [], []
        for _ in range(2):
            self.executor.submit(self.decode_step(batch, level))
            self.executor.submit(queue.pop(0))
        in_flight = 2
        while len(prefill_dones) < total or in_flight:
            for done in self.wait_done():
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


def fill_random(pool: torch.Tensor, pages: int = 4096) -> None:
    """Fill a pool with random values, in blocks of pages to bound memory."""
    for part in pool.split(pages):
        if part.dtype.itemsize > 1:
            part.normal_()
        else:
            part.copy_(to_fp8(torch.randn(part.shape, device=part.device)))


class StepRecorder:
    """Records the steps and completions that pass between engine loop and executor."""

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
