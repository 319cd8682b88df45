"""KV of GPUs through host memory, with a fake GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_gpu import FakeGpu
from transport_ends import PAGES, READER, WRITER, End, close, connect

from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.kv_transfer.staged import StagedTransport
from counterpoint.kv_transfer.tcp import TcpTransport


def make_end(inner: str) -> End:
    gpu = FakeGpu()

    def make(wake: Callable[[], None]) -> StagedTransport:
        if inner == "tcp":
            return StagedTransport(TcpTransport(wake), gpu)
        shared = ShmTransport(wake)
        return StagedTransport(shared, gpu, shared.allocate)

    return End(make, gpu)


@pytest.mark.parametrize("inner", ["tcp", "shm"])
def test_pages_are_in_place_when_their_generation_is_revoked(inner):
    """As the reader does before it uses them (disagg/receiver.py)."""
    writer, reader = make_end(inner), make_end(inner)
    connect(writer, reader)
    reader.transport.grant(READER, 1, (2, 3, 9))
    spans = writer.memory.spans(0, 2, (5, 6, 7), (2, 3, 9))
    writer.transport.write(WRITER, 1, spans, 11)
    assert writer.completed(11).error == ""
    reader.transport.revoke(1)
    assert [reader.bytes_of(page) for page in (2, 3, 9)] == [
        writer.bytes_of(page) for page in (5, 6, 7)
    ]
    assert all(reader.is_zero(page) for page in range(PAGES) if page not in (2, 3, 9))
    writer.transport.write(WRITER, 1, writer.memory.spans(0, 1, (5,), (4,)), 12)
    assert "not granted" in writer.completed(12).error
    close(writer, reader)
