"""The soaks, short: their scripts (soak_aborts.py, soak_hostile.py) run the same for longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from serve_process import Running
from soak_aborts import POLICIES, soak
from soak_hostile import Attack

pytestmark = pytest.mark.slow

MOST_GROWN_BYTES = 48 << 20


@pytest.mark.parametrize("policy", POLICIES)
def test_mixed_requests_a_third_aborted(own_server: Callable[..., Running], policy: str):
    server = own_server(system="fake_engine:two_lane_system", policy=policy).wait_ready()
    seen = soak(server, 120, seed=7, longest=800, longest_answer=120, model=False)
    assert not seen.faults(MOST_GROWN_BYTES)
    assert seen.whole > 40 and seen.left > 10, "both kinds were there"
    assert server.stop() == 0


def test_hostile_requests(own_server: Callable[..., Running]):
    server = own_server(system="fake_engine:two_lane_system").wait_ready()
    seen = asyncio.run(Attack(server, seed=7).run(400))
    assert not seen.faults
    assert seen.statuses["200"] > 10 and seen.statuses["400"] > 100
    assert server.stop() == 0
