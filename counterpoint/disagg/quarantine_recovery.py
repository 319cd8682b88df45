"""Wear: pages that a worker can't use again, and when it is started anew for that.

Owns: since when each worker has had too many pages in quarantine, the one that is being replaced. Promises: pure; one worker at a
time, and it first lets everything go; what is in quarantine for a moment (any abort) sets nothing going.
Must not: free a page (only proof does, or the end of the process whose pages they are).

Only a mover that has no proof for the writes of a dead peer leaves pages so (NIXL between hosts: neither removing the peer's agent
nor deregistering the memory stops them, docs/decisions/transports.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from counterpoint.disagg.role_rebalancer import CancelDrain, StartDrain

SHARE = 1 / 8  # of a worker's pages, in quarantine
PATIENCE_S = 30.0  # for so long
DRAIN_S = 120.0  # most time for it to empty


class WorkerQuarantine(NamedTuple):
    """A worker. `share`: of its pages, in quarantine; `drained`: no request is on it."""

    name: str
    share: float
    is_drained: bool


class ReplaceWorker(NamedTuple):
    """`worker` is empty: end it, so that it is started again."""

    worker: str


class QuarantineRecovery:
    def __init__(
        self, share: float = SHARE, patience_s: float = PATIENCE_S, drain_s: float = DRAIN_S
    ) -> None:
        self.share = share
        self.patience_s = patience_s
        self.drain_s = drain_s
        self._over_limit_since_s: dict[str, float] = {}
        self._draining: tuple[str, float] | None = None  # who, since when

    def tick(
        self, now: float, workers: Sequence[WorkerQuarantine]
    ) -> list[StartDrain | ReplaceWorker | CancelDrain]:
        """`workers`: those that are there and would be started again."""
        worn = {worker.name for worker in workers if worker.share >= self.share}
        self._over_limit_since_s = {name: self._over_limit_since_s.get(name, now) for name in worn}
        if self._draining is not None:
            return self._continue_drain(now, *self._draining, workers)
        due = [
            worker
            for worker in workers
            if now - self._over_limit_since_s.get(worker.name, now) >= self.patience_s
        ]
        if not due:
            return []
        worst = max(due, key=lambda worker: (worker.share, worker.name))
        self._draining = (worst.name, now)
        return [StartDrain(worst.name)]

    def _continue_drain(
        self, now: float, name: str, since_s: float, workers: Sequence[WorkerQuarantine]
    ) -> list[StartDrain | ReplaceWorker | CancelDrain]:
        worker = next((worker for worker in workers if worker.name == name), None)
        late = now >= since_s + self.drain_s
        if worker is not None and not worker.is_drained and not late:
            return []
        self._draining = None
        self._over_limit_since_s.pop(name, None)
        if worker is None:
            return []  # it has ended by itself
        return [ReplaceWorker(name) if worker.is_drained else CancelDrain(name)]
