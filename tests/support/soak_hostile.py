"""Hostile requests, by the thousand: `python tests/support/soak_hostile.py --requests 5000`.

Mutated bodies of every endpoint, bytes that are no HTTP, bodies that never end, clients that leave,
harmful numbers, texts and schemas; all the while, small canary requests must be answered rightly.
Reported: answers by status, answers of 500 and more, the canary's longest wait, pages lost, and
whether the engine's process is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import copy
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from serve_process import Running, poll
from soak_aborts import COUNTERPOINT

AT_ONCE = 16
ANSWER_S = 60.0
SAID = [{"role": "user", "content": "canary"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALLED = [
    *SAID,
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "7"},
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "abc", "max_tokens": 3},
        {
            "prompt": [1, 2, 3],
            "max_tokens": 2,
            "stream": True,
            "logprobs": 2,
            "stream_options": {"include_usage": True},
        },
        {
            "prompt": ["a", "b"],
            "n": 2,
            "echo": True,
            "stop": ["x"],
            "logit_bias": {"65": -5},
            "seed": 1,
            "max_tokens": 2,
        },
    ],
    "/v1/chat/completions": [
        {"messages": SAID, "max_tokens": 4},
        {
            "messages": SAID,
            "stream": True,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "max_completion_tokens": 4,
            "n": 2,
        },
        {
            "messages": SAID,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            },
            "max_tokens": 8,
        },
        {"messages": SAID, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 8},
        {
            "messages": SAID,
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "stream": True,
            "max_tokens": 8,
        },
        {
            "messages": CALLED,
            "tools": [TOOL],
            "separate_reasoning": False,
            "reasoning_effort": "low",
            "max_tokens": 8,
        },
        {"messages": SAID, "regex": "[ab]{1,3}", "max_tokens": 8},
    ],
    "/v1/responses": [
        {"input": "abc", "max_output_tokens": 4},
        {"input": SAID, "stream": True, "max_output_tokens": 4},
    ],
    "/v1/messages": [
        {"messages": SAID, "max_tokens": 4},
        {"messages": SAID, "max_tokens": 4, "stream": True, "system": "x"},
    ],
    "/tokenize": [{"prompt": "abc"}, {"messages": SAID}],
    "/detokenize": [{"tokens": [65, 66]}],
}
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    10**400,
    0.5,
    -0.0,
    1e308,
    1e-320,
    "",
    " ",
    "a",
    "\x00",
    "é漢🎼",
    "\ud800",
    "x" * 100_000,
    [],
    {},
    [[]],
    [{}],
    {"": None},
    [None],
    ["a"] * 5000,
    list(range(3000)),
    [-1],
    [10**9],
    {"a": {"b": {"c": {}}}},
    "(a|aa)+$" * 50,
    "(" * 500,
    "[a-",
    "(?:a{1,1000}){1,1000}",
    {"$ref": "#"},
    {"type": "nonsense"},
    {"allOf": [{"$ref": "#/allOf/0"}]},
    {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": "a{1,200}"} for i in range(200)},
    },
    {"type": "array", "items": {"type": "array", "items": {"$ref": "#"}}},
    "root ::= root",
    "start: start",
    "<|im_start|>",
    "{{ 7*7 }}",
    "../../x",
]
RAW = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"NaN",
    b'{"prompt": NaN}',
    b'{"prompt": 1e999}',
    b"\xff\xfe",
    b"[" * 50_000,
    b'{"a":' * 20_000,
    b'"' + b"a" * 200_000,
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "prompt": 5}',
    b"\x00" * 1000,
    b'{"max_tokens": 1' + b"0" * 5000 + b"}",
]
NO_HTTP = [
    b"\x00" * 64,
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b'content-length: 500\r\n\r\n{"prompt": ',
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
]


@dataclasses.dataclass
class Seen:
    """Findings. `worst`: statuses of 500 and more other than 503 and 504, with the request."""

    statuses: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    worst: list[str] = dataclasses.field(default_factory=list)
    canaries: int = 0
    canary_wrong: list[str] = dataclasses.field(default_factory=list)
    canary_longest_s: float = 0.0
    pages_lost: int = 0
    same_engine: bool = True
    healthy: bool = True

    @property
    def faults(self) -> list[str]:
        found = [*self.worst[:5], *self.canary_wrong[:3]]
        if self.pages_lost:
            found.append(f"{self.pages_lost} pages did not come back")
        if not self.same_engine:
            found.append("the engine is another process")
        if not self.healthy:
            found.append("/health is not well")
        if not self.canaries:
            found.append("no canary was answered")
        return found


def mutated(rng: random.Random) -> tuple[str, Any]:
    """A path and a body that was right before something in it was spoiled."""
    path = rng.choice(list(BODIES))
    body = copy.deepcopy(rng.choice(BODIES[path]))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(holders(body))
        holder, key = rng.choice(places)
        turn = rng.random()
        if turn < 0.7:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif turn < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[rng.choice(FIELDS)] = copy.deepcopy(rng.choice(VALUES))
        if not isinstance(body, dict) or not body:
            break
    return path, body


OTHERS = """
    grammar choice structured_outputs guided_json guided_regex min_tokens stop_token_ids
    priority cache_salt slo user suffix best_of
    chat_template_kwargs continue_final_message prompt_logprobs top_logprobs thinking
    metadata instructions
