"""The engine under every policy: exact answers, conserved pages, nobody starves, whatever the order of events."""

from __future__ import annotations

import itertools

import pytest
from engine_harness import Harness, answer
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.config import SchedulerConfig
from counterpoint.core.limits import DeviceShape
from counterpoint.core.metrics import RECENT_STEPS
from counterpoint.core.policy import make_policy
from counterpoint.types import Abort, FinishReason, InitSlot, Slo, Step

POLICIES = ["serial", "serial in groups", "chunked", "multiplex", "auto"]


class Linear:
    """A device whose steps take a tick per token and unit, and a little for the batch."""

    def seconds(self, work, units, co_running=None) -> float:
        layers = (work.last_layer - work.first_layer) / work.layers
        tokens = (
            work.prefill_tokens
            + 0.01 * work.prefill_reused
            + 2 * work.decode_batch
            + 0.01 * work.decode_context
        )
        return layers * (1.0 + tokens / units) * (1.2 if co_running else 1.0)


def policy(name: str, units: int = 4, layers: int = 6, depth: int = 1, **scheduler):
    name, _, groups = name.partition(" in ")
    scheduler = {
        "chunk_tokens": 16,
        "max_pass_tokens": 48,
        "layer_group": 2 if groups else None,
    } | scheduler
    settings = SchedulerConfig(policy=name, **scheduler)
    return make_policy(
        settings, DeviceShape(units, layers, depth, tuple(range(1, units))), Linear()
    )


def harness(name: str, depth: int = 1, layer_group: int | None = None, **limits) -> Harness:
    return Harness(
        policy(name, limits.get("units", 4), depth=depth, layer_group=layer_group), **limits
    )


@pytest.mark.parametrize("name", POLICIES)
def test_one_request_gets_its_tokens(name):
    h = harness(name)
    h.arrive("a", range(10), max_tokens=5)
    h.drain()
    assert h.got["a"] == answer(tuple(range(10)), 5)
    assert h.ends["a"].finish_reason is FinishReason.LENGTH
    assert h.records["a"].prompt_tokens == 10


@pytest.mark.parametrize("name", POLICIES)
def test_stop_token_ends_and_is_named(name):
    prompt = tuple(range(7))
    stop = answer(prompt, 6)[2]
    h = harness(name)
    h.arrive("a", prompt, max_tokens=6, stop_token_ids=(stop,))
    h.drain()
    assert h.got["a"] == answer(prompt, 6, (stop,))
    assert (h.ends["a"].finish_reason, h.ends["a"].stop_reason) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("name", POLICIES)
def test_an_engine_that_tells_nobody_of_tokens_does_the_same(name):
    told, untold = harness(name), harness(name)
    untold.engine.emit_deltas = False
    for h in (told, untold):
        for number in range(4):
            h.arrive(f"r{number}", range(number, 20 + 5 * number), max_tokens=4 + number)
        h.drain()
    assert told.got and not untold.got
    assert untold.records == told.records
    assert untold.engine.stats() == told.engine.stats()


