"""Auto: what it chooses, on a device whose prices are known."""

from __future__ import annotations

import itertools

import pytest
from engine_harness import Harness
from policy_builders import (
    LinearEstimator,
    auto_harness,
    make_request,
)

from counterpoint.config import SchedulerConfig
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy import Auto, make_policy
from counterpoint.core.policy.candidates import Candidate
from counterpoint.types import (
    Slo,
    Step,
)


def run_both(h: Harness) -> tuple[set[bool], set[int]]:
    """Decode while prompts arrive: whether passes were mixed, and the units of decode steps."""
    h.arrive("a", range(8), max_tokens=60)
    while not h.got.get("a"):
        h.step()
    for i in range(3):
        h.arrive(f"b{i}", [30 + i] * 40, max_tokens=2)
    mixed, units = set(), set()
    turn = itertools.count()
    while any(f"b{i}" not in h.got for i in range(3)) and h.step(next(turn)):
        for steps in h.device.queue.values():
            for step in steps:
                if step.work.decode_batch:
                    mixed.add(step.work.prefill_tokens > 0)
                    units.add(step.units)
    h.drain()
    h.check_answers()
    return mixed, units


def test_fused_where_weights_dominate():
    """Reading weights dominates and needs all units: a mixed pass reads them once for both."""
    mixed, units = run_both(
        auto_harness(LinearEstimator(fixed=5.0, prefill=0.01, context=0.0), tpot_s=100.0)
    )
    assert True in mixed and units == {4}


def test_split_where_decode_needs_few_units():
    """Decode is as fast on one unit as on four: prefill loses a quarter, decode nothing."""
    mixed, units = run_both(
        auto_harness(
            LinearEstimator(fixed=0.5, prefill=0.5, context=0.5, sharing=0.0),
            tpot_s=80.0,
            ttft_s=1e5,
        )
    )
    assert True not in mixed and 1 in units


def test_no_split_where_contention_eats_the_gain():
    mixed, _ = run_both(
        auto_harness(
            LinearEstimator(fixed=0.5, prefill=0.5, context=0.5, sharing=0.0, contention=3.0),
            tpot_s=100.0,
        )
    )
    assert True in mixed


def test_a_tighter_target_is_met_at_the_price_of_first_tokens():
    def first_choice(itl_s: float):
        h = auto_harness(
            LinearEstimator(fixed=2.0, prefill=0.1, context=0.02, contention=1.2),
            tpot_s=itl_s,
            itl_s=itl_s,
        )
        h.arrive("a", range(8), max_tokens=60)
        while not h.got.get("a"):
            h.step()
        h.arrive("b", range(100, 160), max_tokens=2)
        while h.engine.policy.current is None:
            assert h.step()
        return h.engine.policy.current

    loose, tight = first_choice(1000.0), first_choice(7.0)
    assert tight.guarded_step_s <= 7.0 < loose.guarded_step_s
    assert tight.backlog_s > loose.backlog_s


def test_a_short_prompt_overtakes_a_long_one():
    h = auto_harness(LinearEstimator(fixed=0.1), ttft_s=400.0)
    h.arrive("long", range(64), max_tokens=2)
    h.arrive("short", [7, 7, 7], max_tokens=2)
    h.drain()
    h.check_answers()
    assert h.records["short"].token_s[0] < h.records["long"].token_s[0]


def test_a_long_prompt_that_would_be_late_is_not_overtaken():
    h = auto_harness(LinearEstimator(prefill=10.0))
    h.arrive("long", range(64), max_tokens=2, slo=Slo(ttft_s=655.0))
    h.step()
    h.arrive("short", [7] * 12, max_tokens=2, slo=Slo(ttft_s=10_000.0))
    h.drain()
    assert h.records["long"].token_s[0] < h.records["short"].token_s[0]


def test_urgent_prompts_go_first_and_hopeless_ones_last():
    h = auto_harness(LinearEstimator())
    policy = h.engine.policy
    h.arrive("relaxed", range(40), slo=Slo(ttft_s=5000.0))
    h.arrive("urgent", range(100, 140), slo=Slo(ttft_s=30.0))
    h.arrive("hopeless", range(200, 240), slo=Slo(ttft_s=0.001))
    requests = list(h.engine.requests.values())
    order = [r.id for r in policy.admission_order(requests, h.now)]
    assert order.index("urgent") < order.index("relaxed") or "relaxed" in h.got
    late = [r.id for r in policy.admission_order(requests, h.now + 0.01)]
    assert late[0] == "hopeless" or late[-1] == "hopeless"


