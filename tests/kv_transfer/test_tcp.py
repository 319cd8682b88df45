"""TCP: frames, strangers, and malicious writers."""

from __future__ import annotations

import socket
import time

import msgspec
import numpy as np
import pytest
from transport_ends import PAGE_BYTES, PAGES, READER, WRITER, End, close, connect, make_ends

from counterpoint.kv_transfer import frames
from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.kv_transfer.tcp import TcpPeerInfo, TcpTransport
from counterpoint.kv_transfer.transport import LinkLost, Quiesced, TransportError


def test_frames_cover_spans_whatever_their_size(monkeypatch):
    monkeypatch.setattr(frames, "FRAME_BYTES", 100)
    monkeypatch.setattr(frames, "FRAME_SPANS", 4)
    spans = np.array(
        [(0, 7, 9, 30), (1, 0, 0, 250), (0, 900, 950, 100), *[(2, i, i, 1) for i in range(9)]]
    )
    parts = frames.split_frames(spans)
    assert all(part[:, 3].sum() <= 100 and len(part) <= 4 for part in parts)
    moved = [
        (r, s + i, d + i) for part in parts for r, s, d, size in part.tolist() for i in range(size)
    ]
    assert moved == [(r, s + i, d + i) for r, s, d, size in spans.tolist() for i in range(size)]


def test_a_write_of_many_frames_arrives_whole(monkeypatch):
    monkeypatch.setattr(frames, "FRAME_BYTES", 1000)
    writer, reader = make_ends("tcp")
    connect(writer, reader)
    reader.transport.grant(READER, 1, tuple(range(PAGES)))
    spans = writer.memory.spans(0, 2, range(PAGES), range(PAGES))
    writer.transport.write(WRITER, 1, spans, 3)
    assert writer.completed(3).error == ""
    assert [reader.bytes_of(page) for page in range(PAGES)] == [
        writer.bytes_of(page) for page in range(PAGES)
    ]
    close(writer, reader)


def test_a_peer_that_is_not_there_is_lost():
    writer, reader = make_ends("tcp")
    close(reader)
    writer.transport.connect(WRITER, READER, reader.metadata, True)
    writer.wait(lambda n: isinstance(n, LinkLost) and n.link == WRITER)
    close(writer)


def test_an_address_of_another_machine_is_refused():
    transport = TcpTransport(lambda: None, "192.0.2.1")  # of documentation (RFC 5737)
    with pytest.raises(TransportError, match=r"192\.0\.2\.1.*cluster_host"):
        transport.register(KvMemory((np.zeros(64, np.uint8), np.zeros(64, np.uint8)), 8))
    transport.close()


# ---------------------------------------------------------------- connections made by hand


@pytest.fixture
def ends():
    """Only the reader is connected."""
    writer, reader = make_ends("tcp")
    reader.transport.connect(READER, WRITER, writer.metadata, False)
    yield writer, reader
    close(writer, reader)


def dial(reader: End) -> socket.socket:
    info = msgspec.msgpack.decode(reader.metadata, type=TcpPeerInfo)
    return socket.create_connection((info.host, info.port), timeout=5)


def key_of(reader: End) -> bytes:
    return msgspec.msgpack.decode(reader.metadata, type=TcpPeerInfo).key


def preface(reader: End) -> bytes:
    return frames.PREFACE.pack(frames.MAGIC, key_of(reader), READER)


def table(*spans: tuple[int, int, int]) -> bytes:
    return np.array(spans, ">i8").tobytes()


def was_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def read_ack(sock: socket.socket) -> tuple[int, int]:
    return frames.ACK.unpack(sock.recv(frames.ACK.size))


@pytest.mark.parametrize("fault", ["noise", "wrong key", "unknown link", "own link"])
def test_connections_without_the_key_are_closed(ends, fault):
    writer, reader = ends
    reader.transport.connect(77, 78, writer.metadata, True)
    key, link = key_of(reader), READER
    if fault == "wrong key":
        key = bytes(16)
    elif fault != "noise":
        link = 5 if fault == "unknown link" else 77
    first = frames.PREFACE.pack(frames.MAGIC, key, link)
    if fault == "noise":
        first = b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n"
    with dial(reader) as sock:
        sock.sendall(first)
        assert was_closed(sock)


@pytest.mark.parametrize(
    "frame",
    [
        frames.FRAME.pack(1, 1, 0, 8),
        frames.FRAME.pack(1, 1, frames.FRAME_SPANS + 1, 8),
        frames.FRAME.pack(1, 1, 1, 1 << 60),
        frames.FRAME.pack(1, 1, 1, 9) + table((0, 1024, 8)),
    ],
)
def test_frames_out_of_bounds_end_the_link(ends, frame):
    _, reader = ends
    reader.transport.grant(READER, 1, (2,))
    with dial(reader) as sock:
        sock.sendall(preface(reader) + frame)
        assert was_closed(sock)
    reader.wait(lambda n: isinstance(n, LinkLost) and n.link == READER)


def test_offsets_of_a_malicious_writer_are_refused(ends):
    _, reader = ends
    reader.transport.grant(READER, 1, (2,))
    with dial(reader) as sock:
        sock.sendall(preface(reader))
        for span in (
            (0, 2 * PAGE_BYTES - 1, 8),
            (9, 2 * PAGE_BYTES, 8),
            (0, -8, 8),
            (0, 3 * PAGE_BYTES - 4, 8),
        ):
            sock.sendall(frames.FRAME.pack(1, 6, 1, 8) + table(span) + b"x" * 8)
            assert read_ack(sock) == (6, 1)
        sock.sendall(frames.FRAME.pack(1, 7, 1, 8) + table((0, 2 * PAGE_BYTES, 8)) + b"x" * 8)
        assert read_ack(sock) == (7, 0)
    assert reader.bytes_of(2)[0][:9] == b"x" * 8 + b"\0"
    assert sum(int(region.astype(bool).sum()) for region in reader.memory.regions) == 8


def test_revoking_in_the_middle_of_a_write_is_a_proof(ends):
    """The writer stops half-way through a page; the rest is thrown away when it comes."""
    _, reader = ends
    reader.transport.grant(READER, 1, (2,))
    with dial(reader) as sock:
        sock.sendall(preface(reader))
        sock.sendall(frames.FRAME.pack(1, 6, 1, 512) + table((0, 1024, 512)) + b"x" * 100)
        end = time.monotonic() + 5
        while not reader.memory.regions[0][1024 + 99] and time.monotonic() < end:
            time.sleep(0.001)
        reader.transport.revoke(1)
        assert Quiesced(1) in reader.poll()
        sock.sendall(b"x" * 412)
        assert read_ack(sock) == (6, 1)
    assert reader.bytes_of(2)[0] == b"x" * 100 + bytes(412)
