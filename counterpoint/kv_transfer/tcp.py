"""TcpTransport: KV over plain TCP, with no dependency. The receiver reads straight into its pool.

Owns: the connections on which this end writes, and one I/O thread. tcp_receiver.py has those on
which peers write.
Promises: a write is complete when the receiver has acknowledged all of its frames. `revoke` and
`disconnect` are proven at once, since bytes are placed under one lock, even if a peer stops in the
middle of a write.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from counterpoint.kv_transfer.frames import (
    ACK,
    FRAME,
    MAGIC,
    MAX_BUFFERS,
    PREFACE,
    drop_bytes,
    split_frames,
)
from counterpoint.kv_transfer.ioloop import IoLoop
from counterpoint.kv_transfer.memory import KvMemory, Spans
from counterpoint.kv_transfer.tcp_receiver import TcpReceiver
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


class TcpPeerInfo(msgspec.Struct, frozen=True):
    """Where a worker listens, the key that it wants to see, and its pool."""

    host: str
    port: int
    key: bytes
    pages: int
    page_bytes: int
    regions: int


@dataclass(slots=True, eq=False)
class TcpWriter:
    """A connection on which this end writes. `frames`: not begun, as (op, generation, spans);
    `buffers`: the rest of the frame that is being sent; `unacked`: frames of each op without an
    ack; `errors`: of ops that will fail; `acks`: bytes of an incomplete ack."""

    link: int
    socket: socket.socket
    frames: deque[tuple[int, int, Spans]] = field(default_factory=deque)
    buffers: deque[memoryview] = field(default_factory=deque)
    unacked: dict[int, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)
    acks: bytearray = field(default_factory=bytearray)


class TcpTransport:
    """`host`: address to listen on and to be reached at. `checksums`: compute those of what is
    written, so that the receiver can verify it."""

    kind = "tcp"

    def __init__(self, wake: Wake, host: str = "127.0.0.1", checksums: bool = False) -> None:
        self._wake = wake
        self._host = host
        self._checksums = checksums
        self._memory: KvMemory | None = None
        self._views: list[memoryview] = []
        self._lock = threading.Lock()
        self._notices: list[Notice] = []
        self._writers: dict[int, TcpWriter] = {}
        self._loop = IoLoop(self._lock)
        self._receiver = TcpReceiver(self._loop, self._notify)

    # ------------------------------------------------------------ the interface (transport.py)

    def register(self, memory: KvMemory) -> bytes:
        self._memory = memory
        self._views = [region.data for region in memory.regions]
        port = self._receiver.listen(self._host, memory)
        self._loop.start()
        info = TcpPeerInfo(
            self._host,
            port,
            self._receiver.key,
            memory.pages,
            memory.page_bytes,
            len(memory.regions),
        )
        return msgspec.msgpack.encode(info)

    def connect(self, link: int, remote: int, metadata: bytes, writes: bool) -> None:
        peer = msgspec.msgpack.decode(metadata, type=TcpPeerInfo)
        assert self._memory is not None
        if len(self._memory.regions) != peer.regions:
            raise TransportError(
                f"the peer's pool has {peer.regions} regions, this one {len(self._memory.regions)}"
            )
        with self._lock:
            if not writes:
                self._receiver.links.add(link)
                return
            family = socket.AF_INET6 if ":" in peer.host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            error = sock.connect_ex((peer.host, peer.port))
            writer = self._writers[link] = TcpWriter(link, sock)
            writer.buffers.append(memoryview(PREFACE.pack(MAGIC, peer.key, remote)))
            if error not in (0, errno.EINPROGRESS):
                self._lose(link, OSError(error, "connect"))
                return
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._loop.add(sock, events, lambda ready: self._on_ready(writer, ready))

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        with self._lock:
            self._receiver.grant(link, generation, pages)

    def revoke(self, generation: int) -> None:
        with self._lock:
            self._receiver.revoke(generation)
            self._notify(Quiesced(generation))

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        with self._lock:
            writer = self._writers.get(link)
            if writer is None:
                return
            frames = split_frames(spans)
            writer.unacked[op] = len(frames)
            if not frames:
                self._on_ack(writer, op, "")
            if self._checksums and self._memory is not None:
                writer.checksums[op] = self._memory.checksum(spans)
            writer.frames.extend((op, generation, frame) for frame in frames)
            self._loop.wants_write(writer.socket)

    def cancel(self, op: int) -> None:
        with self._lock:
            for writer in self._writers.values():
                waiting = sum(1 for frame in writer.frames if frame[0] == op)
                if op in writer.unacked and waiting:
                    writer.frames = deque(frame for frame in writer.frames if frame[0] != op)
                    writer.errors[op] = "cancelled"
                    writer.unacked[op] -= waiting
                    if not writer.unacked[op]:
                        self._finish(writer, op)

    def disconnect(self, link: int) -> None:
        with self._lock:
            writer = self._writers.pop(link, None)
            if writer is not None:
                self._loop.remove(writer.socket)
            self._receiver.disconnect(link)
            self._notify(LinkSevered(link))

    def poll(self) -> list[Notice]:
        with self._lock:
            notices, self._notices = self._notices, []
            return notices

    def close(self) -> None:
        self._loop.close()

    # ------------------------------------------------------------ writing, under the lock

    def _on_ready(self, writer: TcpWriter, ready: int) -> None:
        try:
            if ready & selectors.EVENT_WRITE:
                self._send(writer)
            if ready & selectors.EVENT_READ:
                self._read_acks(writer)
        except OSError as error:
            self._lose(writer.link, error)

    def _send(self, writer: TcpWriter) -> None:
        if not writer.buffers and writer.frames:
            self._begin_frame(writer, *writer.frames.popleft())
        if not writer.buffers:
            self._loop.wants_write(writer.socket, False)
            return
        try:
            sent = writer.socket.sendmsg(
                [writer.buffers[i] for i in range(min(MAX_BUFFERS, len(writer.buffers)))]
            )
        except BlockingIOError:
            return
        drop_bytes(writer.buffers, sent)

    def _begin_frame(self, writer: TcpWriter, op: int, generation: int, spans: Spans) -> None:
        table = np.ascontiguousarray(spans[:, [0, 2, 3]]).astype(">i8").tobytes()
        header = FRAME.pack(generation, op, len(spans), int(spans[:, 3].sum()))
        writer.buffers.append(memoryview(header + table))
        for region, start, size in spans[:, [0, 1, 3]].tolist():
            writer.buffers.append(self._views[region][start : start + size])

    def _read_acks(self, writer: TcpWriter) -> None:
        try:
            data = writer.socket.recv(ACK.size * 256)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        writer.acks += data
        whole = len(writer.acks) // ACK.size * ACK.size
        for op, status in ACK.iter_unpack(bytes(writer.acks[:whole])):
            self._on_ack(writer, op, NOT_GRANTED if status else "")
        del writer.acks[:whole]

    def _on_ack(self, writer: TcpWriter, op: int, error: str) -> None:
        if op not in writer.unacked:
            return
        if error:
            writer.errors.setdefault(op, error)
        writer.unacked[op] = max(0, writer.unacked[op] - 1)
        if not writer.unacked[op]:
            self._finish(writer, op)

    def _finish(self, writer: TcpWriter, op: int) -> None:
        del writer.unacked[op]
        error, checksum = writer.errors.pop(op, ""), writer.checksums.pop(op, None)
        self._notify(Completed(op, error, None if error else checksum))

    def _lose(self, link: int, error: OSError) -> None:
        writer = self._writers.get(link)
        if writer is not None:
            self._loop.remove(writer.socket)
            writer.frames.clear()
        self._notify(LinkLost(link, str(error)))

    def _notify(self, notice: Notice) -> None:
        """Also called by the receiver."""
        self._notices.append(notice)
        self._wake()
