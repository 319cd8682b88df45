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

from counterpoint.config import Config, ConfigError, parse_host_port
from counterpoint.disagg import peer_connection
from counterpoint.disagg.messages import WireError
from counterpoint.disagg.peer_connection import (
    Address,
    CompatibilityDigest,
    ControlError,
    FramedConnection,
    find_mismatch,
)
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
    read_cluster_token,
)
from counterpoint.types import Role, Stats

FROZEN_SHARE = 0.4  # of `worker_lost_s`: silent for so long, a worker gets nothing new
log = logging.getLogger("counterpoint")


@dataclass(slots=True, eq=False)
class RegisteredWorker:
    """A worker that has joined. `ready` is None while it loads."""

    name: str
    role: Role
    connection: FramedConnection
    ready: WorkerReady | None = None
    stats: Stats = field(default_factory=Stats)
    handoff_stats: HandoffStats = field(default_factory=HandoffStats)
    silent_s: float = 0.0
    frozen: bool = False
    leaving: bool = False

    @property
    def is_serving(self) -> bool:
        """It can take requests."""
        return self.ready is not None and not self.frozen and not self.leaving

    def send(self, word: msgspec.Struct) -> None:
        self.connection.write_frame(worker_protocol.encode(word))


class RegistryListener(Protocol):
    """Who is told. `ready`: it can take requests from now on. `lost` comes at most once after that, and when the roster does not
    have it any more. `said`: `before` are its stats until then. `changed`: whether it `serves`. `failed`: a worker could not
    start."""

    def on_ready(self, member: RegisteredWorker, word: WorkerReady) -> None: ...

    def on_report(self, member: RegisteredWorker, word: WorkerReport, before: Stats) -> None: ...

    def on_state_change(self, member: RegisteredWorker) -> None: ...

    def on_lost(self, member: RegisteredWorker) -> None: ...

    def on_start_failure(self, error: str, blame: str) -> None: ...


