"""Replays over HTTP against a small server, and on an engine in this process: open loop, with every
failure and delay reported.
"""

from __future__ import annotations

import threading
import time

import pytest
from bench_server import FakeServer, running

from counterpoint.bench import replay
from counterpoint.bench.client import METRIC_FIELDS, HttpTarget
from counterpoint.bench.replay import ReplayOptions, replay_engine, replay_http
from counterpoint.bench.report import summarise
from counterpoint.bench.workload import (
    Lengths,
    PrefixGroups,
    Query,
    SyntheticLoad,
    TokenRange,
    prompt_ids,
)
from counterpoint.config import SchedulerConfig
from counterpoint.core.engine import Engine
from counterpoint.core.limits import DeviceShape, EngineLimits
from counterpoint.core.policy import make_policy
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.timeline import Timeline
from counterpoint.types import Command, FinishReason, Slo, Step, StepDone

FINE, REFUSED, ERROR_EVENT, BROKEN, SHORT, GATED = range(6)


def query(number: int, kind: int = FINE, arrival_s: float = 0.0, tokens: int = 4) -> Query:
    return Query(number, arrival_s, 3, tokens, prompt=(kind, number, 7))


@pytest.fixture
def fake():
    return FakeServer()


@pytest.fixture
def target(fake):
    with running(fake) as url:
        yield HttpTarget(url, "fake")


def test_answers_become_records(fake, target):
    load = [query(0, tokens=5), query(1, tokens=1, arrival_s=0.02)]
    outcome = replay_http(target, load)
    first, second = outcome.records
    assert (first.id, first.prompt_tokens, len(first.token_s), first.finish_reason) == (
        "q0",
        3,
        5,
        FinishReason.LENGTH,
    )
    assert len(second.token_s) == 1
    assert 0 <= first.arrival_s <= first.token_s[0] <= first.token_s[-1] <= first.finished_s
    assert second.arrival_s >= 0.02
    assert outcome.errors == {}
    assert [body["prompt"] for body in fake.seen] == [[FINE, 0, 7], [FINE, 1, 7]]
    result = summarise(outcome, Slo(ttft_s=30.0))
    assert (result["completed"], result["total_output_tokens"], result["slo_attainment"]) == (
        2,
        6,
        1.0,
    )


def test_every_kind_of_failure_is_a_record_with_its_reason(target):
    load = [query(i, kind) for i, kind in enumerate((FINE, REFUSED, ERROR_EVENT, BROKEN, SHORT))]
    events: list[str] = []
    outcome = replay_http(target, load, ReplayOptions(on_request=events.append))
    assert [r.finish_reason for r in outcome.records] == [FinishReason.LENGTH] + [
        FinishReason.ERROR
    ] * 4
    assert "HTTP 400" in outcome.errors["q1"]
    assert "prompt too long" in outcome.errors["q1"]
    assert "engine lost" in outcome.errors["q2"]
    assert "q3" in outcome.errors
    assert "asked for 4 tokens with ignore_eos, got 3" in outcome.errors["q4"]
    assert (events.count("sent"), events.count("done"), events.count("failed")) == (5, 1, 4)
    result = summarise(outcome, Slo(ttft_s=60.0))
    assert (result["completed"], result["failed"], result["slo_attainment"]) == (1, 4, 0.2)


def test_a_shorter_answer_is_fine_where_its_length_was_not_asked_for(fake, target):
    plain = HttpTarget(target.url, "fake", extensions=False)
    outcome = replay_http(plain, [query(0, SHORT)])
    assert outcome.errors == {}
    assert len(outcome.records[0].token_s) == 3
    assert "ignore_eos" not in fake.seen[0]


def test_arrivals_do_not_wait_for_answers(fake, target):
    """All ten requests reach the server before it answers any."""
    fake.expected = 10
    outcome = []
    player = threading.Thread(
        target=lambda: outcome.append(
            replay_http(target, [query(i, GATED, i * 0.01) for i in range(10)])
        )
    )
    player.start()
    assert fake.all_here.wait(20)
    assert not outcome
    fake.gate.set()
    player.join(20)
    assert [r.finish_reason for r in outcome[0].records] == [FinishReason.LENGTH] * 10
    result = summarise(outcome[0])
    assert result["max_concurrent_requests"] == 10


def test_a_late_generator_is_reported(target, monkeypatch):
    """The generator's clock jumps by 0.3 s before the second query, as if the process had
    stalled."""
    real, held = time.perf_counter, [0.0]
    monkeypatch.setattr(replay, "clock", lambda: real() + held[0])

    def hold(event: str) -> None:
        held[0] += 0.3 if event == "sent" and not held[0] else 0.0

    load = [query(i, arrival_s=i * 0.001) for i in range(5)]
    outcome = replay_http(target, load, ReplayOptions(on_request=hold))
    assert max(outcome.lag_s) >= 0.29
    result = summarise(outcome)
    assert result["degraded"] is True


def test_warm_up_is_sent_first_and_not_counted(fake, target):
    outcome = replay_http(target, [query(5)], ReplayOptions(warmup=[query(900), query(901)]))
    assert [body["prompt"][1] for body in fake.seen] == [900, 901, 5]
    assert [r.id for r in outcome.records] == ["q5"]


def test_nobody_there_is_said_at_once():
    nobody = HttpTarget("http://127.0.0.1:9", "m")
    with pytest.raises(ConnectionError, match="warm-up"):
        replay_http(nobody, [query(0)], ReplayOptions(warmup=[query(1)]))
    outcome = replay_http(nobody, [query(0)])
    assert outcome.records[0].finish_reason == FinishReason.ERROR
    assert "Connect" in outcome.errors["q0"]


