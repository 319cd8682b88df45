"""Lanes of a pool: the lanes of all its workers in one picture.

Owns: where each worker's lanes stand in it. Promises: a worker keeps its place as long as the pool
has it. Must not: send anything, or count (merge_stats.py does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from counterpoint.serve.observability.merge_stats import add_rows
from counterpoint.serve.observability.pool_metrics import WorkerState
from counterpoint.serve.worker.registry import RegisteredWorker, WorkerRegistry
from counterpoint.stats import LaneStep, Stats

LANES = 2  # of one worker, at most
MAX_WORKERS = 1 << 10  # keeps the pass ids of several workers apart
FOREIGN_S = 60.0  # steps so far from now have times of another machine's clock


class WorkerLanes(NamedTuple):
    """`units`: of the worker's device; `roles`: of its lanes."""

    number: int
    name: str
    units: int = 1
    roles: tuple[str, ...] = ()


class PoolLanes:
    """Of the workers in `registry`."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry

    def workers(self) -> list[WorkerLanes]:
        """Those that this server started also while they are missing."""
        registry = self._registry
        names = dict.fromkeys((*registry.supervisor.slots, *registry.workers))
        return [self._lanes_of(number, name) for number, name in enumerate(names)]

    def _lanes_of(self, number: int, name: str) -> WorkerLanes:
        member = self._registry.workers.get(name)
        if member is None or member.ready is None:
            return WorkerLanes(number, name)
        return WorkerLanes(number, name, member.ready.units, member.ready.engine_info.roles)

    def running_steps(self, now_s: float) -> list[LaneStep]:
        """Steps in flight."""
        members = self._registry.workers
        return [
            step
            for place in self.workers()
            if place.name in members
            for step in lanes_of_worker(place, members[place.name].stats.running_steps, now_s)
        ]

    def stats_after(
        self, member: RegisteredWorker, before: Stats, total: Stats, now_s: float
    ) -> Stats:
        """`total`, with the time of all lanes and the steps that `member`, whose stats were
        `before`, has newly reported."""
        places = {place.name: place for place in self.workers()}
        recent = member.stats.recent_steps
        num_new = max(0, min(member.stats.steps - before.steps, len(recent)))
        return msgspec.structs.replace(
            total,
            recent_steps=lanes_of_worker(
                places[member.name], recent[len(recent) - num_new :], now_s
            ),
            lane_s=add_rows(
                worker_lane_times(places[name], other.stats)
                for name, other in self._registry.workers.items()
            ),
        )


def describe_workers(places: Sequence[WorkerLanes]) -> dict[str, Any]:
    """The lanes of all workers: the role of each, and its band of units, [first, how many]. The
    lanes of one worker share its band."""
    roles, bands, first = [], [], 0
    for place in places:
        roles += [*place.roles, *[""] * LANES][:LANES]
        bands += [(first, place.units)] * LANES
        first += place.units
    return {
        "roles": roles,
        "bands": bands,
        "units": first,
        "names": [place.name for place in places],
    }


def lanes_of_worker(
    place: WorkerLanes, steps: Sequence[LaneStep], now_s: float
) -> tuple[LaneStep, ...]:
    """Steps of one worker, renumbered for the picture. With times of another machine's clock, the
    newest ends now."""
    newest_s = max((max(step.started_s, step.ended_s) for step in steps), default=now_s)
    late_s = now_s - newest_s if abs(now_s - newest_s) > FOREIGN_S else 0.0
    return tuple(
        msgspec.structs.replace(
            step,
            lane=LANES * place.number + step.lane,
            pass_id=MAX_WORKERS * step.pass_id + place.number,
            started_s=step.started_s + late_s,
            ended_s=step.ended_s + late_s if step.ended_s else 0.0,
        )
        for step in steps
    )


def worker_lane_times(place: WorkerLanes, stats: Stats) -> tuple[tuple[str, str, float], ...]:
    """(worker and, if it has several lanes, role; activity; seconds)."""
    several = len(place.roles) > 1
    return tuple(
        (f"{place.name} {role}" if several else place.name, what, seconds)
        for role, what, seconds in stats.lane_s
    )


def worker_label(worker: WorkerState) -> dict[str, Any]:
    """A worker's row on the dashboard. `handoffs`: under way, by state; `pages`: held for them, by
    kind of hold."""
    stats, size = worker.stats, worker.stats.page_tokens
    return {
        "name": worker.name,
        "role": worker.role,
        "up": worker.up,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_tokens": {
            "total": stats.pages_total * size,
            "cached": stats.pages_cached * size,
            "free": stats.pages_free * size,
        },
        "handoffs": {state: count for state, count in worker.handoff_stats.states.items() if count},
        "pages": {hold: count for hold, count in worker.handoff_stats.pages.items() if count},
    }
