"""Stage: the workers of a pool as lanes of one picture.

Owns: where each worker stands in it, and the steps of all in one order of lanes. Promises: pure; a worker keeps its place as long
as the pool has it. Must not: send anything, or count (totals.py does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from counterpoint.serve.observability.pool_metrics import WorkerState
from counterpoint.stats import LaneStep, Stats

LANES = 2  # of one worker, at most
MAX_WORKERS = 1 << 10  # of workers; their numbers of passes are kept apart
FOREIGN_S = 60.0  # steps so far from now are told on another machine's clock


class WorkerLanes(NamedTuple):
    """`units`: of the worker's device; `roles`: of its lanes."""

    number: int
    name: str
    units: int = 1
    roles: tuple[str, ...] = ()


def describe_workers(places: Sequence[WorkerLanes]) -> dict[str, Any]:
    """The lanes of all workers: the role of each, and its band of units, [first, how many]. A worker's lanes share its band."""
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
    """Steps of one worker, as those of its lanes in the picture. Those of another machine's clock end now."""
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
    """What its lanes did with their time, by the worker's name."""
    several = len(place.roles) > 1
    return tuple(
        (f"{place.name} {role}" if several else place.name, what, seconds)
        for role, what, seconds in stats.lane_s
    )


def worker_label(worker: WorkerState) -> dict[str, Any]:
    """A worker in figures. `handoffs`: under way, by state; `pages`: held for them, by what for."""
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
