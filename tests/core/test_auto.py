"""Auto: what it chooses, on a device whose prices are known."""

from __future__ import annotations

import itertools

import pytest
from driver import Harness

from counterpoint.config import SchedulerConfig
from counterpoint.core.policy import Auto, make_policy
from counterpoint.core.policy.belief import Belief
from counterpoint.types import Slo, Step, StepDone, Work


class Priced:
    """`fixed` seconds for each pass (reading weights), then per prefill token and per decode context token; `sharing`: how much
    of the units' loss a decode step feels (0: it is as fast on one unit as on all)."""

    def __init__(self, fixed=1.0, prefill=0.1, context=0.001, sharing=1.0, contention=1.0) -> None:
        self.fixed, self.prefill, self.context = fixed, prefill, context
        self.sharing, self.contention = sharing, contention

    def seconds(self, work: Work, units: int, beside=None) -> float:
        layers = (work.last_layer - work.first_layer) / work.layers
        less = 4 / units
        compute = work.prefill_tokens * self.prefill * less
        read = (self.fixed + work.decode_context * self.context) * (1 + (less - 1) * self.sharing)
        both = compute + read if work.decode_batch else max(compute, self.fixed)
        return layers * both * (self.contention if beside else 1.0)


def auto(estimator, **settings) -> Harness:
    scheduler = SchedulerConfig(policy="auto", max_pass_tokens=64, **settings)
    policy = make_policy(scheduler, 4, 6, levels=(1, 2, 3), belief=estimator)
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
    mixed, units = run_both(auto(Priced(fixed=0.5, prefill=0.5, context=0.5, sharing=0.0), tpot_s=80.0))
    assert True not in mixed and 1 in units


def test_no_split_where_contention_eats_the_gain():
    mixed, _ = run_both(auto(Priced(fixed=0.5, prefill=0.5, context=0.5, sharing=0.0, contention=3.0), tpot_s=100.0))
    assert True in mixed


def test_a_tighter_target_is_met_at_the_price_of_gain():
    def first_choice(itl_s: float):
        h = auto(Priced(fixed=2.0, prefill=0.1, context=0.02, contention=1.2), tpot_s=itl_s, itl_s=itl_s)
        h.arrive("a", range(8), max_tokens=60)
        while not h.got.get("a"):
            h.step()
        h.arrive("b", range(100, 160), max_tokens=2)
        while h.engine.policy.choice is None:
            assert h.step()
        return h.engine.policy.choice

    loose, tight = first_choice(1000.0), first_choice(7.0)
    assert tight.period_s <= 7.0 < loose.period_s
    assert tight.gain < loose.gain


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
    requests = list(h.engine.living.values())
    order = [r.id for r in policy.order(requests, h.now)]
    assert order.index("urgent") < order.index("relaxed") or "relaxed" in h.got
    late = [r.id for r in policy.order(requests, h.now + 0.01)]
    assert late[0] == "hopeless" or late[-1] == "hopeless"


@pytest.mark.parametrize("truth", [0.5, 2.0])
def test_belief_learns_and_its_guard_covers_what_happens(truth):
    belief = Belief(Priced())
    work = Work(decode_batch=4, decode_context=400, samples=4, last_layer=6, layers=6)
    raw = belief.seconds(work, 2)
    for i in range(200):
        took = raw * truth * (1.3 if i % 10 == 0 else 1.0)
        belief.observe(Step(i, 0, i, 0, 6, 2, (), work), StepDone(i, 0, started_s=0.0, ended_s=took, units=2), None)
    assert belief.seconds(work, 2) == pytest.approx(raw * truth, rel=0.1)
    assert belief.both(work, 2)[1] >= belief.seconds(work, 2)
    ((kind, median, high, steps),) = belief.errors()
    assert (kind, steps) == ("decode", 200)
    assert median < 0.1 and high < 0.4


def test_a_broken_reading_moves_little():
    belief = Belief(Priced())
    work = Work(decode_batch=1, decode_context=10, samples=1, last_layer=6, layers=6)
    raw = belief.seconds(work, 4)
    belief.observe(Step(1, 0, 1, 0, 6, 4, (), work), StepDone(1, 0, started_s=0.0, ended_s=1e6), None)
    assert belief.seconds(work, 4) <= 5 * raw
    belief.observe(Step(2, 0, 2, 0, 6, 4, (), work), StepDone(2, 0, started_s=5.0, ended_s=5.0), None)
    belief.observe(Step(3, 0, 3, 0, 6, 4, (), work), StepDone(3, 0, started_s=0.0, ended_s=9.0, error="x"), None)
    assert belief.seconds(work, 4) <= 5 * raw
