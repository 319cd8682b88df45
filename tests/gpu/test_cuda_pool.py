"""`serve --prefill 1 --decode 1 --device cuda`: two processes on one GPU equal a single engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cuda_rig import HAS_GPU
from pool_process import Pool, answers, mixed_requests, others
from serve_process import poll
from tiny_model import TINY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")]

BODIES = mixed_requests(96)
ON_GPU = {
    "device": "cuda",
    "dtype": "auto",
    "page-tokens": 16,
    "kv-pages": 2000,
    "max-context-tokens": 8192,
    "batch-invariant": True,
}
ONE_ONE = {"prefill": 1, "decode": 1}
POOLS: dict[str, dict[str, Any]] = {
    "cuda-ipc": {},
    "layers": {"policy": "serial", "layer-group": 1, "kv-grain": "layer", "transport": "cuda-ipc"},
    "tcp": {"transport": "tcp"},
    "shm": {"transport": "shm"},
}


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[dict[str, Pool]]:
    """One engine, and the pools, started together. Afterwards none of their processes and files is
    left."""
    files = set(os.listdir("/dev/shm"))
    model = folder / "config.json"
    model.write_text(json.dumps(TINY | {"num_hidden_layers": 4, "max_position_embeddings": 8192}))
    servers = {"one": Pool(folder / "one", str(model), **ON_GPU)}
    for name, flags in POOLS.items():
        servers[name] = Pool(
            folder / name,
            str(model),
            **ON_GPU,
            **ONE_ONE,
            **flags,
            timeline=str(folder / f"{name}.json"),
        )
    try:
        for server in servers.values():
            server.wait_ready()
        yield servers
        assert all(server.stop() == 0 for server in servers.values()), [
            server.said() for server in servers.values()
        ]
        assert set(os.listdir("/dev/shm")) <= files, "a shared-memory file was left"
    finally:
        for server in servers.values():
            if server.process.poll() is None:
                server.process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pools")


@pytest.fixture(scope="module")
def truth(running: dict[str, Pool]) -> list[Any]:
    return untied(answers(running["one"], BODIES))


def untied(found: list[Any]) -> list[Any]:
    """Keep only the best alternative's log-probability: in 16 bits, several tokens may tie."""
    for choices, _ in found:
        for choice in choices:
            if choice["logprobs"] is not None:
                tops = choice["logprobs"]["top_logprobs"] or []
                choice["logprobs"]["top_logprobs"] = [
                    max(top.values()) if top else None for top in tops
                ]
    return found


@pytest.mark.parametrize("name", POOLS)
def test_pool_outputs_equal_a_single_engine(running: dict[str, Pool], truth: list[Any], name: str):
    pool = running[name]

    def tried() -> bool:
        """Routing depends on load, so rounds continue until enough requests were handed over and
        forked."""
        found = untied(answers(pool, BODIES))
        wrong = others(found, truth)
        assert not wrong, [(BODIES[number], found[number], truth[number]) for number in wrong[:2]]
        adopted = pool.metric("counterpoint_handoffs_ended_total", outcome="adopted")
        return adopted > 60 and pool.metric("counterpoint_routes_total", reason="fork") > 5

    poll(tried, 120, "hardly a request was handed over, or forked")
    poll(lambda: pool.at_rest, what="the pool does not come to rest")
    kind = name if name in ("tcp", "shm") else "cuda-ipc"
    assert (
        pool.metric("counterpoint_handoff_links", transport=kind)
        == pool.metric("counterpoint_handoff_links")
        >= 2
    )
    assert ("through host memory" in pool.said()) == (kind != "cuda-ipc"), (
        "a slow way must be told, and no other"
    )


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_killed_worker_leaves_no_state_on_the_other(
    running: dict[str, Pool], truth: list[Any], victim: str
):
    pool = running["cuda-ipc"]
    before = pool.worker(victim)
    body = {
        "prompt": "a long answer to a long question",
        "max_tokens": 4000,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    with ThreadPoolExecutor(3) as readers:
        streams = [
            readers.submit(pool.events, body | {"prompt": f"{n} {body['prompt']}"})
            for n in range(3)
        ]
        poll(
            lambda: pool.metric("counterpoint_worker_requests_running", worker="decode-0") >= 3,
            what="nothing is decoded",
        )
        before.kill()
        ends = [stream.result(90)[-1] for stream in streams]
    if victim == "decode-0":
        assert all(
            end != "[DONE]" and "decode-0 was lost" in end["error"]["message"] for end in ends
        ), ends
    else:
        assert ends == ["[DONE]"] * 3, "an answer that is being decoded needs no prefill worker"
    poll(
        lambda: pool.get("/health").json() == {"status": "ok"}, 90, "the worker does not come back"
    )
    poll(lambda: pool.at_rest, what="something is still held")
    assert pool.worker(victim).pid != before.pid
    assert not others(untied(answers(pool, BODIES[:24])), truth[:24]), (
        "the restarted worker answers otherwise"
    )


def test_kv_granularity_follows_the_flag(running: dict[str, Pool], truth: list[Any], folder: Path):
    """Runs last: it stops the two pools, which then write their timelines."""
    for name in ("layers", "cuda-ipc"):
        assert running[name].stop() == 0
    assert groups_sent(folder / "layers.prefill-0.json") >= {
        f"[{layer}, {layer + 1})" for layer in range(4)
    }
    assert groups_sent(folder / "cuda-ipc.prefill-0.json") == {"[0, 4)"}


def groups_sent(timeline: Path) -> set[str]:
    """The layer groups in which KV was sent."""
    return {
        event["args"]["layers"]
        for event in json.loads(timeline.read_text())["traceEvents"]
        if event["ph"] == "b"
    }
