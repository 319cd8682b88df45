"""NIXL, where it is installed: a peer that can't be joined."""

from __future__ import annotations

import msgspec
from transport_ends import READER, WRITER, End, needs_nixl

from counterpoint.kv_transfer.nixl import NixlPeerInfo, NixlTransport
from counterpoint.kv_transfer.transport import LinkLost, LinkSevered

pytestmark = needs_nixl


def test_a_peer_that_cannot_be_joined_is_lost_and_released():
    writer = End(NixlTransport)
    try:
        info = msgspec.msgpack.decode(writer.metadata, type=NixlPeerInfo)
        nonsense = msgspec.structs.replace(info, agent=b"nonsense")
        writer.transport.connect(WRITER, READER, msgspec.msgpack.encode(nonsense), True)
        writer.wait(lambda notice: isinstance(notice, LinkLost) and notice.link == WRITER)
        writer.transport.disconnect(WRITER)
        writer.wait(lambda notice: notice == LinkSevered(WRITER))
    finally:
        writer.transport.close()
