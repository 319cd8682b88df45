"""A pool on a virtual clock: simulated workers that hand requests over to each other.

Owns: whose turn it is among workers, links and clients; messages on their way; each client's
timing. Promises: the serving code decides who prefills, how KV is sent and who decodes (frontend,
load tracker, handoffs, engines), and its commands are interpreted by the serving code too;
deterministic; no message is lost. Must not: decide or price anything.

A message between workers takes `message_s`. The frontend's orders and reports take no time, as with
one engine. Each (prefill worker, decode worker) pair has a link, which carries one write at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from counterpoint.config import Config
from counterpoint.core.engine import Engine
from counterpoint.core.loop import run_turn
from counterpoint.core.request import RequestLifetime
from counterpoint.device.sim import VirtualEventQueue
from counterpoint.disagg import handoff_events
from counterpoint.disagg.command_interpreter import CommandInterpreter
from counterpoint.disagg.dispatch import DeliverTokens, RequestFinished
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.handoff_events import (
    HandoffConfig,
    KvGeometry,
    event_of_notice,
    handoff_of,
)
from counterpoint.disagg.load_tracker import LoadTracker, WorkerShape
from counterpoint.disagg.messages import Message
from counterpoint.disagg.pool_frontend import PoolFrontend, ToClient, ToWorker
from counterpoint.disagg.router import Router, RoutingRule
from counterpoint.disagg.routing_feedback import LinkBandwidth
from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.kv_transfer.sim import SimNetwork, SimTransport
from counterpoint.simulator.machine import Machine, SimEngine, kv_token_bytes, make_sim_engine
from counterpoint.types import (
    AddRequest,
    Admitted,
    DisaggRole,
    Output,
    OutputDelta,
    RequestTiming,
    Role,
)

NEVER = math.inf
NO_TIMEOUTS = HandoffConfig(  # no message is lost, so none is repeated
    heartbeat_interval_s=NEVER,
    peer_timeout_s=NEVER,
    lease_s=NEVER,
    resend_interval_s=NEVER,
    drain_timeout_s=NEVER,
)
TICK_S = 0.25
CPU_LINK_BYTES_PER_S = 1e9
GPU_LINK_BYTES_PER_S = 1e11  # per GPU: what serving assumes until it has measured the link


@dataclass(frozen=True, slots=True)
class SimPoolOptions:
    """`deadline_s`: of a handoff. `chunk_tokens`: of a worker's mixed batch, for the router."""

    message_s: float
    deadline_s: float
    chunk_tokens: int


@dataclass(slots=True, eq=False)
class SimWorker:
    """The WorkerPort of its handoffs. Everything reaches it through its event queue."""

    name: str
    role: Role
    sim: SimEngine
    transport: SimTransport
    memory: KvMemory
    pool: SimPool = field(init=False)
    handoffs: Handoffs = field(init=False)
    interpreter: CommandInterpreter = field(init=False)
    tick_scheduled: bool = False

    def __post_init__(self) -> None:
        limits = self.sim.engine.limits
        self.handoffs = Handoffs(NO_TIMEOUTS, KvGeometry(limits.layers, limits.page_tokens))
        self.interpreter = CommandInterpreter(self.handoffs, self.memory, [self.transport], self)

    @property
    def engine(self) -> Engine:
        return self.sim.engine

    def to_engine(self, event: handoff_events.EngineEvent) -> None:
        self.sim.events.post(self.pool.now, event)

    def report(self, command: handoff_events.HandoffEnded | handoff_events.Reroute) -> None:
        self.pool.on_report(self, command)

    def send_message(self, link: int, message: Message) -> None:
        self.pool.send(message)

    def close_link(self, link: int) -> None:
        pass

    def verify_pages(self, command: handoff_events.VerifyPages) -> None:
        raise AssertionError("simulated transports send no checksums")

    def before_write(self, command: handoff_events.WriteKv, num_bytes: int) -> None:
        self.pool.network.now = self.pool.now


