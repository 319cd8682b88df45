"""Crew: the workers of this machine, as processes.

Owns: their processes, their cores, starting them again. Promises: a worker that ends is started again, under its name and on its
port, after a pause that grows while it fails at once; none outlives this process, however that ends; closing leaves none behind.
Must not: know what a worker does, or talk to it (pool.py does).
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

import msgspec

from counterpoint.cluster.control import Address
from counterpoint.config import Config
from counterpoint.device.cores import usable_cores
from counterpoint.serve.client import exit_words
from counterpoint.serve.worker import Start
from counterpoint.types import Role

PAUSE_S = (0.2, 30.0)  # before a worker is started again: at first, at most
SETTLED_S = 60.0  # after so long a life, it counts as sound
QUIT_S = 5.0

log = logging.getLogger("counterpoint")


@dataclass(slots=True, eq=False)
class Post:
    """A worker that there shall be. `port`: its last process's, for the next one."""

    name: str
    role: Role
    cores: tuple[int, ...]
    port: int = 0
    starts: int = 0
    process: asyncio.subprocess.Process | None = None


class Crew:
    """`ended` is called with the name of a worker whose process has ended, and how."""

    def __init__(self, config: Config, system: str, ended: Callable[[str, str], None]) -> None:
        self.config = config
        self.system = system
        self.ended = ended
        roles = (
            *(("prefill", n, Role.PREFILL) for n in range(config.cluster.prefill)),
            *(("decode", n, Role.DECODE) for n in range(config.cluster.decode)),
            *(("replica", n, Role.BOTH) for n in range(config.cluster.replicas)),
        )
        shares = divided(usable_cores(config.device.cores), len(roles))
        self.posts = {f"{kind}-{n}": Post(f"{kind}-{n}", role, cores) for (kind, n, role), cores in zip(roles, shares, strict=True)}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    def start(self, front: Address, token: str) -> None:
        self._tasks = [asyncio.create_task(self._keep(post, front, token)) for post in self.posts.values()]

    def kill(self, name: str) -> None:
        """A worker that does not respond; it is started again."""
        post = self.posts.get(name)
        if post is not None and post.process is not None and post.process.returncode is None:
            post.process.kill()

    async def close(self) -> None:
        """Wait for those who were told to stop, and kill the rest."""
        self._closing = True
        living = [post.process for post in self.posts.values() if post.process is not None and post.process.returncode is None]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(process.wait() for process in living)), QUIT_S)
        for process in living:
            if process.returncode is None:
                process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, post: Post, front: Address, token: str) -> None:
        """One process after another, for ever."""
        pause_s = PAUSE_S[0]
        while not self._closing:
            began_s = time.monotonic()
            status = await self._one(post, front, token)
            if self._closing:
                return
            self.ended(post.name, f"worker {post.name} has ended ({exit_words(status)})")
            pause_s = PAUSE_S[0] if time.monotonic() - began_s >= SETTLED_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S[1])

    async def _one(self, post: Post, front: Address, token: str) -> int:
        process = post.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "counterpoint.serve.worker", stdin=asyncio.subprocess.PIPE
        )
        post.starts += 1
        start = Start(
            config=self.config,
            system=self.system,
            name=post.name,
            role=post.role,
            front=front,
            token=token,
            cores=post.cores,
            engines=len(self.posts),
            port=post.port,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        return await process.wait()


def divided(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """The cores of each worker: equal shares of neighbours; with more workers than cores, several take turns on one."""
    if workers > len(cores):
        return [(cores[worker % len(cores)],) for worker in range(workers)]
    edges = [worker * len(cores) // workers for worker in range(workers + 1)] if workers else [0]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(edges)]
