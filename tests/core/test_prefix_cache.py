"""Prefix reuse: what is shared, and who waits for whom."""

from __future__ import annotations

import pytest
from engine_harness import POLICIES, make_harness

from counterpoint.types import (
    Abort,
    FinishReason,
)


@pytest.mark.parametrize("name", POLICIES)
def test_prefix_pages_are_shared(name):
    h = make_harness(name)
    prompt = tuple(range(30))
    h.arrive("a", prompt)
    h.drain()
    h.arrive("b", (*prompt, 40, 41))
    h.drain()
    assert h.records["b"].cached_tokens == 28
    h.check_answers()


def test_a_fully_cached_prompt_still_computes_a_token():
    h = make_harness("chunked")
    for id in "ab":
        h.arrive(id, range(16))
        h.drain()
    assert h.records["b"].cached_tokens == 12
    h.check_answers()


def test_generated_pages_are_reused_by_the_next_turn():
    h = make_harness("chunked")
    h.arrive("a", range(10), max_tokens=11)
    h.drain()
    h.arrive("b", (*range(10), *h.got["a"], 7, 7))
    h.drain()
    assert h.records["b"].cached_tokens == 20


def test_matched_tokens_of_waiting_requests_are_kept_up_to_date():
    """They are cached or being computed by another request, and fewer again after an eviction.
    Long prompts are hashed one per call."""
    h = make_harness("chunked", max_running=1, max_context_tokens=40_000, pages=20_000)
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
    h = make_harness("chunked")
    h.arrive("a", range(20), salt="x")
    h.drain()
    h.arrive("b", range(20), salt="y")
    h.drain()
    assert h.records["b"].cached_tokens == 0


def test_a_second_request_waits_for_the_prefix_that_a_first_one_computes():
    h = make_harness("multiplex", layer_group=1)
    h.arrive("a", range(40))
    h.arrive("b", (*range(36), 45, 46))
    h.drain()
    assert h.records["b"].cached_tokens == 36
    h.check_answers()


def test_aborting_the_first_frees_the_second_that_waits_for_its_prefix():
    h = make_harness("multiplex", layer_group=1)
    h.arrive("a", range(40))
    h.arrive("b", (*range(36), 45, 46))
    h.event(Abort("a"))
    h.drain()
    assert h.ends["b"].finish_reason is FinishReason.LENGTH
    h.check_answers()
