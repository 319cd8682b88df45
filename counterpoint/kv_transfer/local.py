"""LocalTransport: between two workers of one process.

Owns: nothing but the registry of those workers. Promises: a write is a copy, made at once; where both ends share a pool and a page
keeps its place, nothing is copied (the handoff is then a move of block tables).
Must not: cross a process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from counterpoint.kv_transfer.memory import KvMemory, Spans, is_granted, page_mask
from counterpoint.kv_transfer.transport import (
    NOT_GRANTED,
    Completed,
    LinkLost,
    LinkSevered,
    Notice,
    Quiesced,
    TransportError,
    Wake,
)


class LocalTransport:
    """`others`: the workers of this process by name, shared by all its LocalLinks."""

    kind = "local"

    def __init__(self, wake: Wake, name: str, others: dict[str, LocalTransport]) -> None:
        self._wake = wake
        self._name = name
        self._others = others
        self._lock = threading.Lock()  # of this worker's pool
        self._memory: KvMemory | None = None
        self._peers: dict[int, tuple[int, LocalTransport]] = {}
        self._grants: dict[int, tuple[int, NDArray[np.bool_]]] = {}
        self._notices: list[Notice] = []

    def register(self, memory: KvMemory) -> bytes:
        self._memory = memory
        self._others[self._name] = self
        return self._name.encode()

    def connect(self, link: int, remote: int, blob: bytes, writes: bool) -> None:
        peer = self._others.get(blob.decode())
        if peer is None:
            raise TransportError(f"there is no worker {blob.decode()!r} in this process")
        with self._lock:
            self._peers[link] = (remote, peer)

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        assert self._memory is not None
        with self._lock:
            self._grants[generation] = (link, page_mask(pages, self._memory.pages))

    def revoke(self, generation: int) -> None:
        with self._lock:
            self._grants.pop(generation, None)
        self._notice(Quiesced(generation))

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        assert self._memory is not None
        remote, peer = self._peers[link]
        try:
            error = peer.take(remote, generation, spans, self._memory)
        except TransportError as gone:
            self._notice(LinkLost(link, str(gone)))
            return
        self._notice(Completed(op, error))

    def cancel(self, op: int) -> None:
        """It has completed already."""

    def disconnect(self, link: int) -> None:
        with self._lock:
            self._peers.pop(link, None)
            self._grants = {g: grant for g, grant in self._grants.items() if grant[0] != link}
        self._notice(LinkSevered(link))

    def poll(self) -> list[Notice]:
        with self._lock:
            notices, self._notices = self._notices, []
            return notices

    def close(self) -> None:
        with self._lock:
            self._others.pop(self._name, None)
            self._peers.clear()
            self._grants.clear()

    def take(self, link: int, generation: int, spans: Spans, source: KvMemory) -> str:
        """The peer writes here; why not, or "". Raises TransportError if the link is gone."""
        here = self._memory
        assert here is not None
        with self._lock:
            if link not in self._peers:
                raise TransportError("the peer has closed the link")
            owner, allowed = self._grants.get(generation, (0, None))
            size = here.regions[0].nbytes
            if (
                allowed is None
                or owner != link
                or not is_granted(spans, here.page_bytes, size, len(here.regions), allowed)
            ):
                return NOT_GRANTED
            shared = here.regions[0] is source.regions[0]
            for region, start, end, size in spans.tolist():
                if not (shared and start == end):
                    here.regions[region][end : end + size] = source.regions[region][
                        start : start + size
                    ]
        return ""

    def _notice(self, notice: Notice) -> None:
        with self._lock:
            self._notices.append(notice)
        self._wake()
