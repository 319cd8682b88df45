"""Engine, loop, wall clock and CPU executor together: the same answers under every policy."""

from __future__ import annotations

import random
import threading

import pytest
from cpu_rig import PAGE, TINY, VOCAB, tiny_decoder
from msgspec import structs

from counterpoint.config import ConfigError
from counterpoint.core.engine import Engine
from counterpoint.core.limits import EngineLimits
from counterpoint.core.loop import run
from counterpoint.core.policy import Chunked, Multiplex, Serial
from counterpoint.device.contract_checker import ContractChecker
from counterpoint.device.cores import usable_cores
from counterpoint.device.cpu import CpuExecutor
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.slot_tables import SlotTables
from counterpoint.interfaces import Policy
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.model.ops_cpu import cpu_ops
from counterpoint.types import (
    AddRequest,
    FinishReason,
    Output,
    OutputDelta,
    Sampling,
    TokenLogprobs,
)

CORES = usable_cores()[:2]
MOST_TOKENS = 12
MAX_RUNNING = 12


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder()


def requests() -> list[AddRequest]:
    """32 greedy and seeded requests of 3 to 100 tokens; half begin alike."""
    chance = random.Random(4)
    beginning = [chance.randrange(VOCAB) for _ in range(40)]
    arrivals = []
    for n in range(32):
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(3, 60))]
        sampling = Sampling(
            max_tokens=MOST_TOKENS, temperature=0.8 * (n % 4 == 3), seed=n, ignore_eos=n % 2 == 0
        )
        arrivals.append(
            AddRequest(id=f"r{n}", prompt=tuple(beginning * (n % 2) + prompt), sampling=sampling)
        )
    return arrivals


class Service:
    """An engine's thread with its device, as a server has it. Collects the answers until every request has its finish."""

    def __init__(self, decoder: Decoder, policy: Policy, pages: int) -> None:
        self.inbox = WallClockEventQueue()
        kv = KVPool(TINY, pages, PAGE, decoder.kv_dtype)
        tables = SlotTables(MAX_RUNNING, TINY.max_context_tokens, PAGE, VOCAB, TINY.eos_token_ids)
        executor = CpuExecutor(decoder, kv, tables, policy.lanes, CORES, self.inbox)
        self.grammars = tables.sampling.grammars
        units, layers = len(CORES), TINY.layers
        self.watch = ContractChecker(
            executor,
            self.inbox,
            units=units,
            layers=layers,
            pages=pages,
            page_tokens=PAGE,
            lanes=policy.lanes,
        )
        self.engine = Engine(
            EngineLimits(
                pages=pages,
                page_tokens=PAGE,
                max_running=MAX_RUNNING,
                max_context_tokens=TINY.max_context_tokens,
                max_pass_tokens=160,
                eos_token_ids=TINY.eos_token_ids,
                units=units,
                layers=layers,
            ),
            policy,
        )
        self.answers: dict[str, list[int]] = {}
        self.chances: dict[str, list[TokenLogprobs | None]] = {}
        self.finishes: dict[str, FinishReason] = {}
        self.expected = 0
        self.errors: list[str] = []
        self.all_there = threading.Event()
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        try:
            run(self.engine, self.watch, self.watch, self._deliver)
        except BaseException as error:
            self.errors.append(repr(error))
            self.all_there.set()
            raise

    def _deliver(self, outputs: list[Output], engine: Engine) -> None:
        for output in outputs:
            if isinstance(output, OutputDelta):
                self.answers.setdefault(output.id, []).extend(output.tokens)
                self.chances.setdefault(output.id, []).extend(output.logprobs)
                if output.error:
                    self.errors.append(output.error)
                if output.finish_reason:
                    self.finishes[output.id] = output.finish_reason
        if self.expected and len(self.finishes) == self.expected and engine.idle:
            self.all_there.set()

    def ask(self, arrivals: list[AddRequest], errors: int = 0) -> dict[str, list[int]]:
        """`errors`: how many of them must fail."""
        self.answers, self.chances, self.finishes = {}, {}, {}
        self.expected = len(arrivals)
        for arrive in arrivals:
            self.inbox.put(arrive)
        assert self.all_there.wait(120), "requests are missing their finish"
        self.all_there.clear()
        assert len(self.errors) == errors, self.errors
        return self.answers

    def close(self) -> None:
        self.inbox.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.watch.close()
        self.watch.check_idle()


def policies() -> dict[str, Policy]:
    units = len(CORES)
    found: dict[str, Policy] = {
        "serial": Serial(160, units),
        "serial, two in flight": Serial(160, units, depth=2),
        "chunked": Chunked(24, units),
        "chunked, two in flight": Chunked(17, units, depth=2),
    }
    if units > 1:
        found["multiplex"] = Multiplex(160, units, 1)
        found["multiplex, layer by layer, two in flight"] = Multiplex(
            160, units, 1, layer_group=1, depth=2
        )
    return found


@pytest.fixture(scope="module")
def truth(decoder: Decoder) -> dict[str, list[int]]:
    """Each request alone on the machine."""
    service = Service(decoder, Serial(160, len(CORES)), 256)
    answers = {}
    for arrive in requests():
        answers |= service.ask([arrive])
    service.close()
    return answers


@pytest.mark.parametrize("name", policies())
@pytest.mark.parametrize("pages", [1024, 90], ids=["much memory", "little memory"])
def test_answers_do_not_depend_on_the_policy(
    decoder: Decoder, truth: dict[str, list[int]], name: str, pages: int
):
    service = Service(decoder, policies()[name], pages)
    for round in ("cold", "with prefix hits"):
        assert service.ask(requests()) == truth, round
    stats = service.engine.stats()
    assert stats.prefix_hits_tokens > 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    if pages < 1024:
        assert stats.preemptions > 0
    service.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_answers_are_the_same_to_the_bit(dtype: str):
    """Alone, and in any company under every policy, with prefixes read or computed, with preemptions: all log-probabilities."""
    try:
        exact = tiny_decoder(cpu_ops(dtype, TINY.head_dim, invariant=True))
    except ConfigError as error:
        pytest.skip(str(error))
    asked = [
        structs.replace(arrive, sampling=structs.replace(arrive.sampling, logprobs=4))
        for arrive in requests()
    ]
    service = Service(exact, Serial(160, len(CORES)), 256)
    truth = {}
    for arrive in asked:
        service.ask([arrive])
        truth[arrive.id] = service.answers[arrive.id], service.chances[arrive.id]
    service.close()
    for name in policies():
        service = Service(exact, policies()[name], 90)
        for round in ("cold", "with prefix hits"):
            service.ask(asked)
            assert {id: (service.answers[id], service.chances[id]) for id in truth} == truth, (
                name,
                round,
            )
        assert service.engine.stats().prefix_hits_tokens and service.engine.stats().preemptions
        service.close()


def test_answers_are_answers(truth: dict[str, list[int]]):
    assert all(0 < len(tokens) <= MOST_TOKENS for tokens in truth.values())
    assert len({tuple(tokens) for tokens in truth.values()}) > 25
