"""WorkerRegistry: the workers of a server, by their connections.

Owns: who may join, who is connected, who responds. Promises: a worker whose connection ends is lost
at once; one that is silent is frozen, then silent for good, as HeartbeatLimits say; each is lost
once; none joins without the token, or with another model than the others.
Must not: know requests, or what follows when a worker is lost (its RegistryListener does).
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from counterpoint.disagg.messages import WireError
from counterpoint.disagg.peer_connection import (
    Address,
    CompatibilityDigest,
    FramedConnection,
    find_mismatch,
)
from counterpoint.serve.observability.pool_metrics import WorkerState
from counterpoint.serve.worker import wire
from counterpoint.serve.worker.supervisor import EngineFailed, Supervisor, WorkerPlan
from counterpoint.serve.worker.wire import (
    HEARTBEAT_S,
    EngineFailure,
    EngineOutputs,
    HandoffStats,
    Heartbeat,
    LoadProgress,
    Register,
    Shutdown,
    WorkerLeaving,
    WorkerReady,
)
from counterpoint.stats import Stats
from counterpoint.types import Role

log = logging.getLogger("counterpoint")


@dataclass(frozen=True, slots=True)
class HeartbeatLimits:
    """Silence, in seconds, after which a worker gets nothing new (`frozen_s`), and is given up
    (`lost_s`). A stuck loop counts as silence too: the time by which its turn exceeds
    `max_turn_s`."""

    frozen_s: float
    lost_s: float
    max_turn_s: float = math.inf


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where workers join. `host` is how those that this server starts reach it."""

    listen: Address
    host: str
    token: str


@dataclass(slots=True, eq=False)
class RegisteredWorker:
    """A worker that has joined. `ready` is None while it loads."""

    name: str
    role: Role
    connection: FramedConnection
    ready: WorkerReady | None = None
    stats: Stats = field(default_factory=Stats)
    handoff_stats: HandoffStats = field(default_factory=HandoffStats)
    since_message_s: float = 0.0
    turn_s: float = 0.0  # of its loop's present turn, by its last heartbeat
    frozen: bool = False
    leaving: bool = False

    @property
    def is_serving(self) -> bool:
        """It can take requests."""
        return self.ready is not None and not self.frozen and not self.leaving

    def silent_s(self, max_turn_s: float) -> float:
        return max(self.since_message_s, self.turn_s - max_turn_s)

    def send(self, message: msgspec.Struct) -> None:
        self.connection.write_frame(wire.encode(message))


class RegistryListener(Protocol):
    """Is told what becomes of workers. `on_ready`: it takes requests from now on. `on_report`:
    `before` are its stats until then. `on_state_change`: whether it `is_serving`. `on_silent`: it
    has been silent for `lost_s`. `on_lost`: its connection has ended; the registry does not have it
    any more. `on_failure`: it reports why it can't go on. `on_exit`: a process that this server
    started has ended."""

    def on_progress(self, member: RegisteredWorker, stage: str) -> None: ...

    def on_ready(self, member: RegisteredWorker, ready: WorkerReady) -> None: ...

    def on_report(
        self, member: RegisteredWorker, outputs: EngineOutputs, before: Stats
    ) -> None: ...

    def on_state_change(self, member: RegisteredWorker) -> None: ...

    def on_silent(self, member: RegisteredWorker) -> None: ...

    def on_lost(self, member: RegisteredWorker, reason: str) -> None: ...

    def on_failure(self, member: RegisteredWorker, failure: EngineFailure) -> None: ...

    def on_exit(self, name: str, how: str) -> None: ...


