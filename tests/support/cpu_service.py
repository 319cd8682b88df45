"""An engine over the CPU executor in a thread, the requests it serves, and every policy."""

from __future__ import annotations

import random
import threading

from cpu_rig import PAGE, TINY, VOCAB

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
from counterpoint.types import (
    AddRequest,
    FinishReason,
    Output,
    OutputDelta,
    Sampling,
    TokenLogprobs,
)

CORES = usable_cores()[:2]
MAX_TOKENS = 12
MAX_RUNNING = 12


def make_requests() -> list[AddRequest]:
    """32 greedy and seeded requests of 3 to 100 tokens; half begin alike."""
    rng = random.Random(4)
    beginning = [rng.randrange(VOCAB) for _ in range(40)]
    found = []
    for n in range(32):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(3, 60))]
        sampling = Sampling(
            max_tokens=MAX_TOKENS, temperature=0.8 * (n % 4 == 3), seed=n, ignore_eos=n % 2 == 0
        )
        found.append(
            AddRequest(id=f"r{n}", prompt=tuple(beginning * (n % 2) + prompt), sampling=sampling)
        )
    return found


class Service:
    """An engine and its device in a thread, as in a server, with a ContractChecker between.
    Collects the answers until every request has finished."""

    def __init__(self, decoder: Decoder, policy: Policy, pages: int) -> None:
        self.inbox = WallClockEventQueue()
        kv = KVPool(TINY, pages, PAGE, decoder.kv_dtype)
        tables = SlotTables(MAX_RUNNING, TINY.max_context_tokens, PAGE, VOCAB, TINY.eos_token_ids)
        executor = CpuExecutor(decoder, kv, tables, policy.lanes, CORES, self.inbox)
        self.grammars = tables.sampling.grammars
        limits = EngineLimits(
            pages=pages,
            page_tokens=PAGE,
            max_running=MAX_RUNNING,
            max_context_tokens=TINY.max_context_tokens,
            max_pass_tokens=160,
            eos_token_ids=TINY.eos_token_ids,
            units=len(CORES),
            layers=TINY.layers,
        )
        self.checker = ContractChecker(executor, self.inbox, limits, policy.lanes)
        self.engine = Engine(limits, policy)
        self.answers: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self.finishes: dict[str, FinishReason] = {}
        self.expected = 0
        self.errors: list[str] = []
        self.all_finished = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            run(self.engine, self.checker, self.checker, self._deliver)
        except BaseException as error:
            self.errors.append(repr(error))
            self.all_finished.set()
            raise

    def _deliver(self, outputs: list[Output], engine: Engine) -> None:
        for output in outputs:
            if isinstance(output, OutputDelta):
                self.answers.setdefault(output.id, []).extend(output.tokens)
                self.logprobs.setdefault(output.id, []).extend(output.logprobs)
                if output.error:
                    self.errors.append(output.error)
                if output.finish_reason:
                    self.finishes[output.id] = output.finish_reason
        if self.expected and len(self.finishes) == self.expected and engine.idle:
            self.all_finished.set()

    def serve(self, requests: list[AddRequest], errors: int = 0) -> dict[str, list[int]]:
        """`errors`: how many of them must fail."""
        self.answers, self.logprobs, self.finishes = {}, {}, {}
        self.expected = len(requests)
        for request in requests:
            self.inbox.put(request)
        assert self.all_finished.wait(120), "requests are missing their finish"
        self.all_finished.clear()
        assert len(self.errors) == errors, self.errors
        return self.answers

    def close(self) -> None:
        self.inbox.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.checker.close()
        self.checker.check_idle()


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
