"""Real engines that hand requests to each other give the answers of one engine alone.

On the device of engine_harness.py the next token is a hash of everything before it, read from the
pages. The test copies page contents as a transport would, late and in any order.
"""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from engine_harness import Harness, answer

from counterpoint.config import SchedulerConfig
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy import make_policy
from counterpoint.disagg import handoff_events
from counterpoint.disagg.dispatch import DeliverTokens, OnLoss
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.handoff_events import (
    HandoffConfig,
    KvGeometry,
    TransferGranularity,
    WriteKv,
)
from counterpoint.disagg.pool_frontend import PoolFrontend, Route, ToWorker
from counterpoint.types import (
    AddRequest,
    DisaggRole,
    FinishReason,
    OutputDelta,
    RequestTiming,
    Sampling,
)

PAGE_TOKENS, LAYERS = 4, 6


class Worker(Harness):
    """An engine on its oracle device, with its handoffs. What goes to the frontend is in `said`."""

    def __init__(self, name: str, policy: str, pages: int, rules: HandoffConfig) -> None:
        config = SchedulerConfig(policy=policy, chunk_tokens=16, max_pass_tokens=48, layer_group=2)
        super().__init__(
            make_policy(config, DeviceShape(4, LAYERS)),
            pages=pages,
            page_tokens=PAGE_TOKENS,
            layers=LAYERS,
        )
        self.name = name
        self.handoffs = Handoffs(rules, KvGeometry(LAYERS, PAGE_TOKENS))
        self.said: list = []
        self.writes: list[WriteKv] = []
        self.layers_of: dict[
            tuple[int, int], set[int]
        ] = {}  # (generation, page) -> layers that have come
        self.peers: dict[int, Worker] = {}

    def take(self, output: OutputDelta | RequestTiming) -> None:
        if isinstance(output, OutputDelta):
            self.said.append(output)
            self.tell(output)

    def tell(self, event) -> None:
        self.handoffs.on_event(self.now, event)
        self.obey()

    def obey(self) -> None:
        for command in self.handoffs.take_commands():
            if isinstance(command, handoff_events.SendMessage):
                peer = self.peers[command.link]
                peer.tell(command.message)
            elif isinstance(command, handoff_events.ToEngine):
                self.event(command.event, 0.0)
                self.spread()
            elif isinstance(command, WriteKv):
                self.writes.append(command)
            elif isinstance(command, handoff_events.HandoffEnded | handoff_events.Reroute):
                self.said.append(command)

    def spread(self) -> None:
        progress, self.progress = self.progress, []
        for output in progress:
            self.tell(output)

    def land(self, write: WriteKv) -> None:
        """A write arrives. A page has its content when all its layers have come."""
        peer = self.peers[write.link]
        self.writes.remove(write)
        for source, target in zip(write.sources, write.destinations, strict=True):
            layers = peer.layers_of.setdefault((write.generation, target), set())
            new = set(range(write.first_layer, write.last_layer))
            assert layers.isdisjoint(new), "a layer was sent twice"
            layers |= new
            if len(layers) == LAYERS:
                for offset in range(PAGE_TOKENS):
                    peer.device.content[target, offset] = self.device.content.get(
                        (source, offset), -1
                    )
        self.tell(handoff_events.WriteDone(write.op))


class Pools:
    def __init__(
        self, seed: int, policies: tuple[str, ...], pages: int = 60, local: float = 0.0
    ) -> None:
        self.rng = random.Random(seed)
        self.local = local
        self.workers = {
            f"w{i}": Worker(
                f"w{i}",
                policy,
                pages,
                HandoffConfig(
                    park_timeout_s=40.0, peer_timeout_s=1e6, lease_s=1e6, drain_timeout_s=1e6
                ),
            )
            for i, policy in enumerate(policies)
        }
        self.links: dict[tuple[str, str], int] = {}
        for number, (a, b) in enumerate(itertools.permutations(self.workers, 2)):
            here, there = 2 * number + 1, 2 * number + 2
            self.links[a, b] = here
            p, d = self.workers[a], self.workers[b]
            p.peers[here], d.peers[there] = d, p
            p.tell(handoff_events.LinkUp(here, there, b, DisaggRole.PREFILL))
            d.tell(handoff_events.LinkUp(there, here, a, DisaggRole.DECODE))
        self.front = PoolFrontend(self.pick, deadline_s=1e6, retries=2, on_loss=OnLoss.RECOMPUTE)
        self.arrives: dict[str, AddRequest] = {}
        self.got: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}

    def pick(self, arrive: AddRequest, avoid: str, prefill: str) -> Route | None:
        names = [name for name in self.workers if name != avoid]
        prefill = prefill or self.rng.choice(names)
        if self.rng.random() < self.local:
            return Route(prefill, prefill)
        others = [name for name in self.workers if name not in (prefill, avoid)]
        return (
            Route(prefill, self.rng.choice(others), self.rng.choice(list(TransferGranularity)))
            if others
            else None
        )

    def submit(self, id: str, prompt, **sampling) -> None:
        arrive = AddRequest(
            id=id,
            prompt=tuple(prompt),
            sampling=Sampling(temperature=0, **{"max_tokens": 5, **sampling}),
        )
        self.arrives[id], self.got[id] = arrive, []
        self.front.add_request(arrive)
        self.serve()

    def serve(self) -> None:
        for item in self.front.take_items():
            if isinstance(item, ToWorker):
                order = item.order
                if item.decode_worker:
                    order = msgspec.structs.replace(
                        order, link=self.links[item.worker, item.decode_worker]
                    )
                self.workers[item.worker].tell(order)
            elif isinstance(item.update, DeliverTokens):
                assert item.update.start == len(self.got[item.id])
                self.got[item.id] += [token.token for token in item.update.tokens]
            else:
                assert item.id not in self.ends
                self.ends[item.id] = item.update.finish

    def turn(self) -> None:
        worker = self.rng.choice(list(self.workers.values()))
        for other in self.workers.values():
            other.now = max(w.now for w in self.workers.values())
        if worker.writes and self.rng.random() < 0.5:
            worker.land(self.rng.choice(worker.writes))
        else:
            worker.step(self.rng.randrange(8))
            worker.spread()
        if self.rng.random() < 0.3:
            worker.now += 1.0
            for other in self.workers.values():
                other.now = worker.now
                other.handoffs.tick(other.now)
                other.obey()
        self.listen()

    def listen(self) -> None:
        for worker in self.workers.values():
            said, worker.said = worker.said, []
            for words in said:
                self.front.on_report(worker.name, words)
        self.serve()

    def run(self, turns: int = 20_000) -> None:
        for _ in range(turns):
            if not self.front.requests and all(
                w.handoffs.idle and w.engine.idle for w in self.workers.values()
            ):
                break
            self.turn()
        else:
            raise AssertionError(f"still going on: {list(self.front.requests)}")
        for worker in self.workers.values():
            worker.drain()
            assert worker.handoffs.ledger.is_empty

    def check_answers(self) -> None:
        for id, arrive in self.arrives.items():
            sampling = arrive.sampling
            assert self.got[id] == answer(
                arrive.prompt, sampling.max_tokens, sampling.stop_token_ids
            ), id
            assert self.ends[id] in (FinishReason.STOP, FinishReason.LENGTH)

    def adopted(self) -> int:
        return sum(
            sum(link.ended.values())
            for worker in self.workers.values()
            for link in worker.handoffs.links.values()
        )