class WorkerRegistry:
    """`system` names the function that builds a worker's engine. Raises ConfigError if workers could be reached from elsewhere
    without a token."""

    def __init__(self, config: Config, system: str, listener: RegistryListener) -> None:
        self.listen = Address(
            *parse_host_port("cluster_listen", config.cluster.cluster_listen or "127.0.0.1:0")
        )
        self.lost_s = config.cluster.worker_lost_s
        self.token = shared_token(config, self.listen.host)
        self.front_host = front_host(config, self.listen.host)
        self.workers: dict[str, RegisteredWorker] = {}
        crew_config = config.replace(api_key=None, cluster_token=None, cores=None)
        self.supervisor = Supervisor(
            crew_config, system, make_launcher(config), self._on_process_exit
        )
        self._listener = listener
        self._digest: CompatibilityDigest | None = None
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        """Raises EngineFailed if nobody could join."""
        await self.supervisor.open()
        try:
            self._server = await asyncio.start_server(self._on_connection, *self.listen)
        except OSError as error:
            raise EngineFailed(
                f"cluster_listen {self.listen.host}:{self.listen.port}: {error.strerror}", "user"
            ) from None
        self.listen = Address(*self._server.sockets[0].getsockname()[:2])
        if not self.supervisor.slots:
            log.info("waiting for workers at %s:%d", *self.listen)
        self._watch = asyncio.create_task(self._watch_heartbeats())
        self.supervisor.start(Address(self.front_host, self.listen.port), self.token)

    async def close(self) -> None:
        """End the workers of this machine, and let those of others go."""
        self._stopped = True
        for member in self.workers.values():
            if member.name in self.supervisor.slots:
                member.send(Shutdown())
        if self._server is not None:
            self._server.close()
        await self.supervisor.close()
        for member in self.workers.values():
            member.connection.close()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    # ------------------------------------------------------------ what is here

    @property
    def serving(self) -> list[RegisteredWorker]:
        return [member for member in self.workers.values() if member.is_serving]

    @property
    def missing(self) -> list[str]:
        """Workers that there should be, and that take no requests."""
        silent = {member.name for member in self.workers.values() if not member.is_serving}
        return sorted({*self.supervisor.slots, *silent} - {member.name for member in self.serving})

    @property
    def complete(self) -> bool:
        """All workers of this machine serve, or, if there are none, some other does."""
        return bool(self.serving) and set(self.supervisor.slots) <= {
            member.name for member in self.serving
        }

    def worker_states(self) -> list[WorkerState]:
        """Each worker, those of this machine also while they are missing."""
        found = []
        for name in dict.fromkeys((*self.supervisor.slots, *self.workers)):
            member, post = self.workers.get(name), self.supervisor.slots.get(name)
            role = (
                member.role if member is not None else post.role if post is not None else Role.BOTH
            )
            pid = (
                member.ready.engine_info.pid
                if member is not None and member.ready is not None
                else 0
            )
            stats, census = (
                (member.stats, member.handoff_stats)
                if member is not None
                else (Stats(), HandoffStats())
            )
            starts = post.starts if post is not None else 0
            found.append(
                WorkerState(
                    name,
                    role.value,
                    member is not None and member.is_serving,
                    pid,
                    starts,
                    stats,
                    census,
                )
            )
        return found

    # ------------------------------------------------------------ what workers say

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Somebody joins."""
        wire = FramedConnection(reader, writer)
        try:
            joined = await worker_protocol.accept_worker(wire, self.token, self._rejection_reason)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, WireError) as error:
            log.warning("a worker was not let in: %s", str(error) or type(error).__name__)
            wire.close()
            return
        member = self.workers[joined.worker] = RegisteredWorker(joined.worker, joined.role, wire)
        how = "the connection has ended"
        try:
            while True:
                self._on_message(member, await worker_protocol.read_from_worker(wire))
        except asyncio.IncompleteReadError:
            pass
        except OSError as error:
            how = str(error)
        except Exception as error:  # a worker that speaks nonsense is no worker
            log.exception("worker %s", member.name)
            how = f"{type(error).__name__}: {error}"
        finally:
            self._mark_lost(member, f"worker {member.name} is gone: {how}")

    def _rejection_reason(self, joined: Register) -> str:
        if self._stopped:
            return "the server is shutting down"
        return "a worker of this name is here already" if joined.worker in self.workers else ""

    def _on_message(self, member: RegisteredWorker, word: worker_protocol.FromWorker) -> None:
        member.silent_s = 0.0
        if member.frozen:
            log.warning("worker %s responds again", member.name)
            member.frozen = False
            self._listener.on_state_change(member)
        if isinstance(word, WorkerReport):
            before = member.stats
            member.stats, member.handoff_stats = (
                word.stats or before,
                word.handoff_stats or member.handoff_stats,
            )
            self._listener.on_report(member, word, before)
        elif isinstance(word, LoadProgress):
            log.info("%s: %s", member.name, word.stage)
        elif isinstance(word, WorkerReady):
            self._on_worker_ready(member, word)
        elif isinstance(word, WorkerLeaving):
            log.info("worker %s is leaving: what it has, it may finish", member.name)
            member.leaving = True
            self._listener.on_state_change(member)
        elif isinstance(word, EngineFailure):
            log.error("worker %s: %s", member.name, word.error)
            self._listener.on_start_failure(f"worker {member.name}: {word.error}", word.blame)
        else:
            assert isinstance(word, Heartbeat)

    def _on_worker_ready(self, member: RegisteredWorker, ready: WorkerReady) -> None:
        problem = "" if self._digest is None else find_mismatch(self._digest, ready.digest)
        if problem:
            log.error("worker %s does not fit the others: %s", member.name, problem)
            member.send(Shutdown(problem))
            self._listener.on_start_failure(
                f"worker {member.name} does not fit the others: {problem}", "user"
            )
            return
        self._digest, member.ready, member.stats = ready.digest, ready, make_unique(ready)
        post = self.supervisor.slots.get(member.name)
        if post is not None:
            post.port = ready.address.port
        where, kinds = f"{ready.address.host}:{ready.address.port}", "/".join(ready.transports)
        log.info(
            "worker %s (%s) is ready at %s: %s; KV over %s",
            member.name,
            member.role,
            where,
            ready.engine_info.lanes,
            kinds,
        )
        self._listener.on_ready(member, ready)

    # ------------------------------------------------------------ workers that are lost

    def _mark_lost(self, member: RegisteredWorker, reason: str) -> None:
        if self.workers.get(member.name) is not member:
            return
        del self.workers[member.name]
        member.connection.close()
        if not self._stopped:
            log.error("%s", reason)
        self._listener.on_lost(member)

    def _on_process_exit(self, name: str, reason: str) -> None:
        """A process of this machine is over (crew.py starts it again)."""
        member = self.workers.get(name)
        if member is not None:
            self._mark_lost(member, reason)
        self._listener.on_start_failure(reason, "engine")

    async def _watch_heartbeats(self) -> None:
        """Counts turns of this loop, not seconds: time in which we were stopped ourselves is not the workers' silence. One that
        loads may be busy with that alone."""
        turn_s = min(HEARTBEAT_S, self.lost_s / 8)
        while True:
            await asyncio.sleep(turn_s)
            for member in [member for member in self.workers.values() if member.ready is not None]:
                member.silent_s += turn_s
                if member.silent_s >= self.lost_s:
                    self._mark_lost(
                        member,
                        f"worker {member.name} has not been heard of for {member.silent_s:.1f} s: given up",
                    )
                    self.supervisor.kill(member.name)
                elif (
                    member.silent_s >= max(2 * HEARTBEAT_S, FROZEN_SHARE * self.lost_s)
                    and not member.frozen
                ):
                    log.error(
                        "worker %s has not been heard of for %.1f s", member.name, member.silent_s
                    )
                    member.frozen = True
                    self._listener.on_state_change(member)


def make_launcher(config: Config) -> Launcher:
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
    token = read_cluster_token(config)
    for host in (listen, config.cluster.cluster_host or "127.0.0.1"):
        try:
            peer_connection.check_exposure(host, token)
        except ControlError as error:
            raise ConfigError(str(error)) from None
    return token or secrets.token_hex(16)  # nobody from elsewhere can know it


def make_unique(ready: WorkerReady) -> Stats:
    """Of a worker that has done nothing yet: it speaks of itself when it has."""
    size = ready.engine_info.page_tokens
    pages = ready.engine_info.kv_tokens // size
    return Stats(pages_total=pages, pages_free=pages, page_tokens=size, units_total=ready.units)
