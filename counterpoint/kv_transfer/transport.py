"""Link: how KV bytes get from one worker's pool into another's.

Owns: the interface that every mover has, and its nouns. Promises: see each method; above all that *no notice comes before its
proof*. A cancelled write may still be landing: only Completed says that it is not. Where a mover can't prove that bytes stand
still, it stays silent, and the pages stay where they are.
Must not: know requests, tokens or handoffs.

Each end names a link by a number of its own (`link`) and knows the other end's (`remote`). One Link object serves all links of a
worker. All methods are called by one thread and return at once; notices are fetched with `poll`, and `wake` (a function given at
construction, called from any thread) says that there are some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from counterpoint.kv_transfer.memory import KvMemory, Spans

Wake = Callable[[], None]
NOT_GRANTED = "the peer has not granted these pages"  # why a write was not made


class TransportError(RuntimeError):
    """A mover can't be set up or can't reach its peer; the message says what to do."""


class Completed(NamedTuple):
    """Write `op` moves no byte any more. Empty `error`: all of it is in place. `checksum`: of what was read, if the mover sums."""

    op: int
    error: str = ""
    checksum: int | None = None


class Quiesced(NamedTuple):
    """No write under revoked `generation` can change a byte here any more."""

    generation: int


class LinkSevered(NamedTuple):
    """Nothing of disconnected `link` can change or read a byte here any more."""

    link: int


class LinkLost(NamedTuple):
    """The mover sees that the peer of `link` is gone. `disconnect` is still to be called."""

    link: int
    error: str


Notice = Completed | Quiesced | LinkSevered | LinkLost


class Transport(Protocol):
    kind: str

    def register(self, memory: KvMemory) -> bytes:
        """Take charge of this worker's pool, once. The blob tells a peer how to reach it; it may hold secrets, so it travels over
        an authenticated connection only. Raises TransportError if this memory can't be reached in this way."""
        ...

    def connect(self, link: int, remote: int, blob: bytes, writes: bool) -> None:
        """A link to the worker that made `blob`; `writes`: this end is the one that writes. Both ends connect, the reading one
        first. Raises TransportError."""
        ...

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        """From now on the peer may write `pages` under `generation`, which has never been used before."""
        ...

    def revoke(self, generation: int) -> None:
        """Take nothing more under it. Quiet follows when and if that is proven."""
        ...

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        """Copy `spans` to the peer. Completed follows, unless the link is disconnected first. Writes need not be in order."""
        ...

    def cancel(self, op: int) -> None:
        """Try to stop it. Completed follows as for any write: at its end, not before."""
        ...

    def disconnect(self, link: int) -> None:
        """Tear the link down; no more Completed of it. Severed follows when and if it is proven."""
        ...

    def poll(self) -> list[Notice]:
        """What has happened since the last call."""
        ...

    def close(self) -> None:
        """Disconnect everything, stop threads, leave nothing behind (files, sockets, mappings)."""
        ...
