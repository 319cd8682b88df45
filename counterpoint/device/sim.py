"""The simulated device: a virtual clock, and lanes whose steps take as long as an estimator says.

Owns: virtual time, the progress of each running step, and until when the host is busy.
Promises: deterministic. Steps of a lane run in order. A step's speed changes when its neighbour
starts or ends. Events that come while the host is busy wait for it.
Must not: check commands (contract_checker.py does), or import torch.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from counterpoint.core.metrics import ActiveUnitsModel
from counterpoint.interfaces import Estimator
from counterpoint.types import BatchShape, Command, Event, FreeSlot, InitSlot, Step, StepDone

Timer = Callable[[], Event | None]
HICCUP_FACTORS = (1.3, 4.0)  # how many times longer such a step takes, uniformly


def simulated_token(seed: int, position: int) -> int:
    """The token at `position` of a request with `seed`: an id that common vocabularies use for
    text, since their control tokens are below 1,000 or above 30,000."""
    return 1_000 + (seed * 0x9E3779B1 + position * 0x85EBCA77 >> 7) % 29_000


class HostModel(Protocol):
    """What steps cost the one thread that launches them, in seconds."""

    def seconds(self, work: BatchShape) -> float:
        """How long launching a step keeps the thread busy."""
        ...

    def start_s(self, work: BatchShape) -> float:
        """From the launch until an idle device starts."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLatency:
    """Launches take no time of the host; a step can start `latency_s` after its launch."""

    latency_s: float = 0.0

    def seconds(self, work: BatchShape) -> float:
        return 0.0

    def start_s(self, work: BatchShape) -> float:
        return self.latency_s


