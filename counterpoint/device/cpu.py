"""CpuExecutor: lanes as threads on cores.

Owns: the lanes' threads, the token and block tables, the hidden states of unfinished passes. Promises: the steps of a lane run in
order, also when their units differ; steps of two lanes run at the same time, over one KV pool and one copy of the weights (torch
lets go of the interpreter lock in its operations); two steps that would share a core are never run together: the later one fails.
What goes wrong in a step is its StepDone.error, and the executor lives on.
Must not: decide anything, free pages, keep a request's text.

One thread per lane and number of units, made when it is first needed and pinned for its life, together with the OpenMP threads that
torch starts in it: changing the split costs a hand-over between threads, and no thread is ever moved.
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
    """A step on its way through a worker. `after` is set when the lane's previous step has been reported. `refused` says why
    the step must not run; `running` ends before the step is reported, `reported` is set after."""

    step: Step
    cores: frozenset[int]
    after: threading.Event | None
    refused: str = ""
    running: bool = True
    reported: threading.Event = dataclasses.field(default_factory=threading.Event)


@dataclasses.dataclass(frozen=True, slots=True)
class CpuPass:
    rows: PassRows
    batch: PassTensors
    x_TD: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has to say: the fields of StepDone."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredCores:
    """Where the steps of a lane with so many units really run; `cores` is None where threads cannot be bound."""

    lane: int
    units: int
    cores: tuple[int, ...] | None


class CpuExecutor:
    """`submit` from one thread. Completions go to `inbox`, on whose clock the steps are timed."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        tables: SlotTables,
        lanes: Sequence[Lane],
        cores: Sequence[int],
        inbox: WallClockEventQueue,
    ) -> None:
        """`cores`: of the device, in the order in which lanes count them (`cores.usable_cores`)."""
        self.decoder = decoder
        self.kv = kv
        self.tables = tables
        self.lanes = {lane.id: lane for lane in lanes}
        self.cores = tuple(cores)
        self.inbox = inbox
        self._workers: dict[tuple[int, int], LaneThread] = {}
        self._in_flight: dict[int, list[CpuStep]] = {lane.id: [] for lane in lanes}
        self._passes: dict[int, CpuPass] = {}

    def submit(self, command: Command) -> None:
        """Raises KeyError, ValueError or IndexError if a command names a lane, slot or page there is not."""
        match command:
            case InitSlot():
                self.tables.init_slot(command)
            case Step():
                self._enqueue(command)
            case DiscardPass():
                self._passes.pop(command.pass_id, None)
            case FreeSlot():
                self.tables.free_slot(command.slot)

    def realised(self) -> list[MeasuredCores]:
        """The cores of every (lane, units) that has run."""
        for worker in self._workers.values():
            worker.ready.wait()
        return [worker.realised for worker in self._workers.values()]

    def close(self) -> None:
        """Ends the threads and gives the pool's memory back, also if someone still holds this object."""
        for worker in self._workers.values():
            worker.jobs.put(None)
        for worker in self._workers.values():
            worker.thread.join()
        self._workers.clear()
        self._passes.clear()
        self.kv.release()

    # ------------------------------------------------------------ the submitting thread

    def _enqueue(self, step: Step) -> None:
        lane = self.lanes[step.lane]
        if step.first_layer == 0:
            self.tables.append_pages(step.segments)
        units = min(max(step.units, 1), len(self.cores))
        cores = frozenset(lane_cores(lane.role, units, self.cores))
        refused = self._refusal(step, cores)
        before = self._in_flight[lane.id]
        job = CpuStep(step, cores, before[-1].reported if before else None, refused)
        self._in_flight[lane.id] = [other for other in before if not other.reported.is_set()] + [
            job
        ]
        worker = self._workers.get((lane.id, units))
        if worker is None:
            worker = self._workers[lane.id, units] = LaneThread(self, lane, units)
        worker.jobs.put(job)

    def _refusal(self, step: Step, cores: frozenset[int]) -> str:
        if not 0 < step.units <= len(self.cores):
            return f"step {step.id} asks for {step.units} units of {len(self.cores)}"
        for lane, jobs in self._in_flight.items():
            for job in jobs:
                if lane != step.lane and job.running and not job.refused and job.cores & cores:
                    shared = sorted(job.cores & cores)
                    return f"step {step.id} of lane {step.lane} would share cores {shared} with step {job.step.id} of lane {lane}"
        return ""

    # ------------------------------------------------------------ a worker's thread

    def run(self, job: CpuStep) -> None:
        """Run one step when its turn has come, and report it. Called by the workers."""
        step = job.step
        if job.after is not None:
            job.after.wait()
        started_s = self.inbox.clock()
        try:
            if job.refused:
                raise RuntimeError(job.refused)
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
        job.running = False  # before the report: what follows from it may take these cores
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
        return self._finish(rows, batch, x_TD)

    def _finish(self, rows: PassRows, batch: PassTensors, x_TD: Tensor) -> StepResult:
        """Sample behind the last layer."""
        settings = self.tables.sampling
        about_prompts = prompt_logprobs(self.decoder, self.tables, rows, batch, x_TD)
        if not len(rows.slot_B):
            return StepResult(prompt_logprobs=about_prompts)
        logits_BV = self.decoder.logits(x_TD, batch)
        ids_B = sample(logits_BV, self.tables.sampler_inputs(rows), settings.vocab)
        self.tables.put_sampled(rows, ids_B)
        ids = ids_B.tolist()
        settings.grammars.accept_tokens(rows.slot_B.tolist(), ids)
        return StepResult(
            tuple(ids), chosen_logprobs(settings, rows.slot_B, logits_BV, ids_B), about_prompts
        )


class LaneThread:
    """One thread on the cores of a lane with a number of units."""

    def __init__(self, executor: CpuExecutor, lane: Lane, units: int) -> None:
        self.executor = executor
        self.lane = lane
        self.units = units
        self.jobs: queue.SimpleQueue[CpuStep | None] = queue.SimpleQueue()
        self.realised = MeasuredCores(lane.id, units, None)
        self.ready = threading.Event()
        self.thread = threading.Thread(
            target=self._live, name=f"lane{lane.id}-units{units}", daemon=True
        )
        self.thread.start()

    def _live(self) -> None:
        cores = lane_cores(self.lane.role, self.units, self.executor.cores)
        try:
            self.realised = MeasuredCores(self.lane.id, self.units, pin(cores))
        except OSError as error:
            log.warning("lane %d: cannot bind a thread to cores %s: %s", self.lane.id, cores, error)
        # The first look at a thread's count overwrites it with the process's; only a count set after that is the thread's own.
        torch.get_num_threads()
        torch.set_num_threads(self.units)
        self.ready.set()
        log.info(
            "lane %d (%s), %d units: cores %s",
            self.lane.id,
            self.lane.role,
            self.units,
            self.realised.cores or "not bound",
        )
        with torch.inference_mode():
            while (job := self.jobs.get()) is not None:
                self.executor.run(job)
