"""The virtual clock and the simulated lanes."""

from __future__ import annotations

import pytest
from sim_builders import ByTokens, Constant, init_slot, make_step

from counterpoint.device.sim import FixedLatency, SimExecutor, VirtualEventQueue, simulated_token
from counterpoint.types import Abort, BatchShape, FreeSlot, Segment, StepDone


def drain(inbox: VirtualEventQueue) -> list[tuple[float, list]]:
    turns = []
    while (got := inbox.get()) is not None:
        turns.append((got[0], list(got[1])))
    return turns


# ---------------------------------------------------------------- clock


def test_events_come_at_their_times_together_and_in_order():
    inbox = VirtualEventQueue()
    for at_s, id in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        inbox.post(at_s, Abort(id))
    assert inbox.get() == (1.0, [Abort("a"), Abort("b")])
    assert inbox.get() == (2.0, [Abort("c"), Abort("d")])
    assert inbox.get() is None


def test_an_alarm_that_gives_nothing_is_no_event():
    inbox = VirtualEventQueue()
    inbox.call_at(1.0, lambda: None)
    inbox.call_at(3.0, lambda: Abort("late"))
    assert inbox.get() == (3.0, [Abort("late")])
    inbox.call_at(4.0, lambda: None)
    assert inbox.get() is None


def test_one_thing_happens_at_a_time_where_clocks_are_joined():
    """The host is busy until 3: what comes till then is told it together, but alarms keep their
    times."""
    inbox, at = VirtualEventQueue(), []
    inbox.post(1.0, Abort("a"))
    inbox.call_at(2.0, lambda: at.append(inbox.now))
    inbox.post(2.5, Abort("b"))
    inbox.occupy_host(3.0)
    seen = []
    while inbox.next_event_s < float("inf"):
        seen.append((inbox.next_event_s, inbox.advance()))
    assert seen == [(1.0, None), (2.0, None), (2.5, None), (3.0, (3.0, [Abort("a"), Abort("b")]))]
    assert at == [2.0]


def test_the_past_is_closed():
    inbox = VirtualEventQueue()
    inbox.post(5.0, Abort("a"))
    inbox.get()
    with pytest.raises(ValueError, match="too late"):
        inbox.post(4.0, Abort("b"))


# ---------------------------------------------------------------- lanes


def device(physics, host_s: float = 0.0) -> tuple[VirtualEventQueue, SimExecutor]:
    inbox = VirtualEventQueue()
    executor = SimExecutor(physics, inbox, layers=4, host=FixedLatency(host_s))
    for slot in range(4):
        executor.submit(init_slot(slot, seed=slot))
    return inbox, executor


def spans(turns) -> dict[int, tuple[float, float]]:
    return {
        e.step: (e.started_s, e.ended_s)
        for _, events in turns
        for e in events
        if isinstance(e, StepDone)
    }


def test_steps_of_a_lane_run_one_after_the_other():
    inbox, executor = device(ByTokens())
    executor.submit(make_step(1, Segment(0, 0, 3, False)))
    executor.submit(make_step(2, Segment(1, 0, 2, False)))
    turns = drain(inbox)
    assert spans(turns) == {1: (0.0, 3.0), 2: (3.0, 5.0)}
    assert [now for now, _ in turns] == [3.0, 5.0]
    assert turns[0][1][0].units == 2


def test_a_neighbour_slows_what_overlaps_and_nothing_else():
    """Threefold slower together. A (6 s) runs alone to 2 s, with 4 left; B (2 s) joins: both at a
    third. B needs 6 s, to 8 s, in which A does 2; A's last 2 are alone again."""
    inbox, executor = device(ByTokens())
    executor.submit(make_step(1, Segment(0, 0, 6, False), lane=0))
    inbox.call_at(2.0, lambda: executor.submit(make_step(2, Segment(1, 0, 2, False), lane=1)))
    assert spans(drain(inbox)) == {1: (0.0, pytest.approx(10.0)), 2: (2.0, pytest.approx(8.0))}