def test_eos_ends_unless_ignored():
    prompt = (3, 1, 4)
    eos = answer(prompt, 5)[1]
    for ignore, count in [(False, answer(prompt, 5).index(eos) + 1), (True, 5)]:
        h = harness("chunked", eos_token_ids=(eos,))
        h.arrive("a", prompt, max_tokens=5, ignore_eos=ignore)
        h.drain()
        assert len(h.got["a"]) == count


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "word"),
    [
        ((), 4, "empty"),
        ((1,), 0, "max_tokens"),
        ((1,) * 190, 20, "context"),
        ((1,) * 100, 30, "KV cache"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt, max_tokens, word):
    h = harness("chunked", pages=30)
    h.arrive("bad", prompt, max_tokens=max_tokens)
    assert h.ends["bad"].finish_reason is FinishReason.ERROR and word in h.ends["bad"].error
    assert "bad" in h.records and h.engine.idle


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("lengths", [(150,), (48, 49), (10, 150, 10), (97, 5, 60)])
def test_no_pass_has_more_prompt_tokens_than_allowed(name, lengths):
    h = harness(name)
    for number, length in enumerate(lengths):
        h.arrive(f"r{number}", range(1000 * number, 1000 * number + length), max_tokens=3)
    h.drain()
    h.check_answers()
    steps = [
        command for commands in h.commands for command in commands if isinstance(command, Step)
    ]
    assert max(step.work.prefill_tokens for step in steps) <= 48


@pytest.mark.parametrize("name", POLICIES)
def test_prefix_pages_are_shared(name):
    h = harness(name)
    prompt = tuple(range(30))
    h.arrive("a", prompt)
    h.drain()
    h.arrive("b", (*prompt, 40, 41))
    h.drain()
    assert h.records["b"].cached_tokens == 28
    h.check_answers()


def test_a_fully_cached_prompt_still_computes_a_token():
    h = harness("chunked")
    for id in "ab":
        h.arrive(id, range(16))
        h.drain()
    assert h.records["b"].cached_tokens == 12
    h.check_answers()


def test_generated_pages_are_reused_by_the_next_turn():
    h = harness("chunked")
    h.arrive("a", range(10), max_tokens=11)
    h.drain()
    h.arrive("b", (*range(10), *h.got["a"], 7, 7))
    h.drain()
    assert h.records["b"].cached_tokens == 20


def test_how_much_of_a_prompt_is_known_is_seen_while_it_waits():
    """In the cache, or being computed by another; less again when pages are evicted; and long prompts are looked at one by one."""
    h = harness("chunked", max_running=1, max_context_tokens=40_000, pages=20_000)
    h.arrive("a", range(32))
    h.drain()

    def look() -> list[int]:
        h.engine.admission.prefix_cache.update_matches(h.engine.admission.waiting)
        return [r.matched_tokens for r in h.engine.admission.waiting]

    h.arrive("busy", range(100, 140), max_tokens=2)
    h.arrive("cached", (*range(30), 1, 1, 1))
    h.arrive("soon", (*range(100, 140), 7))
    h.arrive("whole", range(32))
    h.arrive("salted", range(32), salt="x")
    for n in range(2):
        h.arrive(f"long{n}", [*range(16), *range(20_000)])
    assert look() == [28, 40, 28, 0, 16, 0]
    assert look() == [28, 40, 28, 0, 16, 16]
    assert [r.remaining_tokens for r in h.engine.admission.waiting][:4] == [5, 1, 4, 32]
    pages = h.engine.page_pool
    pages.release(pages.allocate(pages.available))  # which evicts all
    assert look() == [0, 40, 0, 0, 0, 0]
    h.event(Abort("busy"))
    h.step()
    assert look()[0] == 0 and h.engine.admission.waiting[0].id == "soon"
    h.drain()
    h.check_answers()


def test_salts_share_nothing():
    h = harness("chunked")
    h.arrive("a", range(20), salt="x")
    h.drain()
    h.arrive("b", range(20), salt="y")
    h.drain()
    assert h.records["b"].cached_tokens == 0


def test_a_second_request_waits_for_the_prefix_that_a_first_one_computes():
    h = harness("multiplex", layer_group=1)
    h.arrive("a", range(40))
    h.arrive("b", (*range(36), 45, 46))
    h.drain()
    assert h.records["b"].cached_tokens == 36
    h.check_answers()


def test_aborting_the_first_frees_the_second_that_waits_for_its_prefix():
    h = harness("multiplex", layer_group=1)
    h.arrive("a", range(40))
    h.arrive("b", (*range(36), 45, 46))
    h.event(Abort("a"))
    h.drain()
    assert h.ends["b"].finish_reason is FinishReason.LENGTH
    h.check_answers()


@pytest.mark.parametrize("name", POLICIES)
def test_more_requests_than_pages(name):
    h = harness(name, pages=20)
    for i in range(12):
        h.arrive(f"r{i}", [i] * (5 + 3 * i % 17), max_tokens=20)
    h.drain()
    h.check_answers()
    assert all(end.finish_reason is FinishReason.LENGTH for end in h.ends.values())


def test_preemptions_are_bounded():
    limit = 2
    h = harness("chunked", pages=24, max_preemptions=limit)
    for i in range(8):
        h.arrive(f"r{i}", [i] * 8, max_tokens=80)
    h.drain()
    h.check_answers()
    assert 0 < max(r.preemptions for r in h.records.values()) <= limit


def test_the_oldest_is_never_preempted():
    h = harness("chunked", pages=24)
    for i in range(8):
        h.arrive(f"r{i}", [i] * 8, max_tokens=80)
    h.drain()
    assert h.records["r0"].preemptions == 0


def test_small_requests_pass_a_large_one_that_does_not_fit_but_not_for_ever():
    h = harness("chunked", pages=30, max_bypass_s=50.0)
    h.arrive("running", [1] * 60, max_tokens=40)
    h.arrive("large", [2] * 80, max_tokens=4)
    for i in range(200):
        h.arrive(f"small{i}", [3, i % 50, i // 50], max_tokens=2)
        h.step()
    h.drain()
    h.check_answers()
    order = sorted(h.records.values(), key=lambda r: r.admitted_s)
    small_before = [r.id for r in itertools.takewhile(lambda r: r.id != "large", order)]
    assert "small0" in small_before, "a small one did not pass"
    assert "small199" not in small_before, "the large one starved"


def test_priority_goes_first():
    h = harness("chunked", max_running=1)
    h.arrive("now", range(5))
    h.arrive("low", range(5), priority=-1)
    h.arrive("high", range(6), priority=5)
    h.drain()
    assert h.records["high"].admitted_s < h.records["low"].admitted_s


@pytest.mark.parametrize("name", POLICIES)
def test_abort_at_every_moment(name):
    for moment in range(25):
        h = harness(name, layer_group=2, pages=24)
        h.arrive("a", range(20), max_tokens=6)
        h.arrive("b", range(100, 130), max_tokens=6)
        for _ in range(moment):
            h.step(moment)
        h.event(Abort("a"))
        h.event(Abort("a"))
        h.event(Abort("nobody"))
        h.drain()
        h.check_answers()
        assert h.ends["b"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", POLICIES)
def test_a_failed_step_fails_only_its_requests(name):
    h = harness(name, layer_group=2)
    h.arrive("a", range(20), max_tokens=6)
    h.step(error="boom")
    h.arrive("b", range(20), max_tokens=6)
    h.drain()
    assert h.ends["a"].finish_reason is FinishReason.ERROR and h.ends["a"].error == "boom"
    assert h.got["b"] == answer(tuple(range(20)), 6)


def test_a_row_without_finite_logits_fails_alone(monkeypatch):
    h = harness("chunked")
    h.arrive("a", range(5))
    h.arrive("b", range(50, 55))
    h.step()
    busy = h.device.busy()[0]
    done = h.device.finish(busy, h.now)
    import msgspec

    h.event(msgspec.structs.replace(done, tokens=(-1, *done.tokens[1:])))
    h.drain()
    ends = sorted((h.ends["a"].finish_reason, h.ends["b"].finish_reason))
    assert ends == [FinishReason.ERROR, FinishReason.LENGTH]


def test_repeated_ids_do_no_harm():
    h = harness("chunked")
    h.arrive("a", range(5))
    first = h.sent["a"]
    h.arrive("a", range(60, 90))
    h.sent["a"] = first
    h.drain()
    h.check_answers()


def test_serial_decodes_nothing_while_a_prompt_waits():
    h = harness("serial")
    h.arrive("a", range(5), max_tokens=10)
    h.step()
    h.arrive("b", range(60, 90), max_tokens=2)
    h.step()
    step = h.device.queue[0][0]
    assert step.work.prefill_tokens == 30 and step.work.decode_batch == 0


def test_chunked_never_holds_a_decode_back_and_keeps_its_budget():
    h = harness("chunked")
    h.arrive("a", range(5), max_tokens=20)
    h.step()
    h.arrive("b", range(60, 130), max_tokens=2)
    h.step()
    while h.device.busy():
        work = h.device.queue[0][0].work
        assert work.prefill_tokens + work.decode_batch <= 16
        assert work.decode_batch >= 1 or "a" in h.ends
        h.step()
    h.check_answers()


def test_multiplex_runs_both_lanes_at_once_and_gives_the_device_back():
    h = harness("multiplex", layer_group=1)
    h.arrive("a", range(5), max_tokens=30)
    assert h.device.queue[1][0].units == 4, "prefill alone has the whole device"
    while not h.got.get("a"):
        h.step()
    assert h.device.queue[0][0].units == 4, "decode alone has the whole device"
    h.arrive("b", range(60, 100), max_tokens=2)
    h.step()
    assert {lane: steps[0].units for lane, steps in h.device.queue.items()} == {0: 2, 1: 2}
    decodes = len(h.got["a"])
    while h.device.busy() == [0, 1] and len(h.got["a"]) < decodes + 10:
        h.step(0)
    assert len(h.got["a"]) >= decodes + 10, "decode went on while the prefill stood still"
    h.drain()
    h.check_answers()
    assert any(p and d for p, d, _ in h.engine.stats().split_s)


def test_whoever_watches_sees_what_the_lanes_run_and_have_run():
    h = harness("multiplex", layer_group=1)
    h.arrive("a", range(5), max_tokens=30)
    while not h.got.get("a"):
        h.step()
    h.arrive("b", range(60, 100), max_tokens=2)
    h.step()
    stats = h.engine.stats()
    assert [(s.lane, s.units, s.prefill_tokens, s.decode_batch) for s in stats.running_steps] == [
        (0, 2, 0, 1),
        (1, 2, 40, 0),
    ]
    assert all(s.started_s == h.now and s.ended_s == 0 for s in stats.running_steps)
    before, launched = stats, [h.device.queue[lane][0] for lane in (0, 1)]
    h.step(1)
    stats = h.engine.stats()
    last = stats.recent_steps[-1]
    assert stats.steps == before.steps + 1 and stats.recent_steps[:-1] == before.recent_steps
    assert (last.lane, last.pass_id, last.units, last.prefill_tokens) == (
        1,
        launched[1].pass_id,
        2,
        40,
    )
    assert (last.started_s, last.ended_s) == (h.now - 1, h.now)
    assert stats.running_steps[0] == before.running_steps[0], "the decode step still runs"
    h.drain()
    assert h.engine.stats().running_steps == ()


def test_recent_steps_are_bounded():
    h = harness("serial")
    h.arrive("a", range(5), max_tokens=150)
    h.drain()
    stats = h.engine.stats()
    assert stats.steps == 150 and len(stats.recent_steps) == RECENT_STEPS
    assert [s.ended_s for s in stats.recent_steps] == [
        h.now - i for i in range(RECENT_STEPS - 1, -1, -1)
    ]


def test_multiplex_refuses_a_split_that_leaves_a_lane_empty():
    with pytest.raises(ValueError, match="split is 4"):
        policy("multiplex", units=4, split=4)


@pytest.mark.parametrize("name", ["multiplex", "auto"])
def test_one_unit_cannot_be_split(name):
    assert len(policy(name, units=1).lanes) == 1


def test_one_step_ahead_changes_no_token():
    for name in POLICIES:
        h = harness(name, depth=2)
        prompt = tuple(range(11))
        stop = answer(prompt, 9)[4]
        h.arrive("a", prompt, max_tokens=9, stop_token_ids=(stop,))
        h.arrive("b", range(40, 47), max_tokens=9)
        h.drain()
        h.check_answers()


@pytest.mark.parametrize("name", POLICIES)
def test_a_grammar_runs_in_lockstep_and_its_end_is_the_end(name):
    h = harness(name, depth=2)
    prompt = tuple(range(11))
    h.arrive("free", range(40, 47), max_tokens=30)
    h.arrive("bound", prompt, max_tokens=9, grammar="g")
    ahead = 0
    while h.step():
        free = h.engine.requests.get("free")
        ahead += free is not None and free.scheduled_tokens > len(free.tokens)
    assert ahead, "the others run ahead as before"
    h.check_answers()
    eos = answer(prompt, 9)[4]
    h = harness(name, depth=2, eos_token_ids=(eos,))
    h.arrive("bound", prompt, max_tokens=9, grammar="g", ignore_eos=True)
    h.drain()
    assert (h.got["bound"], h.ends["bound"].stop_reason) == (answer(prompt, 9, (eos,)), eos)


requests = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt length
        st.integers(1, 14),  # max_tokens
        st.integers(0, 3),  # prefix family
        st.integers(0, 5),  # steps finished before it arrives
        st.sampled_from([None, None, None, 1, 4, 9]),  # abort after so many events
        st.integers(-1, 1),  # priority
        st.booleans(),  # a grammar
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(POLICIES),
    depth=st.integers(1, 2),
    layer_group=st.sampled_from([None, 1, 4]),
    pages=st.integers(20, 60),
    prefix_cache=st.booleans(),
    load=requests,
    choices=st.lists(st.integers(0, 7), min_size=1, max_size=60),
    max_preemptions=st.integers(0, 3),
)
def test_any_sequence_of_events(
    name, depth, layer_group, pages, prefix_cache, load, choices, max_preemptions
):
    h = harness(
        name,
        depth=depth,
        layer_group=layer_group,
        pages=pages,
        prefix_cache=prefix_cache,
        max_running=5,
        max_preemptions=max_preemptions,
        max_bypass_s=20.0,
    )
    choice = itertools.cycle(choices)
    aborts: list[tuple[int, str]] = []
    events = 0
    for number, (length, max_tokens, family, pause, abort, priority, bound) in enumerate(load):
        prompt = [family] * (length // 2) + [
            (number * 7 + i) % 50 for i in range(length - length // 2)
        ]
        grammar = "g" * bound
        h.arrive(
            f"r{number}",
            prompt,
            max_tokens=max_tokens,
            priority=priority,
            slo=Slo(ttft_s=1.0),
            grammar=grammar,
        )
        if abort is not None:
            aborts.append((events + abort, f"r{number}"))
        for _ in range(pause):
            h.step(next(choice), error="fault" if next(choice) == 7 and next(choice) == 7 else "")
            events += 1
        for when, id in aborts:
            if when <= events:
                h.event(Abort(id))
        aborts = [(when, id) for when, id in aborts if when > events]
    while h.device.busy():
        h.step(next(choice))
    h.drain()
    h.check_answers()
    assert all(r.preemptions <= max_preemptions for r in h.records.values())
    opened = sum(isinstance(c, InitSlot) for commands in h.commands for c in commands)
    assert opened >= sum(r.admitted_s is not None for r in h.records.values())
    assert all(
        isinstance(c.work.layers, int)
        for commands in h.commands
        for c in commands
        if isinstance(c, Step)
    )
