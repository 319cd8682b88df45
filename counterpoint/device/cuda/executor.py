"""CudaExecutor: lanes as streams on SM partitions of one GPU.

Owns: the order of a lane's steps, the hidden states of unfinished passes, and one waiting thread
per lane.
Promises: `submit` launches and returns without waiting for the device. A lane's steps run in order,
also across streams. No lane waits for another. A step that fails to launch reports StepDone.error,
and the executor continues. One copy of the weights, one KV pool.
Must not: make scheduling decisions, free pages, or keep a request's text.

The caller of `submit` launches everything; each lane's thread waits for its events and reports.
Only two orders hold across streams:
    a lane's step runs after the lane's previous step, where their streams differ;
    a request's decode runs after its prefill, as the engine schedules it when that is reported.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from counterpoint.device.cuda.decode_graphs import DecodeGraphs
from counterpoint.device.cuda.device_tables import DeviceTables, SampledRows
from counterpoint.device.cuda.driver import Driver
from counterpoint.device.cuda.piecewise_graphs import PiecewiseGraphs, PrefillPass
from counterpoint.device.cuda.sampling import (
    LogprobsDownload,
    download_logprobs,
    download_prompt_logprobs,
    read_chosen,
    read_prompts,
    sample_eagerly,
    select_logprobs,
    wants_prompt_logprobs,
)
from counterpoint.device.cuda.stream_partitions import StreamPartition, StreamPartitions
from counterpoint.device.grammar import Grammars
from counterpoint.device.slot_tables import PassRows, make_pass_rows
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.types import Command, DiscardPass, Event, FreeSlot, InitSlot, Lane, Step, StepDone

log = logging.getLogger(__name__)


class CompletionQueue(Protocol):
    """The part of device/event_queue.py that the executor uses."""

    def put(self, event: Event) -> None: ...

    def clock(self) -> float: ...


@dataclass(frozen=True, slots=True, eq=False)
class CudaRuntime:
    """A model on a device: what an executor runs steps with."""

    decoder: Decoder
    kv: KVPool
    tables: DeviceTables
    decode_graphs: DecodeGraphs
    piecewise_graphs: PiecewiseGraphs
    stream_partitions: StreamPartitions
    driver: Driver

    def executor(self, lanes: Sequence[Lane], inbox: CompletionQueue) -> CudaExecutor:
        return CudaExecutor(self, lanes, inbox)


@dataclass(frozen=True, slots=True, eq=False)
class CudaPass:
    rows: PassRows
    prefill: PrefillPass


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step on the device. `sampled_ids` are being downloaded. `keep_alive` holds tensors that the
    kernels still read. `on_done` runs once the step is over."""

    step: Step
    units: int
    start_event: Any = None
    end_event: Any = None
    sampled_ids: Tensor | None = None
    num_rows: int = 0
    logprobs: LogprobsDownload | None = None
    prompt_logprobs: list[LogprobsDownload] = field(default_factory=list)
    keep_alive: Any = None
    staging: list[Tensor] = field(default_factory=list)
    on_done: Callable[[], None] | None = None
    error: str = ""


