"""Supervisor: the workers that a server starts.

Owns: starting them, and starting them again. Promises: a worker of a pool that ends is started
again, under its name and on its port, after a pause that grows while it fails at once; closing
leaves none behind, nor does the end of this process, however it ends.
Must not: know what a worker does, or talk to it (registry.py does). Where a worker runs is its
Launcher's business: a process of this machine (here), or an actor of a Ray cluster
(ray_launcher.py).
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

from counterpoint.config import ClusterConfig, Config
from counterpoint.disagg.peer_connection import Address
from counterpoint.serve.worker.wire import StartWorker
from counterpoint.types import Role

RESTART_PAUSE_S = (0.2, 30.0)  # before a worker is started again: at first, at most
STABLE_S = 60.0  # a worker that ran for so long is started again after the first pause
QUIT_S = 5.0

log = logging.getLogger("counterpoint")


class EngineFailed(Exception):
    """An engine could not start. `blame` is "user" if a setting is the cause."""

    def __init__(self, error: str, blame: str) -> None:
        super().__init__(error)
        self.blame = blame


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """A worker that should run. `port`: its last process's, for the next one."""

    name: str
    role: Role
    port: int = 0
    starts: int = 0


class Launcher(Protocol):
    """Where workers run, by name."""

    async def open(self, names: Sequence[str]) -> None:
        """Make room for all of them. Raises EngineFailed if there is none."""

    async def run(self, start: StartWorker) -> str:
        """One process of this worker, from its start to its end: how it ended."""
        ...

    def kill(self, name: str) -> None:
        """End its process, if there is one; its `run` then returns."""

    async def close(self) -> None:
        """Release all room. All workers have ended, or have been killed."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The workers of a server: a pool's, or its one engine. `config` is what each starts with;
    `system` names the function that builds an engine; `restarts`: one that ends is started
    again."""

    config: Config
    system: str
    slots: tuple[WorkerSlot, ...]
    launcher: Launcher
    in_pool: bool = True
    restarts: bool = True


class Supervisor:
    """`on_exit` is called with the name of a worker whose process has ended, and how."""

    def __init__(self, plan: WorkerPlan, on_exit: Callable[[str, str], None]) -> None:
        self.plan = plan
        self.launcher = plan.launcher
        self.on_exit = on_exit
        self.slots = {slot.name: slot for slot in plan.slots}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()

    async def open(self) -> None:
        """Raises EngineFailed if there is no room for them."""
        if self.slots:
            await self.launcher.open(tuple(self.slots))

    def start(self, frontend: Address, token: str) -> None:
        self._tasks = [
            asyncio.create_task(self._keep_running(slot, frontend, token))
            for slot in self.slots.values()
        ]

    def kill(self, name: str) -> None:
        if name in self.slots:
            self.launcher.kill(name)

    async def close(self) -> None:
        """Wait for the workers that were told to stop, and kill the rest."""
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

    async def _keep_running(self, slot: WorkerSlot, frontend: Address, token: str) -> None:
        """One process after another."""
        pause_s = RESTART_PAUSE_S[0]
        while not self._closing.is_set():
            began_s = time.monotonic()
            slot.starts += 1
            start = StartWorker(
                config=self.plan.config,
                system=self.plan.system,
                name=slot.name,
                role=slot.role,
                frontend=frontend,
                token=token,
                in_pool=self.plan.in_pool,
                port=slot.port,
            )
            how = await self.launcher.run(start)
            if self._closing.is_set():
                return
            self.on_exit(slot.name, how)
            if not self.plan.restarts:
                return
            pause_s = RESTART_PAUSE_S[0] if time.monotonic() - began_s >= STABLE_S else pause_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause_s)
            pause_s = min(2 * pause_s, RESTART_PAUSE_S[1])


def pool_slots(cluster: ClusterConfig) -> tuple[WorkerSlot, ...]:
    kinds = (
        ("prefill", cluster.prefill, Role.PREFILL),
        ("decode", cluster.decode, Role.DECODE),
        ("replica", cluster.replicas, Role.BOTH),
    )
    return tuple(
        WorkerSlot(f"{kind}-{n}", role) for kind, count, role in kinds for n in range(count)
    )


class ProcessLauncher:
    """Processes of this machine. `cores` are divided among them; None: each may use all."""

    def __init__(self, cores: Sequence[int] | None) -> None:
        self.cores = cores
        self._cores: dict[str, tuple[int, ...]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def open(self, names: Sequence[str]) -> None:
        shares = (
            divide_cores(self.cores, len(names)) if self.cores is not None else [()] * len(names)
        )
        self._cores = dict(zip(names, shares, strict=True))

    async def run(self, start: StartWorker) -> str:
        command = (sys.executable, "-m", "counterpoint.serve.worker.worker_process")
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        except OSError as error:  # no process, file or memory left now
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
    """Equal shares of neighbouring cores; with more workers than cores, several share one."""
    if workers > len(cores):
        return [(cores[worker % len(cores)],) for worker in range(workers)]
    edges = [worker * len(cores) // workers for worker in range(workers + 1)] if workers else [0]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(edges)]


def describe_exit(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
