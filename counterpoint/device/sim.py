"""The simulated device: a clock that jumps, and lanes whose steps take as long as an estimator says.

Owns: virtual time, how far each running step has come, and until when the host is busy. Promises: deterministic; steps of a lane
run in order; a step's speed changes the moment its neighbour starts or ends; what happens while the host is busy waits for it.
Must not: decide, check what it is told (device/contract_checker.py does), or import torch.
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

Alarm = Callable[[], Event | None]
HICCUP = (1.3, 4.0)  # times as long, uniformly


def simulated_token(seed: int, position: int) -> int:
    """The token that a request of `seed` has at `position`: ordinary ids of every common vocabulary, no control token among
    them (those stand below 1,000 or above 30,000)."""
    return 1_000 + (seed * 0x9E3779B1 + position * 0x85EBCA77 >> 7) % 29_000


class HostModel(Protocol):
    """What steps ask of the one thread that launches them, in seconds."""

    def seconds(self, work: BatchShape) -> float:
        """For how long launching a step keeps it busy."""
        ...

    def start_s(self, work: BatchShape) -> float:
        """From the launch to the moment at which an idle device starts."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLatency:
    """A host whose launches keep it from nothing, and whose steps can start `latency_s` later."""

    latency_s: float = 0.0

    def seconds(self, work: BatchShape) -> float:
        return 0.0

    def start_s(self, work: BatchShape) -> float:
        return self.latency_s