def test_a_cached_prefix_does_not_count_as_prefill_time():
    """All of it would take 640 s, and it would be late; the rest takes 40."""
    h = Harness(
        auto_harness(LinearEstimator()).engine.policy,
        LinearEstimator(prefill=10.0),
        pages=400,
        max_pass_tokens=64,
        max_running=1,
    )
    h.engine.policy.cost_model.estimator = h.price
    h.arrive("before", range(64), max_tokens=1)
    h.drain()
    h.arrive("busy", range(100, 160), max_tokens=1)
    h.arrive("other", range(200, 220), max_tokens=1, slo=Slo(ttft_s=5000.0))
    h.arrive("again", [*range(60), 1, 1, 1, 1], max_tokens=1, slo=Slo(ttft_s=900.0))
    h.drain()
    assert sorted(h.records, key=lambda id: h.records[id].token_s[0]) == [
        "before",
        "busy",
        "again",
        "other",
    ]


def test_a_short_prompt_stays_out_of_a_pass_that_would_make_it_late():
    """It can overtake that pass, unless it is as long itself or the other would be late."""

    def together(ttft_s: float, other_ttft_s: float, tokens: int = 4) -> list[str]:
        policy = auto_harness(LinearEstimator(prefill=1.0, fixed=0.0)).engine.policy
        other, one = (
            make_request("other", 50, ttft_s=other_ttft_s),
            make_request("one", tokens, ttft_s=ttft_s),
        )
        return [r.id for r, _ in policy._cut_batch_in_time([(other, 50), (one, tokens)], 0.0)]

    assert together(ttft_s=30.0, other_ttft_s=200.0) == ["other"]
    assert together(ttft_s=100.0, other_ttft_s=200.0) == ["other", "one"]
    assert together(ttft_s=30.0, other_ttft_s=200.0, tokens=40) == ["other", "one"]
    assert together(ttft_s=30.0, other_ttft_s=40.0) == ["other", "one"], "that one is late already"


def test_a_prompt_is_held_back_while_it_would_harm_running_decodes():
    def first_token_of_b(tpot_s: float) -> tuple[bool, int]:
        h = auto_harness(
            LinearEstimator(fixed=1.0, prefill=0.01, context=0.05),
            tpot_s=tpot_s,
            itl_s=1000.0,
            ttft_s=200.0,
        )
        h.arrive("a", range(40), max_tokens=30)
        while not h.got.get("a"):
            h.step()
        h.arrive("b", range(100, 140), max_tokens=2)
        turn = itertools.count()
        while h.step(next(turn)):
            pass
        h.check_answers()
        return h.records["b"].token_s[0] > h.records["a"].finished_s, h.engine.policy.decisions[
            "hold"
        ]

    assert first_token_of_b(tpot_s=100.0) == (False, 0)
    waited, held = first_token_of_b(tpot_s=4.0)  # 1 + 0.05 x 40 alone; 2 more with b
    assert waited and held > 0


def beside_a_decode() -> Harness:
    """A request that decodes for long, and the first layer group of another's prompt beside it."""
    h = auto_harness(
        LinearEstimator(fixed=0.5, prefill=0.5, context=0.01, sharing=0.0), tpot_s=80.0, ttft_s=1e5
    )
    h.arrive("a", range(8), max_tokens=300)
    while not h.got.get("a"):
        h.step()
    h.arrive("b", range(30, 90), max_tokens=2)
    while not h.engine.state.lanes[1].in_flight:
        h.step()
    return h


@pytest.mark.parametrize(("ttft_s", "queued"), [(40.0, 1), (4000.0, 2)])
def test_no_chunk_is_queued_behind_a_step_that_takes_long(ttft_s, queued):
    """Lanes two steps deep, weights that dominate: all is fused, in steps of 5 to 6 s."""
    estimator = LinearEstimator(fixed=5.0, prefill=0.01, context=0.0)
    scheduler = SchedulerConfig(policy="auto", max_pass_tokens=64, tpot_s=100.0, ttft_s=ttft_s)
    policy = make_policy(scheduler, DeviceShape(4, 6, 2, (1, 2, 3)), estimator)
    h = Harness(policy, estimator, pages=400, max_context_tokens=800, max_pass_tokens=64)
    h.arrive("a", range(8), max_tokens=60)
    while not h.got.get("a"):
        h.step()
    for i in range(3):
        h.arrive(f"b{i}", [30 + i] * 60, max_tokens=2)
    most = 0
    while any(f"b{i}" not in h.got for i in range(3)):
        assert h.step()
        most = max(
            most, sum(step.work.kind == "mixed" for step, _ in h.engine.state.lanes[0].in_flight)
        )
    assert most == queued
    h.drain()
    h.check_answers()


