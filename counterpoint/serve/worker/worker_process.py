"""A worker's process: one engine of a pool, `python -m counterpoint.serve.worker.worker_process` or `counterpoint worker`.

Owns: the life of this process, and what passes between engine, courier and front. Promises: whatever the front was told of a
request goes to it in order; when the front is lost, every request here is given up, and none of its pages is kept; a failure to
start is told in words; the worker says that it lives from a thread that waits for no step.
Must not: speak HTTP, decide anything.

Threads: the main one runs the engine's loop and alone touches the engine; `front` has the connection to the front; the courier and
its movers have theirs.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import msgspec

from counterpoint.build import WorkerPlacement, claim_gpu, make_identity, make_transports
from counterpoint.config import Config, ConfigError, parse_host_port, require_writable
from counterpoint.core.engine import Engine
from counterpoint.device.cores import pin
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.timeline import KvTransfer, Timeline, run
from counterpoint.disagg import handoff_events
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.handoff_context import PageHold
from counterpoint.disagg.handoff_events import HandoffConfig, KvGeometry, handoff_of
from counterpoint.disagg.handoff_runner import HandoffRunner, SentKv
from counterpoint.disagg.peer_connection import Address, ControlError, check_exposure
from counterpoint.disagg.receiver import ReceiveState
from counterpoint.disagg.sender import SendState
from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.serve.observability.logs import start_logging
from counterpoint.serve.worker.engine_process import (
    STATS_S,
    die_with_parent,
    exit_with_parent,
    find_builder,
    freeze_gc,
    make_engine_info,
    open_grammar_gate,
    open_log,
    write_timeline,
)
from counterpoint.serve.worker.frontend_client import FrontendClient
from counterpoint.serve.worker.wire import EngineFailure, LoadProgress
from counterpoint.serve.worker.worker_protocol import (
    HandoffStats,
    Register,
    WorkerLeaving,
    WorkerOrder,
    WorkerReady,
    WorkerReport,
    read_cluster_token,
)
from counterpoint.spec.model import ModelError
from counterpoint.types import AddRequest, Output, OutputDelta, Release, Role

POLL_S = 0.1
STATES = sorted({state.value for state in (*SendState, *ReceiveState)} - {SendState.RELEASED.value})


class StartWorker(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told. `cores`: those it may use (empty: all). `engines`: so many share the machine's memory. `rank`: its
    number among them, who take the machine's GPUs in turn (None: it has been given a GPU, if it needs one). `port`: where other
    workers dial it (0: a free one). `stays`: it looks for its front again when it has lost it."""

    config: Config
    system: str
    name: str
    role: Role
    frontend: Address
    token: str
    cores: tuple[int, ...] = ()
    engines: int = 1
    rank: int | None = None
    port: int = 0
    reconnects: bool = False


