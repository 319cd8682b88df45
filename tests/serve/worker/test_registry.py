"""Workers that join from elsewhere: `serve --cluster-listen` and `worker --join`."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pool_process import FLAGS, Pool, text_of
from serve_process import ROOT, Reading, poll

LONG = {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True, "stream": True}
WORKER_FLAGS = {
    name: value for name, value in FLAGS.items() if name not in ("port", "local-tokens")
}


class Worker:
    """`counterpoint worker` as a process."""

    def __init__(
        self, log: Path, model: str, front: str, role: str, token: str, **flags: Any
    ) -> None:
        given = (
            WORKER_FLAGS
            | {"join": front, "role": role, "name": role}
            | {k.replace("_", "-"): str(v) for k, v in flags.items()}
        )
        words = [word for name, value in given.items() for word in (f"--{name}", value)]
        self.log = log
        env = os.environ | {"PYTHONPATH": str(ROOT), "COUNTERPOINT_CLUSTER_TOKEN": token}
        with log.open("wb") as out:
            command = [sys.executable, "-m", "counterpoint", "worker", model, *words]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)

    def ends(self) -> tuple[int, str]:
        """Its exit status, and what it said."""
        return self.process.wait(60), self.log.read_text(errors="replace")


@pytest.fixture
def start(tmp_path: Path, tiny: str) -> Iterator[Callable[..., Any]]:
    """Starts a front (no role), or a worker; nothing of them is left."""
    children = set(psutil.Process().children(recursive=True))
    processes: list[subprocess.Popen[bytes]] = []

    def start(role: str = "", **options: Any) -> Any:
        log = tmp_path / f"log{len(processes)}"
        token = tmp_path / "token"
        token.write_text("a secret\n")
        if role:
            one: Any = Worker(
                log, tiny, role=role, token=options.pop("token", "a secret"), **options
            )
        else:
            one = Pool(log, tiny, cluster_token_file=str(token), **options)
        processes.append(one.process)
        return one

    yield start
    for process in processes:
        process.kill()
        process.wait()
    poll(lambda: set(psutil.Process().children(recursive=True)) <= children, what="orphans")


def address_of(front: Pool) -> str:
    found = poll(lambda: re.search(r"waiting for workers at (\S+)", front.said()), 60)
    return found[1]


def test_workers_join_are_refused_leave_and_find_a_new_front(start):
    front: Pool = start(cluster_listen="127.0.0.1:0")
    address = address_of(front)
    workers = [start(role, front=address) for role in ("prefill", "decode")]
    front.wait_ready()
    poll(lambda: front.metric("counterpoint_worker_up") == 2, 60, "a worker has not joined")
    whole = Reading(front, LONG | {"prompt": "over two workers "}).end()
    assert (
        whole[-1] == "[DONE]"
        and front.metric("counterpoint_handoffs_ended_total", outcome="adopted") == 1
    )

    thief = start("both", front=address, token="a guess")
    other = start("both", front=address, weights_seed=5)
    status, said = thief.ends()
    assert status == 2 and "token" in said and "Traceback" not in said
    status, said = other.ends()
    assert status == 2 and "weights differs" in said and "Traceback" not in said

    front.process.kill()
    front.process.wait()
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))) as nobody:
        nobody.settimeout(60)
        for _ in range(8):  # each worker asks and asks
            nobody.accept()[0].close()
    again: Pool = start(cluster_listen=address)
    again.wait_ready()
    poll(
        lambda: again.metric("counterpoint_worker_up") == 2,
        60,
        "a worker does not find the new front",
    )
    assert text_of(Reading(again, LONG | {"prompt": "over two workers "}).end()) == text_of(whole)

    stream = Reading(again, LONG | {"prompt": "a last one "})
    workers[1].process.send_signal(signal.SIGTERM)
    assert stream.end()[-1] == "[DONE]", "a worker left before it had finished"
    status, said = workers[1].ends()
    assert status == 0
    missed = [
        line.partition("no front at")[2] for line in said.splitlines() if "no front at" in line
    ]
    assert missed and all(one != other for one, other in itertools.pairwise(missed)), (
        "the same is said each second"
    )
    assert again.get("/health").status_code == 200, "one worker does it all"
    assert Reading(again, LONG | {"prompt": "on one worker "}).end()[-1] == "[DONE]"
    assert again.stop() == 0
