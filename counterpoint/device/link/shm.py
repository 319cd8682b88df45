"""ShmLink: between processes of one host, with pools in shared memory (memfd). The writer maps the reader's pool and copies.

Owns: the shared pool, one copying thread. Promises: a page is copied only while the table in the pool says that it is granted under
the write's generation; a cancelled write stops before its next piece, and Completed says so; nothing is left in /dev/shm, whoever
dies when (a memfd has no name and goes with its last user).
Must not: say Quiet: the reader can't see whether the writer stands between looking at the table and copying. It learns that a link
is severed when the writer marks its own end closed in the table, or when the writer's process has ended.

    pool     key, in one block of 4096 bytes; grants (u64 for each page); ends (64 x 2 x u64: the reader's link number, closed);
             the regions, each at the start of a block
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from counterpoint.device.link.memory import Memory, Spans
from counterpoint.device.link.port import Completed, LinkError, Notice, Severed, Wake

ENDS = 64
PIECE_BYTES = 4 << 20
BLOCK = 4096


class Blob(msgspec.Struct, frozen=True):
    pid: int
    fd: int
    key: bytes
    pages: int
    page_bytes: int
    regions: int


@dataclass(eq=False)
class Pool:
    """A mapped pool. `ends[i]`: (link number of the pool's owner, 1 when the writer has closed its end)."""

    map: mmap.mmap
    grants: NDArray[np.uint64]
    ends: NDArray[np.uint64]
    memory: Memory


def pool_bytes(pages: int, page_bytes: int, regions: int) -> tuple[int, int]:
    """(where the regions start, bytes in all)."""
    start = BLOCK + _blocks(8 * pages) + _blocks(16 * ENDS)
    return start, start + regions * _blocks(pages * page_bytes)


def map_pool(fd: int, blob: Blob) -> Pool:
    start, size = pool_bytes(blob.pages, blob.page_bytes, blob.regions)
    if os.fstat(fd).st_size != size:
        raise LinkError(f"the peer's pool has {os.fstat(fd).st_size} bytes, not {size}")
    mapped = mmap.mmap(fd, size)
    if mapped[: len(blob.key)] != blob.key:
        raise LinkError("the peer's pool does not have the key that the peer named")
    data = np.frombuffer(mapped, np.uint8)
    grants = data[BLOCK : BLOCK + 8 * blob.pages].view(np.uint64)
    ends_at = BLOCK + _blocks(8 * blob.pages)
    ends = data[ends_at : ends_at + 16 * ENDS].view(np.uint64).reshape(ENDS, 2)
    stride, length = _blocks(blob.pages * blob.page_bytes), blob.pages * blob.page_bytes
    regions = tuple(data[start + i * stride : start + i * stride + length] for i in range(blob.regions))
    return Pool(mapped, grants, ends, Memory(regions, blob.page_bytes))


def same_memory(a: Memory, b: Memory) -> bool:
    """Whether two descriptions are of the very same bytes."""
    where = [[(region.ctypes.data, region.nbytes) for region in memory.regions] for memory in (a, b)]
    return where[0] == where[1] and a.page_bytes == b.page_bytes


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


@dataclass(slots=True, eq=False)
class Job:
    link: int
    generation: int
    spans: deque[list[int]]
    op: int
    checksum: int | None
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class Peer:
    """`pool` is None where the peer writes here; `process` then tells when it has ended."""

    remote: int
    pool: Pool | None
    process: int  # pidfd; -1 if this end writes


class ShmLink:
    """`sums`: sum what is written."""

    kind = "shm"

    def __init__(self, wake: Wake, sums: bool = False) -> None:
        if not sys.platform.startswith("linux"):
            raise LinkError("shared pools need Linux (memfd): use tcp")
        self._wake = wake
        self._sums = sums
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._jobs: deque[Job] = deque()
        self._peers: dict[int, Peer] = {}
        self._leaving: dict[int, Peer] = {}  # disconnected here, not yet proven
        self._notices: list[Notice] = []
        self._pool: Pool | None = None
        self._blob: Blob | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._copy, name="kv-shm", daemon=True)

    def allocate(self, pages: int, page_bytes: int, regions: int) -> Memory:
        """This worker's pool, zeroed: what is registered must lie in it."""
        fd = os.memfd_create("counterpoint-kv", os.MFD_CLOEXEC)
        os.ftruncate(fd, pool_bytes(pages, page_bytes, regions)[1])
        self._blob = Blob(os.getpid(), fd, secrets.token_bytes(16), pages, page_bytes, regions)
        with mmap.mmap(fd, BLOCK) as head:
            head[: len(self._blob.key)] = self._blob.key
        self._pool = map_pool(fd, self._blob)
        return self._pool.memory

    # ------------------------------------------------------------ the interface (port.py)

    def register(self, memory: Memory) -> bytes:
        if self._pool is None or not same_memory(memory, self._pool.memory):
            raise LinkError("this pool is not in shared memory: make it with ShmLink.allocate")
        self._thread.start()
        return msgspec.msgpack.encode(self._blob)

    def connect(self, link: int, remote: int, blob: bytes, writes: bool) -> None:
        theirs = msgspec.msgpack.decode(blob, type=Blob)
        assert self._blob is not None and self._pool is not None
        if (theirs.page_bytes, theirs.regions) != (self._blob.page_bytes, self._blob.regions):
            raise LinkError(f"the peer's pages have {theirs.page_bytes} bytes in {theirs.regions} regions")
        try:
            if writes:
                fd = os.open(f"/proc/{theirs.pid}/fd/{theirs.fd}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    peer = Peer(remote, map_pool(fd, theirs), -1)
                finally:
                    os.close(fd)
            else:
                peer = Peer(remote, None, os.pidfd_open(theirs.pid))
                self._pool.ends[self._free_end()] = (link, 0)
        except OSError as error:
            raise LinkError(f"the peer's process {theirs.pid} can't be reached through shared memory: {error}") from None
        with self._lock:
            self._peers[link] = peer

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.grants[list(pages)] = generation

    def revoke(self, generation: int) -> None:
        assert self._pool is not None
        self._pool.grants[self._pool.grants == generation] = 0

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        checksum = self._pool.memory.checksum(spans) if self._sums and self._pool is not None else None
        with self._lock:
            self._jobs.append(Job(link, generation, deque(spans.tolist()), op, checksum))
            self._work.notify()

    def cancel(self, op: int) -> None:
        with self._lock:
            for job in self._jobs:
                job.cancelled |= job.op == op
            self._work.notify()

    def disconnect(self, link: int) -> None:
        with self._lock:
            peer = self._peers.pop(link, None)
            if peer is None:
                return
            if peer.pool is not None:
                self._jobs = deque(job for job in self._jobs if job.link != link)
                peer.pool.ends[peer.pool.ends[:, 0] == peer.remote, 1] = 1
                self._notices.append(Severed(link))
            else:
                self._leaving[link] = peer
                self._look(link, peer)
        self._wake()

    def poll(self) -> list[Notice]:
        with self._lock:
            for link, peer in tuple(self._leaving.items()):
                self._look(link, peer)
            notices, self._notices = self._notices, []
            return notices

    def close(self) -> None:
        for link in tuple(self._peers):
            self.disconnect(link)
        with self._lock:
            self._closed = True
            self._work.notify()
        if self._thread.is_alive():
            self._thread.join()
        for peer in self._leaving.values():
            os.close(peer.process)
        self._leaving.clear()
        if self._blob is not None:
            with suppress(OSError):
                os.close(self._blob.fd)
        self._pool = self._blob = None

    # ------------------------------------------------------------ under the lock

    def _free_end(self) -> int:
        assert self._pool is not None
        free = np.flatnonzero(self._pool.ends[:, 0] == 0)
        if not len(free):
            raise LinkError(f"{ENDS} links end in this pool: no more fit")
        return int(free[0])

    def _look(self, link: int, peer: Peer) -> None:
        """Is it proven that the peer writes no more?"""
        assert self._pool is not None
        ended = bool(select.select([peer.process], [], [], 0)[0])
        mine = self._pool.ends[:, 0] == link
        if ended or self._pool.ends[mine, 1].any():
            self._pool.ends[mine] = 0
            os.close(peer.process)
            del self._leaving[link]
            self._notices.append(Severed(link))

    def _copy(self) -> None:
        """The copying thread: a piece at a time, so that a cancel or a disconnect waits for one piece at most."""
        while True:
            with self._lock:
                while not self._jobs and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                if not self._copy_piece(self._jobs[0]):
                    continue
                self._jobs.popleft()
            self._wake()

    def _copy_piece(self, job: Job) -> bool:
        """True if the job is at its end."""
        peer, mine = self._peers.get(job.link), self._pool
        assert mine is not None
        if peer is None or peer.pool is None:
            return True
        copied, there = 0, peer.pool
        while job.spans and copied < PIECE_BYTES and not job.cancelled:
            region, source, target, size = job.spans.popleft()
            if size > PIECE_BYTES:
                job.spans.appendleft([region, source + PIECE_BYTES, target + PIECE_BYTES, size - PIECE_BYTES])
                size = PIECE_BYTES
            page = there.memory.page_bytes
            grants = there.grants[target // page : (target + size - 1) // page + 1]
            if target < 0 or target + size > there.memory.regions[region].nbytes or not (grants == job.generation).all():
                self._notices.append(Completed(job.op, "the peer has not granted these pages"))
                return True
            there.memory.regions[region][target : target + size] = mine.memory.regions[region][source : source + size]
            copied += size
        if job.spans and not job.cancelled:
            return False
        self._notices.append(Completed(job.op, "cancelled" if job.spans else "", None if job.spans else job.checksum))
        return True
