"""Two real workers (model, CPU executor, engine, courier, mover) against one: every token must be the same."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from cpu_rig import PAGE, TINY, VOCAB, tiny_decoder
from fake_gpu import FakeGpu
from local_transport import LocalTransport

from counterpoint.core.engine import Engine
from counterpoint.core.limits import EngineLimits
from counterpoint.core.loop import run
from counterpoint.core.policy import Chunked, Multiplex
from counterpoint.device.cores import usable_cores
from counterpoint.device.cpu import CpuExecutor
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.kv_memory import page_layout, pool_memory
from counterpoint.device.slot_tables import SlotTables
from counterpoint.disagg import handoff_events
from counterpoint.disagg.compatibility import make_digest
from counterpoint.disagg.dispatch import DeliverTokens
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.handoff_events import HandoffConfig, KvGeometry, TransferGranularity
from counterpoint.disagg.handoff_runner import HandoffRunner, WorkerIdentity
from counterpoint.disagg.link_choice import TransportEndpoint
from counterpoint.disagg.pool_frontend import PoolFrontend, Route, ToWorker
from counterpoint.interfaces import Policy
from counterpoint.kv_transfer.cuda_ipc import CudaIpcTransport
from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.kv_transfer.staged import StagedTransport
from counterpoint.kv_transfer.tcp import TcpTransport
from counterpoint.kv_transfer.transport import Transport
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool, page_bytes
from counterpoint.types import AddRequest, FinishReason, Output, OutputDelta, Sampling

CORES = usable_cores()[:2]
MAX_RUNNING, PAGES = 8, 200


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder()


class Machine:
    """An engine on its executor, in a thread. `deliver` gets what it says, on that thread."""

    def __init__(self, decoder: Decoder, policy: Policy, deliver, storage=None) -> None:
        self.inbox = WallClockEventQueue()
        pool = (TINY, PAGES, PAGE, decoder.kv_dtype)
        self.kv = KVPool(*pool) if storage is None else KVPool.in_storage(*pool, storage)
        tables = SlotTables(MAX_RUNNING, TINY.max_context_tokens, PAGE, VOCAB, TINY.eos_token_ids)
        self.executor = CpuExecutor(decoder, self.kv, tables, policy.lanes, CORES, self.inbox)
        limits = EngineLimits(
            PAGES,
            PAGE,
            MAX_RUNNING,
            TINY.max_context_tokens,
            96,
            TINY.eos_token_ids,
            len(CORES),
            TINY.layers,
        )
        self.engine = Engine(limits, policy)
        self.deliver = deliver
        self.thread = threading.Thread(
            target=lambda: run(self.engine, self.inbox, self.executor, self.deliver), daemon=True
        )

    def close(self) -> None:
        self.inbox.stop()
        self.thread.join()
        self.executor.close()


class Worker:
    """A machine with a courier. What it reports goes to `report(name, words)`, from two threads."""

    def __init__(
        self, name: str, decoder: Decoder, policy: Policy, mover, report, gpu: FakeGpu | None = None
    ) -> None:
        """`gpu`: the pool is in its memory."""
        self.name = name
        self.tell_front = report
        self.mover: Transport = mover(lambda: self.courier.on_notices())
        shape = (
            PAGES,
            page_bytes(TINY, PAGE, decoder.kv_dtype) // (2 * TINY.layers),
            2 * TINY.layers,
        )
        device_memory = gpu.allocate(*shape) if gpu is not None else None
        storage = None
        if device_memory is not None:
            storage = [np.asarray(region) for region in device_memory.regions]
        elif isinstance(self.mover, ShmTransport):
            storage = self.mover.allocate(*shape).regions
        self.machine = Machine(decoder, policy, self.deliver, storage)
        memory, kind = device_memory or pool_memory(self.machine.kv), self.mover.kind
        digest = make_digest(
            TINY, "dummy 3", str(decoder.kv_dtype), PAGE, page_layout(self.machine.kv)
        )
        reach = TransportEndpoint(
            "this process", "this host", "cpu" if gpu is None else "cuda", (kind,)
        )
        blobs, staged = {kind: self.mover.register(memory)}, isinstance(self.mover, StagedTransport)
        identity = WorkerIdentity(
            name, digest, reach, memory, {kind: self.mover}, blobs, allow_staged=staged
        )
        self.courier = HandoffRunner(
            identity, Handoffs(HandoffConfig(), KvGeometry(TINY.layers, PAGE)), self
        )
        self.courier.start()
        self.machine.thread.start()

    def deliver(self, outputs: list[Output], engine: Engine) -> None:
        for output in (*engine.take_progress(), *outputs):
            if not isinstance(
                output, handoff_events.Admitted | handoff_events.Computed | OutputDelta
            ):
                continue
            self.courier.on_engine_outputs(output)
            if isinstance(output, OutputDelta):
                self.tell_front(self.name, output)

    def engine(self, event: handoff_events.EngineEvent) -> None:
        self.machine.inbox.put(event)

    def report(self, command) -> None:
        self.tell_front(self.name, command)

    def close(self) -> None:
        self.courier.close()
        self.mover.close()
        self.machine.close()


class Pools:
    """A front for two workers; `p` prefills for `d`."""

    def __init__(self, decoder: Decoder, kind: str, policies: tuple[Policy, Policy]) -> None:
        names: dict[str, LocalTransport] = {}
        gpus = {name: FakeGpu(5) if kind in ("cuda-ipc", "staged") else None for name in "pd"}

        def mover(name: str):
            makers = {
                "cuda-ipc": lambda wake: CudaIpcTransport(wake, gpus[name]),
                "staged": lambda wake: StagedTransport(TcpTransport(wake), gpus[name]),
                "tcp": lambda wake: TcpTransport(wake, checksums=True),
                "shm": lambda wake: ShmTransport(wake, checksums=True),
                "local": lambda wake: LocalTransport(wake, name, names),
            }
            return makers[kind]

        self.lock = threading.Lock()
        grains = iter(list(TransferGranularity) * 100)
        self.front = PoolFrontend(lambda *_: Route("p", "d", next(grains)), deadline_s=60.0)
        self.got: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.ends: dict[str, FinishReason] = {}
        self.times: list[handoff_events.HandoffTimes] = []
        self.handed = 0
        self.all_there = threading.Event()
        self.expected = 0
        self.workers = {
            name: Worker(name, decoder, policy, mover(name), self.hear, gpus[name])
            for name, policy in zip("pd", policies, strict=True)
        }

    def hear(self, name: str, words) -> None:
        with self.lock:
            if isinstance(words, handoff_events.HandoffEnded):
                self.handed += words.outcome is handoff_events.HandoffOutcome.ADOPTED
                self.times += [words.times] if words.times is not None else []
            self.front.on_report(name, words)
            self.serve()

    def serve(self) -> None:
        for item in self.front.take_items():
            if isinstance(item, ToWorker):
                to = (
                    self.workers[item.decode_worker].courier.address if item.decode_worker else None
                )
                self.workers[item.worker].courier.on_order(item.order, to)
            elif isinstance(item.update, DeliverTokens):
                self.got.setdefault(item.id, []).extend(token.token for token in item.update.tokens)
                self.cached.setdefault(item.id, item.update.tokens[0].cached_tokens)
            else:
                self.ends[item.id] = item.update.finish
                if len(self.ends) == self.expected:
                    self.all_there.set()

    def answer(self, arrives: list[AddRequest]) -> dict[str, list[int]]:
        self.expected = len(arrives)
        for arrive in arrives:
            with self.lock:
                self.front.add_request(arrive)
                self.serve()
        assert self.all_there.wait(60), f"only {sorted(self.ends)} ended"
        assert all(end in (FinishReason.STOP, FinishReason.LENGTH) for end in self.ends.values()), (
            self.ends
        )
        return self.got

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def alone(decoder: Decoder, arrives: list[AddRequest]) -> dict[str, list[int]]:
    """The answers of one machine."""
    got: dict[str, list[int]] = {}
    left = {arrive.id for arrive in arrives}
    done = threading.Event()

    def deliver(outputs: list[Output], engine: Engine) -> None:
        for output in outputs:
            if isinstance(output, OutputDelta):
                got.setdefault(output.id, []).extend(output.tokens)
                if output.finish_reason is not None:
                    left.discard(output.id)
        if not left:
            done.set()

    machine = Machine(decoder, Chunked(32, len(CORES)), deliver)
    machine.thread.start()
    for arrive in arrives:
        machine.inbox.put(arrive)
    assert done.wait(60)
    machine.close()
    return got


def requests() -> list[AddRequest]:
    """Greedy and seeded, short and long, half with the same beginning; some end with their first token."""
    chance = random.Random(4)
    beginning = [chance.randrange(VOCAB) for _ in range(40)]
    arrivals = []
    for n in range(24):
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(3, 50))]
        sampling = Sampling(
            max_tokens=1 if n % 8 == 5 else 10,
            temperature=0.8 * (n % 4 == 3),
            seed=n,
            ignore_eos=n % 2 == 0,
        )
        arrivals.append(
            AddRequest(id=f"r{n}", prompt=tuple(beginning * (n % 2) + prompt), sampling=sampling)
        )
    return arrivals


@pytest.mark.parametrize("kind", ["local", "tcp", "shm", "cuda-ipc", "staged"])
@pytest.mark.parametrize("policies", ["chunked", "multiplexed"])
def test_every_token_is_that_of_one_machine(decoder, kind, policies):
    if policies == "multiplexed" and len(CORES) < 2:
        pytest.skip("one core can't be split")
    make = (
        (lambda: Multiplex(96, 2, 1, layer_group=1))
        if policies == "multiplexed"
        else (lambda: Chunked(32, len(CORES)))
    )
    arrives = requests()
    pools = Pools(decoder, kind, (make(), make()))
    got = pools.answer(arrives)
    want = alone(decoder, arrives)
    left = [worker.machine.engine.page_pool.available for worker in pools.workers.values()]
    pools.close()
    assert got == want
    assert pools.handed >= 15, "few were handed over"
    assert len(pools.times) == pools.handed and all(
        t.adopted_s >= t.written_s >= t.admitted_s for t in pools.times
    )
    assert max(pools.cached.values()) >= 36, "the prefill worker's prefix hits are not told"
    assert left == [PAGES, PAGES], "a page was not given back"


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_seen_as_bytes(dtype, by_head):
    pool = KVPool(TINY, 6, PAGE, dtype)
    if by_head:
        shape = (6, TINY.kv_heads, PAGE, TINY.head_dim)
        pool.k, pool.v = (
            tuple(layer.view(shape).transpose(1, 2) for layer in side) for side in (pool.k, pool.v)
        )
    memory = pool_memory(pool)
    assert (memory.pages, memory.layers) == (6, TINY.layers)
    pool.v[2][3] = 1.5
    touched = [
        (number, page)
        for number, region in enumerate(memory.regions)
        for page in range(6)
        if region.reshape(6, -1)[page].any()
    ]
    assert touched == [(5, 3)]
    memory.regions[0].reshape(6, -1)[4] = np.asarray(memory.regions[5].reshape(6, -1)[3])
    assert (pool.k[0][4] == 1.5).all()
    assert page_layout(pool).startswith("head" if by_head else "token")
