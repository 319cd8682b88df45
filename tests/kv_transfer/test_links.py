"""What every mover promises (device/link/port.py), and what each does its own way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from fake_gpu import FakeGpu

from counterpoint.kv_transfer import cuda_ipc, frames, shm
from counterpoint.kv_transfer.cuda_ipc import CudaIpcTransport
from counterpoint.kv_transfer.local import LocalTransport
from counterpoint.kv_transfer.memory import KvMemory, is_granted, page_mask
from counterpoint.kv_transfer.nixl import NixlPeerInfo as NixlBlob
from counterpoint.kv_transfer.nixl import NixlTransport, load_nixl
from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.kv_transfer.sim import SimNetwork, SimTransport
from counterpoint.kv_transfer.staged import StagedTransport
from counterpoint.kv_transfer.tcp import TcpPeerInfo, TcpTransport
from counterpoint.kv_transfer.transport import (
    Completed,
    LinkLost,
    LinkSevered,
    Notice,
    Quiesced,
    Transport,
    TransportError,
)

PAGES, PAGE_BYTES, REGIONS = 16, 512, 4
WRITER, READER = 1001, 1002  # the link's number at each end


class End:
    """A mover, its pool, and its notices as they come."""

    def __init__(
        self, make: Callable[[Callable[[], None]], Transport], gpu: FakeGpu | None = None
    ) -> None:
        self.bell = threading.Event()
        self.link = make(self.bell.set)
        self.gpu = gpu
        if gpu is not None:
            memory = gpu.allocate(PAGES, PAGE_BYTES, REGIONS)
            self.memory = KvMemory(
                tuple(np.asarray(region) for region in memory.regions), PAGE_BYTES
            )
        elif isinstance(self.link, ShmTransport):
            memory = self.memory = self.link.allocate(PAGES, PAGE_BYTES, REGIONS)
        else:
            memory = self.memory = KvMemory(
                tuple(np.zeros(PAGES * PAGE_BYTES, np.uint8) for _ in range(REGIONS)), PAGE_BYTES
            )
        self.blob = self.link.register(memory)
        self.notices: list[Notice] = []

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for region in self.memory.regions:
            region[:] = rng.integers(1, 255, region.size, np.uint8)

    def look(self) -> list[Notice]:
        self.notices += self.link.poll()
        return self.notices

    def wait(self, want: Callable[[Notice], bool], seconds: float = 10.0) -> Notice:
        """The first notice like that, when it comes."""
        end = time.monotonic() + seconds
        while True:
            self.bell.clear()
            for notice in self.look():
                if want(notice):
                    return notice
            assert time.monotonic() < end, f"only {self.notices}"
            self.bell.wait(0.05)

    def completed(self, op: int) -> Completed:
        notice = self.wait(lambda n: isinstance(n, Completed) and n.op == op)
        assert isinstance(notice, Completed)
        return notice

    def bytes_of(self, page: int) -> list[bytes]:
        return [
            region[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].tobytes()
            for region in self.memory.regions
        ]


class TimedSim(SimTransport):
    """A SimTransport whose network moves when it is looked at."""

    def poll(self) -> list[Notice]:
        self.network.advance(self.network.now + 1)
        return super().poll()


def nixl_words() -> str:
    """Why NIXL can't be used here, or ""."""
    try:
        load_nixl()
    except TransportError as error:
        return str(error)
    return ""


KINDS = (
    "local",
    "shm",
    "tcp",
    "sim",
    "cuda-ipc",
    pytest.param("nixl", marks=pytest.mark.skipif(bool(nixl_words()), reason=nixl_words())),
)


def make_ends(kind: str) -> tuple[End, End]:
    if kind == "local":
        others: dict[str, LocalTransport] = {}
        return End(lambda wake: LocalTransport(wake, "a", others)), End(
            lambda wake: LocalTransport(wake, "b", others)
        )
    if kind == "sim":
        network, names = SimNetwork(checks_grants=True, checksums=True), {}
        return End(lambda _: TimedSim(network, "a", names)), End(
            lambda _: TimedSim(network, "b", names)
        )
    if kind == "nixl":
        return End(NixlTransport), End(NixlTransport)
    if kind == "cuda-ipc":
        gpus = FakeGpu(), FakeGpu()
        return End(lambda wake: CudaIpcTransport(wake, gpus[0]), gpus[0]), End(
            lambda wake: CudaIpcTransport(wake, gpus[1]), gpus[1]
        )
    cls = {"shm": ShmTransport, "tcp": TcpTransport}[kind]
    return End(lambda wake: cls(wake, sums=True)), End(lambda wake: cls(wake, sums=True))


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def ends(kind) -> Iterator[tuple[End, End]]:
    writer, reader = make_ends(kind)
    writer.fill(1)
    reader.link.connect(READER, WRITER, writer.blob, False)
    writer.link.connect(WRITER, READER, reader.blob, True)
    yield writer, reader
    writer.link.close()
    reader.link.close()


