"""A small cluster with random faults: workers, links, a frontend and a network, in one process.

Real: the handoff state machines, PoolFrontend, RequestDispatch, the wire encoding, SimTransport and
PagePool. Faked: the engine (kv_engine.py). The oracle: each page layer's content is checked when a
request is adopted and when it ends; each span that lands is checked against the reservation; the
client's tokens are known beforehand.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec
from kv_engine import LAYERS, PAGE_TOKENS, WORD_BYTES, FakeEngine, plain_memory, token_at

import counterpoint.disagg.messages as wire
from counterpoint.disagg import handoff_events
from counterpoint.disagg.dispatch import DeliverTokens, OnLoss, RequestFinished
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.handoff_context import PageHold
from counterpoint.disagg.handoff_events import (
    HandoffConfig,
    HandoffOutcome,
    KvGeometry,
    TransferGranularity,
    engine_id,
)
from counterpoint.disagg.pool_frontend import PoolFrontend, Route, ToWorker
from counterpoint.kv_transfer.sim import SimNetwork, SimTransport
from counterpoint.kv_transfer.transport import Completed, LinkLost, LinkSevered, Quiesced
from counterpoint.types import AddRequest, DisaggRole, FinishReason, OutputDelta, Sampling


def pages_in(spans, column: int) -> list[int]:
    pages = []
    for start, size in spans[:, [column, 3]].tolist():
        pages += range(start // WORD_BYTES, (start + size) // WORD_BYTES)
    return pages


@dataclass(slots=True, eq=False)
class Worker:
    name: str
    engine: FakeEngine
    handoffs: Handoffs
    transport: SimTransport
    clock_s: float  # what its clock shows at world time 0
    inbox: deque = field(default_factory=deque)  # to the engine
    frozen: bool = False
    peers: dict[int, str] = field(default_factory=dict)  # link -> worker at the other end
    stopped: set = field(default_factory=set)  # (link, handoff) that said it posts nothing more


class World:
    """`weather`: what goes wrong, from `FAULT_RATES`. On any day but a stormy one, every request
    must get its whole answer."""

    def __init__(
        self, seed: int, weather: str = "storm", workers: int = 3, living: int = 6
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.faults = weather
        self.max_requests = living
        self.now = 0.0
        self.rules = HandoffConfig(
            max_write_pages=rng.choice([1, 2, 100]),
            max_quarantine_pages=rng.choice([6, 1000]),
            lease_s=rng.choice([2.0, 10.0]),
            peer_timeout_s=3.0 if weather == "storm" else 1e6,
            max_remembered=rng.choice([4, 4096]),
        )
        deadline_s = rng.choice([8.0, 40.0]) if weather == "storm" else 1e6
        self.frontend = PoolFrontend(
            self.pick, deadline_s, rng.choice([0, 1, 3]), rng.choice(list(OnLoss))
        )
        self.pages = rng.choice([8, 14, 40])
        self.network = SimNetwork(
            checks_grants=rng.random() < 0.5,
            slow_fence=rng.random() < 0.3,
            checksums=rng.random() < 0.3,
            on_land=self.landed,
        )
        self.transports: dict[str, SimTransport] = {}
        self.workers: dict[str, Worker] = {}
        self.incarnations = 0
        self.link_owners: dict[int, Worker] = {}  # link number -> the worker that has this end
        self.links: dict[tuple[str, str], int] = {}  # (prefill, decode) -> the prefill end's number
        self.messages: list[tuple[int, bytes]] = []  # (destination link, message)
        self.queues: dict[str, deque] = {}  # worker -> what it tells the front, in order
        self.orders: dict[str, deque] = {}  # front -> worker, in order
        self.requests: dict[str, AddRequest] = {}
        self.received: dict[str, list[int]] = {}
        self.ended: Counter = Counter()
        self.seen: Counter = Counter()
        self.ended_handoffs: set = set()
        self.steps = 0
        self.serial = 0
        for number in range(workers):
            self.start_worker(f"w{number}")

    # ------------------------------------------------------------ building

    def start_worker(self, name: str) -> None:
        self.incarnations += 1
        mover = SimTransport(self.network, f"{name}.{self.incarnations}", self.transports)
        engine = FakeEngine(plain_memory(self.pages), self.rng)
        mover.register(engine.memory)
        worker = Worker(
            name,
            engine,
            Handoffs(self.rules, KvGeometry(LAYERS, PAGE_TOKENS)),
            mover,
            self.rng.uniform(-1e4, 1e4),
        )
        self.workers[name] = worker
        self.queues[name] = deque()
        self.orders[name] = deque()

    def link(self, prefill: Worker, decode: Worker) -> int:
        """The number of the prefill worker's end of a living link; 0: none can be made now."""
        number = self.links.get((prefill.name, decode.name), 0)
        end = prefill.handoffs.links.get(number)
        if end is not None and not end.dead and self.link_owners.get(end.remote) is decode:
            return number
        if prefill.frozen or decode.frozen:
            return 0
        self.incarnations += 2
        here, there = self.incarnations - 1, self.incarnations
        self.link_owners[here], self.link_owners[there] = prefill, decode
        prefill.peers[here], decode.peers[there] = decode.name, prefill.name
        prefill.transport.connect(here, there, decode.transport.name.encode(), True)
        decode.transport.connect(there, here, prefill.transport.name.encode(), False)
        self.on_event(prefill, handoff_events.LinkUp(here, there, decode.name, DisaggRole.PREFILL))
        self.on_event(decode, handoff_events.LinkUp(there, here, prefill.name, DisaggRole.DECODE))
        self.links[prefill.name, decode.name] = here
        return here

    # ------------------------------------------------------------ one worker's turn

    def on_event(self, worker: Worker, event) -> None:
        worker.handoffs.on_event(worker.clock_s + self.now, event)
        self.run_commands(worker)

    def run_commands(self, worker: Worker) -> None:
        for command in worker.handoffs.take_commands():
            kind = type(command)
            self.seen[kind.__name__] += 1
            if kind is handoff_events.SendMessage:
                self.send(worker, command)
            elif kind is handoff_events.ToEngine:
                worker.inbox.append(command.event)
            elif kind is handoff_events.WriteKv:
                sender = worker.handoffs.senders[worker.handoffs.context.writes[command.op]]
                assert (command.link, sender.id) not in worker.stopped, (
                    "a write was posted after ABORTING"
                )
                memory = worker.engine.memory
                spans = memory.spans(
                    command.first_layer, command.last_layer, command.sources, command.destinations
                )
                worker.transport.write(command.link, command.generation, spans, command.op)
            elif kind is handoff_events.CancelWrite:
                worker.transport.cancel(command.op)
            elif kind is handoff_events.GrantPages:
                worker.transport.grant(command.link, command.generation, command.pages)
            elif kind is handoff_events.RevokePages:
                worker.transport.revoke(command.generation)
            elif kind is handoff_events.FenceLink:
                worker.transport.disconnect(command.link)
            elif kind is handoff_events.VerifyPages:
                memory = worker.engine.memory
                spans = memory.spans(0, LAYERS, command.pages, command.pages)
                worker.inbox.append(
                    handoff_events.PagesVerified(
                        command.generation, memory.checksum(spans) == command.checksum
                    )
                )
            else:
                self.queues[worker.name].append(command)
                if kind is handoff_events.HandoffEnded:
                    verdict = (worker.transport.name, command.handoff, command.disagg_role)
                    assert verdict not in self.ended_handoffs, f"{verdict} ended twice"
                    self.ended_handoffs.add(verdict)
                    assert self.faults != "quiet" or command.outcome is not HandoffOutcome.FAILED, (
                        command
                    )
                    self.seen[f"{command.disagg_role.value} {command.outcome.value}"] += 1
        if worker.transport.notices:
            self.handle_notices(worker)

    def handle_notices(self, worker: Worker) -> None:
        for notice in worker.transport.poll():
            if isinstance(notice, Completed):
                event = handoff_events.WriteDone(notice.op, notice.error, notice.checksum)
            elif isinstance(notice, Quiesced):
                event = handoff_events.PagesRevoked(notice.generation)
            elif isinstance(notice, LinkSevered):
                event = handoff_events.LinkFenced(notice.link)
            else:
                assert isinstance(notice, LinkLost)
                event = handoff_events.LinkDown(notice.link)
            worker.handoffs.on_event(worker.clock_s + self.now, event)
        self.run_commands(worker)

    def send(self, worker: Worker, command: handoff_events.SendMessage) -> None:
        message = command.message
        assert message.source == command.link
        self.seen[f"say {type(message).__name__}"] += 1
        end = worker.handoffs.links.get(command.link)
        if (
            end is not None
            and end.disagg_role is DisaggRole.PREFILL
            and isinstance(message, wire.AbortHandoff | wire.HandoffDrained)
        ):
            worker.stopped.add((command.link, message.handoff))
        self.messages.append((message.destination, wire.encode(message)))

    def engine_turn(self, worker: Worker) -> None:
        """The engine takes its events; its outputs go to the handoffs and the frontend."""
        engine = worker.engine
        while worker.inbox:
            event = worker.inbox.popleft()
            if isinstance(event, handoff_events.PagesVerified):
                self.on_event(worker, event)
            else:
                engine.handle(event)
        out, engine.out = engine.out, []
        for output in out:
            if isinstance(output, OutputDelta):
                self.queues[worker.name].append(output)
            self.on_event(worker, output)

    # ------------------------------------------------------------ the front

    def front_turn(self, name: str) -> None:
        """The front takes one report of a worker."""
        report = self.queues[name].popleft()
        if report == "lost":
            self.frontend.on_worker_lost(name)
        else:
            self.frontend.on_report(name, report)
        self.dispatch_pending()

    def dispatch_pending(self) -> None:
        for item in self.frontend.take_items():
            if isinstance(item, ToWorker):
                self.orders[item.worker].append(item)
                self.seen[type(item.order).__name__] += 1
            elif isinstance(item.update, DeliverTokens):
                got, news = self.received[item.id], item.update
                assert news.start == len(got), "a token is missing or came twice"
                got += [token.token for token in news.tokens]
                arrive = self.requests[item.id]
                assert got[news.start :] == [
                    token_at(arrive, position) for position in range(news.start, len(got))
                ]
            else:
                self.finish(item.id, item.update)

    def finish(self, id: str, end: RequestFinished) -> None:
        self.ended[end.finish.value] += 1
        arrive, got = self.requests.pop(id), self.received.pop(id)
        if end.finish is FinishReason.LENGTH:
            assert len(got) == arrive.sampling.max_tokens
        else:
            assert self.faults == "storm", f"{id} ended with {end}"

    def pick(self, arrive: AddRequest, avoid: str, prefill: str) -> Route | None:
        names = [name for name in self.workers if name != avoid]
        prefill = prefill or self.rng.choice(names)
        others = [
            name
            for name in self.workers
            if name != prefill and (name != avoid or len(self.workers) == 2)
        ]
        if self.rng.random() < 0.1:
            return Route(prefill, prefill)
        return (
            Route(prefill, self.rng.choice(others), self.rng.choice(list(TransferGranularity)))
            if others
            else None
        )

    def take_order(self, worker: Worker) -> None:
        """The worker takes an order of the frontend; it dials before it starts anything."""
        item = self.orders[worker.name].popleft()
        order = item.order
        if item.decode_worker:
            order = msgspec.structs.replace(
                order, link=self.link(worker, self.workers[item.decode_worker])
            )
        self.on_event(worker, order)

    # ------------------------------------------------------------ what happens next

    def new_request(self) -> None:
        self.serial += 1
        family = self.rng.randrange(3)
        length = self.rng.randint(1, 26)
        shared = min(length, self.rng.randint(0, 16))
        prompt = (
            *[family] * shared,
            *[1000 + self.serial * 50 + i for i in range(length - shared)],
        )
        sampling = Sampling(max_tokens=self.rng.choice([1, 2, 3, 8]), temperature=0)
        arrive = AddRequest(id=f"r{self.serial}", prompt=prompt, sampling=sampling)
        self.requests[arrive.id] = arrive
        self.received[arrive.id] = []
        self.frontend.add_request(arrive)
        self.dispatch_pending()

    def deliver(self, index: int) -> None:
        destination, data = self.messages[index]
        worker = self.link_owners[destination]
        alive = self.workers[worker.name] is worker
        if alive and worker.frozen:
            return
        self.messages[index] = self.messages[-1]
        self.messages.pop()
        if alive:
            self.on_event(worker, wire.decode(data))

    def tick(self, worker: Worker) -> None:
        worker.handoffs.tick(worker.clock_s + self.now)
        self.run_commands(worker)
        self.handle_notices(worker)

    def move(self, action: float) -> None:
        """A write in flight comes further."""
        flight = self.rng.choice(self.network.writes)
        if action < 0.4:
            self.network.land(flight, self.rng.randint(1, 3))
        else:
            self.network.complete(flight)
            self.poll_transport(flight.source)

    def poll_transport(self, mover: SimTransport) -> None:
        for worker in self.workers.values():
            if worker.transport is mover and not worker.frozen:
                self.handle_notices(worker)

    def step(self) -> None:
        """One event of a protocol, somewhere; or a fault."""
        self.steps += 1
        rng, roll = self.rng, self.rng.random()
        worker = rng.choice(tuple(self.workers.values()))
        if roll < 0.4 and self.messages:
            self.deliver(rng.randrange(len(self.messages)))
        elif roll < 0.5 and self.network.writes:
            self.move(rng.random())
        elif 0.5 <= roll < 0.53 and self.faults != "quiet":
            kinds = FAULT_RATES[self.faults]
            self.fault(worker, rng.choices(tuple(kinds), tuple(kinds.values()))[0])
        elif worker.frozen:
            self.idle(0.02)
        elif 0.53 <= roll < 0.6:
            self.now += rng.random() * 0.2
            self.tick(worker)
        elif roll < 0.7 and (worker.inbox or worker.engine.out):
            self.engine_turn(worker)
        elif roll < 0.8 and self.queues[worker.name]:
            self.front_turn(worker.name)
        elif roll < 0.87 and self.orders[worker.name]:
            self.take_order(worker)
        elif roll > 0.96 and len(self.frontend.requests) < self.max_requests:
            self.new_request()
        elif not worker.engine.work():
            self.idle(0.005)
        if self.steps % 64 == 0:
            self.check()

    def idle(self, seconds: float) -> None:
        """Nothing happened: that is no step."""
        self.steps -= 1
        self.now += seconds

    def fault(self, worker: Worker, kind: str) -> None:
        self.seen[f"fault {kind}"] += 1
        if kind in ("drop", "repeat") and self.messages:
            index = self.rng.randrange(len(self.messages))
            if kind == "repeat":
                self.messages.append(self.messages[index])
            else:
                self.messages.pop(index)
        elif kind == "withdraw" and self.frontend.requests:
            self.withdraw(self.rng.choice(tuple(self.frontend.requests)))
        elif kind == "crash":
            self.crash(worker)
        elif kind == "freeze":
            worker.frozen = not worker.frozen
        elif kind == "stall" and worker.peers:
            self.network.stalled ^= {self.rng.choice(tuple(worker.peers))}
        elif kind == "break write" and self.network.writes:
            flight = self.rng.choice(self.network.writes)
            self.network.complete(flight, "the link broke")
            self.poll_transport(flight.source)
        elif kind == "cut" and worker.handoffs.links and not worker.frozen:
            self.on_event(
                worker, handoff_events.LinkDown(self.rng.choice(tuple(worker.handoffs.links)))
            )
        elif kind == "sever":
            self.sever()
        elif kind == "drain" and not worker.frozen:
            self.on_event(worker, handoff_events.Drain(not worker.handoffs.draining))
        elif kind == "sleep":
            self.now += self.rng.random() * 4

    def withdraw(self, id: str) -> None:
        """The client is gone."""
        self.frontend.abort(id)
        self.dispatch_pending()
        self.ended["withdrawn"] += 1
        del self.received[id], self.requests[id]

    def crash(self, worker: Worker) -> None:
        """The process dies and another starts in its place. What it had not reported to the
        frontend is lost."""
        self.network.kill(worker.transport)
        told = self.rng.randint(0, len(self.queues[worker.name]))
        queue = deque([*list(self.queues[worker.name])[:told], "lost"])
        self.start_worker(worker.name)
        self.queues[worker.name] = queue
        for other in self.workers.values():
            self.poll_transport(other.transport)

    def sever(self) -> None:
        for link, owner in tuple(self.network.severing.items()):
            self.network.sever(link)
            self.poll_transport(owner)

    # ------------------------------------------------------------ checks

    def landed(self, flight, spans) -> None:
        """A write reads pages that a handoff keeps, and changes pages that are reserved for it."""
        movers = {worker.transport: worker for worker in self.workers.values()}
        assert flight.target in movers, "a write reached a dead process"
        desk = movers[flight.target].handoffs.context
        handoff = desk.grants.get(flight.generation)
        assert handoff is not None, "a write landed after its reservation was gone"
        name = engine_id(handoff, DisaggRole.DECODE)
        for page in pages_in(spans, 2):
            assert desk.ledger._writer.get(page) == name, (
                f"a write landed on page {page}, which is not its own"
            )
        if flight.source in movers:
            readers = movers[flight.source].handoffs.ledger._readers
            assert all(readers[page] for page in pages_in(spans, 1)), (
                "a write reads a page that was given back"
            )

    def check(self) -> None:
        for worker in self.workers.values():
            worker.engine.check(worker.handoffs.ledger)
            for hold in PageHold:
                self.seen[hold.value] += worker.handoffs.ledger.pages(hold) > 0

    def run_to_rest(self) -> None:
        """No more faults and no new requests: everything must come to its end, and nothing may be
        left."""
        self.network.stalled.clear()
        for worker in self.workers.values():
            worker.frozen = False
        for _ in range(4000):
            self.steps += 1
            self.sever()
            for flight in tuple(self.network.writes):
                self.network.complete(flight)
                self.poll_transport(flight.source)
            for worker in tuple(self.workers.values()):
                self.tick(worker)
                while worker.inbox or worker.engine.out:
                    self.engine_turn(worker)
                worker.engine.work()
                while self.orders[worker.name]:
                    self.take_order(worker)
                while self.queues[worker.name]:
                    self.front_turn(worker.name)
            for _ in range(len(self.messages)):
                self.deliver(0)
            self.now += 0.05
            if not self.frontend.requests and all(
                self.at_rest(worker) for worker in self.workers.values()
            ):
                break
        else:
            raise AssertionError(f"still going on: {self.describe()}")
        for worker in self.workers.values():
            assert worker.handoffs.ledger.is_empty
            assert worker.engine.pool.available == self.pages, "a page leaked"
            desk = worker.handoffs.context
            assert not desk.writes and not desk.grants
        self.check()
        assert not self.network.writes

    def at_rest(self, worker: Worker) -> bool:
        return (
            worker.handoffs.idle
            and not worker.engine.parts
            and not worker.inbox
            and not self.queues[worker.name]
        )

    def describe(self) -> list:
        return [
            (
                worker.name,
                [
                    (s.id, s.outcome, s.in_flight, s.sender and s.sender.state)
                    for s in worker.handoffs.sources.values()
                ],
                [(s.id, s.state, s.writes, s.link) for s in worker.handoffs.senders.values()],
                [
                    (r.id, r.state, r.generation, r.reason, r.link)
                    for r in worker.handoffs.receivers.values()
                ],
                list(worker.engine.parts),
            )
            for worker in self.workers.values()
        ] + [(d.request.id, d) for d in self.frontend.requests.values()]


FAULT_RATES = {
    "quiet": {},
    "lossy": {"drop": 1, "repeat": 1},
    "storm": {
        "drop": 20,
        "repeat": 20,
        "withdraw": 12,
        "crash": 2,
        "freeze": 3,
        "stall": 6,
        "break write": 5,
        "cut": 2,
        "sever": 8,
        "drain": 3,
        "sleep": 2,
    },
}
