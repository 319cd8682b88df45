"""ShmTransport: between processes of one host, with pools in shared memory (memfd).

Owns: the shared pool. It lies behind its grant table, each region at the start of a block.
"""

from __future__ import annotations

from collections.abc import Iterable

from counterpoint.kv_transfer.grant_table import GrantTable, round_up_to_block
from counterpoint.kv_transfer.mapped import MappedPeer, MappedPeerInfo, MappedTransport
from counterpoint.kv_transfer.memory import KvMemory, Spans, split_spans
from counterpoint.kv_transfer.transport import NOT_GRANTED, TransportError, Wake

PIECE_BYTES = 4 << 20


class ShmTransport(MappedTransport[KvMemory, Spans]):
    """`checksums`: compute those of what is written. Raises TransportError without memfd."""

    kind = "shm"

    def __init__(self, wake: Wake, checksums: bool = False) -> None:
        GrantTable.create(0).close()  # raises TransportError if it can't be done here
        super().__init__(wake, checksums)

    def allocate(self, pages: int, page_bytes: int, regions: int) -> KvMemory:
        """This worker's pool, zeroed. Only this memory can be registered."""
        data_bytes = regions * round_up_to_block(pages * page_bytes)
        self._grants = GrantTable.create(pages, data_bytes)
        self._memory = pool_behind(self._grants, page_bytes, regions)
        return self._memory

    def register(self, memory: KvMemory) -> bytes:
        if self._memory is None or self._grants is None or not same_memory(memory, self._memory):
            raise TransportError(
                "this pool is not in shared memory: make it with ShmTransport.allocate"
            )
        return self._publish(self._memory, self._grants)

    def _map_pool(self, info: MappedPeerInfo, grants: GrantTable) -> KvMemory:
        needed = info.regions * round_up_to_block(info.grants.pages * info.page_bytes)
        if info.grants.data_bytes != needed:
            raise TransportError(
                f"the peer's pool has {info.grants.data_bytes} bytes of shared memory, not {needed}"
            )
        return pool_behind(grants, info.page_bytes, info.regions)

    def _split(self, spans: Spans, peer: MappedPeer[KvMemory]) -> Iterable[Spans]:
        return split_spans(spans, PIECE_BYTES)

    def _copy_piece(self, piece: Spans, generation: int, peer: MappedPeer[KvMemory]) -> str:
        assert self._memory is not None
        page_bytes = peer.pool.page_bytes
        for region, source, target, size in piece.tolist():
            there, end = peer.pool.regions[region], target + size
            pages = slice(target // page_bytes, (end - 1) // page_bytes + 1)
            inside = target >= 0 and end <= there.nbytes
            if not inside or not peer.grants.allows(generation, pages):
                return NOT_GRANTED
            there[target:end] = self._memory.regions[region][source : source + size]
        return ""


def pool_behind(grants: GrantTable, page_bytes: int, regions: int) -> KvMemory:
    """The pool in the bytes that follow a grant table."""
    length = grants.info.pages * page_bytes
    block = round_up_to_block(length)
    starts = range(0, regions * block, block)
    return KvMemory(tuple(grants.data[start : start + length] for start in starts), page_bytes)


def same_memory(a: KvMemory, b: KvMemory) -> bool:
    """Whether two pools are the very same bytes."""
    where = [
        [(region.ctypes.data, region.nbytes) for region in memory.regions] for memory in (a, b)
    ]
    return where[0] == where[1] and a.page_bytes == b.page_bytes
