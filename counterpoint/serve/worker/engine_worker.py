"""EngineWorker: an engine behind a connection to its server.

Owns: what passes between the engine and the server. Promises: events reach the engine in the order
in which the server sent them; a heartbeat waits for no step. Must not: speak HTTP, or decide.

Threads: the main one runs the engine's loop and alone touches the engine; `front` has the
connection and calls `on_requests`, `on_orders`, `on_heartbeat` and `on_frontend_lost`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from counterpoint.core.engine import Engine
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.serve.worker.engine_runner import EngineRunner, EngineSetup, freeze_gc
from counterpoint.serve.worker.frontend_client import FrontendClient
from counterpoint.serve.worker.wire import (
    EngineOutputs,
    Heartbeat,
    LoadProgress,
    StartWorker,
    WorkerOrder,
    WorkerReady,
)
from counterpoint.stats import Stats
from counterpoint.types import Abort, AddRequest, Output


class EngineWorker:
    """The one engine of a server. Builds it at once. Raises ConfigError or ModelError."""

    def __init__(
        self, start: StartWorker, inbox: WallClockEventQueue, frontend: FrontendClient
    ) -> None:
        self.start = start
        self.inbox = inbox
        self.frontend = frontend
        self._seen_gets = -1  # calls of `inbox.get` at the last heartbeat
        self._turn_began_s = 0.0
        setup = self.prepare()
        self.engine = EngineRunner(setup, inbox, lambda stage: frontend.post(LoadProgress(stage)))

    def prepare(self) -> EngineSetup:
        """What to build, before the engine is built."""
        return EngineSetup(self.start.config, self.start.system)

    def run(self) -> None:
        """From WorkerReady until the server says Shutdown."""
        freeze_gc()
        self.frontend.serve(self.ready(), self)
        try:
            self.engine.run(self.deliver)
        finally:
            self.close_links()
        self.engine.close()

    def ready(self) -> WorkerReady:
        return WorkerReady(engine_info=self.engine.info, units=self.engine.system.limits.units)

    def close_links(self) -> None:
        """To other workers; there are none."""

    def leave(self) -> None:
        """Stop on a signal."""
        self.frontend.disconnect()

    # ------------------------------------------------------------ the connection's thread

    def on_requests(self, events: Sequence[AddRequest | Abort]) -> None:
        for event in events:
            self.engine.gate.put(event)

    def on_orders(self, orders: Sequence[WorkerOrder]) -> None:
        raise AssertionError("an engine alone hands nothing over")

    def on_frontend_lost(self) -> None:
        """Nobody waits for anything here any more."""

    def on_heartbeat(self) -> Heartbeat:
        """Wakes the loop: however long a step takes, the loop asks for events at once, unless it is
        stuck."""
        now_s = time.monotonic()
        if self.inbox.num_gets != self._seen_gets:
            self._seen_gets, self._turn_began_s = self.inbox.num_gets, now_s
            self.inbox.wake()
        return Heartbeat(now_s - self._turn_began_s)

    # ------------------------------------------------------------ the engine's thread

    def deliver(self, outputs: Sequence[Output], stats: Stats | None, engine: Engine) -> None:
        if outputs or stats is not None:
            self.frontend.post(EngineOutputs(outputs, time.monotonic(), stats))
