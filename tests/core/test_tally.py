"""What the engine counts: where each lane's time went."""

from __future__ import annotations

import msgspec
import pytest
from engine_harness import Harness

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


def test_what_a_step_waits_on_the_device_is_launch():
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


def test_units_that_others_hold_are_the_reason():
    """A decode lane that has gone to the whole device leaves none for a prompt until its step has come back."""
    h = Harness(Multiplex(48, 4, 2))
    h.arrive("a", range(8), max_tokens=4)
    while not h.got.get("a"):
        h.step()
    h.arrive("b", range(20, 28), max_tokens=1)
    h.step()
    assert lanes(h.engine.stats())["prefill", "units"] == pytest.approx(1.0)
    h.drain()


def test_realised_units_are_told_beside_those_asked_for():
    h = Harness(Chunked(48, 4))
    h.arrive("a", range(8), max_tokens=2)
    h.drain()
    assert h.engine.stats().step_s == (("decode", 4, 4, 1.0), ("prefill", 4, 4, 1.0))


def test_units_at_work_are_modelled_where_the_device_does_not_tell():
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
