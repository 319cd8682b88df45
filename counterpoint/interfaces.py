"""The four interfaces between the core and the rest, each with at least two implementations.

The core knows nothing else of the outside. This module imports no concrete class.

    EventQueue  wall clock (device/event_queue.py), virtual clock (device/sim.py)
    Executor    cpu, cuda, sim (device/)
    Policy      serial, chunked, multiplex, auto (core/policy/)
    Estimator   roofline, fitted (cost_model/)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from counterpoint.stats import PolicyReport
from counterpoint.types import BatchShape, Command, Event, Lane, Step, StepDone

if TYPE_CHECKING:
    from counterpoint.core.request import Request
    from counterpoint.core.state import EngineState, Pass

CoRunning = tuple[BatchShape, int]  # a step on other units of the same device, and its units


class EventQueue(Protocol):
    def get(self) -> tuple[float, Sequence[Event]] | None:
        """Block until there are events, and return (arrival time in seconds, events).

        An empty sequence asks the loop to report its state only. None: there will be no more. This
        is the one blocking call of the loop.
        """
        ...


class Executor(Protocol):
    def submit(self, command: Command) -> None:
        """Take a command; never block on the device.

        The completion of a Step comes back through the event queue as StepDone, in order within a
        lane. Errors at run time come back in StepDone.error; raising means that the device is lost.
        """
        ...

    def close(self) -> None:
        """Stop threads and free memory. Nothing is in flight."""
        ...


class Estimator(Protocol):
    def seconds(self, work: BatchShape, units: int, co_running: CoRunning | None = None) -> float:
        """Predicted duration of a step of `work` on `units` units, in seconds.

        `co_running`: the step that runs meanwhile on other units; None: the device is idle
        otherwise.
        """
        ...


class BatchPlan(NamedTuple):
    """A policy's request for a new pass.

    `items`: (request, tokens to compute) pairs. The engine grants what pages allow, in this order.
    `layers`: how many layers the first step runs (None: all).
    """

    items: Sequence[tuple[Request, int]]
    units: int
    layers: int | None = None


class Policy(Protocol):
    """Decides what runs next; never launches, allocates or sleeps.

    The engine asks at each edge: when a lane has room, or a pass stands between layer groups. A
    subclass writes `next_batch`, and `next_layers` if it cuts its passes.
    """

    lanes: tuple[Lane, ...]
    lane_units: tuple[int, ...]  # while all lanes have work; at first, where the split moves

    def admission_order(self, waiting: Iterable[Request], now: float) -> Iterable[Request]:
        """The order in which the engine offers pages to waiting requests."""
        return waiting

    def next_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        """What a lane with room should start now; None leaves it idle until the next event."""
        ...

    def next_layers(
        self, lane: Lane, open_pass: Pass, state: EngineState, now: float
    ) -> tuple[int, int] | None:
        """(units, layers) of the next step of a pass cut into layer groups; None: not now."""
        raise AssertionError("no pass of this policy is cut")

    def should_preempt(self, lane: Lane, open_pass: Pass, state: EngineState, now: float) -> bool:
        """Whether the lane suspends `open_pass` between two layer groups for another pass.

        `next_batch` then picks that pass. A lane suspends one pass at a time.
        """
        return False

    def observe(self, step: Step, done: StepDone, co_running: Step | None) -> None:
        """A step has come back, while `co_running` ran on another lane. For policies that learn."""

    def report(self) -> PolicyReport:
        """Prediction errors and decision counts since the start."""
        return PolicyReport()
