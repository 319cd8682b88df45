"""What the router learns: link bandwidths and TTFT corrections."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_load_tracker import SHAPE, arrive, routing
from test_router import Linear, view

from counterpoint.disagg.handoff_events import HandoffTimes, TransferGranularity
from counterpoint.disagg.router import RouteQuery, Router, RoutingRule
from counterpoint.disagg.routing_feedback import (
    MAX_CORRECTION,
    MIN_TRANSFERS,
    LinkBandwidth,
    TtftCorrection,
)
from counterpoint.types import Role

MB = 1e6


def wires(bandwidth: float = 1e9) -> LinkBandwidth:
    return LinkBandwidth(bandwidth, kv_bytes_per_token=100_000)


def test_a_link_is_believed_after_some_transfers_and_others_count_as_it_does():
    links = wires()
    for n in range(MIN_TRANSFERS):
        assert links.bytes_per_s("p", "d") == 1e9, f"after {n} transfers"
        links.observe("p", "d", 10 * MB, 0.1)
    assert links.bytes_per_s("p", "d") == pytest.approx(100 * MB)
    assert links.bytes_per_s("p", "e") == pytest.approx(100 * MB), (
        "the best that is known of a new link"
    )
    for _ in range(MIN_TRANSFERS):
        links.observe("p", "e", 10 * MB, 0.01)
    assert links.bytes_per_s("p", "e") == pytest.approx(1e9) and links.bytes_per_s(
        "p", "d"
    ) == pytest.approx(100 * MB)


def test_one_odd_transfer_moves_it_little_and_a_lasting_change_wholly():
    links = wires()
    for _ in range(50):
        links.observe("p", "d", 10 * MB, 0.1)
    links.observe("p", "d", 10 * MB, 0.2)
    assert 0.9 * 100 * MB < links.bytes_per_s("p", "d") < 100 * MB
    for _ in range(100):
        links.observe("p", "d", 10 * MB, 0.2)
    assert links.bytes_per_s("p", "d") == pytest.approx(50 * MB, rel=0.01)


def test_nothing_sent_says_nothing_and_a_worker_that_is_gone_is_forgotten():
    links = wires()
    for _ in range(20):
        links.observe("p", "d", 0, 0.0)
    assert links.bytes_per_s("p", "d") == 1e9
    for _ in range(20):
        links.observe("p", "d", 10 * MB, 0.1)
        links.observe("q", "d", 10 * MB, 0.01)
    links.forget("p")
    assert ("p", "d") not in links.links and links.bytes_per_s("q", "d") == pytest.approx(1e9)


def test_the_grain_follows_what_links_carry():
    """A prompt of 1000 tokens has 100 MB of KV and takes a second: 2 GB/s hide all but a moment of
    it, 200 MB/s half."""
    links, pools = (
        wires(bandwidth=10e9),
        [view("p", Role.PREFILL, chunk_tokens=5000), view("d", Role.DECODE)],
    )
    router = Router(Linear(), links, RoutingRule(local_tokens=0))

    def chosen() -> tuple[TransferGranularity, float]:
        choice = router.route(RouteQuery(1000), pools)
        assert choice is not None
        return choice.route.granularity, choice.visible_transfer_s

    grain, visible_s = chosen()
    assert grain is TransferGranularity.PROMPT and visible_s == pytest.approx(
        0.01 + links.control_s
    )
    for _ in range(MIN_TRANSFERS):
        links.observe("p", "d", 100 * MB, 0.5)
    grain, visible_s = chosen()
    assert grain is TransferGranularity.LAYER and visible_s == pytest.approx(
        0.125 + links.control_s
    ), "the last of four layers"


def test_predictions_come_to_be_right_and_the_slow_worker_gets_less():
    """One of two prefill workers takes three times what prices say."""
    book = routing(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE)
    chance, slow, given_to = random.Random(1), {"p": 3.0, "q": 1.0}, []
    for n in range(400):
        request = arrive(f"r{n}")
        route = book.choose_route(request, "", "")
        assert route is not None
        given_to.append(route.prefill)
        priced = book.requests[request.id].uncorrected_ttft_s
        book.on_first_token(request.id, priced * slow[route.prefill] * chance.uniform(0.95, 1.05))
        book.on_tokens(request.id, (1,))
        if n % 3 == 0:  # the others stay, so that both workers get some
            book.on_finished(request.id)
    assert book.ttft_correction.factor("q") == pytest.approx(1.0, abs=0.1)
    assert (
        book.ttft_correction.relative_error(0.5) < 0.1
        and book.ttft_correction.relative_error(0.95) < 0.5
    )
    assert given_to[200:].count("p") < given_to[200:].count("q")


def test_nothing_is_kept_of_a_worker_that_is_gone():
    book = routing(p=Role.PREFILL, d=Role.DECODE)
    for n in range(MIN_TRANSFERS):
        book.choose_route(arrive(f"r{n}"), "", "")
        book.on_first_token(f"r{n}", 1.0)
        book.on_transfer("p", "d", HandoffTimes(0, 0, 0, 0, 0, page_layers=4, sending_s=0.001))
        book.on_finished(f"r{n}")
    assert book.ttft_correction.factors().keys() == {"p"} and book.router.link_bandwidth.links
    book.choose_route(arrive("late"), "", "")
    book.remove_worker("p")
    book.on_first_token("late", 1.0)
    assert not book.ttft_correction.factors() and not book.router.link_bandwidth.links
    assert book.router.link_bandwidth.bytes_per_s("p", "d") != 1e9, (
        "what all links carry is still known"
    )


def test_what_was_never_predicted_is_not_learnt_from():
    book = routing(p=Role.PREFILL, d=Role.DECODE)
    book.choose_route(arrive("a"), "", "")
    book.pin_to_worker("b", "d")
    book.choose_route(arrive("b"), "", "")
    assert book.route_counts["fork"] == 1
    book.on_first_token("b", 1.0)
    book.on_first_token("nobody", 1.0)
    assert book.ttft_correction.num_observed == 0
    book.on_first_token("a", 1.0)
    assert book.ttft_correction.num_observed == 1


def test_a_transfers_bytes_are_those_of_its_pages():
    book = routing(p=Role.PREFILL, d=Role.DECODE)
    pages = 5 * SHAPE.layers  # page layers of five pages
    for _ in range(MIN_TRANSFERS):
        book.on_transfer("p", "d", HandoffTimes(0, 0, 0, 0, 0, page_layers=pages, sending_s=0.001))
        book.on_transfer(
            "gone", "d", HandoffTimes(0, 0, 0, 0, 0, page_layers=pages, sending_s=0.001)
        )
    assert book.router.link_bandwidth.bytes_per_s("p", "d") == pytest.approx(
        5 * SHAPE.page_tokens * 1000 / 0.001
    )
    assert list(book.router.link_bandwidth.links) == [("p", "d")]


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), max_size=300))
def test_a_factor_is_bounded_and_moves_in_small_steps(seen):
    forecast, before = TtftCorrection(), 1.0
    for priced_s, actual_s in seen:
        forecast.observe("p", priced_s, priced_s * forecast.factor("p"), actual_s)
        assert 1 / MAX_CORRECTION <= forecast.factor("p") <= MAX_CORRECTION
        assert before / 1.2 < forecast.factor("p") < before * 1.2
        before = forecast.factor("p")
    assert forecast.relative_error(0.5) <= forecast.relative_error(0.95)
