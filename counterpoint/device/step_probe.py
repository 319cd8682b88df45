"""Probe: steps made by hand, sent to an executor and timed.

Owns: slots, pages and tokens of the made requests, and the way from a kind of step to a time. Promises: times are the device's own
(StepDone), the middle of several; everything goes through the executor that serves, with the next step queued behind the running
one wherever the lanes are so deep, so that a step takes from the end of the one before to its own end, as it is served; what the
host does meanwhile is told apart; contexts do not grow while they are measured.
Must not: know what a time is for.

The executor has two lanes, as multiplexing wants them: 0 decodes and runs fused passes, 1 prefills. Slots from PROMPTS on decode.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from counterpoint.interfaces import EventQueue, Executor
from counterpoint.model.kv import KVPool
from counterpoint.types import (
    BatchShape,
    Command,
    FreeSlot,
    InitSlot,
    Sampling,
    Segment,
    Step,
    StepDone,
)

PROMPT_SLOTS = 8  # slots of prompts that are prefilled
GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
LEAST_S = 0.09  # what is measured runs for about so long in all,
LEAST_STEPS, MOST_STEPS = 4, 18  # within these, if they are decodes,
LEAST_PASSES, MOST_PASSES_ALONE = 2, 12  # and these, if not
LONG_S = 0.15  # passes that take so long are steady: one is enough
SHORT_S = 0.08  # and of shorter ones, the start on an idle device is measured as well
PASSES = 3  # prefill passes beside decodes, at least
MOST_PASSES = 8  # times as many, while there are too few decode steps
DECODES = 8  # and decode steps beside prefills
DECODE, PREFILL = 0, 1  # lanes


class StepError(RuntimeError):
    """A step failed on the device; the message is its own."""


@runtime_checkable
class HasKvPool(Protocol):
    """An executor with a KV pool in this process."""

    kv: KVPool


class ProbePrompt(NamedTuple):
    """So many new tokens after `reused` ones that are in the cache."""

    tokens: int
    reused: int = 0


class ProbeTiming(NamedTuple):
    """Of a step among others of its kind. `seconds`: from the end of the one before to its own; `host_s`: for how long of these the
    host was busy launching it; `steps`: into how many it was cut; `start_s`: how much longer it takes on an idle device (0: not
    known)."""

    seconds: float
    host_s: float = 0.0
    steps: int = 1
    start_s: float = 0.0


@dataclass(slots=True)
class CoRunTiming:
    """Steps on both lanes at once, by lane: when each ended, and for how long the host launched it; `began_s`: the first decode
    step; `per_pass`: steps of a prefill pass."""

    per_pass: int
    began_s: float = 0.0
    ends: dict[int, list[float]] = field(default_factory=lambda: {DECODE: [], PREFILL: []})
    launches_s: dict[int, list[float]] = field(default_factory=lambda: {DECODE: [], PREFILL: []})

    @property
    def pass_ends(self) -> list[float]:
        return self.ends[PREFILL][self.per_pass - 1 :: self.per_pass]


def median_of(values: Sequence[float]) -> float:
    """Mean of the middle two thirds: what is typical, where single ones are disturbed."""
    ordered = sorted(values)
    cut = len(ordered) // 6 if len(ordered) > 5 else (len(ordered) - 1) // 2
    return statistics.fmean(ordered[cut : len(ordered) - cut])


@dataclass
class StepProbe:
    """`pages`: of the pool; `units`, `layers`, `vocab`, `depth`: the device's, the model's and the lanes'. `clock`: the host's."""

    executor: Executor
    inbox: EventQueue
    pages: int
    page_tokens: int
    units: int
    layers: int
    depth: int
    vocab: int
    contexts: list[int] = field(default_factory=list)  # of the decoding slots
    prompts: set[int] = field(default_factory=set)  # open slots of prompts
    serial: int = 0
    clock: Callable[[], float] = time.monotonic
    host_s: float = 0.0  # spent in the executor since it was last put to 0

    def __post_init__(self) -> None:
        chance = random.Random(0)
        self.order = list(range(self.pages))
        chance.shuffle(self.order)
        if isinstance(self.executor, HasKvPool):
            for pool in (*self.executor.kv.k, *self.executor.kv.v):
                if pool.dtype.itemsize > 1:  # what is quantised has no noise of its own
                    pool.normal_()  # zeros can be read faster than what is served
        count = self.pages * self.page_tokens // 8 + 4096
        self.tokens = tuple(chance.randrange(self.vocab // 4, self.vocab) for _ in range(count))

    # ------------------------------------------------------------ setting up

    def set_decode_batch(self, contexts: Sequence[int]) -> None:
        """Let slots with these contexts be the decode batch. Raises ValueError if the pool does not hold them beside a prompt."""
        if list(contexts) == self.contexts:
            return
        for number in range(len(self.contexts)):
            self.executor.submit(FreeSlot(PROMPT_SLOTS + number))
        self.contexts = []
        at = self.pages
        for number, context in enumerate(contexts):
            count = -(-(context + 1) // self.page_tokens)
            at -= count
            if at < 0:
                raise ValueError(
                    f"{len(contexts)} contexts of {max(contexts)} tokens do not fit {self.pages} pages"
                )
            pages = tuple(self.order[at : at + count])
            self.executor.submit(
                InitSlot(PROMPT_SLOTS + number, self._text(context + 1), context + 1, pages, GREEDY)
            )
            self.contexts.append(context)

    def _text(self, count: int) -> tuple[int, ...]:
        if count > len(self.tokens):
            raise ValueError(f"a context of {count} tokens is more than the pool can hold")
        start = self.serial * 7919 % (len(self.tokens) - count + 1)
        return self.tokens[start : start + count]

    def _opened(self, prompts: Sequence[ProbePrompt]) -> list[Segment]:
        """Slots with these prompts, anew, and their segments. Their pages are the pool's first ones."""
        segments, at = [], 0
        for slot, (tokens, reused) in enumerate(prompts):
            count = -(-(reused + tokens + 1) // self.page_tokens)
            pages = tuple(self.order[at : at + count])
            at += count
            if slot in self.prompts:
                self._submit(FreeSlot(slot))
            self.prompts.add(slot)
            self._submit(
                InitSlot(slot, self._text(reused + tokens), reused + tokens, pages, GREEDY)
            )
            segments.append(Segment(slot, reused, tokens, True))
        return segments

    # ------------------------------------------------------------ steps

    def decode_step(self, work: BatchShape, units: int) -> Step:
        rows = [
            Segment(PROMPT_SLOTS + n, context - 1, 1, True)
            for n, context in enumerate(self.contexts)
        ]
        return self._step(DECODE, None, (0, self.layers), units, rows, work)

    def fused_step(self, work: BatchShape, prompts: Sequence[ProbePrompt]) -> Step:
        """Every decode and a piece of each prompt, none of which ends here."""
        rows = [
            Segment(PROMPT_SLOTS + n, context - 1, 1, True)
            for n, context in enumerate(self.contexts)
        ]
        pieces = [Segment(s.slot, s.start, s.tokens, False, s.pages) for s in self._opened(prompts)]
        return self._step(DECODE, None, (0, self.layers), self.units, [*rows, *pieces], work)

    def prefill_steps(
        self, work: BatchShape, prompts: Sequence[ProbePrompt], units: int, group: int
    ) -> list[Step]:
        segments = self._opened(prompts)
        self.serial += 1
        batch = self.serial
        edges = [(first, min(first + group, self.layers)) for first in range(0, self.layers, group)]
        return [self._step(PREFILL, batch, edge, units, segments, work) for edge in edges]

    def _step(
        self,
        lane: int,
        batch: int | None,
        edges: tuple[int, int],
        units: int,
        segments: Sequence[Segment],
        work: BatchShape,
    ) -> Step:
        self.serial += 1
        part = msgspec.structs.replace(work, first_layer=edges[0], last_layer=edges[1])
        return Step(
            self.serial,
            lane,
            self.serial if batch is None else batch,
            *edges,
            units,
            tuple(segments),
            part,
        )

    def _submit(self, command: Command) -> None:
        began_s = self.clock()
        self.executor.submit(command)
        self.host_s += self.clock() - began_s

    def _done(self) -> list[StepDone]:
        got = self.inbox.get()
        dones = [event for event in got[1] if isinstance(event, StepDone)] if got else []
        for done in dones:
            if done.error:
                raise StepError(done.error)
        return dones

    # ------------------------------------------------------------ what is measured

    def time_decode(self, work: BatchShape, units: int) -> ProbeTiming:
        """A decode step of the batch."""
        return self._in_a_row(lambda: self.decode_step(work, units), LEAST_STEPS, MOST_STEPS)

    def time_prefill(
        self, work: BatchShape, prompts: Sequence[ProbePrompt], units: int
    ) -> ProbeTiming:
        """A whole pass, alone on its units."""
        return self._in_a_row(
            lambda: self.prefill_steps(work, prompts, units, self.layers)[0],
            LEAST_PASSES,
            MOST_PASSES_ALONE,
        )

    def time_fused(self, work: BatchShape, prompts: Sequence[ProbePrompt]) -> ProbeTiming:
        return self._in_a_row(
            lambda: self.fused_step(work, prompts), LEAST_PASSES, MOST_PASSES_ALONE
        )

    def _in_a_row(self, make: Callable[[], Step], least: int, most: int) -> ProbeTiming:
        """Steps one behind the other, so many queued as the lane is deep, and then one on its own. The first is not counted: what
        it finds missing is made for it."""
        ends: list[float] = []
        launches_s: list[float] = []
        enough = most

        def send() -> None:
            self.host_s = 0.0
            self._submit(make())
            launches_s.append(self.host_s)

        for _ in range(self.depth):
            send()
        while len(ends) <= enough:
            for done in self._done():
                ends.append(done.ended_s)
                if len(ends) == 1:
                    making_s = launches_s[0] - min(launches_s)
                    enough = self._enough(done.ended_s - done.started_s - making_s, least, most)
                if len(launches_s) <= enough:
                    send()
        while len(ends) < len(launches_s):
            ends += [done.ended_s for done in self._done()]
        seconds = median_of([b - a for a, b in itertools.pairwise(ends[: enough + 1])])
        start_s = 0.0
        if seconds < SHORT_S:
            self._submit(make())
            (done,) = self._done()
            start_s = max(0.0, done.ended_s - done.started_s - seconds)
        return ProbeTiming(seconds, median_of(launches_s[1:]), 1, start_s)

    def sustained_slowdown(
        self, work: BatchShape, prompts: Sequence[ProbePrompt], for_s: float
    ) -> float:
        """How many times longer a pass takes (fused, if its work has decodes) among others that run for `for_s` seconds than in a
        short run."""

        def make() -> Step:
            if work.decode_batch:
                return self.fused_step(work, prompts)
            return self.prefill_steps(work, prompts, self.units, self.layers)[0]

        short_s = self._in_a_row(make, LEAST_PASSES, MOST_PASSES_ALONE).seconds
        ends: list[float] = []
        running = 0
        while running or not ends:
            while running < self.depth and (not ends or ends[-1] - ends[0] < for_s):
                self._submit(make())
                running += 1
            for done in self._done():
                running -= 1
                ends.append(done.ended_s)
        late = [b - a for a, b in itertools.pairwise(ends) if a >= (ends[0] + ends[-1]) / 2]
        return median_of(late) / short_s

    def _enough(self, one_s: float, least: int, most: int) -> int:
        """How many to count, if the first took `one_s`."""
        if one_s > LONG_S:
            return 1
        return min(most, max(least, int(LEAST_S / max(1e-4, one_s))))

    def time_co_running(
        self,
        decode: BatchShape,
        level: int,
        prefill: BatchShape,
        prompts: Sequence[ProbePrompt],
        alone: tuple[float, float],
        for_s: float = 0.0,
    ) -> tuple[ProbeTiming, ProbeTiming]:
        """A decode step on `level` units and a prefill pass on the rest, both again and again side by side; `alone`: what they take
        alone there, at a guess. Prefill goes in layer groups that take about as long as a decode step, as it is served. `for_s`: at
        least so long, and what counts is the second half."""
        rest = self.units - level
        decode_s, prefill_s = alone
        group = max(
            1,
            min(self.layers, -(-int(1e6 * decode_s) * self.layers // max(1, int(1e6 * prefill_s)))),
        )
        least = PASSES if prefill_s < LONG_S else PASSES - 1
        passes = 1 + max(
            least, min(24, -(-int(1e6 * DECODES * decode_s) // max(1, int(1e6 * prefill_s))))
        )
        seen = CoRunTiming(per_pass=-(-self.layers // group))
        self._side_by_side(
            seen,
            lambda: self.decode_step(decode, level),
            lambda: self.prefill_steps(prefill, prompts, rest, group),
            passes,
            for_s,
        )
        pass_ends = seen.pass_ends
        if for_s:
            half_s = (pass_ends[0] + pass_ends[-1]) / 2
            pass_ends = [at for at in pass_ends if at >= half_s]
        steady = [at for at in seen.ends[DECODE] if pass_ends[0] <= at <= pass_ends[-1]]
        if len(steady) < 2:
            steady = [seen.began_s, *seen.ends[DECODE]]
        period_s, pass_s = (
            median_of([b - a for a, b in itertools.pairwise(times)])
            for times in (steady, pass_ends)
        )
        parts = seen.launches_s[PREFILL]
        each_s = [sum(parts[at : at + seen.per_pass]) for at in range(0, len(parts), seen.per_pass)]
        return ProbeTiming(period_s, median_of(seen.launches_s[DECODE][1:])), ProbeTiming(
            pass_s, median_of(each_s[1:]), seen.per_pass
        )

    def _side_by_side(
        self,
        seen: CoRunTiming,
        decode: Callable[[], Step],
        prefill: Callable[[], Sequence[Step]],
        passes: int,
        for_s: float,
    ) -> None:
        """At least so many passes, for at least so long; decode steps all the while."""
        queue = deque[Step]()
        made = running = 0

        def feed(lane: int) -> None:
            nonlocal made, running
            self.host_s = 0.0
            few = (
                len(seen.ends[DECODE]) < LEAST_STEPS and made < MOST_PASSES * passes
            )  # the guess may be far off
            ends = seen.pass_ends
            more = made < passes or few or (len(ends) > 0 and ends[-1] - ends[0] < for_s)
            step = None
            if lane == PREFILL:
                if not queue and more:
                    made += 1
                    queue.extend(prefill())
                step = queue.popleft() if queue else None
            elif more or len(ends) < made:
                step = decode()
            if step is not None:
                self._submit(step)
                running += 1
                seen.launches_s[lane].append(self.host_s)

        for _ in range(self.depth):
            feed(DECODE)
            feed(PREFILL)
        while running:
            for done in self._done():
                running -= 1
                if done.lane == DECODE and not seen.ends[DECODE]:
                    seen.began_s = done.started_s
                seen.ends[done.lane].append(done.ended_s)
                feed(done.lane)
