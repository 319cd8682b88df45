"""Signals to workers of a pool at every state of a handoff: what clients get, and that nothing
remains."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import psutil
import pytest
from held_pool import ASKED, PROMPT, STATES, HeldPool, asked, ends_whole, held_pool
from pool_process import text_of
from serve_process import Reading, poll

pytestmark = pytest.mark.slow

LOST_S = {
    "killed": 4.0,
    "stopped": 1.5,
}  # where workers only stand still for a moment, that moment has room


@pytest.fixture(scope="module", params=["killed", "stopped"])
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HeldPool]:
    """One for each signal, over different transports."""
    transport = {"killed": "shm", "stopped": "tcp"}[request.param]
    with held_pool(
        tmp_path_factory.mktemp("held"), worker_lost_s=LOST_S[request.param], transport=transport
    ) as pool:
        yield pool


@pytest.fixture(autouse=True)
def calm(pool: HeldPool) -> Iterator[None]:
    """A test leaves a pool whose workers are all back, hand requests over, and hold nothing."""
    yield
    pool.let_go()
    poll(pool.well, 60, "a worker does not come back")
    adopted = pool.adopted()
    assert [asked(pool).end()[-1] for _ in range(2)] == ["[DONE]"] * 2
    assert pool.adopted() > adopted, "nothing is handed over any more"
    poll(lambda: pool.at_rest, 20, "something is still held")


@pytest.fixture(scope="module")
def whole(pool: HeldPool) -> str:
    """The answer of an undisturbed pool."""
    events = asked(pool).end()
    assert events[-1] == "[DONE]"
    return text_of(events)


@pytest.fixture
def strike(pool: HeldPool, request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Send the pool's signal to a worker, and wait until it is known to be lost or frozen."""
    signal = {"killed": psutil.Process.kill, "stopped": psutil.Process.suspend}[
        request.node.callspec.params["pool"]
    ]

    def strike(worker: str) -> None:
        signal(pool.worker(worker))
        poll(
            lambda: not pool.metric("counterpoint_worker_up", worker=worker),
            what="nobody has noticed",
        )

    return strike


def ends_with_an_error(stream: Reading, worker: str) -> None:
    assert f"{worker} was lost" in stream.fails()["message"]


@pytest.mark.parametrize("state", STATES)
def test_the_prefill_worker_is_struck(
    pool: HeldPool, whole: str, state: str, strike: Callable[[str], None]
):
    pool.hold(*STATES[state][0])
    stream = asked(pool)
    pool.at(state)
    strike("prefill-0")
    pool.let_go()
    if state == "parked":  # the client has its first token, and nobody else has the KV behind it
        ends_with_an_error(stream, "prefill-0")
    else:
        ends_whole(stream, whole)


@pytest.mark.parametrize("state", STATES)
def test_the_decode_worker_is_struck(
    pool: HeldPool, whole: str, state: str, strike: Callable[[str], None]
):
    pool.hold(*STATES[state][0])
    prefilled = pool.metric("counterpoint_worker_prompt_tokens_total", worker="prefill-0")
    stream = asked(pool)
    worker = pool.at(state)
    strike(worker)
    pool.let_go()
    if state == "decoding":
        ends_with_an_error(stream, worker)
        return
    ends_whole(stream, whole)
    poll(
        lambda: (
            pool.metric("counterpoint_worker_prompt_tokens_total", worker="prefill-0")
            == prefilled + len(PROMPT)
        )
    )


@pytest.mark.parametrize("pool", ["killed"], indirect=True)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("state", STATES)
def test_a_worker_that_stands_still_for_a_moment_goes_on(
    pool: HeldPool, whole: str, state: str, role: str
):
    pool.hold(*STATES[state][0])
    stream = asked(pool)
    decode = pool.at(state)
    name = "prefill-0" if role == "prefill" else decode
    worker = pool.worker(name)
    worker.suspend()
    poll(lambda: not pool.metric("counterpoint_worker_up", worker=name), what="nobody has noticed")
    worker.resume()
    pool.let_go()
    ends_whole(stream, whole)
    assert pool.worker(name) == worker


@pytest.mark.parametrize("state", STATES)
def test_a_client_that_leaves_in_any_window_leaves_nothing(pool: HeldPool, state: str):
    pool.hold(*STATES[state][0])
    host, port = pool.url.removeprefix("http://").split(":")
    body = json.dumps(ASKED).encode()
    aborted = pool.sum_of("requests_finished_total", finished_reason="abort")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        )
        client.sendall(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        pool.at(state)
    poll(
        lambda: pool.sum_of("requests_finished_total", finished_reason="abort") > aborted,
        what="nobody has noticed",
    )
    pool.let_go()
    poll(lambda: pool.at_rest, 20, "something is still held")
