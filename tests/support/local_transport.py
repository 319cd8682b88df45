"""LocalTransport: between two workers of one process, for tests.

A write is a copy, made at once. Where both ends share a pool and a page keeps its place, nothing is
copied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from counterpoint.kv_transfer.memory import KvMemory, Spans, page_mask
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
    """`peers`: the workers of this process by name, shared by all its LocalTransports."""

    kind = "local"

    def __init__(self, wake: Wake, name: str, peers: dict[str, LocalTransport]) -> None:
        self._wake = wake
        self._name = name
        self._peers = peers
        self._lock = threading.Lock()  # of this worker's pool
        self._memory: KvMemory | None = None
        self._links: dict[int, tuple[int, LocalTransport]] = {}
        self._grants: dict[int, tuple[int, NDArray[np.bool_]]] = {}
        self._notices: list[Notice] = []

    def register(self, memory: KvMemory) -> bytes:
        self._memory = memory
        self._peers[self._name] = self
        return self._name.encode()

    def connect(self, link: int, remote: int, metadata: bytes, writes: bool) -> None:
        peer = self._peers.get(metadata.decode())
        if peer is None:
            raise TransportError(f"there is no worker {metadata.decode()!r} in this process")
        with self._lock:
            self._links[link] = (remote, peer)

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        assert self._memory is not None
        with self._lock:
            self._grants[generation] = (link, page_mask(pages, self._memory.pages))

    def revoke(self, generation: int) -> None:
        with self._lock:
            self._grants.pop(generation, None)
        self._notify(Quiesced(generation))

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        assert self._memory is not None
        remote, peer = self._links[link]
        try:
            error = peer.receive(remote, generation, spans, self._memory)
        except TransportError as gone:
            self._notify(LinkLost(link, str(gone)))
            return
        self._notify(Completed(op, error))

    def cancel(self, op: int) -> None:
        """It has completed already."""

    def disconnect(self, link: int) -> None:
        with self._lock:
            self._links.pop(link, None)
            self._grants = {g: grant for g, grant in self._grants.items() if grant[0] != link}
        self._notify(LinkSevered(link))

    def poll(self) -> list[Notice]:
        with self._lock:
            notices, self._notices = self._notices, []
            return notices

    def close(self) -> None:
        with self._lock:
            self._peers.pop(self._name, None)
            self._links.clear()
            self._grants.clear()

    def receive(self, link: int, generation: int, spans: Spans, source: KvMemory) -> str:
        """The peer writes here; why not, or "". Raises TransportError if the link is gone."""
        memory = self._memory
        assert memory is not None
        with self._lock:
            if link not in self._links:
                raise TransportError("the peer has closed the link")
            owner, granted = self._grants.get(generation, (0, None))
            if granted is None or owner != link or not memory.is_granted(spans, granted):
                return NOT_GRANTED
            shared = memory.regions[0] is source.regions[0]
            for region, start, end, size in spans.tolist():
                if not (shared and start == end):
                    part = source.regions[region][start : start + size]
                    memory.regions[region][end : end + size] = part
        return ""

    def _notify(self, notice: Notice) -> None:
        with self._lock:
            self._notices.append(notice)
        self._wake()
