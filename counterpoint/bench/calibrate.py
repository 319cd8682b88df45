"""Calibrate: measure what steps take on this device, and say how well that predicts others.

Owns: which steps are measured and in which order, and the `calibrate` command. Promises: it ends in about the time it is given;
what was measured is on disk after every point, and a second run goes on from there; points that judge the fit are drawn at random
and are never fitted. Must not: fit (cost_model/fitted.py does), or run a step by itself (device/step_probe.py does).

In this order, so that a run that ends early still knows something of everything: some steps of each kind alone on each number of
units, prefill beside decode on each split, the rest of both in turn, the points held out, for which a fifth of the time is kept.
Last, how much longer passes take that run on and on.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, NamedTuple

import msgspec
from cyclopts import Group, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from counterpoint import __version__, build
from counterpoint.bench.calibration_report import report, show
from counterpoint.bench.load import flag
from counterpoint.config import Config, require_writable
from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.calibration import (
    CO_RUNNING_KIND,
    Calibration,
    CalibrationPoint,
    file_name,
    pad_rows,
)
from counterpoint.cost_model.fitted import Fitted
from counterpoint.cost_model.roofline import Roofline
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.step_probe import PROMPT_SLOTS, CoRun, ProbePrompt, ProbeTiming, StepProbe
from counterpoint.flags import config_flags
from counterpoint.interfaces import Estimator
from counterpoint.types import BatchShape

ROWS = (
    512,
    2048,
    8192,
    128,
    1024,
    4096,
    256,
    64,
    6144,
    3072,
    1536,
    768,
    384,
    576,
    640,
    896,
    1152,
    1280,
    320,
    192,
    16,
)
BATCHES = ((1, 1024), (32, 1024), (128, 1024), (32, 8192), (8, 1024), (64, 1024), (16, 1024), (256, 512), (96, 4096), (4, 4096),
           (192, 512), (2, 1024), (96, 1024), (8, 8192), (48, 512), (64, 8192), (80, 1024),
           (160, 1024), (24, 1024), (224, 512), (112, 1024))  # fmt: skip
NUM_FIRST = 3  # of these lists, at first
CONTEXT_SIGMA = 0.6  # of the contexts of a batch: the standard deviation of their logarithms, as in a chat's load
CACHED_PROMPTS = (
    ProbePrompt(1024, 4096),
    ProbePrompt(256, 4096),
    ProbePrompt(2048, 12288),
    ProbePrompt(512, 16384),
)
MULTI_PROMPTS = ((4, 256), (8, 1024), (8, 64))  # prompts in a pass, tokens of each
CHUNKS = ((512, 0), (2048, 4096), (128, 1024), (1024, 2048), (4096, 0), (256, 4096), (7936, 0), (512, 8192), (384, 0), (768, 0),
          (1536, 0), (64, 0), (960, 0), (1984, 0), (480, 1024), (16, 512))  # fmt: skip
FUSED_BATCHES = ((32, 1024), (128, 2048), (8, 2048), (240, 512), (64, 8192))
PAIRS = (
    *itertools.product(
        (ProbePrompt(2048), ProbePrompt(512), ProbePrompt(2048, 8192)),
        ((64, 1024), (128, 4096), (8, 2048)),
    ),
    (ProbePrompt(256), (128, 1024)),
    (ProbePrompt(8192), (64, 1024)),
    (ProbePrompt(1024), (240, 512)),
    (ProbePrompt(128), (4, 512)),
    (ProbePrompt(8192), (128, 4096)),
    (ProbePrompt(1024), (32, 1024)),
    (ProbePrompt(4096), (16, 4096)),
    (ProbePrompt(256), (8, 1024)),
    (ProbePrompt(64), (64, 512)),
)
CPU_POOL_BYTES = 1 << 30  # of which every page is written before anything is measured
SUSTAINED = (
    ("mixed", ProbePrompt(960, 1024), (64, 1024)),
    ("prefill", ProbePrompt(2048), None),
    (CO_RUNNING_KIND, ProbePrompt(2048), (64, 1024)),
)
ON_AND_ON_SHARE, ON_AND_ON_S = 0.02, 6.0  # of the time, for each of these, and at most so long
HELD_OUT_SOLO, HELD_OUT_PAIRS = 80, 60
HELD_OUT_SHARE = 0.2  # of the time, for the points held out
MAX_JOB_SHARE = 0.04  # of the time, for one point


class CalibrationJob(NamedTuple):
    """Something to measure. `units`: of the decode where both run; a fused pass has all of them. `contexts`: of the decodes."""

    prompts: tuple[ProbePrompt, ...]
    contexts: tuple[int, ...]
    units: int
    fused: bool = False
    held_out: bool = False

    def shapes(self, layers: int) -> tuple[BatchShape | None, BatchShape | None]:
        """Its prefill and its decode; a fused pass is the first."""
        decode = None
        if self.contexts:
            decode = BatchShape.decode(len(self.contexts), sum(self.contexts), layers)
        if not self.prompts:
            return None, decode
        fused = self.fused and decode is not None
        parts = [
            BatchShape.prefill(tokens, reused, layers, sampled=not fused)
            for tokens, reused in self.prompts
        ]
        prefill = sum(parts[1:], parts[0])
        if self.fused and decode is not None:
            return prefill + decode, None
        return prefill, decode


# ---------------------------------------------------------------- what is measured


def uneven_contexts(batch: int, mean: int) -> tuple[int, ...]:
    """`batch` contexts of that mean, lognormal: a kernel that shares them out unevenly is measured so."""
    spread = [
        math.exp(CONTEXT_SIGMA * NormalDist().inv_cdf((n + 0.5) / batch)) for n in range(batch)
    ]
    scale = mean * batch / sum(spread)
    random.Random(batch).shuffle(spread)  # as they come, not by their size
    return tuple(max(16, round(scale * one)) for one in spread)


class DeviceCapacity(NamedTuple):
    """What steps may hold: `context` tokens of a request, `tokens` in the pool, `batch` decodes, `rows` of a pass."""

    context: int
    tokens: int
    batch: int
    rows: int

    def fits(self, job: CalibrationJob) -> bool:
        longest = max([*job.contexts, *(sum(p) for p in job.prompts)]) + 2
        whole = (
            sum(job.contexts)
            + sum(sum(p) for p in job.prompts)
            + 32 * (len(job.contexts) + PROMPT_SLOTS)
        )
        rows = sum(p.tokens for p in job.prompts) + (len(job.contexts) if job.fused else 0)
        return (
            longest <= self.context
            and whole <= self.tokens
            and len(job.contexts) <= self.batch
            and rows <= self.rows
        )


def rows_for(buckets: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Rows of the passes to measure: where passes are filled up to buckets, these."""
    every = (*ROWS, *buckets[::2], *buckets[1::2])
    return tuple(dict.fromkeys(min(pad_rows(rows, buckets), most) for rows in every))


