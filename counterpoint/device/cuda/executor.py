"""CudaExecutor: lanes as streams on SM partitions of one GPU.

Owns: the order of a lane's steps, the hidden states of unfinished passes, the threads that wait for the device. Promises: `submit`
launches and returns, it never waits for the device; the steps of a lane run in order, also when their streams differ; no lane waits
for another; what goes wrong in launching a step is its StepDone.error, and the executor lives on. One weight copy, one KV pool.
Must not: decide anything, free pages, keep a request's text.

One thread launches everything (the caller of `submit`); one thread per lane waits for its events and reports. Orders across streams
are these and no others:
    a lane's step after the lane's previous one, where their streams differ;
    a request's decode after its prefill, because the engine makes it only when the prefill was reported.
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
    wants_prompt_logprobs,
    download_logprobs,
    download_prompt_logprobs,
    read_chosen,
    read_prompts,
    sample_eagerly,
    select_logprobs,
)
from counterpoint.device.cuda.stream_partitions import StreamPartition, StreamPartitions
from counterpoint.device.grammar import Grammars
from counterpoint.device.slot_tables import PassRows, make_pass_rows
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.types import Command, DiscardPass, Event, FreeSlot, InitSlot, Lane, Step, StepDone

log = logging.getLogger(__name__)


class CompletionQueue(Protocol):
    """What the executor asks of the inbox (device/event_queue.py)."""

    def put(self, event: Event) -> None: ...

    def clock(self) -> float: ...


@dataclass(frozen=True, slots=True, eq=False)
class CudaPass:
    rows: PassRows
    prefill: PrefillPass


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step on the device. `ids` are on their way to the host; `held` is what must live until the step is over."""

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
    """`submit` from one thread. Completions go to `inbox`, on whose clock the steps are timed."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        tables: DeviceTables,
        graphs: DecodeGraphs,
        passes: PiecewiseGraphs,
        places: StreamPartitions,
        lanes: Sequence[Lane],
        driver: Driver,
        inbox: CompletionQueue,
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.tables = tables
        self.decode_graphs = graphs
        self.piecewise_graphs = passes
        self.stream_partitions = places
        self.driver = driver
        self._passes: dict[int, CudaPass] = {}
        clock = DeviceClock(driver, inbox.clock)
        grammars = tables.sampling.grammars
        self._lanes = {
            lane.id: LaneInFlight(lane, driver, clock, inbox, grammars) for lane in lanes
        }

    def submit(self, command: Command) -> None:
        """Raises KeyError or ValueError if a command names a lane there is not or does not fit the tables."""
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
        place = self.stream_partitions.choose(lane.role, step.units)
        flight = InFlightStep(step, place.units)
        self.driver.set_stream(place.stream)
        lane.wait_for_previous(place)
        flight.start_event = self.driver.record_event(place.stream)
        try:
            self._launch_kernels(flight, place)
        except Exception as error:
            log.exception("step %d of lane %d failed", step.id, step.lane)
            self._passes.pop(step.pass_id, None)
            flight.error = f"{type(error).__name__}: {error}"
        flight.staging = self.driver.take_staging()
        flight.end_event = self.driver.record_event(place.stream)
        lane.add(flight, place)

    def _launch_kernels(self, flight: InFlightStep, place: StreamPartition) -> None:
        step = flight.step
        whole = step.first_layer == 0 and step.last_layer == self.decoder.spec.layers
        if whole and step.work.decode_batch == len(step.segments):
            self._launch_decode(flight, place)
        else:
            self._launch_layers(flight, place)

    def _launch_decode(self, flight: InFlightStep, place: StreamPartition) -> None:
        """A pass of decodes alone: a graph."""
        segments = flight.step.segments
        graph, feed = self.decode_graphs.launch(place, segments)
        flight.on_done = functools.partial(graph.idle_buffers.append, feed)
        if graph.logits_BV is None:
            flight.sampled_ids, flight.num_rows = feed.ids_B, len(segments)
            if feed.logprobs is not None:
                flight.logprobs = select_logprobs(
                    feed.logprobs, feed.inputs_numpy_3B[0, : len(segments)], self.tables.sampling
                )
            return
        rows = make_pass_rows(segments)
        sampled = SampledRows(*self.driver.upload(torch.stack([rows.slot_B, rows.end_B]).numpy()))
        self._sample(flight, graph.logits_BV[: len(segments)], rows, sampled)

    @torch.inference_mode()
    def _launch_layers(self, flight: InFlightStep, place: StreamPartition) -> None:
        """Some layers of any pass."""
        step, decoder = flight.step, self.decoder
        if step.first_layer == 0:
            rows = make_pass_rows(step.segments)
            self.tables.upload_pending(step.segments)
            way = self.piecewise_graphs.start_pass(
                self.tables.make_inputs(rows, place.prefill_planner, place.decode_kernel, self.piecewise_graphs.pad_rows)
            )
        else:
            held = self._passes.pop(step.pass_id, None)
            if held is None:
                raise RuntimeError(
                    f"pass {step.pass_id} has no hidden states before layer {step.first_layer}"
                )
            rows, way = held.rows, held.prefill
        inputs, every = way.inputs, wants_prompt_logprobs(self.tables, rows)
        flight.keep_alive, flight.on_done = inputs, inputs.plan.close
        x_TD = way.run(
            place, step.first_layer, step.last_layer, None if every else inputs.last_rows_N
        )
        if x_TD is None:
            self._passes[step.pass_id] = CudaPass(rows, way)
            flight.on_done = None  # it goes on
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
        flight.logprobs = download_logprobs(logits_BV, ids_B, rows, self.tables.sampling, self.driver)


class LaneInFlight:
    """The steps of one lane on the device, and the thread that waits for them."""

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
        self._previous: tuple[StreamPartition, Any] | None = (
            None  # where the previous step runs, and its end
        )
        self._steps: queue.SimpleQueue[InFlightStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait_for_steps, name=f"lane{lane.id}", daemon=True)
        self._thread.start()

    def wait_for_previous(self, place: StreamPartition) -> None:
        """Let the place's stream wait for the lane's previous step, if that runs elsewhere."""
        if self._previous is not None and self._previous[0] is not place:
            self._driver.wait_event(place.stream, self._previous[1])

    def add(self, flight: InFlightStep, place: StreamPartition) -> None:
        self._previous = (place, flight.end_event)
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
        except Exception as error:  # the device's own errors come up here
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
    """The device's events on the host's clock.

    Times are counted from the latest known event, and held against the host's clock each time: never in its future, and at most
    SLACK_S behind. So they keep the device's own precision from event to event, and do not drift.
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
        """When two events were, in seconds. Both have just happened."""
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
