"""Targets, order of prompts and slack of decodes."""

from __future__ import annotations

import pytest
from policy_builders import (
    decode_in_progress,
    make_request,
    make_slo_tracker,
)

from counterpoint.core.policy.candidates import PrefillBacklog
from counterpoint.core.state import OutputLengths
from counterpoint.types import (
    Slo,
)


def test_a_decode_that_is_ahead_may_wait_within_its_longest_gap():
    some = make_slo_tracker()
    ahead, on_time = (
        decode_in_progress(11, 100.0, 0.5, tpot_s=1.0),
        decode_in_progress(11, 100.0, 1.0, tpot_s=1.0),
    )
    assert some.decode_budget([ahead], OutputLengths(), 100.0, 0.1).next_s == pytest.approx(
        min(4.0, 1.0 + 5.0)
    )
    assert some.decode_budget(
        [ahead, on_time], OutputLengths(), 100.0, 0.1
    ).next_s == pytest.approx(1.0)
    bounded = decode_in_progress(11, 100.0, 0.5, tpot_s=1.0, itl_s=2.5)
    assert some.decode_budget([bounded], OutputLengths(), 100.0, 0.1).next_s == pytest.approx(2.5)


def test_the_configured_longest_gap_holds_for_requests_with_their_own_time_per_token():
    some = make_slo_tracker(itl_s=2.5)
    gaps = [
        some.targets(Slo(tpot_s=tpot_s, itl_s=itl_s)).itl_s
        for tpot_s, itl_s in ((1.0, None), (1.0, 2.0), (4.0, None))
    ]
    assert gaps == [2.5, 2.0, 4.0]
    assert make_slo_tracker().targets(Slo(tpot_s=1.0)).itl_s == 4.0


def test_a_late_decode_catches_up_before_its_output_is_likely_to_end():
    some, short, long = make_slo_tracker(), OutputLengths(), OutputLengths()
    for i in range(100):
        short.add(6 + i % 3)
        long.add(200 + i)
    late = decode_in_progress(2, 100.0, 1.3, tpot_s=1.0)
    hurried, relaxed = (
        some.decode_budget([late], answers, 100.0, 0.1).mean_s for answers in (short, long)
    )
    assert 0.5 <= hurried < 0.95 < relaxed < 1.0
    assert some.decode_budget([late], short, 100.0, 0.97).mean_s == 1.0, (
        "where it can't be made good, nothing is asked for it"
    )


def test_starved_prompts_go_first():
    some = make_slo_tracker(ttft_s=10.0)
    old, fresh = make_request("old", 50, arrival_s=0.0), make_request("fresh", 5, arrival_s=95.0)
    late = make_request("late", 50, arrival_s=60.0)
    assert [r.id for r in some.sort_by_urgency([late, fresh, old], 100.0)] == [
        "old",
        "fresh",
        "late",
    ]
    assert some.is_starved(old, 100.0) and not some.is_starved(late, 100.0)


def test_prompts_that_cannot_be_in_time_at_the_current_slowdown_go_behind():
    some = make_slo_tracker(ttft_s=10.0)
    tight, easy = make_request("tight", 80, arrival_s=0.0), make_request("easy", 10, arrival_s=4.0)
    assert [r.id for r in some.sort_by_urgency([tight, easy], 1.0)] == ["tight", "easy"]
    some.set_pace(prefill_slowdown=2.0, step_s=1.0)  # 80 tokens take 16 s
    assert [r.id for r in some.sort_by_urgency([tight, easy], 1.0)] == ["easy", "tight"]


def test_the_longest_prompt_is_deferred_where_not_all_can_be_in_time():
    """Three of four can be in time, by due time; in order of arrival only one would be."""
    some = make_slo_tracker(ttft_s=10.0)
    requests = [
        make_request("a", 20, arrival_s=0.0),
        make_request("b", 70, arrival_s=0.1),
        make_request("c", 30, arrival_s=0.2),
    ]
    requests.append(make_request("d", 40, arrival_s=0.3))
    assert [r.id for r in some.sort_by_urgency(requests, 0.9)] == ["a", "c", "d", "b"]
    assert [r.id for r in some.sort_by_urgency(requests[1:3], 0.0)] == ["b", "c"]


def test_a_default_target_does_not_shrink_while_a_prompt_is_computed():
    some, one = make_slo_tracker(), make_request("a", 100)
    before_s = some.ttft_s(one)
    one.computed_tokens = one.scheduled_tokens = 90
    assert some.ttft_s(one) == before_s == pytest.approx(100.0)


def test_max_prefill_slowdown_ignores_prompts_that_are_late_anyway():
    some = make_slo_tracker(ttft_s=10.0)
    requests = [make_request("a", 20, arrival_s=0.0), make_request("c", 30, arrival_s=0.2)]
    assert some.max_prefill_slowdown(requests, [], 0.0, 1.0) == pytest.approx(10.2 / 5.0)
    hopeless = make_request("b", 700, arrival_s=0.1)
    assert some.max_prefill_slowdown(requests, [hopeless], 0.0, 1.0) == pytest.approx(10.2 / 5.0)


def test_demand_follows_the_targets_of_queued_prompts():
    def demand(ttft_s: float) -> float:
        waiting = [make_request("b", 40, ttft_s=ttft_s)]
        return (
            make_slo_tracker()
            .delay_weights(
                [make_request("next", 40, ttft_s=9.0)],
                waiting,
                [],
                0.0,
                PrefillBacklog(40, 1600, 0, 1),
            )
            .demand
        )

    assert (demand(1.0), demand(400.0)) == (pytest.approx(1 / 4), pytest.approx(1 / 400))
