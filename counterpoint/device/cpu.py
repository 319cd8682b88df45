"""CpuExecutor: lanes as threads on cores.

Owns: the lanes' threads, the slot tables, the hidden states of unfinished passes.
Promises: the steps of a lane run in order, also when their units differ. Steps of two lanes run at
the same time, over one KV pool and one copy of the weights (torch releases the GIL in its
operations). Two steps that would share a core never run together: the later one fails. An error in
a step is its StepDone.error, and the executor goes on.
Must not: free pages, or keep a request's text.

There is one thread for each lane and number of units. It is made when first needed and pinned for
its life, with the OpenMP threads that torch starts in it. So another split costs a hand-over
between threads, and no thread is ever moved.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoint.device.cores import lane_cores, pin
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.logprobs import chosen_logprobs, prompt_logprobs
from counterpoint.device.slot_tables import PassRows, SlotTables, make_pass_rows
from counterpoint.model.batch import PassTensors
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.model.sample import sample
from counterpoint.types import (
    Command,
    DiscardPass,
    FreeSlot,
    InitSlot,
    Lane,
    Step,
    StepDone,
    TokenLogprobs,
)

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class CpuStep:
    """A step in a lane's thread. `previous_reported` is set when the lane's previous step has been
    reported. `rejection`: why the step must not run. `running` ends before the step is reported,
    `reported` is set after."""

    step: Step
    cores: frozenset[int]
    previous_reported: threading.Event | None
    rejection: str = ""
    running: bool = True
    reported: threading.Event = dataclasses.field(default_factory=threading.Event)


@dataclasses.dataclass(frozen=True, slots=True)
class CpuPass:
    """An unfinished pass: `x_TD` are its hidden states."""

    rows: PassRows
    batch: PassTensors
    x_TD: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Fields of StepDone."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredCores:
    """Where the steps of a lane with so many units really run. `cores`: None where threads can't be
    bound."""

    lane: int
    units: int
    cores: tuple[int, ...] | None


@dataclasses.dataclass(eq=False)
class CpuExecutor:
    """`submit` from one thread. Completions go to `inbox`, on whose clock the steps are timed.
    `cores`: of the device, in the order in which lanes count them (`cores.usable_cores`)."""

    decoder: Decoder
    kv: KVPool
    tables: SlotTables
    lanes: Sequence[Lane]
    cores: Sequence[int]
    inbox: WallClockEventQueue

    def __post_init__(self) -> None:
        self._lanes = {lane.id: lane for lane in self.lanes}
        self._threads: dict[tuple[int, int], LaneThread] = {}  # by lane and units
        self._in_flight: dict[int, list[CpuStep]] = {lane.id: [] for lane in self.lanes}
        self._passes: dict[int, CpuPass] = {}

    def submit(self, command: Command) -> None:
        """Raises KeyError, ValueError or IndexError if a command names a lane, slot or page that
        does not exist."""
        match command:
            case InitSlot():
                self.tables.init_slot(command)
            case Step():
                self._enqueue(command)
            case DiscardPass():
                self._passes.pop(command.pass_id, None)
            case FreeSlot():
                self.tables.free_slot(command.slot)

    def measured_cores(self) -> list[MeasuredCores]:
        """The cores of every (lane, units) that has run."""
        for thread in self._threads.values():
            thread.ready.wait()
        return [thread.measured for thread in self._threads.values()]

    def close(self) -> None:
        """End the threads and free the pool's memory, even if this object is still referenced."""
        for thread in self._threads.values():
            thread.jobs.put(None)
        for thread in self._threads.values():
            thread.thread.join()
        self._threads.clear()
        self._passes.clear()
        self.kv.release()

    # ------------------------------------------------------------ the submitting thread

    def _enqueue(self, step: Step) -> None:
        lane = self._lanes[step.lane]
        if step.first_layer == 0:
            self.tables.append_pages(step.segments)
        units = min(max(step.units, 1), len(self.cores))
        cores = frozenset(lane_cores(lane.role, units, self.cores))
        rejection = self._rejection(step, cores)
        before = self._in_flight[lane.id]
        job = CpuStep(step, cores, before[-1].reported if before else None, rejection)
        unreported = [other for other in before if not other.reported.is_set()]
        self._in_flight[lane.id] = [*unreported, job]
        thread = self._threads.get((lane.id, units))
        if thread is None:
            thread = self._threads[lane.id, units] = LaneThread(self, lane, units)
        thread.jobs.put(job)

    def _rejection(self, step: Step, cores: frozenset[int]) -> str:
        if not 0 < step.units <= len(self.cores):
            return f"step {step.id} asks for {step.units} units of {len(self.cores)}"
        for lane, jobs in self._in_flight.items():
            for job in jobs:
                shared = sorted(job.cores & cores)
                if lane != step.lane and job.running and not job.rejection and shared:
                    return (
                        f"step {step.id} of lane {step.lane} would share cores {shared} "
                        f"with step {job.step.id} of lane {lane}"
                    )
        return ""

    # ------------------------------------------------------------ a lane's thread

    def run(self, job: CpuStep) -> None:
        """Run one step after the lane's previous one, and report it. Called by LaneThread."""
        step = job.step
        if job.previous_reported is not None:
            job.previous_reported.wait()
        started_s = self.inbox.clock()
        try:
            if job.rejection:
                raise RuntimeError(job.rejection)
            result = self._compute(step)
        except Exception as error:
            log.exception("step %d of lane %d failed", step.id, step.lane)
            self._passes.pop(step.pass_id, None)
            result = StepResult(error=f"{type(error).__name__}: {error}")
        done = StepDone(
            step.id,
            step.lane,
            tokens=result.tokens,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
            started_s=started_s,
            ended_s=self.inbox.clock(),
            units=step.units,
            error=result.error,
        )
        job.running = False  # before the report: a step that follows from it may take these cores
        self.inbox.put(done)
        job.reported.set()

    def _compute(self, step: Step) -> StepResult:
        decoder = self.decoder
        if step.first_layer == 0:
            rows = make_pass_rows(step.segments)
            batch = self.tables.pass_tensors(rows, decoder.ops)
            x_TD = decoder.embed(batch)
        else:
            held = self._passes.pop(step.pass_id, None)
            if held is None:
                raise RuntimeError(
                    f"pass {step.pass_id} has no hidden states before layer {step.first_layer}"
                )
            rows, batch, x_TD = held.rows, held.batch, held.x_TD
        x_TD = decoder.run_layers(x_TD, batch, self.kv, step.first_layer, step.last_layer)
        if step.last_layer < decoder.spec.layers:
            self._passes[step.pass_id] = CpuPass(rows, batch, x_TD)
            return StepResult()
        return self._sample(rows, batch, x_TD)

    def _sample(self, rows: PassRows, batch: PassTensors, x_TD: Tensor) -> StepResult:
        """After the last layer."""
        sampling = self.tables.sampling
        of_prompts = prompt_logprobs(self.decoder, self.tables, rows, batch, x_TD)
        if not len(rows.slot_B):
            return StepResult(prompt_logprobs=of_prompts)
        logits_BV = self.decoder.logits(x_TD, batch)
        ids_B = sample(logits_BV, self.tables.sampler_inputs(rows), sampling.vocab)
        self.tables.put_sampled(rows, ids_B)
        ids = ids_B.tolist()
        sampling.grammars.accept_tokens(rows.slot_B.tolist(), ids)
        of_chosen = chosen_logprobs(sampling, rows.slot_B, logits_BV, ids_B)
        return StepResult(tuple(ids), of_chosen, of_prompts)


class LaneThread:
    """The thread of one lane and number of units."""

    def __init__(self, executor: CpuExecutor, lane: Lane, units: int) -> None:
        self.executor = executor
        self.lane = lane
        self.units = units
        self.jobs: queue.SimpleQueue[CpuStep | None] = queue.SimpleQueue()
        self.measured = MeasuredCores(lane.id, units, None)
        self.ready = threading.Event()
        name = f"lane{lane.id}-units{units}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        lane, cores = self.lane, lane_cores(self.lane.role, self.units, self.executor.cores)
        try:
            self.measured = MeasuredCores(lane.id, self.units, pin(cores))
        except OSError as error:
            log.warning("lane %d: cannot bind a thread to cores %s: %s", lane.id, cores, error)
        # The first read of a thread's count overwrites it with the process's. Only a count set
        # after that is the thread's own.
        torch.get_num_threads()
        torch.set_num_threads(self.units)
        self.ready.set()
        bound = self.measured.cores or "not bound"
        log.info("lane %d (%s), %d units: cores %s", lane.id, lane.role, self.units, bound)
        with torch.inference_mode():
            while (job := self.jobs.get()) is not None:
                self.executor.run(job)
