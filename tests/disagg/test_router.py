"""Where requests go: cheapest first, targets met, and what happens when pools are full."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.cost_model.roofline import Roofline
from counterpoint.disagg.handoff_events import TransferGranularity
from counterpoint.disagg.peer_connection import NoTransport, TransportEndpoint, choose_transport
from counterpoint.disagg.pool_frontend import Route
from counterpoint.disagg.router import (
    RouteQuery,
    Router,
    RoutingRule,
    WorkerView,
    choose_granularity,
    replica_rule,
    visible_transfer_s,
)
from counterpoint.disagg.routing_feedback import LinkBandwidth, PrefixIndex
from counterpoint.spec.device import device_spec
from counterpoint.spec.presets import PRESETS
from counterpoint.types import BatchShape, Role, Slo


class Linear:
    """1 ms a prefill token, 10 ms a decode step and 0.01 ms a token of context; the units do not
    matter."""

    def seconds(self, work: BatchShape, units: int, co_running=None) -> float:
        decode = 0.01 + work.decode_context * 1e-5 if work.decode_batch else 0.0
        return work.prefill_tokens * 1e-3 + decode


WIRES = LinkBandwidth(nominal_bytes_per_s=1e9, kv_bytes_per_token=100_000, control_s=0.001)


def view(name: str, role: Role, **kwargs) -> WorkerView:
    defaults = {"units": 8, "layers": 4, "page_tokens": 16, "pages_free": 1000, "pages_total": 1000}
    return WorkerView(name=name, role=role, **{**defaults, **kwargs})


def queue(tokens: int) -> BatchShape:
    return BatchShape.prefill(tokens, 0, 4)


def batch(size: int, context: int) -> BatchShape:
    return BatchShape.decode(size, context, 4)


POOLS = (
    view("p0", Role.PREFILL),
    view("p1", Role.PREFILL),
    view("d0", Role.DECODE),
    view("d1", Role.DECODE),
)


def route(
    tokens: int,
    workers=POOLS,
    slo: Slo = Slo(),
    cached=None,
    rule: RoutingRule = RoutingRule(),
    **kwargs,
):
    return Router(Linear(), WIRES, rule).route(
        RouteQuery(tokens, slo, cached or {}, **kwargs), workers
    )


def changed(name: str, **kwargs) -> tuple[WorkerView, ...]:
    return tuple(msgspec.structs.replace(w, **kwargs) if w.name == name else w for w in POOLS)


def test_a_long_prompt_is_handed_on():
    choice = route(1000)
    assert (
        choice.reason == "disagg" and choice.route.prefill == "p0" and choice.route.decode == "d0"
    )
    assert choice.ttft_s == pytest.approx(1.0)


def test_a_short_prompt_is_not():
    choice = route(200)
    assert choice.reason == "local" and choice.route.prefill == choice.route.decode == "d0"


def test_a_long_prompt_that_is_mostly_cached_is_short():
    assert route(1000, cached={"d1": 60}).route == Route("d1", "d1")
    assert route(1000, cached={"p1": 60}).route.prefill == "p1"


def test_a_short_prompt_that_would_break_a_pause_target_is_handed_on():
    slo = Slo(itl_s=0.1)
    assert route(200, slo=slo).reason == "disagg"
    assert route(50, slo=slo).reason == "local"


def test_short_prompts_are_handed_on_where_prefilling_them_all_would_slow_answers():
    """A step of 20 decodes takes 12 ms; in answers of 40 tokens, each brings half of a prefill of
    100 ms with it."""
    busy, slo = changed("d0", running=batch(20, 100))[:3], Slo(tpot_s=0.05)
    assert route(100, busy, slo).reason == "local", "nothing is known of answers"
    assert route(100, busy, slo, answer_tokens=400).reason == "local"
    assert route(100, busy, slo, answer_tokens=40).reason == "disagg"
    assert route(100, busy, Slo(tpot_s=0.07), answer_tokens=40).reason == "local"
    alike = tuple(msgspec.structs.replace(w, role=Role.BOTH) for w in busy)
    assert route(100, alike, slo, rule=replica_rule(), answer_tokens=40).reason == "local", (
        "there is nobody to hand it to"
    )


def test_the_shortest_queue_prefills_and_the_lightest_batch_decodes():
    workers = (
        view("p0", Role.PREFILL, pending=queue(3000)),
        *changed("d0", running=batch(20, 50_000))[1:],
    )
    assert route(1000, workers).route[:2] == ("p1", "d1")


def test_equal_batches_are_told_apart_by_free_pages():
    assert route(1000, changed("d0", pages_free=500)).route.decode == "d1"


def test_an_overloaded_pool_borrows():
    busy = tuple(
        msgspec.structs.replace(w, pending=queue(9000)) if w.role is Role.PREFILL else w
        for w in POOLS
    )
    choice = route(1000, busy)
    assert choice.reason == "borrowed" and choice.route[:2] == ("d0", "d1")
    assert route(1000, busy, slo=Slo(ttft_s=100.0)).reason == "disagg", "its target is far away"


def test_with_full_decode_workers_the_prefill_pool_does_all():
    full = tuple(
        msgspec.structs.replace(w, pages_free=3) if w.role is Role.DECODE else w for w in POOLS
    )
    choice = route(1000, full)
    assert choice.reason == "together" and choice.route == Route("p0", "p0")


def test_when_no_target_can_be_kept_the_first_token_comes_as_early_as_it_can():
    queued = tuple(
        msgspec.structs.replace(w, pending=queue(500)) if w.role is Role.PREFILL else w
        for w in POOLS
    )
    choice = route(1000, changed("d0", pending=queue(100))[2:] + queued[:2], slo=Slo(ttft_s=0.001))
    assert choice.route.prefill == "d1" and choice.ttft_s == pytest.approx(1.0)


def test_unwilling_and_failed_workers_get_nothing():
    assert route(1000, changed("p0", accepting=False)).route.prefill == "p1"
    assert route(1000, avoid="p0").route.prefill == "p1"
    assert route(1000, tuple(msgspec.structs.replace(w, accepting=False) for w in POOLS)) is None


def test_a_prompt_that_fits_nowhere():
    assert route(20_000) is None


def test_only_the_decode_worker_is_chosen_again():
    choice = route(1000, prefilled_on="p1", avoid="d0")
    assert choice.route[:2] == ("p1", "d1")
    assert route(1000, POOLS[:3], prefilled_on="p1", avoid="d0") is None


def test_replicas_share_the_load():
    workers = (
        view("a", Role.BOTH, pending=queue(2000)),
        view("b", Role.BOTH),
        view("c", Role.BOTH, running=batch(9, 90_000)),
    )
    router = Router(Linear(), WIRES, replica_rule())
    assert router.route(RouteQuery(3000), workers).route == Route("b", "b")


def test_more_cached_pages_never_make_the_first_token_later():
    model, device = PRESETS["llama-2-7b"], device_spec("h200")
    router = Router(Roofline(model, device), LinkBandwidth(50e9, model.kv_bytes_per_token()))
    workers = [
        view(
            name,
            role,
            units=device.units,
            layers=model.layers,
            pages_free=20_000,
            pages_total=20_000,
        )
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE))
    ]
    times = [
        router.route(RouteQuery(8192, Slo(), {"p0": pages}), workers).ttft_s
        for pages in range(0, 512, 64)
    ]
    assert times == sorted(times, reverse=True)


# ---------------------------------------------------------------- prefixes


def test_prefixes_count_from_the_start():
    prefixes = PrefixIndex()
    prefixes.add("a", [b"1", b"2", b"3"])
    prefixes.add("b", [b"1", b"2"])
    prefixes.add("c", [b"2", b"3"])
    assert prefixes.match([b"1", b"2", b"3", b"4"]) == {"a": 3, "b": 2}
    assert prefixes.match([b"4"]) == {}
    prefixes.forget("a")
    assert prefixes.match([b"1", b"2", b"3"]) == {"b": 2}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(1, 6)), max_size=30)
)
def test_prefixes_are_bounded_and_keep_beginnings(learned):
    prefixes = PrefixIndex(max_pages=8)
    for worker, family, length in learned:
        prefixes.add(worker, [bytes([family, depth]) for depth in range(length)])
        assert len(prefixes) <= 8
    if learned:
        worker, family, length = learned[-1]
        assert prefixes.match([bytes([family, depth]) for depth in range(length)])[worker] == length


# ---------------------------------------------------------------- transfers


def test_movers_are_chosen_by_where_the_pools_are():
    every = ("tcp", "shm", "nixl", "cuda-ipc", "local")
    here = TransportEndpoint("1", "host", "cpu", every)
    assert choose_transport(here, here)[0] == "local"
    assert choose_transport(here, TransportEndpoint("2", "host", "cpu", ("tcp", "shm")))[0] == "shm"
    assert choose_transport(here, TransportEndpoint("2", "host", "cpu", every))[0] == "shm"
    assert choose_transport(here, TransportEndpoint("2", "other", "cpu", every))[0] == "nixl"
    assert (
        choose_transport(here, TransportEndpoint("2", "other", "cpu", ("tcp", "shm")))[0] == "tcp"
    )
    gpu = TransportEndpoint("3", "host", "cuda", every)
    assert choose_transport(gpu, gpu._replace(process="4"))[0] == "cuda-ipc"
    assert choose_transport(gpu, gpu._replace(process="4", host="other"))[0] == "nixl"


def test_gpu_memory_through_host_memory_is_asked_for():
    gpu = TransportEndpoint("1", "host", "cuda", ("tcp", "shm"))
    other, far = gpu._replace(process="2"), gpu._replace(process="2", host="other")
    with pytest.raises(NoTransport, match="--transport tcp"):
        choose_transport(gpu, other)
    assert [choose_transport(gpu, peer, allow_staged=True)[0] for peer in (other, far)] == [
        "shm",
        "tcp",
    ]
    ipc = TransportEndpoint("1", "host", "cuda", ("cuda-ipc",))
    with pytest.raises(NoTransport, match="one host"):
        choose_transport(ipc, ipc._replace(process="2", host="other"))
    with pytest.raises(NoTransport, match="no common transport"):
        choose_transport(gpu, other._replace(transports=("nixl",)))


def test_small_transfers_are_sent_whole():
    assert choose_granularity(1e6, 1.0, 1e9, layers=32)[0] is TransferGranularity.PROMPT
    assert choose_granularity(5e9, 1.0, 10e9, layers=32)[0] is TransferGranularity.LAYER
    assert choose_granularity(2e6, 0.01, 1e9, layers=80, chunks=4)[0] is TransferGranularity.CHUNK


def test_what_is_seen_of_a_transfer():
    assert visible_transfer_s(1e9, 1.0, 1e9, groups=1) == pytest.approx(1.0)
    assert visible_transfer_s(1e9, 1.0, 1e9, groups=10) == pytest.approx(0.1)
    assert visible_transfer_s(4e9, 1.0, 1e9, groups=10) == pytest.approx(3.6 - 0.9 + 0.4)
    assert visible_transfer_s(1e9, 1.0, 1e9, 10, control_s=0.01) == pytest.approx(0.11)


@given(st.floats(1e3, 1e12), st.floats(1e-3, 100), st.floats(1e6, 1e12), st.integers(1, 200))
def test_more_bandwidth_and_more_groups_never_hurt(size, prefill_s, bandwidth, groups):
    here = visible_transfer_s(size, prefill_s, bandwidth, groups)
    assert visible_transfer_s(size, prefill_s, 2 * bandwidth, groups) <= here * (1 + 1e-9)
    assert visible_transfer_s(size, prefill_s, bandwidth, groups + 1) <= here * (1 + 1e-9)
    assert here >= size / bandwidth - prefill_s


def test_where_no_more_may_run_there_is_no_room():
    """The decode worker that would be chosen has all it may run; when both have, the answer stays
    where it is prefilled."""
    assert route(1000, changed("d0", slots_free=0)).route.decode == "d1"
    full = tuple(
        msgspec.structs.replace(w, slots_free=0) if w.role is Role.DECODE else w for w in POOLS
    )
    choice = route(1000, full)
    assert choice.reason == "together" and choice.route == Route("p0", "p0")
    assert route(100, full).route == Route("p0", "p0"), (
        "nor is a short prompt prefilled where it can't be decoded"
    )
