"""Timeline: what ran on each lane and when, as a Chrome trace (for Perfetto or chrome://tracing).

Owns: the spans and the file format.
Promises: the simulator and a real device write the same file. All that it records comes from
commands and events that pass through it, unchanged.

It wraps both sides of a device, as an Executor and as an EventQueue:

    timeline = Timeline(executor, inbox, lanes)
    run(engine, (inbox, executor), deliver, timeline=timeline)
    timeline.write("out.json")

Tracks: one per lane (a span per step), one for KV sent to other workers (`record_transfer`), and
counters for the units of each lane, the queue and the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.config import name_file_in_errors
from counterpoint.core import loop
from counterpoint.core.engine import Engine
from counterpoint.core.loop import DeliverOutputs, EventLog
from counterpoint.interfaces import EventQueue, Executor
from counterpoint.stats import Stats
from counterpoint.types import Command, Event, Lane, Output, Step, StepDone


class TimelineSpan(msgspec.Struct, frozen=True, gc=False):
    """One step on a lane, in seconds on the event queue's clock. `kind`: prefill, decode or mixed;
    `context`: sum of the decodes' context lengths; layers [first_layer, last_layer)."""

    lane: int
    kind: str
    started_s: float
    ended_s: float
    units: int
    step: int
    batch: int
    prefill_tokens: int
    decode_batch: int
    context: int
    first_layer: int
    last_layer: int
    error: str = ""


class GaugeSample(msgspec.Struct, frozen=True, gc=False):
    at_s: float
    waiting: int
    running: int
    pages_used: int


class KvTransfer(msgspec.Struct, frozen=True, gc=False):
    """KV of layers [first_layer, last_layer) that went to worker `to` over the transport `kind`, in
    seconds on the event queue's clock."""

    to: str
    kind: str
    started_s: float
    ended_s: float
    bytes: int
    first_layer: int
    last_layer: int
    error: str = ""


class Timeline:
    """Records every step between `executor` and `inbox`. `lanes`: those that are titled by their
    role. `sample_s`: the least time between two samples of the gauges."""

    def __init__(
        self,
        executor: Executor,
        inbox: EventQueue,
        lanes: Sequence[Lane] = (),
        sample_s: float = 0.02,
    ) -> None:
        self.executor = executor
        self.inbox = inbox
        self._titles = {lane.id: str(lane.role) for lane in lanes}
        self.sample_s = sample_s
        self.spans: list[TimelineSpan] = []
        self.gauges: list[GaugeSample] = []
        self.transfers: list[KvTransfer] = []
        self._now = 0.0
        self._in_flight: dict[int, Step] = {}

    def record_transfer(self, transfer: KvTransfer) -> None:
        """From any thread."""
        self.transfers.append(transfer)

    def write(self, path: str | Path) -> None:
        with name_file_in_errors(path):
            Path(path).write_bytes(msgspec.json.encode(self.chrome_trace()))

    # ------------------------------------------------------------ what passes

    def submit(self, command: Command) -> None:
        if isinstance(command, Step):
            self._in_flight[command.id] = command
        self.executor.submit(command)

    def get(self) -> tuple[float, Sequence[Event]] | None:
        got = self.inbox.get()
        if got is not None and got[1]:
            self._now = got[0]
            for event in got[1]:
                if isinstance(event, StepDone):
                    self.spans.append(make_span(self._in_flight.pop(event.step), event))
        return got

    def close(self) -> None:
        self.executor.close()

    def sampling_gauges(self, deliver: DeliverOutputs) -> DeliverOutputs:
        """`deliver`, with the gauges sampled before."""

        def sample_and_deliver(outputs: list[Output], engine: Engine) -> None:
            if not self.gauges or self._now - self.gauges[-1].at_s >= self.sample_s:
                self.gauges.append(make_gauge(self._now, engine.stats()))
            deliver(outputs, engine)

        return sample_and_deliver

    # ------------------------------------------------------------ the file

    def chrome_trace(self) -> dict[str, Any]:
        """The trace in Chrome's "Trace Event Format" (object form), in microseconds from the first
        time."""
        times = (
            [s.started_s for s in self.spans]
            + [g.at_s for g in self.gauges]
            + [t.started_s for t in self.transfers]
        )
        start_s = min(times, default=0.0)
        events = [_meta("process_name", 0, "counterpoint")]
        events += [
            _meta("thread_name", lane, self._title(lane))
            for lane in sorted({s.lane for s in self.spans})
        ]
        events += [_span_event(one, start_s) for one in self.spans]
        for number, transfer in enumerate(self.transfers):
            events += _transfer_events(number, transfer, start_s)
        events += self._unit_counters(start_s)
        for gauge in self.gauges:
            at_us = _us(gauge.at_s, start_s)
            requests = {"waiting": gauge.waiting, "running": gauge.running}
            events.append(_counter("requests", at_us, requests))
            events.append(_counter("KV pages", at_us, {"in use": gauge.pages_used}))
        return {"displayTimeUnit": "ms", "traceEvents": events}

    def _title(self, lane: int) -> str:
        return self._titles.get(lane, f"lane {lane}")

    def _unit_counters(self, start_s: float) -> list[dict[str, Any]]:
        """The split in force: units of each lane at every start and end of a step."""
        edges = [(s.started_s, 1, s) for s in self.spans] + [(s.ended_s, 0, s) for s in self.spans]
        edges.sort(key=lambda edge: edge[:2])
        now = {s.lane: 0 for s in self.spans}
        found: list[dict[str, Any]] = []
        for index, (at_s, starts, one) in enumerate(edges):
            now[one.lane] = one.units if starts else 0
            if index + 1 == len(edges) or edges[index + 1][0] > at_s:
                units = {self._title(lane): units for lane, units in now.items()}
                found.append(_counter("units", _us(at_s, start_s), units))
        return found


