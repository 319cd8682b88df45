"""StepProbe: makes steps, sends them to an executor and times them.

Owns: slots, pages and tokens of the made requests, and how a kind of step is timed.
Promises: times are the device's own (StepDone), averaged over several steps. Steps are queued as
deep as the lanes allow. So a step's time is from the end of the one before to its own end, as when
it is served. The host's time is given apart. Contexts do not grow while they are measured.

The executor has two lanes, as for multiplexing: lane 0 decodes and runs fused passes, lane 1
prefills. Slots from PROMPT_SLOTS on decode.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from counterpoint.interfaces import EventQueue, Executor
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

DECODE, PREFILL = 0, 1  # lanes
PROMPT_SLOTS = 8  # slots for prompts to prefill
GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
TARGET_S = 0.09  # steps of one kind are repeated for about so long in all, within these counts:
MIN_STEPS, MAX_STEPS = 4, 18  # decode steps
MIN_PASSES, MAX_PASSES = 2, 12  # prefill and fused passes
LONG_S = 0.15  # a pass that takes so long is steady: one is enough
SHORT_S = 0.08  # for shorter ones, the start on an idle device is measured too
MIN_CO_PASSES, MAX_CO_PASSES = 3, 24  # prefill passes beside decode steps
CO_STEPS = 8  # decode steps beside prefill passes, at least
MAX_CO_FACTOR = 8  # times as many passes, while there are too few decode steps


class StepError(RuntimeError):
    """A step failed on the device; the message is the device's own."""


class ProbePrompt(NamedTuple):
    """So many new tokens after `reused` ones that are in the cache."""

    tokens: int
    reused: int = 0


class ProbeTiming(NamedTuple):
    """Of a step among others of its kind. `seconds`: from the end of the one before to its own end;
    `host_s`: how long of these the host was busy launching it; `steps`: into how many it was split;
    `start_s`: how much longer it takes on an idle device (0: not measured)."""

    seconds: float
    host_s: float = 0.0
    steps: int = 1
    start_s: float = 0.0


class CoRun(NamedTuple):
    """A decode step on `decode_units`, and a prefill pass of `prompts` on the other units.
    `expected_s`: what each takes alone there, a guess."""

    decode: BatchShape
    decode_units: int
    prefill: BatchShape
    prompts: Sequence[ProbePrompt]
    expected_s: tuple[float, float]


@dataclass(slots=True)
class CoRunTiming:
    """Steps on both lanes at once, by lane: when each ended, and how long the host launched it.
    `began_s`: of the first decode step; `steps_per_pass`: of prefill."""

    steps_per_pass: int
    began_s: float = 0.0
    ends: dict[int, list[float]] = field(default_factory=lambda: {DECODE: [], PREFILL: []})
    launches_s: dict[int, list[float]] = field(default_factory=lambda: {DECODE: [], PREFILL: []})

    @property
    def pass_ends(self) -> list[float]:
        return self.ends[PREFILL][self.steps_per_pass - 1 :: self.steps_per_pass]

    def summarise(self, second_half: bool) -> tuple[ProbeTiming, ProbeTiming]:
        """Of a decode step and of a prefill pass. `second_half`: of the time is what counts."""
        pass_ends, decode_ends = self.pass_ends, self.ends[DECODE]
        if second_half:
            half_s = (pass_ends[0] + pass_ends[-1]) / 2
            pass_ends = [at for at in pass_ends if at >= half_s]
        steady = [at for at in decode_ends if pass_ends[0] <= at <= pass_ends[-1]]
        if len(steady) < 2:
            steady = [self.began_s, *decode_ends]
        decodes_s, parts_s, size = *self.launches_s.values(), self.steps_per_pass
        prefills_s = [sum(parts_s[at : at + size]) for at in range(0, len(parts_s), size)]
        decode_s, prefill_s = (trimmed_mean(intervals(times)) for times in (steady, pass_ends))
        decode = ProbeTiming(decode_s, trimmed_mean(decodes_s[1:]))
        return decode, ProbeTiming(prefill_s, trimmed_mean(prefills_s[1:]), size)