def interleave(
    some: Sequence[CalibrationJob], others: Sequence[CalibrationJob], block: int
) -> list[CalibrationJob]:
    """Both in their order, in turn by blocks of so many, and so that they come to their ends together."""
    placed = [
        ((number // block + 0.5) * block / len(jobs), job)
        for jobs in (some, others)
        for number, job in enumerate(jobs)
    ]
    return [job for _, job in sorted(placed, key=lambda place: place[0])]


def plan_jobs(
    units: int, levels: Sequence[int], capacity: DeviceCapacity, buckets: tuple[int, ...] = ()
) -> list[CalibrationJob]:
    """All that is to be fitted, the most telling first. `buckets`: to which passes with prompt tokens are filled up."""
    rows = rows_for(buckets, capacity.rows)
    prefill_units = [units, *(units - level for level in levels)]
    decode_units = [units, *levels]

    def alone(
        rows: Sequence[int], batches: Sequence[tuple[int, int]], chunks: Sequence[tuple[int, int]]
    ) -> Iterator[CalibrationJob]:
        for tokens in rows:
            yield from (CalibrationJob((ProbePrompt(tokens),), (), n) for n in prefill_units)
        for batch, context in batches:
            yield from (
                CalibrationJob((), uneven_contexts(min(batch, capacity.batch), context), n)
                for n in decode_units
            )
        for number, chunk in enumerate(chunks):
            batch, context = FUSED_BATCHES[number % len(FUSED_BATCHES)]
            yield CalibrationJob(
                (ProbePrompt(*chunk),),
                uneven_contexts(min(batch, capacity.batch), context),
                units,
                fused=True,
            )

    def pairs(some: Sequence[tuple[ProbePrompt, tuple[int, int]]]) -> Iterator[CalibrationJob]:
        for prompt, (batch, context) in some:
            yield from (
                CalibrationJob(
                    (prompt,), uneven_contexts(min(batch, capacity.batch), context), level
                )
                for level in levels
            )

    solo = [*alone(rows[NUM_FIRST:], BATCHES[NUM_FIRST:], CHUNKS[NUM_FIRST:])]
    for batch, context in FUSED_BATCHES:
        beside = uneven_contexts(min(batch, capacity.batch), context)
        solo += [
            CalibrationJob((ProbePrompt(n, r),), beside, units, fused=True)
            for n, r in CHUNKS[: 2 * NUM_FIRST]
        ]
    solo += [CalibrationJob((prompt,), (), n) for prompt in CACHED_PROMPTS for n in prefill_units]
    solo += [
        CalibrationJob((ProbePrompt(tokens),) * count, (), n)
        for count, tokens in MULTI_PROMPTS
        for n in prefill_units
    ]
    jobs = [
        *alone(rows[:NUM_FIRST], BATCHES[:NUM_FIRST], CHUNKS[:NUM_FIRST]),
        *pairs(PAIRS[:NUM_FIRST]),
        *interleave(solo, [*pairs(PAIRS[NUM_FIRST:])], len(levels)),
    ]
    return [job for job in dict.fromkeys(jobs) if capacity.fits(job)]


def held_out_jobs(
    units: int,
    levels: Sequence[int],
    capacity: DeviceCapacity,
    max_prompt_tokens: int,
    seed: int = 1,
) -> list[CalibrationJob]:
    """Steps drawn at random: lengths and batches over the whole range, log-uniform; contexts of a batch all different."""
    chance = random.Random(seed)

    def between(low: float, high: float) -> int:
        return round(math.exp(chance.uniform(math.log(low), math.log(max(low, high)))))

    def prompts() -> tuple[ProbePrompt, ...]:
        count = chance.choice((1, 1, 1, 2, 4))
        reused = between(64, capacity.context / 2) if chance.random() < 0.4 else 0
        return tuple(
            ProbePrompt(max(1, between(64, max_prompt_tokens) // count), reused)
            for _ in range(count)
        )

    def contexts() -> tuple[int, ...]:
        batch = between(1, capacity.batch)
        mean = between(128, min(capacity.context / 2, capacity.tokens / batch / 2))
        return tuple(
            min(capacity.context - 2, max(16, round(mean * chance.lognormvariate(0, 0.6))))
            for _ in range(batch)
        )

    kinds: list[Callable[[], CalibrationJob]] = [
        lambda: CalibrationJob(prompts(), (), units - chance.choice((0, *levels)), held_out=True),
        lambda: CalibrationJob((), contexts(), chance.choice((units, *levels)), held_out=True),
        lambda: CalibrationJob(prompts(), contexts(), units, fused=True, held_out=True),
    ]
    solo = [kinds[number % len(kinds)]() for number in range(2 * HELD_OUT_SOLO)]
    both = [
        CalibrationJob(prompts(), contexts(), chance.choice(levels), held_out=True)
        for _ in range(2 * HELD_OUT_PAIRS)
    ]
    solo, both = ([job for job in jobs if capacity.fits(job)] for jobs in (solo, both))
    mixed = [job for jobs in zip(solo[::2], both, solo[1::2], strict=False) for job in jobs]
    return mixed[: HELD_OUT_SOLO + HELD_OUT_PAIRS]


# ---------------------------------------------------------------- measuring


class CalibrationRun:
    """Jobs into a table. `keep` is told after each job."""

    def __init__(
        self,
        probe: StepProbe,
        table: Calibration,
        prior: Roofline,
        keep: Callable[[Calibration], None],
    ) -> None:
        self.probe = probe
        self.table = table
        self.prior = prior
        self.save = keep
        self._estimator: Estimator = prior
        self._num_fitted = 0

    def is_measured(self, job: CalibrationJob) -> bool:
        return not self.missing(job)

    def missing(
        self, job: CalibrationJob
    ) -> list[tuple[BatchShape, int, tuple[BatchShape, int] | None]]:
        """What of the job has not been measured: (work, units, beside)."""
        have = {(p.work, p.units, p.co_running) for p in self.table.points}
        return [what for what in self._point_keys(job) if what not in have]

    def _point_keys(
        self, job: CalibrationJob
    ) -> list[tuple[BatchShape, int, tuple[BatchShape, int] | None]]:
        prefill, decode = job.shapes(self.probe.layers)
        if prefill is None or decode is None:
            return [(prefill or decode or BatchShape(), job.units, None)]
        rest = self.probe.units - job.units
        return [(decode, job.units, (prefill, rest)), (prefill, rest, (decode, job.units))]

    def expected_s(self, job: CalibrationJob) -> float:
        """How long measuring it will take, about."""
        prices = self._current_estimator()
        whats = self._point_keys(job)
        if len(whats) == 1:
            return 3.5 * prices.seconds(*whats[0])
        return 4.0 * max(prices.seconds(*whats[1]), 2.5 * prices.seconds(*whats[0]))

    def measure(self, job: CalibrationJob) -> None:
        probe, (prefill, decode) = self.probe, job.shapes(self.probe.layers)
        if job.contexts:
            probe.set_decode_batch(job.contexts)
        if prefill is None and decode is not None:
            took: Sequence[ProbeTiming] = [probe.time_decode(decode, job.units)]
        elif prefill is not None and job.fused:
            took = [probe.time_fused(prefill, job.prompts)]
        elif prefill is not None and decode is None:
            took = [probe.time_prefill(prefill, job.prompts, job.units)]
        else:
            assert prefill is not None and decode is not None
            prices, rest = self._current_estimator(), probe.units - job.units
            guess = (prices.seconds(decode, job.units), prices.seconds(prefill, rest))
            took = probe.time_co_running(CoRun(decode, job.units, prefill, job.prompts, guess))
        for (work, units, beside), each in zip(self._point_keys(job), took, strict=True):
            self.table.points.append(
                CalibrationPoint(
                    work,
                    units,
                    each.seconds,
                    beside,
                    job.held_out,
                    each.host_s,
                    each.steps,
                    each.start_s,
                )
            )
        self.save(self.table)

    def measure_sustained(
        self, capacity: DeviceCapacity, levels: Sequence[int], budget_s: float
    ) -> None:
        """Measure what is in ON_AND_ON and not known yet, if it is no more than its share of the time. Both sides of a pair count
        alike, on the middle one of the `levels`."""
        for_s = min(ON_AND_ON_S, ON_AND_ON_SHARE * budget_s)
        for kind, prompt, beside in SUSTAINED:
            contexts = uneven_contexts(min(beside[0], capacity.batch), beside[1]) if beside else ()
            units = levels[len(levels) // 2] if kind == CO_RUNNING_KIND else self.probe.units
            job = CalibrationJob((prompt,), contexts, units, fused=kind == "mixed")
            if (
                kind in self.table.on_and_on
                or not capacity.fits(job)
                or self.expected_s(job) > MAX_JOB_SHARE * budget_s
            ):
                continue
            if contexts:
                self.probe.set_decode_batch(contexts)
            self.table.on_and_on[kind] = self._sustained_slowdown(job, for_s)
            self.save(self.table)

    def _sustained_slowdown(self, job: CalibrationJob, for_s: float) -> float:
        prefill, decode = job.shapes(self.probe.layers)
        assert prefill is not None
        if decode is None:
            return self.probe.sustained_slowdown(prefill, job.prompts, for_s)
        prices, rest = self._current_estimator(), self.probe.units - job.units
        guess = (prices.seconds(decode, job.units), prices.seconds(prefill, rest))
        short, long = (
            self.probe.time_co_running(CoRun(decode, job.units, prefill, job.prompts, guess), s)
            for s in (0.0, for_s)
        )
        return math.sqrt(long[0].seconds / short[0].seconds * long[1].seconds / short[1].seconds)

    def _current_estimator(self) -> Estimator:
        """What is expected of steps, by what has been measured until now."""
        if len(self.table.points) >= max(8, 1.2 * self._num_fitted):
            self._estimator, self._num_fitted = (
                Fitted(self.table, self.prior),
                len(self.table.points),
            )
        return self._estimator


def run_jobs(
    run: CalibrationRun,
    jobs: Sequence[CalibrationJob],
    held_out: Sequence[CalibrationJob],
    budget_s: float,
    on_progress: Callable[[int, int], None],
) -> int:
    """Measure within `budget_s`; how many jobs were left out for want of time. `tell(done, of)`."""
    began_s, left_out, number = time.monotonic(), 0, 0
    for some, until_s in ((jobs, budget_s * (1 - HELD_OUT_SHARE)), (held_out, budget_s)):
        for job in some:
            number += 1
            if not run.is_measured(job):
                wanted_s = run.expected_s(job)
                if (
                    wanted_s > MAX_JOB_SHARE * budget_s
                    or time.monotonic() - began_s + wanted_s > until_s
                ):
                    left_out += 1
                else:
                    run.measure(job)
            on_progress(number, len(jobs) + len(held_out))
    return left_out


# ---------------------------------------------------------------- the command

CALIBRATION = Group("CalibrationRun", sort_key=0)
JSON = Parameter(
    help="write the held-out points and errors to this file",
    group=CALIBRATION,
    allow_leading_hyphen=True,
)


def open_table(path: Path, pricing: build.CalibrationTarget, seed: int, fresh: bool) -> Calibration:
    """What is at `path` already, if it was measured with the same device, model and kernels, and its held-out steps drawn by the
    same seed."""
    about = {"date": date.today().isoformat(), "counterpoint": __version__, "seed": str(seed)}
    new = Calibration(
        key=pricing.key, about=about, buckets=pricing.buckets, pass_buckets=pricing.pass_buckets
    )
    if path.is_file() and not fresh:
        old = calibration_store.load(path)
        same = (old.key, old.buckets, old.pass_buckets) == (new.key, new.buckets, new.pass_buckets)
        if same and old.about.get("seed") == about["seed"]:
            return old
    return new


@config_flags("model", "device")
def command(
    *,
    budget: Annotated[float, flag("seconds to measure, beside loading", CALIBRATION)] = 240.0,
    out: Annotated[
        Path | None,
        flag("where the table is kept; unset: in the cache folder, where it is found", CALIBRATION),
    ] = None,
    json: Annotated[Path | None, JSON] = None,
    fresh: Annotated[bool, flag("forget what was measured before", CALIBRATION)] = False,
    seed: Annotated[
        int, flag("of the steps that judge the fit and are not fitted", CALIBRATION)
    ] = 1,
    config: Config,
) -> int:
    """Measure what steps take here, so that `--policy auto` knows; run it again to go on after an interruption.

    counterpoint calibrate smollm2

    counterpoint calibrate llama-3.1-8b --device cuda
    """
    if not 0 < budget < math.inf:
        raise ValueError(f"--budget is {budget}: it must be more than 0 seconds")
    if seed < 0:
        raise ValueError(f"--seed is {seed}: it must be 0 or more")
    if out is not None and out.is_dir():
        raise ValueError(f"--out is {out}: that is a folder; name a file in it")
    require_writable("--json", json)
    notes = Console(stderr=True, highlight=False)
    config = config.replace(policy="multiplex")
    if build.find_model(config).kind == "spec":
        config = config.replace(
            load_format="dummy"
        )  # what steps take does not depend on the weights
    if (
        build.choose_device(config) == "cpu"
        and config.device.kv_memory_bytes is None
        and config.device.kv_pages is None
    ):
        config = config.replace(kv_memory_bytes=CPU_POOL_BYTES)
    inbox = WallClockEventQueue()
    with notes.status("starting") as status:
        system = build.build_system(config, inbox, lambda stage: status.update(stage))
    try:
        pricing = system.calibration_target
        assert pricing is not None
        if not pricing.levels:
            raise ValueError(
                f"{pricing.key.device} can't be split here, so there is nothing to decide that needs prices"
            )
        path = out or build.calibration_folder() / file_name(pricing.key)
        table = open_table(path, pricing, seed, fresh)
        calibration = open_run(system, inbox, table, pricing.prior, path)
        limits = system.limits
        room = DeviceCapacity(
            limits.max_context_tokens,
            limits.pages * limits.page_tokens,
            limits.max_running - PROMPT_SLOTS,
            limits.max_pass_tokens,
        )
        judges = held_out_jobs(
            limits.units,
            pricing.levels,
            room,
            max_measurable_tokens(calibration, room, budget),
            seed,
        )
        jobs = plan_jobs(limits.units, pricing.levels, room, pricing.pass_buckets)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=notes, refresh_per_second=2) as bar:
            task = bar.add_task(f"{system.spec.name} on {pricing.key.device}", total=None)
            most_s = budget * (1 - ON_AND_ON_SHARE * len(SUSTAINED))
            left_out = run_jobs(
                calibration,
                jobs,
                judges,
                most_s,
                lambda done, of: bar.update(task, completed=done, total=of),
            )
            calibration.measure_sustained(room, pricing.levels, budget)
    finally:
        system.executor.close()
    result = report(table, calibration.prior) | {"left_out": left_out, "table": str(path)}
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    show(Console(), result)
    notes.print(
        f"{len(table.points)} points in {path}; {left_out} left out for want of time",
        soft_wrap=True,
    )
    return 0


def open_run(
    system: build.System,
    inbox: WallClockEventQueue,
    table: Calibration,
    prior: Roofline,
    path: Path,
) -> CalibrationRun:
    limits = system.limits
    probe = StepProbe(
        system.executor,
        inbox,
        limits.pages,
        limits.page_tokens,
        limits.units,
        limits.layers,
        system.engine.policy.lanes[0].depth,
        system.spec.vocab,
    )
    return CalibrationRun(probe, table, prior, lambda table: calibration_store.save(table, path))


def max_measurable_tokens(
    calibration: CalibrationRun, room: DeviceCapacity, budget_s: float
) -> int:
    """Prompt tokens that can be measured on the fewest units within a point's share of the time."""
    layers, units = calibration.probe.layers, calibration.probe.units
    lengths = [n for n in sorted(ROWS) if n <= room.rows]
    fitting = [
        n
        for n in lengths
        if 8 * calibration.prior.seconds(BatchShape.prefill(n, 0, layers), units)
        <= MAX_JOB_SHARE * budget_s
    ]
    return max(fitting, default=lengths[0])
