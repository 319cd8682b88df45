"""TcpReceiver: the half of a TcpTransport on which peers write.

Owns: the listening socket, the peers' connections, the grants.
Promises: bytes are placed only while their generation is granted to that very link.
Must not: trust a length, an offset, or a connection without this worker's key.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from counterpoint.kv_transfer.frames import (
    ACK,
    FRAME,
    FRAME_BYTES,
    FRAME_SPANS,
    MAGIC,
    MAX_BUFFERS,
    PREFACE,
    drop_bytes,
)
from counterpoint.kv_transfer.ioloop import IoLoop
from counterpoint.kv_transfer.memory import KvMemory, Spans, page_mask
from counterpoint.kv_transfer.transport import LinkLost, Notice, TransportError

MAX_UNAUTHENTICATED = 16  # connections that have not shown the key
PREFACE_TIMEOUT_S = 10.0
DISCARD_BYTES = 1 << 18  # read at once of what is thrown away
CLOSED = "the peer closed the connection"

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TcpReader:
    """A peer's connection. `link` is 0 until it has shown the key. `header`: bytes read of the
    `header_bytes` that come next; `targets`: where the frame's remaining bytes go."""

    socket: socket.socket
    since_s: float
    link: int = 0
    header: bytearray = field(default_factory=bytearray)
    header_bytes: int = PREFACE.size
    frame: tuple[int, int, int, int] | None = None  # as FRAME
    targets: deque[memoryview] = field(default_factory=deque)
    remaining_bytes: int = 0
    refused: bool = False
    acks: bytearray = field(default_factory=bytearray)


class TcpReceiver:
    """The caller holds the lock of `loop` for every method but `listen`. `links`: those on which
    the peer writes."""

    def __init__(self, loop: IoLoop, notify: Callable[[Notice], None]) -> None:
        self.key = secrets.token_bytes(16)
        self.links: set[int] = set()
        self._loop = loop
        self._notify = notify
        self._memory: KvMemory | None = None
        self._views: list[memoryview] = []
        self._readers: set[TcpReader] = set()
        self._grants: dict[int, tuple[int, NDArray[np.bool_]]] = {}  # generation -> link, pages

    def listen(self, host: str, memory: KvMemory) -> int:
        """The port. Before the loop is started."""
        self._memory = memory
        self._views = [region.data for region in memory.regions]
        try:
            listener = socket.create_server((host, 0), backlog=64)
        except OSError as error:
            raise TransportError(
                f"can't listen at {host}: {error.strerror}; "
                "set cluster_host to an address of this machine"
            ) from None
        listener.setblocking(False)
        self._loop.add(listener, selectors.EVENT_READ, lambda _: self._accept(listener))
        return listener.getsockname()[1]

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        assert self._memory is not None
        self._grants[generation] = (link, page_mask(pages, self._memory.pages))

    def revoke(self, generation: int) -> None:
        self._grants.pop(generation, None)

    def disconnect(self, link: int) -> None:
        self.links.discard(link)
        for reader in [reader for reader in self._readers if reader.link == link]:
            self._drop(reader)
        self._grants = {g: grant for g, grant in self._grants.items() if grant[0] != link}

    # ------------------------------------------------------------ connections

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        now = time.monotonic()
        for reader in [r for r in self._readers if not r.link]:
            if now > reader.since_s + PREFACE_TIMEOUT_S:
                self._drop(reader)
        if sum(1 for reader in self._readers if not reader.link) >= MAX_UNAUTHENTICATED:
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = TcpReader(sock, now)
        self._readers.add(reader)
        self._loop.add(sock, selectors.EVENT_READ, lambda ready: self._on_ready(reader, ready))

    def _drop(self, reader: TcpReader) -> None:
        self._readers.discard(reader)
        self._loop.remove(reader.socket)

    def _on_ready(self, reader: TcpReader, ready: int) -> None:
        try:
            if ready & selectors.EVENT_WRITE:
                self._send_acks(reader)
            if ready & selectors.EVENT_READ:
                if reader.remaining_bytes:
                    self._read_bytes(reader)
                else:
                    self._read_header(reader)
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, ValueError) as error:
            self._drop(reader)
            if reader.link:
                self._notify(LinkLost(reader.link, str(error)))
            else:
                log.warning("a connection to the KV port was refused: %s", error)

    # ------------------------------------------------------------ frames

    def _read_header(self, reader: TcpReader) -> None:
        """Of the preface, a frame's head, or its table of spans: what comes next."""
        data = reader.socket.recv(reader.header_bytes - len(reader.header))
        if not data:
            raise ConnectionResetError(CLOSED)
        reader.header += data
        if len(reader.header) < reader.header_bytes:
            return
        header, reader.header = bytes(reader.header), bytearray()
        if not reader.link:
            self._authenticate(reader, header)
        elif reader.frame is None:
            reader.frame = FRAME.unpack(header)
            spans, size = reader.frame[2:]
            if not 0 < spans <= FRAME_SPANS or not 0 < size <= FRAME_BYTES:
                raise ValueError(f"a frame of {spans} spans and {size} bytes is out of bounds")
            reader.header_bytes = 24 * spans
        else:
            table = np.frombuffer(header, ">i8").reshape(-1, 3).astype(np.int64)
            self._begin_bytes(reader, reader.frame, table)

    def _authenticate(self, reader: TcpReader, header: bytes) -> None:
        magic, key, link = PREFACE.unpack(header)
        known = link in self.links and all(other.link != link for other in self._readers)
        if magic != MAGIC or not hmac.compare_digest(key, self.key) or not known:
            raise ValueError("it does not have this worker's key, or names no open link")
        reader.link, reader.header_bytes = link, FRAME.size

    def _begin_bytes(self, reader: TcpReader, frame: tuple[int, ...], table: Spans) -> None:
        memory = self._memory
        assert memory is not None
        generation, _, _, size = frame
        if int(table[:, 2].sum()) != size:
            raise ValueError("a frame's spans do not add up to its bytes")
        reader.remaining_bytes = size
        link, allowed = self._grants.get(generation, (0, None))
        spans = np.insert(table, 1, 0, axis=1)
        reader.refused = (
            allowed is None or link != reader.link or not memory.is_granted(spans, allowed)
        )
        if not reader.refused:
            for region, start, length in table.tolist():
                reader.targets.append(self._views[region][start : start + length])

    def _read_bytes(self, reader: TcpReader) -> None:
        """Place what has come while the generation is granted, else throw it away."""
        assert reader.frame is not None
        if not reader.refused and reader.frame[0] not in self._grants:
            reader.refused = True
            reader.targets.clear()
        if reader.refused:
            got = len(reader.socket.recv(min(reader.remaining_bytes, DISCARD_BYTES)))
        else:
            got = reader.socket.recvmsg_into(
                [reader.targets[i] for i in range(min(MAX_BUFFERS, len(reader.targets)))]
            )[0]
            drop_bytes(reader.targets, got)
        if not got:
            raise ConnectionResetError(f"{CLOSED} in the middle of a write")
        reader.remaining_bytes -= got
        if not reader.remaining_bytes:
            reader.acks += ACK.pack(reader.frame[1], reader.refused)
            reader.frame, reader.header_bytes = None, FRAME.size
            self._send_acks(reader)

    def _send_acks(self, reader: TcpReader) -> None:
        try:
            sent = reader.socket.send(reader.acks) if reader.acks else 0
        except BlockingIOError:
            sent = 0
        del reader.acks[:sent]
        self._loop.wants_write(reader.socket, bool(reader.acks))
