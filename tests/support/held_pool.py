"""A pool whose engines can be held, so that a signal meets a worker in a named handoff state."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest
from held_engine import FOLDER, POINTS
from pool_process import FLAGS, Pool, text_of
from serve_process import HERE, Reading, Running, poll
from tiny_model import TINY

PROMPT = "what is prefilled here is decoded there, and all of it is told to the client " * 3
ASKED = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "stream": True}

# state -> (points at which engines are held, state on the prefill worker, on the decode worker)
STATES = {
    "queued": (("reserving", "prefilling"), "running", "queued"),
    "reserved": (("prefilling",), "streaming", "reserved"),
    "parked": (("reserving",), "parked", "queued"),
    "decoding": (("decoding",), "", ""),
}


class HeldPool(Pool):
    """A pool over the engines of held_engine.py."""

    def __init__(self, folder: Path, model: str, system: str = "system", **settings: Any) -> None:
        numbers = {
            name.replace("-", "_"): int(value) if value.isdigit() else value
            for name, value in FLAGS.items()
        }
        self.folder = folder
        self.locks: dict[str, TextIO] = {}
        self.before = 0.0  # handoffs adopted before it was held
        for point in POINTS:
            (folder / point).touch()
        command = [
            sys.executable,
            str(HERE / "held_engine.py"),
            model,
            json.dumps(numbers | settings),
            system,
        ]
        Running.__init__(self, folder / "log", command)

    def hold(self, *points: str) -> None:
        self.before = self.adopted()
        for point in points:
            file = self.locks[point] = (self.folder / point).open()
            fcntl.flock(file, fcntl.LOCK_EX)

    def let_go(self) -> None:
        for file in self.locks.values():
            file.close()
        self.locks.clear()

    def adopted(self) -> float:
        return self.sum_of("handoffs_ended_total", outcome="adopted")

    def sum_of(self, name: str, **labels: str) -> float:
        """Of a counter, which may not be there yet."""
        try:
            return self.metric(f"counterpoint_{name}", **labels)
        except AssertionError:
            return 0.0

    def handoffs(self, worker: str, state: str) -> float:
        return self.sum_of("handoffs", worker=worker, state=state)

    def at(self, state: str) -> str:
        """The decode worker of the one handoff that is under way, once that stands in `state`."""
        _, here, there = STATES[state]
        names = ("decode-0", "decode-1")
        if not here:
            poll(lambda: self.adopted() > self.before, what="nothing is adopted")
            return poll(
                lambda: next(
                    (
                        n
                        for n in names
                        if self.metric("counterpoint_worker_requests_running", worker=n)
                    ),
                    "",
                )
            )
        poll(lambda: self.handoffs("prefill-0", here) == 1, what=f"no handoff is {here}")
        return poll(
            lambda: next((name for name in names if self.handoffs(name, there)), ""),
            what=f"no handoff is {there}",
        )

    def well(self) -> bool:
        return self.get("/health").json() == {"status": "ok"}


@contextlib.contextmanager
def held_pool(folder: Path, **settings: Any) -> Iterator[HeldPool]:
    """One prefill worker, two that decode. Afterwards no file and no process of it is left."""
    files, children = set(os.listdir("/dev/shm")), set(psutil.Process().children(recursive=True))
    (folder / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 8192}))
    room = {"kv_pages": 400, "max_context_tokens": 1024, "prefix_cache": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        pool = HeldPool(folder, str(folder / "config.json"), prefill=1, decode=2, **room | settings)
        try:
            pool.wait_ready()
            yield pool
            assert pool.stop() == 0
        finally:
            pool.let_go()
            if pool.process.poll() is None:
                pool.process.kill()
                pool.process.wait()
    assert set(os.listdir("/dev/shm")) <= files, "a shared-memory file was left"
    poll(lambda: set(psutil.Process().children(recursive=True)) <= children, what="orphans")


def asked(pool: Pool, **more: Any) -> Reading:
    return Reading(pool, ASKED | more, begun=False)


def ends_whole(stream: Reading, whole: str) -> None:
    events = stream.end()
    assert events[-1] == "[DONE]", events[-1]
    assert text_of(events) == whole
