"""A server of one engine: what happens when the engine dies or freezes, or a client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from serve_process import Reading, Running, alive, poll

from counterpoint.serve.worker.single_engine import FROZEN_S, MAX_TURN_S

ENDLESS = {"prompt": "on and on ", "max_tokens": 4000, "ignore_eos": True, "stream": True}
Start = Callable[..., Running]


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
    """A step longer than MAX_TURN_S: the loop waits for it, and the server stays healthy."""
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
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 99\r\n\r\n{"
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
