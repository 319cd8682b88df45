"""WallClockEventQueue: events from any thread for the engine's one thread, on the wall clock.

Promises: events come out in the order in which they were put. The time of a `get` is not before
that of any event it returns. What was put before `stop` still comes out.
"""

from __future__ import annotations

import enum
import queue
import time
from collections.abc import Sequence

from counterpoint.types import Event


class Signal(enum.Enum):
    STOP = "stop"
    WAKE = "wake"


class WallClockEventQueue:
    """`put`, `wake` and `stop` from any thread, `get` from one. `num_gets` counts calls of `get`:
    if a `wake` does not change it, the thread that calls `get` is stuck. `busy_s`: seconds that it
    spent between a `get` and the next."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event | Signal] = queue.SimpleQueue()
        self._stopped = False
        self.num_gets = 0
        self.busy_s = 0.0
        self._returned_s: float | None = None  # when `get` last returned

    def clock(self) -> float:
        """Monotonic seconds, the same for all threads of the machine."""
        return time.monotonic()

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def stop(self) -> None:
        """Make `get` return None once it has returned the events put before. Later ones are
        lost."""
        self._queue.put(Signal.STOP)

    def wake(self) -> None:
        """Make `get` return, if need be without events."""
        self._queue.put(Signal.WAKE)

    def get(self) -> tuple[float, Sequence[Event]] | None:
        """Block until there are events or a wake. Returns the time and all events that wait, or
        None after `stop`."""
        self.num_gets += 1
        if self._returned_s is not None:
            self.busy_s += self.clock() - self._returned_s
        events: list[Event] = []
        woken = False
        while not self._stopped:
            try:
                item = self._queue.get(block=not events and not woken)
            except queue.Empty:
                break
            if item is Signal.STOP:
                self._stopped = True
            elif item is Signal.WAKE:
                woken = True
            else:
                events.append(item)
        self._returned_s = self.clock()
        return (self._returned_s, events) if events or woken else None
