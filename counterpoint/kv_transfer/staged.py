"""StagedTransport: KV of GPUs through host memory, over a mover of host memory (TCP, shared memory). For where nothing better joins two
GPUs, and only when asked for: each byte is copied three times, and the courier's thread waits for it.

Owns: a mirror of the pool in host memory, of which the system gives as much as is touched. Promises: the inner mover's proofs hold
for the mirror; the pool itself is written by this end alone, while the generation's pages are still set aside. Must not: be chosen
unasked.

The writer copies pages to its mirror and has the inner mover write them; the reader takes them from its mirror when it revokes the
generation, which it does before it uses or frees its pages (disagg/receiver.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from counterpoint.kv_transfer.gpu import GpuCopier, GpuKvMemory, rows_of
from counterpoint.kv_transfer.memory import Allocate, KvMemory, Spans
from counterpoint.kv_transfer.transport import Notice, Transport, TransportError


class StagedTransport:
    """`allocate` makes the mirror, where the inner mover can reach it."""

    def __init__(self, inner: Transport, gpu: GpuCopier, allocate: Allocate | None = None) -> None:
        self.kind = inner.kind
        self._inner = inner
        self._gpu = gpu
        self._allocate = allocate or plain
        self._memory: GpuKvMemory | None = None
        self._mirror: KvMemory | None = None
        self._granted: dict[int, tuple[int, tuple[int, ...]]] = {}  # generation -> link, pages

    def register(self, memory: KvMemory) -> bytes:
        if not isinstance(memory, GpuKvMemory):
            raise TransportError("this pool is not in a GPU's memory: it needs no staging")
        self._gpu.prepare(memory)
        self._memory = memory
        self._mirror = self._allocate(memory.pages, memory.page_bytes, len(memory.regions))
        return self._inner.register(self._mirror)

    def connect(self, link: int, remote: int, blob: bytes, writes: bool) -> None:
        self._inner.connect(link, remote, blob, writes)

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        self._granted[generation] = (link, tuple(pages))
        self._inner.grant(link, generation, pages)

    def revoke(self, generation: int) -> None:
        _, pages = self._granted.pop(generation, (0, ()))
        self._inner.revoke(generation)
        memory, mirror = self._both()
        for rows in self._pieces(memory.spans(0, memory.layers, pages, pages)):
            content = np.stack([self._row(mirror, row) for row in rows.tolist()])
            self._gpu.write_rows(content, memory.rows_RW, rows)

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        memory, mirror = self._both()
        for rows in self._pieces(spans):
            for row, content in zip(
                rows.tolist(), self._gpu.read_rows(memory.rows_RW, rows), strict=True
            ):
                self._row(mirror, row)[:] = content
        self._inner.write(link, generation, spans, op)

    def cancel(self, op: int) -> None:
        self._inner.cancel(op)

    def disconnect(self, link: int) -> None:
        self._granted = {
            generation: one for generation, one in self._granted.items() if one[0] != link
        }
        self._inner.disconnect(link)

    def poll(self) -> list[Notice]:
        return self._inner.poll()

    def close(self) -> None:
        self._inner.close()
        self._memory = self._mirror = None

    def _both(self) -> tuple[GpuKvMemory, KvMemory]:
        assert self._memory is not None and self._mirror is not None
        return self._memory, self._mirror

    def _pieces(self, spans: Spans) -> list[np.ndarray]:
        """Rows here, as many at a time as the GPU takes."""
        memory, most = self._both()[0], self._gpu.max_rows
        rows = rows_of(spans, (memory.pages, memory.pages), memory.page_bytes)[0]
        return [rows[start : start + most] for start in range(0, len(rows), most)]

    def _row(self, mirror: KvMemory, row: int) -> np.ndarray:
        """The words of one row in the mirror."""
        region, page = divmod(row, mirror.pages)
        return mirror.regions[region][
            page * mirror.page_bytes : (page + 1) * mirror.page_bytes
        ].view(np.int64)


def plain(pages: int, page_bytes: int, regions: int) -> KvMemory:
    return KvMemory(
        tuple(np.zeros(pages * page_bytes, np.uint8) for _ in range(regions)), page_bytes
    )
