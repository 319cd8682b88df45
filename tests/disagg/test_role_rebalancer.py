"""Roles follow the load and do not oscillate."""

from __future__ import annotations

import itertools
import random

import pytest

from counterpoint.disagg.role_rebalancer import (
    CancelDrain,
    CommitRole,
    RebalanceConfig,
    RebalanceTargets,
    RoleRebalancer,
    StartDrain,
    WorkerLoad,
)
from counterpoint.types import Role

TARGETS = RebalanceTargets(ttft_s=1.0, tpot_s=0.05)
SLOW, FINE = 2.0, 0.3


def prefill(name: str, ttft_s: float = FINE, **kwargs) -> WorkerLoad:
    return WorkerLoad(name, Role.PREFILL, ttft_s=ttft_s, compute_s=0.2, **kwargs)


def decode(name: str, tpot_s: float = 0.01, kv_share: float = 0.2, **kwargs) -> WorkerLoad:
    return WorkerLoad(name, Role.DECODE, tpot_s=tpot_s, kv_share=kv_share, **kwargs)


def ticks(
    elastic: RoleRebalancer,
    loads: list[WorkerLoad],
    count: int,
    start: float = 0.0,
    pause: float = 5.0,
) -> list:
    return [change for i in range(count) for change in elastic.tick(start + pause * i, loads)]


NEEDY = [prefill("p0", SLOW), decode("d0"), decode("d1"), decode("d2")]


def test_a_pool_that_misses_for_long_gets_a_worker():
    elastic = RoleRebalancer(TARGETS)
    assert ticks(elastic, NEEDY, 2) == []
    assert elastic.tick(10, NEEDY) == [StartDrain("d0")]
    assert elastic.tick(15, NEEDY) == [], "one change at a time"
    empty = [prefill("p0", SLOW), decode("d0", is_drained=True), decode("d1"), decode("d2")]
    assert elastic.tick(20, empty) == [CommitRole("d0", Role.PREFILL, 1)]
    after = [prefill("p0", SLOW), prefill("d0", SLOW), decode("d1"), decode("d2")]
    assert ticks(elastic, after, 5, start=25) == [], "it cools down"
    assert ticks(elastic, after, 3, start=50) == [StartDrain("d1")]


def test_a_moment_is_not_enough():
    elastic = RoleRebalancer(TARGETS)
    for i in range(40):
        assert elastic.tick(5.0 * i, NEEDY if i % 3 else [prefill("p0"), *NEEDY[1:]]) == []


def test_one_good_worker_is_enough():
    assert ticks(RoleRebalancer(TARGETS), [*NEEDY, prefill("p1")], 10) == []


@pytest.mark.parametrize(
    "others",
    [
        [decode("d0", tpot_s=0.03), decode("d1", tpot_s=0.03)],  # the one left would take 0.06 s
        [decode("d0", kv_share=0.5), decode("d1", kv_share=0.5)],  # its pages would be full
        [decode("d0")],  # it is the last
        [decode("d0", tpot_s=0.06), decode("d1", tpot_s=0.06)],  # it misses itself
    ],
)
def test_a_pool_gives_nobody_that_it_needs(others):
    assert ticks(RoleRebalancer(TARGETS), [prefill("p0", SLOW), *others], 10) == []


def test_the_other_way_round():
    loads = [prefill("p0"), prefill("p1"), decode("d0", tpot_s=0.09)]
    assert ticks(RoleRebalancer(TARGETS), loads, 3) == [StartDrain("p0")]
    heavy = [prefill("p0", 0.6), prefill("p1", 0.6), decode("d0", tpot_s=0.09)]
    assert ticks(RoleRebalancer(TARGETS), heavy, 9) == [], (
        "with twice the queue the other would miss"
    )


def test_workers_of_both_roles_count_but_do_not_move():
    both = WorkerLoad("b", Role.BOTH, ttft_s=SLOW, compute_s=0.2, tpot_s=0.01, kv_share=0.1)
    assert ticks(RoleRebalancer(TARGETS), [both, prefill("p0", SLOW), decode("d0")], 3) == [
        StartDrain("d0")
    ]
    assert ticks(RoleRebalancer(TARGETS), [both, prefill("p0", SLOW)], 9) == []


