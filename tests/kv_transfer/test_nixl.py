"""NIXL, where it is installed: a peer that can't be joined, and handoffs between processes."""

from __future__ import annotations

import msgspec
import pytest
from transport_ends import READER, WRITER, End, needs_nixl
from worker_processes import Cluster

from counterpoint.disagg.handoff_events import HandoffEnded, HandoffOutcome
from counterpoint.kv_transfer.nixl import NixlPeerInfo, NixlTransport
from counterpoint.kv_transfer.transport import LinkLost, LinkSevered

pytestmark = needs_nixl


def test_a_peer_that_cannot_be_joined_is_lost_and_released():
    writer = End(NixlTransport)
    try:
        info = msgspec.msgpack.decode(writer.blob, type=NixlPeerInfo)
        nonsense = msgspec.structs.replace(info, agent=b"nonsense")
        writer.transport.connect(WRITER, READER, msgspec.msgpack.encode(nonsense), True)
        writer.wait(lambda notice: isinstance(notice, LinkLost) and notice.link == WRITER)
        writer.transport.disconnect(WRITER)
        writer.wait(lambda notice: notice == LinkSevered(WRITER))
    finally:
        writer.transport.close()


@pytest.mark.parametrize("kind", ["nixl", "cut nixl"])
def test_answers_are_whole_over_nixl(kind: str):
    cluster = Cluster(kind)
    ids = [f"r{number}" for number in range(6)]
    for number, id in enumerate(ids):
        cluster.submit(id, tokens=5 + 7 * number % 40)
    cluster.until(lambda: all(cluster.ended(id) for id in ids))
    for id in ids:
        cluster.check_answer(id)
    assert cluster.said("d", HandoffEnded, outcome=HandoffOutcome.ADOPTED)
    cluster.at_rest()
    cluster.close()
