"""Pools of real workers over a tiny model, and many requests of every kind for them."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
from serve_process import Running

FLAGS = {
    "load-format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "policy": "chunked",
    "chunk-tokens": "32",
    "page-tokens": "4",
    "kv-pages": "150",
    "max-running": "24",
    "max-context-tokens": "160",
    "local-tokens": "0",
    "port": "0",
}


class Pool(Running):
    """`counterpoint serve MODEL` with FLAGS and `flags`, whose underscores become dashes."""

    def __init__(self, log: Path, model: str, **flags: Any) -> None:
        given = FLAGS | {name.replace("_", "-"): str(value) for name, value in flags.items()}
        words = [
            word
            for name, value in given.items()
            for word in ((f"--{name}", value) if value != "True" else (f"--{name}",))
        ]
        super().__init__(log, [sys.executable, "-m", "counterpoint", "serve", model, *words])

    def worker(self, name: str) -> psutil.Process:
        """The process of a worker, by what /metrics says of it."""
        return psutil.Process(int(self.metric("counterpoint_worker_pid", worker=name)))

    @property
    def at_rest(self) -> bool:
        """Nothing runs, no handoff holds anything, and every page is back."""
        names = ("requests_running", "requests_waiting", "handoffs", "handoff_pages")
        if any(self.metric(f"counterpoint_{name}") for name in names):
            return False
        free, cached, total = (
            self.metric(f"counterpoint_kv_pages_{name}") for name in ("free", "cached", "total")
        )
        return free + cached == total


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """Short and long, half with a common prefix; some with several choices, logprobs, or an
    end at the first token."""
    chance = random.Random(7)
    beginning = [chance.randrange(256) for _ in range(60)]
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        prompt = [chance.randrange(256) for _ in range(chance.randrange(3, 60))]
        body = {
            "prompt": beginning * (number % 2) + prompt,
            "max_tokens": chance.randrange(6, 24),
            "temperature": 0.0,
        }
        if number % 8 == 3:
            body |= {"n": 3, "temperature": 0.9, "seed": number}
        if number % 5 == 2:
            body |= {"logprobs": 3}
        if number % 20 == 6:
            body |= {"logprobs": 1, "echo": True}
        if number % 10 == 4:
            body |= {"max_tokens": 1}
        if number % 10 == 9:
            body |= {"ignore_eos": True}
        if number % 16 == 5:
            body |= {"logit_bias": {"65": 100}, "stop_token_ids": [65]}
        if number % 9 == 8:
            body |= {"regex": "([a-z]{2,9}[ ,;])+"}
        bodies.append(body)
    return bodies


def answers(server: Running, bodies: list[dict[str, Any]], at_once: int = 48) -> list[Any]:
    """What matters of each answer; `at_once` are asked at a time."""

    async def ask_all() -> list[Any]:
        gate = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(timeout=120, trust_env=False) as http:

            async def ask(body: dict[str, Any]) -> Any:
                async with gate:
                    response = await http.post(f"{server.url}/v1/completions", json=body)
                assert response.is_success, response.text
                return essence(response.json())

            return await asyncio.gather(*(ask(body) for body in bodies))

    return asyncio.run(ask_all())


def essence(answer: dict[str, Any]) -> Any:
    """All but what may differ: ids, times and what was found in a cache."""
    usage = {
        name: value for name, value in answer["usage"].items() if name != "prompt_tokens_details"
    }
    return [answer["choices"], usage]


def others(found: list[Any], truth: list[Any]) -> list[int]:
    """Which answers differ."""
    assert len(found) == len(truth)
    return [
        number for number, pair in enumerate(zip(found, truth, strict=True)) if not alike(*pair)
    ]


def alike(a: Any, b: Any) -> bool:
    """Equal, log-probabilities to 1e-5: they may be summed in another order."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < 1e-5
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def text_of(events: list[Any]) -> str:
    return "".join(
        event["choices"][0]["text"] for event in events if event != "[DONE]" and "choices" in event
    )
