"""Loads are current, and nothing stays counted after a request ends."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from counterpoint.disagg.load_tracker import LoadTracker, TrackedWorker, WorkerShape
from counterpoint.disagg.pool_frontend import Route
from counterpoint.disagg.role_rebalancer import (
    CancelDrain,
    CommitRole,
    RebalanceConfig,
    RebalanceTargets,
    RoleRebalancer,
    StartDrain,
)
from counterpoint.disagg.router import Router, RoutingRule
from counterpoint.disagg.routing_feedback import LinkBandwidth
from counterpoint.types import AddRequest, BatchShape, Role, Sampling, Slo

SHAPE = WorkerShape(units=1, layers=4, page_tokens=4, pages_total=1000, chunk_tokens=64)


class Prices:
    """A millisecond for each prompt token and each answer in a batch."""

    def seconds(
        self, work: BatchShape, units: int, co_running: tuple[BatchShape, int] | None = None
    ) -> float:
        return 0.001 * (work.prefill_tokens + work.decode_batch)


def routing(**roles: Role) -> LoadTracker:
    made = LoadTracker(Router(Prices(), LinkBandwidth(1e9, 1000), RoutingRule(local_tokens=0)))
    for name, role in roles.items():
        made.add_worker(name, role, SHAPE)
    return made


def two_and_two() -> LoadTracker:
    return routing(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE, e=Role.DECODE)


def arrive(id: str, tokens: int = 100, seed: int | None = None) -> AddRequest:
    chance = random.Random(id if seed is None else seed)
    prompt = tuple(chance.randrange(1000) for _ in range(tokens))
    return AddRequest(id=id, prompt=prompt, sampling=Sampling(max_tokens=10))


def load_of(seat: TrackedWorker) -> tuple[int, ...]:
    return (
        seat.prefill_tokens,
        seat.prefill_squares,
        seat.prefill_reused,
        seat.num_prefills,
        seat.num_decodes,
        seat.context_tokens,
        seat.num_pages,
    )


def test_a_burst_is_spread_though_no_worker_has_said_a_word():
    book = two_and_two()
    routes = [book.choose_route(arrive(f"r{n}"), "", "") for n in range(12)]
    assert Counter(route.prefill for route in routes if route) == {"p": 6, "q": 6}
    assert Counter(route.decode for route in routes if route) == {"d": 6, "e": 6}


@pytest.mark.parametrize(
    "roles", [{"a": Role.BOTH}, {"p": Role.PREFILL, "d": Role.DECODE}], ids=str
)
def test_what_fills_a_pool_waits_for_it_and_what_is_larger_goes_nowhere(roles):
    book, whole = routing(**roles), SHAPE.pages_total * SHAPE.page_tokens
    assert book.choose_route(arrive("small"), "", "") is not None
    assert book.choose_route(arrive("large", whole), "", "") is not None
    assert book.choose_route(arrive("larger", whole + 1), "", "") is None


def test_whatever_becomes_of_requests_nothing_stays_booked():
    chance, book = random.Random(3), two_and_two()
    living: list[str] = []
    for n in range(3000):
        move = chance.randrange(8)
        id = chance.choice(living) if living else ""
        if move <= 1:
            living.append(f"r{n}")
            assert (
                book.choose_route(arrive(living[-1], chance.randrange(1, 200)), "", "") is not None
            )
        elif move == 2:
            book.on_tokens(id, tuple(range(chance.randrange(1, 4))))
        elif move == 3:
            book.on_adopted(id)
        elif move == 4:
            book.on_decode_in_place(id)
        elif move == 5 and living:
            booking = book.requests[id]
            book.choose_route(
                booking.request, booking.route.decode, chance.choice(["", booking.route.prefill])
            )
        elif move == 6 and n % 10 == 0:
            name = chance.choice("pqde")
            book.remove_worker(name)
            book.add_worker(name, Role.PREFILL if name in "pq" else Role.DECODE, SHAPE)
        elif move == 7 and living:
            living.remove(id)
            book.on_finished(id)
        assert all(min(load_of(seat)) >= 0 for seat in book.workers.values()), f"after move {move}"
    for id in living:
        book.on_finished(id)
    assert not book.requests and all(not any(load_of(seat)) for seat in book.workers.values())


def test_where_all_is_full_a_request_waits_at_the_least_loaded():
    book = two_and_two()
    for n in range(100):
        assert book.choose_route(arrive(f"r{n}", 200), "", "") is not None
    assert all(seat.make_view("x").pages_free == 0 for seat in book.workers.values())
    decodes = [seat.num_decodes for seat in book.workers.values() if seat.role is Role.DECODE]
    assert max(decodes) - min(decodes) <= 2


def test_replicas_are_chosen_by_what_they_have_in_their_cache():
    book = routing(a=Role.BOTH, b=Role.BOTH)
    first = book.choose_route(arrive("r1", 400, seed=1), "", "")
    assert first is not None and first.prefill == first.decode
    book.on_tokens("r1", (1,))
    again = book.choose_route(arrive("r2", 400, seed=1), "", "")
    assert again is not None and again.decode == first.decode
    book.on_finished("r1")
    book.on_finished("r2")
    book.remove_worker(first.decode)
    book.add_worker(first.decode, Role.BOTH, SHAPE)
    assert not book.prefixes.match(
        book._page_hashes(
            arrive("r3", 400, seed=1), [seat.make_view(n) for n, seat in book.workers.items()]
        )
    )


def test_an_answer_can_be_gone_on_with_where_it_was_decoded():
    """The next turn of a conversation: prompt and answer are in the decode worker's cache."""
    book = two_and_two()
    turn = arrive("r1", 100)
    route = book.choose_route(turn, "", "")
    assert route is not None
    book.on_adopted("r1")
    answer = tuple(range(61))
    book.on_tokens("r1", answer)
    book.on_finished("r1")
    following = AddRequest(id="r2", prompt=(*turn.prompt, *answer, 5, 6), sampling=turn.sampling)
    names = book._page_hashes(following, [book.workers["d"].make_view("d")])
    assert book.prefixes.match(names)[route.decode] == 160 // 4


