"""Probe: steps made by hand, sent to an executor and timed.

Owns: slots, pages and tokens of the made requests, and the way from a kind of step to a time. Promises: times are the device's own
(StepDone), medians of several; everything goes through the executor that serves, with the next step queued behind the running one
wherever the lanes are so deep, so launching is part of what is measured; contexts do not grow while they are measured.
Must not: know what a time is for.

The executor has two lanes, as multiplexing wants them: 0 decodes and runs fused passes, 1 prefills. Slots from PROMPTS on decode.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from counterpoint.model.kv import KVPool
from counterpoint.ports import Executor, Inbox
from counterpoint.types import Close, Open, Sampling, Segment, Step, StepDone, Work

PROMPTS = 8  # slots of prompts that are prefilled
GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
LEAST_S = 0.12  # what is measured runs for about so long in all,
LEAST_STEPS, MOST_STEPS = 4, 24  # within these
PASSES = 3  # prefill passes beside decodes, at least
MOST_PASSES = 8  # times as many, while there are too few decode steps
DECODES = 8  # and decode steps beside prefills
DECODE, PREFILL = 0, 1  # lanes


class StepError(RuntimeError):
    """A step failed on the device; the message is its own."""


@runtime_checkable
class Pooled(Protocol):
    """An executor with a KV pool in this process."""

    kv: KVPool


class Prompt(NamedTuple):
    """So many new tokens after `reused` ones that are in the cache."""

    tokens: int
    reused: int = 0


@dataclass
class Probe:
    """`pages`: of the pool; `units`, `layers`, `vocab`, `depth`: the device's, the model's and the lanes'."""

    executor: Executor
    inbox: Inbox
    pages: int
    page_tokens: int
    units: int
    layers: int
    depth: int
    vocab: int
    contexts: list[int] = field(default_factory=list)  # of the decoding slots
    prompts: set[int] = field(default_factory=set)  # open slots of prompts
    serial: int = 0

    def __post_init__(self) -> None:
        chance = random.Random(0)
        self.order = list(range(self.pages))
        chance.shuffle(self.order)
        if isinstance(self.executor, Pooled):
            for pool in (*self.executor.kv.k, *self.executor.kv.v):
                if pool.dtype.itemsize > 1:  # what is quantised has no noise of its own
                    pool.normal_()  # zeros can be read faster than what is served
        count = self.pages * self.page_tokens // 8 + 4096
        self.tokens = tuple(chance.randrange(self.vocab // 4, self.vocab) for _ in range(count))

    # ------------------------------------------------------------ setting up

    def decoding(self, contexts: Sequence[int]) -> None:
        """Let slots with these contexts be the decode batch. Raises ValueError if the pool does not hold them beside a prompt."""
        if list(contexts) == self.contexts:
            return
        for number in range(len(self.contexts)):
            self.executor.submit(Close(PROMPTS + number))
        self.contexts = []
        at = self.pages
        for number, context in enumerate(contexts):
            count = -(-(context + 1) // self.page_tokens)
            at -= count
            if at < 0:
                raise ValueError(f"{len(contexts)} contexts of {max(contexts)} tokens do not fit {self.pages} pages")
            pages = tuple(self.order[at : at + count])
            self.executor.submit(Open(PROMPTS + number, self._text(context + 1), context + 1, pages, GREEDY))
            self.contexts.append(context)

    def _text(self, count: int) -> tuple[int, ...]:
        if count > len(self.tokens):
            raise ValueError(f"a context of {count} tokens is more than the pool can hold")
        start = self.serial * 7919 % (len(self.tokens) - count + 1)
        return self.tokens[start : start + count]

    def _opened(self, prompts: Sequence[Prompt]) -> list[Segment]:
        """Slots with these prompts, anew, and their segments. Their pages are the pool's first ones."""
        segments, at = [], 0
        for slot, (tokens, reused) in enumerate(prompts):
            count = -(-(reused + tokens + 1) // self.page_tokens)
            pages = tuple(self.order[at : at + count])
            at += count
            if slot in self.prompts:
                self.executor.submit(Close(slot))
            self.prompts.add(slot)
            self.executor.submit(Open(slot, self._text(reused + tokens), reused + tokens, pages, GREEDY))
            segments.append(Segment(slot, reused, tokens, True))
        return segments

    # ------------------------------------------------------------ steps

    def decode_step(self, work: Work, units: int) -> Step:
        rows = [Segment(PROMPTS + n, context - 1, 1, True) for n, context in enumerate(self.contexts)]
        return self._step(DECODE, None, (0, self.layers), units, rows, work)

    def fused_step(self, work: Work, prompts: Sequence[Prompt]) -> Step:
        """Every decode and a piece of each prompt, none of which ends here."""
        rows = [Segment(PROMPTS + n, context - 1, 1, True) for n, context in enumerate(self.contexts)]
        pieces = [Segment(s.slot, s.start, s.tokens, False, s.pages) for s in self._opened(prompts)]
        return self._step(DECODE, None, (0, self.layers), self.units, [*rows, *pieces], work)

    def prefill_steps(self, work: Work, prompts: Sequence[Prompt], units: int, group: int) -> list[Step]:
        segments = self._opened(prompts)
        self.serial += 1
        batch = self.serial
        edges = [(first, min(first + group, self.layers)) for first in range(0, self.layers, group)]
        return [self._step(PREFILL, batch, edge, units, segments, work) for edge in edges]

    def _step(
        self, lane: int, batch: int | None, edges: tuple[int, int], units: int, segments: Sequence[Segment], work: Work
    ) -> Step:
        self.serial += 1
        part = msgspec.structs.replace(work, first_layer=edges[0], last_layer=edges[1])
        return Step(self.serial, lane, self.serial if batch is None else batch, *edges, units, tuple(segments), part)

    def _done(self) -> list[StepDone]:
        got = self.inbox.get()
        dones = [event for event in got[1] if isinstance(event, StepDone)] if got else []
        for done in dones:
            if done.error:
                raise StepError(done.error)
        return dones

    # ------------------------------------------------------------ what is measured

    def decode_s(self, work: Work, units: int) -> float:
        """A decode step of the batch, from one end to the next."""
        ends: list[float] = []
        enough = LEAST_STEPS
        sent = 0
        while sent < self.depth:
            self.executor.submit(self.decode_step(work, units))
            sent += 1
        while len(ends) < enough + 2:
            for done in self._done():
                ends.append(done.ended_s)
                if len(ends) == 3:
                    enough = min(MOST_STEPS, max(LEAST_STEPS, int(LEAST_S / max(1e-4, ends[2] - ends[1]))))
                if sent < enough + 2:
                    self.executor.submit(self.decode_step(work, units))
                    sent += 1
        return statistics.median(b - a for a, b in itertools.pairwise(ends[1:]))

    def prefill_s(self, work: Work, prompts: Sequence[Prompt], units: int) -> float:
        """A whole pass, alone on its units."""
        return self._repeated(lambda: self.prefill_steps(work, prompts, units, self.layers)[0])

    def fused_s(self, work: Work, prompts: Sequence[Prompt]) -> float:
        return self._repeated(lambda: self.fused_step(work, prompts))

    def _repeated(self, make: Callable[[], Step]) -> float:
        """Median time of steps that run one at a time; the first is not counted."""
        took: list[float] = []
        while len(took) < 2 or (len(took) < MOST_STEPS // 2 and sum(took[1:]) < LEAST_S) or (len(took) < 3 and took[-1] < 0.4):
            self.executor.submit(make())
            (done,) = self._done()
            took.append(done.ended_s - done.started_s)
        return statistics.median(took[1:])

    def together_s(
        self, decode: Work, level: int, prefill: Work, prompts: Sequence[Prompt], alone: tuple[float, float]
    ) -> tuple[float, float]:
        """Seconds of a decode step on `level` units and of a prefill pass on the rest, both again and again side by side; `alone`:
        what they take alone there, at a guess. Prefill goes in layer groups that take about as long as a decode step, as it is
        served."""
        rest = self.units - level
        decode_s, prefill_s = alone
        group = max(1, min(self.layers, -(-int(1e6 * decode_s) * self.layers // max(1, int(1e6 * prefill_s)))))
        passes = 1 + max(PASSES, min(24, -(-int(1e6 * DECODES * decode_s) // max(1, int(1e6 * prefill_s)))))
        queue: deque[Step] = deque()
        made = 0
        ends: dict[int, list[float]] = {DECODE: [], PREFILL: []}
        pass_ends: list[float] = []
        began_s: dict[int, float] = {}
        running = 0

        def feed(lane: int) -> None:
            nonlocal made, running
            more = made < passes or (len(ends[DECODE]) < LEAST_STEPS and made < MOST_PASSES * passes)  # the guess may be far off
            if lane == PREFILL:
                if not queue and more:
                    made += 1
                    queue.extend(self.prefill_steps(prefill, prompts, rest, group))
                if queue:
                    self.executor.submit(queue.popleft())
                    running += 1
            elif more or len(pass_ends) < made:
                self.executor.submit(self.decode_step(decode, level))
                running += 1

        per_pass = -(-self.layers // group)
        for _ in range(self.depth):
            feed(DECODE)
            feed(PREFILL)
        while running:
            for done in self._done():
                running -= 1
                if not ends[done.lane]:
                    began_s[done.lane] = done.started_s
                ends[done.lane].append(done.ended_s)
                if done.lane == PREFILL and len(ends[PREFILL]) % per_pass == 0:
                    pass_ends.append(done.ended_s)
                feed(done.lane)
        steady = [at for at in ends[DECODE] if pass_ends[0] <= at <= pass_ends[-1]]
        if len(steady) < 2:
            steady = [began_s[DECODE], *ends[DECODE]]
        period_s = (steady[-1] - steady[0]) / (len(steady) - 1)
        return period_s, statistics.median(b - a for a, b in itertools.pairwise(pass_ends))