def test_the_split_changes_once_a_layer_group_at_most():
    h = beside_a_decode()
    policy, state = h.engine.policy, h.engine.state
    group = state.lanes[1].in_flight[0][0].id
    units = []
    # The decode lane steps on while the group runs; each time, one other split is left to choose.
    for turn in range(8):
        policy.pricer.levels = (1,) if turn % 2 else (3,)
        policy.pricer._cache.clear()
        h.step(0)
        assert state.lanes[1].in_flight[0][0].id == group
        units.append(policy.current.units)
    assert sum(one != two for one, two in itertools.pairwise(units)) <= 1
    h.drain()


def test_a_switch_to_chunks_waits_for_the_open_pass_alone():
    """While a pass stands between layer groups, the split stays. If a chunk would be better, no
    new pass begins."""
    h = beside_a_decode()
    # From here on sharing the device is dear: in the model, that is.
    h.engine.policy.cost_model.estimator = LinearEstimator(
        fixed=0.5, prefill=0.5, context=0.01, sharing=0.0, contention=50.0
    )
    h.engine.policy.pricer._cache.clear()
    h.arrive("c", range(100, 140), max_tokens=2)
    turn = itertools.count()
    while "c" not in h.got:
        h.step(next(turn))
    assert not h.ends.get("a"), "a decodes all the while"
    lanes = {
        step.lane
        for commands in h.commands
        for step in commands
        if isinstance(step, Step)
        and step.work.prefill_tokens
        and 40 in {segment.start + segment.tokens for segment in step.segments}
    }
    assert lanes == {0}
    h.drain()


def test_which_prompts_are_overtaken():
    """A prefill of 640 s, and a prompt of 40 s that comes meanwhile."""

    def order(ttft_s: float, short_ttft_s: float = 10_000.0) -> list[str]:
        h = auto_harness(LinearEstimator(prefill=10.0))
        h.arrive("long", range(64), max_tokens=2, slo=Slo(ttft_s=ttft_s))
        h.step()
        h.arrive("short", [7] * 4, max_tokens=2, slo=Slo(ttft_s=short_ttft_s))
        h.drain()
        return sorted(h.records, key=lambda id: h.records[id].token_s[0])

    assert order(2000.0) == ["short", "long"], "the long one has time to spare"
    assert order(800.0) == ["long", "short"], "it would have hardly any left, and the short one has"
    assert order(800.0, 300.0) == ["short", "long"], "the short one would be late"
    assert order(655.0, 300.0) == ["long", "short"], "it would make the long one late"
    assert order(100.0, 300.0) == ["short", "long"], "that one is late without it"
    assert order(1.0, 300.0) == ["long", "short"], "and here it has waited too long"


def test_no_decode_is_queued_on_its_share_while_the_last_prefill_ends():
    """Lanes are two steps deep. A queued step keeps its units, but behind the last layers of the
    last prompt decode could have all."""
    estimator = LinearEstimator(fixed=0.5, prefill=0.5, context=0.01, sharing=0.0)
    scheduler = SchedulerConfig(policy="auto", max_pass_tokens=64, tpot_s=80.0, ttft_s=1e5)
    policy = make_policy(scheduler, DeviceShape(4, 6, 2, (1, 2, 3)), estimator)
    h = Harness(policy, estimator, pages=400, max_context_tokens=800, max_pass_tokens=64)
    h.arrive("a", range(8), max_tokens=100)
    while not h.got.get("a"):
        h.step()
    h.arrive("b", range(30, 90), max_tokens=2)
    decode, prefill = h.engine.state.lanes[0], h.engine.state.lanes[1]
    ending, turn = 0, itertools.count()
    while "b" not in h.got:
        before = {step.id for step, _ in decode.in_flight}
        h.step(next(turn))
        if (
            prefill.in_flight
            and prefill.open_pass is None
            and before & {step.id for step, _ in decode.in_flight}
        ):
            ending += 1
            assert {step.id for step, _ in decode.in_flight} <= before
    assert ending
    h.drain()


