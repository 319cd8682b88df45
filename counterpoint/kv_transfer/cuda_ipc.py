"""CudaIpcTransport: between processes of one host whose pools are in GPU memory (CUDA IPC)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from counterpoint.kv_transfer.gpu import GpuCopier, GpuKvMemory, page_rows
from counterpoint.kv_transfer.grant_table import GrantTable
from counterpoint.kv_transfer.mapped import MappedPeer, MappedPeerInfo, MappedTransport
from counterpoint.kv_transfer.memory import KvMemory, Spans
from counterpoint.kv_transfer.transport import NOT_GRANTED, TransportError, Wake

RowPair = tuple[NDArray[np.int64], NDArray[np.int64]]  # rows here, rows there


class CudaIpcTransport(MappedTransport[Tensor, RowPair]):
    """A peer's pool is a tensor of rows, as `GpuCopier.map_pool` gives it."""

    kind = "cuda-ipc"

    def __init__(self, wake: Wake, gpu: GpuCopier) -> None:
        super().__init__(wake)
        self._gpu = gpu
        self._rows_RW: Tensor | None = None  # this worker's pool

    def register(self, memory: KvMemory) -> bytes:
        if not isinstance(memory, GpuKvMemory):
            raise TransportError("this pool is not in a GPU's memory")
        self._gpu.prepare(memory)
        exported = self._gpu.export_pool(memory)
        self._rows_RW = memory.rows_RW
        return self._publish(memory, GrantTable.create(memory.pages), exported)

    def close(self) -> None:
        super().close()
        self._rows_RW = None

    def _map_pool(self, info: MappedPeerInfo, grants: GrantTable) -> Tensor:
        assert self._rows_RW is not None
        rows = info.regions * info.grants.pages
        return self._gpu.map_pool(info.exported, rows, self._rows_RW.shape[1])

    def _unmap_pool(self, pool: Tensor) -> None:
        self._gpu.unmap_pool(pool)

    def _split(self, spans: Spans, peer: MappedPeer[Tensor]) -> Iterable[RowPair]:
        assert self._memory is not None
        pages = self._memory.pages, peer.grants.info.pages
        here, there = page_rows(spans, pages, self._memory.page_bytes)
        count = self._gpu.max_rows
        for start in range(0, len(here), count):
            yield here[start : start + count], there[start : start + count]

    def _copy_piece(self, piece: RowPair, generation: int, peer: MappedPeer[Tensor]) -> str:
        here, there = piece
        inside = bool(((there >= 0) & (there < len(peer.pool))).all())
        if not inside or not peer.grants.allows(generation, there % peer.grants.info.pages):
            return NOT_GRANTED
        assert self._rows_RW is not None
        try:
            self._gpu.wait(self._gpu.start_copy(self._rows_RW, here, peer.pool, there))
        except RuntimeError as lost:  # the GPU's own error: nothing runs on it any more
            return str(lost)
        return ""
