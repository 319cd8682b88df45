"""Roster: the workers of a pool, by their connections.

Owns: who may join, who is there, who responds. Promises: a worker whose connection ends is lost at once, one that stands still
within `worker_lost_s`; each is lost once; ours are started again (crew.py); none joins without the token, or
with another model than the others.
Must not: know requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from counterpoint.config import Config, ConfigError, host_and_port
from counterpoint.disagg import peer_connection
from counterpoint.disagg.compatibility import CompatibilityDigest, refusal
from counterpoint.disagg.messages import WireError
from counterpoint.disagg.peer_connection import Address, ControlError, FramedConnection
from counterpoint.serve.observability.pool_metrics import WorkerState
from counterpoint.serve.worker import worker_protocol
from counterpoint.serve.worker.engine_client import EngineFailed
from counterpoint.serve.worker.supervisor import Launcher, ProcessLauncher, Supervisor
from counterpoint.serve.worker.wire import HEARTBEAT_S, EngineFailure, Heartbeat, LoadProgress
from counterpoint.serve.worker.worker_protocol import (
    HandoffStats,
    Register,
    Shutdown,
    WorkerLeaving,
    WorkerReady,
    WorkerReport,
    token_of,
)
from counterpoint.types import Role, Stats

FROZEN_SHARE = 0.4  # of `worker_lost_s`: silent for so long, a worker gets nothing new
log = logging.getLogger("counterpoint")


@dataclass(slots=True, eq=False)
class RegisteredWorker:
    """A worker that has joined. `ready` is None while it loads."""

    name: str
    role: Role
    wire: FramedConnection
    ready: WorkerReady | None = None
    stats: Stats = field(default_factory=Stats)
    census: HandoffStats = field(default_factory=HandoffStats)
    silent_s: float = 0.0
    frozen: bool = False
    leaving: bool = False

    @property
    def serves(self) -> bool:
        """It can take requests."""
        return self.ready is not None and not self.frozen and not self.leaving

    def say(self, word: msgspec.Struct) -> None:
        self.wire.write(worker_protocol.encode(word))


class RegistryListener(Protocol):
    """Who is told. `ready`: it can take requests from now on. `lost` comes at most once after that, and when the roster does not
    have it any more. `said`: `before` are its stats until then. `changed`: whether it `serves`. `failed`: a worker could not
    start."""

    def ready(self, member: RegisteredWorker, word: WorkerReady) -> None: ...

    def said(self, member: RegisteredWorker, word: WorkerReport, before: Stats) -> None: ...

    def changed(self, member: RegisteredWorker) -> None: ...

    def lost(self, member: RegisteredWorker) -> None: ...

    def failed(self, error: str, blame: str) -> None: ...


class WorkerRegistry:
    """`system` names the function that builds a worker's engine. Raises ConfigError if workers could be reached from elsewhere
    without a token."""

    def __init__(self, config: Config, system: str, listener: RegistryListener) -> None:
        self.listen = Address(
            *host_and_port("cluster_listen", config.cluster.cluster_listen or "127.0.0.1:0")
        )
        self.lost_s = config.cluster.worker_lost_s
        self.token = shared_token(config, self.listen.host)
        self.front_host = front_host(config, self.listen.host)
        self.members: dict[str, RegisteredWorker] = {}
        crew_config = config.replace(api_key=None, cluster_token=None, cores=None)
        self.crew = Supervisor(crew_config, system, places_of(config), self._ended)
        self._listener = listener
        self._digest: CompatibilityDigest | None = None
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        """Raises EngineFailed if nobody could join."""
        await self.crew.open()
        try:
            self._server = await asyncio.start_server(self._called, *self.listen)
        except OSError as error:
            raise EngineFailed(
                f"cluster_listen {self.listen.host}:{self.listen.port}: {error.strerror}", "user"
            ) from None
        self.listen = Address(*self._server.sockets[0].getsockname()[:2])
        if not self.crew.posts:
            log.info("waiting for workers at %s:%d", *self.listen)
        self._watch = asyncio.create_task(self._watch_beats())
        self.crew.start(Address(self.front_host, self.listen.port), self.token)

    async def close(self) -> None:
        """End the workers of this machine, and let those of others go."""
        self._stopped = True
        for member in self.members.values():
            if member.name in self.crew.posts:
                member.say(Shutdown())
        if self._server is not None:
            self._server.close()
        await self.crew.close()
        for member in self.members.values():
            member.wire.close()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    # ------------------------------------------------------------ what is here

    @property
    def serving(self) -> list[RegisteredWorker]:
        return [member for member in self.members.values() if member.serves]

    @property
    def missing(self) -> list[str]:
        """Workers that there should be, and that take no requests."""
        silent = {member.name for member in self.members.values() if not member.serves}
        return sorted({*self.crew.posts, *silent} - {member.name for member in self.serving})

    @property
    def complete(self) -> bool:
        """All workers of this machine serve, or, if there are none, some other does."""
        return bool(self.serving) and set(self.crew.posts) <= {
            member.name for member in self.serving
        }

    def look(self) -> list[WorkerState]:
        """Each worker, those of this machine also while they are missing."""
        found = []
        for name in dict.fromkeys((*self.crew.posts, *self.members)):
            member, post = self.members.get(name), self.crew.posts.get(name)
            role = (
                member.role if member is not None else post.role if post is not None else Role.BOTH
            )
            pid = member.ready.hello.pid if member is not None and member.ready is not None else 0
            stats, census = (
                (member.stats, member.census) if member is not None else (Stats(), HandoffStats())
            )
            starts = post.starts if post is not None else 0
            found.append(
                WorkerState(
                    name,
                    role.value,
                    member is not None and member.serves,
                    pid,
                    starts,
                    stats,
                    census,
                )
            )
        return found

    # ------------------------------------------------------------ what workers say

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody joins."""
        wire = FramedConnection(reader, writer)
        try:
            joined = await worker_protocol.admit(wire, self.token, self._objection)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, WireError) as error:
            log.warning("a worker was not let in: %s", str(error) or type(error).__name__)
            wire.close()
            return
        member = self.members[joined.worker] = RegisteredWorker(joined.worker, joined.role, wire)
        how = "the connection has ended"
        try:
            while True:
                self._hear(member, await worker_protocol.hear_worker(wire))
        except asyncio.IncompleteReadError:
            pass
        except OSError as error:
            how = str(error)
        except Exception as error:  # a worker that speaks nonsense is no worker
            log.exception("worker %s", member.name)
            how = f"{type(error).__name__}: {error}"
        finally:
            self._lose(member, f"worker {member.name} is gone: {how}")

    def _objection(self, joined: Register) -> str:
        if self._stopped:
            return "the server is shutting down"
        return "a worker of this name is here already" if joined.worker in self.members else ""

    def _hear(self, member: RegisteredWorker, word: worker_protocol.FromWorker) -> None:
        member.silent_s = 0.0
        if member.frozen:
            log.warning("worker %s responds again", member.name)
            member.frozen = False
            self._listener.changed(member)
        if isinstance(word, WorkerReport):
            before = member.stats
            member.stats, member.census = word.stats or before, word.census or member.census
            self._listener.said(member, word, before)
        elif isinstance(word, LoadProgress):
            log.info("%s: %s", member.name, word.stage)
        elif isinstance(word, WorkerReady):
            self._greet(member, word)
        elif isinstance(word, WorkerLeaving):
            log.info("worker %s is leaving: what it has, it may finish", member.name)
            member.leaving = True
            self._listener.changed(member)
        elif isinstance(word, EngineFailure):
            log.error("worker %s: %s", member.name, word.error)
            self._listener.failed(f"worker {member.name}: {word.error}", word.blame)
        else:
            assert isinstance(word, Heartbeat)

    def _greet(self, member: RegisteredWorker, ready: WorkerReady) -> None:
        problem = "" if self._digest is None else refusal(self._digest, ready.digest)
        if problem:
            log.error("worker %s does not fit the others: %s", member.name, problem)
            member.say(Shutdown(problem))
            self._listener.failed(
                f"worker {member.name} does not fit the others: {problem}", "user"
            )
            return
        self._digest, member.ready, member.stats = ready.digest, ready, unused(ready)
        post = self.crew.posts.get(member.name)
        if post is not None:
            post.port = ready.address.port
        where, kinds = f"{ready.address.host}:{ready.address.port}", "/".join(ready.kinds)
        log.info(
            "worker %s (%s) is ready at %s: %s; KV over %s",
            member.name,
            member.role,
            where,
            ready.hello.lanes,
            kinds,
        )
        self._listener.ready(member, ready)

    # ------------------------------------------------------------ workers that are lost

    def _lose(self, member: RegisteredWorker, reason: str) -> None:
        if self.members.get(member.name) is not member:
            return
        del self.members[member.name]
        member.wire.close()
        if not self._stopped:
            log.error("%s", reason)
        self._listener.lost(member)

    def _ended(self, name: str, reason: str) -> None:
        """A process of this machine is over (crew.py starts it again)."""
        member = self.members.get(name)
        if member is not None:
            self._lose(member, reason)
        self._listener.failed(reason, "engine")

    async def _watch_beats(self) -> None:
        """Counts turns of this loop, not seconds: time in which we were stopped ourselves is not the workers' silence. One that
        loads may be busy with that alone."""
        turn_s = min(HEARTBEAT_S, self.lost_s / 8)
        while True:
            await asyncio.sleep(turn_s)
            for member in [member for member in self.members.values() if member.ready is not None]:
                member.silent_s += turn_s
                if member.silent_s >= self.lost_s:
                    self._lose(
                        member,
                        f"worker {member.name} has not been heard of for {member.silent_s:.1f} s: given up",
                    )
                    self.crew.kill(member.name)
                elif (
                    member.silent_s >= max(2 * HEARTBEAT_S, FROZEN_SHARE * self.lost_s)
                    and not member.frozen
                ):
                    log.error(
                        "worker %s has not been heard of for %.1f s", member.name, member.silent_s
                    )
                    member.frozen = True
                    self._listener.changed(member)