def main() -> int:
    """Started by serve/worker/supervisor.py, which writes a Start to standard input, and watched by its other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what they mean
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=StartWorker)
    threading.Thread(target=exit_with_parent, name="parent", daemon=True).start()
    return run_worker(start)


def join(config: Config, front: str, role: Role, name: str | None) -> int:
    """`counterpoint worker`: a worker of a front elsewhere, until a signal. Raises ConfigError."""
    host, port = parse_host_port("join", front)
    token = read_cluster_token(config)
    try:
        check_exposure(host, token)
    except ControlError as error:
        raise ConfigError(str(error)) from None
    return run_worker(
        StartWorker(
            config=config.replace(cluster_token=None),
            system="counterpoint.build:system",
            name=name or f"{role.value}-{socket.gethostname()}",
            role=role,
            frontend=Address(host, port),
            token=token,
            reconnects=True,
        )
    )


def run_worker(start: StartWorker) -> int:
    """Join the front, build the engine, run it until the front says farewell. The exit status: 0, 1 (broken) or 2 (a setting is
    wrong, or the front refuses this worker)."""
    start_logging(start.config.server.log_level, start.config.server.log_format)
    inbox = WallClockEventQueue()
    line = FrontendClient(
        start.frontend, start.token, Register(worker=start.name, role=start.role), start.reconnects
    )
    try:
        line.open(inbox.stop)
    except (ControlError, OSError) as error:
        print(f"no place at {start.frontend.host}:{start.frontend.port}: {error}", file=sys.stderr)
        return 2
    try:
        worker = PoolWorker(start, inbox, line)
        if start.reconnects:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: worker.leave())
        worker.run()
        if line.reason:
            print(f"the front does not want this worker: {line.reason}", file=sys.stderr)
        return 2 if line.reason else 0
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        line.post(EngineFailure(str(error), blame="user"))
        return 2
    except Exception as error:  # it could not be built, or its device is lost: nothing can go on
        traceback.print_exc()
        line.post(EngineFailure(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        line.close()


class PoolWorker:
    """An engine with a courier, as the courier's Outside."""

    def __init__(
        self, start: StartWorker, inbox: WallClockEventQueue, line: FrontendClient
    ) -> None:
        if start.cores:
            pin(start.cores)
        host = start.config.cluster.cluster_host or line.local_host
        self.start = start = msgspec.structs.replace(
            start, config=start.config.replace(cluster_host=host)
        )
        self.inbox = inbox
        self.frontend = line
        self.unfinished: set[str] = set()  # by the engine's names: what it has and has not ended
        self.leaving = False
        self._stats_due_s = 0.0
        self._runner: HandoffRunner | None = None
        self.device, sharers = claim_gpu(start.config, start.rank, start.engines)
        self.links = make_transports(start.config, self._wake, self.device)
        shm = self.links.get("shm")
        engines = sharers if self.device == "cuda" else start.engines
        place = WorkerPlacement(
            self.device, engines, shm.allocate if isinstance(shm, ShmTransport) else None
        )
        build = find_builder(start.system)
        require_writable("timeline", path_for_worker(start.config.server.timeline, start.name))
        self.log = open_log(path_for_worker(start.config.server.event_log, start.name))
        self.system = build(
            start.config, inbox, lambda stage: line.post(LoadProgress(stage)), place
        )
        self.gate = open_grammar_gate(self.system, inbox)
        self.runner = self._runner = self._make_runner()

    def _make_runner(self) -> HandoffRunner:
        start, system = self.start, self.system
        me = make_identity(start.name, self.links, system, start.token, self.device)
        handoffs = Handoffs(
            HandoffConfig(), KvGeometry(system.spec.layers, system.limits.page_tokens)
        )
        host = start.config.cluster.cluster_host or "127.0.0.1"
        courier = HandoffRunner(me, handoffs, self, Address(host, start.port), self.fail)
        try:
            courier.start()
        except OSError:
            if not start.port:
                raise
            courier = HandoffRunner(me, handoffs, self, Address(host, 0), self.fail)
            courier.start()
        return courier

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.on_notices()

    def run(self) -> None:
        """From Ready to the front's farewell."""
        start, system = self.start, self.system
        freeze_gc()
        ready = WorkerReady(
            engine_info=make_engine_info(start.config, system),
            address=self.runner.address,
            digest=self.runner.identity.digest,
            transports=self.runner.identity.endpoint.transports,
            units=system.limits.units,
            gpu=system.calibration_target.key.device
            if self.device == "cuda" and system.calibration_target is not None
            else "",
            kv_bytes_per_token=self.runner.identity.memory.page_bytes
            * 2
            * system.spec.layers
            // system.limits.page_tokens,
        )
        self.frontend.serve(
            ready,
            self.on_orders,
            self.on_frontend_lost,
            lambda: self.runner.inspect(self.send_handoff_stats),
        )
        path = path_for_worker(start.config.server.timeline, start.name)
        timeline = (
            Timeline(system.executor, self.inbox, system.engine.policy.lanes)
            if path is not None
            else None
        )
        if timeline is not None:
            self.runner.on_kv_sent = lambda sent: timeline.record_transfer(kv_transfer_of(sent))
        try:
            run(system.engine, self.inbox, system.executor, self.deliver, self.log, timeline)
        finally:
            self.runner.close()
            self.gate.close()
            for link in self.links.values():
                link.close()
            if self.log is not None:
                self.log.close()
            if timeline is not None and path is not None:
                write_timeline(timeline, path)
        system.executor.close()

    def fail(self, error: str) -> None:
        """Something is wrong with this worker itself: end it, so that what runs here goes on elsewhere. From any thread."""
        print(error, file=sys.stderr, flush=True)
        os._exit(1)

    # ------------------------------------------------------------ the front's thread

    def on_orders(self, orders: list[WorkerOrder]) -> None:
        for told in orders:
            self.runner.on_order(told.order, told.decode_address)

    def on_frontend_lost(self) -> None:
        """The front is lost: nobody waits for anything here."""
        for handoff in {
            known[0] for id in tuple(self.unfinished) if (known := handoff_of(id)) is not None
        }:
            self.runner.on_order(handoff_events.WithdrawRequest(handoff))
        self.runner.on_order(handoff_events.Drain(False))

    # ------------------------------------------------------------ going

    def leave(self) -> None:
        """Take nothing new, finish what is here, and go; asked twice, or after `drain_s`, at once."""
        if self.leaving:
            self.frontend.disconnect()
            return
        self.leaving = True
        self.frontend.post(WorkerLeaving())
        self.runner.on_order(handoff_events.Drain(True))
        threading.Thread(target=self._go_when_empty, name="leaving", daemon=True).start()

    def _go_when_empty(self) -> None:
        end_s = time.monotonic() + self.start.config.server.drain_s
        time.sleep(2 * POLL_S)  # for what was under way to this worker when it said so
        while self.unfinished and time.monotonic() < end_s:
            time.sleep(POLL_S)
        self.frontend.disconnect()

    # ------------------------------------------------------------ the courier's thread (courier.Outside)

    def to_engine(self, event: handoff_events.EngineEvent) -> None:
        if isinstance(event, AddRequest):
            self.unfinished.add(event.id)
        elif isinstance(event, Release):
            self.unfinished.discard(event.id)
        self.gate.put(event)

    def report(self, command: handoff_events.HandoffEnded | handoff_events.Reroute) -> None:
        self.frontend.post(WorkerReport([command]))

    def send_handoff_stats(self, courier: HandoffRunner) -> None:
        handoffs, states = courier.handoffs, dict.fromkeys(STATES, 0)
        for one in (*handoffs.senders.values(), *handoffs.receivers.values()):
            states[one.state.value] += 1
        census = HandoffStats(
            states=states,
            pages={hold.value: handoffs.ledger.pages(hold) for hold in PageHold},
            links=courier.links_by_transport(),
            unexpected=handoffs.unexpected,
            bytes_sent=courier.bytes_sent,
        )
        self.frontend.post(WorkerReport(handoff_stats=census))

    # ------------------------------------------------------------ the engine's thread

    def deliver(self, outputs: list[Output], engine: Engine) -> None:
        progress = engine.take_progress()
        deltas = [output for output in outputs if isinstance(output, OutputDelta)]
        if progress or deltas:
            self.runner.on_engine_outputs(*progress, *deltas)
        for delta in deltas:
            if delta.finish_reason is not None:
                self.unfinished.discard(delta.id)
        now, stats = time.monotonic(), None
        if now >= self._stats_due_s or engine.idle:
            stats = engine.stats()
            self._stats_due_s = now + STATS_S
        if outputs or stats is not None:
            self.frontend.post(WorkerReport(outputs, stats))


def kv_transfer_of(sent: SentKv) -> KvTransfer:
    first, last = sent.layers
    return KvTransfer(
        sent.worker, sent.kind, sent.started_s, sent.ended_s, sent.bytes, first, last, sent.error
    )


def path_for_worker(path: str | None, worker: str) -> str | None:
    """The file of one worker, where each writes its own: out.json becomes out.decode-0.json."""
    return None if path is None else str(Path(path).with_suffix(f".{worker}{Path(path).suffix}"))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # not sys.exit: threads of a lost device may never end
