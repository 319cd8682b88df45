"""Signals that meet the workers of a pool at every state of a handoff, over HTTP: what clients get, and that nothing is left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest
from conftest import TINY
from held_engine import FOLDER, POINTS
from pool_process import FLAGS, Pool, text_of
from serve_process import HERE, Running, poll
from test_process_life import Reading

LOST_S = {"killed": 4.0, "stopped": 1.5}  # where workers only stand still for a moment, that moment has room
PROMPT = "what is prefilled here is decoded there, and all of it is told to the client " * 3
ASKED = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "stream": True}

# where a handoff stands -> (points at which engines are held, state on the prefill worker, state on the decode worker)
STATES = {
    "queued": (("reserving", "prefilling"), "running", "queued"),
    "reserved": (("prefilling",), "streaming", "reserved"),
    "parked": (("reserving",), "parked", "queued"),
    "decoding": (("decoding",), "", ""),
}


class HeldPool(Pool):
    """A pool over the engines of held_engine.py."""

    def __init__(self, folder: Path, model: str, system: str = "system", **settings: Any) -> None:
        numbers = {name.replace("-", "_"): int(value) if value.isdigit() else value for name, value in FLAGS.items()}
        self.folder = folder
        self.locks: dict[str, TextIO] = {}
        self.before = 0.0  # handoffs adopted before it was held
        for point in POINTS:
            (folder / point).touch()
        command = [sys.executable, str(HERE / "held_engine.py"), model, json.dumps(numbers | settings), system]
        Running.__init__(self, folder / "log", command)

    def hold(self, *points: str) -> None:
        self.before = self.adopted()
        for point in points:
            file = self.locks[point] = (self.folder / point).open()
            fcntl.flock(file, fcntl.LOCK_EX)

    def let_go(self) -> None:
        for file in self.locks.values():
            file.close()
        self.locks.clear()

    def adopted(self) -> float:
        return self.sum_of("handoffs_ended_total", outcome="adopted")

    def sum_of(self, name: str, **labels: str) -> float:
        """Of a counter, which may not be there yet."""
        try:
            return self.metric(f"counterpoint_{name}", **labels)
        except AssertionError:
            return 0.0

    def handoffs(self, worker: str, state: str) -> float:
        return self.sum_of("handoffs", worker=worker, state=state)

    def at(self, state: str) -> str:
        """The decode worker of the one handoff that is under way, once that stands in `state`."""
        _, here, there = STATES[state]
        names = ("decode-0", "decode-1")
        if not here:
            poll(lambda: self.adopted() > self.before, what="nothing is adopted")
            return poll(lambda: next((n for n in names if self.metric("counterpoint_worker_requests_running", worker=n)), ""))
        poll(lambda: self.handoffs("prefill-0", here) == 1, what=f"no handoff is {here}")
        return poll(lambda: next((name for name in names if self.handoffs(name, there)), ""), what=f"no handoff is {there}")

    def well(self) -> bool:
        return self.get("/health").json() == {"status": "ok"}


@contextlib.contextmanager
def held_pool(folder: Path, **settings: Any) -> Iterator[HeldPool]:
    """One prefill worker, two that decode. Afterwards no file and no process of it is left."""
    files, children = set(os.listdir("/dev/shm")), set(psutil.Process().children(recursive=True))
    (folder / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 8192}))
    room = {"kv_pages": 400, "max_context_tokens": 1024, "prefix_cache": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        pool = HeldPool(folder, str(folder / "config.json"), prefill=1, decode=2, **room | settings)
        try:
            pool.wait_ready()
            yield pool
            assert pool.stop() == 0
        finally:
            pool.let_go()
            if pool.process.poll() is None:
                pool.process.kill()
                pool.process.wait()
    assert set(os.listdir("/dev/shm")) <= files, "a shared-memory file was left"
    poll(lambda: set(psutil.Process().children(recursive=True)) <= children, what="orphans")


@pytest.fixture(scope="module", params=["killed", "stopped"])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldPool]:
    """One for each signal, over different transports."""
    transport = {"killed": "shm", "stopped": "tcp"}[request.param]
    with held_pool(tmp_path_factory.mktemp("held"), worker_lost_s=LOST_S[request.param], transport=transport) as pool:
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


def asked(pool: Pool, **more: Any) -> Reading:
    return Reading(pool, ASKED | more, begun=False)


@pytest.fixture
def strike(pool: HeldPool, request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Sends the pool's signal to a worker, and returns when that is known to be lost or to stand still."""
    signal = {"killed": psutil.Process.kill, "stopped": psutil.Process.suspend}[request.node.callspec.params["pool"]]

    def strike(worker: str) -> None:
        signal(pool.worker(worker))
        poll(lambda: not pool.metric("counterpoint_worker_up", worker=worker), what="nobody has noticed")

    return strike


def ends_whole(stream: Reading, whole: str) -> None:
    events = stream.end()
    assert events[-1] == "[DONE]", events[-1]
    assert text_of(events) == whole


def ends_with_an_error(stream: Reading, worker: str) -> None:
    assert f"{worker} was lost" in stream.fails()["message"]


@pytest.mark.parametrize("state", STATES)
def test_the_prefill_worker_is_struck(pool: HeldPool, whole: str, state: str, strike: Callable[[str], None]):
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
def test_the_decode_worker_is_struck(pool: HeldPool, whole: str, state: str, strike: Callable[[str], None]):
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
    poll(lambda: pool.metric("counterpoint_worker_prompt_tokens_total", worker="prefill-0") == prefilled + len(PROMPT))


@pytest.mark.parametrize("pool", ["killed"], indirect=True)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("state", STATES)
def test_a_worker_that_stands_still_for_a_moment_goes_on(pool: HeldPool, whole: str, state: str, role: str):
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
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        client.sendall(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        pool.at(state)
    poll(lambda: pool.sum_of("requests_finished_total", finished_reason="abort") > aborted, what="nobody has noticed")
    pool.let_go()
    poll(lambda: pool.at_rest, 20, "something is still held")
