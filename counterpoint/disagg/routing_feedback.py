"""What routing learns from finished work: link bandwidths, TTFT errors, and who holds which prefix.

Promises: the same observations give the same estimates; no single observation changes an estimate
by much; everything is bounded. Must not: read a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

BANDWIDTH_DECAY = 15 / 16  # weight of older transfers, at each new one
MIN_TRANSFERS = 8  # before an observed bandwidth is used
MAX_CORRECTION = 4.0  # of a TTFT factor, either way from 1
CORRECTION_STEP = 1 / 16  # of the way to the observed factor, at each first token
MAX_ERRORS = 256  # remembered for quantiles


@dataclass(slots=True)
class ObservedBandwidth:
    """Decayed sums over transfers: bytes, and seconds in which writes were in flight."""

    bytes: float = 0.0
    seconds: float = 0.0
    transfers: int = 0

    def add(self, bytes: float, seconds: float) -> None:
        self.bytes = BANDWIDTH_DECAY * self.bytes + bytes
        self.seconds = BANDWIDTH_DECAY * self.seconds + seconds
        self.transfers += 1

    @property
    def is_reliable(self) -> bool:
        return self.transfers >= MIN_TRANSFERS

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds


@dataclass(slots=True)
class LinkBandwidth:
    """`nominal_bytes_per_s` holds for every link until transfers were observed. `control_s`: what a
    handoff costs beside its bytes. `links`: by (prefill worker, decode worker).

    A transfer that shares its link sees its share of it, which is what the next one can expect. A
    link without enough transfers of its own gets the mean over all links.
    """

    nominal_bytes_per_s: float
    kv_bytes_per_token: int
    control_s: float = 0.002
    links: dict[tuple[str, str], ObservedBandwidth] = field(default_factory=dict)
    all_links: ObservedBandwidth = field(default_factory=ObservedBandwidth)

    def observe(self, source: str, target: str, bytes: float, seconds: float) -> None:
        """A request's KV, `bytes`, went from `source` to `target` in `seconds` of writing."""
        if bytes <= 0 or seconds <= 0:
            return
        self.links.setdefault((source, target), ObservedBandwidth()).add(bytes, seconds)
        self.all_links.add(bytes, seconds)

    def bytes_per_s(self, source: str, target: str) -> float:
        """What the next transfer can expect."""
        own = self.links.get((source, target))
        if own is not None and own.is_reliable:
            return own.bytes_per_s
        return (
            self.all_links.bytes_per_s if self.all_links.is_reliable else self.nominal_bytes_per_s
        )

    def forget(self, worker: str) -> None:
        """The worker is gone; it may come back on another machine."""
        self.links = {ends: seen for ends, seen in self.links.items() if worker not in ends}


class TtftCorrection:
    """A factor per prefill worker, by which TTFT predictions from prices alone are multiplied.

    It stays within [1 / MAX_CORRECTION, MAX_CORRECTION].
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self._log_factors: dict[str, float] = {}
        self._errors: deque[float] = deque(maxlen=MAX_ERRORS)

    def factor(self, worker: str) -> float:
        return math.exp(self._log_factors.get(worker, 0.0))

    def factors(self) -> dict[str, float]:
        return {worker: self.factor(worker) for worker in self._log_factors}

    def forget(self, worker: str) -> None:
        """The worker is gone; another machine may come under its name."""
        self._log_factors.pop(worker, None)

    def observe(
        self, worker: str, uncorrected_ttft_s: float, predicted_ttft_s: float, ttft_s: float
    ) -> None:
        """`uncorrected_ttft_s`: what prices alone gave; `predicted_ttft_s`: with the factor."""
        if uncorrected_ttft_s <= 0 or ttft_s <= 0:
            return
        self.num_observed += 1
        self._errors.append(abs(predicted_ttft_s - ttft_s) / ttft_s)
        bound = math.log(MAX_CORRECTION)
        observed = min(bound, max(-bound, math.log(ttft_s / uncorrected_ttft_s)))
        known = self._log_factors.get(worker, 0.0)
        self._log_factors[worker] = known + CORRECTION_STEP * (observed - known)

    def relative_error(self, quantile: float) -> float:
        """Of |predicted - actual| / actual over the latest first tokens; 0 if there are none."""
        ordered = sorted(self._errors)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0


class PrefixIndex:
    """Which workers probably cache which pages, by page hash. A wrong guess costs time only.

    At most `max_pages` hashes are kept; the least recently used goes first.
    """

    def __init__(self, max_pages: int = 1 << 20) -> None:
        self.max_pages = max_pages
        self._workers: dict[bytes, set[str]] = {}  # in order of last use

    def add(self, worker: str, hashes: Sequence[bytes]) -> None:
        """`worker` has the pages `hashes`, a run from a prompt's start."""
        for page_hash in reversed(hashes):  # the prompt's start is used last, so it is kept longest
            workers = self._workers.pop(page_hash, None) or set()
            workers.add(worker)
            self._workers[page_hash] = workers
        while len(self._workers) > self.max_pages:
            del self._workers[next(iter(self._workers))]

    def forget(self, worker: str) -> None:
        """Its cache is gone (a restart, a change of weights)."""
        for page_hash in [h for h, workers in self._workers.items() if worker in workers]:
            self._workers[page_hash].discard(worker)
            if not self._workers[page_hash]:
                del self._workers[page_hash]

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """By worker, how many of `hashes` it has from the start; workers with none are left out."""
        found: dict[str, int] = {}
        holding: set[str] | None = None
        for depth, page_hash in enumerate(hashes, 1):
            workers = self._workers.get(page_hash, set())
            holding = set(workers) if holding is None else holding & workers
            if not holding:
                break
            for worker in holding:
                found[worker] = depth
        return found

    def __len__(self) -> int:
        return len(self._workers)
