"""Crew: the workers that there shall be.

Owns: starting them again. Promises: a worker that ends is started again, under its name and on its port, after a pause that grows
while it fails at once; closing leaves none behind, nor does the end of this process, however it ends.
Must not: know what a worker does, or talk to it (pool.py does); where it runs is a Places' matter: as a process of this machine
(Processes, here) or as an actor of a Ray cluster (ray_crew.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from counterpoint.config import Config
from counterpoint.device.cores import usable_cores
from counterpoint.disagg.peer_connection import Address
from counterpoint.serve.worker.engine_client import describe_exit
from counterpoint.serve.worker.worker_process import StartWorker
from counterpoint.types import Role

RESTART_PAUSE_S = (0.2, 30.0)  # before a worker is started again: at first, at most
STABLE_S = 60.0  # after so long a life, it counts as sound
QUIT_S = 5.0

log = logging.getLogger("counterpoint")


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """A worker that there shall be. `port`: its last process's, for the next one."""

    name: str
    role: Role
    port: int = 0
    starts: int = 0


class Launcher(Protocol):
    """Where workers run: a worker's name is its place."""

    async def open(self, names: Sequence[str]) -> None:
        """Make room for all of them. Raises EngineFailed if there is none."""

    async def run(self, start: StartWorker) -> str:
        """One process of this worker, from its start to its end: how it ended."""
        ...

    def kill(self, name: str) -> None:
        """End its process, if there is one; its `run` then returns."""

    async def close(self) -> None:
        """Give everything back. All workers have ended, or have been killed."""


class Supervisor:
    """`ended` is called with the name of a worker whose process has ended, and how."""

    def __init__(
        self, config: Config, system: str, places: Launcher, ended: Callable[[str, str], None]
    ) -> None:
        self.config = config
        self.system = system
        self.launcher = places
        self.on_exit = ended
        cluster = config.cluster
        kinds = (
            ("prefill", cluster.prefill, Role.PREFILL),
            ("decode", cluster.decode, Role.DECODE),
            ("replica", cluster.replicas, Role.BOTH),
        )
        self.slots = {
            f"{kind}-{n}": WorkerSlot(f"{kind}-{n}", role)
            for kind, count, role in kinds
            for n in range(count)
        }
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()

    async def open(self) -> None:
        """Raises EngineFailed if there is no room for them."""
        if self.slots:
            await self.launcher.open(tuple(self.slots))

    def start(self, front: Address, token: str) -> None:
        self._tasks = [
            asyncio.create_task(self._keep_running(post, front, token))
            for post in self.slots.values()
        ]

    def kill(self, name: str) -> None:
        """A worker that does not respond; it is started again."""
        if name in self.slots:
            self.launcher.kill(name)

    async def close(self) -> None:
        """Wait for those who were told to stop, and kill the rest."""
        self._closing.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=QUIT_S)
            for name in self.slots if late else ():
                self.launcher.kill(name)
            await asyncio.wait(self._tasks, timeout=QUIT_S)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.launcher.close()

    async def _keep_running(self, post: WorkerSlot, front: Address, token: str) -> None:
        """One process after another, for ever."""
        pause_s = RESTART_PAUSE_S[0]
        while not self._closing.is_set():
            began_s = time.monotonic()
            post.starts += 1
            start = StartWorker(
                config=self.config,
                system=self.system,
                name=post.name,
                role=post.role,
                frontend=front,
                token=token,
                port=post.port,
            )
            how = await self.launcher.run(start)
            if self._closing.is_set():
                return
            self.on_exit(post.name, f"worker {post.name} has ended ({how})")
            pause_s = RESTART_PAUSE_S[0] if time.monotonic() - began_s >= STABLE_S else pause_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause_s)
            pause_s = min(2 * pause_s, RESTART_PAUSE_S[1])


class ProcessLauncher:
    """Places on this machine, its cores divided among them."""

    def __init__(self, cores: int | None) -> None:
        self.most_cores = cores
        self._cores: dict[str, tuple[int, ...]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def open(self, names: Sequence[str]) -> None:
        self._cores = dict(
            zip(names, divide_cores(usable_cores(self.most_cores), len(names)), strict=True)
        )

    async def run(self, start: StartWorker) -> str:
        command = (sys.executable, "-m", "counterpoint.serve.worker.worker_process")
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        except OSError as error:  # no process, file or memory left: there may be some later
            return f"it could not be started: {error.strerror}"
        self._processes[start.name] = process
        rank = list(self._cores).index(start.name)
        start = msgspec.structs.replace(
            start, cores=self._cores[start.name], engines=len(self._cores), rank=rank
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        return describe_exit(await process.wait())

    def kill(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None and process.returncode is None:
            process.kill()

    async def close(self) -> None:
        pass


def divide_cores(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """The cores of each worker: equal shares of neighbours; with more workers than cores, several take turns on one."""
    if workers > len(cores):
        return [(cores[worker % len(cores)],) for worker in range(workers)]
    edges = [worker * len(cores) // workers for worker in range(workers + 1)] if workers else [0]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(edges)]
