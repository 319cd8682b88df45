"""Workers in processes: real runners and transports, the fake engine; the test is the frontend.

A worker can be held at a named point (`Hold`), so that a signal meets it there.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

import msgspec
from kv_engine import LAYERS, PAGE_TOKENS, FakeEngine, plain_memory, token_at

from counterpoint.disagg import handoff_events
from counterpoint.disagg.dispatch import DeliverTokens, OnLoss, RequestFinished
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.handoff_events import HandoffConfig, KvGeometry
from counterpoint.disagg.handoff_runner import HandoffRunner
from counterpoint.disagg.peer_connection import (
    Address,
    CompatibilityDigest,
    TransportEndpoint,
    WorkerIdentity,
)
from counterpoint.disagg.pool_frontend import PoolFrontend, Route, ToWorker
from counterpoint.kv_transfer.head_mapping import HeadLayout
from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.kv_transfer.nixl import NixlTransport
from counterpoint.kv_transfer.sharded import ShardedMemory, ShardedPage, ShardedTransport
from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.kv_transfer.tcp import TcpTransport
from counterpoint.kv_transfer.transport import Transport
from counterpoint.types import AddRequest, DisaggRole, OutputDelta, Sampling

PAGES, PAGE_BYTES = 24, 16 << 10
KV_HEADS, HEAD_BYTES, RANKS = 4, 1 << 10, {"p": 4, "d": 2, "e": 8}  # of pools that are cut
RULES = HandoffConfig(
    heartbeat_interval_s=0.1,
    peer_timeout_s=0.7,
    lease_s=1.5,
    park_timeout_s=60.0,
    resend_interval_s=0.1,
    drain_timeout_s=0.7,
)
DIGEST = CompatibilityDigest(
    model="m",
    weights="w",
    layers=LAYERS,
    kv_heads=1,
    head_dim=1,
    kv_dtype="word",
    page_tokens=PAGE_TOKENS,
    layout="",
    rope="",
    eos_token_ids=(),
)


class Hold(msgspec.Struct, frozen=True):
    """`prefills`: turns of prefill work that may still be done; None: any number. `closed`: parts
    that are not admitted. `decodes`: whether tokens are decoded."""

    prefills: int | None = None
    closed: tuple[DisaggRole, ...] = ()
    decodes: bool = True


# ---------------------------------------------------------------- in the worker's process


def make_transport(
    kind: str, name: str, wake: Callable[[], None]
) -> tuple[Transport, KvMemory | ShardedMemory]:
    """`kind`: of the transport, or "cut tcp", "cut nixl": each worker's pool is cut over another
    number of ranks."""
    if kind.startswith("cut "):
        layout, page = (
            HeadLayout(KV_HEADS, RANKS.get(name, 1)),
            ShardedPage(KV_HEADS, PAGE_TOKENS, HEAD_BYTES, "token, head"),
        )
        own = page._replace(heads=len(layout.heads(0))).bytes
        shards = ShardedMemory(
            layout, page, tuple(plain_memory(PAGES, own) for _ in range(layout.tp))
        )
        return ShardedTransport(
            [
                NixlTransport(wake) if kind == "cut nixl" else TcpTransport(wake)
                for _ in range(layout.tp)
            ]
        ), shards
    if kind == "shm":
        shm = ShmTransport(wake, checksums=True)
        return shm, shm.allocate(PAGES, PAGE_BYTES, 2 * LAYERS)
    return NixlTransport(wake) if kind == "nixl" else TcpTransport(
        wake, checksums=True
    ), plain_memory(PAGES, PAGE_BYTES)


class Worker:
    def __init__(
        self, pipe: Connection, name: str, kind: str, port: int, digest: CompatibilityDigest
    ) -> None:
        self.pipe = pipe
        self.hold = Hold()
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.runner: HandoffRunner | None = None
        mover, memory = make_transport(kind, name, self.wake)
        self.kv = FakeEngine(memory, random.Random(name))
        self.handoffs = Handoffs(RULES, KvGeometry(LAYERS, PAGE_TOKENS))
        reach = TransportEndpoint(str(os.getpid()), "this host", "cpu", (mover.kind,))
        identity = WorkerIdentity(
            name,
            digest,
            reach,
            memory,
            {mover.kind: mover},
            {mover.kind: mover.register(memory)},
            "a token",
        )
        self.transport = mover
        self.runner = HandoffRunner(identity, self.handoffs, self, Address("127.0.0.1", port))
        self.runner.start()
        self.send(("address", self.runner.address))

    def wake(self) -> None:
        if self.runner is not None:
            self.runner.on_notices()

    def send(self, words) -> None:
        self.pipe.send(words)

    # what the courier calls (courier.Outside)

    def to_engine(self, event) -> None:
        self.inbox.put(event)

    def report(self, command) -> None:
        self.inbox.put(("report", command))

    def run(self) -> None:
        threading.Thread(target=self.read_commands, daemon=True).start()
        while True:
            try:
                got = self.inbox.get(timeout=0.002)
            except queue.Empty:
                got = None
            if got == "quit":
                break
            if isinstance(got, tuple):
                self.send(got)
            elif isinstance(got, Hold):
                self.hold = got
                self.kv.closed = set(got.closed)
                self.kv.admit()
            elif got is not None:
                self.kv.handle(got)
            else:
                self.work()
            out, self.kv.out = self.kv.out, []
            for output in out:
                if isinstance(output, OutputDelta):
                    self.send(("report", output))
                self.runner.on_engine_outputs(output)
        self.runner.close()
        self.transport.close()

    def work(self) -> None:
        engine = self.kv
        for piece in tuple(engine.active):
            if piece.decoding:
                if self.hold.decodes:
                    engine.token(piece)
            elif self.hold.prefills != 0:
                engine.prefill(piece)
                if self.hold.prefills is not None:
                    self.hold = msgspec.structs.replace(self.hold, prefills=self.hold.prefills - 1)

    def read_commands(self) -> None:
        while True:
            try:
                words = self.pipe.recv()
            except (EOFError, OSError):
                words = "quit"  # the test is gone
            if words == "census":
                self.runner.inspect(lambda _: self.inbox.put(("census", self.leftovers())))
            elif isinstance(words, tuple):
                self.runner.on_order(*words)
            else:
                self.inbox.put(words)
            if words == "quit":
                return

    def leftovers(self) -> dict:
        """What is left; all zero when nothing is."""
        return {
            "handoffs": not self.handoffs.idle,
            "held": not self.handoffs.ledger.is_empty,
            "requests": len(self.kv.parts),
            "pages": PAGES - self.kv.pool.available,
            "starting": len(self.runner._starting),
            "states": [
                part.state.value
                for part in (*self.handoffs.senders.values(), *self.handoffs.receivers.values())
            ],
            "written": sum(sender.written_page_layers for sender in self.handoffs.senders.values()),
        }


def work(pipe: Connection, name: str, kind: str, port: int, digest: CompatibilityDigest) -> None:
    worker = Worker(pipe, name, kind, port, digest)
    worker.run()


# ---------------------------------------------------------------- in the test


class Member:
    """A worker, seen from the test."""

    def __init__(
        self, name: str, kind: str, port: int = 0, digest: CompatibilityDigest = DIGEST
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=work, args=(theirs, name, kind, port, digest), daemon=True
        )
        self.process.start()
        theirs.close()
        self.address: Address | None = None
        self.leftovers: dict | None = None
        self.connected = True

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self.pipe.send("quit")
        self.process.join(10)
        assert self.process.exitcode is not None, f"{self.name} does not end"
        self.pipe.close()


class Cluster:
    """Workers p, d and e; p prefills requests and d decodes them while both are there."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.members = {name: Member(name, kind) for name in "pde"}
        self.frontend = PoolFrontend(
            self.pick, deadline_s=20.0, retries=3, on_loss=OnLoss.RECOMPUTE
        )
        self.requests: dict[str, AddRequest] = {}
        self.received: dict[str, list[int]] = {}
        self.ends: dict[str, RequestFinished] = {}
        self.reports: list = []
        self.avoid: set[str] = set()
        self.wait_until(lambda: all(member.address for member in self.members.values()))

    def pick(self, arrive: AddRequest, avoid: str, prefill: str) -> Route | None:
        names = [name for name in self.members if name not in self.avoid and name != avoid]
        prefill = prefill or names[0]
        names = [name for name in names if name != prefill]
        return Route(prefill, names[0]) if names else None

    def submit(self, id: str, tokens: int = 30, max_tokens: int = 6) -> None:
        start = 1000 * len(self.requests)  # no two prompts share a page
        arrive = AddRequest(
            id=id,
            prompt=tuple(range(start, start + tokens)),
            sampling=Sampling(max_tokens=max_tokens),
        )
        self.requests[id] = arrive
        self.received[id] = []
        self.frontend.add_request(arrive)
        self.dispatch_pending()

    def hold(self, name: str, **kwargs) -> None:
        """It is in force when this returns."""
        self.members[name].pipe.send(Hold(**kwargs))
        self.leftovers(name)

    def wait_until(self, done: Callable[[], bool], seconds: float = 15.0) -> None:
        """Let the frontend work until `done`."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"waited in vain; reports: {self.reports[-8:]}"
            pipes = {member.pipe: name for name, member in self.members.items() if member.connected}
            for pipe in wait(list(pipes), timeout=0.05):
                self.on_message(pipes[pipe])

    def on_message(self, name: str) -> None:
        member = self.members[name]
        try:
            kind, words = member.pipe.recv()
        except (EOFError, OSError):
            member.connected = False
            return
        if kind == "address":
            member.address = Address(*words)
        elif kind == "census":
            member.leftovers = words
        else:
            self.reports.append((name, words))
            self.frontend.on_report(name, words)
            self.dispatch_pending()

    def dispatch_pending(self) -> None:
        for item in self.frontend.take_items():
            if isinstance(item, ToWorker):
                member = self.members.get(item.worker)
                if member is not None and member.connected:
                    address = (
                        self.members[item.decode_worker].address if item.decode_worker else None
                    )
                    member.pipe.send((item.order, address))
            elif isinstance(item.update, DeliverTokens):
                got = self.received[item.id]
                assert item.update.start == len(got)
                got += [token.token for token in item.update.tokens]
            else:
                self.ends[item.id] = item.update

    def ended(self, id: str) -> bool:
        return id in self.ends

    def check_answer(self, id: str) -> None:
        arrive = self.requests[id]
        assert self.received[id] == [
            token_at(arrive, position) for position in range(arrive.sampling.max_tokens)
        ], self.ends

    def has_reported(self, name: str, kind: type, **fields) -> bool:
        """Whether a worker has reported such a thing."""
        return any(
            who == name
            and isinstance(words, kind)
            and all(getattr(words, key) == value for key, value in fields.items())
            for who, words in self.reports
        )

    def wait_for_state(self, point: str, id: str) -> None:
        """Wait until the handoff is at a named point (POINTS in test_worker_processes.py)."""
        words = {
            "queued": ("d", "queued"),
            "reserved": ("d", "reserved"),
            "parked": ("p", "parked"),
            "decoding": ("d", "adopted"),
        }
        name, state = words[point]
        if state == "adopted":
            self.wait_until(
                lambda: self.has_reported(
                    name, handoff_events.HandoffEnded, outcome=handoff_events.HandoffOutcome.ADOPTED
                )
            )
            return
        self.wait_until(lambda: state in self.leftovers(name)["states"])
        if point == "reserved":  # and some of it has been written
            self.wait_until(lambda: self.leftovers("p")["written"] > 0)

    def leftovers(self, name: str) -> dict:
        member = self.members[name]
        member.leftovers = None
        member.pipe.send("census")
        self.wait_until(lambda: member.leftovers is not None)
        assert member.leftovers is not None
        return member.leftovers

    def wait_for_rest(self, names: str = "pde", seconds: float = 10.0) -> None:
        """Every ledger comes to zero."""
        end = time.monotonic() + seconds
        for name in names:
            while any(left := self.leftovers(name).values()):
                assert time.monotonic() < end, f"{name} keeps {self.members[name].leftovers}"
                time.sleep(0.02)
        assert not left or not any(left)

    def kill(self, name: str) -> None:
        member = self.members[name]
        member.signal(signal.SIGKILL)
        member.process.join()
        while member.connected:  # what it had said before
            self.on_message(name)

    def restart(self, name: str) -> None:
        """A new process on the same address."""
        port = self.members[name].address.port
        self.members[name].pipe.close()
        self.members[name] = Member(name, self.kind, port)
        self.wait_until(lambda: self.members[name].address is not None)

    def restore_workers(self) -> None:
        """Everybody is there and works."""
        for name, member in tuple(self.members.items()):
            if not member.connected:
                self.restart(name)
            self.members[name].signal(signal.SIGCONT)
            self.hold(name)

    def close(self) -> None:
        for member in self.members.values():
            member.close()
