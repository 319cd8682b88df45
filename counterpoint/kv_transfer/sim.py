"""SimTransport: a mover without a network, for tests and simulations.

Owns: writes in flight, on a clock that its user turns. Promises: bytes land when the user lets them: by bandwidth and latency
(`advance`), or by hand, in any order and in pieces (`flights`, `land`, `complete`); a stalled link moves nothing; a write that was
cancelled keeps landing until it completes, as real network hardware does.
Must not: lose the proof: Completed, Quiet and Severed come only when no byte of theirs can move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from numpy.typing import NDArray

from counterpoint.kv_transfer.memory import KvMemory, Spans, is_granted, page_mask
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
    """A posted write. Spans before `landed` are in place. `ends_s`: when it is complete, if time alone decides."""

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
    """All links between its SimLinks. `bandwidth`: bytes/s of each link in one direction, `latency_s`: from posting to the first
    byte. `checked`: receiving ends look at every span's grant and can prove that a revoked generation is quiet, as TCP can; if not,
    bytes land wherever the writer says, as RDMA does. `slow_fence`: a torn-down link goes on moving bytes until `sever`.
    `sums`: writers sum what they sent.
    `on_land` is told of every span that lands."""

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
    _busy_until: dict[int, float] = field(default_factory=dict)

    def post(self, flight: SimWrite) -> None:
        if (
            not flight.target.alive
            or flight.link in self.severed
            or flight.target_link in self.severed
        ):
            flight.source.notices.append(LinkLost(flight.link, "connection closed"))
            return
        start = max(self.now + self.latency_s, self._busy_until.get(flight.link, 0.0))
        flight.ends_s = start + int(flight.spans[:, 3].sum()) / self.bandwidth
        self._busy_until[flight.link] = flight.ends_s
        self.writes.append(flight)

    def advance(self, now: float) -> None:
        """Let time pass: what is due lands and completes, in the order of posting."""
        self.now = now
        for flight in [f for f in self.writes if f.ends_s <= now]:
            self.complete(flight)

    @property
    def next_write_s(self) -> float | None:
        """When the next write completes; None: nothing moves."""
        return min((f.ends_s for f in self.writes if f.link not in self.stalled), default=None)

    def land(self, flight: SimWrite, count: int) -> None:
        """Its next `count` spans arrive."""
        if flight.link in self.stalled:
            return
        spans = flight.spans[flight.landed : flight.landed + count]
        flight.landed += len(spans)
        if len(spans):
            flight.target.take(flight, spans)

    def complete(self, flight: SimWrite, error: str = "") -> None:
        """Its end. All of it is in place unless there is an `error` or it was cancelled."""
        if flight.link in self.stalled:
            return
        if not error and not flight.cancelled:
            self.land(flight, len(flight.spans))
        if not error and flight.refused:
            error = NOT_GRANTED
        if not error and flight.landed < len(flight.spans):
            error = "cancelled"
        self.writes.remove(flight)
        memory = flight.source.memory
        checksum = (
            memory.checksum(flight.spans)
            if self.checksums and memory is not None and not error
            else None
        )
        flight.source.notices.append(Completed(flight.op, error, checksum))

    def sever(self, link: int) -> None:
        """Nothing of a torn-down link is in flight any more."""
        for flight in [f for f in self.writes if link in (f.link, f.target_link)]:
            self.writes.remove(flight)
        self.severed.add(link)
        self.severing.pop(link).notices.append(LinkSevered(link))

    def kill(self, victim: SimTransport) -> None:
        """Its process dies. What it has posted may still land; what was on its way to it is gone, and the writers see that."""
        victim.alive = False
        for flight in [f for f in self.writes if f.target is victim]:
            self.writes.remove(flight)
            if (lost := LinkLost(flight.link, "connection reset")) not in flight.source.notices:
                flight.source.notices.append(lost)


class SimTransport:
    """One worker's mover. `others`: by name, whom it can connect to."""

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

    def connect(self, link: int, remote: int, blob: bytes, writes: bool) -> None:
        self.links[link] = (remote, self.peers[blob.decode()])

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
        for flight in self.network.writes:
            if flight.source is self and flight.op == op:
                flight.cancelled = True

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

    def take(self, flight: SimWrite, spans: Spans) -> None:
        """Bytes of the peer arrive."""
        source, here = flight.source.memory, self.memory
        assert source is not None and here is not None
        if self.network.checks_grants:
            allowed = self.grants.get(flight.generation)
            if allowed is None or not is_granted(
                spans, here.page_bytes, here.regions[0].nbytes, len(here.regions), allowed
            ):
                flight.refused = True
                return
        if self.network.on_land is not None:
            self.network.on_land(flight, spans)
        for region, start, end, size in spans.tolist():
            here.regions[region][end : end + size] = source.regions[region][start : start + size]
