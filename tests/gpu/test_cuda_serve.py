"""`counterpoint serve` on a GPU: a real process over a real socket."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cuda_rig import HAS_GPU
from serve_process import Running

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")]

FLAGS = [
    "--load-format",
    "dummy",
    "--device",
    "cuda",
    "--port",
    "0",
    "--kv-pages",
    "2000",
    "--max-running",
    "16",
]


@pytest.fixture(scope="module", params=["multiplex", "chunked, fp8"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    policy, _, eight = request.param.partition(", ")
    more = ["--policy", policy, *(["--split", "32"] if policy == "multiplex" else [])]
    more += ["--quantization", "fp8", "--kv-cache-dtype", "fp8"] if eight else []
    command = [sys.executable, "-m", "counterpoint", "serve", "smollm2-135m", *FLAGS, *more]
    running = Running(tmp_path_factory.mktemp("server") / "log", command)
    try:
        yield running.wait_ready()
        assert running.stop() == 0, running.said()
    finally:
        if running.process.poll() is None:
            running.process.kill()


def ask(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/{path}",
        json={"model": "smollm2-135m", **body},
        timeout=60,
        trust_env=False,
    )


def completion(server: Running, **body: Any) -> dict[str, Any]:
    usual = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    got = ask(server, "completions", **{**usual, **body})
    assert got.status_code == 200, got.text
    return got.json()


def test_greedy_completions_are_repeatable(server: Running):
    first, again = completion(server), completion(server)
    assert first["choices"] == again["choices"]
    assert first["usage"]["completion_tokens"] == 24


def test_concurrent_completions_mostly_equal_single_ones(server: Running):
    """In 16 bits a batch may round differently from a single row."""
    bodies = [{"prompt": f"Story number {n}: once", "max_tokens": 12} for n in range(24)]
    alone = [completion(server, **body)["choices"][0]["text"] for body in bodies]
    with ThreadPoolExecutor(24) as pool:
        together = list(
            pool.map(lambda body: completion(server, **body)["choices"][0]["text"], bodies)
        )
    assert sum(a == b for a, b in zip(alone, together, strict=True)) > 12


def test_every_sampling_setting_completes(server: Running):
    for body in (
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 3},
        {"temperature": 0.9, "min_p": 0.05, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"logit_bias": {"97": 100}},
        {"logprobs": 3},
        {"n": 3, "temperature": 1.0},
    ):
        got = completion(server, **body)
        assert got["usage"]["completion_tokens"] == 24 * body.get("n", 1)
    assert set(completion(server, logit_bias={"97": 100})["choices"][0]["text"]) == {"a"}
    assert len(completion(server, logprobs=3)["choices"][0]["logprobs"]["token_logprobs"]) == 24


def test_a_stream_ends_and_a_closed_one_does_no_harm(server: Running):
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
        "stream": True,
    }
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False
    ) as got:
        lines = [line for line in got.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**body, "max_tokens": 4000}, timeout=60
    ) as got:
        next(got.iter_lines())
    assert completion(server)["usage"]["completion_tokens"] == 24


def test_a_json_schema_is_followed(server: Running):
    fields = {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}}
    schema = {
        "type": "object",
        "properties": fields,
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    messages = [{"role": "user", "content": "Give me a number."}]
    got = ask(
        server,
        "chat/completions",
        messages=messages,
        max_tokens=300,
        temperature=0.7,
        seed=1,
        response_format=wanted,
    )
    assert got.status_code == 200, got.text
    choice = got.json()["choices"][0]
    assert choice["finish_reason"] == "stop", "every field is bounded, so the object ends"
    assert set(json.loads(choice["message"]["content"])) == {"n", "ok"}


def test_metrics_are_served_and_finite(server: Running):
    completion(server)
    assert server.metric("counterpoint_requests_running") == 0
    text = httpx.get(f"{server.url}/metrics", timeout=30, trust_env=False).text
    assert "counterpoint_" in text and "nan" not in text.lower()
