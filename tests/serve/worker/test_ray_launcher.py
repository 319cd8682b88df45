"""A pool's workers in a Ray cluster (`serve --ray-address`): in a new cluster, and in a running one
of two nodes."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pool_process import Pool
from serve_process import ROOT, Reading, poll

from counterpoint.config import Config, ConfigError
from counterpoint.serve.worker.ray_launcher import RayLauncher, bundle

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra cluster)"
)
GREEDY = {
    "prompt": "to be continued elsewhere ",
    "max_tokens": 8,
    "temperature": 0.0,
    "ignore_eos": True,
}
WELL = {"status": "ok"}


def test_each_worker_has_an_even_share():
    assert bundle([{"CPU": 16.0}], 4, "cpu", None) == {"CPU": 4}
    assert bundle([{"CPU": 16.0}, {"CPU": 4.0}], 3, "cpu", None) == {"CPU": 5}, (
        "six each would be two on the first machine"
    )
    assert bundle([{"CPU": 2.0}], 4, "cpu", None) == {"CPU": 0.5}
    assert bundle([{"CPU": 16.0}], 4, "cpu", 3) == {"CPU": 3}
    assert bundle([{"CPU": 16.0, "GPU": 1.0}, {"CPU": 16.0, "GPU": 1.0}], 2, "auto", None) == {
        "CPU": 16,
        "GPU": 1,
    }
    assert bundle([{"CPU": 16.0, "GPU": 1.0}], 2, "auto", None) == {"CPU": 8}
    assert bundle([{"CPU": 16.0, "GPU": 2.0}], 2, "cpu", None) == {"CPU": 8}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ray_address": "auto"}, "no workers"),
        ({"ray_address": "ray://head:10001", "replicas": 1}, "HOST:PORT"),
        ({"ray_address": "head", "replicas": 1}, "HOST:PORT"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match="ray_address") as caught:
        Config().replace(**settings)
    assert says in str(caught.value)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # what Python itself does for "not here"
    with pytest.raises(ConfigError, match=r"pip install 'counterpoint\[cluster\]'"):
        RayLauncher(Config().replace(ray_address="local", replicas=1))


@pytest.fixture
def start(tmp_path: Path, tiny: str) -> Iterator[Any]:
    """Starts fronts; nothing of them is left."""
    started: list[Pool] = []

    def start(**flags: Any) -> Pool:
        started.append(Pool(tmp_path / f"log{len(started)}", tiny, **flags))
        return started[-1]

    yield start
    for pool in started:
        if pool.process.poll() is None:
            pool.process.kill()
            pool.process.wait()


def answer(pool: Pool) -> str:
    response = pool.post("/v1/completions", GREEDY)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def is_well(pool: Pool) -> bool:
    return pool.get("/health").json() == WELL


def gone(processes: list[psutil.Process]) -> bool:
    return not [
        one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    ]


@needs_ray
def test_a_killed_worker_comes_back_and_nothing_is_left(start):
    pool: Pool = start(prefill=1, decode=1, ray_address="local").wait_ready()
    before = answer(pool)
    assert pool.metric("counterpoint_handoffs_ended_total", outcome="adopted") == 1
    worker = pool.worker("decode-0")
    assert worker.name().startswith("ray::"), "it is no actor"
    worker.kill()
    poll(lambda: not is_well(pool))
    assert answer(pool) == before, "the other one does it all"
    poll(lambda: is_well(pool), 60, "it does not come back")
    assert (
        pool.worker("decode-0").pid != worker.pid
        and pool.metric("counterpoint_worker_starts_total", worker="decode-0") == 2
    )
    assert answer(pool) == before
    poll(lambda: pool.at_rest, 20, "something is still held")
    all_of_it = psutil.Process(pool.process.pid).children(recursive=True)
    assert any(process.name() == "raylet" for process in all_of_it)
    assert pool.stop() == 0
    assert "Traceback" not in pool.said() and "SIGTERM received" not in pool.said()
    poll(lambda: gone(all_of_it), 20, "processes are left")


class Node:
    """`ray start`, as a process with what it starts."""

    def __init__(self, log: Path, *words: str) -> None:
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            "--num-cpus=2",
            "--disable-usage-stats",
            *words,
        ]
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )

    def wait_ready(self) -> Node:
        poll(
            lambda: "--block" in self.log.read_text() or self.process.poll() is not None,
            60,
            "a Ray node does not start",
        )
        assert self.process.poll() is None, self.log.read_text()
        return self

    def kill(self) -> None:
        """All at once, as with a machine that loses power."""
        tree = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]
        for process in tree:
            process.kill()
        self.process.wait()
        poll(lambda: gone(tree))


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[Node]]]:
    """A cluster of two nodes on this machine, and its address; its processes carry a token."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    folder = tempfile.mkdtemp(
        prefix="ray-", dir="/tmp"
    )  # pytest's are too long for the sockets in it
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    here, small = "--node-ip-address=127.0.0.1", f"--object-store-memory={80 << 20}"
    nodes = []
    try:
        port = address.rpartition(":")[2]
        words = (
            "--head",
            f"--port={port}",
            f"--temp-dir={folder}",
            "--include-dashboard=false",
            here,
            small,
        )
        nodes.append(Node(tmp_path / "head", *words).wait_ready())
        nodes.append(Node(tmp_path / "second", f"--address={address}", here, small).wait_ready())
        yield address, nodes
    finally:
        for node in reversed(nodes):
            if node.process.poll() is None:
                node.kill()
        shutil.rmtree(folder, ignore_errors=True)


