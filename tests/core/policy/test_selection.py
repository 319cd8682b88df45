"""Which candidate is picked, given prices and weights."""

from __future__ import annotations

import pytest
from policy_builders import make_request, make_slo_tracker

from counterpoint.config import SchedulerConfig
from counterpoint.core.policy.candidates import Candidate, PrefillBacklog
from counterpoint.core.policy.selection import CandidateSelector
from counterpoint.core.policy.slo import DecodeBudget, DelayWeights

# Both splits meet all targets. FAST, of 1 unit, halves the time of the prompt but slows decodes.
FAST = Candidate(0, 1, 3.0, 3.0, 0.8, 1.0, 1.0, 1.0)
GENTLE = Candidate(0, 3, 1.0, 1.0, 0.1, 2.0, 2.0, 2.0)
MANY_DECODES = DelayWeights(0.1, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)


def pick_units(
    weights: DelayWeights,
    candidates: tuple[Candidate, ...] = (FAST, GENTLE),
    excess: tuple[float, ...] = (0.0, 0.0),
    max_slowdown: float = 5.0,
    **settings: float,
) -> int:
    selector = CandidateSelector(SchedulerConfig(policy="auto", **settings))
    return selector.pick(candidates, excess, max_slowdown, weights, None).units


@pytest.mark.parametrize(
    ("weights", "units"), [({}, 3), ({"ttft_weight": 20.0, "tbt_weight": 1.0}, 1)]
)
def test_weights_decide_when_both_targets_cannot_be_met(weights, units):
    """One split exceeds the decode target by a half; the other is too slow for the first tokens."""
    fast = Candidate(0, 1, 1.5, 1.5, 0.3, 1.0, 1.0, 1.0)
    assert pick_units(MANY_DECODES, (fast, GENTLE), (0.5, 0.0), 1.0, **weights) == units


@pytest.mark.parametrize(("need", "late", "units"), [(5.0, 0.0, 3), (0.2, 0.0, 1), (0.2, 2.0, 3)])
def test_where_all_prompts_will_be_late_it_still_matters_by_how_much(need, late, units):
    """With many decodes and prompts in time, the gentle split wins. Decode targets beat delay."""
    assert pick_units(MANY_DECODES, excess=(late, 0.0), max_slowdown=need) == units


@pytest.mark.parametrize(("decodes", "units"), [(1, 1), (100, 3)])
def test_the_more_decodes_there_are_the_more_their_delay_counts(decodes, units):
    assert pick_units(DelayWeights(0.1, 0.0, 0.001 * decodes, 0.0, 0.0, 0.0, 1.0)) == units


@pytest.mark.parametrize(("blocked", "units"), [(0, 1), (100, 3)])
def test_blocked_prompts_count_with_the_decodes_they_wait_for(blocked, units):
    requests = [make_request(str(n), 8, ttft_s=100.0) for n in range(blocked)]
    next_ = [make_request("next", 8, ttft_s=10.0)]
    backlog = PrefillBacklog(8, 64, 0, 1)
    weights = make_slo_tracker().delay_weights(next_, [], requests, 0.001, backlog)
    assert pick_units(weights) == units


@pytest.mark.parametrize(("demand", "units"), [(0.2, 3), (0.7, 1)])
def test_prefill_keeps_up_with_demand(demand, units):
    """Either split is in time for the prompts that are here. One is too slow for those to come."""
    assert pick_units(DelayWeights(0.1, 0.0, 1.0, 0.0, 0.0, demand, 1.0)) == units


def decode_excess(chunk: Candidate, budget: DecodeBudget, load: float, queue: float) -> float:
    """A decode step without prefill takes 0.5 s."""
    selector = CandidateSelector(SchedulerConfig(policy="auto"))
    weights = DelayWeights(0.0, 0.0, 0.0, 0.0, load, 0.0, queue)
    (excess,) = selector.decode_excess([chunk], budget, 0.5, weights)
    return excess


def test_long_outputs_tolerate_long_steps_until_a_queue_is_done():
    """Ten steps of 1.5 s, then steps of 0.5 s: a mean over 100 tokens allows it, one over 12 does
    not. Nor does one over 100 where prompts have arrived all the time."""
    chunk = Candidate(64, 4, 1.5, 1.5, 0.6, 7.5, 7.5, 1.2)

    def excess(remaining_tokens: int, load: float, queue: float = 2.0) -> float:
        budget = DecodeBudget(1.0, 9.0, 9.0, remaining_tokens, 1.0)
        return decode_excess(chunk, budget, load, queue)

    assert excess(100, load=0.0) == 0.0 < excess(12, load=0.0)
    assert excess(100, load=1.0) > 0.0
    assert excess(100, load=0.0, queue=20.0) > 0.0


def test_the_mean_uses_the_expected_step_and_the_gap_the_guarded_one():
    """A pass that sometimes takes twice as long is no harm, unless a longest gap is a target."""
    chunk = Candidate(64, 4, 0.9, 1.8, 0.6, 0.9, 0.9, 1.2)
    assert decode_excess(chunk, DecodeBudget(1.0, 2.0, 2.0, 100, 1.0), 1.0, 1.0) == 0.0
    assert decode_excess(chunk, DecodeBudget(1.0, 1.5, 1.5, 100, 1.0), 1.0, 1.0) > 0.0
