"""Disaggregated requests: a prompt that another engine decodes, an output that another began."""

from __future__ import annotations

import itertools

import pytest
from engine_harness import POLICIES, Harness, answer, make_harness
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.core.request import Phase
from counterpoint.types import (
    Abort,
    Admitted,
    Computed,
    DisaggRole,
    FinishReason,
    InitSlot,
    Release,
    ResumeDecode,
)

PROMPT = tuple(range(18))  # four pages of 4 tokens and a half


def fill_in(h: Harness, id: str) -> None:
    """As KV transfer does: write the KV of all tokens so far into the pages."""
    admitted = next(p for p in h.progress if isinstance(p, Admitted) and p.id == id)
    arrive = h.sent[id]
    for position, token in enumerate((*arrive.prompt, *arrive.generated_prefix)):
        page, offset = admitted.pages[position // 4], position % 4
        if position // 4 >= admitted.cached_pages:
            h.device.content[page, offset] = token
        assert h.device.content[page, offset] == token


def run_all(h: Harness) -> None:
    while h.step():
        pass


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_keeps_its_pages_until_they_are_released(name):
    h = make_harness(name)
    h.arrive("a", PROMPT, disagg_role=DisaggRole.PREFILL, max_tokens=5)
    run_all(h)
    assert h.got["a"] == answer(PROMPT, 1) and "a" not in h.ends
    assert h.engine.page_pool.available == 64 - 5 and h.engine.requests["a"].phase is Phase.HELD
    h.event(Release("a"))
    h.drain()
    assert "a" not in h.ends and not h.records
    h.arrive("b", PROMPT)
    h.drain()
    assert h.records["b"].cached_tokens == 16, "its pages stay in the prefix cache"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("layer_group", [None, 2])
def test_progress_grows_to_the_whole_prompt(name, layer_group):
    h = make_harness(name, layer_group=layer_group)
    h.arrive("a", PROMPT, disagg_role=DisaggRole.PREFILL)
    run_all(h)
    admitted, *computed = h.progress
    assert (
        isinstance(admitted, Admitted) and len(admitted.pages) == 5 and admitted.cached_pages == 0
    )
    assert all(isinstance(c, Computed) for c in computed)
    states = [(c.tokens, c.partial_layers, c.partial_tokens) for c in computed]
    assert states == sorted(states) and states[-1] == (18, 0, 18)
    assert all(c.tokens <= c.partial_tokens <= 18 and 0 <= c.partial_layers < 6 for c in computed)
    if name == "multiplex" and layer_group:
        assert [c.partial_layers for c in computed] == [2, 4, 0]
    h.event(Release("a"))
    h.drain()


def test_cached_pages_are_reported_on_admission():
    h = make_harness("chunked")
    h.arrive("a", PROMPT)
    h.drain()
    h.arrive("b", PROMPT, disagg_role=DisaggRole.PREFILL)
    h.arrive("c", PROMPT, disagg_role=DisaggRole.DECODE)
    admitted = [p for p in h.progress if isinstance(p, Admitted)]
    assert [(p.id, p.cached_pages) for p in admitted] == [("b", 4), ("c", 4)]
    h.arrive("d", PROMPT[:16], disagg_role=DisaggRole.DECODE)
    assert h.progress[-1].id == "d" and h.progress[-1].cached_pages == 4, (
        "nothing need be computed here"
    )
    run_all(h)
    for id in "bcd":
        h.event(Release(id))
    h.drain()


@pytest.mark.parametrize("name", POLICIES)
def test_decode_resumes_after_a_transferred_token(name):
    h = make_harness(name)
    want = answer(PROMPT, 6)
    h.arrive("a", PROMPT, disagg_role=DisaggRole.DECODE, max_tokens=6)
    assert not h.device.busy() and not h.device.rows, "the executor has nothing to do with it yet"
    fill_in(h, "a")
    h.event(ResumeDecode("a", want[0]))
    h.drain()
    assert h.got["a"] == want[1:] and h.ends["a"].finish_reason is FinishReason.LENGTH
    assert len(h.records["a"].token_s) == 6
    opened = next(c for commands in h.commands for c in commands if isinstance(c, InitSlot))
    assert (
        opened.tokens == (*PROMPT, want[0])
        and opened.prompt_tokens == 18
        and len(opened.pages) == 5
    )
    h.arrive("b", PROMPT)
    h.drain()
    assert h.records["b"].cached_tokens == 16, "transferred pages are shared like any others"


def test_a_stop_token_ends_a_resumed_decode():
    want = answer(PROMPT, 6)
    h = make_harness("chunked")
    h.arrive("a", PROMPT, disagg_role=DisaggRole.DECODE, max_tokens=6, stop_token_ids=(want[2],))
    fill_in(h, "a")
    h.event(ResumeDecode("a", want[0]))
    h.drain()
    assert h.got["a"] == want[1 : want.index(want[2]) + 1]


@pytest.mark.parametrize("name", POLICIES)
def test_a_prefilled_request_may_decode_where_it_is(name):
    h = make_harness(name)
    h.arrive("a", PROMPT, disagg_role=DisaggRole.PREFILL, max_tokens=6)
    run_all(h)
    h.event(ResumeDecode("a", h.got["a"][0]))
    h.drain()
    assert h.got["a"] == answer(PROMPT, 6)


@pytest.mark.parametrize("stop", [True, False])
def test_an_answer_of_one_token_ends_but_keeps_its_pages(stop):
    h = make_harness("chunked")
    first = answer(PROMPT, 1)[0]
    h.arrive(
        "a",
        PROMPT,
        disagg_role=DisaggRole.PREFILL,
        max_tokens=9 if stop else 1,
        stop_token_ids=(first,) if stop else (),
    )
    run_all(h)
    assert h.ends["a"].finish_reason is (FinishReason.STOP if stop else FinishReason.LENGTH)
    assert h.engine.page_pool.available < 64
    h.event(ResumeDecode("a", first))  # too late: no harm
    h.event(Release("a"))
    h.drain()


def test_outputs_continue_after_a_generated_prefix():
    want = answer(PROMPT, 8)
    h = make_harness("chunked")
    h.arrive("a", PROMPT, generated_prefix=tuple(want[:3]), max_tokens=8)
    h.drain()
    assert h.got["a"] == want[3:] and len(h.records["a"].token_s) == 5
    h.arrive(
        "b", PROMPT, generated_prefix=tuple(want[:3]), max_tokens=8, disagg_role=DisaggRole.PREFILL
    )
    h.arrive(
        "c",
        PROMPT,
        generated_prefix=tuple(want[:3]),
        max_tokens=8,
        disagg_role=DisaggRole.DECODE,
        salt="other",
    )
    run_all(h)
    assert h.got["b"] == want[3:4]
    fill_in(h, "c")
    h.event(ResumeDecode("c", want[3]))
    h.event(Release("b"))
    h.drain()
    assert h.got["c"] == want[4:]
    h.arrive("d", PROMPT, generated_prefix=tuple(want), max_tokens=8)
    assert (
        h.ends["d"].finish_reason is FinishReason.ERROR
        and "8 tokens of the answer are there already" in h.ends["d"].error
    )


@pytest.mark.parametrize("role", [DisaggRole.PREFILL, DisaggRole.DECODE])
def test_an_abort_keeps_pinned_pages_and_finishes_once(role):
    for moment in range(6):
        h = make_harness("multiplex", layer_group=2)
        h.arrive("a", PROMPT, disagg_role=role)
        for _ in range(moment):
            h.step()
        h.event(Abort("a"))
        h.event(Abort("a"))
        run_all(h)
        assert (
            h.ends["a"].finish_reason is FinishReason.ABORT
            and h.engine.page_pool.available == 64 - 5
        )
        h.event(ResumeDecode("a", 1))
        h.event(Release("a"))
        h.event(Release("a"))
        h.drain()


@pytest.mark.parametrize("role", [DisaggRole.PREFILL, DisaggRole.DECODE])
def test_a_release_at_any_moment_is_silent(role):
    for moment in range(6):
        h = make_harness("multiplex", layer_group=2)
        h.arrive("busy", range(40, 100), max_tokens=3)
        h.arrive("a", PROMPT, disagg_role=role)
        for _ in range(moment):
            h.step(moment)
        h.event(Release("a"))
        h.drain()
        assert (
            "a" not in h.ends
            and "a" not in h.records
            and h.ends["busy"].finish_reason is FinishReason.LENGTH
        )


def test_a_waiting_request_can_be_released():
    h = make_harness("chunked", pages=12)
    h.arrive("a", range(40), disagg_role=DisaggRole.DECODE, max_tokens=2)
    h.arrive("b", PROMPT, disagg_role=DisaggRole.DECODE)
    assert [p.id for p in h.progress] == ["a"]
    h.event(Release("b"))
    h.event(Release("a"))
    h.drain()


def test_pinned_pages_are_not_preempted():
    """A request that outgrows the pool waits until pinned pages are released."""
    h = make_harness("chunked", pages=16)
    h.arrive("a", [1] * 8, max_tokens=50)
    h.step()
    h.arrive("b", range(30, 60), disagg_role=DisaggRole.DECODE, priority=-1)
    while h.step():
        pass
    assert "a" not in h.ends and h.engine.requests["b"].pages, "the pool is full"
    h.event(Release("b"))
    h.drain()
    assert h.got["a"] == answer((1,) * 8, 50)


def test_prompt_work_is_counted_where_it_is_done():
    h = make_harness("chunked")
    h.arrive("a", PROMPT, disagg_role=DisaggRole.DECODE)
    assert h.engine.stats().prompt_tokens == 0
    h.arrive("b", PROMPT, disagg_role=DisaggRole.PREFILL)
    assert h.engine.stats().prompt_tokens == 18
    run_all(h)
    h.event(Release("a"))
    h.event(Release("b"))
    h.drain()


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(POLICIES),
    pages=st.integers(20, 50),
    load=st.lists(
        st.tuples(
            st.integers(1, 50),
            st.integers(2, 8),
            st.integers(0, 3),
            st.sampled_from(list(DisaggRole)),
            st.integers(0, 4),
            st.sampled_from(["resume", "resume", "resume", "release", "abort"]),
        ),
        min_size=1,
        max_size=12,
    ),
    choices=st.lists(st.integers(0, 7), min_size=1, max_size=40),
)
def test_any_mixture_of_roles(name, pages, load, choices):
    """Every request ends with the right tokens, whatever is resumed, released or aborted."""
    h = make_harness(name, pages=pages, max_running=6, layer_group=2)
    choice = itertools.cycle(choices)
    fates: dict[str, str] = {}
    for number, (length, max_tokens, family, role, pause, fate) in enumerate(load):
        prompt = [family] * (length // 2) + [
            (number * 7 + i) % 50 for i in range(length - length // 2)
        ]
        h.arrive(f"r{number}", prompt, max_tokens=max_tokens, disagg_role=role)
        if role is not DisaggRole.WHOLE:
            fates[f"r{number}"] = fate
        for _ in range(pause):
            h.step(next(choice))
            decide_one(h, fates, next(choice))
    for _ in range(2000):
        if not h.step(next(choice)) and not fates:
            break
        decide_one(h, fates, 0)
    h.drain()
    for id, got in h.got.items():
        arrive = h.sent[id]
        want = answer(arrive.prompt, arrive.sampling.max_tokens)
        start = 1 if arrive.disagg_role is DisaggRole.DECODE else 0
        assert got == want[start : start + len(got)]
        if arrive.disagg_role is DisaggRole.WHOLE:
            assert len(got) == arrive.sampling.max_tokens


def decide_one(h: Harness, fates: dict[str, str], wait: int) -> None:
    """Resume, release or abort one held request, now or later."""
    for id, fate in tuple(fates.items()):
        request = h.engine.requests.get(id)
        if request is None or request.phase is Phase.DONE:
            h.event(Release(id))
        elif request.phase is Phase.HELD and not wait:
            if fate == "resume":
                if request.input.disagg_role is DisaggRole.DECODE:
                    fill_in(h, id)
                h.event(ResumeDecode(id, answer(request.input.prompt, 1)[0]))
            else:
                if fate == "abort":
                    h.event(Abort(id))
                h.event(Release(id))
        else:
            continue
        del fates[id]
        return
