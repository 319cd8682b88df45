"""Auto: what it chooses, on a device whose prices are known."""

from __future__ import annotations

import itertools

import pytest
from engine_harness import Harness

from counterpoint.config import SchedulerConfig
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy import Auto, make_policy
from counterpoint.core.policy.candidates import Candidate, PrefillBacklog
from counterpoint.core.policy.online_cost import OnlineCostModel
from counterpoint.core.policy.slo import DecodeBudget, DelayWeights, SloTracker
from counterpoint.core.request import Request
from counterpoint.core.state import MIN_REMAINING, OutputLengths
from counterpoint.types import AddRequest, BatchShape, Sampling, Slo, Step, StepDone


class Priced:
    """`fixed` seconds for each pass (reading weights), then per prefill token and per decode context token; `sharing`: how much
    of the units' loss a decode step feels (0: it is as fast on one unit as on all)."""

    def __init__(self, fixed=1.0, prefill=0.1, context=0.001, sharing=1.0, contention=1.0) -> None:
        self.fixed, self.prefill, self.context = fixed, prefill, context
        self.sharing, self.contention = sharing, contention

    def seconds(self, work: BatchShape, units: int, co_running=None) -> float:
        layers = (work.last_layer - work.first_layer) / work.layers
        less = 4 / units
        compute = work.prefill_tokens * self.prefill * less
        read = (self.fixed + work.decode_context * self.context) * (1 + (less - 1) * self.sharing)
        both = (
            compute + read
            if work.decode_batch
            else max(compute, self.fixed * (1 + (less - 1) * self.sharing))
        )
        return layers * both * (self.contention if co_running else 1.0)


def auto(estimator, **settings) -> Harness:
    scheduler = SchedulerConfig(policy="auto", max_pass_tokens=64, **settings)
    policy = make_policy(scheduler, DeviceShape(4, 6, levels=(1, 2, 3)), estimator)
    assert isinstance(policy, Auto)
    return Harness(policy, estimator, pages=400, max_context_tokens=800, max_pass_tokens=64)


def run_both(h: Harness) -> tuple[set[bool], set[int]]:
    """A decode beside arriving prompts: whether passes were mixed, and on how many units decodes ran meanwhile."""
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
    """Reading the weights is most of a step and needs all units: a mixed pass reads them once for both."""
    mixed, units = run_both(auto(Priced(fixed=5.0, prefill=0.01, context=0.0), tpot_s=100.0))
    assert True in mixed and units == {4}


def test_split_where_decode_needs_few_units():
    """Decode is as fast on one unit as on four: prefill loses a quarter, decode nothing."""
    mixed, units = run_both(
        auto(Priced(fixed=0.5, prefill=0.5, context=0.5, sharing=0.0), tpot_s=80.0, ttft_s=1e5)
    )
    assert True not in mixed and 1 in units


def test_no_split_where_contention_eats_the_gain():
    mixed, _ = run_both(
        auto(Priced(fixed=0.5, prefill=0.5, context=0.5, sharing=0.0, contention=3.0), tpot_s=100.0)
    )
    assert True in mixed