def node_of(worker: psutil.Process, nodes: list[Node]) -> int:
    parents = {parent.pid for parent in worker.parents()}
    return next(number for number, node in enumerate(nodes) if node.process.pid in parents)


@needs_ray
def test_a_lost_head_does_not_end_the_front(
    start, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """Nodes end 5 s after its loss, and their workers with them; the server logs it and stops
    cleanly."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    address, (head, other) = request.getfixturevalue("nodes")
    pool: Pool = start(replicas=2, cores=1, ray_address=address).wait_ready()
    before = answer(pool)
    stream = Reading(pool, GREEDY | {"max_tokens": 100, "stream": True}, begun=False)
    head.kill()
    poll(lambda: not is_well(pool))
    assert stream.end()[-1] == "[DONE]" or "was lost" in stream.events[-1]["error"]["message"]
    assert answer(pool) == before, "the worker of the other node lives"
    poll(lambda: pool.get("/health").status_code == 503, 60, "workers outlive their node")
    assert pool.process.poll() is None, "the front has gone with the head"
    poll(lambda: "Ray does not respond" in pool.said(), 40, "nobody is told")
    assert pool.post("/v1/completions", GREEDY).status_code == 503
    pool.process.send_signal(signal.SIGTERM)
    assert pool.process.wait(40) == 0
    other.kill()


@needs_ray
def test_workers_move_from_a_dead_node_and_die_with_their_front(start, nodes):
    address, both = nodes
    pool: Pool = start(replicas=2, cores=1, ray_address=address).wait_ready()
    before = answer(pool)
    where = {name: node_of(pool.worker(name), both) for name in ("replica-0", "replica-1")}
    assert sorted(where.values()) == [0, 1], "they are not spread over the nodes"
    moved = next(name for name, number in where.items() if number == 1)
    both[1].kill()
    poll(lambda: not is_well(pool))
    assert answer(pool) == before
    poll(lambda: is_well(pool), 90, "the worker does not come back on the other node")
    assert node_of(pool.worker(moved), both) == 0
    workers = [pool.worker(name) for name in where]
    pool.process.kill()
    pool.process.wait()
    poll(lambda: gone(workers), 20, "workers outlive their front")
    assert both[0].process.poll() is None, "the cluster has gone with the front"
