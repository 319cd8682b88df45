"""SimTransport: a transport without a network, for tests and simulations.

Owns: writes in flight, on a clock that its user sets.
Promises: bytes land when the user says so: by bandwidth and latency (`advance`), or by hand, in any
order and in pieces (`writes`, `land`, `complete`). A stalled link moves nothing. A cancelled write
keeps landing until it completes, as on real network hardware. Completed, Quiesced and LinkSevered
come only when none of their bytes can move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from numpy.typing import NDArray

from counterpoint.kv_transfer.memory import KvMemory, Spans, page_mask
from counterpoint.kv_transfer.transport import (
    NOT_GRANTED,
    Completed,
    LinkLost,
    LinkSevered,
    Notice,
    Quiesced,
)


@dataclass(slots=True, eq=False)
class SimWrite:
    """A posted write. Spans before `landed` are in place. `ends_s`: when it completes, if only time
    decides."""

    op: int
    source: SimTransport
    link: int
    target: SimTransport
    target_link: int
    generation: int
    spans: Spans
    ends_s: float
    landed: int = 0
    cancelled: bool = False
    refused: bool = False


@dataclass(slots=True, eq=False)
class SimNetwork:
    """All links between its SimTransports. `bandwidth`: bytes/s of each link in one direction;
    `latency_s`: from posting to the first byte. `checks_grants`: reading ends check every span and
    prove that a revoked generation is quiet, as TCP does; if not, bytes land wherever the writer
    says, as with RDMA. `slow_fence`: a disconnected link moves bytes until `sever`. `checksums`:
    writers compute them. `on_land` is called with every span that lands."""

    bandwidth: float = float("inf")
    latency_s: float = 0.0
    checks_grants: bool = False
    slow_fence: bool = False
    checksums: bool = False
    on_land: Callable[[SimWrite, Spans], None] | None = None
    now: float = 0.0
    writes: list[SimWrite] = field(default_factory=list)
    stalled: set[int] = field(default_factory=set)  # links, by the writing end's number
    severing: dict[int, SimTransport] = field(default_factory=dict)
    severed: set[int] = field(default_factory=set)
    _busy_until_s: dict[int, float] = field(default_factory=dict)

    def post(self, write: SimWrite) -> None:
        if not write.target.alive or self.severed & {write.link, write.target_link}:
            write.source.notices.append(LinkLost(write.link, "connection closed"))
            return
        start_s = max(self.now + self.latency_s, self._busy_until_s.get(write.link, 0.0))
        write.ends_s = start_s + int(write.spans[:, 3].sum()) / self.bandwidth
        self._busy_until_s[write.link] = write.ends_s
        self.writes.append(write)

    def advance(self, now: float) -> None:
        """Set the clock: writes that are due complete, in the order of posting."""
        self.now = now
        for write in [write for write in self.writes if write.ends_s <= now]:
            self.complete(write)

    @property
    def next_write_s(self) -> float | None:
        """When the next write completes; None: nothing moves."""
        return min((w.ends_s for w in self.writes if w.link not in self.stalled), default=None)

    def land(self, write: SimWrite, count: int) -> None:
        """Its next `count` spans arrive."""
        if write.link in self.stalled:
            return
        spans = write.spans[write.landed : write.landed + count]
        write.landed += len(spans)
        if len(spans):
            write.target.receive(write, spans)

    def complete(self, write: SimWrite, error: str = "") -> None:
        """End it. All of it is in place, unless there is an `error` or it was cancelled."""
        if write.link in self.stalled:
            return
        if not error and not write.cancelled:
            self.land(write, len(write.spans))
        if not error and write.refused:
            error = NOT_GRANTED
        if not error and write.landed < len(write.spans):
            error = "cancelled"
        self.writes.remove(write)
        memory, checksum = write.source.memory, None
        if self.checksums and memory is not None and not error:
            checksum = memory.checksum(write.spans)
        write.source.notices.append(Completed(write.op, error, checksum))

    def sever(self, link: int) -> None:
        """Nothing of a disconnected link is in flight any more."""
        for write in [w for w in self.writes if link in (w.link, w.target_link)]:
            self.writes.remove(write)
        self.severed.add(link)
        self.severing.pop(link).notices.append(LinkSevered(link))

    def kill(self, victim: SimTransport) -> None:
        """Its process dies. What it posted may still land. What was on its way to it is gone, and
        the writers see that."""
        victim.alive = False
        for write in [w for w in self.writes if w.target is victim]:
            self.writes.remove(write)
            if (lost := LinkLost(write.link, "connection reset")) not in write.source.notices:
                write.source.notices.append(lost)


class SimTransport:
    """One worker's transport. `peers`: by name, those that it can connect to."""

    kind = "sim"

    def __init__(self, network: SimNetwork, name: str, peers: dict[str, SimTransport]) -> None:
        self.network = network
        self.name = name
        self.peers = peers
        self.memory: KvMemory | None = None
        self.alive = True
        self.notices: list[Notice] = []
        self.links: dict[int, tuple[int, SimTransport]] = {}
        self.grants: dict[int, NDArray] = {}
        peers[name] = self

    def register(self, memory: KvMemory) -> bytes:
        self.memory = memory
        return self.name.encode()

    def connect(self, link: int, remote: int, metadata: bytes, writes: bool) -> None:
        self.links[link] = (remote, self.peers[metadata.decode()])

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        assert self.memory is not None
        self.grants[generation] = page_mask(pages, self.memory.pages)

    def revoke(self, generation: int) -> None:
        self.grants.pop(generation, None)
        if self.network.checks_grants:
            self.notices.append(Quiesced(generation))

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        remote, target = self.links[link]
        self.network.post(SimWrite(op, self, link, target, remote, generation, spans, 0.0))

    def cancel(self, op: int) -> None:
        for write in self.network.writes:
            if write.source is self and write.op == op:
                write.cancelled = True

    def disconnect(self, link: int) -> None:
        self.network.severing[link] = self
        if not self.network.slow_fence:
            self.network.sever(link)

    def poll(self) -> list[Notice]:
        notices, self.notices = self.notices, []
        return notices

    def close(self) -> None:
        for link in tuple(self.links):
            self.disconnect(link)
        self.links.clear()

    def receive(self, write: SimWrite, spans: Spans) -> None:
        """Bytes of the peer arrive."""
        source, memory = write.source.memory, self.memory
        assert source is not None and memory is not None
        if self.network.checks_grants:
            granted = self.grants.get(write.generation)
            if granted is None or not memory.is_granted(spans, granted):
                write.refused = True
                return
        if self.network.on_land is not None:
            self.network.on_land(write, spans)
        for region, start, end, size in spans.tolist():
            memory.regions[region][end : end + size] = source.regions[region][start : start + size]
