"""How long the engine's thread is busy, and how much of that is launching steps.

Commands pass through unchanged. Must not: wrap an executor whose serving is not being measured.
"""

from __future__ import annotations

from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.interfaces import Executor
from counterpoint.types import Command, Step


class Stopwatch:
    """An Executor around `inner`, fed by a loop over `inbox`."""

    def __init__(self, inner: Executor, inbox: WallClockEventQueue) -> None:
        self.inner = inner
        self.inbox = inbox
        self._launches: dict[str, list[float]] = {}
        self._others_s = 0.0

    def submit(self, command: Command) -> None:
        began_s = self.inbox.clock()
        self.inner.submit(command)
        took_s = self.inbox.clock() - began_s
        if isinstance(command, Step):
            self._launches.setdefault(command.work.kind, []).append(took_s)
        else:
            self._others_s += took_s

    def close(self) -> None:
        self.inner.close()

    def summarise(self) -> dict[str, object]:
        """Seconds of the loop's turns: in total (`busy_s`), in launching steps by kind, with the
        longest (one that waits for the device takes as long as the running step), and `turn_ms`:
        the mean rest of a turn (events, decisions, answers)."""
        inbox, launches = self.inbox, sorted(self._launches.items())
        launching_s = self._others_s + sum(sum(took) for _, took in launches)
        return {
            "turns": inbox.num_gets,
            "busy_s": inbox.busy_s,
            "launch": {
                kind: {"steps": len(took), "seconds": sum(took), "longest_s": max(took)}
                for kind, took in launches
            },
            "turn_ms": 1e3 * (inbox.busy_s - launching_s) / max(1, inbox.num_gets),
        }
