"""Handoffs between processes over NIXL, where it is installed."""

from __future__ import annotations

import pytest
from worker_processes import Cluster

from counterpoint.disagg.handoff_events import HandoffEnded, HandoffOutcome
from counterpoint.kv_transfer.nixl import load_nixl
from counterpoint.kv_transfer.transport import TransportError


@pytest.mark.parametrize("kind", ["nixl", "cut nixl"])
def test_answers_are_whole_over_nixl(kind: str):
    try:
        load_nixl()
    except TransportError as missing:
        pytest.skip(str(missing))
    cluster = Cluster(kind)
    ids = [f"r{number}" for number in range(6)]
    for number, id in enumerate(ids):
        cluster.submit(id, tokens=5 + 7 * number % 40)
    cluster.wait_until(lambda: all(cluster.ended(id) for id in ids))
    for id in ids:
        cluster.check_answer(id)
    assert cluster.has_reported("d", HandoffEnded, outcome=HandoffOutcome.ADOPTED)
    cluster.wait_for_rest()
    cluster.close()
