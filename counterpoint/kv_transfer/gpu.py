"""GpuKvMemory: a KV pool in a GPU's memory, as transports see it, and what they ask of a GPU.

Owns: the view, and the rows (pages of one region) that a span covers. Rows are in the pool's order
(memory.py).
Must not: touch a GPU. A GpuCopier does (device/cuda/ipc.py), so transports are tested without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterpoint.kv_transfer.memory import KvMemory, Spans

ROW = torch.int64  # a page's bytes are copied as words of this type


@dataclass(frozen=True, eq=False)
class GpuKvMemory(KvMemory):
    """`regions` are tensors here; `rows_RW` [regions x pages, words of a page] is all of them."""

    rows_RW: Tensor

    @classmethod
    def from_tensor(cls, regions_RB: Tensor, pages: int) -> GpuKvMemory:
        """`regions_RB`: uint8, contiguous. Raises ValueError if words do not divide a page."""
        page_bytes = regions_RB.shape[1] // pages
        if page_bytes % ROW.itemsize:
            raise ValueError(
                f"a page of {page_bytes} bytes in a layer is no multiple of {ROW.itemsize}: "
                "set another page_tokens"
            )
        rows_RW = regions_RB.view(ROW).view(-1, page_bytes // ROW.itemsize)
        return cls(tuple(regions_RB.unbind(0)), page_bytes, rows_RW)  # type: ignore[arg-type]


class GpuCopier(Protocol):
    """Copies rows (as of GpuKvMemory). One thread of a transport calls `map_pool`, one (maybe
    another) all that copies."""

    max_rows: int  # of one copy

    def prepare(self, memory: GpuKvMemory) -> None:
        """Allocate what copies of this pool's pages need. Once, before all else."""
        ...

    def export_pool(self, memory: GpuKvMemory) -> bytes:
        """What another process needs for `map_pool`. Raises TransportError."""
        ...

    def map_pool(self, exported: bytes, rows: int, words: int) -> Tensor:
        """Another process's pool, [rows, words] as `rows_RW`. Raises TransportError."""
        ...

    def unmap_pool(self, rows_RW: Tensor) -> None:
        """No copy to it runs. Raises TransportError."""
        ...

    def start_copy(
        self,
        source_RW: Tensor,
        sources: NDArray[np.int64],
        target_RW: Tensor,
        targets: NDArray[np.int64],
    ) -> Any:
        """Start to copy rows `sources` of one pool to rows `targets` of another. Returns a ticket
        for `wait`. The copy before it has ended."""
        ...

    def wait(self, ticket: Any) -> None:
        """Block until that copy moves no more bytes. Raises RuntimeError if the GPU is lost."""
        ...

    def read_rows(self, source_RW: Tensor, sources: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those rows, in host memory that the next call uses again."""
        ...

    def write_rows(
        self, content_NW: NDArray[np.int64], target_RW: Tensor, targets: NDArray[np.int64]
    ) -> None:
        """`content_NW` is in rows `targets` when this returns."""
        ...


def page_rows(
    spans: Spans, pages: tuple[int, int], page_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows here and there of `spans`, where the pools have `pages` (here, there). Raises ValueError
    for parts of pages."""
    if (spans[:, 1:] % page_bytes).any():
        raise ValueError("a GPU's pool is copied in whole pages")
    counts = spans[:, 3] // page_bytes
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    here, there = (spans[:, 0] * pages[end] + spans[:, 1 + end] // page_bytes for end in (0, 1))
    return np.repeat(here, counts) + within, np.repeat(there, counts) + within