def test_a_tied_request_forks_where_its_prompt_is_if_there_is_room():
    book = two_and_two()
    book.pin_to_worker("r1", "e")
    route = book.choose_route(arrive("r1"), "", "")
    assert (
        route is not None
        and (route.prefill, route.decode) == ("e", "e")
        and book.route_counts == {"fork": 1}
    )
    book.pin_to_worker("r2", "e")
    book.workers["e"].quarantined_pages = 990
    route = book.choose_route(arrive("r2"), "", "")
    assert route is not None and route.decode == "d"


def test_how_long_answers_are_is_learnt_and_weighs_prefills_beside_them():
    """A prefill of 100 ms for each answer of 2 tokens is more than 60 ms a token; for one of 100
    tokens it is little."""

    def where(answer_tokens: int) -> str:
        book = LoadTracker(
            Router(Prices(), LinkBandwidth(1e9, 1000), RoutingRule(local_tokens=512))
        )
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            book.add_worker(name, role, msgspec.structs.replace(SHAPE, chunk_tokens=512))
        for n in range(10):
            assert book.choose_route(arrive(f"r{n}"), "", "") == Route("d", "d")
            book.on_tokens(f"r{n}", tuple(range(answer_tokens)))
            book.on_finished(f"r{n}")
        route = book.choose_route(
            msgspec.structs.replace(arrive("last"), slo=Slo(tpot_s=0.04)), "", ""
        )
        assert route is not None
        return route.prefill

    assert where(2) == "p" and where(100) == "d"


def test_the_only_worker_is_not_avoided():
    book = routing(a=Role.BOTH)
    route = book.choose_route(arrive("r1"), "a", "")
    assert route is not None and route.decode == "a"


def test_a_worker_changes_its_role_when_all_who_have_it_are_late():
    book = routing(p=Role.PREFILL, d=Role.DECODE, e=Role.DECODE)
    for name, seat in book.workers.items():
        book.add_worker(name, seat.role, msgspec.structs.replace(SHAPE, pages_total=10_000))
    elastic = RoleRebalancer(
        RebalanceTargets(ttft_s=1.0, tpot_s=1.0), RebalanceConfig(persist_ticks=3)
    )
    for n in range(30):
        book.choose_route(arrive(f"r{n}", 100), "", "")
    changes = [change for now in range(4) for change in elastic.tick(now, book.worker_loads())]
    assert len(changes) == 1 and isinstance(changes[0], StartDrain)
    chosen = changes[0].worker
    book.apply_change(changes[0])
    route = book.choose_route(arrive("late"), "", "")
    assert route is not None and route.decode in {"d", "e"} - {chosen}, (
        "a worker that drains is given more"
    )
    assert not elastic.tick(5, book.worker_loads()), "it is not empty yet"
    for id, booking in tuple(book.requests.items()):
        if chosen in booking.route:
            book.on_finished(id)
    (commit,) = elastic.tick(6, book.worker_loads())
    assert commit == CommitRole(chosen, Role.PREFILL, 1)
    book.apply_change(commit)
    route = book.choose_route(arrive("later"), "", "")
    assert route is not None and route.prefill == chosen
    book.apply_change(CancelDrain(chosen))
    assert book.workers[chosen].role is Role.PREFILL and not book.workers[chosen].draining


def test_whoever_is_booked_takes_a_slot_till_the_end():
    book = routing(p=Role.PREFILL)
    book.add_worker("d", Role.DECODE, msgspec.structs.replace(SHAPE, slots=2))
    ways = [book.choose_route(arrive(f"r{i}"), "", "") for i in range(3)]
    assert [(way.prefill, way.decode) for way in ways] == [("p", "d"), ("p", "d"), ("p", "p")]
    book.on_finished("r0")
    assert book.choose_route(arrive("r3"), "", "").decode == "d"


def test_when_all_may_run_no_more_the_one_is_chosen_for_which_fewest_wait():
    book = LoadTracker(Router(Prices(), LinkBandwidth(1e9, 1000), RoutingRule()))
    book.add_worker("p", Role.PREFILL, msgspec.structs.replace(SHAPE, slots=3))
    book.add_worker("d", Role.DECODE, msgspec.structs.replace(SHAPE, slots=2))
    ways = Counter(book.choose_route(arrive(f"r{i}"), "", "").decode for i in range(15))
    assert ways == {"p": 8, "d": 7}