class SimPool:
    """`on_finished` gets each request's timing at its end, and the error if there is one."""

    def __init__(
        self,
        workers: Sequence[SimWorker],
        network: SimNetwork,
        load_tracker: LoadTracker,
        options: SimPoolOptions,
        on_finished: Callable[[RequestTiming, str], None],
    ) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.network = network
        self.load_tracker = load_tracker
        self.options = options
        self.on_finished = on_finished
        self.frontend = PoolFrontend(load_tracker.choose_route, options.deadline_s)
        self.now = 0.0
        self.clients: dict[str, RequestLifetime] = {}
        self.arrivals = VirtualEventQueue()
        self._link_owners: dict[int, SimWorker] = {}  # by link number
        self._links: dict[tuple[str, str], int] = {}  # (prefill, decode) -> prefill end's number
        for worker in workers:
            worker.pool, limits = self, worker.engine.limits
            shape = WorkerShape(
                limits.units,
                limits.layers,
                limits.page_tokens,
                limits.pages,
                options.chunk_tokens,
                limits.max_running,
            )
            load_tracker.add_worker(worker.name, worker.role, shape)

    def submit_at(self, at_s: float, make: Callable[[], AddRequest]) -> None:
        """The request is made when it arrives, at `at_s`."""
        self.arrivals.call_at(at_s, lambda: self._add_request(make()))

    def run(self) -> None:
        """Until nothing is left to happen."""
        queues: list[tuple[VirtualEventQueue, SimWorker | None]] = [(self.arrivals, None)]
        queues += [(worker.sim.events, worker) for worker in self.workers.values()]
        while True:
            queue, worker = min(queues, key=lambda each: each[0].next_event_s)
            write_s = self.network.next_write_s
            self.now = min(queue.next_event_s, NEVER if write_s is None else write_s)
            if self.now == NEVER:
                return
            if self.now == write_s:
                self._complete_writes()
            elif (turn := queue.advance()) is not None and worker is not None:
                run_turn(worker.engine, *turn, worker.sim.executor, self._make_deliver(worker))

    # ------------------------------------------------------------ a worker

    def _on_event(self, worker: SimWorker, event: handoff_events.Event) -> None:
        worker.handoffs.on_event(self.now, event)
        self._run_commands(worker)

    def _make_deliver(self, worker: SimWorker) -> Callable[[list[Output], Engine], None]:
        def deliver(outputs: list[Output], engine: Engine) -> None:
            for one in engine.take_progress():
                if isinstance(one, Admitted):
                    self._on_admitted(one.id)
                worker.handoffs.on_event(self.now, one)
            deltas = [output for output in outputs if isinstance(output, OutputDelta)]
            for delta in deltas:
                worker.handoffs.on_event(self.now, delta)
            self._run_commands(worker)
            for output in outputs:
                if isinstance(output, RequestTiming):
                    self._on_engine_timing(output)
            for delta in deltas:
                self.frontend.on_report(worker.name, delta)
            self._dispatch_pending()

        return deliver

    def _run_commands(self, worker: SimWorker) -> None:
        worker.interpreter.run_commands()
        self._take_notices(worker)
        if not worker.tick_scheduled and not worker.handoffs.idle:
            worker.tick_scheduled = True
            worker.sim.events.call_at(self.now + TICK_S, lambda: self._tick(worker))

    def _take_notices(self, worker: SimWorker) -> None:
        for notice in worker.transport.poll():
            self._on_event(worker, event_of_notice(notice))

    def _tick(self, worker: SimWorker) -> None:
        worker.tick_scheduled = False
        worker.handoffs.tick(self.now)
        self._run_commands(worker)

    # ------------------------------------------------------------ between workers

    def send(self, message: Message) -> None:
        target, at_s = self._link_owners[message.destination], self.now + self.options.message_s
        target.sim.events.call_at(at_s, lambda: self._on_event(target, message))

    def _complete_writes(self) -> None:
        self.network.advance(self.now)
        for worker in self.workers.values():
            self._take_notices(worker)

    def _link(self, prefill: SimWorker, decode: SimWorker) -> int:
        """The number of the prefill worker's end of the link between them."""
        number = self._links.get((prefill.name, decode.name))
        if number is None:
            number, remote = len(self._link_owners) + 1, len(self._link_owners) + 2
            self._links[prefill.name, decode.name] = number
            self._link_owners |= {number: prefill, remote: decode}
            decode.transport.connect(remote, number, prefill.transport.name.encode(), False)
            prefill.transport.connect(number, remote, decode.transport.name.encode(), True)
            prefill.interpreter.links[number] = prefill.transport
            decode.interpreter.links[remote] = decode.transport
            as_prefill, as_decode = DisaggRole.PREFILL, DisaggRole.DECODE
            up = handoff_events.LinkUp
            self._on_event(prefill, up(number, remote, decode.name, as_prefill))
            self._on_event(decode, up(remote, number, prefill.name, as_decode))
        return number

    # ------------------------------------------------------------ the frontend

    def _add_request(self, request: AddRequest) -> None:
        self.clients[request.id] = RequestLifetime(request, self.now)
        self.frontend.add_request(request)
        self._dispatch_pending()

    def on_report(
        self, worker: SimWorker, command: handoff_events.HandoffEnded | handoff_events.Reroute
    ) -> None:
        if isinstance(command, handoff_events.HandoffEnded):
            self.load_tracker.on_handoff_ended(worker.name, command)
        self.frontend.on_report(worker.name, command)
        self._dispatch_pending()

    def _dispatch_pending(self) -> None:
        while items := self.frontend.take_items():
            for item in items:
                if isinstance(item, ToWorker):
                    self._to_worker(self.workers[item.worker], item)
                else:
                    self._to_client(item)

    def _to_worker(self, worker: SimWorker, item: ToWorker) -> None:
        order = item.order
        if isinstance(order, handoff_events.StartHandoff | handoff_events.Redirect):
            link = self._link(worker, self.workers[item.decode_worker])
            order = msgspec.structs.replace(order, link=link)
        self._on_event(worker, order)

    def _to_client(self, item: ToClient) -> None:
        client, update = self.clients[item.id], item.update
        if isinstance(update, DeliverTokens):
            self.load_tracker.on_delivery(client, update, self.now, client.arrival_s)
        elif isinstance(update, RequestFinished):
            self.load_tracker.on_finished(item.id)
            del self.clients[item.id]
            self.on_finished(client.to_timing(self.now, update.finish), update.error)

    def _client_of(self, engine_id: str) -> RequestLifetime | None:
        handoff = handoff_of(engine_id)
        return self.clients.get(handoff[0].request) if handoff is not None else None

    def _on_admitted(self, engine_id: str) -> None:
        client = self._client_of(engine_id)
        if client is not None and client.admitted_s is None:
            client.admitted_s = self.now

    def _on_engine_timing(self, timing: RequestTiming) -> None:
        """An engine's part of a request has ended."""
        client = self._client_of(timing.id)
        if client is not None:
            client.preemptions += timing.preemptions
            if client.admitted_s is None:
                client.admitted_s = timing.admitted_s


