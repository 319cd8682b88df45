"""What `calibrate` measures: the steps to fit, in which order, and the held-out steps.

A run that ends early still has something of everything: first a few steps of each kind alone on
each number of units, then prefill beside decode on each split, then the rest of both interleaved.
Held-out steps are drawn at random and never fitted. Must not: run a step.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

from counterpoint.cost_model.calibration import (
    CO_RUNNING_KIND,
    pad_rows,
)
from counterpoint.device.step_probe import PROMPT_SLOTS, ProbePrompt
from counterpoint.types import BatchShape

ROWS = (
    *(512, 2048, 8192, 128, 1024, 4096, 256, 64, 6144, 3072, 1536, 768, 384, 576, 640, 896, 1152),
    *(1280, 320, 192, 16),
)
BATCHES = (  # (batch size, mean context)
    *((1, 1024), (32, 1024), (128, 1024), (32, 8192), (8, 1024), (64, 1024), (16, 1024)),
    *((256, 512), (96, 4096), (4, 4096), (192, 512), (2, 1024), (96, 1024), (8, 8192), (48, 512)),
    *((64, 8192), (80, 1024), (160, 1024), (24, 1024), (224, 512), (112, 1024)),
)
NUM_FIRST = 3  # entries of these lists that are measured first
CONTEXT_SIGMA = 0.6  # of a batch's log contexts, as in a chat load
CACHED_PROMPTS = (
    ProbePrompt(1024, 4096),
    ProbePrompt(256, 4096),
    ProbePrompt(2048, 12288),
    ProbePrompt(512, 16384),
)
MULTI_PROMPTS = ((4, 256), (8, 1024), (8, 64))  # (prompts in a pass, tokens of each)
CHUNKS = (  # (tokens, reused tokens) of a prompt fused with a decode batch
    *((512, 0), (2048, 4096), (128, 1024), (1024, 2048), (4096, 0), (256, 4096), (7936, 0)),
    *((512, 8192), (384, 0), (768, 0), (1536, 0), (64, 0), (960, 0), (1984, 0), (480, 1024)),
    (16, 512),
)
FUSED_BATCHES = ((32, 1024), (128, 2048), (8, 2048), (240, 512), (64, 8192))
PAIRS = (  # a prefill beside a decode batch
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
SUSTAINED = (  # (kind, prefill, decode batch) to run without a pause
    ("mixed", ProbePrompt(960, 1024), (64, 1024)),
    ("prefill", ProbePrompt(2048), None),
    (CO_RUNNING_KIND, ProbePrompt(2048), (64, 1024)),
)
HELD_OUT_SOLO, HELD_OUT_PAIRS = 80, 60


class CalibrationJob(NamedTuple):
    """One measurement. `contexts`: of the decode batch. `units`: of the decode where both run; a
    fused pass has all units."""

    prompts: tuple[ProbePrompt, ...]
    contexts: tuple[int, ...]
    units: int
    fused: bool = False
    held_out: bool = False

    def shapes(self, layers: int) -> tuple[BatchShape | None, BatchShape | None]:
        """(prefill, decode); a fused pass is the first."""
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
        if fused and decode is not None:
            return prefill + decode, None
        return prefill, decode


class DeviceCapacity(NamedTuple):
    """The most that steps may have: `context` tokens of a request, `tokens` in the pool, `batch`
    decodes, `rows` of a pass."""

    context: int
    tokens: int
    batch: int
    rows: int

    def fits(self, job: CalibrationJob) -> bool:
        prompt_tokens = [sum(prompt) for prompt in job.prompts]
        requests = len(job.contexts) + PROMPT_SLOTS
        rows = sum(p.tokens for p in job.prompts) + (len(job.contexts) if job.fused else 0)
        return (
            max([*job.contexts, *prompt_tokens]) + 2 <= self.context
            and sum(job.contexts) + sum(prompt_tokens) + 32 * requests <= self.tokens
            and len(job.contexts) <= self.batch
            and rows <= self.rows
        )


def uneven_contexts(batch: int, mean: int) -> tuple[int, ...]:
    """`batch` lognormal contexts of that mean, shuffled. A kernel that divides them unevenly among
    units shows it."""
    spread = [
        math.exp(CONTEXT_SIGMA * NormalDist().inv_cdf((n + 0.5) / batch)) for n in range(batch)
    ]
    scale = mean * batch / sum(spread)
    random.Random(batch).shuffle(spread)
    return tuple(max(16, round(scale * one)) for one in spread)


def rows_for(buckets: tuple[int, ...], max_rows: int) -> tuple[int, ...]:
    """Rows of the passes to measure, padded to `buckets` where there are any."""
    every = (*ROWS, *buckets[::2], *buckets[1::2])
    return tuple(dict.fromkeys(min(pad_rows(rows, buckets), max_rows) for rows in every))


def interleave(
    some: Sequence[CalibrationJob], others: Sequence[CalibrationJob], block: int
) -> list[CalibrationJob]:
    """Both lists in their order, alternating by blocks of `block`, so that they end together."""
    placed = [
        ((number // block + 0.5) * block / len(jobs), job)
        for jobs in (some, others)
        for number, job in enumerate(jobs)
    ]
    return [job for _, job in sorted(placed, key=lambda place: place[0])]


def plan_jobs(
    units: int, levels: Sequence[int], capacity: DeviceCapacity, buckets: tuple[int, ...] = ()
) -> list[CalibrationJob]:
    """All jobs to fit, the most informative first. `levels`: decode units of each split;
    `buckets`: padded rows of passes with prompt tokens."""
    rows = rows_for(buckets, capacity.rows)
    prefill_units = [units, *(units - level for level in levels)]
    decode_units = [units, *levels]

    def contexts(batch: int, mean: int) -> tuple[int, ...]:
        return uneven_contexts(min(batch, capacity.batch), mean)

    def fused(chunk: tuple[int, int], batch: tuple[int, int]) -> CalibrationJob:
        return CalibrationJob((ProbePrompt(*chunk),), contexts(*batch), units, fused=True)

    def alone(part: slice) -> Iterator[CalibrationJob]:
        for tokens in rows[part]:
            yield from (CalibrationJob((ProbePrompt(tokens),), (), n) for n in prefill_units)
        for batch in BATCHES[part]:
            yield from (CalibrationJob((), contexts(*batch), n) for n in decode_units)
        for number, chunk in enumerate(CHUNKS[part]):
            yield fused(chunk, FUSED_BATCHES[number % len(FUSED_BATCHES)])

    def pairs(part: slice) -> Iterator[CalibrationJob]:
        for prompt, batch in PAIRS[part]:
            yield from (CalibrationJob((prompt,), contexts(*batch), level) for level in levels)

    first, rest = slice(None, NUM_FIRST), slice(NUM_FIRST, None)
    solo = [
        *alone(rest),
        *(fused(chunk, batch) for batch in FUSED_BATCHES for chunk in CHUNKS[: 2 * NUM_FIRST]),
        *(CalibrationJob((prompt,), (), n) for prompt in CACHED_PROMPTS for n in prefill_units),
        *(
            CalibrationJob((ProbePrompt(tokens),) * count, (), n)
            for count, tokens in MULTI_PROMPTS
            for n in prefill_units
        ),
    ]
    jobs = [*alone(first), *pairs(first), *interleave(solo, [*pairs(rest)], len(levels))]
    return [job for job in dict.fromkeys(jobs) if capacity.fits(job)]


def held_out_jobs(
    units: int,
    levels: Sequence[int],
    capacity: DeviceCapacity,
    max_prompt_tokens: int,
    seed: int = 1,
) -> list[CalibrationJob]:
    """Random steps: log-uniform lengths and batches over the whole range, and different contexts
    in a batch."""
    rng = random.Random(seed)

    def between(low: float, high: float) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))

    def prompts() -> tuple[ProbePrompt, ...]:
        count = rng.choice((1, 1, 1, 2, 4))
        reused = between(64, capacity.context / 2) if rng.random() < 0.4 else 0
        return tuple(
            ProbePrompt(max(1, between(64, max_prompt_tokens) // count), reused)
            for _ in range(count)
        )

    def contexts() -> tuple[int, ...]:
        batch = between(1, capacity.batch)
        mean = between(128, min(capacity.context / 2, capacity.tokens / batch / 2))
        return tuple(
            min(capacity.context - 2, max(16, round(mean * rng.lognormvariate(0, 0.6))))
            for _ in range(batch)
        )

    kinds: list[Callable[[], CalibrationJob]] = [
        lambda: CalibrationJob(prompts(), (), units - rng.choice((0, *levels)), held_out=True),
        lambda: CalibrationJob((), contexts(), rng.choice((units, *levels)), held_out=True),
        lambda: CalibrationJob(prompts(), contexts(), units, fused=True, held_out=True),
    ]
    solo = [kinds[number % len(kinds)]() for number in range(2 * HELD_OUT_SOLO)]
    both = [
        CalibrationJob(prompts(), contexts(), rng.choice(levels), held_out=True)
        for _ in range(2 * HELD_OUT_PAIRS)
    ]
    solo, both = ([job for job in jobs if capacity.fits(job)] for jobs in (solo, both))
    mixed = [job for jobs in zip(solo[::2], both, solo[1::2], strict=False) for job in jobs]
    return mixed[: HELD_OUT_SOLO + HELD_OUT_PAIRS]