def test_a_tighter_target_is_met_at_the_price_of_first_tokens():
    def first_choice(itl_s: float):
        h = auto(
            Priced(fixed=2.0, prefill=0.1, context=0.02, contention=1.2), tpot_s=itl_s, itl_s=itl_s
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
    h = auto(Priced(fixed=0.1), ttft_s=400.0)
    h.arrive("long", range(64), max_tokens=2)
    h.arrive("short", [7, 7, 7], max_tokens=2)
    h.drain()
    h.check_answers()
    assert h.records["short"].token_s[0] < h.records["long"].token_s[0]


def test_a_long_prompt_that_would_be_late_is_not_overtaken():
    h = auto(Priced(prefill=10.0))
    h.arrive("long", range(64), max_tokens=2, slo=Slo(ttft_s=655.0))
    h.step()
    h.arrive("short", [7] * 12, max_tokens=2, slo=Slo(ttft_s=10_000.0))
    h.drain()
    assert h.records["long"].token_s[0] < h.records["short"].token_s[0]


def test_the_urgent_go_first_and_the_hopeless_last():
    h = auto(Priced())
    policy = h.engine.policy
    h.arrive("relaxed", range(40), slo=Slo(ttft_s=5000.0))
    h.arrive("urgent", range(100, 140), slo=Slo(ttft_s=30.0))
    h.arrive("hopeless", range(200, 240), slo=Slo(ttft_s=0.001))
    requests = list(h.engine.requests.values())
    order = [r.id for r in policy.admission_order(requests, h.now)]
    assert order.index("urgent") < order.index("relaxed") or "relaxed" in h.got
    late = [r.id for r in policy.admission_order(requests, h.now + 0.01)]
    assert late[0] == "hopeless" or late[-1] == "hopeless"


@pytest.mark.parametrize("truth", [0.5, 2.0])
def test_belief_learns_and_its_guard_covers_what_happens(truth):
    belief = OnlineCostModel(Priced())
    work = BatchShape(decode_batch=4, decode_context=400, samples=4, last_layer=6, layers=6)
    raw = belief.seconds(work, 2)
    for i in range(200):
        took = raw * truth * (1.3 if i % 10 == 0 else 1.0)
        belief.observe(
            Step(i, 0, i, 0, 6, 2, (), work),
            StepDone(i, 0, started_s=0.0, ended_s=took, units=2),
            None,
        )
    assert belief.seconds(work, 2) == pytest.approx(raw * truth, rel=0.1)
    assert belief.expected_and_guarded_s(work, 2)[1] >= belief.seconds(work, 2)
    ((kind, median, high, steps),) = belief.errors()
    assert (kind, steps) == ("decode", 200)
    assert median < 0.1 and high < 0.4


def test_a_broken_reading_moves_little():
    belief = OnlineCostModel(Priced())
    work = BatchShape(decode_batch=1, decode_context=10, samples=1, last_layer=6, layers=6)
    raw = belief.seconds(work, 4)
    belief.observe(
        Step(1, 0, 1, 0, 6, 4, (), work), StepDone(1, 0, started_s=0.0, ended_s=1e6), None
    )
    assert belief.seconds(work, 4) <= 5 * raw
    belief.observe(
        Step(2, 0, 2, 0, 6, 4, (), work), StepDone(2, 0, started_s=5.0, ended_s=5.0), None
    )
    belief.observe(
        Step(3, 0, 3, 0, 6, 4, (), work),
        StepDone(3, 0, started_s=0.0, ended_s=9.0, error="x"),
        None,
    )
    assert belief.seconds(work, 4) <= 5 * raw


def test_what_is_slow_once_or_was_slow_long_ago_is_not_believed_in():
    belief = OnlineCostModel(Priced())
    works = [
        BatchShape(decode_batch=n, decode_context=400, samples=n, last_layer=6, layers=6)
        for n in (1, 2)
    ]
    raw_s = belief.seconds(works[0], 4)

    def observe(work: BatchShape, units: int, times: float) -> None:
        took_s = times * belief.estimator.seconds(work, units)
        belief.observe(
            Step(1, 0, 1, 0, 6, units, (), work),
            StepDone(1, 0, started_s=0.0, ended_s=took_s, units=units),
            None,
        )

    observe(works[0], 4, 20.0)
    assert belief.seconds(works[0], 4) == raw_s, (
        "the first of its kind may have waited for what is done once"
    )
    for times in (1.0, 1.0, 1.0, 20.0):
        observe(works[0], 4, times)
    assert belief.seconds(works[0], 4) < 1.06 * raw_s
    for _ in range(40):
        observe(works[0], 4, 3.0)
    assert belief.seconds(works[0], 4) > 2 * raw_s
    for _ in range(4000):
        observe(works[1], 2, 1.0)
    assert belief.seconds(works[0], 4) < 1.05 * raw_s, "nobody knows any more"


def test_a_step_says_what_it_took_beside_another_only_of_the_time_in_which_there_was_one():
    """A decode runs 2 s: half of it beside a prefill, which halves its speed. Nothing was wrong with the prices."""
    belief = OnlineCostModel(Priced(contention=2.0))
    decode = BatchShape(
        decode_batch=1, decode_context=0, samples=1, last_layer=6, layers=6
    )  # 1 s alone on all, 4 s on one of four
    prompt = BatchShape(
        prefill_tokens=10,
        prefill_squares=100,
        prefill_requests=1,
        samples=1,
        last_layer=6,
        layers=6,
    )
    one, other = Step(1, 0, 1, 0, 6, 1, (), decode), Step(2, 1, 2, 0, 6, 3, (), prompt)
    beside_s, alone_s = belief.seconds(prompt, 3, (decode, 1)), belief.seconds(decode, 1)
    together_s = beside_s  # the prompt starts at 0 with the decode, and is done first
    ended_s = together_s + alone_s * (1 - together_s / (2 * alone_s))
    for _ in range(2):  # the first of a kind does not count
        belief.observe(other, StepDone(2, 1, started_s=0.0, ended_s=together_s, units=3), one)
        belief.observe(one, StepDone(1, 0, started_s=0.0, ended_s=ended_s, units=1), None)
    assert [(ratio, guard) for _, ratio, guard in belief.cells()] == [
        (pytest.approx(1.0), pytest.approx(1.0))
    ] * 2
    assert all(high == pytest.approx(0.0, abs=1e-9) for _, _, high, _ in belief.errors())


def test_one_slow_step_rules_nothing_out_for_good():
    belief = OnlineCostModel(Priced())
    mixed = BatchShape(10, 100, 0, 1, 4, 400, 5, 0, 6, 6)
    quiet = BatchShape(decode_batch=4, decode_context=400, samples=4, last_layer=6, layers=6)
    took_s, alone_s = 3 * belief.seconds(mixed, 4), belief.seconds(quiet, 4)
    for i in range(1, 5):
        belief.observe(
            Step(i, 0, i, 0, 6, 4, (), mixed),
            StepDone(i, 0, started_s=0.0, ended_s=took_s, units=4),
            None,
        )
    expected_s, wary_s = belief.expected_and_guarded_s(mixed, 4)
    assert wary_s > 1.1 * expected_s
    for i in range(5, 600):
        belief.observe(
            Step(i, 0, i, 0, 6, 4, (), quiet),
            StepDone(i, 0, started_s=0.0, ended_s=alone_s, units=4),
            None,
        )
    expected_s, wary_s = belief.expected_and_guarded_s(mixed, 4)
    assert wary_s == pytest.approx(expected_s, rel=0.03)


# ---------------------------------------------------------------- what was promised


def request(id: str, prompt: int, arrival_s: float = 0.0, **slo) -> Request:
    arrive = AddRequest(
        id=id, prompt=tuple(range(prompt)), sampling=Sampling(max_tokens=4), slo=Slo(**slo)
    )
    return Request(arrive, arrival_s, prefill_target=prompt)


def promises(**settings) -> SloTracker:
    return SloTracker(
        SchedulerConfig(**settings),
        OnlineCostModel(Priced(fixed=0.0, prefill=0.1)),
        units=4,
        layers=6,
    )


def running(tokens: int, now: float, mean_s: float, **slo) -> Request:
    """A decode that has `tokens` tokens, of which each took `mean_s`."""
    one = request("r", 8, **slo)
    one.output, one.token_s = [1] * tokens, [now - mean_s * (tokens - 1)] * tokens
    return one


def test_a_decode_that_is_ahead_may_wait_within_its_longest_gap():
    some = promises()
    ahead, on_time = running(11, 100.0, 0.5, tpot_s=1.0), running(11, 100.0, 1.0, tpot_s=1.0)
    assert some.decode_budget([ahead], OutputLengths(), 100.0, 0.1).next_s == pytest.approx(
        min(4.0, 1.0 + 5.0)
    )
    assert some.decode_budget(
        [ahead, on_time], OutputLengths(), 100.0, 0.1
    ).next_s == pytest.approx(1.0)
    bounded = running(11, 100.0, 0.5, tpot_s=1.0, itl_s=2.5)
    assert some.decode_budget([bounded], OutputLengths(), 100.0, 0.1).next_s == pytest.approx(2.5)


def test_the_configured_longest_gap_holds_for_requests_with_their_own_time_per_token():
    some = promises(itl_s=2.5)
    gaps = [
        some.targets(Slo(tpot_s=tpot_s, itl_s=itl_s)).itl_s
        for tpot_s, itl_s in ((1.0, None), (1.0, 2.0), (4.0, None))
    ]
    assert gaps == [2.5, 2.0, 4.0]
    assert promises().targets(Slo(tpot_s=1.0)).itl_s == 4.0


def test_a_lag_is_made_good_before_answers_are_likely_to_end():
    some, short, long = promises(), OutputLengths(), OutputLengths()
    for i in range(100):
        short.add(6 + i % 3)
        long.add(200 + i)
    late = running(2, 100.0, 1.3, tpot_s=1.0)
    hurried, relaxed = (
        some.decode_budget([late], answers, 100.0, 0.1).mean_s for answers in (short, long)
    )
    assert 0.5 <= hurried < 0.95 < relaxed < 1.0
    assert some.decode_budget([late], short, 100.0, 0.97).mean_s == 1.0, (
        "where it can't be made good, nothing is asked for it"
    )


def test_what_is_likely_still_to_come_follows_the_latest_answers():
    answers = OutputLengths()
    assert answers.likely_remaining(3) == MIN_REMAINING, "it may end any time"
    assert answers.likely_remaining(400) == 100
    for i in range(300):
        answers.add(1000 if i < 44 else 10 + i % 10)  # the first ones are forgotten
    assert answers.likely_remaining(0) in (11, 12)
    assert answers.likely_remaining(19) == MIN_REMAINING


def test_prompts_that_waited_very_long_go_first_and_are_not_overtaken():
    some = promises(ttft_s=10.0)
    old, fresh = request("old", 50, arrival_s=0.0), request("fresh", 5, arrival_s=95.0)
    late = request("late", 50, arrival_s=60.0)
    assert [r.id for r in some.sort_by_urgency([late, fresh, old], 100.0)] == [
        "old",
        "fresh",
        "late",
    ]
    assert some.is_starved(old, 100.0) and not some.is_starved(late, 100.0)


def test_prompts_that_can_not_be_in_time_at_the_pace_in_force_go_behind():
    some = promises(ttft_s=10.0)
    tight, easy = request("tight", 80, arrival_s=0.0), request("easy", 10, arrival_s=4.0)
    assert [r.id for r in some.sort_by_urgency([tight, easy], 1.0)] == ["tight", "easy"]
    some.set_pace(prefill_slowdown=2.0, step_s=1.0)  # 80 tokens take 16 s
    assert [r.id for r in some.sort_by_urgency([tight, easy], 1.0)] == ["easy", "tight"]


def test_the_longest_gives_way_where_not_all_can_be_in_time():
    """Three of four can be: first come, first served would make one; those in time go by due time, whatever their length."""
    some = promises(ttft_s=10.0)
    requests = [
        request("a", 20, arrival_s=0.0),
        request("b", 70, arrival_s=0.1),
        request("c", 30, arrival_s=0.2),
    ]
    requests.append(request("d", 40, arrival_s=0.3))
    assert [r.id for r in some.sort_by_urgency(requests, 0.9)] == ["a", "c", "d", "b"]
    assert [r.id for r in some.sort_by_urgency(requests[1:3], 0.0)] == ["b", "c"]


def test_a_prompt_whose_beginning_is_cached_is_weighed_by_the_rest():
    """All of it would take 640 s, and it would be late; the rest takes 40."""
    h = Harness(
        auto(Priced()).engine.policy,
        Priced(prefill=10.0),
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


def test_a_default_target_does_not_shrink_while_a_prompt_is_computed():
    some, one = promises(), request("a", 100)
    before_s = some.ttft_s(one)
    one.computed_tokens = one.scheduled_tokens = 90
    assert some.ttft_s(one) == before_s == pytest.approx(100.0)


def test_a_short_prompt_stays_out_of_a_pass_that_would_make_it_late():
    """It can overtake that pass. Not where it is as long itself, nor where the other has no time for it."""

    def together(ttft_s: float, other_ttft_s: float, tokens: int = 4) -> list[str]:
        policy = auto(Priced(prefill=1.0, fixed=0.0)).engine.policy
        other, one = (
            request("other", 50, ttft_s=other_ttft_s),
            request("one", tokens, ttft_s=ttft_s),
        )
        return [r.id for r, _ in policy._cut_batch_in_time([(other, 50), (one, tokens)], 0.0)]

    assert together(ttft_s=30.0, other_ttft_s=200.0) == ["other"]
    assert together(ttft_s=100.0, other_ttft_s=200.0) == ["other", "one"]
    assert together(ttft_s=30.0, other_ttft_s=200.0, tokens=40) == ["other", "one"]
    assert together(ttft_s=30.0, other_ttft_s=40.0) == ["other", "one"], "that one is late already"


def test_prompts_in_time_say_how_long_prefill_may_take():
    some = promises(ttft_s=10.0)
    requests = [request("a", 20, arrival_s=0.0), request("c", 30, arrival_s=0.2)]
    assert some.max_prefill_slowdown(requests, [], 0.0, 1.0) == pytest.approx(10.2 / 5.0)
    hopeless = request("b", 700, arrival_s=0.1)
    assert some.max_prefill_slowdown(requests, [hopeless], 0.0, 1.0) == pytest.approx(10.2 / 5.0)


def test_a_prompt_is_held_back_while_running_decodes_could_not_bear_it():
    def first_token_of_b(tpot_s: float) -> tuple[bool, int]:
        h = auto(
            Priced(fixed=1.0, prefill=0.01, context=0.05), tpot_s=tpot_s, itl_s=1000.0, ttft_s=200.0
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
    h = auto(Priced(fixed=0.5, prefill=0.5, context=0.01, sharing=0.0), tpot_s=80.0, ttft_s=1e5)
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
    estimator = Priced(fixed=5.0, prefill=0.01, context=0.0)
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
    for turn in range(
        8
    ):  # the decode lane steps on while the group runs, and every time another split is the only one there is
        policy.pricer.levels = (1,) if turn % 2 else (3,)
        policy.pricer._cache.clear()
        h.step(0)
        assert state.lanes[1].in_flight[0][0].id == group
        units.append(policy.current.units)
    assert sum(one != two for one, two in itertools.pairwise(units)) <= 1
    h.drain()


def test_a_switch_to_chunks_waits_for_the_open_pass_alone():
    """While a pass stands between layer groups the split stays; no new pass begins if a chunk would be better."""
    h = beside_a_decode()
    # From here on sharing the device is dear: in the belief, that is.
    h.engine.policy.cost_model.estimator = Priced(
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


def test_who_is_overtaken():
    """A prefill of 640 s, and a prompt of 40 s that comes meanwhile."""

    def order(ttft_s: float, short_ttft_s: float = 10_000.0) -> list[str]:
        h = auto(Priced(prefill=10.0))
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


@pytest.mark.parametrize(
    ("weights", "units"), [({}, 3), ({"ttft_weight": 20.0, "tbt_weight": 1.0}, 1)]
)
def test_the_weights_decide_when_both_targets_can_not_be_met(weights, units):
    """One split is half a period late, the other half too slow for the first tokens."""
    policy = make_policy(
        SchedulerConfig(policy="auto", **weights), DeviceShape(4, 6, levels=(1, 2, 3)), Priced()
    )
    assert isinstance(policy, Auto)
    fast, punctual = (
        Candidate(0, 1, 1.5, 1.5, 0.3, 1.0, 1.0, 1.0),
        Candidate(0, 3, 1.0, 1.0, 0.1, 2.0, 2.0, 2.0),
    )
    assert (
        policy._pick_best(
            [fast, punctual], [0.5, 0.0], 1.0, DelayWeights(0.1, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
        ).units
        == units
    )


def split_for(stakes: DelayWeights) -> int:
    """Both splits meet all targets. One, of 1 unit, ends the prompt in half the time, but keeps decodes from most of their work."""
    policy = make_policy(
        SchedulerConfig(policy="auto"), DeviceShape(4, 6, levels=(1, 2, 3)), Priced()
    )
    assert isinstance(policy, Auto)
    fast, gentle = (
        Candidate(0, 1, 3.0, 3.0, 0.8, 1.0, 1.0, 1.0),
        Candidate(0, 3, 1.0, 1.0, 0.1, 2.0, 2.0, 2.0),
    )
    return policy._pick_best([fast, gentle], [0.0, 0.0], 5.0, stakes).units


@pytest.mark.parametrize(("need", "late", "units"), [(5.0, 0.0, 3), (0.2, 0.0, 1), (0.2, 2.0, 3)])
def test_where_all_prompts_will_be_late_it_still_matters_by_how_much(need, late, units):
    """Decodes are many: while prompts are in time the gentle split is taken. What decodes are promised weighs more than delay."""
    policy = make_policy(
        SchedulerConfig(policy="auto"), DeviceShape(4, 6, levels=(1, 2, 3)), Priced()
    )
    assert isinstance(policy, Auto)
    fast, gentle = (
        Candidate(0, 1, 3.0, 3.0, 0.8, 1.0, 1.0, 1.0),
        Candidate(0, 3, 1.0, 1.0, 0.1, 2.0, 2.0, 2.0),
    )
    assert (
        policy._pick_best(
            [fast, gentle], [late, 0.0], need, DelayWeights(0.1, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
        ).units
        == units
    )


def test_what_waits_asks_for_no_more_speed_than_its_targets_do():
    def demand(ttft_s: float) -> float:
        waiting = [request("b", 40, ttft_s=ttft_s)]
        return (
            promises()
            .delay_weights(
                [request("next", 40, ttft_s=9.0)], waiting, [], 0.0, PrefillBacklog(40, 1600, 0, 1)
            )
            .demand
        )

    assert (demand(1.0), demand(400.0)) == (pytest.approx(1 / 4), pytest.approx(1 / 400))


@pytest.mark.parametrize(("decodes", "units"), [(1, 1), (100, 3)])
def test_the_more_decodes_there_are_the_more_their_delay_counts(decodes, units):
    assert split_for(DelayWeights(0.1, 0.0, 0.001 * decodes, 0.0, 0.0, 0.0, 1.0)) == units


@pytest.mark.parametrize(("blocked", "units"), [(0, 1), (100, 3)])
def test_those_who_wait_for_a_slot_count_with_the_decodes_they_wait_for(blocked, units):
    requests = [request(str(n), 8, ttft_s=100.0) for n in range(blocked)]
    assert (
        split_for(
            promises().delay_weights(
                [request("next", 8, ttft_s=10.0)], [], requests, 0.001, PrefillBacklog(8, 64, 0, 1)
            )
        )
        == units
    )


def test_no_decode_is_queued_on_its_share_while_the_last_prefill_ends():
    """Lanes two steps deep. What is queued keeps its units: behind the last layers of the last prompt it would have all."""
    estimator = Priced(fixed=0.5, prefill=0.5, context=0.01, sharing=0.0)
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
    estimator = Priced(fixed=5.0, prefill=0.01, context=0.0, contention=50.0)
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


def test_who_waits_for_a_slot_is_not_taken_for_work_of_the_prefill():
    scheduler = SchedulerConfig(
        policy="auto", max_pass_tokens=64, max_running=2, tpot_s=80.0, ttft_s=1e5
    )
    policy = make_policy(scheduler, DeviceShape(4, 6, levels=(1, 2, 3)), Priced())
    assert isinstance(policy, Auto)
    h = Harness(policy, Priced(), max_running=2)
    for name in ("a", "b", "c", "d"):
        h.arrive(name, range(8), max_tokens=30)
    while len(h.engine.state.running) < 2:
        h.step()
    waiting, blocked = policy._split_waiting(h.engine.state)
    assert (waiting, {r.id for r in blocked}) == ([], {"c", "d"})
    h.drain()


def test_no_prefill_starts_beside_a_pass_that_has_chunks():
    """Where lanes may overlap, units would do: the pass with chunks was priced with all of them."""
    estimator = Priced(fixed=5.0, prefill=0.01, context=0.0)
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


def test_none_but_short_prompts_go_before_a_pass_that_was_set_aside():
    """A short one may go before the rest of a long one. Another long one that waits does not come along."""
    h = auto(Priced(prefill=10.0))
    h.arrive("long", range(64), max_tokens=2, slo=Slo(ttft_s=5000.0))
    h.step()
    h.arrive("other", range(100, 140), max_tokens=2, slo=Slo(ttft_s=4000.0))
    h.arrive("short", [7] * 4, max_tokens=2, slo=Slo(ttft_s=200.0))
    h.drain()
    assert sorted(h.records, key=lambda id: h.records[id].token_s[0]) == ["short", "long", "other"]


def test_long_answers_bear_long_steps_till_a_queue_is_done_and_short_ones_do_not():
    """Ten steps of 1.5 s and then steps of 0.5 s: a mean over 100 tokens bears that, one over 12 does not. Nor does one over 100
    where prompts have come all the time."""
    policy = make_policy(
        SchedulerConfig(policy="auto"), DeviceShape(4, 6, levels=(1, 2, 3)), Priced()
    )
    assert isinstance(policy, Auto)
    chunk = Candidate(64, 4, 1.5, 1.5, 0.6, 7.5, 7.5, 1.2)

    def late(to_come: int, load: float, queue: float = 2.0) -> float:
        return policy._decode_excess(
            [chunk], DecodeBudget(1.0, 9.0, 9.0, to_come, 1.0), 0.5, load, queue
        )[0]

    assert late(100, load=0.0) == 0.0 < late(12, load=0.0)
    assert late(100, load=1.0) > 0.0
    assert late(100, load=0.0, queue=20.0) > 0.0


@pytest.mark.parametrize(("demand", "units"), [(0.2, 3), (0.7, 1)])
def test_prefill_keeps_up_with_what_comes(demand, units):
    """All prompts that are here would be in time with either split; one of them is too slow for as many again each time."""
    policy = make_policy(
        SchedulerConfig(policy="auto"), DeviceShape(4, 6, levels=(1, 2, 3)), Priced()
    )
    assert isinstance(policy, Auto)
    fast, gentle = (
        Candidate(0, 1, 3.0, 3.0, 0.8, 1.0, 1.0, 1.0),
        Candidate(0, 3, 1.0, 1.0, 0.1, 2.0, 2.0, 2.0),
    )
    assert (
        policy._pick_best(
            [fast, gentle], [0.0, 0.0], 5.0, DelayWeights(0.1, 0.0, 1.0, 0.0, 0.0, demand, 1.0)
        ).units
        == units
    )


def test_a_mean_is_judged_by_what_is_expected_and_a_gap_by_what_may_happen():
    """Now and then a pass takes twice as long. That is no reason against it, unless a longest gap was promised."""
    policy = make_policy(
        SchedulerConfig(policy="auto"), DeviceShape(4, 6, levels=(1, 2, 3)), Priced()
    )
    assert isinstance(policy, Auto)
    chunk = Candidate(64, 4, 0.9, 1.8, 0.6, 0.9, 0.9, 1.2)
    assert policy._decode_excess([chunk], DecodeBudget(1.0, 2.0, 2.0, 100, 1.0), 0.5, 1.0, 1.0) == [
        0.0
    ]
    assert (
        policy._decode_excess([chunk], DecodeBudget(1.0, 1.5, 1.5, 100, 1.0), 0.5, 1.0, 1.0)[0]
        > 0.0
    )
