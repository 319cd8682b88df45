"""The API key, admission limits, and the time limit of a response."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_calls import CHAT, COMPLETIONS, HeldRequest
from serve_process import Running, poll

from counterpoint.bench.client import HttpTarget
from counterpoint.bench.command import fetch_first_model
from counterpoint.config import Config, ConfigError
from counterpoint.serve.offline.chat import remote_speaker

Start = Callable[..., Running]


def envelope(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    return response.json()["error"]


# ---------------------------------------------------------------- the key


def test_an_api_key(own_server: Start):
    server = own_server(api_key="swordfish-7", log_level="debug").wait_ready()
    body = {"prompt": "hi", "max_tokens": 2}
    for header in (
        {},
        {"authorization": "Bearer swordfish"},
        {"authorization": "swordfish-7"},
        {"authorization": "Bearer \xff"},
    ):
        response = httpx.post(
            f"{server.url}{COMPLETIONS}",
            json=body,
            headers={k: v.encode("latin-1") for k, v in header.items()},
        )
        assert (
            envelope(response, 401)["code"] == "invalid_api_key"
            and response.headers["x-request-id"]
        )
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/version", "/openapi.json", "/nothing"):
        envelope(server.get(path), 401)
    assert server.get("/health").status_code == server.get("/metrics").status_code == 200
    with pytest.raises(ConnectionError, match="401 Unauthorized: set OPENAI_API_KEY"):
        remote_speaker(server.url, None, {})
    with pytest.raises(ConnectionError, match="401 Unauthorized; give the right --api-key"):
        fetch_first_model(HttpTarget(server.url, ""))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="swordfish-7", max_retries=0)
    assert (
        client.completions.create(model="echo", prompt="hi", max_tokens=2).choices[0].text == "hi"
    )
    with pytest.raises(openai.AuthenticationError):
        server.client.models.list()
    assert server.stop() == 0
    assert "swordfish" not in server.said()


def test_an_api_key_is_not_shown():
    assert "swordfish" not in repr(Config().replace(api_key="swordfish"))
    with pytest.raises(ConfigError, match="api_key") as refusal:
        Config().replace(api_key=9876)
    assert "9876" not in str(refusal.value)
    with pytest.raises(ConfigError, match="api_key"):
        Config().replace(api_key="")


# ---------------------------------------------------------------- how much may wait


def overloaded(server: Running, body: dict[str, Any], path: str = COMPLETIONS) -> str:
    response = server.post(path, body)
    error = envelope(response, 503)
    assert int(response.headers["retry-after"]) > 0 and error["code"] == "server_overloaded"
    return error["message"]


def test_max_queued_requests(own_server: Start, tmp_path: Path):
    server = own_server(max_queued_requests=2).wait_ready()
    held = HeldRequest(server, tmp_path / "go")
    messages = [{"role": "user", "content": "hi"}]
    for stream in (False, True):
        assert "at most 2" in overloaded(server, {"prompt": "hi", "stream": stream, "n": 2})
        assert "at most 2" in overloaded(
            server, {"messages": messages, "stream": stream, "n": 2}, CHAT
        )
    assert server.metric("counterpoint_requests_refused_total", reason="queued_requests") == 4
    assert server.metric("counterpoint_requests_refused_total", reason="queued_tokens") == 0
    assert server.get("/health").status_code == 200, "busy is not unhealthy"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda i: server.post(COMPLETIONS, {"prompt": "hi", "stream": True, "n": 2}),
                range(8),
            )
        )
    assert [answer.json()["error"]["code"] for answer in answers] == ["server_overloaded"] * 8
    assert held.release()
    assert server.post(COMPLETIONS, {"prompt": "hi", "n": 9, "max_tokens": 1}).is_success, (
        "nothing waits: all of it may"
    )


def test_max_queued_tokens(own_server: Start, tmp_path: Path):
    server = own_server(max_queued_tokens=300).wait_ready()
    held = HeldRequest(server, tmp_path / "go")
    assert server.metric("counterpoint_queued_tokens") == len(held.body["prompt"])
    assert "at most 300" in overloaded(server, {"prompt": "x" * 290})
    assert server.metric("counterpoint_requests_refused_total", reason="queued_tokens") == 1
    assert held.release()
    assert server.post(COMPLETIONS, {"prompt": "x" * 290, "max_tokens": 1}).is_success
    assert server.post(COMPLETIONS, {"prompt": "x" * 400, "max_tokens": 1}).is_success, (
        "nothing else waits"
    )


def test_a_request_leaves_the_queue_at_its_first_token_or_end(own_server: Start, tmp_path: Path):
    """Requests that run, fail or are left at once, streamed or not, leave the queue."""
    server = own_server(max_queued_requests=1).wait_ready()
    endless = {"prompt": "on and on ", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", f"{server.url}{COMPLETIONS}", json=endless) as running:
        next(running.iter_lines())
        for body in (
            {"prompt": "hi"},
            {"prompt": "FAIL THE STEP"},
            {"prompt": "hi", "stream": True},
        ):
            for _ in range(3):
                assert server.post(COMPLETIONS, body).status_code in (200, 500)
    held = HeldRequest(server, tmp_path / "go")
    overloaded(server, {"prompt": "hi"})
    assert held.release()
    for stream in (True, False):
        leaving = httpx.Timeout(5, read=0.2)
        go = tmp_path / f"go{stream}"
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}{COMPLETIONS}",
                json={"prompt": f"HOLD UNTIL {go} ", "stream": stream},
                timeout=leaving,
            )
        poll(
            lambda: server.metric("counterpoint_queued_requests") == 0,
            what="whoever has left keeps a place",
        )
        go.touch()
        poll(lambda: server.post(COMPLETIONS, {"prompt": "hi"}).is_success)


# ---------------------------------------------------------------- how long it may take


def test_a_response_that_takes_too_long_fails(own_server: Start, tmp_path: Path):
    server = own_server(request_timeout_s=0.3).wait_ready()
    endless = {"prompt": "on and on ", "max_tokens": 4000, "ignore_eos": True}
    error = envelope(server.post(COMPLETIONS, endless), 504)
    assert error["code"] == "request_timeout" and "0.3" in error["message"]
    *events, last = server.events(endless)
    assert events and last["error"]["code"] == "request_timeout" and "[DONE]" not in events
    assert not any(choice["finish_reason"] for event in events for choice in event["choices"])
    poll(lambda: server.metric("counterpoint_requests_running") == 0)
    assert server.metric("counterpoint_requests_finished_total", finished_reason="abort") == 2
    assert (
        server.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 2}).json()["choices"][0]["text"]
        == "hi"
    )
    assert server.stop() == 0
