"""WallInbox: events on the wall clock.

Owns: the queue between the world's threads and the engine's one. Promises: events come out in the order in which they were put;
the time of a `get` is not before that of any event it returns; what was put before `stop` still comes out.
Must not: look into an event.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from counterpoint.types import Event


class WallInbox:
    """`put` and `stop` from any thread, `get` from one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._stopped = False

    def clock(self) -> float:
        """Seconds since an arbitrary moment, the same for all threads of the machine; never goes back."""
        return time.monotonic()

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def stop(self) -> None:
        """Let `get` return None once the events already put are out. Later ones are not looked at."""
        self._queue.put(None)

    def get(self) -> tuple[float, Sequence[Event]] | None:
        """Block until there are events; the time now and all that wait, or None after `stop`."""
        events: list[Event] = []
        while not self._stopped:
            try:
                event = self._queue.get(block=not events)
            except queue.Empty:
                break
            if event is None:
                self._stopped = True
            else:
                events.append(event)
        return (self.clock(), events) if events else None
