"""WallClockEventQueue: events on the wall clock.

Owns: the queue between the world's threads and the engine's one. Promises: events come out in the order in which they were put;
the time of a `get` is not before that of any event it returns; what was put before `stop` still comes out.
Must not: look into an event.
"""

from __future__ import annotations

import enum
import queue
import time
from collections.abc import Sequence

from counterpoint.types import Event


class Signal(enum.Enum):
    STOP = "stop"
    NUDGE = "nudge"


class WallClockEventQueue:
    """`put`, `nudge` and `stop` from any thread, `get` from one. `turns` counts the calls of `get`: one that does not change though
    the inbox was nudged means that whoever calls `get` is stuck in its turn. `busy_s`: seconds between a `get` and the next."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event | Signal] = queue.SimpleQueue()
        self._stopped = False
        self.num_gets = 0
        self.busy_s = 0.0
        self._left_s: float | None = None

    def clock(self) -> float:
        """Seconds since an arbitrary moment, the same for all threads of the machine; never goes back."""
        return time.monotonic()

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def stop(self) -> None:
        """Let `get` return None once the events already put are out. Later ones are not looked at."""
        self._queue.put(Signal.STOP)

    def wake(self) -> None:
        """Let `get` return, if need be without events."""
        self._queue.put(Signal.NUDGE)

    def get(self) -> tuple[float, Sequence[Event]] | None:
        """Block until there are events or a nudge; the time now and all events that wait, or None after `stop`."""
        self.num_gets += 1
        if self._left_s is not None:
            self.busy_s += self.clock() - self._left_s
        events: list[Event] = []
        nudged = False
        while not self._stopped:
            try:
                item = self._queue.get(block=not events and not nudged)
            except queue.Empty:
                break
            if item is Signal.STOP:
                self._stopped = True
            elif item is Signal.NUDGE:
                nudged = True
            else:
                events.append(item)
        self._left_s = self.clock()
        return (self._left_s, events) if events or nudged else None
