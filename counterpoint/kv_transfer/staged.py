"""StagedTransport: KV of GPUs through host memory, over a transport of host memory (TCP, shm).

Used only when asked for, where nothing better joins two GPUs: each byte is copied three times, and
the thread that calls waits for the copies.

Owns: a mirror of the pool in host memory, of which only touched pages take memory.
Promises: the inner transport's proofs hold for the mirror. Only this end writes the pool itself,
while the generation's pages are still reserved.

The writer copies pages to its mirror and has the inner transport write them. The reader takes them
from its mirror when it revokes the generation, before it uses or frees them (disagg/receiver.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from counterpoint.kv_transfer.gpu import GpuCopier, GpuKvMemory, page_rows
from counterpoint.kv_transfer.memory import Allocate, KvMemory, Spans
from counterpoint.kv_transfer.transport import Notice, Transport, TransportError


class StagedTransport:
    """`allocate` makes the mirror, where the inner transport can reach it."""

    def __init__(self, inner: Transport, gpu: GpuCopier, allocate: Allocate | None = None) -> None:
        self.kind = inner.kind
        self._inner = inner
        self._gpu = gpu
        self._allocate = allocate or allocate_host_memory
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

    def connect(self, link: int, remote: int, metadata: bytes, writes: bool) -> None:
        self._inner.connect(link, remote, metadata, writes)

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        self._granted[generation] = (link, tuple(pages))
        self._inner.grant(link, generation, pages)

    def revoke(self, generation: int) -> None:
        _, pages = self._granted.pop(generation, (0, ()))
        self._inner.revoke(generation)
        memory, mirror = self._pools()
        for rows in self._row_batches(memory.spans(0, memory.layers, pages, pages)):
            content = np.stack([self._words(mirror, row) for row in rows.tolist()])
            self._gpu.write_rows(content, memory.rows_RW, rows)

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        memory, mirror = self._pools()
        for rows in self._row_batches(spans):
            read = self._gpu.read_rows(memory.rows_RW, rows)
            for row, content in zip(rows.tolist(), read, strict=True):
                self._words(mirror, row)[:] = content
        self._inner.write(link, generation, spans, op)

    def cancel(self, op: int) -> None:
        self._inner.cancel(op)

    def disconnect(self, link: int) -> None:
        self._granted = {
            generation: grant for generation, grant in self._granted.items() if grant[0] != link
        }
        self._inner.disconnect(link)

    def poll(self) -> list[Notice]:
        return self._inner.poll()

    def close(self) -> None:
        self._inner.close()
        self._memory = self._mirror = None

    def _pools(self) -> tuple[GpuKvMemory, KvMemory]:
        assert self._memory is not None and self._mirror is not None
        return self._memory, self._mirror

    def _row_batches(self, spans: Spans) -> list[np.ndarray]:
        """Rows of `spans` here, as many at a time as the GPU takes."""
        memory, count = self._pools()[0], self._gpu.max_rows
        rows = page_rows(spans, (memory.pages, memory.pages), memory.page_bytes)[0]
        return [rows[start : start + count] for start in range(0, len(rows), count)]

    def _words(self, mirror: KvMemory, row: int) -> np.ndarray:
        """A view of one row in the mirror."""
        region, page = divmod(row, mirror.pages)
        start = page * mirror.page_bytes
        return mirror.regions[region][start : start + mirror.page_bytes].view(np.int64)


def allocate_host_memory(pages: int, page_bytes: int, regions: int) -> KvMemory:
    return KvMemory(
        tuple(np.zeros(pages * page_bytes, np.uint8) for _ in range(regions)), page_bytes
    )