def test_a_worker_that_does_not_empty_keeps_its_role():
    elastic = RoleRebalancer(TARGETS, RebalanceConfig(drain_s=20.0))
    ticks(elastic, NEEDY, 3)
    assert ticks(elastic, NEEDY, 4, start=15) == [CancelDrain("d0")]
    assert elastic.change_in_flight is None and elastic.epoch == 0


def test_a_worker_that_dies_while_it_drains():
    elastic = RoleRebalancer(TARGETS)
    ticks(elastic, NEEDY, 3)
    assert elastic.tick(20, NEEDY[:1] + NEEDY[2:]) == [] and elastic.change_in_flight is None


def day(
    patience: RebalanceConfig, demand, seconds: float = 3600.0, workers: int = 6, seed: int = 1
) -> list[tuple[float, CommitRole]]:
    """A fluid model of two pools: each worker of a pool has an equal share of the demand (in
    workers); the queue's part of the TTFT is that of M/M/1, and times per token grow with the
    batch. Measurements are noisy. The commits, with their times."""
    rng = random.Random(seed)
    elastic = RoleRebalancer(TARGETS, patience)
    roles = {f"w{i}": Role.PREFILL if i < workers // 2 else Role.DECODE for i in range(workers)}
    draining: dict[str, float] = {}
    commits = []
    now = 0.0
    while now < seconds:
        prefill_demand, decode_demand = demand(now)
        active = {name: role for name, role in roles.items() if name not in draining}
        loads = []
        for name, role in roles.items():
            pool = max(1, sum(r is role for r in active.values()))
            busy = (
                (prefill_demand if role is Role.PREFILL else decode_demand)
                / pool
                * rng.uniform(0.9, 1.1)
            )
            gone = name in draining and now > draining[name] + 15
            if role is Role.PREFILL:
                loads.append(
                    prefill(
                        name, min(20.0, 0.2 + 0.2 * busy / max(0.01, 1 - busy)), is_drained=gone
                    )
                )
            else:
                loads.append(
                    decode(name, 0.01 + 0.03 * busy, min(1.0, 0.8 * busy), is_drained=gone)
                )
        for change in elastic.tick(now, loads):
            if isinstance(change, StartDrain):
                draining[change.worker] = now
            else:
                del draining[change.worker]
                if isinstance(change, CommitRole):
                    roles[change.worker] = change.role
                    commits.append((now, change))
        for role in (Role.PREFILL, Role.DECODE):
            assert sum(r is role for r in roles.values()) >= 1
        now += 5.0
    return commits


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prefill_demand", [0.5, 1.5, 2.4, 2.6, 2.9, 3.5])
@pytest.mark.parametrize("decode_demand", [0.5, 1.5, 2.5])
def test_a_steady_load_does_not_swing(prefill_demand, decode_demand, seed):
    commits = day(RebalanceConfig(), lambda now: (prefill_demand, decode_demand), seed=seed)
    assert len(commits) <= 3
    moved = [commit.worker for _, commit in commits]
    assert len(set(moved)) == len(moved), "a worker went there and back"


def test_without_the_consolidation_test_it_would():
    """The same load with donors that are asked for nothing: roles go to and fro. (So the test above
    can fail.)"""
    careless = RebalanceConfig(slack=1e9, kv_slack=1e9, cooldown_s=0.0)
    swings = max(len(day(careless, lambda now: (2.9, 3.3), seed=seed)) for seed in range(5))
    assert swings > 10


def test_roles_follow_a_load_that_moves():
    def demand(now: float) -> tuple[float, float]:
        return (3.4, 1.0) if now % 3600 < 1800 else (0.6, 4.0)

    commits = day(RebalanceConfig(), demand, seconds=7200.0)
    first_half = [c for t, c in commits if t < 1800]
    second_half = [c for t, c in commits if 1800 <= t < 3600]
    assert first_half and all(c.role is Role.PREFILL for c in first_half)
    assert second_half and all(c.role is Role.DECODE for c in second_half)
    assert [c.epoch for _, c in commits] == list(range(1, len(commits) + 1))
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(commits)]
    assert min(gaps) >= 30.0
