"""The event queue on the wall clock."""

from __future__ import annotations

import threading

from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.types import Abort


def test_get_returns_all_waiting_events_in_order():
    inbox = WallClockEventQueue()
    for n in range(5):
        inbox.put(Abort(str(n)))
    before = inbox.clock()
    now, events = inbox.get() or (0.0, [])
    assert [event.id for event in events if isinstance(event, Abort)] == ["0", "1", "2", "3", "4"]
    assert before <= now <= inbox.clock()


def test_get_waits_for_another_thread():
    inbox = WallClockEventQueue()
    got = []
    reader = threading.Thread(target=lambda: got.append(inbox.get()))
    reader.start()
    inbox.put(Abort("a"))
    reader.join(30)
    assert not reader.is_alive()
    assert got[0][1] == [Abort("a")]


def test_wake_returns_a_waiting_get_without_events():
    inbox = WallClockEventQueue()
    got = []
    reader = threading.Thread(target=lambda: got.append(inbox.get()))
    reader.start()
    inbox.wake()
    reader.join(30)
    assert got[0][1] == []
    inbox.wake()
    inbox.put(Abort("a"))
    again = inbox.get()
    assert again is not None and again[1] == [Abort("a")]
    assert inbox.num_gets == 2


def test_stop_ends_after_the_events_put_before():
    inbox = WallClockEventQueue()
    inbox.put(Abort("a"))
    inbox.stop()
    inbox.put(Abort("late"))
    got = inbox.get()
    assert got is not None and got[1] == [Abort("a")]
    assert inbox.get() is None
    assert inbox.get() is None


def test_stop_wakes_a_waiting_reader():
    inbox = WallClockEventQueue()
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.append(inbox.get()))
    reader.start()
    inbox.stop()
    reader.join(30)
    assert got == [None]