"""
FIELDS = sorted(
    {name for bodies in BODIES.values() for body in bodies for name in body}.union(OTHERS.split())
)


def holders(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = (
        tree.keys()
        if isinstance(tree, dict)
        else range(len(tree))
        if isinstance(tree, list)
        else ()
    )
    for key in list(keys)[:20]:
        yield tree, key
        yield from holders(tree[key])


class Attack:
    def __init__(self, server: Running, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.seen = Seen()
        host, _, port = server.url.removeprefix("http://").partition(":")
        self.address = (host, int(port))

    async def run(self, requests: int) -> Seen:
        seen, engine = self.seen, self.server.engine.pid
        kinds = self.rng.choices(
            (self.spoiled, self.raw, self.no_http, self.leaver, self.drip),
            (75, 10, 5, 8, 2),
            k=requests,
        )
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.server.url, timeout=ANSWER_S, trust_env=False, limits=limits
        ) as http:
            self.http = http
            over = asyncio.Event()
            canary = asyncio.create_task(self.sing(over))
            gate = asyncio.Semaphore(AT_ONCE)

            async def one(kind: Any) -> None:
                async with gate:
                    await kind()

            await asyncio.gather(*(one(kind) for kind in kinds))
            over.set()
            await canary
        metric = self.server.metric
        poll(
            lambda: (
                metric("counterpoint_requests_running") + metric("counterpoint_requests_waiting")
                == 0
            ),
            60,
        )
        total, free, cached = (
            metric(f"counterpoint_kv_pages_{name}") for name in ("total", "free", "cached")
        )
        seen.pages_lost = int(total - free - cached)
        seen.same_engine = self.server.engine.pid == engine
        seen.healthy = self.server.get("/health").status_code == 200
        return seen

    async def sing(self, over: asyncio.Event) -> None:
        """The canary: something small, again and again."""
        while not over.is_set():
            started_s = time.monotonic()
            answer = await self.http.post(
                "/v1/completions", json={"prompt": "canary", "max_tokens": 6, "temperature": 0}
            )
            self.seen.canary_longest_s = max(
                self.seen.canary_longest_s, time.monotonic() - started_s
            )
            self.seen.canaries += 1
            if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] < 1:
                self.seen.canary_wrong.append(f"canary: {answer.status_code} {answer.text[:200]}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.05)

    def book(self, status: int | str, sent: str, answer: str = "") -> None:
        self.seen.statuses[str(status)] += 1
        if isinstance(status, int) and status >= 500 and status not in (503, 504):
            self.seen.worst.append(f"{status} for {sent[:300]}: {answer[:200]}")

    async def post(self, path: str, data: bytes, **headers: str) -> None:
        try:
            answer = await self.http.post(
                path, content=data, headers={"content-type": "application/json"} | headers
            )
        except httpx.TimeoutException:
            self.book("no answer", path)
            self.seen.worst.append(f"no answer within {ANSWER_S:g} s to {path} {data[:300]!r}")
            return
        except httpx.TransportError as error:
            self.book(type(error).__name__, path)
            return
        self.book(answer.status_code, f"{path} {data[:250]!r}", answer.text)

    async def spoiled(self) -> None:
        path, body = mutated(self.rng)
        await self.post(path, json.dumps(body).encode())  # lone surrogates go as escapes

    async def raw(self) -> None:
        kinds = (
            "application/json",
            "application/json",
            "text/plain",
            "application/json; charset=utf-16",
            "",
            "multipart/form-data",
        )
        await self.post(
            self.rng.choice(list(BODIES)),
            self.rng.choice(RAW),
            **{"content-type": self.rng.choice(kinds)},
        )

    async def no_http(self) -> None:
        """Whatever comes back, or that the line is closed, is fine; then we leave, if need be."""
        reader, writer = await asyncio.open_connection(*self.address)
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(self.rng.choice(NO_HTTP))
            await writer.drain()
            await asyncio.wait_for(reader.read(4096), 0.5)
        writer.close()
        self.book("no http", "")

    async def leaver(self) -> None:
        """Asks for much and hangs up."""
        path = self.rng.choice(("/v1/completions", "/v1/chat/completions"))
        body = {
            "max_tokens": 400,
            "ignore_eos": True,
            "n": self.rng.choice((1, 8)),
            "stream": self.rng.random() < 0.5,
        }
        body |= (
            {"prompt": "leave " * self.rng.randrange(1, 200)}
            if path == "/v1/completions"
            else {"messages": SAID}
        )
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(self.rng.uniform(0, 0.3)):
                await self.http.post(path, json=body)
        self.book("left", path)

    async def drip(self) -> None:
        """A body that comes byte by byte, and never ends."""
        _, writer = await asyncio.open_connection(*self.address)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\n\r\n"
        )
        with contextlib.suppress(OSError):
            for byte in b'{"prompt": "a':
                writer.write(bytes([byte]))
                await writer.drain()
        writer.close()
        self.book("dripped", "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="a model to serve, instead of the engine that echoes")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        serve = [COUNTERPOINT, "serve", str(asked.model), "--port", "0"]
        options: dict[str, Any] = (
            {"command": serve} if asked.model else {"system": "fake_engine:two_lane_system"}
        )
        server = Running(Path(folder) / "log", **options).wait_ready()
        try:
            seen = asyncio.run(Attack(server, asked.seed).run(asked.requests))
        finally:
            server.stop()
    print(
        f"{asked.requests} requests; "
        + ", ".join(f"{status}: {count}" for status, count in sorted(seen.statuses.items()))
    )
    print(f"{seen.canaries} canaries, the longest took {seen.canary_longest_s:.2f} s")
    print(
        f"same engine: {seen.same_engine}; healthy: {seen.healthy}; pages lost: {seen.pages_lost}"
    )
    print("\n".join(f"    {fault}" for fault in seen.faults))
    return 1 if seen.faults else 0


if __name__ == "__main__":
    sys.exit(main())
