"""Wires: what the links between workers carry, as it was told at first and as finished transfers have shown since.

Owns: the estimate of each link's bandwidth. Promises: pure (the same transfers give the same estimate); it moves slowly, so one
odd transfer doesn't turn the router; a link without transfers of its own counts as the others do.
Must not: read a clock (transfers come with their seconds).
"""

from __future__ import annotations

from dataclasses import dataclass, field

KEPT = 15 / 16  # of what was known, at each transfer
FEWEST = 8  # transfers before they are believed


@dataclass(slots=True)
class ObservedBandwidth:
    """Of the latest transfers, older ones counting less: bytes, and the seconds in which some were under way."""

    bytes: float = 0.0
    seconds: float = 0.0
    transfers: int = 0

    def add(self, bytes: float, seconds: float) -> None:
        self.bytes = KEPT * self.bytes + bytes
        self.seconds = KEPT * self.seconds + seconds
        self.transfers += 1

    @property
    def is_reliable(self) -> bool:
        return self.transfers >= FEWEST

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds


@dataclass(slots=True)
class LinkBandwidth:
    """`bandwidth` in bytes/s, of every link until transfers have been seen; `control_s`: what a handoff costs beside its bytes. A
    transfer that shares its link with others sees its share of it, and that is what the next one can expect."""

    nominal_bytes_per_s: float
    kv_bytes_per_token: int
    control_s: float = 0.002
    links: dict[tuple[str, str], ObservedBandwidth] = field(
        default_factory=dict
    )  # by (prefill worker, decode worker)
    all_links: ObservedBandwidth = field(default_factory=ObservedBandwidth)

    def observe(self, source: str, target: str, bytes: float, seconds: float) -> None:
        """All of a request's KV, `bytes`, has gone from `source` to `target`; writes were under way for `seconds`."""
        if bytes <= 0 or seconds <= 0:
            return
        self.links.setdefault((source, target), ObservedBandwidth()).add(bytes, seconds)
        self.all_links.add(bytes, seconds)

    def bytes_per_s(self, source: str, target: str) -> float:
        """Bytes/s that the next transfer can expect."""
        own = self.links.get((source, target))
        if own is not None and own.is_reliable:
            return own.bytes_per_s
        return (
            self.all_links.bytes_per_s if self.all_links.is_reliable else self.nominal_bytes_per_s
        )

    def forget(self, worker: str) -> None:
        """It is gone; it may come back on another machine."""
        self.links = {ends: carried for ends, carried in self.links.items() if worker not in ends}
