"""The four seams of the core, each with at least two implementations from the first day.

Owns: the Protocols. Promises: what is written here is all that the core knows of the outside.
Must not: import a concrete class.

    Inbox      wall clock (device/event_queue.py), virtual clock (device/sim.py)
    Executor   cpu, cuda, sim
    Policy     serial, chunked, multiplex, auto (core/policy/)
    Estimator  roofline, fitted (perf/)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from counterpoint.types import BatchShape, Command, Event, Lane, PolicyReport, Step, StepDone

if TYPE_CHECKING:
    from counterpoint.core.request import Request
    from counterpoint.core.state import EngineState, Pass


class EventQueue(Protocol):
    def get(self) -> tuple[float, Sequence[Event]] | None:
        """Block until there are events; their arrival time in seconds and the events (none, if the loop shall only tell how things
        stand), or None when there will be no more.
        The one blocking call of the loop."""
        ...


class Executor(Protocol):
    def submit(self, command: Command) -> None:
        """Take a command; never block on the device. A Step's completion comes back through the inbox as StepDone, in order
        within a lane. Everything that can fail at run time comes back in StepDone.error; raising means the device is lost."""
        ...

    def close(self) -> None:
        """Stop threads, free memory. Nothing is in flight."""
        ...


class Estimator(Protocol):
    def seconds(
        self, work: BatchShape, units: int, co_running: tuple[BatchShape, int] | None = None
    ) -> float:
        """Predicted duration of a step of `work` on `units` units, in seconds, while `beside` = (work, units) runs on other
        units of the same device (None: alone)."""
        ...


class BatchPlan(NamedTuple):
    """A policy's wish for a new pass: (request, tokens to compute) pairs, on how many units, and how many layers the first step
    runs (None: all). The engine grants what pages allow, in this order."""

    items: Sequence[tuple[Request, int]]
    units: int
    layers: int | None = None


class Policy(Protocol):
    """Decides; never launches, allocates or sleeps. Asked at each edge: a lane has room, or a pass stands between layer groups.
    Who inherits from it has the plainest answers, and writes `fill`; `advance` too, if its passes are cut."""

    lanes: tuple[Lane, ...]
    lane_units: tuple[
        int, ...
    ]  # units of each lane while all have work (where the split moves: at first)

    def admission_order(self, waiting: Iterable[Request], now: float) -> Iterable[Request]:
        """The order in which waiting requests are offered pages."""
        return waiting

    def next_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        """What a lane with room should start now; None leaves it idle until the next event."""
        ...

    def next_layers(
        self, lane: Lane, open_pass: Pass, state: EngineState, now: float
    ) -> tuple[int, int] | None:
        """Units and layers of the next step of a pass cut into layer groups; None: not now."""
        raise AssertionError("no pass of this policy is cut")

    def should_preempt(self, lane: Lane, open_pass: Pass, state: EngineState, now: float) -> bool:
        """Whether `fill` shall start another pass on the lane first, while `open_pass` waits between two layer groups. One pass
        at a time can be put aside like this."""
        return False

    def observe(self, step: Step, done: StepDone, co_running: Step | None) -> None:
        """A step has come back, while `beside` ran on another lane: for policies that learn."""

    def report(self) -> PolicyReport:
        """How well it has predicted, and what it decided, since the start."""
        return PolicyReport()
