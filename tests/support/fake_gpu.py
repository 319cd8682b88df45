"""A GPU for transports, without one: its memory is shared memory, its copies are torch's on the
CPU."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from counterpoint.kv_transfer.gpu import ROW, GpuKvMemory
from counterpoint.kv_transfer.transport import TransportError


class FakeGpu:
    """A GpuCopier. `running`: copies end only while it is set. `copies`: how many have begun;
    `begun` is set with the first."""

    def __init__(self, max_rows: int = 3) -> None:
        self.max_rows = max_rows
        self.running = threading.Event()
        self.running.set()
        self.begun = threading.Event()
        self.copies = 0
        self.unmapped_pools = 0
        self._fd = -1

    def allocate(self, pages: int, page_bytes: int, regions: int) -> GpuKvMemory:
        self._fd = os.memfd_create("a fake GPU's memory", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, pages * page_bytes * regions)
        return GpuKvMemory.from_tensor(
            map_words(self._fd).view(torch.uint8).view(regions, -1), pages
        )

    def prepare(self, memory: GpuKvMemory) -> None:
        pass

    def export_pool(self, memory: GpuKvMemory) -> bytes:
        return msgspec.msgpack.encode((os.getpid(), self._fd))

    def map_pool(self, exported: bytes, rows: int, words: int) -> Tensor:
        pid, number = msgspec.msgpack.decode(exported)
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise TransportError(f"no such memory: {error}") from None
        return map_words(fd).view(rows, words)

    def unmap_pool(self, rows_RW: Tensor) -> None:
        self.unmapped_pools += 1

    def start_copy(
        self, source_RW: Tensor, sources: np.ndarray, target_RW: Tensor, targets: np.ndarray
    ) -> Any:
        assert 0 < len(sources) == len(targets) <= self.max_rows
        self.copies += 1
        self.begun.set()

        def land() -> None:
            target_RW[torch.from_numpy(targets)] = source_RW[torch.from_numpy(sources)]

        return land

    def wait(self, ticket: Any) -> None:
        assert self.running.wait(30)
        ticket()

    def read_rows(self, source_RW: Tensor, sources: np.ndarray) -> np.ndarray:
        assert 0 < len(sources) <= self.max_rows
        return source_RW[torch.from_numpy(sources)].numpy()

    def write_rows(self, content_NW: np.ndarray, target_RW: Tensor, targets: np.ndarray) -> None:
        assert 0 < len(targets) <= self.max_rows
        target_RW[torch.from_numpy(targets)] = torch.from_numpy(content_NW)


def map_words(fd: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.int64)).to(ROW)