def run(
    engine: Engine,
    device: tuple[EventQueue, Executor],
    deliver: DeliverOutputs,
    log: EventLog | None = None,
    timeline: Timeline | None = None,
) -> None:
    """The engine's loop, recorded by `timeline` if there is one (over this `device`)."""
    if timeline is None:
        loop.run(engine, *device, deliver, log)
    else:
        loop.run(engine, timeline, timeline, timeline.sampling_gauges(deliver), log)


def make_span(step: Step, done: StepDone) -> TimelineSpan:
    work = step.work
    return TimelineSpan(
        lane=done.lane,
        kind=work.kind,
        started_s=done.started_s,
        ended_s=done.ended_s,
        units=done.units or step.units,
        step=step.id,
        batch=step.pass_id,
        prefill_tokens=work.prefill_tokens,
        decode_batch=work.decode_batch,
        context=work.decode_context,
        first_layer=step.first_layer,
        last_layer=step.last_layer,
        error=done.error,
    )


def make_gauge(now: float, stats: Stats) -> GaugeSample:
    used = stats.pages_total - stats.pages_free - stats.pages_cached
    return GaugeSample(now, stats.waiting, stats.running, used)


def _span_event(one: TimelineSpan, start_s: float) -> dict[str, Any]:
    amounts = {"prefill": f"{one.prefill_tokens} tokens", "decode": f"{one.decode_batch} requests"}
    amount = amounts.get(one.kind, f"{one.prefill_tokens} tokens + {one.decode_batch} requests")
    args = {
        name: getattr(one, name)
        for name in ("units", "step", "batch", "prefill_tokens", "decode_batch", "context")
    }
    args["layers"] = f"[{one.first_layer}, {one.last_layer})"
    if one.error:
        args["error"] = one.error
    start_us = _us(one.started_s, start_s)
    return {
        "name": f"{one.kind}: {amount}",
        "cat": one.kind,
        "ph": "X",
        "ts": start_us,
        "dur": _us(one.ended_s, start_s) - start_us,
        "pid": 1,
        "tid": one.lane,
        "args": args,
    }


def _transfer_events(number: int, one: KvTransfer, start_s: float) -> list[dict[str, Any]]:
    """A span on a track of its own, since several may be under way at once."""
    args = {"bytes": one.bytes, "layers": f"[{one.first_layer}, {one.last_layer})", "by": one.kind}
    if one.error:
        args["error"] = one.error
    common = {"name": f"KV to {one.to}", "cat": "transfer", "pid": 1, "tid": 0, "id": number}
    return [
        common | {"ph": "b", "ts": _us(one.started_s, start_s), "args": args},
        common | {"ph": "e", "ts": _us(one.ended_s, start_s)},
    ]


def _counter(name: str, at_us: float, values: dict[str, int]) -> dict[str, Any]:
    return {"name": name, "ph": "C", "ts": at_us, "pid": 1, "args": values}


def _meta(name: str, lane: int, title: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 1, "tid": lane, "args": {"name": title}}


def _us(at_s: float, start_s: float) -> float:
    return round((at_s - start_s) * 1e6, 3)
