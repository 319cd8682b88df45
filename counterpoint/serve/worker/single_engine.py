"""SingleEngine: a server of one engine: a pool of one worker, which takes requests without routing.

Owns: that worker and the streams that are open in it. Promises: a dead engine is noticed at once, a
frozen process within FROZEN_S, a stuck loop within FROZEN_S + MAX_TURN_S; a busy engine is none of
these. A dead engine stays dead; one that responds again takes requests again.
Must not: know HTTP or text.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

import msgspec

from counterpoint.config import Config
from counterpoint.disagg.peer_connection import Address
from counterpoint.serve.worker.engine_client import SHUTTING_DOWN, EngineClient, OnTiming
from counterpoint.serve.worker.engine_runner import BUILDER
from counterpoint.serve.worker.registry import (
    HeartbeatLimits,
    ListenAddress,
    RegisteredWorker,
    WorkerRegistry,
)
from counterpoint.serve.worker.streams import (
    EngineStatus,
    EngineStreams,
    OutputListener,
    OutputQueue,
)
from counterpoint.serve.worker.supervisor import ProcessLauncher, WorkerPlan, WorkerSlot
from counterpoint.serve.worker.wire import EngineFailure, EngineOutputs, EngineRequests, WorkerReady
from counterpoint.stats import Stats
from counterpoint.types import Abort, AddRequest, OutputDelta, RequestTiming, Role

FROZEN_S = 4.0
LOST_S = 10.0
MAX_TURN_S = 6.0
LAST_MESSAGE_S = 1.0  # for a process that has ended to be read to its end, and the reverse
NAME = "engine"
LOCALHOST = "127.0.0.1"
log = logging.getLogger("counterpoint")


class SingleEngine(EngineClient):
    """`system` names the function that builds the engine."""

    reasons = {
        "loading": "the model is still being loaded",
        "frozen": "the engine does not respond",
        "dead": "the engine is not running",
        "stopped": SHUTTING_DOWN,
    }

    def __init__(
        self,
        config: Config,
        on_timing: OnTiming | None = None,
        system: str = BUILDER,
        listener: OutputListener | None = None,
    ) -> None:
        super().__init__(on_timing, listener)
        plan = WorkerPlan(
            config.replace(api_key=None, cluster_token=None),
            system,
            (WorkerSlot(NAME, Role.BOTH),),
            ProcessLauncher(None),
            in_pool=False,
            restarts=False,
        )
        address = ListenAddress(Address(LOCALHOST, 0), LOCALHOST, secrets.token_hex(16))
        limits = HeartbeatLimits(FROZEN_S, LOST_S, MAX_TURN_S)
        self.registry = WorkerRegistry(plan, address, limits, self)
        self.streams = EngineStreams(self._send)
        self._member: RegisteredWorker | None = None  # also when its connection has ended
        self._exit = ""  # how its process has ended
        self._dead = False

    # ------------------------------------------------------------ state

    @property
    def state(self) -> EngineStatus:
        if self._stopped:
            return "stopped"
        member = self._member
        if self._dead or (member is not None and NAME not in self.registry.workers):
            return "dead"
        if member is None:
            return "loading"
        return "frozen" if member.frozen else "ready"

    @property
    def stats(self) -> Stats:
        stats = self._member.stats if self._member is not None else Stats()
        if self.state in ("dead", "stopped"):
            return msgspec.structs.replace(stats, running=0, waiting=0)
        return stats

    async def close(self) -> None:
        self._fail_start(SHUTTING_DOWN, "engine")
        self.streams.close(SHUTTING_DOWN)
        await super().close()

    # ------------------------------------------------------------ streams

    def add_requests(self, arrives: Sequence[AddRequest], queue: OutputQueue) -> None:
        self.check()
        if self.listener is not None:
            self.listener.on_requests(arrives)
        self.streams.add(arrives, queue)

    def abort(self, id: str) -> bool:
        return self.streams.abort([id])

    def fail_streams(self, reason: str) -> None:
        self.streams.fail(reason)

    def _send(self, events: Sequence[AddRequest | Abort]) -> None:
        assert self._member is not None
        self._member.send(EngineRequests(events))

    # ------------------------------------------------------------ registry.RegistryListener

    def on_progress(self, member: RegisteredWorker, stage: str) -> None:
        log.info("%s", stage)

    def on_ready(self, member: RegisteredWorker, ready: WorkerReady) -> None:
        self._member = member
        self._start_succeeded(ready.engine_info)

    def on_report(self, member: RegisteredWorker, outputs: EngineOutputs, before: Stats) -> None:
        if self.listener is not None:
            self.listener.on_outputs(outputs)
        if self.on_timing is not None:
            for item in outputs.items:
                if isinstance(item, RequestTiming):
                    self.on_timing(item)
        self.streams.deliver(item for item in outputs.items if isinstance(item, OutputDelta))

    def on_state_change(self, member: RegisteredWorker) -> None:
        if member.frozen:
            log.error(
                "the engine has not been heard of for %.1f s; its loop is in one turn since %.1f s",
                member.since_message_s,
                member.turn_s,
            )
        else:
            log.warning("the engine responds again")

    def on_silent(self, member: RegisteredWorker) -> None:
        """It may respond again: it is not ended, but what runs in it is given up."""
        if self.streams:
            self.fail_streams(self.reasons["frozen"])

    def on_failure(self, member: RegisteredWorker, failure: EngineFailure) -> None:
        self.error = failure.error
        self._fail_start(failure.error, failure.blame)

    def on_lost(self, member: RegisteredWorker, reason: str) -> None:
        if self._exit:
            self._mark_dead()
        elif not self._stopped:  # its process is about to end
            asyncio.get_running_loop().call_later(
                LAST_MESSAGE_S, self.registry.supervisor.kill, NAME
            )

    def on_exit(self, name: str, how: str) -> None:
        self._exit = how
        if name not in self.registry.workers:
            self._mark_dead()
        else:  # it may have said why
            asyncio.get_running_loop().call_later(LAST_MESSAGE_S, self._mark_dead)

    def _mark_dead(self) -> None:
        if self._dead or self._stopped:
            return
        self._dead = True
        self.error = self.error or f"the engine's process has ended ({self._exit})"
        log.error("%s", self.error)
        self.streams.close(self.error)
        self._fail_start(self.error, "engine")
