"""Pools that the writer maps: shared memory, and GPU memory through a fake GPU."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from fake_gpu import FakeGpu
from transport_ends import PAGES, READER, WRITER, End, close, connect, make_ends

from counterpoint.kv_transfer.cuda_ipc import CudaIpcTransport
from counterpoint.kv_transfer.mapped import MappedPeerInfo
from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.kv_transfer.transport import Completed, LinkSevered, TransportError


def host_pool() -> KvMemory:
    return KvMemory((np.zeros(64, np.uint8), np.zeros(64, np.uint8)), 8)


def connect_wrongly(writer: End, reader: End, fields: dict, grants: dict) -> None:
    """Connect to the reader's pool with these fields of its description replaced."""
    info = msgspec.msgpack.decode(reader.metadata, type=MappedPeerInfo)
    table = msgspec.structs.replace(info.grants, **grants)
    wrong = msgspec.structs.replace(info, grants=table, **fields)
    writer.transport.connect(WRITER, READER, msgspec.msgpack.encode(wrong), True)


# ---------------------------------------------------------------- shared memory


def test_only_a_shared_pool_can_be_registered():
    transport = ShmTransport(lambda: None)
    with pytest.raises(TransportError, match="not in shared memory"):
        transport.register(host_pool())


@pytest.mark.parametrize(
    ("fields", "grants"),
    [
        ({}, {"key": bytes(16)}),
        ({}, {"fd": 0}),
        ({}, {"pid": 1 << 22}),
        ({"page_bytes": 256}, {}),
        ({}, {"data_bytes": 4096}),
    ],
)
def test_a_shared_pool_that_is_another_is_refused(fields, grants):
    writer, reader = make_ends("shm")
    with pytest.raises(TransportError):
        connect_wrongly(writer, reader, fields, grants)
    close(writer, reader)


# ---------------------------------------------------------------- GPU memory


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    writer, reader = make_ends("cuda-ipc")
    connect(writer, reader)
    reader.transport.grant(READER, 1, tuple(range(PAGES)))
    yield writer, reader
    for end in (writer, reader):
        assert end.gpu is not None
        end.gpu.running.set()
        end.transport.close()


def hold_in_first_piece(writer: End) -> None:
    """Write 5 has begun, and the GPU stands still in its first piece."""
    assert writer.gpu is not None
    writer.gpu.running.clear()
    spans = writer.memory.spans(0, 2, range(PAGES), range(PAGES))
    writer.transport.write(WRITER, 1, spans, 5)
    assert writer.gpu.begun.wait(10)


def test_a_cancelled_copy_completes_when_none_of_it_moves(ends):
    """Cancelled or not, the write has not ended before the piece that is being copied."""
    writer, _ = ends
    hold_in_first_piece(writer)
    writer.transport.cancel(5)
    assert not writer.poll(), "completed while a copy was under way"
    writer.gpu.running.set()
    assert writer.completed(5).error == "cancelled"
    assert writer.gpu.copies == 1, "it went on after the piece that was under way"


def test_a_link_is_severed_when_its_copy_has_ended_and_its_mapping_is_gone(ends):
    writer, reader = ends
    hold_in_first_piece(writer)
    writer.transport.disconnect(WRITER)
    reader.transport.disconnect(READER)
    # A write after the disconnect gives no notice.
    writer.transport.write(WRITER, 1, writer.memory.spans(0, 2, (0,), (0,)), 6)
    assert not writer.poll() and not reader.poll(), "severed while a copy was under way"
    writer.gpu.running.set()
    writer.wait(lambda n: n == LinkSevered(WRITER))
    reader.wait(lambda n: n == LinkSevered(READER))
    assert writer.gpu.unmapped_pools == 1 and writer.gpu.copies == 1
    assert not [notice for notice in writer.notices if isinstance(notice, Completed)]


def test_what_is_revoked_between_two_pieces_is_not_written(ends):
    writer, reader = ends
    hold_in_first_piece(writer)
    reader.transport.revoke(1)
    writer.gpu.running.set()
    assert "not granted" in writer.completed(5).error
    assert not any(reader.bytes_of(PAGES - 1)[0])


def test_a_pool_in_host_memory_is_refused():
    with pytest.raises(TransportError, match="not in a GPU"):
        CudaIpcTransport(lambda: None, FakeGpu()).register(host_pool())


@pytest.mark.parametrize(
    "fields",
    [
        {"page_bytes": 256},
        {"regions": 2},
        {"exported": msgspec.msgpack.encode((1 << 22, 3))},
    ],
)
def test_a_gpus_pool_that_is_gone_or_another_is_refused(fields):
    writer, reader = make_ends("cuda-ipc")
    with pytest.raises(TransportError):
        connect_wrongly(writer, reader, fields, {})
    close(writer, reader)