def page(free: int, cached: int, both_s: float, running: int = 0) -> str:
    values = {
        "pages_total": 100,
        "pages_free": free,
        "pages_cached": cached,
        "running": running,
        "waiting": 0,
    }
    lines = [
        f"{sample} {values[field]}" for sample, field in METRIC_FIELDS.items() if field in values
    ]
    lines.append(f'counterpoint_split_seconds_total{{prefill_units="1",decode_units="1"}} {both_s}')
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("after", "leaked"), [(page(60, 40, 5.0), 0), (page(60, 37, 5.0), 3)])
def test_our_servers_figures_are_compared(fake, target, after, leaked):
    fake.metrics = [
        page(90, 10, 2.0),
        page(10, 0, 4.0, running=1),
        after,
    ]  # still busy at the first look after the load
    outcome = replay_http(target, [query(0)])
    assert outcome.pages_leaked == leaked
    result = summarise(outcome)
    assert result["split_share"][0]["seconds"] == pytest.approx(3.0)


def test_other_servers_have_no_figures(target):
    outcome = replay_http(target, [query(0)])
    assert (outcome.before, outcome.after, outcome.pages_leaked) == (None, None, None)


# ---------------------------------------------------------------- in this process


class Echo:
    """An executor that finishes steps at once with token 7, and records the prompts."""

    def __init__(self, inbox: WallClockEventQueue, layers: int) -> None:
        self.inbox, self.layers = inbox, layers
        self.prompts: list[tuple[int, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def submit(self, command: Command) -> None:
        if self.broken:
            raise OSError("the device is gone")
        if not isinstance(command, Step):
            self.prompts += [command.tokens] if hasattr(command, "prompt_tokens") else []
            return
        sampled = (
            sum(s.sample for s in command.segments) if command.last_layer == self.layers else 0
        )
        now = self.inbox.clock()
        self.inbox.put(
            StepDone(
                step=command.id,
                lane=command.lane,
                tokens=(7,) * sampled,
                started_s=now,
                ended_s=now,
                units=command.units,
            )
        )

    def close(self) -> None:
        pass


def system(pages: int = 200):
    inbox = WallClockEventQueue()
    limits = EngineLimits(
        pages=pages,
        page_tokens=16,
        max_running=8,
        max_context_tokens=512,
        max_pass_tokens=256,
        eos_token_ids=(2,),
        units=2,
        layers=2,
    )
    return (
        Engine(
            limits,
            make_policy(SchedulerConfig(policy="chunked", chunk_tokens=64), DeviceShape(2, 2)),
        ),
        inbox,
        Echo(inbox, 2),
    )


def test_an_engine_in_this_process_gives_the_same_outcome():
    engine, inbox, executor = system()
    load = SyntheticLoad(
        20, Lengths(60, "uniform"), Lengths(5, "uniform"), rate=400.0, groups=PrefixGroups(2, 0.8)
    ).queries()
    events: list[str] = []
    options = ReplayOptions(tokens=TokenRange(100, 200), on_request=events.append)
    outcome = replay_engine(engine, inbox, executor, load, options)
    assert [r.id for r in outcome.records] == [q.id for q in load]
    assert [len(r.token_s) for r in outcome.records] == [q.output_tokens for q in load]
    assert [r.prompt_tokens for r in outcome.records] == [q.prompt_tokens for q in load]
    assert sorted(executor.prompts) == sorted(prompt_ids(q, TokenRange(100, 200)) for q in load)
    assert all(r.arrival_s >= q.arrival_s for r, q in zip(outcome.records, load, strict=True))
    assert all(r.arrival_s <= r.token_s[0] for r in outcome.records)
    assert outcome.pages_leaked == 0
    assert (events.count("sent"), events.count("done")) == (20, 20)
    result = summarise(outcome)
    assert result["completed"] == 20
    assert result["prefix_hit_share"] > 0.3
    assert "degraded" in result


def test_what_does_not_fit_is_a_failure_with_its_reason():
    engine, inbox, executor = system()
    outcome = replay_engine(engine, inbox, executor, [Query(0, 0.0, 600, 5), Query(1, 0.0, 20, 5)])
    assert [r.finish_reason for r in outcome.records] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert "600" in outcome.errors["q0"]


def test_warm_up_in_this_process_is_not_counted():
    engine, inbox, executor = system()
    options = ReplayOptions(warmup=[query(50), query(51)])
    outcome = replay_engine(engine, inbox, executor, [query(0, tokens=3)], options)
    assert [r.id for r in outcome.records] == ["q0"]
    assert outcome.before is not None and outcome.before.generated_tokens == 8
    assert outcome.after is not None and outcome.after.generated_tokens == 11


def test_a_lost_device_ends_the_replay():
    engine, inbox, executor = system()
    executor.broken = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        replay_engine(engine, inbox, executor, [query(0)])


def test_a_timeline_can_be_taken_of_it():
    engine, inbox, executor = system()
    timeline = Timeline(executor, inbox)
    options = ReplayOptions(timeline=timeline)
    replay_engine(engine, inbox, executor, [query(0), query(1)], options)
    assert sum(span.prefill_tokens for span in timeline.spans) == 6


def test_texts_are_refused_by_an_engine():
    engine, inbox, executor = system()
    with pytest.raises(ValueError, match="tokenised"):
        replay_engine(engine, inbox, executor, [Query(0, 0.0, 2, 2, prompt="hello")])
