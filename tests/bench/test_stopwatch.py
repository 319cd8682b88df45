"""How the time of the engine's thread is divided."""

from __future__ import annotations

import pytest

from counterpoint.bench.stopwatch import Stopwatch
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.types import Abort, BatchShape, Command, FreeSlot, Segment, Step


class Hands(WallClockEventQueue):
    """A clock that is moved by hand."""

    now = 0.0

    def clock(self) -> float:
        return self.now


class Slow:
    """A first step takes 0.2 s to launch, later ones 0.4 s, any other command 0.1 s."""

    def __init__(self, inbox: Hands) -> None:
        self.inbox = inbox
        self.seen: list[Command] = []

    def submit(self, command: Command) -> None:
        again = command in self.seen
        self.seen.append(command)
        self.inbox.now += (0.4 if again else 0.2) if isinstance(command, Step) else 0.1

    def close(self) -> None:
        pass


def test_turns_are_split_into_launches_and_the_rest():
    inbox = Hands()
    slow = Slow(inbox)
    watch = Stopwatch(slow, inbox)
    step = Step(
        1,
        0,
        1,
        0,
        1,
        2,
        (Segment(0, 0, 4, False),),
        BatchShape(4, 16, 0, 1, last_layer=1, layers=1),
    )
    for _ in range(2):
        inbox.put(Abort("a"))
        inbox.get()
        inbox.now += 0.05  # deciding
        watch.submit(step)
        watch.submit(FreeSlot(0))
    inbox.wake()
    inbox.get()
    inbox.now += 7.0  # nobody has asked for more yet
    told = watch.summarise()
    assert slow.seen == [step, FreeSlot(0)] * 2
    assert told["turns"] == 3
    assert told["busy_s"] == pytest.approx(0.9)
    assert told["launch"] == {
        "prefill": {"steps": 2, "seconds": pytest.approx(0.6), "longest_s": pytest.approx(0.4)}
    }
    assert told["turn_ms"] == pytest.approx(1e3 * 0.1 / 3)