def places_of(config: Config) -> Launcher:
    if config.cluster.ray_address is None:
        return ProcessLauncher(config.device.cores)
    from counterpoint.serve.worker.ray_launcher import RayLauncher

    return RayLauncher(config)


def front_host(config: Config, listen: str) -> str:
    """Where the workers that we start dial the front. Raises ConfigError if they can't know their address, or ours, for others."""
    cluster, anywhere = config.cluster, listen in ("0.0.0.0", "::")
    unknown = anywhere if cluster.ray_address is not None else not peer_connection.is_local(listen)
    if unknown and cluster.workers and cluster.cluster_host is None:
        raise ConfigError(
            "cluster_listen lets other machines in: set cluster_host, this machine's address for their workers"
        )
    if not anywhere:
        return listen
    return cluster.cluster_host or "127.0.0.1" if cluster.ray_address is not None else "127.0.0.1"


def shared_token(config: Config, listen: str) -> str:
    """What workers must know. Raises ConfigError if they can be reached from elsewhere and there is none."""
    token = token_of(config)
    for host in (listen, config.cluster.cluster_host or "127.0.0.1"):
        try:
            peer_connection.check_exposure(host, token)
        except ControlError as error:
            raise ConfigError(str(error)) from None
    return token or secrets.token_hex(16)  # nobody from elsewhere can know it


def unused(ready: WorkerReady) -> Stats:
    """Of a worker that has done nothing yet: it speaks of itself when it has."""
    size = ready.hello.page_tokens
    pages = ready.hello.kv_tokens // size
    return Stats(pages_total=pages, pages_free=pages, page_tokens=size, units_total=ready.units)
