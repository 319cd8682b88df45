"""Many mixed requests, a third of them aborted at random moments.

    python tests/support/soak_aborts.py --requests 1000

Each policy gets a server of its own and the same load. Reported of each: whole answers, answers
begun before their client left, pages lost, text of other requests, and how the processes' memory
grew from the first quarter to the end. With `--model NAME`, `counterpoint serve NAME` answers in
place of the fake engine, and texts are compared with the same requests' answers alone.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import psutil
from serve_process import Running, poll

POLICIES = ("serial", "chunked", "multiplex", "auto")
COUNTERPOINT = str(Path(sys.executable).with_name("counterpoint"))
AT_ONCE = 32
LEAVE = 0.48  # of the clients mean to; some have their answer before: about a third leaves
PROMPTS = 48


@dataclasses.dataclass
class Seen:
    """What a load has shown. `foreign`: texts that were not the request's own."""

    whole: int = 0
    left: int = 0
    refused: int = 0
    foreign: list[str] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)  # bytes resident, both processes
    pages_lost: int = 0
    same_engine: bool = True

    @property
    def grown_bytes(self) -> int:
        """From the highest of the first quarter to the highest of the last."""
        quarter = max(1, len(self.memory) // 4)
        return max(self.memory[-quarter:]) - max(self.memory[:quarter])

    def faults(self, most_grown_bytes: int) -> list[str]:
        found = [f"foreign text: {text}" for text in self.foreign[:3]]
        if self.pages_lost:
            found.append(f"{self.pages_lost} pages did not come back")
        if not self.same_engine:
            found.append("the engine is another process")
        if self.grown_bytes > most_grown_bytes:
            found.append(f"memory grew by {self.grown_bytes >> 20} MiB")
        return found


def prompts(seed: int, longest: int) -> list[str]:
    """Some share a prefix, and so pages; lengths vary by a factor of a hundred."""
    rng = random.Random(seed)
    shared = "".join(rng.choice("abcdefgh ") for _ in range(longest // 3))
    found = []
    for number in range(PROMPTS):
        length = int(longest ** rng.uniform(0.4, 1.0))
        own = f"<{number}> " + "".join(rng.choice("ijklmnop ") for _ in range(length))
        found.append(
            (shared[: rng.randrange(len(shared))] if rng.random() < 0.5 else "") + own[:length]
        )
    return found


def bodies(count: int, seed: int, longest: int, longest_answer: int) -> list[dict[str, Any]]:
    """Greedy requests of many kinds; what they have in common is that their text is known."""
    rng = random.Random(seed)
    pool = prompts(seed, longest)
    found = []
    for _ in range(count):
        body: dict[str, Any] = {"prompt": rng.choice(pool), "temperature": 0, "ignore_eos": True}
        body["max_tokens"] = rng.choice((1, 2, 5, 20, 60, longest_answer))
        body["stream"] = rng.random() < 0.7
        if rng.random() < 0.2:
            body["n"] = 2
        if rng.random() < 0.2:
            body["logprobs"] = 1
        if rng.random() < 0.3:
            body["priority"] = rng.randrange(-2, 3)
        if rng.random() < 0.3:
            body["cache_salt"] = rng.choice("ab")
        found.append(body)
    return found


def client_of(server: Running) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=server.url, timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None)
    )


async def ask(
    http: httpx.AsyncClient, body: dict[str, Any], leave_after: float | None
) -> tuple[list[str], bool]:
    """The texts so far, by choice, and whether the answer was whole. `leave_after`: seconds until
    the client hangs up."""
    texts = [""] * body.get("n", 1)
    try:
        async with asyncio.timeout(leave_after):
            if not body["stream"]:
                answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
                return [choice["text"] for choice in answer["choices"]], True
            async with http.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return texts, True
                    if line:
                        for choice in json.loads(line.removeprefix("data: "))["choices"]:
                            texts[choice["index"]] += choice["text"]
    except TimeoutError:
        pass
    return texts, False


async def play(
    server: Running, load: list[dict[str, Any]], seed: int, expect: dict[str, str]
) -> Seen:
    """`expect`: the longest answer to each prompt; shorter ones are its beginnings."""
    rng, seen = random.Random(seed), Seen()
    engine = server.engine
    processes = [psutil.Process(server.process.pid), engine]
    gate = asyncio.Semaphore(AT_ONCE)
    plan = [(body, rng.expovariate(1 / 0.15) if rng.random() < LEAVE else None) for body in load]

    async with httpx.AsyncClient(
        base_url=server.url, timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as http:

        async def one(body: dict[str, Any], leave_after: float | None) -> None:
            async with gate:
                texts, whole = await ask(http, body, leave_after)
            seen.whole += whole
            seen.left += not whole
            for text in texts:
                known = expect[body["prompt"]]
                if not known.startswith(text):
                    seen.foreign.append(f"{text[:60]!r} for {body['prompt'][:40]!r}")
            seen.memory.append(sum(process.memory_info().rss for process in processes))

        await asyncio.gather(*(one(body, leave_after) for body, leave_after in plan))
    poll(
        lambda: (
            server.metric("counterpoint_requests_running")
            + server.metric("counterpoint_requests_waiting")
            == 0
        )
    )
    total, free, cached = (
        server.metric(f"counterpoint_kv_pages_{name}") for name in ("total", "free", "cached")
    )
    seen.pages_lost = int(total - free - cached)
    seen.same_engine = server.engine.pid == engine.pid
    return seen


def echoed(longest_answer: int):
    """The fake engine's answer: the prompt again and again, with a full stop between."""

    def answer(prompt: str) -> str:
        said = prompt + "."
        return (said * (longest_answer // len(said) + 1))[:longest_answer]

    return answer


async def alone(server: Running, pool: list[str], longest_answer: int) -> dict[str, str]:
    async with client_of(server) as http:
        body = {"temperature": 0, "ignore_eos": True, "max_tokens": longest_answer, "stream": False}
        return {prompt: (await ask(http, body | {"prompt": prompt}, None))[0][0] for prompt in pool}


def soak(
    server: Running, requests: int, seed: int, longest: int, longest_answer: int, model: bool
) -> Seen:
    load = bodies(requests, seed, longest, longest_answer)
    pool = sorted({body["prompt"] for body in load})
    echo = echoed(longest_answer)
    expect = (
        asyncio.run(alone(server, pool, longest_answer))
        if model
        else {prompt: echo(prompt) for prompt in pool}
    )
    return asyncio.run(play(server, load, seed, expect))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="a model to serve, instead of the engine that echoes")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--longest", type=int, default=1500, help="characters of a prompt")
    parser.add_argument("--longest-answer", type=int, default=200)
    asked = parser.parse_args()
    broken = 0
    print(
        f"{'policy':10} {'whole':>6} {'left':>6} {'foreign':>8} "
        f"{'pages lost':>11} {'memory grew':>12}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for policy in asked.policies.split(","):
            serve = [
                str(Path(sys.executable).with_name("counterpoint")),
                "serve",
                str(asked.model),
                "--port",
                "0",
                "--policy",
                policy,
            ]
            options = (
                {"command": serve}
                if asked.model
                else {"system": "fake_engine:two_lane_system", "policy": policy}
            )
            server = Running(Path(folder) / policy, **options).wait_ready()
            try:
                seen = soak(
                    server,
                    asked.requests,
                    asked.seed,
                    asked.longest,
                    asked.longest_answer,
                    bool(asked.model),
                )
            finally:
                server.stop()
            lost, grown = seen.pages_lost, seen.grown_bytes / 2**20
            print(
                f"{policy:10} {seen.whole:6} {seen.left:6} {len(seen.foreign):8} "
                f"{lost:11} {grown:8.1f} MiB"
            )
            faults = seen.faults(64 << 20)
            broken += len(faults)
            print("".join(f"    {fault}\n" for fault in faults), end="", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
