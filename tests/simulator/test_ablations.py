"""Auto without one of its parts still serves, and lacks that part."""

from __future__ import annotations

import dataclasses

import pytest
from test_simulate import H200, check_whole, load

from counterpoint.config import Config
from counterpoint.core.policy.ablations import ABLATIONS
from counterpoint.simulator.simulate import SimResult, SimRun, simulate

CONFIG = Config().replace(policy="auto", ttft_s=0.5, tpot_s=0.02)


def without(part: str | None, depth: int = 2) -> SimResult:
    queries = load(120, rate=30, prompt=1500, output=60)
    came = simulate(
        dataclasses.replace(H200, without=part, depth=depth),
        queries,
        CONFIG,
        run=SimRun(check_contract=True),
    )
    check_whole(queries, came)
    return came


def splits(came: SimResult) -> set[tuple[int, int]]:
    return {
        (prefill, decode)
        for prefill, decode, seconds in came.stats.split_s
        if prefill and decode and seconds > 1e-4
    }


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("part", ABLATIONS)
def test_every_variant_keeps_the_contract(part, depth):
    came = without(part, depth)
    assert "mixed" not in {kind for kind, _, _, _ in came.stats.step_s}, "none fuses"
    assert any(f"auto without {part}" in note for note in came.notes)


def test_the_whole_fuses_where_its_parts_may_not():
    assert "mixed" in {kind for kind, _, _, _ in without(None).stats.step_s}


def test_without_partition_both_lanes_have_all_units():
    assert splits(without("partition")) == {(132, 132)}


def test_without_a_choice_the_split_is_in_the_middle():
    asked = {(kind, units) for kind, units, _, _ in without("choice").stats.step_s}
    assert (
        asked <= {("decode", 64), ("decode", 132), ("prefill", 68), ("prefill", 132)}
        and ("decode", 64) in asked
    )


def test_without_lending_no_decode_has_the_whole_device():
    assert not any(
        kind == "decode" and units == 132 for kind, units, _, _ in without("lending").stats.step_s
    )


def test_without_queries_lanes_wait_for_each_other():
    idle = {(lane, what): seconds for lane, what, seconds in without("queries").stats.lane_s}
    freely = {(lane, what): seconds for lane, what, seconds in without("fusion").stats.lane_s}
    held = ("decode", "policy")
    assert idle[held] > 3 * freely.get(held, 0.0)


def test_without_preemption_nothing_is_overtaken():
    assert without("preemption").stats.overtakes == 0
