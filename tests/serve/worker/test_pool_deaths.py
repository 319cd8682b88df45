"""Streams of a pool whose workers die or freeze, or whose clients leave."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
from pool_process import Pool
from serve_process import Reading, poll
from tiny_model import TINY

pytestmark = pytest.mark.slow

LONG = {"max_tokens": 3000, "temperature": 0.0, "ignore_eos": True, "stream": True}
LOST_S = 2.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a long context, so that an answer lasts."""
    path = tmp_path_factory.mktemp("long") / "config.json"
    path.write_text(json.dumps(TINY | {"max_position_embeddings": 8192}))
    return str(path)


@pytest.fixture(scope="module")
def start_pool(
    tmp_path_factory: pytest.TempPathFactory, model: str
) -> Iterator[Callable[..., Pool]]:
    """Starts pools that hold some long answers; afterwards nothing of them is left."""
    files = set(os.listdir("/dev/shm"))
    children = set(psutil.Process().children(recursive=True))
    started: list[Pool] = []

    def start(**flags: Any) -> Pool:
        room = {"max_context_tokens": 4096, "kv_pages": 8000, "worker_lost_s": LOST_S}
        started.append(Pool(tmp_path_factory.mktemp("pool") / "log", model, **room | flags))
        return started[-1].wait_ready()

    yield start
    for pool in started:
        assert pool.stop() == 0
    assert set(os.listdir("/dev/shm")) <= files, "a shared-memory file was left"
    poll(lambda: set(psutil.Process().children(recursive=True)) <= children, what="orphans")


@pytest.fixture(scope="module")
def pool(start_pool: Callable[..., Pool]) -> Pool:
    return start_pool(prefill=1, decode=2)


def is_well(pool: Pool) -> bool:
    return pool.get("/health").json() == {"status": "ok"}


@pytest.fixture(autouse=True)
def calm(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test finds a pool that is well, and leaves one that comes to be so, with nothing held."""
    yield
    pool: Pool = request.getfixturevalue("pool")
    poll(lambda: is_well(pool), 60, "a worker does not come back")
    poll(lambda: pool.at_rest, 20, "something is still held")


def stream(pool: Pool, prompt: str, **more: Any) -> Reading:
    return Reading(pool, LONG | {"prompt": prompt} | more)


def where_they_decode(pool: Pool) -> dict[str, float]:
    names = ("decode-0", "decode-1")
    return {
        name: pool.metric("counterpoint_worker_requests_running", worker=name) for name in names
    }


def wait_for_both(pool: Pool) -> None:
    poll(
        lambda: all(count >= 1 for count in where_they_decode(pool).values()),
        what="a decode worker has nothing to do",
    )


def test_a_killed_decode_worker_ends_its_streams_and_no_others(pool: Pool):
    streams = [stream(pool, f"number {n} of four ") for n in range(4)]
    wait_for_both(pool)
    before = pool.worker("decode-0")
    before.kill()
    ends = [one.end()[-1] for one in streams]
    failed = [end for end in ends if end != "[DONE]"]
    assert failed and len(failed) < 4, "all of them or none ended with the worker"
    assert all("decode-0 was lost" in end["error"]["message"] for end in failed)
    poll(lambda: is_well(pool), 60, "the worker does not come back")
    assert pool.worker("decode-0").pid != before.pid
    assert pool.metric("counterpoint_worker_starts_total", worker="decode-0") == 2
    both = [stream(pool, f"once again {n} ", max_tokens=500) for n in range(4)]
    assert all(one.end()[-1] == "[DONE]" for one in both), "the restarted worker is of no use"


def test_a_pool_without_a_worker_is_degraded_and_serves(pool: Pool):
    pool.worker("decode-1").kill()
    answer = poll(
        lambda: health if (health := pool.get("/health")).json()["status"] != "ok" else None
    )
    assert answer.status_code == 200 and answer.json() == {
        "status": "degraded",
        "missing": ["decode-1"],
    }
    assert pool.metric("counterpoint_worker_up", worker="decode-1") == 0
    assert stream(pool, "meanwhile ", max_tokens=50).end()[-1] == "[DONE]"


def test_a_killed_prefill_worker_costs_time_alone(pool: Pool):
    """Nobody has a token of theirs yet: the requests are prefilled elsewhere."""
    streams: list[Any] = []
    prompts = [f"{n} " + "a long way to the first token " * 60 for n in range(6)]
    body = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            asked = [
                asyncio.create_task(
                    http.post(f"{pool.url}/v1/completions", json=body | {"prompt": p})
                )
                for p in prompts
            ]
            while not await asyncio.to_thread(
                pool.metric, "counterpoint_worker_requests_running", worker="prefill-0"
            ):
                assert not all(task.done() for task in asked)
            pool_worker.kill()
            return await asyncio.gather(*asked)

    pool_worker = pool.worker("prefill-0")
    answers = asyncio.run(ask_all())
    assert all(answer.is_success for answer in answers), [answer.text for answer in answers]
    assert all(answer.json()["usage"]["completion_tokens"] == 8 for answer in answers), streams


def test_a_decode_worker_that_stands_still_is_given_up(pool: Pool):
    streams = [stream(pool, f"and now number {n} ") for n in range(4)]
    wait_for_both(pool)
    worker = pool.worker("decode-1")
    worker.suspend()
    ends = [one.end()[-1] for one in streams]
    failed = [end for end in ends if end != "[DONE]"]
    assert failed and len(failed) < 4
    assert all("decode-1 was lost" in end["error"]["message"] for end in failed)
    poll(
        lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE,
        what="it stands there for ever",
    )


def test_without_any_worker_it_is_not_healthy(pool: Pool):
    for name in ("prefill-0", "decode-0", "decode-1"):
        pool.worker(name).kill()
    answer = poll(lambda: health if (health := pool.get("/health")).status_code == 503 else None)
    assert answer.json()["status"] in ("dead", "loading")
    refused = pool.post("/v1/completions", {"prompt": "anybody?"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_unavailable"


def test_clients_that_leave_while_kv_moves_leak_nothing(pool: Pool):
    """Each at another moment: while it waits, is prefilled, handed over, decoded."""
    body = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}

    async def ask_and_leave(http: httpx.AsyncClient, n: int) -> bool:
        prompt = f"{n} " + "to be left behind " * (10 + n % 40)
        asked = asyncio.create_task(
            http.post(f"{pool.url}/v1/completions", json=body | {"prompt": prompt})
        )
        done, _ = await asyncio.wait((asked,), timeout=0.004 * n)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        return not done

    async def ask_all() -> list[bool]:
        async with httpx.AsyncClient(
            timeout=60, trust_env=False, limits=httpx.Limits(max_connections=200)
        ) as http:
            return await asyncio.gather(*(ask_and_leave(http, n) for n in range(120)))

    left = asyncio.run(ask_all())
    assert sum(left) > 30, "hardly one has left early"
    assert stream(pool, "one who stays ", max_tokens=20).end()[-1] == "[DONE]"