def test_chunks_of_a_prompt_follow_each_other_without_a_step_between():
    """Lanes two steps deep: the next chunk is queued while the last one runs."""
    estimator = LinearEstimator(fixed=5.0, prefill=0.01, context=0.0, contention=50.0)
    scheduler = SchedulerConfig(policy="auto", max_pass_tokens=64, tpot_s=100.0)
    policy = make_policy(scheduler, DeviceShape(4, 6, 2, (1, 2, 3)), estimator)
    h = Harness(policy, estimator, pages=400, max_context_tokens=800, max_pass_tokens=64)
    h.arrive("a", range(8), max_tokens=100)
    while not h.got.get("a"):
        h.step()
    h.arrive("b", range(30, 330), max_tokens=2)
    while "b" not in h.got:
        h.step()
    steps = [step for commands in h.commands for step in commands if isinstance(step, Step)]
    chunked = [
        number
        for number, step in enumerate(steps)
        if step.work.decode_batch and step.work.prefill_tokens
    ]
    assert len(chunked) == 3
    assert chunked == list(range(chunked[0], chunked[-1] + 1))
    h.drain()


def test_requests_without_a_slot_count_as_blocked():
    scheduler = SchedulerConfig(
        policy="auto", max_pass_tokens=64, max_running=2, tpot_s=80.0, ttft_s=1e5
    )
    policy = make_policy(scheduler, DeviceShape(4, 6, levels=(1, 2, 3)), LinearEstimator())
    assert isinstance(policy, Auto)
    h = Harness(policy, LinearEstimator(), max_running=2)
    for name in ("a", "b", "c", "d"):
        h.arrive(name, range(8), max_tokens=30)
    while len(h.engine.state.running) < 2:
        h.step()
    waiting, blocked = policy._split_waiting(h.engine.state)
    assert (waiting, {r.id for r in blocked}) == ([], {"c", "d"})
    h.drain()


def test_no_prefill_starts_beside_a_pass_that_has_chunks():
    """Where lanes may overlap, units would do: the pass with chunks was priced with all of them."""
    estimator = LinearEstimator(fixed=5.0, prefill=0.01, context=0.0)
    policy = make_policy(
        SchedulerConfig(policy="auto", max_pass_tokens=64, tpot_s=100.0),
        DeviceShape(4, 6, levels=(1, 2, 3)),
        estimator,
    )
    assert isinstance(policy, Auto)
    h = Harness(
        policy, estimator, pages=400, max_context_tokens=800, max_pass_tokens=64, overlap=True
    )
    h.arrive("a", range(8), max_tokens=60)
    while not h.got.get("a"):
        h.step()
    h.arrive("b", [30] * 40, max_tokens=2)
    state = h.engine.state
    while not any(step.work.prefill_tokens for step, _ in state.lanes[0].in_flight):
        h.step()
    h.arrive("c", [31] * 40, max_tokens=2)
    policy.current = policy.preferred = Candidate(0, 1, 1.0, 1.0, 0.1, 1.0, 1.0, 1.0)
    assert (
        state.schedulable_prefills(policy.lanes[1])
        and policy.next_batch(policy.lanes[1], state, h.now) is None
    )
    h.step()
    policy.current = policy.preferred = Candidate(0, 1, 1.0, 1.0, 0.1, 1.0, 1.0, 1.0)
    assert policy.next_batch(
        policy.lanes[1], state, h.now
    ) is not None or not state.schedulable_prefills(policy.lanes[1])
    h.drain()


def test_only_short_prompts_go_before_a_suspended_pass():
    """A short one may overtake the rest of a long one; another long one that waits may not."""
    h = auto_harness(LinearEstimator(prefill=10.0))
    h.arrive("long", range(64), max_tokens=2, slo=Slo(ttft_s=5000.0))
    h.step()
    h.arrive("other", range(100, 140), max_tokens=2, slo=Slo(ttft_s=4000.0))
    h.arrive("short", [7] * 4, max_tokens=2, slo=Slo(ttft_s=200.0))
    h.drain()
    assert sorted(h.records, key=lambda id: h.records[id].token_s[0]) == ["short", "long", "other"]