def test_bytes_arrive_where_they_should_and_nowhere_else(ends):
    writer, reader = ends
    reader.link.grant(READER, 1, (2, 3, 9))
    spans = writer.memory.spans(1, 2, (5, 6, 7), (2, 3, 9))
    writer.link.write(WRITER, 1, spans, 11)
    assert writer.completed(11).error == ""
    for source, target in ((5, 2), (6, 3), (7, 9)):
        assert reader.bytes_of(target)[2:] == writer.bytes_of(source)[2:]
        assert not any(any(part) for part in reader.bytes_of(target)[:2]), (
            "layer 0 was not asked for"
        )
    untouched = [page for page in range(PAGES) if page not in (2, 3, 9)]
    assert not any(any(part) for page in untouched for part in reader.bytes_of(page))


def test_many_writes_all_complete(ends):
    writer, reader = ends
    reader.link.grant(READER, 1, tuple(range(PAGES)))
    for op in range(50):
        page = op % PAGES
        writer.link.write(
            WRITER, 1, writer.memory.spans(0, REGIONS // 2, (page,), (PAGES - 1 - page,)), op
        )
    assert all(writer.completed(op).error == "" for op in range(50))
    assert all(reader.bytes_of(PAGES - 1 - page) == writer.bytes_of(page) for page in range(PAGES))


def test_pages_that_are_not_granted_are_not_written(ends, kind):
    if kind == "nixl":
        pytest.skip("a NIXL reader can't refuse a write")
    writer, reader = ends
    reader.link.grant(READER, 7, (2, 3))
    wrong = {
        21: (7, (4,)),  # another page
        22: (8, (2,)),  # another generation
        23: (7, (2, 3, 4)),  # one too many
    }
    for op, (generation, pages) in wrong.items():
        writer.link.write(WRITER, generation, writer.memory.spans(0, 1, pages, pages), op)
    for op in wrong:
        assert "not granted" in writer.completed(op).error
    assert not any(any(part) for page in (2, 4) for part in reader.bytes_of(page))


def test_a_revoked_generation_is_not_written(ends, kind):
    if kind == "nixl":
        pytest.skip("a NIXL reader can't refuse a write")
    writer, reader = ends
    reader.link.grant(READER, 1, (2,))
    reader.link.revoke(1)
    writer.link.write(WRITER, 1, writer.memory.spans(0, 2, (2,), (2,)), 5)
    assert "not granted" in writer.completed(5).error
    assert not any(any(part) for part in reader.bytes_of(2))
    if kind not in ("shm", "cuda-ipc"):
        reader.wait(lambda n: n == Quiesced(1))
    else:
        assert Quiesced(1) not in reader.look(), "the reading end of a mapped pool can't prove it"


def test_disconnecting_the_writing_end_is_proven_at_once(ends):
    writer, _ = ends
    writer.link.disconnect(WRITER)
    writer.wait(lambda n: n == LinkSevered(WRITER))


def test_disconnecting_the_reading_end_is_proven_when_the_writer_has_left(ends, kind):
    writer, reader = ends
    reader.link.disconnect(READER)
    if kind in ("shm", "cuda-ipc", "nixl"):
        assert LinkSevered(READER) not in reader.look(), "the writer may be in the middle of a copy"
        writer.link.disconnect(WRITER)
    reader.wait(lambda n: n == LinkSevered(READER))


def test_nothing_lands_behind_severed(ends):
    writer, reader = ends
    reader.link.grant(READER, 1, tuple(range(PAGES)))
    for op in range(20):
        writer.link.write(WRITER, 1, writer.memory.spans(0, 2, range(PAGES), range(PAGES)), op)
    reader.link.revoke(1)
    reader.link.disconnect(READER)
    writer.link.disconnect(WRITER)
    reader.wait(lambda n: n == LinkSevered(READER))
    before = [reader.bytes_of(page) for page in range(PAGES)]
    writer.fill(2)
    time.sleep(0.05)  # time for a late write to show itself; none may
    assert [reader.bytes_of(page) for page in range(PAGES)] == before


def test_a_cancelled_write_completes(ends):
    writer, reader = ends
    reader.link.grant(READER, 1, tuple(range(PAGES)))
    for op in range(10):
        writer.link.write(WRITER, 1, writer.memory.spans(0, 2, range(PAGES), range(PAGES)), op)
    for op in range(10):
        writer.link.cancel(op)
    writer.link.cancel(999)
    assert all(writer.completed(op).error in ("", "cancelled") for op in range(10))


def test_sums_agree_whatever_way_the_spans_were_cut(ends, kind):
    writer, reader = ends
    if kind in ("local", "cuda-ipc", "nixl"):
        pytest.skip("these links do not sum")
    reader.link.grant(READER, 1, (2, 3, 9))
    total = 0
    for op, (sources, targets) in enumerate([((5,), (2,)), ((6, 7), (3, 9))]):
        writer.link.write(WRITER, 1, writer.memory.spans(0, 2, sources, targets), op)
        total += writer.completed(op).checksum
    assert total == reader.memory.checksum(reader.memory.spans(0, 2, (2, 3, 9), (2, 3, 9)))
    reader.memory.regions[3][9 * PAGE_BYTES] ^= 1
    assert total != reader.memory.checksum(reader.memory.spans(0, 2, (2, 3, 9), (2, 3, 9)))


def test_close_leaves_no_thread(kind):
    before = set(threading.enumerate())
    for end in make_ends(kind):
        end.link.close()
    assert set(threading.enumerate()) <= before


# ---------------------------------------------------------------- memory


def test_spans_are_as_few_as_pages_allow():
    memory = KvMemory(tuple(np.zeros(64, np.uint8) for _ in range(4)), 8)
    assert memory.spans(0, 1, (0, 1, 2, 5), (3, 4, 5, 6)).tolist() == [
        [0, 0, 24, 24],
        [0, 40, 48, 8],
        [1, 0, 24, 24],
        [1, 40, 48, 8],
    ]
    assert len(memory.spans(0, 2, (), ())) == 0
    with pytest.raises(ValueError, match="pages of 7 bytes"):
        KvMemory(memory.regions, 7)


OUTSIDE = [
    (0, 0, 8, 8),
    (0, 0, 16, 9),
    (4, 0, 16, 8),
    (-1, 0, 16, 8),
    (0, 0, -8, 8),
    (0, 0, 16, 0),
    (0, 0, 60, 8),
    (0, 0, 1 << 62, 1 << 62),
]


@pytest.mark.parametrize("span", OUTSIDE)
def test_spans_outside_the_grant(span):
    allowed = page_mask((2, 7), 8)
    assert is_granted(np.array([(0, 0, 16, 8), (3, 0, 56, 8), (0, 0, 18, 2)]), 8, 64, 4, allowed)
    assert not is_granted(np.array([(0, 0, 16, 8), span]), 8, 64, 4, allowed)


# ---------------------------------------------------------------- tcp


def test_frames_cover_spans_whatever_their_size(monkeypatch):
    monkeypatch.setattr(frames, "FRAME_BYTES", 100)
    monkeypatch.setattr(frames, "FRAME_SPANS", 4)
    spans = np.array(
        [(0, 7, 9, 30), (1, 0, 0, 250), (0, 900, 950, 100), *[(2, i, i, 1) for i in range(9)]]
    )
    parts = frames.cut(spans)
    assert all(part[:, 3].sum() <= 100 and len(part) <= 4 for part in parts)
    moved = [
        (r, s + i, d + i) for part in parts for r, s, d, size in part.tolist() for i in range(size)
    ]
    assert moved == [(r, s + i, d + i) for r, s, d, size in spans.tolist() for i in range(size)]


def test_a_write_of_many_frames(monkeypatch):
    monkeypatch.setattr(frames, "FRAME_BYTES", 1000)
    writer, reader = make_ends("tcp")
    writer.fill(1)
    reader.link.connect(READER, WRITER, writer.blob, False)
    writer.link.connect(WRITER, READER, reader.blob, True)
    reader.link.grant(READER, 1, tuple(range(PAGES)))
    writer.link.write(WRITER, 1, writer.memory.spans(0, 2, range(PAGES), range(PAGES)), 3)
    assert writer.completed(3).error == ""
    assert [reader.bytes_of(page) for page in range(PAGES)] == [
        writer.bytes_of(page) for page in range(PAGES)
    ]
    writer.link.close()
    reader.link.close()


def stranger(reader: End) -> socket.socket:
    blob = msgspec.msgpack.decode(reader.blob, type=TcpPeerInfo)
    return socket.create_connection((blob.host, blob.port), timeout=5)


def hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def key_of(reader: End) -> bytes:
    return msgspec.msgpack.decode(reader.blob, type=TcpPeerInfo).key


@pytest.mark.parametrize("fault", ["noise", "wrong key", "unknown link", "own link"])
def test_strangers_are_hung_up_on(fault):
    writer, reader = make_ends("tcp")
    reader.link.connect(READER, WRITER, writer.blob, False)
    reader.link.connect(77, 78, writer.blob, True)
    key, link = key_of(reader), READER
    if fault == "wrong key":
        key = bytes(16)
    elif fault != "noise":
        link = 5 if fault == "unknown link" else 77
    hello = (
        b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n"
        if fault == "noise"
        else frames.PREFACE.pack(frames.MAGIC, key, link)
    )
    with stranger(reader) as sock:
        sock.sendall(hello)
        assert hung_up(sock)
    writer.link.close()
    reader.link.close()


@pytest.mark.parametrize(
    "frame",
    [
        frames.FRAME.pack(1, 1, 0, 8),
        frames.FRAME.pack(1, 1, frames.FRAME_SPANS + 1, 8),
        frames.FRAME.pack(1, 1, 1, 1 << 60),
        frames.FRAME.pack(1, 1, 1, 9) + np.array([(0, 1024, 8)], ">i8").tobytes(),
    ],
)
def test_frames_out_of_bounds_end_the_link(frame):
    writer, reader = make_ends("tcp")
    reader.link.connect(READER, WRITER, writer.blob, False)
    reader.link.grant(READER, 1, (2,))
    with stranger(reader) as sock:
        sock.sendall(frames.PREFACE.pack(frames.MAGIC, key_of(reader), READER) + frame)
        assert hung_up(sock)
    reader.wait(lambda n: isinstance(n, LinkLost) and n.link == READER)
    writer.link.close()
    reader.link.close()


def test_offsets_of_a_malicious_writer_are_refused():
    writer, reader = make_ends("tcp")
    reader.link.connect(READER, WRITER, writer.blob, False)
    reader.link.grant(READER, 1, (2,))
    with stranger(reader) as sock:
        sock.sendall(frames.PREFACE.pack(frames.MAGIC, key_of(reader), READER))
        for table in (
            (0, 2 * PAGE_BYTES - 1, 8),
            (9, 2 * PAGE_BYTES, 8),
            (0, -8, 8),
            (0, 3 * PAGE_BYTES - 4, 8),
        ):
            sock.sendall(
                frames.FRAME.pack(1, 6, 1, 8) + np.array([table], ">i8").tobytes() + b"x" * 8
            )
            assert frames.ANSWER.unpack(sock.recv(frames.ANSWER.size)) == (6, 1)
        sock.sendall(
            frames.FRAME.pack(1, 7, 1, 8)
            + np.array([(0, 2 * PAGE_BYTES, 8)], ">i8").tobytes()
            + b"x" * 8
        )
        assert frames.ANSWER.unpack(sock.recv(frames.ANSWER.size)) == (7, 0)
    assert reader.bytes_of(2)[0][:9] == b"x" * 8 + b"\0"
    assert sum(int(region.astype(bool).sum()) for region in reader.memory.regions) == 8
    writer.link.close()
    reader.link.close()


def test_revoking_in_the_middle_of_a_write_is_a_proof():
    """The writer stands still half-way through a page: the rest is thrown away when it comes."""
    writer, reader = make_ends("tcp")
    reader.link.connect(READER, WRITER, writer.blob, False)
    reader.link.grant(READER, 1, (2,))
    with stranger(reader) as sock:
        sock.sendall(frames.PREFACE.pack(frames.MAGIC, key_of(reader), READER))
        sock.sendall(
            frames.FRAME.pack(1, 6, 1, 512)
            + np.array([(0, 1024, 512)], ">i8").tobytes()
            + b"x" * 100
        )
        end = time.monotonic() + 5
        while not reader.memory.regions[0][1024 + 99] and time.monotonic() < end:
            time.sleep(0.001)
        reader.link.revoke(1)
        assert Quiesced(1) in reader.look()
        sock.sendall(b"x" * 412)
        assert frames.ANSWER.unpack(sock.recv(frames.ANSWER.size)) == (6, 1)
    assert reader.bytes_of(2)[0] == b"x" * 100 + bytes(412)
    writer.link.close()
    reader.link.close()


def test_a_peer_that_is_not_there_is_lost():
    writer, reader = make_ends("tcp")
    reader.link.close()
    writer.link.connect(WRITER, READER, reader.blob, True)
    writer.wait(lambda n: isinstance(n, LinkLost) and n.link == WRITER)
    writer.link.close()


# ---------------------------------------------------------------- shm


def test_only_a_shared_pool_can_be_registered():
    link = ShmTransport(lambda: None)
    with pytest.raises(TransportError, match="not in shared memory"):
        link.register(KvMemory((np.zeros(64, np.uint8), np.zeros(64, np.uint8)), 8))


def test_an_address_of_another_machine_is_refused():
    link = TcpTransport(lambda: None, "192.0.2.1")  # of documentation (RFC 5737)
    with pytest.raises(TransportError, match=r"192\.0\.2\.1.*cluster_host"):
        link.register(KvMemory((np.zeros(64, np.uint8), np.zeros(64, np.uint8)), 8))
    link.close()


@pytest.mark.skipif(bool(nixl_words()), reason=nixl_words())
def test_a_peer_that_nixl_cannot_join_is_lost_and_let_go():
    writer = End(NixlTransport)
    try:
        nonsense = msgspec.structs.replace(
            msgspec.msgpack.decode(writer.blob, type=NixlBlob), agent=b"nonsense"
        )
        writer.link.connect(WRITER, READER, msgspec.msgpack.encode(nonsense), True)
        writer.wait(lambda notice: isinstance(notice, LinkLost) and notice.link == WRITER)
        writer.link.disconnect(WRITER)
        writer.wait(lambda notice: notice == LinkSevered(WRITER))
    finally:
        writer.link.close()


def test_a_pool_with_another_key_is_not_written():
    writer, reader = make_ends("shm")
    blob = msgspec.msgpack.decode(reader.blob, type=shm.ShmPeerInfo)
    for wrong in ({"key": bytes(16)}, {"fd": 0}, {"pid": 1 << 22}, {"page_bytes": 256}):
        with pytest.raises(TransportError):
            writer.link.connect(
                WRITER, READER, msgspec.msgpack.encode(msgspec.structs.replace(blob, **wrong)), True
            )
    writer.link.close()
    reader.link.close()


# ---------------------------------------------------------------- GPU memory


@pytest.fixture
def mapped() -> Iterator[tuple[End, End]]:
    writer, reader = make_ends("cuda-ipc")
    writer.fill(1)
    reader.link.connect(READER, WRITER, writer.blob, False)
    writer.link.connect(WRITER, READER, reader.blob, True)
    reader.link.grant(READER, 1, tuple(range(PAGES)))
    yield writer, reader
    for end in (writer, reader):
        assert end.gpu is not None
        end.gpu.running.set()
        end.link.close()


def hold_in_first_piece(writer: End) -> None:
    """Write 5 is begun, and the GPU stands still in its first piece."""
    assert writer.gpu is not None
    writer.gpu.running.clear()
    writer.link.write(WRITER, 1, writer.memory.spans(0, 2, range(PAGES), range(PAGES)), 5)
    assert writer.gpu.begun.wait(10)


def test_a_cancelled_copy_completes_when_nothing_of_it_moves(mapped):
    """Cancelled or not, the write is not over before the piece that is under way."""
    writer, _ = mapped
    hold_in_first_piece(writer)
    writer.link.cancel(5)
    assert not writer.look(), "it said that nothing moves while a copy was under way"
    writer.gpu.running.set()
    assert writer.completed(5).error == "cancelled"
    assert writer.gpu.copies == 1, "it went on after the piece that was under way"


def test_a_link_is_severed_when_its_copy_is_over_and_its_mapping_gone(mapped):
    writer, reader = mapped
    hold_in_first_piece(writer)
    writer.link.disconnect(WRITER)
    reader.link.disconnect(READER)
    writer.link.write(
        WRITER, 1, writer.memory.spans(0, 2, (0,), (0,)), 6
    )  # nobody hears of it any more
    assert not writer.look() and not reader.look(), "severed while a copy was under way"
    writer.gpu.running.set()
    writer.wait(lambda n: n == LinkSevered(WRITER))
    reader.wait(lambda n: n == LinkSevered(READER))
    assert writer.gpu.shut_pools == 1 and writer.gpu.copies == 1
    assert not [notice for notice in writer.notices if isinstance(notice, Completed)]


def test_what_is_revoked_between_two_pieces_is_not_written(mapped):
    writer, reader = mapped
    hold_in_first_piece(writer)
    reader.link.revoke(1)
    writer.gpu.running.set()
    assert "not granted" in writer.completed(5).error
    assert not any(reader.bytes_of(PAGES - 1)[0])


def test_a_pool_of_the_hosts_memory_is_no_gpus():
    with pytest.raises(TransportError, match="not in a GPU"):
        CudaIpcTransport(lambda: None, FakeGpu()).register(
            KvMemory((np.zeros(64, np.uint8), np.zeros(64, np.uint8)), 8)
        )


def test_a_gpus_pool_that_is_gone_or_another_is_refused():
    writer, reader = make_ends("cuda-ipc")
    blob = msgspec.msgpack.decode(reader.blob, type=cuda_ipc.CudaIpcPeerInfo)
    for wrong in (
        {"page_bytes": 256},
        {"regions": 2},
        {"exported": msgspec.msgpack.encode((1 << 22, 3))},
    ):
        with pytest.raises(TransportError):
            writer.link.connect(
                WRITER, READER, msgspec.msgpack.encode(msgspec.structs.replace(blob, **wrong)), True
            )
    writer.link.close()
    reader.link.close()


@pytest.mark.parametrize("inner", ["tcp", "shm"])
def test_staged_pages_are_there_when_their_generation_is_revoked(inner):
    """As the reader does before it uses them (cluster/receiver.py)."""

    def end() -> End:
        gpu = FakeGpu()

        def make(wake: Callable[[], None]) -> StagedTransport:
            if inner == "tcp":
                return StagedTransport(TcpTransport(wake), gpu)
            shared = ShmTransport(wake)
            return StagedTransport(shared, gpu, shared.allocate)

        return End(make, gpu)

    writer, reader = end(), end()
    writer.fill(1)
    reader.link.connect(READER, WRITER, writer.blob, False)
    writer.link.connect(WRITER, READER, reader.blob, True)
    reader.link.grant(READER, 1, (2, 3, 9))
    writer.link.write(WRITER, 1, writer.memory.spans(0, 2, (5, 6, 7), (2, 3, 9)), 11)
    assert writer.completed(11).error == ""
    reader.link.revoke(1)
    assert [reader.bytes_of(page) for page in (2, 3, 9)] == [
        writer.bytes_of(page) for page in (5, 6, 7)
    ]
    assert not any(
        any(part)
        for page in range(PAGES)
        if page not in (2, 3, 9)
        for part in reader.bytes_of(page)
    )
    writer.link.write(WRITER, 1, writer.memory.spans(0, 1, (5,), (4,)), 12)
    assert "not granted" in writer.completed(12).error
    writer.link.close()
    reader.link.close()


# ---------------------------------------------------------------- sim


def test_simulated_time_follows_the_formula():
    network = SimNetwork(bandwidth=1000.0, latency_s=0.5)
    names: dict[str, SimTransport] = {}
    a, b = (SimTransport(network, name, names) for name in "ab")
    for link in (a, b):
        link.register(KvMemory(tuple(np.zeros(8192, np.uint8) for _ in range(2)), 512))
    a.connect(1, 2, b"b", True)
    assert a.memory is not None
    a.write(1, 1, a.memory.spans(0, 1, (0,), (0,)), 1)  # 1024 bytes
    a.write(1, 1, a.memory.spans(0, 1, (1,), (1,)), 2)
    assert network.next_write_s == pytest.approx(0.5 + 1.024)
    network.advance(1.6)
    assert a.poll() == [Completed(1)]
    network.stalled.add(1)
    network.advance(100.0)
    assert a.poll() == [] and network.next_write_s is None
    network.stalled.clear()
    network.advance(100.0)
    assert a.poll() == [Completed(2)]
