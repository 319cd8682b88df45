"""Parts of a request: what an engine does with a prompt that another will answer, and with an answer that another has begun."""

from __future__ import annotations

import itertools

import pytest
from engine_harness import Harness, answer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import POLICIES, harness

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
    """What a mover does: the KV of all tokens so far lies in the pages."""
    admitted = next(p for p in h.progress if isinstance(p, Admitted) and p.id == id)
    arrive = h.sent[id]
    for position, token in enumerate((*arrive.prompt, *arrive.generated_prefix)):
        page, offset = admitted.pages[position // 4], position % 4
        if position // 4 >= admitted.cached_pages:
            h.device.content[page, offset] = token
        assert h.device.content[page, offset] == token


def work(h: Harness) -> None:
    while h.step():
        pass


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_keeps_its_pages_until_they_are_released(name):
    h = harness(name)
    h.arrive("a", PROMPT, disagg_role=DisaggRole.PREFILL, max_tokens=5)
    work(h)
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
    h = harness(name, layer_group=layer_group)
    h.arrive("a", PROMPT, disagg_role=DisaggRole.PREFILL)
    work(h)
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


def test_pages_that_are_cached_are_said_to_be():
    h = harness("chunked")
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
    work(h)
    for id in "bcd":
        h.event(Release(id))
    h.drain()


@pytest.mark.parametrize("name", POLICIES)
def test_an_answer_goes_on_behind_an_adopted_token(name):
    h = harness(name)
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
    assert h.records["b"].cached_tokens == 16, "adopted pages are shared like any others"


def test_a_stop_token_behind_an_adopted_token():
    want = answer(PROMPT, 6)
    h = harness("chunked")
    h.arrive("a", PROMPT, disagg_role=DisaggRole.DECODE, max_tokens=6, stop_token_ids=(want[2],))
    fill_in(h, "a")
    h.event(ResumeDecode("a", want[0]))
    h.drain()
    assert h.got["a"] == want[1 : want.index(want[2]) + 1]


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_may_stay(name):
    h = harness(name)
    h.arrive("a", PROMPT, disagg_role=DisaggRole.PREFILL, max_tokens=6)
    work(h)
    h.event(ResumeDecode("a", h.got["a"][0]))
    h.drain()
    assert h.got["a"] == answer(PROMPT, 6)


@pytest.mark.parametrize("stop", [True, False])
def test_an_answer_of_one_token_ends_but_keeps_its_pages(stop):
    h = harness("chunked")
    first = answer(PROMPT, 1)[0]
    h.arrive(
        "a",
        PROMPT,
        disagg_role=DisaggRole.PREFILL,
        max_tokens=9 if stop else 1,
        stop_token_ids=(first,) if stop else (),
    )
    work(h)
    assert h.ends["a"].finish_reason is (FinishReason.STOP if stop else FinishReason.LENGTH)
    assert h.engine.page_pool.available < 64
    h.event(ResumeDecode("a", first))  # too late: no harm
    h.event(Release("a"))
    h.drain()


def test_answers_go_on_behind_tokens_that_the_client_has():
    want = answer(PROMPT, 8)
    h = harness("chunked")
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
    work(h)
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


@pytest.mark.parametrize("part", [DisaggRole.PREFILL, DisaggRole.DECODE])
def test_an_abort_keeps_the_pages_and_tells_the_client_once(part):
    for moment in range(6):
        h = harness("multiplex", layer_group=2)
        h.arrive("a", PROMPT, disagg_role=part)
        for _ in range(moment):
            h.step()
        h.event(Abort("a"))
        h.event(Abort("a"))
        work(h)
        assert (
            h.ends["a"].finish_reason is FinishReason.ABORT
            and h.engine.page_pool.available == 64 - 5
        )
        h.event(ResumeDecode("a", 1))
        h.event(Release("a"))
        h.event(Release("a"))
        h.drain()


@pytest.mark.parametrize("part", [DisaggRole.PREFILL, DisaggRole.DECODE])
def test_a_release_at_any_moment_is_silent(part):
    for moment in range(6):
        h = harness("multiplex", layer_group=2)
        h.arrive("busy", range(40, 100), max_tokens=3)
        h.arrive("a", PROMPT, disagg_role=part)
        for _ in range(moment):
            h.step(moment)
        h.event(Release("a"))
        h.drain()
        assert (
            "a" not in h.ends
            and "a" not in h.records
            and h.ends["busy"].finish_reason is FinishReason.LENGTH
        )


def test_a_release_of_one_that_waits():
    h = harness("chunked", pages=12)
    h.arrive("a", range(40), disagg_role=DisaggRole.DECODE, max_tokens=2)
    h.arrive("b", PROMPT, disagg_role=DisaggRole.DECODE)
    assert [p.id for p in h.progress] == ["a"]
    h.event(Release("b"))
    h.event(Release("a"))
    h.drain()


def test_kept_pages_are_not_taken_from_their_request():
    """A whole request that outgrows the pool waits for those of a part, and goes on when they are released."""
    h = harness("chunked", pages=16)
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
    h = harness("chunked")
    h.arrive("a", PROMPT, disagg_role=DisaggRole.DECODE)
    assert h.engine.stats().prompt_tokens == 0
    h.arrive("b", PROMPT, disagg_role=DisaggRole.PREFILL)
    assert h.engine.stats().prompt_tokens == 18
    work(h)
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
            st.sampled_from(["adopt", "adopt", "adopt", "release", "abort"]),
        ),
        min_size=1,
        max_size=12,
    ),
    choices=st.lists(st.integers(0, 7), min_size=1, max_size=40),
)
def test_any_mixture_of_parts(name, pages, load, choices):
    """Every request comes to its end, and every token is right, whatever is adopted, released or aborted when."""
    h = harness(name, pages=pages, max_running=6, layer_group=2)
    choice = itertools.cycle(choices)
    fates: dict[str, str] = {}
    for number, (length, max_tokens, family, part, pause, fate) in enumerate(load):
        prompt = [family] * (length // 2) + [
            (number * 7 + i) % 50 for i in range(length - length // 2)
        ]
        h.arrive(f"r{number}", prompt, max_tokens=max_tokens, disagg_role=part)
        if part is not DisaggRole.WHOLE:
            fates[f"r{number}"] = fate
        for _ in range(pause):
            h.step(next(choice))
            settle(h, fates, next(choice))
    for _ in range(2000):
        if not h.step(next(choice)) and not fates:
            break
        settle(h, fates, 0)
    h.drain()
    for id, got in h.got.items():
        arrive = h.sent[id]
        want = answer(arrive.prompt, arrive.sampling.max_tokens)
        start = 1 if arrive.disagg_role is DisaggRole.DECODE else 0
        assert got == want[start : start + len(got)]
        if arrive.disagg_role is DisaggRole.WHOLE:
            assert len(got) == arrive.sampling.max_tokens


def settle(h: Harness, fates: dict[str, str], wait: int) -> None:
    """Let one held request meet its fate, sooner or later."""
    for id, fate in tuple(fates.items()):
        request = h.engine.requests.get(id)
        if request is None or request.phase is Phase.DONE:
            h.event(Release(id))
        elif request.phase is Phase.HELD and not wait:
            if fate == "adopt":
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
