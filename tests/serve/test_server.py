"""The server's life: how it starts, stops and drains."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from serve_process import Reading, Running, alive, poll

from counterpoint.core.loop import read_log
from counterpoint.types import AddRequest

ENDLESS = {"prompt": "on and on ", "max_tokens": 4000, "ignore_eos": True, "stream": True}
Start = Callable[..., Running]


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


# ---------------------------------------------------------------- stopping


def test_a_signal_drains(own_server: Start, tmp_path: Path):
    """To the whole group, as a terminal sends it: running requests finish, new ones are refused,
    and the event log is complete."""
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


def test_a_body_that_is_too_large(own_server: Start):
    server = own_server(max_body_bytes=1000).wait_ready()
    response = server.post("/v1/completions", {"prompt": "x" * 2000})
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"
    assert server.post("/v1/completions", {"prompt": "hi"}).is_success
    assert server.stop() == 0
