"""A pool on a virtual clock: simulated workers that hand requests over to each other.

Owns: the order in which workers, links and clients have their turns; what is on its way between them; what each client has got.
Promises: who goes where, how KV is sent and who decodes then is decided by the code that serves (front, routing, handoffs,
engines); deterministic; nothing is lost on the way. Must not: decide or price anything.

A message from worker to worker takes `message_s`; what the front says or hears takes no time, as with one engine. KV goes over a
link for each pair of workers and direction, one write after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from counterpoint.core.engine import Engine
from counterpoint.core.loop import run_turn
from counterpoint.core.request import RequestLifetime
from counterpoint.device.sim import VirtualEventQueue
from counterpoint.disagg import handoff_events
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
from counterpoint.interfaces import Executor
from counterpoint.kv_transfer.sim import SimNetwork, SimTransport
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
SAFE = HandoffConfig(
    heartbeat_s=NEVER, dead_s=NEVER, lease_s=NEVER, resend_s=NEVER, drain_s=NEVER
)  # nothing is lost: no need to ask again
TICK_S = 0.25


@dataclass(slots=True, eq=False)
class SimWorker:
    """`inbox`: of its engine and its executor alone, and the way in which everything else reaches it."""

    name: str
    role: Role
    engine: Engine
    executor: Executor
    inbox: VirtualEventQueue
    mover: SimTransport
    handoffs: Handoffs = field(init=False)
    ticking: bool = False

    def __post_init__(self) -> None:
        limits = self.engine.limits
        self.handoffs = Handoffs(SAFE, KvGeometry(limits.layers, limits.page_tokens))


class SimPool:
    """`deliver` is shown each request's end: its Record, and the error if it has one. Every worker's mover has a memory."""

    def __init__(
        self,
        workers: Sequence[SimWorker],
        network: SimNetwork,
        routing: LoadTracker,
        deliver: Callable[[RequestTiming, str], None],
        *,
        message_s: float,
        deadline_s: float,
        chunk_tokens: int,
    ) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.network = network
        self.routing = routing
        self.deliver = deliver
        self.message_s = message_s
        self.front = PoolFrontend(routing.choose_route, deadline_s)
        self.now = 0.0
        self.clients: dict[str, RequestLifetime] = {}
        self.door = VirtualEventQueue()  # by which requests come
        self._ends: dict[int, SimWorker] = {}  # link number -> the worker that has this end
        self._between: dict[
            tuple[str, str], int
        ] = {}  # (prefill, decode) -> the prefill end's number
        for worker in workers:
            limits = worker.engine.limits
            shape = WorkerShape(
                limits.units,
                limits.layers,
                limits.page_tokens,
                limits.pages,
                chunk_tokens,
                limits.max_running,
            )
            routing.add_worker(worker.name, worker.role, shape)

    def post(self, at_s: float, make: Callable[[], AddRequest]) -> None:
        """A request that comes at `at_s`, and is made then."""
        self.door.call_at(at_s, lambda: self._submit(make()))

    def run(self) -> None:
        """Until nothing is left to happen."""
        inboxes: list[tuple[VirtualEventQueue, SimWorker | None]] = [(self.door, None)]
        inboxes += [(worker.inbox, worker) for worker in self.workers.values()]
        while True:
            inbox, worker = min(inboxes, key=lambda each: each[0].next_event_s)
            landed_s = self.network.next_write_s
            self.now = min(inbox.next_event_s, NEVER if landed_s is None else landed_s)
            if self.now == NEVER:
                return
            if self.now == landed_s:
                self._land()
            elif (told := inbox.advance()) is not None and worker is not None:
                run_turn(worker.engine, *told, worker.executor, self._hear(worker))

    # ------------------------------------------------------------ a worker

    def _tell(self, worker: SimWorker, event: handoff_events.Event) -> None:
        """Something for its handoffs."""
        worker.handoffs.on_event(self.now, event)
        self._obey(worker)

    def _hear(self, worker: SimWorker) -> Callable[[list[Output], Engine], None]:
        def hear(outputs: list[Output], engine: Engine) -> None:
            for one in engine.take_progress():
                if isinstance(one, Admitted):
                    self._admitted(one.id)
                worker.handoffs.on_event(self.now, one)
            deltas = [output for output in outputs if isinstance(output, OutputDelta)]
            for delta in deltas:
                worker.handoffs.on_event(self.now, delta)
            self._obey(worker)
            for output in outputs:
                if isinstance(output, RequestTiming):
                    self._note(output)
            for delta in deltas:
                self.front.on_report(worker.name, delta)
            self._flow()

        return hear

    def _obey(self, worker: SimWorker) -> None:
        """Do what its handoffs ask for."""
        mover, memory = worker.mover, worker.mover.memory
        for command in worker.handoffs.take_commands():
            if isinstance(command, handoff_events.ToEngine):
                worker.inbox.post(self.now, command.event)
            elif isinstance(command, handoff_events.SendMessage):
                self._send(command.message)
            elif isinstance(command, handoff_events.WriteKv):
                assert memory is not None
                spans = memory.spans(
                    command.first_layer, command.last_layer, command.sources, command.destinations
                )
                self.network.now = self.now
                mover.write(command.link, command.generation, spans, command.op)
            elif isinstance(command, handoff_events.GrantPages):
                mover.grant(command.link, command.generation, command.pages)
            elif isinstance(command, handoff_events.RevokePages):
                mover.revoke(command.generation)
            elif isinstance(command, handoff_events.CancelWrite):
                mover.cancel(command.op)
            elif isinstance(command, handoff_events.FenceLink):
                mover.disconnect(command.link)
            elif isinstance(command, handoff_events.HandoffEnded | handoff_events.Reroute):
                self._report(worker, command)
        for notice in mover.poll():
            self._tell(worker, event_of_notice(notice))
        if not worker.ticking and not worker.handoffs.idle:
            worker.ticking = True
            worker.inbox.call_at(self.now + TICK_S, lambda: self._tick(worker))

    def _tick(self, worker: SimWorker) -> None:
        worker.ticking = False
        worker.handoffs.tick(self.now)
        self._obey(worker)

    # ------------------------------------------------------------ between workers

    def _send(self, message: Message) -> None:
        target = self._ends[message.destination]
        target.inbox.call_at(self.now + self.message_s, lambda: self._tell(target, message))

    def _land(self) -> None:
        """Writes that are at their end."""
        self.network.advance(self.now)
        for worker in self.workers.values():
            for notice in worker.mover.poll():
                self._tell(worker, event_of_notice(notice))

    def _link(self, prefill: SimWorker, decode: SimWorker) -> int:
        """The number of the prefill worker's end of the link between them."""
        number = self._between.get((prefill.name, decode.name))
        if number is None:
            here, there = len(self._ends) + 1, len(self._ends) + 2
            self._ends |= {here: prefill, there: decode}
            decode.mover.connect(there, here, prefill.mover.name.encode(), False)
            prefill.mover.connect(here, there, decode.mover.name.encode(), True)
            self._tell(prefill, handoff_events.LinkUp(here, there, decode.name, DisaggRole.PREFILL))
            self._tell(decode, handoff_events.LinkUp(there, here, prefill.name, DisaggRole.DECODE))
            number = self._between[prefill.name, decode.name] = here
        return number

    # ------------------------------------------------------------ the front

    def _submit(self, arrive: AddRequest) -> None:
        self.clients[arrive.id] = RequestLifetime(arrive, self.now)
        self.front.add_request(arrive)
        self._flow()

    def _report(
        self, worker: SimWorker, command: handoff_events.HandoffEnded | handoff_events.Reroute
    ) -> None:
        id = command.handoff.request
        if isinstance(command, handoff_events.HandoffEnded):
            if command.outcome is handoff_events.HandoffOutcome.ADOPTED:
                self.routing.on_adopted(id)
            elif command.outcome is handoff_events.HandoffOutcome.DECODED_IN_PLACE:
                self.routing.on_decode_in_place(id)
            if command.times is not None:
                self.routing.on_transfer(worker.name, command.decode_worker, command.times)
        self.front.on_report(worker.name, command)
        self._flow()

    def _flow(self) -> None:
        """Tell workers and clients what the front has for them."""
        while items := self.front.take_items():
            for item in items:
                if isinstance(item, ToWorker):
                    self._order(self.workers[item.worker], item)
                else:
                    self._give(item)

    def _order(self, worker: SimWorker, item: ToWorker) -> None:
        order = item.order
        if isinstance(order, handoff_events.StartHandoff | handoff_events.Redirect):
            order = msgspec.structs.replace(
                order, link=self._link(worker, self.workers[item.decode_worker])
            )
        self._tell(worker, order)

    def _give(self, item: ToClient) -> None:
        client, news = self.clients[item.id], item.update
        if isinstance(news, DeliverTokens):
            if news.start == 0:
                client.cached_tokens = news.tokens[0].cached_tokens
                self.routing.on_first_token(item.id, self.now - client.arrival_s)
            self.routing.on_tokens(item.id, tuple(sampled.token for sampled in news.tokens))
            client.token_s += [self.now] * len(news.tokens)
        elif isinstance(news, RequestFinished):
            self.routing.on_finished(item.id)
            del self.clients[item.id]
            self.deliver(client.to_timing(self.now, news.finish), news.error)

    def _admitted(self, id: str) -> None:
        """An engine has pages for a part of a request."""
        known = handoff_of(id)
        client = self.clients.get(known[0].request) if known is not None else None
        if client is not None and client.admitted_s is None:
            client.admitted_s = self.now

    def _note(self, record: RequestTiming) -> None:
        """Of an engine's part of a request."""
        known = handoff_of(record.id)
        client = self.clients.get(known[0].request) if known is not None else None
        if client is not None:
            client.preemptions += record.preemptions
            if client.admitted_s is None:
                client.admitted_s = record.admitted_s