@pytest.mark.parametrize(
    "policies",
    [("serial", "chunked"), ("chunked", "multiplex", "chunked"), ("multiplex", "multiplex")],
)
@pytest.mark.parametrize("seed", range(4))
def test_answers_equal_those_of_one_engine(policies, seed):
    """200 requests in all over the seeds and pools: chunks, prefix hits, stops at the first token
    and later, small pools."""
    pools = Pools(seed, policies, pages=[24, 60][seed % 2], local=[0.0, 0.2][seed // 2])
    rng = random.Random(seed)
    for number in range(17):
        family, length = rng.randrange(3), rng.randint(1, 45)
        prompt = [family] * (length // 2) + [
            (number * 7 + i) % 50 for i in range(length - length // 2)
        ]
        max_tokens = rng.choice([1, 2, 5, 9])
        want = answer(tuple(prompt), max_tokens)
        stops = (rng.choice(want),) if rng.random() < 0.3 else ()
        pools.submit(f"r{number}", prompt, max_tokens=max_tokens, stop_token_ids=stops)
        for _ in range(rng.randint(0, 30)):
            pools.turn()
    pools.run()
    pools.check_answers()
    assert pools.adopted() > 0


@pytest.mark.parametrize(
    "policies", [("serial", "serial"), ("multiplex", "chunked"), ("multiplex", "multiplex")]
)
@pytest.mark.parametrize("seed", range(3))
def test_prompts_longer_than_a_pass_are_handed_over_too(policies, seed):
    pools = Pools(seed, policies, pages=120)
    rng = random.Random(seed)
    for number in range(9):
        pools.submit(
            f"r{number}",
            [(number * 7 + i) % 50 for i in range(rng.choice([20, 49, 96, 150]))],
            max_tokens=4,
        )
        for _ in range(rng.randint(0, 30)):
            pools.turn()
    pools.run()
    pools.check_answers()
    assert pools.adopted() > 0


def test_answers_of_preempted_requests_too():
    """Once adopted, a request is like any other: it may be preempted, and is computed again where
    it is."""
    pools = Pools(3, ("chunked", "chunked"), pages=24)
    for number in range(12):
        pools.submit(f"r{number}", [number] * 7, max_tokens=40)
        pools.turn()
    pools.run(60_000)
    pools.check_answers()
    assert (
        sum(worker.engine.stats().preemptions for worker in pools.workers.values()) > 0
        and pools.adopted() > 0
    )


@pytest.mark.parametrize("seed", range(6))
def test_clients_that_leave_at_any_moment_leave_nothing(seed):
    pools = Pools(seed, ("chunked", "multiplex"), pages=40)
    rng = random.Random(seed)
    for number in range(15):
        pools.submit(f"r{number}", [number] * rng.randint(1, 40), max_tokens=rng.randint(1, 9))
        for _ in range(rng.randint(0, 25)):
            pools.turn()
        if rng.random() < 0.6:
            pools.front.abort(rng.choice(list(pools.arrives)))
            pools.serve()
    pools.run()


def test_a_prefix_that_the_decode_worker_has_is_not_sent_again():
    pools = Pools(1, ("chunked", "chunked"))
    pools.pick = lambda *_: Route("w0", "w1")
    pools.front.choose_route = pools.pick
    sent = []
    land = Worker.land

    def counting(self, write):
        sent.append(len(write.sources) * (write.last_layer - write.first_layer))
        land(self, write)

    for worker in pools.workers.values():
        worker.land = counting.__get__(worker)
    pools.submit("a", range(20))
    pools.run()
    assert sum(sent) == 5 * LAYERS
    pools.submit("b", [*range(20), 30, 31])
    pools.run()
    assert sum(sent) == 6 * LAYERS, "only the new page was sent"
    pools.check_answers()
