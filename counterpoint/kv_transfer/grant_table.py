"""GrantTable: memory that a pool's owner and the writers of that pool share (memfd).

Owns: the generation that each page is granted to, the writers that have closed their end, and the
owner's list of writers.
Promises: nothing is left in /dev/shm, since a memfd has no name and ends with its last user. A
reused pid can't be mistaken (the key). A writer counts as gone when it has marked its end closed or
its process has ended, never before.

    key               in one block of 4096 bytes
    grants            u64 for each page: its generation
    ends              64 x 2 x u64: the owner's number of the link, closed
    data              what the owner puts behind it, from the start of a block
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from counterpoint.kv_transfer.host import has_ended
from counterpoint.kv_transfer.transport import LinkSevered, TransportError

MAX_WRITERS = 64
BLOCK = 4096


class GrantTableInfo(msgspec.Struct, frozen=True):
    """A grant table, for other processes of the host. `data_bytes` follow it."""

    pid: int
    fd: int
    key: bytes
    pages: int
    data_bytes: int = 0


class GrantTable:
    """`data`: the bytes behind it."""

    def __init__(self, fd: int, info: GrantTableInfo) -> None:
        """Map it. Raises TransportError if `fd` is not the table that `info` describes."""
        ends_at = BLOCK + round_up_to_block(8 * info.pages)
        start = ends_at + round_up_to_block(16 * MAX_WRITERS)
        size = start + info.data_bytes
        if os.fstat(fd).st_size != size:
            raise TransportError(f"the peer's pool has {os.fstat(fd).st_size} bytes, not {size}")
        self.info = info
        self._map = mmap.mmap(fd, size)
        if self._map[: len(info.key)] != info.key:
            raise TransportError("the peer's pool does not have the key that the peer named")
        everything = np.frombuffer(self._map, np.uint8)
        self.grants = everything[BLOCK : BLOCK + 8 * info.pages].view(np.uint64)
        ends = everything[ends_at : ends_at + 16 * MAX_WRITERS]
        self.ends = ends.view(np.uint64).reshape(MAX_WRITERS, 2)
        self.data = everything[start:]

    # ------------------------------------------------------------ the pool's owner

    @classmethod
    def create(cls, pages: int, data_bytes: int = 0) -> GrantTable:
        """Its memory is only used once written. Raises TransportError where there is no memfd."""
        if not sys.platform.startswith("linux"):
            raise TransportError("shared pools need Linux (memfd): use tcp")
        fd = os.memfd_create("counterpoint-kv", os.MFD_CLOEXEC)
        info = GrantTableInfo(os.getpid(), fd, secrets.token_bytes(16), pages, data_bytes)
        tables = round_up_to_block(8 * pages) + round_up_to_block(16 * MAX_WRITERS)
        os.ftruncate(fd, BLOCK + tables + data_bytes)
        with mmap.mmap(fd, BLOCK) as head:
            head[: len(info.key)] = info.key
        return cls(fd, info)

    def grant(self, generation: int, pages: Sequence[int]) -> None:
        self.grants[list(pages)] = generation

    def revoke(self, generation: int) -> None:
        self.grants[self.grants == generation] = 0

    def close(self) -> None:
        """Called by the owner: nobody can open it from now on."""
        os.close(self.info.fd)

    # ------------------------------------------------------------ a writer

    @classmethod
    def open(cls, info: GrantTableInfo) -> GrantTable:
        """Another process's. Raises TransportError."""
        try:
            fd = os.open(f"/proc/{info.pid}/fd/{info.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise unreachable(info.pid, error) from None
        try:
            return cls(fd, info)
        finally:
            os.close(fd)

    def allows(self, generation: int, pages: NDArray[np.int64] | slice) -> bool:
        """Whether all of `pages` are granted to it."""
        return bool((self.grants[pages] == generation).all())

    def mark_closed(self, remote: int) -> None:
        """Nothing more is written under `remote`, the owner's number of the link."""
        self.ends[self.ends[:, 0] == remote, 1] = 1


class GrantWriters:
    """A table's writers, as its owner sees them: by the owner's number of the link, each with a
    descriptor of its process."""

    def __init__(self, table: GrantTable) -> None:
        self._table = table
        self._processes: dict[int, int] = {}
        self._leaving: set[int] = set()

    def add(self, link: int, pid: int) -> None:
        """Raises TransportError if there is no room, or no such process."""
        free = np.flatnonzero(self._table.ends[:, 0] == 0)
        if not len(free):
            raise TransportError(f"{MAX_WRITERS} links write to this pool: no more fit")
        try:
            self._processes[link] = os.pidfd_open(pid)
        except OSError as error:
            raise unreachable(pid, error) from None
        self._table.ends[int(free[0])] = (link, 0)

    def start_leaving(self, link: int) -> bool:
        """The owner disconnects the link; `take_severed` has it once proven. False if there is no
        such writer."""
        if link in self._processes:
            self._leaving.add(link)
        return link in self._processes

    def take_severed(self) -> list[LinkSevered]:
        """The leaving ones that write no more."""
        severed = []
        for link in tuple(self._leaving):
            mine = self._table.ends[:, 0] == link
            if has_ended(self._processes[link]) or self._table.ends[mine, 1].any():
                self._table.ends[mine] = 0
                self._leaving.discard(link)
                os.close(self._processes.pop(link))
                severed.append(LinkSevered(link))
        return severed

    def close(self) -> None:
        for process in self._processes.values():
            os.close(process)
        self._processes.clear()
        self._leaving.clear()


def unreachable(pid: int, error: OSError) -> TransportError:
    return TransportError(
        f"the peer's process {pid} can't be reached through shared memory: {error}"
    )


def round_up_to_block(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
