"""Admission, order and preemption when pages are scarce."""

from __future__ import annotations

import itertools

import pytest
from engine_harness import POLICIES, make_harness

from counterpoint.types import (
    FinishReason,
)


@pytest.mark.parametrize("name", POLICIES)
def test_more_requests_than_pages(name):
    h = make_harness(name, pages=20)
    for i in range(12):
        h.arrive(f"r{i}", [i] * (5 + 3 * i % 17), max_tokens=20)
    h.drain()
    h.check_answers()
    assert all(end.finish_reason is FinishReason.LENGTH for end in h.ends.values())


def test_preemptions_are_bounded():
    limit = 2
    h = make_harness("chunked", pages=24, max_preemptions=limit)
    for i in range(8):
        h.arrive(f"r{i}", [i] * 8, max_tokens=80)
    h.drain()
    h.check_answers()
    assert 0 < max(r.preemptions for r in h.records.values()) <= limit


def test_the_oldest_is_never_preempted():
    h = make_harness("chunked", pages=24)
    for i in range(8):
        h.arrive(f"r{i}", [i] * 8, max_tokens=80)
    h.drain()
    assert h.records["r0"].preemptions == 0


def test_small_requests_pass_a_large_one_for_a_bounded_time():
    h = make_harness("chunked", pages=30, max_bypass_s=50.0)
    h.arrive("running", [1] * 60, max_tokens=40)
    h.arrive("large", [2] * 80, max_tokens=4)
    for i in range(200):
        h.arrive(f"small{i}", [3, i % 50, i // 50], max_tokens=2)
        h.step()
    h.drain()
    h.check_answers()
    order = sorted(h.records.values(), key=lambda r: r.admitted_s)
    small_before = [r.id for r in itertools.takewhile(lambda r: r.id != "large", order)]
    assert "small0" in small_before, "a small one did not pass"
    assert "small199" not in small_before, "the large one starved"


def test_priority_goes_first():
    h = make_harness("chunked", max_running=1)
    h.arrive("now", range(5))
    h.arrive("low", range(5), priority=-1)
    h.arrive("high", range(6), priority=5)
    h.drain()
    assert h.records["high"].admitted_s < h.records["low"].admitted_s