class VirtualEventQueue:
    """ports.Inbox over a virtual clock. Arrivals are posted beforehand; the device sets alarms for what it will report. Each turn
    of the loop keeps the host busy for `turn_s`."""

    def __init__(self, host_loop_s: float = 0.0) -> None:
        self.now = 0.0
        self.host_loop_s = host_loop_s
        self.host_free_s = 0.0  # when the host has done what it was told so far
        self._queue: list[tuple[float, int, Event | Alarm]] = []
        self._serial = 0
        self._heard: list[Event] = []  # has come, and the host has not been told yet:
        self._told_s = math.inf  # that it is then

    def post(self, at_s: float, event: Event) -> None:
        """Let `event` come at `at_s`. Events of one time come in the order in which they were posted."""
        self._push(at_s, event)

    def call_at(self, at_s: float, alarm: Alarm) -> None:
        """Call `alarm` at `at_s`; what it returns comes as an event of that time, None as none."""
        self._push(at_s, alarm)

    def occupy_host(self, seconds: float) -> None:
        """The host is busy for so long, with this after what it does already."""
        self.host_free_s = max(self.host_free_s, self.now) + seconds

    @property
    def next_event_s(self) -> float:
        """When something happens next; infinite if nothing is left."""
        return min(self._told_s, self._queue[0][0]) if self._queue else self._told_s

    def advance(self) -> tuple[float, Sequence[Event]] | None:
        """Let the next thing happen. If it is that the host is told what has come: that time and those events."""
        queue = self._queue
        if queue and queue[0][0] <= self._told_s:
            self.now, _, item = heapq.heappop(queue)
            event = item() if callable(item) else item
            if event is not None:
                if not self._heard:
                    self._told_s = max(self.now, self.host_free_s)
                self._heard.append(event)
            return None
        self.now, self._told_s = self._told_s, math.inf
        events, self._heard = self._heard, []
        self.host_free_s = self.now + self.host_loop_s
        return self.now, events

    def get(self) -> tuple[float, Sequence[Event]] | None:
        """Go to the next time at which there is an event and the host is free; that time and all that came until then, or None when
        nothing is left."""
        while self._queue or self._heard:
            told = self.advance()
            if told is not None:
                return told
        return None

    def _push(self, at_s: float, item: Event | Alarm) -> None:
        if at_s < self.now:
            raise ValueError(f"an event at {at_s} s comes too late: it is {self.now} s already")
        self._serial += 1
        heapq.heappush(self._queue, (at_s, self._serial, item))


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step on the device. At `since_s` a share `left` of it remained; the whole takes `whole_s` at its present speed.
    `turn` numbers its alarms: only the latest counts. `slower`: it takes so many times as long as is expected of it."""

    step: Step
    started_s: float
    since_s: float
    slower: float = 1.0
    left: float = 1.0
    whole_s: float = 0.0
    turn: int = 0


def hiccup(step: int, share: float) -> float:
    """How many times longer this step takes: 1 but for `share` of them."""
    dice = random.Random(step)
    return dice.uniform(*HICCUP) if dice.random() < share else 1.0


@dataclass(slots=True, eq=False)
class SimLane:
    """`queue` holds (when the host has launched it, step) of the steps behind the running one."""

    queue: deque[tuple[float, Step]] = field(default_factory=deque)
    running: RunningStep | None = None


class SimExecutor:
    """ports.Executor of one simulated device. `physics` says what a step takes, alone and beside another.

    `host` says for how long the launch of a step keeps the host busy, and when the device could start it: hidden while an earlier
    step still runs, felt when the lane has run dry. Sampled ids are `simulated_token`'s. `active`: how many of its units
    a step keeps at work; None: not told.
    """

    def __init__(
        self,
        step_times: Estimator,
        inbox: VirtualEventQueue,
        layers: int,
        host: HostModel = FixedLatency(),
        active_units: ActiveUnitsModel | None = None,
        hiccup_share: float = 0.0,
    ) -> None:
        """`hiccups`: the share of steps that take HICCUP times as long as `physics` says, drawn by their ids."""
        self.step_times = step_times
        self.inbox = inbox
        self.layers = layers
        self.host = host
        self.active_units = active_units
        self.hiccup_share = hiccup_share
        self._seeds: dict[int, int] = {}  # of the open slots
        self._lanes: dict[int, SimLane] = {}

    def submit(self, command: Command) -> None:
        if isinstance(command, Step):
            lane = self._lanes.get(command.lane)
            if lane is None:
                lane = self._lanes[command.lane] = SimLane()
            lane.queue.append(
                (
                    max(self.inbox.host_free_s, self.inbox.now) + self.host.start_s(command.work),
                    command,
                )
            )
            launch_s = self.host.seconds(command.work)
            if launch_s:
                self.inbox.occupy_host(launch_s)
            if lane.running is None and len(lane.queue) == 1:
                self._start(lane)
        elif isinstance(command, InitSlot):
            self._seeds[command.slot] = command.sampling.seed
        elif isinstance(command, FreeSlot):
            del self._seeds[command.slot]

    def close(self) -> None:
        self._lanes.clear()

    def _start(self, lane: SimLane) -> None:
        """Start the next step of an idle lane, now or when the host has launched it."""
        if lane.running is not None or not lane.queue:
            return
        now = self.inbox.now
        if lane.queue[0][0] > now:
            self.inbox.call_at(lane.queue[0][0], lambda: self._start(lane))
            return
        step = lane.queue.popleft()[1]
        lane.running = RunningStep(
            step, now, now, hiccup(step.id, self.hiccup_share) if self.hiccup_share else 1.0
        )
        self._pace()

    def _pace(self) -> None:
        """Something started or ended: book the progress so far, and give every running step its new speed."""
        now = self.inbox.now
        running = [lane.running for lane in self._lanes.values() if lane.running is not None]
        for one in running:
            if one.whole_s > 0:
                one.left = max(0.0, one.left - (now - one.since_s) / one.whole_s)
            one.since_s = now
            whole_s = one.slower * self._whole_s(
                one.step, [other.step for other in running if other is not one]
            )
            if one.turn and whole_s == one.whole_s:
                continue  # its alarm stands
            one.whole_s = whole_s
            one.turn += 1
            self._set_alarm(one)

    def _whole_s(self, step: Step, others: list[Step]) -> float:
        """With several neighbours, each slows the step as if it were alone with it."""
        if not others:
            return self.step_times.seconds(step.work, step.units)
        if len(others) == 1:
            return self.step_times.seconds(step.work, step.units, (others[0].work, others[0].units))
        alone_s = self.step_times.seconds(step.work, step.units)
        whole_s = alone_s
        for other in others:
            whole_s *= (
                self.step_times.seconds(step.work, step.units, (other.work, other.units)) / alone_s
            )
        return whole_s

    def _set_alarm(self, running: RunningStep) -> None:
        turn = running.turn
        self.inbox.call_at(
            running.since_s + running.left * running.whole_s, lambda: self._end(running, turn)
        )

    def _end(self, running: RunningStep, turn: int) -> StepDone | None:
        if running.turn != turn:
            return None
        step = running.step
        lane = self._lanes[step.lane]
        lane.running = None
        self._start(lane)
        if lane.running is None:
            self._pace()
        return StepDone(
            step=step.id,
            lane=step.lane,
            tokens=self._sampled(step) if step.last_layer == self.layers else (),
            started_s=running.started_s,
            ended_s=self.inbox.now,
            units=step.units,
            active_units=self.active_units(step.work, step.units) if self.active_units else 0.0,
        )

    def _sampled(self, step: Step) -> tuple[int, ...]:
        seeds = self._seeds
        return tuple(
            [simulated_token(seeds[s.slot], s.start + s.tokens) for s in step.segments if s.sample]
        )
