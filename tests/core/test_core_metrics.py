"""What the engine counts: where each lane's time went, and its latest steps."""

from __future__ import annotations

import msgspec
import pytest
from engine_harness import Harness, make_harness

from counterpoint.core.metrics import RECENT_STEPS
from counterpoint.core.policy import Chunked, Multiplex
from counterpoint.stats import Stats
from counterpoint.types import BatchShape


def lanes(stats: Stats) -> dict[tuple[str, str], float]:
    return {(role, what): seconds for role, what, seconds in stats.lane_s}


def test_a_lanes_time_is_busy_launching_or_idle_for_a_reason():
    h = Harness(Multiplex(48, 4, 2, layer_group=3))
    h.arrive("a", range(8), max_tokens=3)
    h.drain()
    h.arrive("late", range(50, 58), max_tokens=2)
    h.drain()
    spent = lanes(h.engine.stats())
    whole_s = h.now - 1.0  # since the first event
    for role in ("prefill", "decode"):
        assert sum(
            seconds for (lane, _), seconds in spent.items() if lane == role
        ) == pytest.approx(whole_s)
    assert spent["prefill", "busy"] == pytest.approx(4.0), (
        "two prompts in two layer groups each, a second every time"
    )
    assert spent["decode", "busy"] == pytest.approx(3.0)
    assert set(spent) == {
        ("prefill", "busy"),
        ("prefill", "nothing"),
        ("decode", "busy"),
        ("decode", "nothing"),
    }


def test_time_before_the_device_begins_a_step_is_launch():
    h = Harness(Chunked(48, 4))
    h.arrive("a", range(8), max_tokens=1)
    h.event(h.device.finish(0, h.now + 3.0, took_s=1.0), after_s=3.0)
    assert lanes(h.engine.stats()) == {("both", "busy"): 1.0, ("both", "launch"): 2.0}


def test_a_prefill_lane_without_pages_waits_for_memory():
    h = Harness(Multiplex(48, 4, 2), pages=8)
    h.arrive("long", range(20), max_tokens=8)
    h.arrive("next", range(100, 116), max_tokens=2)
    while h.engine.admission.waiting:
        h.step()
    assert lanes(h.engine.stats())["prefill", "memory"] > 0
    h.drain()


def test_a_lane_without_free_units_waits_for_units():
    """A decode step on the whole device leaves no units for a prompt until it has come back."""
    h = Harness(Multiplex(48, 4, 2))
    h.arrive("a", range(8), max_tokens=4)
    while not h.got.get("a"):
        h.step()
    h.arrive("b", range(20, 28), max_tokens=1)
    h.step()
    assert lanes(h.engine.stats())["prefill", "units"] == pytest.approx(1.0)
    h.drain()


def test_step_time_is_kept_by_requested_and_actual_units():
    h = Harness(Chunked(48, 4))
    h.arrive("a", range(8), max_tokens=2)
    h.drain()
    assert h.engine.stats().step_s == (("decode", 4, 4, 1.0), ("prefill", 4, 4, 1.0))


def test_active_units_come_from_the_model_unless_the_device_reports_them():
    h = Harness(Chunked(48, 4))
    asked: list[tuple[str, int]] = []

    def active(work: BatchShape, units: int) -> float:
        asked.append((work.kind, units))
        return units / 2

    h.engine.counters.active_units_model = active
    h.arrive("a", range(8), max_tokens=3)
    h.drain()
    assert asked == [("prefill", 4), ("decode", 4), ("decode", 4)]
    assert h.engine.stats().active_unit_s == pytest.approx(3 * 2.0)
    h.arrive("b", range(8), max_tokens=1)
    h.event(
        msgspec.structs.replace(h.device.finish(0, h.now + 1.0, took_s=1.0), active_units=3.0),
        after_s=1.0,
    )
    assert h.engine.stats().active_unit_s == pytest.approx(9.0), "what the device tells goes first"
    assert len(asked) == 3


def test_stats_have_the_running_and_the_recent_steps():
    h = make_harness("multiplex", layer_group=1)
    h.arrive("a", range(5), max_tokens=30)
    while not h.got.get("a"):
        h.step()
    h.arrive("b", range(60, 100), max_tokens=2)
    h.step()
    stats = h.engine.stats()
    assert [(s.lane, s.units, s.prefill_tokens, s.decode_batch) for s in stats.running_steps] == [
        (0, 2, 0, 1),
        (1, 2, 40, 0),
    ]
    assert all(s.started_s == h.now and s.ended_s == 0 for s in stats.running_steps)
    before, launched = stats, [h.device.queue[lane][0] for lane in (0, 1)]
    h.step(1)
    stats = h.engine.stats()
    last = stats.recent_steps[-1]
    assert stats.steps == before.steps + 1 and stats.recent_steps[:-1] == before.recent_steps
    assert (last.lane, last.pass_id, last.units, last.prefill_tokens) == (
        1,
        launched[1].pass_id,
        2,
        40,
    )
    assert (last.started_s, last.ended_s) == (h.now - 1, h.now)
    assert stats.running_steps[0] == before.running_steps[0], "the decode step still runs"
    h.drain()
    assert h.engine.stats().running_steps == ()


def test_recent_steps_are_bounded():
    h = make_harness("serial")
    h.arrive("a", range(5), max_tokens=150)
    h.drain()
    stats = h.engine.stats()
    assert stats.steps == 150 and len(stats.recent_steps) == RECENT_STEPS
    assert [s.ended_s for s in stats.recent_steps] == [
        h.now - i for i in range(RECENT_STEPS - 1, -1, -1)
    ]
