"""ShmTransport: between processes of one host, with pools in shared memory (memfd). The writer maps the reader's pool and copies.

Owns: the shared pool, one copying thread. Promises: a page is copied only while the pool's board (board.py) says that it is granted
under the write's generation; a cancelled write stops before its next piece, and Completed says so.
Must not: say Quiet: the reader can't see whether the writer stands between looking at the board and copying. It learns that a link
is severed when the writer marks its own end closed on the board, or when the writer's process has ended.

The pool stands behind its board: the regions, each at the start of a block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from counterpoint.kv_transfer.grant_table import GrantTable, GrantTableInfo, GrantWriters, blocks
from counterpoint.kv_transfer.memory import KvMemory, Spans
from counterpoint.kv_transfer.transport import (
    NOT_GRANTED,
    Completed,
    LinkSevered,
    Notice,
    TransportError,
    Wake,
)

PIECE_BYTES = 4 << 20


class ShmPeerInfo(msgspec.Struct, frozen=True):
    pid: int
    fd: int
    key: bytes
    pages: int
    page_bytes: int
    regions: int

    @property
    def board(self) -> GrantTableInfo:
        return GrantTableInfo(
            self.pid,
            self.fd,
            self.key,
            self.pages,
            self.regions * blocks(self.pages * self.page_bytes),
        )


def memory_behind(board: GrantTable, page_bytes: int, regions: int) -> KvMemory:
    length = board.where.pages * page_bytes
    starts = range(0, regions * blocks(length), blocks(length))
    return KvMemory(tuple(board.data[start : start + length] for start in starts), page_bytes)


def same_memory(a: KvMemory, b: KvMemory) -> bool:
    """Whether two descriptions are of the very same bytes."""
    where = [
        [(region.ctypes.data, region.nbytes) for region in memory.regions] for memory in (a, b)
    ]
    return where[0] == where[1] and a.page_bytes == b.page_bytes


@dataclass(slots=True, eq=False)
class ShmCopy:
    link: int
    generation: int
    spans: deque[list[int]]
    op: int
    checksum: int | None
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class ShmTarget:
    """The pool of a peer, where this end writes."""

    remote: int
    board: GrantTable
    memory: KvMemory


class ShmTransport:
    """`sums`: sum what is written. Raises TransportError where pools can't be shared."""

    kind = "shm"

    def __init__(self, wake: Wake, checksums: bool = False) -> None:
        GrantTable.make(0).close()  # can it be done here?
        self._wake = wake
        self._sums = checksums
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._jobs: deque[ShmCopy] = deque()
        self._targets: dict[int, ShmTarget] = {}
        self._notices: list[Notice] = []
        self._board: GrantTable | None = None
        self._writers: GrantWriters | None = None
        self._memory: KvMemory | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._copy, name="kv-shm", daemon=True)

    def allocate(self, pages: int, page_bytes: int, regions: int) -> KvMemory:
        """This worker's pool, zeroed: what is registered must lie in it."""
        self._board = GrantTable.make(pages, regions * blocks(pages * page_bytes))
        self._writers = GrantWriters(self._board)
        self._memory = memory_behind(self._board, page_bytes, regions)
        return self._memory

    # ------------------------------------------------------------ the interface (port.py)

    def register(self, memory: KvMemory) -> bytes:
        if self._memory is None or self._board is None or not same_memory(memory, self._memory):
            raise TransportError(
                "this pool is not in shared memory: make it with ShmTransport.allocate"
            )
        self._thread.start()
        where = self._board.where
        return msgspec.msgpack.encode(
            ShmPeerInfo(
                where.pid, where.fd, where.key, where.pages, memory.page_bytes, len(memory.regions)
            )
        )

    def connect(self, link: int, remote: int, blob: bytes, writes: bool) -> None:
        theirs = msgspec.msgpack.decode(blob, type=ShmPeerInfo)
        assert self._memory is not None and self._writers is not None
        if (theirs.page_bytes, theirs.regions) != (
            self._memory.page_bytes,
            len(self._memory.regions),
        ):
            raise TransportError(
                f"the peer's pages have {theirs.page_bytes} bytes in {theirs.regions} regions"
            )
        if not writes:
            with self._lock:
                self._writers.add(link, theirs.pid)
            return
        board = GrantTable.open(theirs.board)
        target = ShmTarget(remote, board, memory_behind(board, theirs.page_bytes, theirs.regions))
        with self._lock:
            self._targets[link] = target

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        assert self._board is not None
        self._board.grant(generation, pages)

    def revoke(self, generation: int) -> None:
        assert self._board is not None
        self._board.revoke(generation)

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        checksum = self._memory.checksum(spans) if self._sums and self._memory is not None else None
        with self._lock:
            self._jobs.append(ShmCopy(link, generation, deque(spans.tolist()), op, checksum))
            self._work.notify()

    def cancel(self, op: int) -> None:
        with self._lock:
            for job in self._jobs:
                job.cancelled |= job.op == op
            self._work.notify()

    def disconnect(self, link: int) -> None:
        with self._lock:
            target = self._targets.pop(link, None)
            if target is not None:
                self._jobs = deque(job for job in self._jobs if job.link != link)
                target.board.leave(target.remote)
                self._notices.append(LinkSevered(link))
            elif self._writers is None or not self._writers.part(link):
                return
        self._wake()

    def poll(self) -> list[Notice]:
        with self._lock:
            severed = self._writers.gone() if self._writers is not None else []
            notices, self._notices = [*self._notices, *severed], []
            return notices

    def close(self) -> None:
        for link in tuple(self._targets):
            self.disconnect(link)
        with self._lock:
            self._closed = True
            self._work.notify()
        if self._thread.is_alive():
            self._thread.join()
        if self._writers is not None:
            self._writers.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()
        self._board = self._memory = self._writers = None

    # ------------------------------------------------------------ under the lock

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

    def _copy_piece(self, job: ShmCopy) -> bool:
        """True if the job is at its end."""
        there, mine = self._targets.get(job.link), self._memory
        assert mine is not None
        if there is None:
            return True
        copied = 0
        while job.spans and copied < PIECE_BYTES and not job.cancelled:
            region, source, target, size = job.spans.popleft()
            if size > PIECE_BYTES:
                job.spans.appendleft(
                    [region, source + PIECE_BYTES, target + PIECE_BYTES, size - PIECE_BYTES]
                )
                size = PIECE_BYTES
            page = there.memory.page_bytes
            pages = slice(target // page, (target + size - 1) // page + 1)
            inside = target >= 0 and target + size <= there.memory.regions[region].nbytes
            if not inside or not there.board.allows(job.generation, pages):
                self._notices.append(Completed(job.op, NOT_GRANTED))
                return True
            there.memory.regions[region][target : target + size] = mine.regions[region][
                source : source + size
            ]
            copied += size
        if job.spans and not job.cancelled:
            return False
        self._notices.append(
            Completed(job.op, "cancelled" if job.spans else "", None if job.spans else job.checksum)
        )
        return True
