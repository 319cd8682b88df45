"""Handoffs between processes over NIXL, where it is installed."""

from __future__ import annotations

import pytest
from processes import Cluster

from counterpoint.cluster.nouns import Ended, Outcome
from counterpoint.device.link.nixl import load
from counterpoint.device.link.port import LinkError


@pytest.mark.parametrize("kind", ["nixl", "cut nixl"])
def test_answers_are_whole_over_nixl(kind: str):
    try:
        load()
    except LinkError as missing:
        pytest.skip(str(missing))
    cluster = Cluster(kind)
    ids = [f"r{number}" for number in range(6)]
    for number, id in enumerate(ids):
        cluster.submit(id, tokens=5 + 7 * number % 40)
    cluster.until(lambda: all(cluster.ended(id) for id in ids))
    for id in ids:
        cluster.check_answer(id)
    assert cluster.said("d", Ended, outcome=Outcome.ADOPTED)
    cluster.at_rest()
    cluster.close()
