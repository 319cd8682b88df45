"""The promises of the interface (kv_transfer/transport.py), for every kind of transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from transport_ends import (
    KINDS,
    PAGES,
    READER,
    REGIONS,
    WRITER,
    End,
    close,
    connect,
    make_ends,
)

from counterpoint.kv_transfer.transport import LinkSevered, Quiesced

MAPPED = ("shm", "cuda-ipc")
ALL_PAGES = range(PAGES)


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def ends(kind) -> Iterator[tuple[End, End]]:
    writer, reader = make_ends(kind)
    connect(writer, reader)
    yield writer, reader
    close(writer, reader)


def test_bytes_arrive_where_they_should_and_nowhere_else(ends):
    writer, reader = ends
    reader.transport.grant(READER, 1, (2, 3, 9))
    spans = writer.memory.spans(1, 2, (5, 6, 7), (2, 3, 9))
    writer.transport.write(WRITER, 1, spans, 11)
    assert writer.completed(11).error == ""
    for source, target in ((5, 2), (6, 3), (7, 9)):
        assert reader.bytes_of(target)[2:] == writer.bytes_of(source)[2:]
        layer_0 = reader.bytes_of(target)[:2]
        assert not any(any(part) for part in layer_0), "layer 0 was not asked for"
    assert all(reader.is_zero(page) for page in ALL_PAGES if page not in (2, 3, 9))


def test_many_writes_all_complete(ends):
    writer, reader = ends
    reader.transport.grant(READER, 1, tuple(ALL_PAGES))
    for op in range(50):
        page = op % PAGES
        spans = writer.memory.spans(0, REGIONS // 2, (page,), (PAGES - 1 - page,))
        writer.transport.write(WRITER, 1, spans, op)
    assert all(writer.completed(op).error == "" for op in range(50))
    assert all(reader.bytes_of(PAGES - 1 - page) == writer.bytes_of(page) for page in ALL_PAGES)


def test_pages_that_are_not_granted_are_not_written(ends, kind):
    if kind == "nixl":
        pytest.skip("a NIXL reader can't refuse a write")
    writer, reader = ends
    reader.transport.grant(READER, 7, (2, 3))
    wrong = {
        21: (7, (4,)),  # another page
        22: (8, (2,)),  # another generation
        23: (7, (2, 3, 4)),  # one too many
    }
    for op, (generation, pages) in wrong.items():
        spans = writer.memory.spans(0, 1, pages, pages)
        writer.transport.write(WRITER, generation, spans, op)
    for op in wrong:
        assert "not granted" in writer.completed(op).error
    assert reader.is_zero(2) and reader.is_zero(4)


def test_a_revoked_generation_is_not_written(ends, kind):
    if kind == "nixl":
        pytest.skip("a NIXL reader can't refuse a write")
    writer, reader = ends
    reader.transport.grant(READER, 1, (2,))
    reader.transport.revoke(1)
    writer.transport.write(WRITER, 1, writer.memory.spans(0, 2, (2,), (2,)), 5)
    assert "not granted" in writer.completed(5).error
    assert reader.is_zero(2)
    if kind not in MAPPED:
        reader.wait(lambda n: n == Quiesced(1))
    else:
        assert Quiesced(1) not in reader.poll(), "the reading end of a mapped pool can't prove it"


def test_disconnecting_the_writing_end_is_proven_at_once(ends):
    writer, _ = ends
    writer.transport.disconnect(WRITER)
    writer.wait(lambda n: n == LinkSevered(WRITER))


def test_disconnecting_the_reading_end_is_proven_when_the_writer_has_left(ends, kind):
    writer, reader = ends
    reader.transport.disconnect(READER)
    if kind in (*MAPPED, "nixl"):
        assert LinkSevered(READER) not in reader.poll(), "the writer may still be copying"
        writer.transport.disconnect(WRITER)
    reader.wait(lambda n: n == LinkSevered(READER))


def test_nothing_lands_after_the_link_is_severed(ends):
    writer, reader = ends
    reader.transport.grant(READER, 1, tuple(ALL_PAGES))
    for op in range(20):
        spans = writer.memory.spans(0, 2, ALL_PAGES, ALL_PAGES)
        writer.transport.write(WRITER, 1, spans, op)
    reader.transport.revoke(1)
    reader.transport.disconnect(READER)
    writer.transport.disconnect(WRITER)
    reader.wait(lambda n: n == LinkSevered(READER))
    before = [reader.bytes_of(page) for page in ALL_PAGES]
    writer.fill(2)
    time.sleep(0.05)  # time for a late write to show itself; none may
    assert [reader.bytes_of(page) for page in ALL_PAGES] == before


def test_a_cancelled_write_completes(ends):
    writer, reader = ends
    reader.transport.grant(READER, 1, tuple(ALL_PAGES))
    for op in range(10):
        spans = writer.memory.spans(0, 2, ALL_PAGES, ALL_PAGES)
        writer.transport.write(WRITER, 1, spans, op)
    for op in range(10):
        writer.transport.cancel(op)
    writer.transport.cancel(999)
    assert all(writer.completed(op).error in ("", "cancelled") for op in range(10))


def test_checksums_agree_however_the_spans_were_split(ends, kind):
    writer, reader = ends
    if kind in ("local", "cuda-ipc", "nixl"):
        pytest.skip("this transport computes no checksums")
    reader.transport.grant(READER, 1, (2, 3, 9))
    total = 0
    for op, (sources, targets) in enumerate([((5,), (2,)), ((6, 7), (3, 9))]):
        spans = writer.memory.spans(0, 2, sources, targets)
        writer.transport.write(WRITER, 1, spans, op)
        total += writer.completed(op).checksum
    written = reader.memory.spans(0, 2, (2, 3, 9), (2, 3, 9))
    assert total == reader.memory.checksum(written)
    reader.memory.regions[3][reader.memory.page_bytes * 9] ^= 1
    assert total != reader.memory.checksum(written)


def test_close_leaves_no_thread(kind):
    before = set(threading.enumerate())
    close(*make_ends(kind))
    assert set(threading.enumerate()) <= before