def make_sim_pool(
    machine: Machine, config: Config, on_finished: Callable[[RequestTiming, str], None]
) -> SimPool:
    """Workers as configured, with the frontend that would serve them (serve/worker/pool.py)."""
    cluster, device = config.cluster, machine.device
    token_bytes = round(kv_token_bytes(machine.model, device, config))
    on_cpu = device.name.startswith("cpu")
    default = CPU_LINK_BYTES_PER_S if on_cpu else GPU_LINK_BYTES_PER_S * device.degree
    links = LinkBandwidth(cluster.link_bytes_per_s or default, token_bytes)
    regions = 2 * machine.model.layers
    # In the transports' memory one byte stands for a page of one layer's keys or values.
    page_bytes = token_bytes * config.device.page_tokens / regions
    network = SimNetwork(links.nominal_bytes_per_s / page_bytes, checks_grants=True)
    transports: dict[str, SimTransport] = {}
    workers: list[SimWorker] = []
    for kind, count, role in (
        ("prefill", cluster.prefill, Role.PREFILL),
        ("decode", cluster.decode, Role.DECODE),
        ("replica", cluster.replicas, Role.BOTH),
    ):
        for name in (f"{kind}-{number}" for number in range(count)):
            sim = make_sim_engine(machine, config)
            pages = sim.engine.limits.pages
            memory = KvMemory(tuple(np.zeros(pages, np.uint8) for _ in range(regions)), 1)
            transport = SimTransport(network, name, transports)
            transport.register(memory)
            workers.append(SimWorker(name, role, sim, transport, memory))
    router = Router(machine.estimators(config)[1], links, RoutingRule.from_config(cluster))
    options = SimPoolOptions(
        message_s=links.control_s,  # one message follows the last byte
        deadline_s=cluster.handoff_deadline_s,
        chunk_tokens=config.scheduler.chunk_tokens or 512,
    )
    tracker = LoadTracker(router, config.scheduler.prefix_cache)
    return SimPool(workers, network, tracker, options, on_finished)
