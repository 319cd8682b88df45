"""The interface of every KV transport, and the notices that it gives.

Promises: a notice comes only when it is proven. A cancelled write may still be landing; only
Completed says that it is not. A transport that cannot prove that no bytes move gives no notice,
and the pages stay reserved.
Must not: know requests, tokens or handoffs.

A *link* connects two workers. Each end has its own number for it (`link`) and knows the other end's
(`remote`). One Transport object serves all links of a worker. One thread calls all methods, and
each returns at once. `poll` fetches notices; `wake`, given at construction and called from any
thread, says that there are some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from counterpoint.kv_transfer.memory import KvMemory, Spans

Wake = Callable[[], None]
NOT_GRANTED = "the peer has not granted these pages"  # why a write was refused


class TransportError(RuntimeError):
    """A transport can't be set up or can't reach its peer; the message says what to do."""


class Completed(NamedTuple):
    """Write `op` moves no more bytes. Without `error`, all of it is in place. `checksum`: of the
    bytes read, if the transport computes it."""

    op: int
    error: str = ""
    checksum: int | None = None


class Quiesced(NamedTuple):
    """No write under the revoked `generation` can change a byte here any more."""

    generation: int


class LinkSevered(NamedTuple):
    """Nothing on the disconnected `link` can change or read a byte here any more."""

    link: int


class LinkLost(NamedTuple):
    """The peer of `link` is gone. `disconnect` must still be called."""

    link: int
    error: str


Notice = Completed | Quiesced | LinkSevered | LinkLost


class Transport(Protocol):
    kind: str

    def register(self, memory: KvMemory) -> bytes:
        """Register this worker's pool, once. Returns what a peer needs to reach it. That may hold
        secrets: send it over an authenticated connection only. Raises TransportError if this
        transport can't reach such memory."""
        ...

    def connect(self, link: int, remote: int, metadata: bytes, writes: bool) -> None:
        """Open a link to the worker whose `register` gave `metadata`. `writes`: this end writes.
        Both ends connect, the reading end first. Raises TransportError."""
        ...

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        """Let the peer write `pages` under `generation`, a number never used before."""
        ...

    def revoke(self, generation: int) -> None:
        """Accept no more writes under it. Quiesced follows when and if that is proven."""
        ...

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        """Copy `spans` to the peer. Completed follows, unless the link is disconnected first.
        Writes may complete in any order."""
        ...

    def cancel(self, op: int) -> None:
        """Try to stop write `op`. Completed follows at its end, as for any write."""
        ...

    def disconnect(self, link: int) -> None:
        """Tear the link down; no more Completed of it. LinkSevered follows when and if proven."""
        ...

    def poll(self) -> list[Notice]:
        """Notices since the last call."""
        ...

    def close(self) -> None:
        """Disconnect all links, stop threads, leave no files, sockets or mappings behind."""
        ...
