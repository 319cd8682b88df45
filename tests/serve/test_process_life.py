"""Processes: how a server starts, stops, and what becomes of it when something dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serve_process import Running, data_of, poll

from counterpoint.core.loop import read_log
from counterpoint.serve.worker.single_engine import FROZEN_S, MAX_TURN_S
from counterpoint.types import AddRequest

ENDLESS = {"prompt": "on and on ", "max_tokens": 4000, "ignore_eos": True, "stream": True}
Start = Callable[..., Running]


class Reading:
    """A stream that is read in a thread, from its first event on; `begun`: that is waited for."""

    def __init__(self, server: Running, body: dict[str, Any], begun: bool = True) -> None:
        self.events: list[Any] = []
        self.begun = threading.Event()
        self._server, self._body = server, body
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert not begun or self.begun.wait(20)

    def _read(self) -> None:
        with httpx.stream(
            "POST", f"{self._server.url}/v1/completions", json=self._body, timeout=60
        ) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(data_of(line))
                    self.begun.set()

    def end(self) -> list[Any]:
        """All events, once the server has closed the stream."""
        self._thread.join(30)
        assert not self._thread.is_alive(), "the stream hangs"
        return self.events

    def fails(self) -> dict[str, Any]:
        """The error with which it ends: no finish, no [DONE]."""
        *events, last = self.end()
        assert "[DONE]" not in events and "error" in last, last
        assert not any(choice["finish_reason"] for event in events for choice in event["choices"])
        return last["error"]


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


# ---------------------------------------------------------------- starting


def test_a_taken_port_is_told_before_the_model_is_loaded(own_server: Start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = own_server(port=port)
        assert server.process.wait(30) == 2
    assert (
        f"port {port}" in server.said()
        and "starting" not in server.said()
        and "Traceback" not in server.said()
    )


def test_while_loading_it_answers_503(own_server: Start, tmp_path: Path):
    loaded = tmp_path / "loaded"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = own_server(port=port, system="fake_engine:waiting_system", timeline=str(loaded))
    server.url = f"http://127.0.0.1:{port}"

    def health() -> httpx.Response | None:
        with contextlib.suppress(httpx.TransportError):
            return server.get("/health")
        return None

    response = poll(health, 30)
    assert (
        response is not None
        and response.status_code == 503
        and response.json()["status"] == "loading"
    )
    refusal = server.post("/v1/completions", {"prompt": "hi"})
    assert (
        refusal.status_code == 503
        and int(refusal.headers["retry-after"]) > 0
        and "loaded" in refusal.json()["error"]["message"]
    )
    loaded.touch()
    server.wait_ready()
    assert server.get("/health").status_code == 200
    assert server.stop() == 0


def test_an_event_log_that_cannot_be_written_is_told(own_server: Start, tmp_path: Path):
    server = own_server(event_log=str(tmp_path / "no" / "log"))
    assert server.process.wait(30) == 2
    assert "event_log" in server.said()


def test_a_timeline_that_cannot_be_written_is_told(own_server: Start, tmp_path: Path):
    server = own_server(timeline=str(tmp_path / "no" / "lanes"))
    assert server.process.wait(30) == 2
    assert "timeline" in server.said()


def test_a_full_disk_ends_the_recording_and_nothing_else(own_server: Start):
    server = own_server(event_log="/dev/full", timeline="/dev/full").wait_ready()
    for number in range(20):  # more than a file's buffer holds
        prompt = f"{number} " + "x" * 2000
        assert (
            server.post("/v1/completions", {"prompt": prompt, "max_tokens": 4}).status_code == 200
        )
    assert server.stop() == 0
    said = server.said()
    assert (
        said.count("event_log /dev/full: No space left on device") == 1
        and "timeline /dev/full: No space" in said
    )


@pytest.mark.parametrize(
    ("system", "status", "words"),
    [("refusing", 2, "page_tokens"), ("broken", 1, "a fault, as asked")],
)
def test_an_engine_that_cannot_start_ends_the_server(
    own_server: Start, system: str, status: int, words: str
):
    server = own_server(system=f"fake_engine:{system}_system")
    assert server.process.wait(30) == status
    assert words in server.said()


def test_stopping_while_loading(own_server: Start, tmp_path: Path):
    server = own_server(system="fake_engine:waiting_system", timeline=str(tmp_path / "never"))
    engine = poll(lambda: psutil.Process(server.process.pid).children())[0]
    poll(lambda: "starting" in server.said(), 30)
    assert server.stop() == 0
    assert not alive(engine)


# ---------------------------------------------------------------- dying


def test_a_killed_engine(own_server: Start):
    server = own_server().wait_ready()
    stream = Reading(server, ENDLESS)
    server.engine.kill()
    assert "ended" in stream.fails()["message"]
    response = poll(
        lambda: server.get("/health") if server.get("/health").status_code == 503 else None
    )
    assert response is not None and response.json()["status"] == "dead"
    assert server.post("/v1/completions", {"prompt": "hi"}).status_code == 503
    assert server.metric("counterpoint_requests_running") == 0
    assert server.stop() == 0


def test_a_lost_device(own_server: Start):
    server = own_server().wait_ready()
    stream = Reading(server, ENDLESS)
    refusal = server.post("/v1/completions", {"prompt": "LOSE THE DEVICE"})
    assert refusal.status_code == 503 and "as asked" in refusal.json()["error"]["message"]
    assert "as asked" in stream.fails()["message"]
    assert server.get("/health").status_code == 503


def test_a_frozen_engine(own_server: Start):
    server = own_server().wait_ready()
    stream = Reading(server, ENDLESS)
    server.engine.suspend()
    poll(lambda: server.get("/health").status_code == 503, 10, "frozen, yet healthy")
    assert server.post("/v1/completions", {"prompt": "hi"}).status_code == 503
    assert "respond" in stream.fails()["message"]
    server.engine.resume()
    poll(lambda: server.get("/health").status_code == 200)
    assert server.post("/v1/completions", {"prompt": "hi"}).json()["choices"][0]["text"] == "hi"
    poll(
        lambda: server.metric("counterpoint_requests_running") == 0,
        what="the given-up request still runs",
    )
    assert server.stop() == 0


def test_a_stuck_loop(own_server: Start, tmp_path: Path):
    """Its process still beats, and no step runs."""
    server = own_server().wait_ready()
    stream = Reading(server, ENDLESS)
    go = tmp_path / "go"
    refused: list[httpx.Response] = []
    stuck = threading.Thread(
        target=lambda: refused.append(
            server.post("/v1/completions", {"prompt": f"STICK UNTIL {go} "})
        )
    )
    stuck.start()
    poll(lambda: server.get("/health").status_code == 503, 20, "stuck, yet healthy")
    assert server.get("/health").json()["status"] == "frozen"
    assert "respond" in stream.fails()["message"]
    stuck.join(30)
    assert refused[0].status_code == 503
    go.touch()
    poll(lambda: server.get("/health").status_code == 200)
    assert server.post("/v1/completions", {"prompt": "hi"}).json()["choices"][0]["text"] == "hi"
    poll(
        lambda: server.metric("counterpoint_requests_running") == 0,
        what="the given-up request still runs",
    )
    assert server.stop() == 0


def test_a_long_step_is_not_a_stuck_loop(own_server: Start, tmp_path: Path):
    """Longer than a loop may be stuck: the step runs, the loop waits for it, and the server says how things stand."""
    server = own_server().wait_ready()
    go = tmp_path / "go"
    answered: list[httpx.Response] = []
    busy = threading.Thread(
        target=lambda: answered.append(
            server.post("/v1/completions", {"prompt": f"HOLD UNTIL {go} "})
        )
    )
    busy.start()
    poll(lambda: server.metric("counterpoint_requests_running") == 1)
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < FROZEN_S + MAX_TURN_S + 2:
        assert server.get("/health").status_code == 200
        busy.join(0.5)
    assert busy.is_alive()
    go.touch()
    busy.join(20)
    assert answered[0].is_success
    assert server.stop() == 0


def test_a_busy_engine_is_healthy(server: Running):
    """A step longer than a frozen engine would be let be."""
    thread = threading.Thread(
        target=server.post, args=("/v1/completions", {"prompt": "TAKE LONG", "max_tokens": 1})
    )
    thread.start()
    polled = 0
    while thread.is_alive():
        assert server.get("/health").status_code == 200
        polled += 1
        thread.join(0.1)
    assert polled > 10


@pytest.mark.parametrize("stopped", [False, True])
def test_no_engine_outlives_its_server(own_server: Start, stopped: bool):
    server = own_server().wait_ready()
    engine = server.engine
    if stopped:
        engine.suspend()
    server.process.kill()
    poll(lambda: not alive(engine), 10, "the engine has outlived its server")


# ---------------------------------------------------------------- stopping


def test_a_signal_drains(own_server: Start, tmp_path: Path):
    """To the whole group, as a terminal sends it: what runs is finished, nothing new is let in, the event log is whole."""
    log = tmp_path / "events"
    timeline = tmp_path / "timeline.json"
    server = own_server(event_log=str(log), timeline=str(timeline)).wait_ready()
    stream = Reading(
        server, {"prompt": "a last word ", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    )
    for process in (server.process.pid, server.engine.pid):
        os.kill(process, signal.SIGINT)

    def closed() -> bool:
        try:
            httpx.get(f"{server.url}/health", timeout=5)
        except httpx.ConnectError:
            return True
        return False

    poll(closed, what="the port is still open")
    events = stream.end()
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
    assert len("".join(event["choices"][0]["text"] for event in events[:-1])) == 1000
    assert server.process.wait(20) == 0
    arrived = [
        event for _, turn in read_log(log) for event in turn if isinstance(event, AddRequest)
    ]
    assert [bytes(arrive.prompt) for arrive in arrived] == [b"a last word "]
    assert len(json.loads(timeline.read_text())["traceEvents"]) > 1000


def test_a_drain_has_an_end(own_server: Start):
    server = own_server(drain_s=0.2).wait_ready()
    stream = Reading(server, ENDLESS)
    assert server.stop() == 0
    assert "shutting down" in stream.fails()["message"]


def test_a_second_signal_stops_at_once(own_server: Start):
    server = own_server(drain_s=600.0).wait_ready()
    stream = Reading(server, ENDLESS)
    engine = server.engine
    server.process.send_signal(signal.SIGTERM)
    poll(lambda: "stopping" in server.said())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 1
    assert not alive(engine)
    with contextlib.suppress(httpx.RemoteProtocolError):
        stream.end()


# ---------------------------------------------------------------- clients that leave


def running(server: Running) -> float:
    return server.metric("counterpoint_requests_running")


@pytest.fixture
def left_behind(server: Running) -> Iterator[Running]:
    """Nothing runs before, and after a while nothing runs again, with all pages back."""
    poll(lambda: running(server) == 0)
    yield server
    poll(lambda: running(server) == 0, 5, "a request runs though its client has left")
    assert (
        server.metric("counterpoint_kv_pages_free") + server.metric("counterpoint_kv_pages_cached")
        == 1024
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_ends_its_requests(left_behind: Running, stream: bool, n: int):
    server = left_behind
    body = ENDLESS | {"stream": stream, "n": n}

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=30) as http:
            asking = asyncio.create_task(http.post(f"{server.url}/v1/completions", json=body))
            while await asyncio.to_thread(running, server) != n:
                assert not asking.done()
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())


def test_a_client_that_leaves_while_it_sends(left_behind: Running):
    address = (left_behind.url.split("/")[2].split(":")[0], int(left_behind.url.rsplit(":", 1)[1]))
    with socket.create_connection(address) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
    assert left_behind.get("/health").status_code == 200


def test_a_prefix_survives_its_client(server: Running):
    said = "what was computed for a client that left is not thrown away " * 8
    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": said, "max_tokens": 3000, "ignore_eos": True},
            timeout=httpx.Timeout(5, read=1.0),
        )
    poll(lambda: running(server) == 0)
    again = server.post("/v1/completions", {"prompt": said}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300


def test_a_body_that_is_too_large(own_server: Start):
    server = own_server(max_body_bytes=1000).wait_ready()
    response = server.post("/v1/completions", {"prompt": "x" * 2000})
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"
    assert server.post("/v1/completions", {"prompt": "hi"}).is_success
    assert server.stop() == 0