class VirtualEventQueue:
    """interfaces.EventQueue on a virtual clock. Arrivals are posted beforehand; the device sets
    timers for its completions. Each turn of the engine's loop keeps the host busy for
    `host_loop_s`."""

    def __init__(self, host_loop_s: float = 0.0) -> None:
        self.now = 0.0
        self.host_loop_s = host_loop_s
        self.host_free_s = 0.0  # when the host has finished its work so far
        self._queue: list[tuple[float, int, Event | Timer]] = []
        self._sequence = 0
        self._pending: list[Event] = []  # for the host, which takes them at `_deliver_s`
        self._deliver_s = math.inf

    def post(self, at_s: float, event: Event) -> None:
        """`event` arrives at `at_s`; events of one time in the order in which they were posted."""
        self._push(at_s, event)

    def call_at(self, at_s: float, timer: Timer) -> None:
        """Call `timer` at `at_s`. If it returns an event, that arrives then."""
        self._push(at_s, timer)

    def occupy_host(self, seconds: float) -> None:
        """Keep the host busy for so long, after its work so far."""
        self.host_free_s = max(self.host_free_s, self.now) + seconds

    @property
    def next_event_s(self) -> float:
        """When `advance` has something to do; infinite if nothing is left."""
        return min(self._deliver_s, self._queue[0][0]) if self._queue else self._deliver_s

    def advance(self) -> tuple[float, Sequence[Event]] | None:
        """Advance to the next event. Returns (time, events) when the host is notified, else
        None."""
        if self._queue and self._queue[0][0] <= self._deliver_s:
            self.now, _, item = heapq.heappop(self._queue)
            event = item() if callable(item) else item
            if event is not None:
                if not self._pending:
                    self._deliver_s = max(self.now, self.host_free_s)
                self._pending.append(event)
            return None
        self.now, self._deliver_s = self._deliver_s, math.inf
        events, self._pending = self._pending, []
        self.host_free_s = self.now + self.host_loop_s
        return self.now, events

    def get(self) -> tuple[float, Sequence[Event]] | None:
        """Advance until the host is notified. Returns (time, events), or None when nothing is
        left."""
        while self._queue or self._pending:
            got = self.advance()
            if got is not None:
                return got
        return None

    def _push(self, at_s: float, item: Event | Timer) -> None:
        if at_s < self.now:
            raise ValueError(f"an event at {at_s} s comes too late: it is {self.now} s already")
        self._sequence += 1
        heapq.heappush(self._queue, (at_s, self._sequence, item))


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step on the device. At `since_s` a share `remaining` of it was left; the whole step takes
    `whole_s` at its present speed, which is `slowdown` times what is expected. `version` numbers
    its timers: only the latest counts."""

    step: Step
    started_s: float
    since_s: float
    slowdown: float = 1.0
    remaining: float = 1.0
    whole_s: float = 0.0
    version: int = 0


def hiccup_factor(step: int, share: float) -> float:
    """How many times longer this step takes: 1 except for `share` of them."""
    rng = random.Random(step)
    return rng.uniform(*HICCUP_FACTORS) if rng.random() < share else 1.0


@dataclass(slots=True, eq=False)
class SimLane:
    """`queue`: (when its launch takes effect, step) of the steps behind the running one."""

    queue: deque[tuple[float, Step]] = field(default_factory=deque)
    running: RunningStep | None = None


@dataclass(eq=False)
class SimExecutor:
    """interfaces.Executor of one simulated device.

    `step_times` gives a step's time, alone and beside another. `host`: how long a launch keeps the
    host busy, and when the device could start the step. That is hidden while an earlier step runs,
    and visible when the lane is idle. `active_units`: how many of its units have work during a
    step; None: not reported. `hiccup_share` of the steps, chosen by id, take HICCUP_FACTORS times
    as long. Sampled ids are `simulated_token`'s.
    """

    step_times: Estimator
    inbox: VirtualEventQueue
    layers: int
    host: HostModel = FixedLatency()
    active_units: ActiveUnitsModel | None = None
    hiccup_share: float = 0.0
    _seeds: dict[int, int] = field(default_factory=dict, init=False)  # of the open slots
    _lanes: dict[int, SimLane] = field(default_factory=dict, init=False)

    def submit(self, command: Command) -> None:
        if isinstance(command, Step):
            self._launch(command)
        elif isinstance(command, InitSlot):
            self._seeds[command.slot] = command.sampling.seed
        elif isinstance(command, FreeSlot):
            del self._seeds[command.slot]

    def close(self) -> None:
        self._lanes.clear()

    def _launch(self, step: Step) -> None:
        lane = self._lanes.setdefault(step.lane, SimLane())
        launched_s = max(self.inbox.host_free_s, self.inbox.now) + self.host.start_s(step.work)
        lane.queue.append((launched_s, step))
        busy_s = self.host.seconds(step.work)
        if busy_s:
            self.inbox.occupy_host(busy_s)
        if lane.running is None and len(lane.queue) == 1:
            self._start(lane)

    def _start(self, lane: SimLane) -> None:
        """Start the next step of an idle lane, now or when the host has launched it."""
        if lane.running is not None or not lane.queue:
            return
        now = self.inbox.now
        if lane.queue[0][0] > now:
            self.inbox.call_at(lane.queue[0][0], lambda: self._start(lane))
            return
        step = lane.queue.popleft()[1]
        slowdown = hiccup_factor(step.id, self.hiccup_share) if self.hiccup_share else 1.0
        lane.running = RunningStep(step, now, now, slowdown)
        self._update_speeds()

    def _update_speeds(self) -> None:
        """A step started or ended: record progress so far, and set every running step's new
        speed."""
        now = self.inbox.now
        running = [lane.running for lane in self._lanes.values() if lane.running is not None]
        for one in running:
            if one.whole_s > 0:
                one.remaining = max(0.0, one.remaining - (now - one.since_s) / one.whole_s)
            one.since_s = now
            others = [other.step for other in running if other is not one]
            whole_s = one.slowdown * self._whole_s(one.step, others)
            if one.version and whole_s == one.whole_s:
                continue  # its timer is still right
            one.whole_s = whole_s
            one.version += 1
            self._set_timer(one)

    def _whole_s(self, step: Step, others: list[Step]) -> float:
        """With several neighbours, each slows the step as if it were alone with it."""
        seconds = self.step_times.seconds
        if len(others) == 1:
            return seconds(step.work, step.units, (others[0].work, others[0].units))
        alone_s = seconds(step.work, step.units)
        whole_s = alone_s
        for other in others:
            whole_s *= seconds(step.work, step.units, (other.work, other.units)) / alone_s
        return whole_s

    def _set_timer(self, running: RunningStep) -> None:
        version = running.version
        ends_s = running.since_s + running.remaining * running.whole_s
        self.inbox.call_at(ends_s, lambda: self._end(running, version))

    def _end(self, running: RunningStep, version: int) -> StepDone | None:
        if running.version != version:
            return None
        step = running.step
        lane = self._lanes[step.lane]
        lane.running = None
        self._start(lane)
        if lane.running is None:
            self._update_speeds()
        return StepDone(
            step=step.id,
            lane=step.lane,
            tokens=self._sample(step) if step.last_layer == self.layers else (),
            started_s=running.started_s,
            ended_s=self.inbox.now,
            units=step.units,
            active_units=self.active_units(step.work, step.units) if self.active_units else 0.0,
        )

    def _sample(self, step: Step) -> tuple[int, ...]:
        seeds = self._seeds
        sampled = [s for s in step.segments if s.sample]
        return tuple([simulated_token(seeds[s.slot], s.start + s.tokens) for s in sampled])
