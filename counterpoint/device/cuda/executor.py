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
    SamplingDownload,
    asks_for_prompts,
    download_chosen,
    download_prompts,
    read_chosen,
    read_prompts,
    sample_any,
    spread_chosen,
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
    way: PrefillPass


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step on the device. `ids` are on their way to the host; `held` is what must live until the step is over."""

    step: Step
    units: int
    started: Any = None
    ended: Any = None
    ids: Tensor | None = None
    rows: int = 0
    logprobs: SamplingDownload | None = None
    prompt_logprobs: list[SamplingDownload] = field(default_factory=list)
    held: Any = None
    borrowed: list[Tensor] = field(default_factory=list)
    over: Callable[[], None] | None = None
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
        self.graphs = graphs
        self.passes = passes
        self.places = places
        self.driver = driver
        self._open: dict[int, CudaPass] = {}
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
                self.tables.open(command)
            case FreeSlot():
                self.tables.close(command.slot)
            case DiscardPass():
                dropped = self._open.pop(command.pass_id, None)
                if dropped is not None:
                    dropped.way.inputs.plan.close()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._open.clear()

    # ------------------------------------------------------------ launching

    def _launch(self, step: Step) -> None:
        lane = self._lanes[step.lane]
        place = self.places.choose(lane.role, step.units)
        flight = InFlightStep(step, place.units)
        self.driver.use(place.stream)
        lane.follow(place)
        flight.started = self.driver.mark(place.stream)
        try:
            self._fill(flight, place)
        except Exception as error:
            log.exception("step %d of lane %d failed", step.id, step.lane)
            self._open.pop(step.pass_id, None)
            flight.error = f"{type(error).__name__}: {error}"
        flight.borrowed = self.driver.borrowed()
        flight.ended = self.driver.mark(place.stream)
        lane.took_off(flight, place)

    def _fill(self, flight: InFlightStep, place: StreamPartition) -> None:
        step = flight.step
        whole = step.first_layer == 0 and step.last_layer == self.decoder.spec.layers
        if whole and step.work.decode_batch == len(step.segments):
            self._decode(flight, place)
        else:
            self._layers(flight, place)

    def _decode(self, flight: InFlightStep, place: StreamPartition) -> None:
        """A pass of decodes alone: a graph."""
        segments = flight.step.segments
        graph, feed = self.graphs.launch(place, segments)
        flight.over = functools.partial(graph.idle.append, feed)
        if graph.logits_BV is None:
            flight.ids, flight.rows = feed.ids_B, len(segments)
            if feed.chosen is not None:
                flight.logprobs = spread_chosen(
                    feed.chosen, feed.rows_3B[0, : len(segments)], self.tables.sampling
                )
            return
        rows = make_pass_rows(segments)
        sampled = SampledRows(*self.driver.upload(torch.stack([rows.slot_B, rows.end_B]).numpy()))
        self._sample(flight, graph.logits_BV[: len(segments)], rows, sampled)

    @torch.inference_mode()
    def _layers(self, flight: InFlightStep, place: StreamPartition) -> None:
        """Some layers of any pass."""
        step, decoder = flight.step, self.decoder
        if step.first_layer == 0:
            rows = make_pass_rows(step.segments)
            self.tables.send(step.segments)
            way = self.passes.start(
                self.tables.inputs(rows, place.planner, place.decode, self.passes.size)
            )
        else:
            held = self._open.pop(step.pass_id, None)
            if held is None:
                raise RuntimeError(
                    f"pass {step.pass_id} has no hidden states before layer {step.first_layer}"
                )
            rows, way = held.rows, held.way
        inputs, every = way.inputs, asks_for_prompts(self.tables, rows)
        flight.held, flight.over = inputs, inputs.plan.close
        x_TD = way.run(
            place, step.first_layer, step.last_layer, None if every else inputs.last_rows_N
        )
        if x_TD is None:
            self._open[step.pass_id] = CudaPass(rows, way)
            flight.over = None  # it goes on
            return
        if every:
            flight.prompt_logprobs = download_prompts(decoder, self.tables, rows, x_TD)
            x_TD = x_TD[inputs.last_rows_N]
        if len(rows.slot_B):
            self._sample(flight, decoder.head(x_TD)[: len(rows.slot_B)], rows, inputs.sampled)

    @torch.inference_mode()
    def _sample(
        self, flight: InFlightStep, logits_BV: Tensor, rows: PassRows, sampled: SampledRows
    ) -> None:
        ids_B = sample_any(logits_BV, rows, self.tables)
        self.tables.put_sampled(sampled, ids_B)
        flight.ids, flight.rows = self.driver.download(ids_B), len(rows.slot_B)
        flight.logprobs = download_chosen(logits_BV, ids_B, rows, self.tables.sampling, self.driver)


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
        self._last: tuple[StreamPartition, Any] | None = (
            None  # where the previous step runs, and its end
        )
        self._flights: queue.SimpleQueue[InFlightStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name=f"lane{lane.id}", daemon=True)
        self._thread.start()

    def follow(self, place: StreamPartition) -> None:
        """Let the place's stream wait for the lane's previous step, if that runs elsewhere."""
        if self._last is not None and self._last[0] is not place:
            self._driver.follow(place.stream, self._last[1])

    def took_off(self, flight: InFlightStep, place: StreamPartition) -> None:
        self._last = (place, flight.ended)
        self._flights.put(flight)

    def close(self) -> None:
        self._flights.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (flight := self._flights.get()) is not None:
            self._inbox.put(self._report(flight))

    def _report(self, flight: InFlightStep) -> StepDone:
        step = flight.step
        started_s = ended_s = self._clock.now()
        tokens, chosen, prompts = (), (), ()
        try:
            self._driver.wait(flight.ended)
            started_s, ended_s = self._clock.read(flight.started, flight.ended)
            if flight.ids is not None and not flight.error:
                ids_B = flight.ids[: flight.rows].numpy()
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
        if flight.over is not None:
            flight.over()
        self._driver.give_back(flight.borrowed)
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
        self._known: tuple[Any, float] | None = None

    def now(self) -> float:
        return self._host_s()

    def read(self, started: Any, ended: Any) -> tuple[float, float]:
        """When two events were, in seconds. Both have just happened."""
        now_s, took_s = self._host_s(), self._driver.seconds(started, ended)
        with self._lock:
            ended_s = now_s
            if self._known is not None:
                event, at_s = self._known
                ended_s = min(
                    now_s, max(now_s - self.SLACK_S, at_s + self._driver.seconds(event, ended))
                )
            self._known = (ended, ended_s)
        return ended_s - took_s, ended_s