class WorkerRegistry:
    def __init__(
        self,
        plan: WorkerPlan,
        address: ListenAddress,
        limits: HeartbeatLimits,
        listener: RegistryListener,
    ) -> None:
        self.listen = address.listen
        self.host = address.host
        self.token = address.token
        self.limits = limits
        self.workers: dict[str, RegisteredWorker] = {}
        self.supervisor = Supervisor(plan, listener.on_exit)
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
        self.supervisor.start(Address(self.host, self.listen.port), self.token)

    async def close(self) -> None:
        """End the workers that this server started, and disconnect the others."""
        self._stopped = True
        for name in self.supervisor.slots:
            member = self.workers.get(name)
            if member is not None and member.ready is not None:
                member.send(Shutdown())
            else:
                self.supervisor.kill(name)  # it loads, and hears nothing until it is ready
        if self._server is not None:
            self._server.close()
        await self.supervisor.close()
        for member in self.workers.values():
            member.connection.close()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    # ------------------------------------------------------------ who is here

    @property
    def serving(self) -> list[RegisteredWorker]:
        return [member for member in self.workers.values() if member.is_serving]

    @property
    def missing(self) -> list[str]:
        """Workers that should take requests, and do not."""
        silent = {member.name for member in self.workers.values() if not member.is_serving}
        return sorted({*self.supervisor.slots, *silent} - {member.name for member in self.serving})

    @property
    def complete(self) -> bool:
        """All workers that this server started serve; if it started none, some other does."""
        return bool(self.serving) and set(self.supervisor.slots) <= {
            member.name for member in self.serving
        }

    def worker_states(self) -> list[WorkerState]:
        """Each worker, those that this server started also while they are missing."""
        names = dict.fromkeys((*self.supervisor.slots, *self.workers))
        return [self._state_of(name) for name in names]

    def _state_of(self, name: str) -> WorkerState:
        member, slot = self.workers.get(name), self.supervisor.slots.get(name)
        starts = slot.starts if slot is not None else 0
        if member is None:
            role = slot.role if slot is not None else Role.BOTH
            return WorkerState(name, role.value, False, 0, starts, Stats(), HandoffStats())
        return WorkerState(
            name,
            member.role.value,
            member.is_serving,
            member.ready.engine_info.pid if member.ready is not None else 0,
            starts,
            member.stats,
            member.handoff_stats,
        )

    # ------------------------------------------------------------ messages of workers

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection = FramedConnection(reader, writer)
        try:
            joined = await wire.accept_worker(connection, self.token, self._rejection_reason)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, WireError) as error:
            log.warning("a worker was not let in: %s", str(error) or type(error).__name__)
            connection.close()
            return
        member = RegisteredWorker(joined.worker, joined.role, connection)
        self.workers[joined.worker] = member
        reason = "the connection has ended"
        try:
            while True:
                self._on_message(member, await wire.read_from_worker(connection))
        except asyncio.IncompleteReadError:
            pass
        except OSError as error:
            reason = str(error)
        except Exception as error:  # whatever a worker sends, only that worker is lost
            log.exception("worker %s", member.name)
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.remove(member, f"worker {member.name} is gone: {reason}")

    def _rejection_reason(self, joined: Register) -> str:
        if self._stopped:
            return "the server is shutting down"
        return "a worker of this name is here already" if joined.worker in self.workers else ""

    def _on_message(self, member: RegisteredWorker, message: wire.FromWorker) -> None:
        member.since_message_s = 0.0
        member.turn_s = message.turn_s if isinstance(message, Heartbeat) else 0.0
        if member.frozen and member.silent_s(self.limits.max_turn_s) < self.limits.frozen_s:
            member.frozen = False
            self._listener.on_state_change(member)
        if isinstance(message, EngineOutputs):
            before = member.stats
            member.stats = message.stats or before
            member.handoff_stats = message.handoff_stats or member.handoff_stats
            self._listener.on_report(member, message, before)
        elif isinstance(message, LoadProgress):
            self._listener.on_progress(member, message.stage)
        elif isinstance(message, WorkerReady):
            self._on_worker_ready(member, message)
        elif isinstance(message, WorkerLeaving):
            log.info("worker %s is leaving: what it has, it may finish", member.name)
            member.leaving = True
            self._listener.on_state_change(member)
        elif isinstance(message, EngineFailure):
            self._listener.on_failure(member, message)
        else:
            assert isinstance(message, Heartbeat)

    def _on_worker_ready(self, member: RegisteredWorker, ready: WorkerReady) -> None:
        if ready.kv is not None:
            problem = "" if self._digest is None else find_mismatch(self._digest, ready.kv.digest)
            if problem:
                reason = f"it does not fit the others: {problem}"
                member.send(Shutdown(problem))
                self._listener.on_failure(member, EngineFailure(reason, "user"))
                return
            self._digest = ready.kv.digest
            slot = self.supervisor.slots.get(member.name)
            if slot is not None:
                slot.port = ready.kv.address.port
        member.ready, member.stats = ready, idle_stats(ready)
        self._listener.on_ready(member, ready)

    # ------------------------------------------------------------ workers that are lost

    def remove(self, member: RegisteredWorker, reason: str) -> None:
        if self.workers.get(member.name) is not member:
            return
        del self.workers[member.name]
        member.connection.close()
        self._listener.on_lost(member, reason)

    async def _watch_heartbeats(self) -> None:
        """Counts turns of this loop, not seconds: time in which this process was stopped is not
        the workers' silence. A worker that loads may be busy with that alone."""
        limits = self.limits
        turn_s = min(HEARTBEAT_S, limits.lost_s / 8)
        while True:
            await asyncio.sleep(turn_s)
            for member in [member for member in self.workers.values() if member.ready is not None]:
                member.since_message_s += turn_s
                silent_s = member.silent_s(limits.max_turn_s)
                if silent_s >= limits.frozen_s and not member.frozen:
                    member.frozen = True
                    self._listener.on_state_change(member)
                if silent_s >= limits.lost_s:
                    self._listener.on_silent(member)


def idle_stats(ready: WorkerReady) -> Stats:
    """Of a worker that has done nothing yet: it reports only when it has."""
    size = ready.engine_info.page_tokens
    pages = ready.engine_info.kv_tokens // size
    return Stats(pages_total=pages, pages_free=pages, page_tokens=size, units_total=ready.units)