def trimmed_mean(values: Sequence[float]) -> float:
    """Mean of the middle two thirds, so that a few disturbed values do not count."""
    ordered = sorted(values)
    cut = len(ordered) // 6 if len(ordered) > 5 else (len(ordered) - 1) // 2
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def intervals(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


@dataclass
class StepProbe:
    """`pages`: of the pool; `units`: of the device; `layers`, `vocab`: of the model; `depth`: of
    the lanes. `clock`: the host's."""

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
    last_id: int = 0  # of steps and passes
    clock: Callable[[], float] = time.monotonic
    host_s: float = 0.0  # spent in the executor since it was last set to 0

    def __post_init__(self) -> None:
        rng = random.Random(0)
        self.page_order = list(range(self.pages))
        rng.shuffle(self.page_order)
        kv = getattr(self.executor, "kv", None)  # a KVPool, if it is in this process
        for pool in (*kv.k, *kv.v) if kv is not None else ():
            if pool.dtype.itemsize > 1:  # noise can't be drawn in quantised types
                pool.normal_()  # zeros can be read faster than what is served
        count = self.pages * self.page_tokens // 8 + 4096
        self.tokens = tuple(rng.randrange(self.vocab // 4, self.vocab) for _ in range(count))

    # ------------------------------------------------------------ slots

    def set_decode_batch(self, contexts: Sequence[int]) -> None:
        """Open decoding slots with these contexts. Raises ValueError if the pool is too small."""
        if list(contexts) == self.contexts:
            return
        for slot, _ in enumerate(self.contexts, PROMPT_SLOTS):
            self.executor.submit(FreeSlot(slot))
        self.contexts = []
        at = self.pages
        for slot, context in enumerate(contexts, PROMPT_SLOTS):
            count = -(-(context + 1) // self.page_tokens)
            at -= count
            if at < 0:
                wanted = f"{len(contexts)} contexts of {max(contexts)} tokens"
                raise ValueError(f"{wanted} do not fit {self.pages} pages")
            pages = tuple(self.page_order[at : at + count])
            text = self._text(context + 1)
            self.executor.submit(InitSlot(slot, text, context + 1, pages, GREEDY))
            self.contexts.append(context)

    def _text(self, count: int) -> tuple[int, ...]:
        if count > len(self.tokens):
            raise ValueError(f"a context of {count} tokens is more than the pool can hold")
        start = self.last_id * 7919 % (len(self.tokens) - count + 1)
        return self.tokens[start : start + count]

    def _open_prompts(self, prompts: Sequence[ProbePrompt]) -> list[Segment]:
        """Open slots with these prompts again; their segments. They take the pool's first pages."""
        segments, at = [], 0
        for slot, (tokens, reused) in enumerate(prompts):
            known = reused + tokens
            count = -(-(known + 1) // self.page_tokens)
            pages = tuple(self.page_order[at : at + count])
            at += count
            if slot in self.prompts:
                self._submit(FreeSlot(slot))
            self.prompts.add(slot)
            self._submit(InitSlot(slot, self._text(known), known, pages, GREEDY))
            segments.append(Segment(slot, reused, tokens, True))
        return segments

    # ------------------------------------------------------------ steps

    def decode_step(self, work: BatchShape, units: int) -> Step:
        return self._step(DECODE, units, self._decodes(), work)

    def fused_step(self, work: BatchShape, prompts: Sequence[ProbePrompt]) -> Step:
        """Every decode and a chunk of each prompt; no prompt ends here."""
        prefills = self._open_prompts(prompts)
        chunks = [Segment(s.slot, s.start, s.tokens, False, s.pages) for s in prefills]
        return self._step(DECODE, self.units, [*self._decodes(), *chunks], work)

    def prefill_steps(
        self, work: BatchShape, prompts: Sequence[ProbePrompt], units: int, group: int
    ) -> list[Step]:
        """A pass in steps of `group` layers."""
        segments = self._open_prompts(prompts)
        self.last_id += 1
        pass_id = self.last_id
        steps = []
        for first in range(0, self.layers, group):
            last = min(first + group, self.layers)
            part = msgspec.structs.replace(work, first_layer=first, last_layer=last)
            steps.append(self._step(PREFILL, units, segments, part, pass_id))
        return steps

    def _decodes(self) -> list[Segment]:
        slots = enumerate(self.contexts, PROMPT_SLOTS)
        return [Segment(slot, context - 1, 1, True) for slot, context in slots]

    def _step(
        self,
        lane: int,
        units: int,
        segments: Sequence[Segment],
        work: BatchShape,
        pass_id: int | None = None,
    ) -> Step:
        """Of a pass, the layers of `work`; without `pass_id`, a whole pass."""
        self.last_id += 1
        if pass_id is None:
            pass_id = self.last_id
            work = msgspec.structs.replace(work, first_layer=0, last_layer=self.layers)
        layers = (work.first_layer, work.last_layer)
        return Step(self.last_id, lane, pass_id, *layers, units, tuple(segments), work)

    def _submit(self, command: Command) -> None:
        began_s = self.clock()
        self.executor.submit(command)
        self.host_s += self.clock() - began_s

    def _wait(self) -> list[StepDone]:
        """The next completions. Raises StepError."""
        _, events = self.inbox.get() or (0.0, ())
        dones = [event for event in events if isinstance(event, StepDone)]
        for done in dones:
            if done.error:
                raise StepError(done.error)
        return dones

    # ------------------------------------------------------------ one kind of step

    def time_decode(self, work: BatchShape, units: int) -> ProbeTiming:
        return self._time_repeated(lambda: self.decode_step(work, units), MIN_STEPS, MAX_STEPS)

    def time_prefill(
        self, work: BatchShape, prompts: Sequence[ProbePrompt], units: int
    ) -> ProbeTiming:
        """A whole pass, alone on its units."""
        return self._time_repeated(
            lambda: self.prefill_steps(work, prompts, units, self.layers)[0], MIN_PASSES, MAX_PASSES
        )

    def time_fused(self, work: BatchShape, prompts: Sequence[ProbePrompt]) -> ProbeTiming:
        return self._time_repeated(lambda: self.fused_step(work, prompts), MIN_PASSES, MAX_PASSES)

    def sustained_slowdown(
        self, work: BatchShape, prompts: Sequence[ProbePrompt], for_s: float
    ) -> float:
        """How many times longer a pass (fused, if `work` has decodes) takes in a run of `for_s`
        seconds than in a short one."""

        def make() -> Step:
            if work.decode_batch:
                return self.fused_step(work, prompts)
            return self.prefill_steps(work, prompts, self.units, self.layers)[0]

        short_s = self._time_repeated(make, MIN_PASSES, MAX_PASSES).seconds
        ends: list[float] = []
        running = 0
        while running or not ends:
            while running < self.depth and (not ends or ends[-1] - ends[0] < for_s):
                self._submit(make())
                running += 1
            for done in self._wait():
                running -= 1
                ends.append(done.ended_s)
        late = [at for at in ends if at >= (ends[0] + ends[-1]) / 2]
        return trimmed_mean(intervals(late)) / short_s

    def _time_repeated(self, make: Callable[[], Step], least: int, most: int) -> ProbeTiming:
        """Steps back to back, as many queued as the lane is deep, then one on an idle device. The
        first is not counted: it may have to compile or allocate something."""
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
            for done in self._wait():
                ends.append(done.ended_s)
                if len(ends) == 1:
                    making_s = launches_s[0] - min(launches_s)
                    enough = repeats(done.ended_s - done.started_s - making_s, least, most)
                if len(launches_s) <= enough:
                    send()
        while len(ends) < len(launches_s):
            ends += [done.ended_s for done in self._wait()]
        seconds = trimmed_mean(intervals(ends[: enough + 1]))
        start_s = 0.0
        if seconds < SHORT_S:
            self._submit(make())
            (done,) = self._wait()
            start_s = max(0.0, done.ended_s - done.started_s - seconds)
        return ProbeTiming(seconds, trimmed_mean(launches_s[1:]), 1, start_s)

    # ------------------------------------------------------------ two kinds at once

    def time_co_running(self, run: CoRun, for_s: float = 0.0) -> tuple[ProbeTiming, ProbeTiming]:
        """A decode step and a prefill pass, both repeated side by side. Prefill runs in layer
        groups that take about as long as a decode step, as it is served. `for_s`: for at least so
        long, of which the second half counts."""
        decode_us, prefill_us = (int(1e6 * seconds) for seconds in run.expected_s)
        prefill_us = max(1, prefill_us)
        group = max(1, min(self.layers, -(-decode_us * self.layers // prefill_us)))
        least = MIN_CO_PASSES if run.expected_s[1] < LONG_S else MIN_CO_PASSES - 1
        wanted = -(-int(1e6 * CO_STEPS * run.expected_s[0]) // prefill_us)
        passes = 1 + max(least, min(MAX_CO_PASSES, wanted))
        timing = CoRunTiming(steps_per_pass=-(-self.layers // group))
        rest = self.units - run.decode_units
        self._run_side_by_side(
            timing,
            lambda: self.decode_step(run.decode, run.decode_units),
            lambda: self.prefill_steps(run.prefill, run.prompts, rest, group),
            passes,
            for_s,
        )
        return timing.summarise(second_half=for_s > 0)

    def _run_side_by_side(
        self,
        timing: CoRunTiming,
        decode: Callable[[], Step],
        prefill: Callable[[], Sequence[Step]],
        passes: int,
        for_s: float,
    ) -> None:
        """At least `passes`, for at least `for_s`, with decode steps all the while."""
        queue = deque[Step]()
        made = running = 0

        def next_step(lane: int) -> Step | None:
            nonlocal made
            ends = timing.pass_ends
            # The guess of what a step takes may be far off.
            few_steps = len(timing.ends[DECODE]) < MIN_STEPS and made < MAX_CO_FACTOR * passes
            more = made < passes or few_steps or (len(ends) > 0 and ends[-1] - ends[0] < for_s)
            if lane == DECODE:
                return decode() if more or len(ends) < made else None
            if not queue and more:
                made += 1
                queue.extend(prefill())
            return queue.popleft() if queue else None

        def feed(lane: int) -> None:
            nonlocal running
            self.host_s = 0.0
            step = next_step(lane)
            if step is not None:
                self._submit(step)
                running += 1
                timing.launches_s[lane].append(self.host_s)

        for _ in range(self.depth):
            feed(DECODE)
            feed(PREFILL)
        while running:
            for done in self._wait():
                running -= 1
                if done.lane == DECODE and not timing.ends[DECODE]:
                    timing.began_s = done.started_s
                timing.ends[done.lane].append(done.ended_s)
                feed(done.lane)


def repeats(one_s: float, least: int, most: int) -> int:
    """How many steps to time, if one takes `one_s`."""
    if one_s > LONG_S:
        return 1
    return min(most, max(least, int(TARGET_S / max(1e-4, one_s))))
