"""Handoffs under random faults (handoff_world.py), and hypothesis for small counterexamples."""

from __future__ import annotations

from collections import Counter

import pytest
from handoff_world import FAULT_RATES, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from counterpoint.disagg.handoff_context import PageHold
from counterpoint.disagg.handoff_events import HandoffOutcome
from counterpoint.disagg.prefill_source import PrefillSource
from counterpoint.disagg.receiver import HandoffReceiver
from counterpoint.types import FinishReason


def day(seed: int, weather: str, steps: int = 1500) -> World:
    world = World(seed, weather)
    while world.steps < steps:
        world.step()
    world.run_to_rest()
    return world


def test_a_hundred_thousand_steps():
    """All invariants hold, and everything that can happen has."""
    seen, ended, steps = Counter(), Counter(), 0
    for seed in range(80):
        world = day(seed, ("quiet", "lossy", "storm", "storm")[seed % 4])
        seen += world.seen
        ended += world.ended
        steps += world.steps
    assert steps >= 100_000
    assert all(seen[f"fault {kind}"] for kind in FAULT_RATES["storm"])
    assert all(seen[hold.value] for hold in PageHold)
    for outcome in (
        HandoffOutcome.SENT,
        HandoffOutcome.DECODED_IN_PLACE,
        HandoffOutcome.FINISHED,
        HandoffOutcome.ABORTED,
        HandoffOutcome.FAILED,
    ):
        assert seen[f"prefill {outcome.value}"]
    for outcome in (HandoffOutcome.ADOPTED, HandoffOutcome.ABORTED, HandoffOutcome.FAILED):
        assert seen[f"decode {outcome.value}"]
    assert (
        ended[FinishReason.LENGTH.value] > 500
        and ended[FinishReason.ERROR.value]
        and ended["withdrawn"]
    )


def keep_no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """Free what was reserved as soon as it is given up."""
    stop = HandoffReceiver.abort

    def broken(self, now, outcome, reason):
        stop(self, now, outcome, reason)
        self._free()

    patch.setattr(HandoffReceiver, "abort", broken)


def release_early(patch: pytest.MonkeyPatch) -> None:
    """Give source pages back while writes read them."""

    def broken(self, now, outcome, *args, **kwargs):
        self.in_flight = 0
        end(self, now, outcome, *args, **kwargs)

    end = PrefillSource.end
    patch.setattr(PrefillSource, "end", broken)


def send_half_full_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PrefillSource,
        "complete_pages",
        lambda self, tokens: self.context.num_pages(tokens) if self.pages else 0,
    )


@pytest.mark.parametrize("mistake", [keep_no_quarantine, release_early, send_half_full_pages])
def test_the_world_notices(mistake, monkeypatch):
    """A protocol with a known mistake does not get through."""
    mistake(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(40):
            day(seed, "storm")


@pytest.mark.parametrize("weather", FAULT_RATES)
def test_a_day_is_the_same_whenever_it_is_lived(weather):
    assert day(7, weather, 400).seen == day(7, weather, 400).seen


class Handover(RuleBasedStateMachine):
    """Hypothesis chooses every event and every fault."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.world = World(seed, "storm", workers=2 + seed % 2, living=4)
        for _ in range(2):
            self.world.new_request()

    workers = st.integers(0, 2)

    def worker(self, number: int):
        return list(self.world.workers.values())[number % len(self.world.workers)]

    @rule()
    def request(self) -> None:
        if len(self.world.frontend.requests) < self.world.max_requests:
            self.world.new_request()

    @precondition(lambda self: self.world.messages)
    @rule(index=st.integers(0, 50), times=st.integers(1, 5))
    def messages_arrive(self, index: int, times: int) -> None:
        for _ in range(min(times, len(self.world.messages))):
            self.world.deliver(index % len(self.world.messages))

    @precondition(lambda self: self.world.network.writes)
    @rule(action=st.sampled_from([0.0, 1.0]))
    def a_write_moves(self, action: float) -> None:
        self.world.move(action)

    @rule(number=workers, turns=st.integers(1, 4))
    def a_worker_works(self, number: int, turns: int) -> None:
        worker = self.worker(number)
        if not worker.frozen:
            for _ in range(turns):
                if self.world.orders[worker.name]:
                    self.world.take_order(worker)
                self.world.engine_turn(worker)
                worker.engine.work()

    @rule(number=workers)
    def the_front_listens(self, number: int) -> None:
        name = self.worker(number).name
        while self.world.queues[name]:
            self.world.front_turn(name)

    @rule(number=workers, seconds=st.sampled_from([0.1, 0.6, 3.5]))
    def time_passes(self, number: int, seconds: float) -> None:
        self.world.now += seconds
        worker = self.worker(number)
        if not worker.frozen:
            self.world.tick(worker)

    @rule(number=workers, kind=st.sampled_from(sorted(FAULT_RATES["storm"])))
    def something_fails(self, number: int, kind: str) -> None:
        self.world.fault(self.worker(number), kind)

    @invariant()
    def pages_are_right(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_to_rest()


Handover.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestHandover = Handover.TestCase
