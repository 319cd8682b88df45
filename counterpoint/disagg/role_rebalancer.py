"""Elastic: which worker should change its role, and when.

Owns: the counters of missed targets, the one change in flight, the epoch. Promises: a role changes only when every worker of a pool
is predicted to miss its target for `persist` ticks, the pool that gives a worker would still keep its own without it, and nothing
else is changing; never below one worker of each ability; a worker that changes first lets everything go (Drain), and only then
is it committed, with a new epoch. A drain that does not end is called off.
Must not: predict (the router's estimator does), or touch a worker.

A worker of role BOTH counts in both pools and never changes. After Dynamo's planner: growing asks that *all* workers miss,
shrinking asks what the others would look like with N/(N - 1) of their load; thresholds on utilisation alone swing to and fro.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from counterpoint.types import Role


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's predictions for its next requests. `ttft_s`: queue and prefill; `compute_s`: the prefill alone; `tpot_s`: a decode
    step. `kv_share`: of its pages, held by requests. `drained`: nothing of its role is left on it."""

    name: str
    role: Role
    ttft_s: float = 0.0
    compute_s: float = 0.0
    tpot_s: float = 0.0
    kv_share: float = 0.0
    drained: bool = False


@dataclass(frozen=True, slots=True)
class RebalanceTargets:
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class RebalanceConfig:
    """`persist`: ticks in a row in which a pool must miss its target. `slack`: of a target, that a donor pool must keep to;
    `kv_slack`: of its pages. `cool_s`: pause after a change. `drain_s`: most time for a worker to empty."""

    persist_ticks: int = 3
    slack: float = 0.8
    kv_slack: float = 0.9
    cooldown_s: float = 30.0
    drain_s: float = 120.0


class StartDrain(NamedTuple):
    """Offer `worker` nothing new of its old role."""

    worker: str


class CommitRole(NamedTuple):
    """`worker` is empty: it has `role` from `epoch` on."""

    worker: str
    role: Role
    epoch: int


class CancelDrain(NamedTuple):
    """`worker` keeps its role: it did not become empty."""

    worker: str


Change = StartDrain | CommitRole | CancelDrain


@dataclass(slots=True)
class RoleChange:
    worker: str
    role: Role
    since_s: float


class RoleRebalancer:
    """Called every few seconds with the loads of all living workers."""

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
            if self._missed_ticks[role] >= self.config.persist_ticks and not self._missed_ticks[donor_role]:
                donor = self._donor(donor_role, loads)
                if donor is not None:
                    self.change_in_flight = RoleChange(donor.name, role, now)
                    return [StartDrain(donor.name)]
        return []

    def _continue_change(self, now: float, moving: RoleChange, loads: Sequence[WorkerLoad]) -> list[Change]:
        worker = next((load for load in loads if load.name == moving.worker), None)
        late = now >= moving.since_s + self.config.drain_s
        if worker is not None and not worker.drained and not late:
            return []
        self.change_in_flight = None
        self._cooldown_until_s = now + self.config.cooldown_s
        if worker is None:
            return []  # it died: the supervisor starts it again, in its old role
        if not worker.drained:
            return [CancelDrain(moving.worker)]
        self.epoch += 1
        self._missed_ticks[moving.role] = 0
        return [CommitRole(moving.worker, moving.role, self.epoch)]

    def _misses(self, load: WorkerLoad, role: Role) -> bool:
        if role is Role.PREFILL:
            return load.ttft_s > self.targets.ttft_s
        return load.tpot_s > self.targets.tpot_s or load.kv_share > 1 - 1e-9

    def _donor(self, role: Role, loads: Sequence[WorkerLoad]) -> WorkerLoad | None:
        """The least loaded worker of `role`, if the others can carry its load; None if they can't, or there are no others."""
        pool = [load for load in loads if load.role is role]
        staying = len(pool) + sum(load.role is Role.BOTH for load in loads) - 1
        if not pool or staying < 1:
            return None
        donor = min(pool, key=lambda load: (load.ttft_s, load.kv_share, load.tpot_s, load.name))
        factor = (staying + 1) / staying
        rest = [load for load in loads if load.role in (role, Role.BOTH) and load is not donor]
        return donor if all(self._would_meet(load, role, factor) for load in rest) else None

    def _would_meet(self, load: WorkerLoad, role: Role, factor: float) -> bool:
        """With `factor` times its load. Queueing grows with the load; a request's own prefill does not."""
        slack = self.config.slack
        if role is Role.PREFILL:
            room = self.targets.ttft_s - load.compute_s
            return (load.ttft_s - load.compute_s) * factor < slack * room
        return (
            load.tpot_s * factor < slack * self.targets.tpot_s
            and load.kv_share * factor < self.config.kv_slack
        )
