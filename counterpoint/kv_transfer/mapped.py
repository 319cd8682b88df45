"""MappedTransport: the writer maps the reader's pool and copies into it (base of shm and cuda_ipc).

Owns: the thread that copies, the mappings of peers' pools, this pool's grant table.
Promises: pages are copied only while the reader's grant table allows the write's generation. A
cancelled write stops before its next piece. Completed comes after the last copy has ended. A
mapping is released with its link, since it keeps a dead peer's memory.
Must not: give Quiesced. The reader can't see whether the writer stands between checking the grant
table and copying. Its link is severed when the writer marks its end closed with no copy in flight,
or when the writer's process has ended. (Linux closes the process's files, and with them the driver
ends its GPU work, before that end can be seen.)
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from counterpoint.kv_transfer.grant_table import GrantTable, GrantTableInfo, GrantWriters
from counterpoint.kv_transfer.memory import KvMemory, Spans
from counterpoint.kv_transfer.transport import (
    Completed,
    LinkSevered,
    Notice,
    TransportError,
    Wake,
)

log = logging.getLogger(__name__)

Pool = TypeVar("Pool")  # a peer's pool, mapped here
Piece = TypeVar("Piece")  # what is copied at once


class MappedPeerInfo(msgspec.Struct, frozen=True):
    """A pool, for peers that map it. `exported`: how to map it, unless it lies behind the table."""

    grants: GrantTableInfo
    page_bytes: int
    regions: int
    exported: bytes = b""


@dataclass(slots=True, eq=False)
class CopyJob(Generic[Piece]):
    """A write. `pieces`: those not copied yet."""

    link: int
    generation: int
    op: int
    pieces: deque[Piece]
    checksum: int | None = None
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class MappedPeer(Generic[Pool]):
    """A peer that this end writes to. `remote`: its number of the link."""

    remote: int
    grants: GrantTable
    pool: Pool


class MappedTransport(Generic[Pool, Piece]):
    """Subclasses register their pool with `_publish`, and say how to map, split and copy."""

    kind: str

    def __init__(self, wake: Wake, checksums: bool = False) -> None:
        self._wake = wake
        self._checksums = checksums
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._jobs: deque[CopyJob[Piece]] = deque()
        self._peers: dict[int, MappedPeer[Pool]] = {}
        self._leaving: list[int] = []  # links that the thread disconnects
        self._notices: list[Notice] = []
        self._memory: KvMemory | None = None
        self._grants: GrantTable | None = None
        self._writers: GrantWriters | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kv-{self.kind}", daemon=True)

    # ------------------------------------------------------------ what a subclass defines

    def _map_pool(self, info: MappedPeerInfo, grants: GrantTable) -> Pool:
        """Raises TransportError."""
        raise NotImplementedError

    def _unmap_pool(self, pool: Pool) -> None:
        """Called by the thread that copies, when no copy to it runs. Raises TransportError."""

    def _split(self, spans: Spans, peer: MappedPeer[Pool]) -> Iterable[Piece]:
        raise NotImplementedError

    def _copy_piece(self, piece: Piece, generation: int, peer: MappedPeer[Pool]) -> str:
        """Copy it if `generation` allows; return why not, or "". No byte moves after the return."""
        raise NotImplementedError

    def _publish(self, memory: KvMemory, grants: GrantTable, exported: bytes = b"") -> bytes:
        self._memory, self._grants, self._writers = memory, grants, GrantWriters(grants)
        self._thread.start()
        return msgspec.msgpack.encode(
            MappedPeerInfo(grants.info, memory.page_bytes, len(memory.regions), exported)
        )

    # ------------------------------------------------------------ the interface (transport.py)

    def connect(self, link: int, remote: int, metadata: bytes, writes: bool) -> None:
        info, memory = msgspec.msgpack.decode(metadata, type=MappedPeerInfo), self._memory
        assert memory is not None and self._writers is not None
        if (info.page_bytes, info.regions) != (memory.page_bytes, len(memory.regions)):
            raise TransportError(
                f"the peer's pages have {info.page_bytes} bytes in {info.regions} regions, "
                f"those here {memory.page_bytes} in {len(memory.regions)}"
            )
        if not writes:
            with self._lock:
                self._writers.add(link, info.grants.pid)
            return
        grants = GrantTable.open(info.grants)
        peer = MappedPeer(remote, grants, self._map_pool(info, grants))
        with self._lock:
            self._peers[link] = peer

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        assert self._grants is not None
        self._grants.grant(generation, pages)

    def revoke(self, generation: int) -> None:
        assert self._grants is not None
        self._grants.revoke(generation)

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        assert self._memory is not None
        checksum = self._memory.checksum(spans) if self._checksums else None
        with self._lock:
            peer = self._peers.get(link)
            if peer is None or link in self._leaving:
                return
            pieces = deque(self._split(spans, peer))
            self._jobs.append(CopyJob(link, generation, op, pieces, checksum))
            self._work.notify()

    def cancel(self, op: int) -> None:
        with self._lock:
            for job in self._jobs:
                job.cancelled |= job.op == op

    def disconnect(self, link: int) -> None:
        with self._lock:
            if link in self._peers:
                if link not in self._leaving:
                    self._leaving.append(link)
                    self._work.notify()
                return
            if self._writers is None or not self._writers.start_leaving(link):
                return
        self._wake()

    def poll(self) -> list[Notice]:
        with self._lock:
            severed = self._writers.take_severed() if self._writers is not None else []
            notices, self._notices = [*self._notices, *severed], []
            return notices

    def close(self) -> None:
        with self._lock:
            self._leaving.extend(link for link in self._peers if link not in self._leaving)
            self._closed = True
            self._work.notify()
        if self._thread.is_alive():
            self._thread.join()
        if self._writers is not None:
            self._writers.close()
        if self._grants is not None:
            with suppress(OSError):
                self._grants.close()
        self._grants = self._memory = self._writers = None

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while self._run_once():
            pass

    def _run_once(self) -> bool:
        """Disconnect what leaves, then copy one piece. False: closed."""
        with self._lock:
            while not (self._jobs or self._leaving or self._closed):
                self._work.wait()
            left = [(link, self._peers.pop(link)) for link in self._leaving]
            self._leaving.clear()
            self._jobs = deque(job for job in self._jobs if job.link in self._peers)
            job = self._jobs[0] if self._jobs else None
            closed = self._closed
        for link, peer in left:
            peer.grants.mark_closed(peer.remote)
            try:
                self._unmap_pool(peer.pool)
            except TransportError as error:
                log.warning("a peer's pool stays mapped: %s", error)
            self._notify(LinkSevered(link))
        if job is not None:
            self._advance(job)
        return not closed

    def _advance(self, job: CopyJob[Piece]) -> None:
        error = "cancelled" if job.cancelled and job.pieces else ""
        if not error and job.pieces:
            piece = job.pieces.popleft()
            error = self._copy_piece(piece, job.generation, self._peers[job.link])
        if error or not job.pieces:
            with self._lock:
                self._jobs.popleft()  # `job`: only this thread removes
            self._notify(Completed(job.op, error, None if error else job.checksum))

    def _notify(self, notice: Notice) -> None:
        with self._lock:
            self._notices.append(notice)
        self._wake()