def test_a_step_that_follows_at_once_keeps_the_neighbour_slow():
    inbox, executor = device(ByTokens())
    executor.submit(make_step(1, Segment(0, 0, 4, False), lane=0))
    executor.submit(make_step(2, Segment(1, 0, 1, False), lane=1))
    executor.submit(make_step(3, Segment(2, 0, 3, False), lane=1))
    found = spans(drain(inbox))
    assert found[2] == (0.0, pytest.approx(3.0))
    assert found[1] == (0.0, pytest.approx(12.0)) and found[3] == (
        pytest.approx(3.0),
        pytest.approx(12.0),
    )


def test_the_host_is_hidden_behind_a_running_step_and_felt_on_a_dry_lane():
    inbox, executor = device(ByTokens(), host_s=0.5)
    executor.submit(make_step(1, Segment(0, 0, 3, False)))
    executor.submit(make_step(2, Segment(1, 0, 2, False)))
    inbox.call_at(7.0, lambda: executor.submit(make_step(3, Segment(2, 0, 1, False))))
    assert spans(drain(inbox)) == {1: (0.5, 3.5), 2: (3.5, 5.5), 3: (7.5, 8.5)}


class Launches:
    """Steps that take a second to launch, and can start half a second after that began."""

    def seconds(self, work: BatchShape) -> float:
        return 1.0

    def start_s(self, work: BatchShape) -> float:
        return 0.5


def test_what_happens_while_the_host_launches_waits_for_it():
    """Two launches keep the host until 2 s: the first step (of 1 s) has ended at 1.5 s, and the
    loop hears of it at 2 s, together with what was posted meanwhile. What is launched next follows.
    """
    inbox, executor = device(ByTokens())
    executor.host = Launches()
    executor.submit(make_step(1, Segment(0, 0, 1, False)))
    executor.submit(make_step(2, Segment(1, 0, 3, False)))
    inbox.post(1.8, Abort("a"))
    now, events = inbox.get() or (0.0, [])
    assert now == 2.0
    done, abort = events
    assert isinstance(done, StepDone) and abort == Abort("a")
    assert (done.started_s, done.ended_s) == (0.5, 1.5)
    executor.submit(make_step(3, Segment(2, 0, 1, False), lane=1))
    assert spans(drain(inbox))[3][0] == 2.5


def test_a_turn_keeps_the_host_busy():
    inbox = VirtualEventQueue(host_loop_s=0.2)
    inbox.post(1.0, Abort("a"))
    inbox.post(1.1, Abort("b"))
    inbox.post(1.5, Abort("c"))
    assert [(now, len(events)) for now, events in drain(inbox)] == [(1.0, 1), (1.2, 1), (1.5, 1)]


def test_three_lanes_slow_each_other():
    inbox, executor = device(Constant(alone_s=1.0, slower=2.0))
    for lane in range(3):
        executor.submit(make_step(lane + 1, Segment(lane, 0, 1, False), lane=lane))
    assert [end for _, end in spans(drain(inbox)).values()] == pytest.approx([4.0, 4.0, 4.0])


def test_only_the_last_layers_sample_and_the_tokens_are_those_of_the_request():
    inbox, executor = device(Constant())
    segments = Segment(0, 0, 8, True), Segment(3, 0, 4, False), Segment(2, 0, 8, True)
    executor.submit(make_step(1, *segments, batch=1, layers=(0, 2)))
    executor.submit(make_step(2, *segments, batch=1, layers=(2, 4)))
    first, second = (events[0] for _, events in drain(inbox))
    assert first.tokens == ()
    assert second.tokens == (simulated_token(0, 8), simulated_token(2, 8))


def test_fake_tokens_are_ordinary_and_differ():
    tokens = [simulated_token(seed, position) for seed in range(50) for position in range(200)]
    assert min(tokens) >= 1000 and max(tokens) < 30_000
    assert len(set(tokens)) > 5_000


def test_a_closed_slot_is_forgotten():
    inbox, executor = device(Constant())
    executor.submit(FreeSlot(0))
    executor.submit(make_step(1, Segment(0, 0, 8, True)))
    with pytest.raises(KeyError):
        drain(inbox)