class CudaExecutor:
    """Call `submit` from one thread. Completions go to `inbox`, whose clock times the steps."""

    def __init__(self, runtime: CudaRuntime, lanes: Sequence[Lane], inbox: CompletionQueue) -> None:
        self.decoder = runtime.decoder
        self.tables = runtime.tables
        self.decode_graphs = runtime.decode_graphs
        self.piecewise_graphs = runtime.piecewise_graphs
        self.stream_partitions = runtime.stream_partitions
        self.driver = driver = runtime.driver
        self._passes: dict[int, CudaPass] = {}
        clock = DeviceClock(driver, inbox.clock)
        grammars = self.tables.sampling.grammars
        self._lanes = {
            lane.id: LaneInFlight(lane, driver, clock, inbox, grammars) for lane in lanes
        }

    def submit(self, command: Command) -> None:
        """Raises KeyError for an unknown lane, ValueError if a command does not fit the tables."""
        match command:
            case Step():
                self._launch(command)
            case InitSlot():
                self.tables.init_slot(command)
            case FreeSlot():
                self.tables.free_slot(command.slot)
            case DiscardPass():
                dropped = self._passes.pop(command.pass_id, None)
                if dropped is not None:
                    dropped.prefill.inputs.plan.close()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._passes.clear()

    # ------------------------------------------------------------ launching

    def _launch(self, step: Step) -> None:
        lane = self._lanes[step.lane]
        partition = self.stream_partitions.choose(lane.role, step.units)
        flight = InFlightStep(step, partition.units)
        self.driver.set_stream(partition.stream)
        lane.wait_for_previous(partition)
        flight.start_event = self.driver.record_event(partition.stream)
        try:
            self._launch_kernels(flight, partition)
        except Exception as error:
            log.exception("step %d of lane %d failed", step.id, step.lane)
            self._passes.pop(step.pass_id, None)
            flight.error = f"{type(error).__name__}: {error}"
        flight.staging = self.driver.take_staging()
        flight.end_event = self.driver.record_event(partition.stream)
        lane.add(flight, partition)

    def _launch_kernels(self, flight: InFlightStep, partition: StreamPartition) -> None:
        step = flight.step
        whole = step.first_layer == 0 and step.last_layer == self.decoder.spec.layers
        if whole and step.work.decode_batch == len(step.segments):
            self._launch_decode(flight, partition)
        else:
            self._launch_layers(flight, partition)

    def _launch_decode(self, flight: InFlightStep, partition: StreamPartition) -> None:
        """A pass of decodes only: one CUDA graph."""
        segments = flight.step.segments
        graph, buffers = self.decode_graphs.launch(partition, segments)
        flight.on_done = functools.partial(graph.idle_buffers.append, buffers)
        if graph.logits_BV is None:
            flight.sampled_ids, flight.num_rows = buffers.ids_B, len(segments)
            if buffers.logprobs is not None:
                flight.logprobs = select_logprobs(
                    buffers.logprobs,
                    buffers.inputs_numpy_3B[0, : len(segments)],
                    self.tables.sampling,
                )
            return
        rows = make_pass_rows(segments)
        sampled = SampledRows(*self.driver.upload(torch.stack([rows.slot_B, rows.end_B]).numpy()))
        self._sample(flight, graph.logits_BV[: len(segments)], rows, sampled)

    @torch.inference_mode()
    def _launch_layers(self, flight: InFlightStep, partition: StreamPartition) -> None:
        """Some layers of a pass that has prompt tokens."""
        step, decoder = flight.step, self.decoder
        if step.first_layer == 0:
            rows = make_pass_rows(step.segments)
            self.tables.upload_pending(step.segments)
            prefill = self.piecewise_graphs.start_pass(
                self.tables.make_inputs(
                    rows,
                    partition.prefill_planner,
                    partition.decode_kernel,
                    self.piecewise_graphs.pad_rows,
                )
            )
        else:
            held = self._passes.pop(step.pass_id, None)
            if held is None:
                raise RuntimeError(
                    f"pass {step.pass_id} has no hidden states before layer {step.first_layer}"
                )
            rows, prefill = held.rows, held.prefill
        inputs, every = prefill.inputs, wants_prompt_logprobs(self.tables, rows)
        flight.keep_alive, flight.on_done = inputs, inputs.plan.close
        x_TD = prefill.run(
            partition, step.first_layer, step.last_layer, None if every else inputs.last_rows_N
        )
        if x_TD is None:
            self._passes[step.pass_id] = CudaPass(rows, prefill)
            flight.on_done = None  # the pass continues
            return
        if every:
            flight.prompt_logprobs = download_prompt_logprobs(decoder, self.tables, rows, x_TD)
            x_TD = x_TD[inputs.last_rows_N]
        if len(rows.slot_B):
            self._sample(flight, decoder.head(x_TD)[: len(rows.slot_B)], rows, inputs.sampled)

    @torch.inference_mode()
    def _sample(
        self, flight: InFlightStep, logits_BV: Tensor, rows: PassRows, sampled: SampledRows
    ) -> None:
        ids_B = sample_eagerly(logits_BV, rows, self.tables)
        self.tables.write_sampled(sampled, ids_B)
        flight.sampled_ids, flight.num_rows = self.driver.download(ids_B), len(rows.slot_B)
        flight.logprobs = download_logprobs(
            logits_BV, ids_B, rows, self.tables.sampling, self.driver
        )


