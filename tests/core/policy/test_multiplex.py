"""Multiplex."""

from __future__ import annotations

import pytest
from engine_harness import make_harness, make_test_policy


def test_multiplex_runs_both_lanes_at_once_and_gives_the_device_back():
    h = make_harness("multiplex", layer_group=1)
    h.arrive("a", range(5), max_tokens=30)
    assert h.device.queue[1][0].units == 4, "prefill alone has the whole device"
    while not h.got.get("a"):
        h.step()
    assert h.device.queue[0][0].units == 4, "decode alone has the whole device"
    h.arrive("b", range(60, 100), max_tokens=2)
    h.step()
    assert {lane: steps[0].units for lane, steps in h.device.queue.items()} == {0: 2, 1: 2}
    decodes = len(h.got["a"])
    while h.device.busy() == [0, 1] and len(h.got["a"]) < decodes + 10:
        h.step(0)
    assert len(h.got["a"]) >= decodes + 10, "decode went on while the prefill stood still"
    h.drain()
    h.check_answers()
    assert any(p and d for p, d, _ in h.engine.stats().split_s)


def test_multiplex_refuses_a_split_that_leaves_a_lane_empty():
    with pytest.raises(ValueError, match="split is 4"):
        make_test_policy("multiplex", units=4, split=4)
