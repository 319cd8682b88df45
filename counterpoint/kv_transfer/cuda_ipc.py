"""CudaIpcTransport: between processes whose pools are in GPU memory of one host. The writer maps the reader's pool and copies.

Owns: one copying thread, the mappings of others' pools. Promises: pages are copied only while the reader's board (board.py) says
that they are granted under the write's generation; Completed comes when the host has seen the end of the write's last copy; a
cancelled write stops before its next piece; a mapping is let go with its link, since it keeps the memory of a dead peer.
Must not: say Quiet: the reader can't see whether the writer stands between looking at the board and copying. It learns that a link
is severed when the writer marks its end closed, with nothing on its way, or when the writer's process has ended (Linux closes what
a process has open, and the driver with it the process's work on the GPU, before that end is seen).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from counterpoint.kv_transfer.gpu import GpuCopier, GpuKvMemory, rows_of
from counterpoint.kv_transfer.grant_table import GrantTable, GrantTableInfo, GrantWriters
from counterpoint.kv_transfer.memory import KvMemory, Spans
from counterpoint.kv_transfer.transport import (
    NOT_GRANTED,
    Completed,
    LinkSevered,
    Notice,
    TransportError,
    Wake,
)

log = logging.getLogger(__name__)


class CudaIpcPeerInfo(msgspec.Struct, frozen=True):
    """`exported`: the pool, as `Gpu.open` takes it."""

    board: GrantTableInfo
    exported: bytes
    page_bytes: int
    regions: int


@dataclass(slots=True, eq=False)
class CudaIpcCopy:
    """`here` and `there`: rows that are still to be copied."""

    link: int
    generation: int
    here: NDArray[np.int64]
    there: NDArray[np.int64]
    op: int
    error: str = ""


@dataclass(slots=True, eq=False)
class CudaIpcTarget:
    """The pool of a peer, where this end writes."""

    remote: int
    board: GrantTable
    rows_RW: Tensor


class CudaIpcTransport:
    kind = "cuda-ipc"

    def __init__(self, wake: Wake, gpu: GpuCopier) -> None:
        self._wake = wake
        self._gpu = gpu
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._jobs: deque[CudaIpcCopy] = deque()
        self._targets: dict[int, CudaIpcTarget] = {}
        self._parting: deque[int] = deque()
        self._notices: list[Notice] = []
        self._memory: GpuKvMemory | None = None
        self._board: GrantTable | None = None
        self._writers: GrantWriters | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-cuda-ipc", daemon=True)

    # ------------------------------------------------------------ the interface (port.py)

    def register(self, memory: KvMemory) -> bytes:
        if not isinstance(memory, GpuKvMemory):
            raise TransportError("this pool is not in a GPU's memory")
        self._gpu.prepare(memory)
        exported = self._gpu.export_pool(memory)
        self._memory, self._board = memory, GrantTable.make(memory.pages)
        self._writers = GrantWriters(self._board)
        self._thread.start()
        return msgspec.msgpack.encode(
            CudaIpcPeerInfo(self._board.where, exported, memory.page_bytes, len(memory.regions))
        )

    def connect(self, link: int, remote: int, blob: bytes, writes: bool) -> None:
        theirs, mine = msgspec.msgpack.decode(blob, type=CudaIpcPeerInfo), self._memory
        assert mine is not None and self._writers is not None
        if (theirs.page_bytes, theirs.regions) != (mine.page_bytes, len(mine.regions)):
            raise TransportError(
                f"the peer's pages have {theirs.page_bytes} bytes in {theirs.regions} regions"
            )
        if not writes:
            with self._lock:
                self._writers.add(link, theirs.board.pid)
            return
        board = GrantTable.open(theirs.board)
        rows_RW = self._gpu.map_pool(
            theirs.exported, theirs.regions * theirs.board.pages, mine.rows_RW.shape[1]
        )
        with self._lock:
            self._targets[link] = CudaIpcTarget(remote, board, rows_RW)

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        assert self._board is not None
        self._board.grant(generation, pages)

    def revoke(self, generation: int) -> None:
        assert self._board is not None
        self._board.revoke(generation)

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        with self._lock:
            target = self._targets.get(link)
            if target is None or link in self._parting:
                return
            assert self._memory is not None
            here, there = rows_of(
                spans, (self._memory.pages, target.board.where.pages), self._memory.page_bytes
            )
            self._jobs.append(CudaIpcCopy(link, generation, here, there, op))
            self._work.notify()

    def cancel(self, op: int) -> None:
        with self._lock:
            for job in self._jobs:
                if job.op == op:
                    job.error = "cancelled"

    def disconnect(self, link: int) -> None:
        with self._lock:
            if link in self._targets:
                if link not in self._parting:
                    self._parting.append(link)
                    self._work.notify()
                return
            if self._writers is None or not self._writers.part(link):
                return
        self._wake()

    def poll(self) -> list[Notice]:
        with self._lock:
            severed = self._writers.gone() if self._writers is not None else []
            notices, self._notices = [*self._notices, *severed], []
            return notices

    def close(self) -> None:
        with self._lock:
            self._parting.extend(link for link in self._targets if link not in self._parting)
            self._closed = True
            self._work.notify()
        if self._thread.is_alive():
            self._thread.join()
        if self._writers is not None:
            self._writers.close()
        if self._board is not None:
            self._board.close()
        self._board = self._memory = self._writers = None

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        """A piece at a time: between two, what was cancelled is dropped, and who parts is let go."""
        while True:
            with self._lock:
                while not (self._jobs or self._parting or self._closed):
                    self._work.wait()
                parted = [(link, self._targets.pop(link)) for link in self._parting]
                self._parting.clear()
                self._jobs = deque(job for job in self._jobs if job.link in self._targets)
                job = self._jobs[0] if self._jobs else None
                closed = self._closed
            for link, target in parted:
                target.board.leave(target.remote)
                try:
                    self._gpu.unmap_pool(target.rows_RW)
                except TransportError as error:
                    log.warning("a peer's pool stays mapped: %s", error)
                self._notice(LinkSevered(link))
            if job is not None:
                self._copy_piece(job, self._targets[job.link])
            if closed:
                return

    def _copy_piece(self, job: CudaIpcCopy, target: CudaIpcTarget) -> None:
        """Nothing of it moves any more when this returns. The job's last piece is told."""
        piece = slice(self._gpu.max_rows)
        here, there = job.here[piece], job.there[piece]
        error = job.error or ("" if self._may_write(job.generation, there, target) else NOT_GRANTED)
        if not error and len(here):
            assert self._memory is not None
            try:
                self._gpu.wait(
                    self._gpu.start_copy(self._memory.rows_RW, here, target.rows_RW, there)
                )
            except RuntimeError as lost:  # the GPU's own errors: nothing runs on it any more
                error = str(lost)
        job.here, job.there = job.here[len(here) :], job.there[len(there) :]
        if error or not len(job.here):
            with self._lock:
                self._jobs = deque(other for other in self._jobs if other is not job)
            self._notice(Completed(job.op, error))

    def _may_write(self, generation: int, rows: NDArray[np.int64], target: CudaIpcTarget) -> bool:
        total, pages = len(target.rows_RW), target.board.where.pages
        inside = bool(((rows >= 0) & (rows < total)).all())
        return inside and target.board.allows(generation, rows % pages)

    def _notice(self, notice: Notice) -> None:
        with self._lock:
            self._notices.append(notice)
        self._wake()
