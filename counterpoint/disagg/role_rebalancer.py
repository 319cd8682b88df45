"""When a worker is drained: to change its role, or to be restarted because of quarantined pages.

Owns: how long targets have been missed or pages quarantined, the change in flight, the epoch.
Promises: one change at a time per cause, and a worker is changed only when it is empty; a drain
that does not end is cancelled. Must not: predict loads (LoadTracker does), touch a worker, or free
a page (only proof does, or the end of the process that owns it).

A role changes when every worker of a pool is predicted to miss its target for `persist_ticks` ticks
and the donor pool would still meet its own without the worker; no pool becomes empty. A worker of
role BOTH counts in both pools and never changes. After Dynamo's planner: a pool grows when *all* of
its workers miss, and shrinks if the others could carry N/(N - 1) of their load; thresholds on
utilisation alone oscillate.

Only a transport that can't prove that a dead peer's writes have ended leaves pages in quarantine:
NIXL between hosts, where neither removing the peer's agent nor deregistering the memory stops them
(docs/decisions/transports.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from counterpoint.types import Role

MAX_QUARANTINED_SHARE = 1 / 8  # of a worker's pages
QUARANTINE_PATIENCE_S = 30.0  # pages in quarantine for less (any abort) cause nothing
DRAIN_S = 120.0  # most time for a worker to empty


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Predictions for a worker's next requests. `ttft_s`: queue and prefill; `compute_s`: prefill
    alone; `tpot_s`: a decode step. `kv_share`: of its pages, held by requests. `is_drained`: it
    has no request of its role."""

    name: str
    role: Role
    ttft_s: float = 0.0
    compute_s: float = 0.0
    tpot_s: float = 0.0
    kv_share: float = 0.0
    is_drained: bool = False


@dataclass(frozen=True, slots=True)
class RebalanceTargets:
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class RebalanceConfig:
    """`persist_ticks`: how many ticks in a row a pool must miss its target. `slack`: the share of a
    target, and `kv_slack` of its pages, that a donor pool must keep to. `cooldown_s`: pause after a
    change. `drain_s`: most time for a worker to empty."""

    persist_ticks: int = 3
    slack: float = 0.8
    kv_slack: float = 0.9
    cooldown_s: float = 30.0
    drain_s: float = DRAIN_S


class StartDrain(NamedTuple):
    """Send `worker` no new requests."""

    worker: str


class CommitRole(NamedTuple):
    """`worker` is empty: it has `role` from `epoch` on."""

    worker: str
    role: Role
    epoch: int


class CancelDrain(NamedTuple):
    """`worker` did not empty: it stays as it is."""

    worker: str


class ReplaceWorker(NamedTuple):
    """`worker` is empty: end it, so that it is started again."""

    worker: str


Change = StartDrain | CommitRole | CancelDrain


@dataclass(slots=True)
class RoleChange:
    worker: str
    role: Role
    since_s: float


class RoleRebalancer:
    """To be called every few seconds with the loads of all workers."""

    def __init__(
        self, targets: RebalanceTargets, config: RebalanceConfig = RebalanceConfig()
    ) -> None:
        self.targets = targets
        self.config = config
        self.epoch = 0
        self.change_in_flight: RoleChange | None = None
        self._missed_ticks = {Role.PREFILL: 0, Role.DECODE: 0}
        self._cooldown_until_s = float("-inf")

    def tick(self, now: float, loads: Sequence[WorkerLoad]) -> list[Change]:
        for role in self._missed_ticks:
            pool = [load for load in loads if load.role in (role, Role.BOTH)]
            misses = bool(pool) and all(self._misses(load, role) for load in pool)
            self._missed_ticks[role] = self._missed_ticks[role] + 1 if misses else 0
        if self.change_in_flight is not None:
            return self._continue_change(now, self.change_in_flight, loads)
        if now < self._cooldown_until_s:
            return []
        for role, donor_role in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            if (
                self._missed_ticks[role] >= self.config.persist_ticks
                and not self._missed_ticks[donor_role]
            ):
                donor = self._donor(donor_role, loads)
                if donor is not None:
                    self.change_in_flight = RoleChange(donor.name, role, now)
                    return [StartDrain(donor.name)]
        return []

    def _continue_change(
        self, now: float, moving: RoleChange, loads: Sequence[WorkerLoad]
    ) -> list[Change]:
        worker = next((load for load in loads if load.name == moving.worker), None)
        late = now >= moving.since_s + self.config.drain_s
        if worker is not None and not worker.is_drained and not late:
            return []
        self.change_in_flight = None
        self._cooldown_until_s = now + self.config.cooldown_s
        if worker is None:
            return []  # the supervisor restarts it in its old role
        if not worker.is_drained:
            return [CancelDrain(moving.worker)]
        self.epoch += 1
        self._missed_ticks[moving.role] = 0
        return [CommitRole(moving.worker, moving.role, self.epoch)]

    def _misses(self, load: WorkerLoad, role: Role) -> bool:
        if role is Role.PREFILL:
            return load.ttft_s > self.targets.ttft_s
        return load.tpot_s > self.targets.tpot_s or load.kv_share > 1 - 1e-9

    def _donor(self, role: Role, loads: Sequence[WorkerLoad]) -> WorkerLoad | None:
        """The least loaded worker of `role`, if there are others that can carry its load."""
        pool = [load for load in loads if load.role is role]
        staying = len(pool) + sum(load.role is Role.BOTH for load in loads) - 1
        if not pool or staying < 1:
            return None
        donor = min(pool, key=lambda load: (load.ttft_s, load.kv_share, load.tpot_s, load.name))
        factor = (staying + 1) / staying
        rest = [load for load in loads if load.role in (role, Role.BOTH) and load is not donor]
        return donor if all(self._would_meet(load, role, factor) for load in rest) else None

    def _would_meet(self, load: WorkerLoad, role: Role, factor: float) -> bool:
        """With `factor` times its load. Queueing grows with load; one prefill does not."""
        slack = self.config.slack
        if role is Role.PREFILL:
            room = self.targets.ttft_s - load.compute_s
            return (load.ttft_s - load.compute_s) * factor < slack * room
        return (
            load.tpot_s * factor < slack * self.targets.tpot_s
            and load.kv_share * factor < self.config.kv_slack
        )


class WorkerQuarantine(NamedTuple):
    """`share`: of its pages, in quarantine."""

    name: str
    share: float
    is_drained: bool


class QuarantineRecovery:
    """Restarts a worker that had `share` of its pages in quarantine for `patience_s`."""

    def __init__(
        self,
        share: float = MAX_QUARANTINED_SHARE,
        patience_s: float = QUARANTINE_PATIENCE_S,
        drain_s: float = DRAIN_S,
    ) -> None:
        self.share = share
        self.patience_s = patience_s
        self.drain_s = drain_s
        self._over_limit_since_s: dict[str, float] = {}
        self._draining: tuple[str, float] | None = None  # worker, since when

    def tick(
        self, now: float, workers: Sequence[WorkerQuarantine]
    ) -> list[StartDrain | ReplaceWorker | CancelDrain]:
        """`workers`: those that run and would be restarted."""
        over = {worker.name for worker in workers if worker.share >= self.share}
        since_s = self._over_limit_since_s
        self._over_limit_since_s = since_s = {name: since_s.get(name, now) for name in over}
        if self._draining is not None:
            return self._continue_drain(now, *self._draining, workers)
        due = [w for w in workers if now - since_s.get(w.name, now) >= self.patience_s]
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
            return []  # it ended by itself
        return [ReplaceWorker(name) if worker.is_drained else CancelDrain(name)]
