"""The engine under every policy: exact tokens, conserved pages, no starvation."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from engine_harness import POLICIES, answer, make_harness
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.types import (
    Abort,
    FinishReason,
    InitSlot,
    Slo,
    Step,
)


@pytest.mark.parametrize("name", POLICIES)
def test_one_request_gets_its_tokens(name):
    h = make_harness(name)
    h.arrive("a", range(10), max_tokens=5)
    h.drain()
    assert h.got["a"] == answer(tuple(range(10)), 5)
    assert h.ends["a"].finish_reason is FinishReason.LENGTH
    assert h.records["a"].prompt_tokens == 10


@pytest.mark.parametrize("name", POLICIES)
def test_stop_token_ends_and_is_named(name):
    prompt = tuple(range(7))
    stop = answer(prompt, 6)[2]
    h = make_harness(name)
    h.arrive("a", prompt, max_tokens=6, stop_token_ids=(stop,))
    h.drain()
    assert h.got["a"] == answer(prompt, 6, (stop,))
    assert (h.ends["a"].finish_reason, h.ends["a"].stop_reason) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("name", POLICIES)
def test_an_engine_without_deltas_does_the_same(name):
    told, untold = make_harness(name), make_harness(name)
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
        h = make_harness("chunked", eos_token_ids=(eos,))
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
def test_impossible_requests_are_rejected_at_once(prompt, max_tokens, word):
    h = make_harness("chunked", pages=30)
    h.arrive("bad", prompt, max_tokens=max_tokens)
    assert h.ends["bad"].finish_reason is FinishReason.ERROR and word in h.ends["bad"].error
    assert "bad" in h.records and h.engine.idle


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("lengths", [(150,), (48, 49), (10, 150, 10), (97, 5, 60)])
def test_no_pass_has_more_prompt_tokens_than_allowed(name, lengths):
    h = make_harness(name)
    for number, length in enumerate(lengths):
        h.arrive(f"r{number}", range(1000 * number, 1000 * number + length), max_tokens=3)
    h.drain()
    h.check_answers()
    steps = [
        command for commands in h.commands for command in commands if isinstance(command, Step)
    ]
    assert max(step.work.prefill_tokens for step in steps) <= 48


@pytest.mark.parametrize("name", POLICIES)
def test_abort_at_every_moment(name):
    for moment in range(25):
        h = make_harness(name, layer_group=2, pages=24)
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
    h = make_harness(name, layer_group=2)
    h.arrive("a", range(20), max_tokens=6)
    h.step(error="boom")
    h.arrive("b", range(20), max_tokens=6)
    h.drain()
    assert h.ends["a"].finish_reason is FinishReason.ERROR and h.ends["a"].error == "boom"
    assert h.got["b"] == answer(tuple(range(20)), 6)


def test_a_row_without_finite_logits_fails_alone(monkeypatch):
    h = make_harness("chunked")
    h.arrive("a", range(5))
    h.arrive("b", range(50, 55))
    h.step()
    busy = h.device.busy()[0]
    done = h.device.finish(busy, h.now)
    h.event(msgspec.structs.replace(done, tokens=(-1, *done.tokens[1:])))
    h.drain()
    ends = sorted((h.ends["a"].finish_reason, h.ends["b"].finish_reason))
    assert ends == [FinishReason.ERROR, FinishReason.LENGTH]


def test_repeated_ids_do_no_harm():
    h = make_harness("chunked")
    h.arrive("a", range(5))
    first = h.sent["a"]
    h.arrive("a", range(60, 90))
    h.sent["a"] = first
    h.drain()
    h.check_answers()


def test_one_step_ahead_changes_no_token():
    for name in POLICIES:
        h = make_harness(name, depth=2)
        prompt = tuple(range(11))
        stop = answer(prompt, 9)[4]
        h.arrive("a", prompt, max_tokens=9, stop_token_ids=(stop,))
        h.arrive("b", range(40, 47), max_tokens=9)
        h.drain()
        h.check_answers()


@pytest.mark.parametrize("name", POLICIES)
def test_a_grammar_is_synchronous_and_its_end_ends_the_output(name):
    h = make_harness(name, depth=2)
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
    h = make_harness(name, depth=2, eos_token_ids=(eos,))
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
    h = make_harness(
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
