"""An engine with its loop on the CUDA executor, and random requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

from cuda_rig import PAGE, VOCAB, CudaParts

from counterpoint.core.engine import Engine
from counterpoint.core.limits import EngineLimits
from counterpoint.core.loop import run
from counterpoint.device.contract_checker import ContractChecker
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.interfaces import Policy
from counterpoint.types import (
    Abort,
    AddRequest,
    FinishReason,
    Output,
    OutputDelta,
    Sampling,
    TokenLogprobs,
)


def random_requests(
    count: int = 32,
    vocab: int = VOCAB,
    seed: int = 4,
    max_prompt_tokens: int = 60,
    max_tokens: int = 12,
) -> list[AddRequest]:
    """Greedy and seeded requests of at least 3 tokens; half share a prefix."""
    chance = random.Random(seed)
    beginning = [chance.randrange(vocab) for _ in range(40)]
    arrivals = []
    for n in range(count):
        prompt = [chance.randrange(vocab) for _ in range(chance.randrange(3, max_prompt_tokens))]
        sampling = Sampling(
            max_tokens=max_tokens, temperature=0.8 * (n % 4 == 3), seed=n, ignore_eos=n % 2 == 0
        )
        arrivals.append(
            AddRequest(id=f"r{n}", prompt=tuple(beginning * (n % 2) + prompt), sampling=sampling)
        )
    return arrivals


class EngineService:
    """An engine thread with its device, as a server runs it."""

    def __init__(
        self,
        parts: CudaParts,
        policy: Policy,
        slots: int = 8,
        max_pass_tokens: int = 160,
        overlap: bool = False,
    ) -> None:
        spec, pages = parts.decoder.spec, parts.kv.pages - 1
        self.inbox = WallClockEventQueue()
        executor = parts.executor(policy.lanes, self.inbox)
        self.engine = Engine(
            EngineLimits(
                pages=pages,
                page_tokens=PAGE,
                max_running=slots,
                max_context_tokens=spec.max_context_tokens,
                max_pass_tokens=max_pass_tokens,
                eos_token_ids=spec.eos_token_ids,
                units=parts.units,
                layers=spec.layers,
                overlap=overlap,
            ),
            policy,
        )
        self.checker = ContractChecker(executor, self.inbox, self.engine.limits, policy.lanes)
        self.answers: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self.finishes: dict[str, FinishReason] = {}
        self.errors: list[str] = []
        self.abort_after: dict[str, int] = {}  # id -> tokens after which it is aborted
        self.expected = 0
        self.all_finished = threading.Event()
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def _loop(self) -> None:
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
                if (
                    output.id in self.abort_after
                    and len(self.answers[output.id]) >= self.abort_after[output.id]
                ):
                    self.inbox.put(Abort(output.id))
                if output.error:
                    self.errors.append(output.error)
                if output.finish_reason:
                    self.finishes[output.id] = output.finish_reason
        if self.expected and len(self.finishes) == self.expected and engine.idle:
            self.all_finished.set()

    def run_requests(
        self, arrivals: Sequence[Any], expected: int | None = None, timeout_s: float = 120
    ) -> dict[str, list[int]]:
        """Send events and wait until every request finished. Returns the tokens by request."""
        self.answers, self.logprobs, self.finishes = {}, {}, {}
        self.expected = len(arrivals) if expected is None else expected
        for arrive in arrivals:
            self.inbox.put(arrive)
        assert self.all_finished.wait(timeout_s), "requests are missing their finish"
        self.all_finished.clear()
        assert not self.errors, self.errors
        return self.answers

    def close(self) -> None:
        self.inbox.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.checker.close()
        self.checker.check_idle()
        stats = self.engine.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total, "pages leaked"
