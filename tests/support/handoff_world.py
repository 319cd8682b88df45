"""A small cluster that goes wrong: workers, links, a front and a network, all in one process, turned by a random generator.

What is real: cluster/handoff.py (both state machines), front.py, dispatch.py, the wire encoding, device/link/sim.py, core/pages.py.
What is made up: the engine (kv_engine.py) and everything that can fail. The oracle: each page layer's content is checked when a
request is adopted and again when it ends; each span that lands is checked against the reservation; the client's tokens are known
beforehand.
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
from counterpoint.disagg.handoff_events import (
    HandoffConfig,
    HandoffOutcome,
    KvGeometry,
    TransferGranularity,
    engine_id,
)
from counterpoint.disagg.page_ledger import PageHold
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
    mover: SimTransport
    clock_s: float  # what its clock shows at world time 0
    inbox: deque = field(default_factory=deque)  # to the engine
    frozen: bool = False
    peers: dict[int, str] = field(default_factory=dict)  # link -> worker at the other end
    stopped: set = field(default_factory=set)  # (link, handoff) that said it posts nothing more


class World:
    """`weather`: what goes wrong, from `WEATHER`. On any day but a stormy one, every request must get its whole answer."""

    def __init__(
        self, seed: int, weather: str = "storm", workers: int = 3, living: int = 6
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.weather = weather
        self.living = living
        self.now = 0.0
        self.rules = HandoffConfig(
            write_pages=rng.choice([1, 2, 100]),
            max_quarantine_pages=rng.choice([6, 1000]),
            lease_s=rng.choice([2.0, 10.0]),
            dead_s=3.0 if weather == "storm" else 1e6,
            remembered=rng.choice([4, 4096]),
        )
        deadline_s = rng.choice([8.0, 40.0]) if weather == "storm" else 1e6
        self.front = PoolFrontend(
            self.pick, deadline_s, rng.choice([0, 1, 3]), rng.choice(list(OnLoss))
        )
        self.pages = rng.choice([8, 14, 40])
        self.network = SimNetwork(
            checks_grants=rng.random() < 0.5,
            slow_fence=rng.random() < 0.3,
            checksums=rng.random() < 0.3,
            on_land=self.landed,
        )
        self.movers: dict[str, SimTransport] = {}
        self.workers: dict[str, Worker] = {}
        self.incarnations = 0
        self.ends: dict[int, Worker] = {}  # link number -> the worker that has this end
        self.between: dict[
            tuple[str, str], int
        ] = {}  # (prefill, decode) -> the prefill end's number
        self.mail: list[tuple[int, bytes]] = []  # (destination link, message)
        self.queues: dict[str, deque] = {}  # worker -> what it tells the front, in order
        self.orders: dict[str, deque] = {}  # front -> worker, in order
        self.arrives: dict[str, AddRequest] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: Counter = Counter()
        self.seen: Counter = Counter()
        self.verdicts: set = set()
        self.steps = 0
        self.serial = 0
        for number in range(workers):
            self.boot(f"w{number}")

    # ------------------------------------------------------------ building

    def boot(self, name: str) -> None:
        self.incarnations += 1
        mover = SimTransport(self.network, f"{name}.{self.incarnations}", self.movers)
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
        number = self.between.get((prefill.name, decode.name), 0)
        end = prefill.handoffs.links.get(number)
        if end is not None and not end.dead and self.ends.get(end.remote) is decode:
            return number
        if prefill.frozen or decode.frozen:
            return 0
        self.incarnations += 2
        here, there = self.incarnations - 1, self.incarnations
        self.ends[here], self.ends[there] = prefill, decode
        prefill.peers[here], decode.peers[there] = decode.name, prefill.name
        prefill.mover.connect(here, there, decode.mover.name.encode(), True)
        decode.mover.connect(there, here, prefill.mover.name.encode(), False)
        self.tell(prefill, handoff_events.LinkUp(here, there, decode.name, DisaggRole.PREFILL))
        self.tell(decode, handoff_events.LinkUp(there, here, prefill.name, DisaggRole.DECODE))
        self.between[prefill.name, decode.name] = here
        return here

    # ------------------------------------------------------------ one worker's turn

    def tell(self, worker: Worker, event) -> None:
        worker.handoffs.on_event(worker.clock_s + self.now, event)
        self.obey(worker)

    def obey(self, worker: Worker) -> None:
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
                worker.mover.write(command.link, command.generation, spans, command.op)
            elif kind is handoff_events.CancelWrite:
                worker.mover.cancel(command.op)
            elif kind is handoff_events.GrantPages:
                worker.mover.grant(command.link, command.generation, command.pages)
            elif kind is handoff_events.RevokePages:
                worker.mover.revoke(command.generation)
            elif kind is handoff_events.FenceLink:
                worker.mover.disconnect(command.link)
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
                    verdict = (worker.mover.name, command.handoff, command.part)
                    assert verdict not in self.verdicts, f"{verdict} ended twice"
                    self.verdicts.add(verdict)
                    assert (
                        self.weather != "quiet" or command.outcome is not HandoffOutcome.FAILED
                    ), command
                    self.seen[f"{command.part.value} {command.outcome.value}"] += 1
        if worker.mover.notices:
            self.notices(worker)

    def notices(self, worker: Worker) -> None:
        for notice in worker.mover.poll():
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
        self.obey(worker)

    def send(self, worker: Worker, command: handoff_events.SendMessage) -> None:
        message = command.message
        assert message.source == command.link
        self.seen[f"say {type(message).__name__}"] += 1
        end = worker.handoffs.links.get(command.link)
        if (
            end is not None
            and end.part is DisaggRole.PREFILL
            and isinstance(message, wire.AbortHandoff | wire.HandoffDrained)
        ):
            worker.stopped.add((command.link, message.handoff))
        self.mail.append((message.destination, wire.encode(message)))

    def engine_turn(self, worker: Worker) -> None:
        """The engine takes what waits for it, and what it says goes to the handoffs and the front."""
        engine = worker.engine
        while worker.inbox:
            event = worker.inbox.popleft()
            if isinstance(event, handoff_events.PagesVerified):
                self.tell(worker, event)
            else:
                engine.handle(event)
        out, engine.out = engine.out, []
        for output in out:
            if isinstance(output, OutputDelta):
                self.queues[worker.name].append(output)
            self.tell(worker, output)

    # ------------------------------------------------------------ the front

    def front_turn(self, name: str) -> None:
        """The front takes one report of a worker."""
        report = self.queues[name].popleft()
        if report == "lost":
            self.front.on_worker_lost(name)
        else:
            self.front.on_report(name, report)
        self.serve()

    def serve(self) -> None:
        for item in self.front.take_items():
            if isinstance(item, ToWorker):
                self.orders[item.worker].append(item)
                self.seen[type(item.order).__name__] += 1
            elif isinstance(item.update, DeliverTokens):
                got, news = self.got[item.id], item.update
                assert news.start == len(got), "a token is missing or came twice"
                got += [token.token for token in news.tokens]
                arrive = self.arrives[item.id]
                assert got[news.start :] == [
                    token_at(arrive, position) for position in range(news.start, len(got))
                ]
            else:
                self.finish(item.id, item.update)

    def finish(self, id: str, end: RequestFinished) -> None:
        self.ended[end.finish.value] += 1
        arrive, got = self.arrives.pop(id), self.got.pop(id)
        if end.finish is FinishReason.LENGTH:
            assert len(got) == arrive.sampling.max_tokens
        else:
            assert self.weather == "storm", f"{id} ended with {end}"

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
        """The worker takes an order of the front; it dials before it starts anything."""
        item = self.orders[worker.name].popleft()
        order = item.order
        if item.decode:
            order = msgspec.structs.replace(
                order, link=self.link(worker, self.workers[item.decode])
            )
        self.tell(worker, order)

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
        self.arrives[arrive.id] = arrive
        self.got[arrive.id] = []
        self.front.add_request(arrive)
        self.serve()

    def deliver(self, index: int) -> None:
        destination, data = self.mail[index]
        worker = self.ends[destination]
        alive = self.workers[worker.name] is worker
        if alive and worker.frozen:
            return
        self.mail[index] = self.mail[-1]
        self.mail.pop()
        if alive:
            self.tell(worker, wire.decode(data))

    def tick(self, worker: Worker) -> None:
        worker.handoffs.tick(worker.clock_s + self.now)
        self.obey(worker)
        self.notices(worker)

    def move(self, action: float) -> None:
        """A write in flight comes further."""
        flight = self.rng.choice(self.network.writes)
        if action < 0.4:
            self.network.land(flight, self.rng.randint(1, 3))
        else:
            self.network.complete(flight)
            self.poll(flight.source)

    def poll(self, mover: SimTransport) -> None:
        for worker in self.workers.values():
            if worker.mover is mover and not worker.frozen:
                self.notices(worker)

    def step(self) -> None:
        """One event of a protocol, somewhere; or a fault."""
        self.steps += 1
        rng, roll = self.rng, self.rng.random()
        worker = rng.choice(tuple(self.workers.values()))
        if roll < 0.4 and self.mail:
            self.deliver(rng.randrange(len(self.mail)))
        elif roll < 0.5 and self.network.writes:
            self.move(rng.random())
        elif 0.5 <= roll < 0.53 and self.weather != "quiet":
            kinds = WEATHER[self.weather]
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
        elif roll > 0.96 and len(self.front.requests) < self.living:
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
        if kind in ("drop", "repeat") and self.mail:
            index = self.rng.randrange(len(self.mail))
            if kind == "repeat":
                self.mail.append(self.mail[index])
            else:
                self.mail.pop(index)
        elif kind == "withdraw" and self.front.requests:
            self.withdraw(self.rng.choice(tuple(self.front.requests)))
        elif kind == "crash":
            self.crash(worker)
        elif kind == "freeze":
            worker.frozen = not worker.frozen
        elif kind == "stall" and worker.peers:
            self.network.stalled ^= {self.rng.choice(tuple(worker.peers))}
        elif kind == "break write" and self.network.writes:
            flight = self.rng.choice(self.network.writes)
            self.network.complete(flight, "the link broke")
            self.poll(flight.source)
        elif kind == "cut" and worker.handoffs.links and not worker.frozen:
            self.tell(
                worker, handoff_events.LinkDown(self.rng.choice(tuple(worker.handoffs.links)))
            )
        elif kind == "sever":
            self.sever()
        elif kind == "drain" and not worker.frozen:
            self.tell(worker, handoff_events.Drain(not worker.handoffs.draining))
        elif kind == "sleep":
            self.now += self.rng.random() * 4

    def withdraw(self, id: str) -> None:
        """The client is gone."""
        self.front.abort(id)
        self.serve()
        self.ended["withdrawn"] += 1
        del self.got[id], self.arrives[id]

    def crash(self, worker: Worker) -> None:
        """The process dies and another starts in its place. What it had not yet told the front is lost."""
        self.network.kill(worker.mover)
        told = self.rng.randint(0, len(self.queues[worker.name]))
        queue = deque([*list(self.queues[worker.name])[:told], "lost"])
        self.boot(worker.name)
        self.queues[worker.name] = queue
        for other in self.workers.values():
            self.poll(other.mover)

    def sever(self) -> None:
        for link, owner in tuple(self.network.severing.items()):
            self.network.sever(link)
            self.poll(owner)

    # ------------------------------------------------------------ checks

    def landed(self, flight, spans) -> None:
        """A write reads pages that a handoff keeps, and changes pages that are reserved for it."""
        movers = {worker.mover: worker for worker in self.workers.values()}
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

    def settle(self) -> None:
        """No more faults and no new requests: everything must come to its end, and nothing may be left."""
        self.network.stalled.clear()
        for worker in self.workers.values():
            worker.frozen = False
        for _ in range(4000):
            self.steps += 1
            self.sever()
            for flight in tuple(self.network.writes):
                self.network.complete(flight)
                self.poll(flight.source)
            for worker in tuple(self.workers.values()):
                self.tick(worker)
                while worker.inbox or worker.engine.out:
                    self.engine_turn(worker)
                worker.engine.work()
                while self.orders[worker.name]:
                    self.take_order(worker)
                while self.queues[worker.name]:
                    self.front_turn(worker.name)
            for _ in range(len(self.mail)):
                self.deliver(0)
            self.now += 0.05
            if not self.front.requests and all(
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
            and not worker.engine.pieces
            and not worker.inbox
            and not self.queues[worker.name]
        )

    def describe(self) -> list:
        return [
            (
                worker.name,
                [
                    (s.id, s.over, s.in_flight, s.sender and s.sender.state)
                    for s in worker.handoffs.sources.values()
                ],
                [(s.id, s.state, s.ops, s.link) for s in worker.handoffs.senders.values()],
                [
                    (r.id, r.state, r.generation, r.reason, r.link)
                    for r in worker.handoffs.receivers.values()
                ],
                list(worker.engine.pieces),
            )
            for worker in self.workers.values()
        ] + [(d.arrive.id, d) for d in self.front.requests.values()]


WEATHER = {
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