class LaneInFlight:
    """A lane's steps on the device, and the thread that waits for them."""

    def __init__(
        self,
        lane: Lane,
        driver: Driver,
        clock: DeviceClock,
        inbox: CompletionQueue,
        grammars: Grammars,
    ) -> None:
        self.role = lane.role
        self._driver = driver
        self._clock = clock
        self._inbox = inbox
        self._grammars = grammars
        # Where the previous step runs, and its end event.
        self._previous: tuple[StreamPartition, Any] | None = None
        self._steps: queue.SimpleQueue[InFlightStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._wait_for_steps, name=f"lane{lane.id}", daemon=True
        )
        self._thread.start()

    def wait_for_previous(self, partition: StreamPartition) -> None:
        """Let the partition's stream wait for the lane's previous step, if that ran on another
        stream."""
        if self._previous is not None and self._previous[0] is not partition:
            self._driver.wait_event(partition.stream, self._previous[1])

    def add(self, flight: InFlightStep, partition: StreamPartition) -> None:
        self._previous = (partition, flight.end_event)
        self._steps.put(flight)

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join()

    def _wait_for_steps(self) -> None:
        while (flight := self._steps.get()) is not None:
            self._inbox.put(self._report(flight))

    def _report(self, flight: InFlightStep) -> StepDone:
        step = flight.step
        started_s = ended_s = self._clock.now()
        tokens, chosen, prompts = (), (), ()
        try:
            self._driver.synchronize(flight.end_event)
            started_s, ended_s = self._clock.event_times_s(flight.start_event, flight.end_event)
            if flight.sampled_ids is not None and not flight.error:
                ids_B = flight.sampled_ids[: flight.num_rows].numpy()
                tokens = tuple(ids_B.tolist())
                chosen = read_chosen(flight.logprobs, ids_B)
                self._grammars.accept_tokens(
                    [segment.slot for segment in step.segments if segment.sample], tokens
                )
            if not flight.error:
                prompts = read_prompts(flight.prompt_logprobs, len(step.segments))
        except Exception as error:  # the device reports its errors here
            log.exception("step %d of lane %d failed on the device", step.id, step.lane)
            flight.error = flight.error or f"{type(error).__name__}: {error}"
            tokens, chosen, prompts = (), (), ()
        if flight.on_done is not None:
            flight.on_done()
        self._driver.free_staging(flight.staging)
        return StepDone(
            step.id,
            step.lane,
            tokens=tokens,
            logprobs=chosen,
            prompt_logprobs=prompts,
            started_s=started_s,
            ended_s=ended_s,
            units=flight.units,
            error=flight.error,
        )


class DeviceClock:
    """Converts the device's events to the host's clock.

    Each time is counted from the latest known event and then clamped to [now - SLACK_S, now]. So
    times keep the device's precision from event to event and do not drift.
    """

    SLACK_S = 1e-3

    def __init__(self, driver: Driver, host_s: Callable[[], float]) -> None:
        self._driver = driver
        self._host_s = host_s
        self._lock = threading.Lock()
        self._reference: tuple[Any, float] | None = None

    def now(self) -> float:
        return self._host_s()

    def event_times_s(self, started: Any, ended: Any) -> tuple[float, float]:
        """Times of two events that have just completed, in seconds."""
        now_s, took_s = self._host_s(), self._driver.elapsed_s(started, ended)
        with self._lock:
            ended_s = now_s
            if self._reference is not None:
                event, at_s = self._reference
                ended_s = min(
                    now_s, max(now_s - self.SLACK_S, at_s + self._driver.elapsed_s(event, ended))
                )
            self._reference = (ended, ended_s)
        return ended_s - took_s, ended_s
