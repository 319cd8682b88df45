"""PoolWorker: an engine of a pool, which hands KV to other workers and takes theirs.

Owns: what passes between engine, handoff runner and the pool's frontend. Promises: reports of one
request reach the frontend in order; when the frontend is lost, every request here is aborted and
none of its pages is kept. Must not: speak HTTP, or choose where a request runs.

Threads: as in engine_worker.py; the handoff runner and its transports have their own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from counterpoint.builder.system import WorkerPlacement
from counterpoint.builder.worker_setup import claim_gpu, make_identity, make_transports
from counterpoint.core.engine import Engine
from counterpoint.device.cores import pin
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.timeline import KvTransfer
from counterpoint.disagg import handoff_events
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.handoff_events import HandoffConfig, KvGeometry, handoff_of
from counterpoint.disagg.handoff_runner import HandoffRunner, SentKv
from counterpoint.disagg.page_ledger import PageHold
from counterpoint.disagg.receiver import ReceiveState
from counterpoint.disagg.sender import SendState
from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.serve.worker.engine_runner import EngineSetup
from counterpoint.serve.worker.engine_worker import EngineWorker
from counterpoint.serve.worker.frontend_client import FrontendClient
from counterpoint.serve.worker.wire import (
    EngineOutputs,
    HandoffStats,
    Heartbeat,
    KvEndpoint,
    StartWorker,
    WorkerLeaving,
    WorkerOrder,
    WorkerReady,
)
from counterpoint.stats import Stats
from counterpoint.types import AddRequest, Output, OutputDelta, Release

POLL_S = 0.1
STATES = sorted({state.value for state in (*SendState, *ReceiveState)} - {SendState.RELEASED.value})


class PoolWorker(EngineWorker):
    """Builds the engine at once. Raises ConfigError or ModelError."""

    def __init__(
        self, start: StartWorker, inbox: WallClockEventQueue, frontend: FrontendClient
    ) -> None:
        self.unfinished: set[str] = set()  # ids that the engine has and has not finished
        self.leaving = False
        self._runner: HandoffRunner | None = None
        self._host = start.config.cluster.cluster_host or frontend.local_host
        config = start.config.replace(cluster_host=self._host)
        super().__init__(msgspec.structs.replace(start, config=config), inbox, frontend)
        self.runner = self._runner = self._start_handoffs()

    def prepare(self) -> EngineSetup:
        start = self.start
        if start.cores:
            pin(start.cores)
        self.device, sharers = claim_gpu(start.config, start.rank, start.engines)
        self.transports = make_transports(start.config, self._on_notices, self.device)
        shm = self.transports.get("shm")
        placement = WorkerPlacement(
            self.device,
            sharers if self.device == "cuda" else start.engines,
            shm.allocate if isinstance(shm, ShmTransport) else None,
        )
        return EngineSetup(start.config, start.system, start.name, placement)

    def _start_handoffs(self) -> HandoffRunner:
        start, system = self.start, self.engine.system
        me = make_identity(start.name, self.transports, system, start.token, self.device)
        handoffs = Handoffs(
            HandoffConfig(), KvGeometry(system.spec.layers, system.limits.page_tokens)
        )
        runner = HandoffRunner(me, handoffs, self, self._host, start.port, self.fail)
        try:
            runner.start()
        except OSError:
            if not start.port:
                raise
            runner = HandoffRunner(me, handoffs, self, self._host, on_fault=self.fail)
            runner.start()  # on any port: its old one is taken
        timeline = self.engine.timeline
        if timeline is not None:
            runner.on_kv_sent = lambda sent: timeline.record_transfer(kv_transfer_of(sent))
        return runner

    def _on_notices(self) -> None:
        if self._runner is not None:
            self._runner.on_notices()

    def ready(self) -> WorkerReady:
        system, me = self.engine.system, self.runner.identity
        page_bytes = me.memory.page_bytes * 2 * system.spec.layers
        target = system.calibration_target
        return WorkerReady(
            engine_info=self.engine.info,
            units=system.limits.units,
            gpu=target.key.device if self.device == "cuda" and target is not None else "",
            kv=KvEndpoint(
                address=self.runner.address,
                digest=me.digest,
                transports=me.endpoint.transports,
                bytes_per_token=page_bytes // system.limits.page_tokens,
            ),
        )

    def close_links(self) -> None:
        self.runner.close()
        for transport in self.transports.values():
            transport.close()

    def fail(self, error: str) -> None:
        """This worker itself is broken: end it, so that what runs here goes on elsewhere. From any
        thread."""
        print(error, file=sys.stderr, flush=True)
        os._exit(1)

    # ------------------------------------------------------------ the connection's thread

    def on_orders(self, orders: Sequence[WorkerOrder]) -> None:
        for order in orders:
            self.runner.on_order(order.order, order.decode_address)

    def on_frontend_lost(self) -> None:
        for handoff in {
            known[0] for id in tuple(self.unfinished) if (known := handoff_of(id)) is not None
        }:
            self.runner.on_order(handoff_events.WithdrawRequest(handoff))
        self.runner.on_order(handoff_events.Drain(False))

    def on_heartbeat(self) -> Heartbeat:
        self.runner.inspect(self.send_handoff_stats)
        return super().on_heartbeat()

    # ------------------------------------------------------------ leaving

    def leave(self) -> None:
        """Take nothing new, finish what is here, then go; asked again, or after `drain_s`, go at
        once."""
        if self.leaving:
            self.frontend.disconnect()
            return
        self.leaving = True
        self.frontend.post(WorkerLeaving())
        self.runner.on_order(handoff_events.Drain(True))
        threading.Thread(target=self._go_when_empty, name="leaving", daemon=True).start()

    def _go_when_empty(self) -> None:
        end_s = time.monotonic() + self.start.config.server.drain_s
        time.sleep(2 * POLL_S)  # orders may be on their way that were sent before WorkerLeaving
        while self.unfinished and time.monotonic() < end_s:
            time.sleep(POLL_S)
        self.frontend.disconnect()

    # ------------------------------------------------------------ the handoff runner's thread

    def to_engine(self, event: handoff_events.EngineEvent) -> None:
        if isinstance(event, AddRequest):
            self.unfinished.add(event.id)
        elif isinstance(event, Release):
            self.unfinished.discard(event.id)
        self.engine.gate.put(event)

    def report(self, command: handoff_events.HandoffEnded | handoff_events.Reroute) -> None:
        self.frontend.post(EngineOutputs([command]))

    def send_handoff_stats(self, runner: HandoffRunner) -> None:
        handoffs, states = runner.handoffs, dict.fromkeys(STATES, 0)
        for handoff in (*handoffs.senders.values(), *handoffs.receivers.values()):
            states[handoff.state.value] += 1
        stats = HandoffStats(
            states=states,
            pages={hold.value: handoffs.ledger.pages(hold) for hold in PageHold},
            links=runner.links_by_transport(),
            unexpected=handoffs.unexpected,
            bytes_sent=runner.bytes_sent,
        )
        self.frontend.post(EngineOutputs(handoff_stats=stats))

    # ------------------------------------------------------------ the engine's thread

    def deliver(self, outputs: Sequence[Output], stats: Stats | None, engine: Engine) -> None:
        progress = engine.take_progress()
        deltas = [output for output in outputs if isinstance(output, OutputDelta)]
        if progress or deltas:
            self.runner.on_engine_outputs(*progress, *deltas)
        for delta in deltas:
            if delta.finish_reason is not None:
                self.unfinished.discard(delta.id)
        super().deliver(outputs, stats, engine)


def kv_transfer_of(sent: SentKv) -> KvTransfer:
    first, last = sent.layers
    return KvTransfer(
        sent.worker, sent.kind, sent.started_s, sent.ended_s, sent.bytes, first, last, sent.error
    )
