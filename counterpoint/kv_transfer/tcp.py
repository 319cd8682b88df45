"""TcpTransport: KV over plain TCP, with no dependency. The receiver reads straight into its pool.

Owns: a listening socket, the data connections, one I/O thread. Promises: bytes are placed only while their generation is granted to
that very link, and every placement happens under one lock: so `revoke` and `disconnect` are proofs, given at once, even against a
peer that stands still in the middle of a write. A write is complete when the receiver has said that it is in place.
Must not: trust a length, an offset or a connection that does not know this worker's key.
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from counterpoint.kv_transfer.frames import (
    ANSWER,
    BUFFERS,
    FRAME,
    FRAME_BYTES,
    FRAME_SPANS,
    MAGIC,
    PREFACE,
    advance,
    cut,
)
from counterpoint.kv_transfer.ioloop import IoLoop
from counterpoint.kv_transfer.memory import KvMemory, Spans, is_granted, page_mask
from counterpoint.kv_transfer.transport import (
    NOT_GRANTED,
    Completed,
    LinkLost,
    LinkSevered,
    Notice,
    Quiesced,
    TransportError,
    Wake,
)

STRANGERS = 16  # connections that have not shown the key
PREFACE_S = 10.0

log = logging.getLogger(__name__)


class TcpPeerInfo(msgspec.Struct, frozen=True):
    host: str
    port: int
    key: bytes
    pages: int
    page_bytes: int
    regions: int


@dataclass(slots=True, eq=False)
class TcpWrite:
    """This end writes. `frames`: not begun, as (op, generation, spans); `buffers`: of the frame that is being sent; `left`: frames
    of each op that are not answered; `failed`: ops that will end with an error."""

    link: int
    socket: socket.socket
    frames: deque[tuple[int, int, Spans]] = field(default_factory=deque)
    buffers: deque[memoryview] = field(default_factory=deque)
    left: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    answers: bytearray = field(default_factory=bytearray)


@dataclass(slots=True, eq=False)
class TcpRead:
    """The peer writes. `link` is 0 until it has shown the key. `need`: bytes wanted for the next step, gathered in `head`;
    `targets`: where the rest of the frame goes, or None to throw it away."""

    socket: socket.socket
    since_s: float
    link: int = 0
    head: bytearray = field(default_factory=bytearray)
    need: int = PREFACE.size
    frame: tuple[int, int, int, int] | None = None
    targets: deque[memoryview] | None = None
    left_bytes: int = 0
    refused: bool = False
    answers: bytearray = field(default_factory=bytearray)


class TcpTransport:
    """`host`: address to listen on and to be reached at. `sums`: sum what is written, so that the receiver can verify it."""

    kind = "tcp"

    def __init__(self, wake: Wake, host: str = "127.0.0.1", checksums: bool = False) -> None:
        self._wake = wake
        self._host = host
        self._sums = checksums
        self._key = secrets.token_bytes(16)
        self._memory: KvMemory | None = None
        self._views: list[memoryview] = []
        self._lock = threading.Lock()
        self._notices: list[Notice] = []
        self._readable: set[int] = set()  # links on which the peer writes
        self._writing: dict[int, TcpWrite] = {}
        self._reading: set[TcpRead] = set()
        self._grants: dict[int, tuple[int, NDArray[np.bool_]]] = {}  # generation -> link, pages
        self._loop = IoLoop(self._lock)

    # ------------------------------------------------------------ the interface (port.py)

    def register(self, memory: KvMemory) -> bytes:
        self._memory = memory
        self._views = [region.data for region in memory.regions]
        try:
            listener = socket.create_server((self._host, 0), backlog=64)
        except OSError as error:
            hint = "set cluster_host to an address of this machine"
            raise TransportError(
                f"nobody can listen at {self._host}: {error.strerror}; {hint}"
            ) from None
        listener.setblocking(False)
        self._loop.add(listener, selectors.EVENT_READ, lambda _: self._accept(listener))
        self._loop.start()
        blob = TcpPeerInfo(
            self._host,
            listener.getsockname()[1],
            self._key,
            memory.pages,
            memory.page_bytes,
            len(memory.regions),
        )
        return msgspec.msgpack.encode(blob)

    def connect(self, link: int, remote: int, blob: bytes, writes: bool) -> None:
        peer = msgspec.msgpack.decode(blob, type=TcpPeerInfo)
        assert self._memory is not None
        if len(self._memory.regions) != peer.regions:
            raise TransportError(
                f"the peer's pool has {peer.regions} regions, this one {len(self._memory.regions)}"
            )
        with self._lock:
            if not writes:
                self._readable.add(link)
                return
            sock = socket.socket(
                socket.AF_INET6 if ":" in peer.host else socket.AF_INET, socket.SOCK_STREAM
            )
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            error = sock.connect_ex((peer.host, peer.port))
            writing = TcpWrite(link, sock)
            writing.buffers.append(memoryview(PREFACE.pack(MAGIC, peer.key, remote)))
            self._writing[link] = writing
            if error in (0, errno.EINPROGRESS):
                self._loop.add(
                    sock,
                    selectors.EVENT_READ | selectors.EVENT_WRITE,
                    lambda events: self._write_on(writing, events),
                )
            else:
                self._lose(link, OSError(error, "connect"))

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        assert self._memory is not None
        with self._lock:
            self._grants[generation] = (link, page_mask(pages, self._memory.pages))

    def revoke(self, generation: int) -> None:
        with self._lock:
            self._grants.pop(generation, None)
            self._notice(Quiesced(generation))

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        with self._lock:
            writing = self._writing.get(link)
            if writing is None:
                return
            frames = cut(spans)
            writing.left[op] = len(frames)
            if not frames:
                self._answered(writing, op, "")
            if self._sums and self._memory is not None:
                writing.sums[op] = self._memory.checksum(spans)
            writing.frames.extend((op, generation, frame) for frame in frames)
            self._loop.wants_write(writing.socket)

    def cancel(self, op: int) -> None:
        with self._lock:
            for writing in self._writing.values():
                waiting = sum(1 for frame in writing.frames if frame[0] == op)
                if op in writing.left and waiting:
                    writing.frames = deque(frame for frame in writing.frames if frame[0] != op)
                    writing.failed[op] = "cancelled"
                    writing.left[op] -= waiting
                    if not writing.left[op]:
                        self._finish(writing, op)

    def disconnect(self, link: int) -> None:
        with self._lock:
            self._readable.discard(link)
            writing = self._writing.pop(link, None)
            if writing is not None:
                self._loop.remove(writing.socket)
            for reading in [r for r in self._reading if r.link == link]:
                self._hang_up(reading)
            self._grants = {g: grant for g, grant in self._grants.items() if grant[0] != link}
            self._notice(LinkSevered(link))

    def poll(self) -> list[Notice]:
        with self._lock:
            notices, self._notices = self._notices, []
            return notices

    def close(self) -> None:
        self._loop.close()

    # ------------------------------------------------------------ writing (all under the lock)

    def _write_on(self, writing: TcpWrite, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(writing)
            if events & selectors.EVENT_READ:
                self._take_answers(writing)
        except OSError as error:
            self._lose(writing.link, error)

    def _send(self, writing: TcpWrite) -> None:
        if not writing.buffers and writing.frames:
            self._begin_frame(writing, *writing.frames.popleft())
        if not writing.buffers:
            self._loop.wants_write(writing.socket, False)
            return
        try:
            sent = writing.socket.sendmsg(
                [writing.buffers[i] for i in range(min(BUFFERS, len(writing.buffers)))]
            )
        except BlockingIOError:
            return
        advance(writing.buffers, sent)

    def _begin_frame(self, writing: TcpWrite, op: int, generation: int, spans: Spans) -> None:
        table = np.ascontiguousarray(spans[:, [0, 2, 3]]).astype(">i8").tobytes()
        writing.buffers.append(
            memoryview(FRAME.pack(generation, op, len(spans), int(spans[:, 3].sum())) + table)
        )
        for region, start, size in spans[:, [0, 1, 3]].tolist():
            writing.buffers.append(self._views[region][start : start + size])

    def _take_answers(self, writing: TcpWrite) -> None:
        try:
            data = writing.socket.recv(ANSWER.size * 256)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        writing.answers += data
        whole = len(writing.answers) // ANSWER.size * ANSWER.size
        for op, status in ANSWER.iter_unpack(bytes(writing.answers[:whole])):
            self._answered(writing, op, NOT_GRANTED if status else "")
        del writing.answers[:whole]

    def _answered(self, writing: TcpWrite, op: int, error: str) -> None:
        if op not in writing.left:
            return
        if error:
            writing.failed.setdefault(op, error)
        writing.left[op] = max(0, writing.left[op] - 1)
        if not writing.left[op]:
            self._finish(writing, op)

    def _finish(self, writing: TcpWrite, op: int) -> None:
        del writing.left[op]
        error, checksum = writing.failed.pop(op, ""), writing.sums.pop(op, None)
        self._notice(Completed(op, error, None if error else checksum))

    def _lose(self, link: int, error: OSError) -> None:
        writing = self._writing.get(link)
        if writing is not None:
            self._loop.remove(writing.socket)
            writing.frames.clear()
        self._notice(LinkLost(link, str(error)))

    # ------------------------------------------------------------ reading (all under the lock)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        now = time.monotonic()
        for stale in [r for r in self._reading if not r.link and now > r.since_s + PREFACE_S]:
            self._hang_up(stale)
        if sum(1 for r in self._reading if not r.link) >= STRANGERS:
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reading = TcpRead(sock, now)
        self._reading.add(reading)
        self._loop.add(sock, selectors.EVENT_READ, lambda events: self._read_on(reading, events))

    def _hang_up(self, reading: TcpRead) -> None:
        self._reading.discard(reading)
        self._loop.remove(reading.socket)

    def _read_on(self, reading: TcpRead, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._answer(reading)
            if events & selectors.EVENT_READ:
                if reading.left_bytes:
                    self._read_bytes(reading)
                else:
                    self._read_head(reading)
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, ValueError) as error:
            self._hang_up(reading)
            if reading.link:
                self._notice(LinkLost(reading.link, str(error)))
            else:
                log.warning("a connection to the KV port was refused: %s", error)

    def _read_head(self, reading: TcpRead) -> None:
        data = reading.socket.recv(reading.need - len(reading.head))
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        reading.head += data
        if len(reading.head) < reading.need:
            return
        head, reading.head = bytes(reading.head), bytearray()
        if not reading.link:
            self._greet(reading, head)
        elif reading.frame is None:
            reading.frame = FRAME.unpack(head)
            spans, size = reading.frame[2:]
            if not 0 < spans <= FRAME_SPANS or not 0 < size <= FRAME_BYTES:
                raise ValueError(f"a frame of {spans} spans and {size} bytes is out of bounds")
            reading.need = 24 * spans
        else:
            self._begin_bytes(reading, np.frombuffer(head, ">i8").reshape(-1, 3).astype(np.int64))

    def _greet(self, reading: TcpRead, head: bytes) -> None:
        magic, key, link = PREFACE.unpack(head)
        known = link in self._readable and all(other.link != link for other in self._reading)
        if magic != MAGIC or not hmac.compare_digest(key, self._key) or not known:
            raise ValueError("it does not have this worker's key, or names no link of it")
        reading.link, reading.need = link, FRAME.size

    def _begin_bytes(self, reading: TcpRead, table: Spans) -> None:
        assert reading.frame is not None and self._memory is not None
        generation, _, _, size = reading.frame
        spans = np.insert(table, 1, 0, axis=1)
        if int(table[:, 2].sum()) != size:
            raise ValueError("a frame's spans do not add up to its bytes")
        reading.left_bytes = size
        reading.targets = deque()
        link, allowed = self._grants.get(generation, (0, None))
        memory = self._memory
        reading.refused = (
            allowed is None
            or link != reading.link
            or not is_granted(
                spans, memory.page_bytes, memory.regions[0].nbytes, len(memory.regions), allowed
            )
        )
        if not reading.refused:
            for region, start, length in table.tolist():
                reading.targets.append(self._views[region][start : start + length])

    def _read_bytes(self, reading: TcpRead) -> None:
        """Place what has come, if the generation is still granted; else throw it away."""
        assert reading.frame is not None and reading.targets is not None
        if not reading.refused and reading.frame[0] not in self._grants:
            reading.refused = True
            reading.targets.clear()
        if reading.refused:
            got = len(reading.socket.recv(min(reading.left_bytes, 1 << 18)))
        else:
            got = reading.socket.recvmsg_into(
                [reading.targets[i] for i in range(min(BUFFERS, len(reading.targets)))]
            )[0]
            advance(reading.targets, got)
        if not got:
            raise ConnectionResetError("the peer closed the connection in the middle of a write")
        reading.left_bytes -= got
        if not reading.left_bytes:
            reading.answers += ANSWER.pack(reading.frame[1], reading.refused)
            reading.frame, reading.targets, reading.need = None, None, FRAME.size
            self._answer(reading)

    def _answer(self, reading: TcpRead) -> None:
        try:
            sent = reading.socket.send(reading.answers) if reading.answers else 0
        except BlockingIOError:
            sent = 0
        del reading.answers[:sent]
        self._loop.wants_write(reading.socket, bool(reading.answers))

    def _notice(self, notice: Notice) -> None:
        self._notices.append(notice)
        self._wake()
