"""Board: what a pool's owner and those who write into that pool tell each other, in memory that they share (memfd).

Owns: which generation each page is granted to, and which writing ends have left; the owner's list of writers. Promises: nothing is
left in /dev/shm, whoever dies when (a memfd has no name and goes with its last user); a reused process number can't be mistaken
(the key); a writer counts as gone when it has marked its end, or its process has ended, and never before.
Must not: know where the pool's bytes are.

    key, in one block of 4096 bytes; grants (u64 for each page); ends (64 x 2 x u64: the owner's link number, closed); and what the
    owner wants behind it, from the start of a block
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

ENDS = 64
BLOCK = 4096


class GrantTableInfo(msgspec.Struct, frozen=True):
    """A board, for other processes of the host. `behind` bytes follow it."""

    pid: int
    fd: int
    key: bytes
    pages: int
    behind: int = 0


class GrantTable:
    """`data`: the bytes behind it."""

    def __init__(self, fd: int, where: GrantTableInfo) -> None:
        """Map it. Raises TransportError if it is another than that."""
        ends_at = BLOCK + blocks(8 * where.pages)
        start = ends_at + blocks(16 * ENDS)
        size = start + where.behind
        if os.fstat(fd).st_size != size:
            raise TransportError(f"the peer's pool has {os.fstat(fd).st_size} bytes, not {size}")
        self.where = where
        self._map = mmap.mmap(fd, size)
        if self._map[: len(where.key)] != where.key:
            raise TransportError("the peer's pool does not have the key that the peer named")
        everything = np.frombuffer(self._map, np.uint8)
        self.grants = everything[BLOCK : BLOCK + 8 * where.pages].view(np.uint64)
        self.ends = everything[ends_at : ends_at + 16 * ENDS].view(np.uint64).reshape(ENDS, 2)
        self.data = everything[start:]

    # ------------------------------------------------------------ the pool's owner

    @classmethod
    def make(cls, pages: int, behind: int = 0) -> GrantTable:
        """A new one; its memory is the system's until it is written. Raises TransportError where there is no memfd."""
        if not sys.platform.startswith("linux"):
            raise TransportError("shared pools need Linux (memfd): use tcp")
        fd = os.memfd_create("counterpoint-kv", os.MFD_CLOEXEC)
        where = GrantTableInfo(os.getpid(), fd, secrets.token_bytes(16), pages, behind)
        os.ftruncate(fd, BLOCK + blocks(8 * pages) + blocks(16 * ENDS) + behind)
        with mmap.mmap(fd, BLOCK) as head:
            head[: len(where.key)] = where.key
        return cls(fd, where)

    def grant(self, generation: int, pages: Sequence[int]) -> None:
        self.grants[list(pages)] = generation

    def revoke(self, generation: int) -> None:
        self.grants[self.grants == generation] = 0

    def close(self) -> None:
        """Of the owner: nobody can open it from now on."""
        os.close(self.where.fd)

    # ------------------------------------------------------------ a writer

    @classmethod
    def open(cls, where: GrantTableInfo) -> GrantTable:
        """Another process's. Raises TransportError."""
        try:
            fd = os.open(f"/proc/{where.pid}/fd/{where.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(
                f"the peer's process {where.pid} can't be reached through shared memory: {error}"
            ) from None
        try:
            return cls(fd, where)
        finally:
            os.close(fd)

    def allows(self, generation: int, pages: NDArray[np.int64] | slice) -> bool:
        """Whether all of `pages` are granted to it."""
        return bool((self.grants[pages] == generation).all())

    def leave(self, remote: int) -> None:
        """Nothing more is written under the owner's link number `remote`."""
        self.ends[self.ends[:, 0] == remote, 1] = 1


class GrantWriters:
    """The writing ends of a board, as its owner sees them: by the owner's link number, with a descriptor of the process."""

    def __init__(self, board: GrantTable) -> None:
        self._board = board
        self._processes: dict[int, int] = {}
        self._leaving: set[int] = set()

    def add(self, link: int, pid: int) -> None:
        """Raises TransportError if there is no room, or no such process."""
        free = np.flatnonzero(self._board.ends[:, 0] == 0)
        if not len(free):
            raise TransportError(f"{ENDS} links end in this pool: no more fit")
        try:
            self._processes[link] = os.pidfd_open(pid)
        except OSError as error:
            raise TransportError(
                f"the peer's process {pid} can't be reached through shared memory: {error}"
            ) from None
        self._board.ends[int(free[0])] = (link, 0)

    def part(self, link: int) -> bool:
        """The link is torn down here; `gone` tells when it is proven. False if there is no such writer."""
        if link in self._processes:
            self._leaving.add(link)
        return link in self._processes

    def gone(self) -> list[LinkSevered]:
        """The parted ones that write no more."""
        severed = []
        for link in tuple(self._leaving):
            mine = self._board.ends[:, 0] == link
            if has_ended(self._processes[link]) or self._board.ends[mine, 1].any():
                self._board.ends[mine] = 0
                self._leaving.discard(link)
                os.close(self._processes.pop(link))
                severed.append(LinkSevered(link))
        return severed

    def close(self) -> None:
        for process in self._processes.values():
            os.close(process)
        self._processes.clear()
        self._leaving.clear()


def blocks(size: int) -> int:
    """`size` up to whole blocks."""
    return -(-size // BLOCK) * BLOCK
