"""Contention: a known one is recovered, between splits too, and few pairs change little."""

from __future__ import annotations

import math
import random

import pytest

from counterpoint.cost_model.contention import BandwidthDemand, Contention, MeasuredPair

SPLITS = (16, 32, 64)
BY_SPLIT = {16: 0.1, 32: 0.2, 64: 0.4}
BY_DEMAND = (0.1, 0.3, -0.2, 0.25, -0.1)


def drawn(chance: random.Random) -> BandwidthDemand:
    return BandwidthDemand(*(chance.random() for _ in BY_DEMAND))


def off(split: int, demand: BandwidthDemand) -> float:
    both = sum(a * b for a, b in zip(BY_DEMAND, demand, strict=True))
    return (
        BY_SPLIT[split]
        + both
        + split / SPLITS[-1] * (0.2 * demand.other_bandwidth_share - 0.1 * demand.bandwidth_share)
    )


def pairs(count: int, noise: float = 0.0, seed: int = 0) -> list[MeasuredPair]:
    chance = random.Random(seed)
    found = []
    for number in range(count):
        split, demand = SPLITS[number % len(SPLITS)], drawn(chance)
        found.append(MeasuredPair(split, demand, off(split, demand) + chance.gauss(0, noise)))
    return found


def test_a_known_contention_is_recovered():
    fitted, chance = Contention(pairs(90, noise=0.03)), random.Random(1)
    for _ in range(50):
        split, demand = chance.choice(SPLITS), drawn(chance)
        assert fitted.factor(split, demand) == pytest.approx(math.exp(off(split, demand)), rel=0.05)


def test_a_split_between_two_lies_between_them_and_one_beyond_is_the_last():
    fitted, demand = Contention(pairs(90)), BandwidthDemand(0.5, 0.5, 0.5, 0.5, 0.5)
    low, middle, high = (fitted.factor(split, demand) for split in (32, 48, 64))
    assert middle == pytest.approx(math.sqrt(low * high))
    assert fitted.factor(80, demand) == high
    assert fitted.factor(8, demand) == fitted.factor(16, demand)


def test_demands_are_clamped_to_the_measured_range():
    fitted = Contention(pairs(90))
    most = [max(column) for column in zip(*(pair.demand for pair in pairs(90)), strict=True)]
    assert fitted.factor(32, BandwidthDemand(*(9.0 for _ in most))) == fitted.factor(
        32, BandwidthDemand(*most)
    )


def test_no_pair_changes_nothing_and_one_changes_all_splits():
    demand = BandwidthDemand(0.5, 0.5, 0.5, 0.5, 0.5)
    assert Contention([]).factor(16, demand) == 1.0
    one = Contention([MeasuredPair(16, demand, 0.5)])
    assert 1.3 < one.factor(64, demand) < math.exp(0.5)


def test_the_factor_is_bounded():
    demand = BandwidthDemand(0.5, 0.5, 0.5, 0.5, 0.5)
    assert Contention([MeasuredPair(16, demand, 9.0)]).factor(16, demand) <= 3.0
    assert Contention([MeasuredPair(16, demand, -9.0)]).factor(16, demand) >= 1 / 3
