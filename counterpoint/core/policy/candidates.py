"""Candidates: the ways to run a prefill backlog beside running decodes, each with its price.

    fused(chunk)   decodes and a piece of a prompt in one pass on the whole device, which reads the
                   weights once for both. `chunk` counts the rows of both, so that matrix products
                   fill whole tiles
    split(units)   decodes on `units` units, whole prompts on the rest, at the same time

This module prices and does not choose. It caches prices until corrections move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy.online_cost import OnlineCostModel
from counterpoint.core.request import Request
from counterpoint.types import BatchShape

CHUNKS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
MAX_CACHED = 4096
GRID_STEPS = 10.5  # per factor of e: sizes are rounded to about 10 %


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """`chunk` rows in a fused step, decodes included (0: a split); `units` of the decode lane.

    `step_s`: expected time from one decode step to the next. `guarded_step_s`: what most of them
    stay under. `decode_slowdown`: share of their time that decodes lose to prefill. `backlog_s`:
    until all of the backlog is done. `mean_ttft_s`: until its mean first token. `prefill_slowdown`:
    `backlog_s` over the time of prefill alone on the whole device.
    """

    chunk: int
    units: int
    step_s: float
    guarded_step_s: float
    decode_slowdown: float
    backlog_s: float
    mean_ttft_s: float
    prefill_slowdown: float


class PrefillBacklog(NamedTuple):
    """`tokens` of `prompts` prompts. With n tokens after r reused ones in each: `squares` = sum
    n*n, `reused_products` = sum n*r."""

    tokens: int
    squares: int
    reused_products: int
    prompts: int

    def batch_shape(self, layers: int) -> BatchShape:
        return BatchShape(
            self.tokens,
            self.squares,
            self.reused_products,
            self.prompts,
            samples=self.prompts,
            last_layer=layers,
            layers=layers,
        )

    def chunk_shape(self, chunk: int, batch: int, context: int, layers: int) -> BatchShape:
        """A chunk of `chunk` tokens from the backlog, in one pass with the decodes.

        Positions before it in the same prompt count as reused: on average half of each prompt.
        """
        tokens = self.tokens
        chunk = min(chunk, tokens)
        inside = max(0.0, (self.squares / tokens - chunk) / 2)  # before it in its own prompt
        before = self.reused_products / tokens + inside
        piece = BatchShape(
            prefill_tokens=chunk,
            prefill_squares=chunk * chunk,
            prefill_reused=int(chunk * before),
            prefill_requests=1,
            samples=1,
            last_layer=layers,
            layers=layers,
        )
        return piece + BatchShape.decode(batch, context, layers)


def make_backlog(items: Sequence[tuple[Request, int]]) -> PrefillBacklog:
    """The backlog of (request, tokens to compute) pairs."""
    tokens = sum([n for _, n in items])
    squares = sum([n * n for _, n in items])
    products = sum([n * (r.prefill_target - n) for r, n in items])
    return PrefillBacklog(tokens, squares, products, len(items))


class CandidatePricer:
    """Prices every candidate on `device`. `max_pass_tokens`: prompt tokens in one pass."""

    def __init__(
        self,
        cost_model: OnlineCostModel,
        device: DeviceShape,
        max_pass_tokens: int,
    ) -> None:
        self.cost_model = cost_model
        self.units = device.units
        self.layers = device.layers
        self.levels = device.levels
        self.max_pass_tokens = max_pass_tokens
        self._cache: dict[tuple[int, ...], list[Candidate]] = {}
        self._version = 0

    def candidates(self, backlog: PrefillBacklog, batch: int, context: int) -> list[Candidate]:
        """All candidates for `backlog` beside `batch` decodes whose contexts sum to `context`."""
        if self._version != self.cost_model.version or len(self._cache) > MAX_CACHED:
            self._cache.clear()
            self._version = self.cost_model.version
        key = (*map(grid_index, backlog), grid_index(batch), grid_index(context))
        found = self._cache.get(key)
        if found is None:
            # The rounded sizes are priced, so that the estimator sees the same steps again.
            tokens, squares, products, prompts, batch, context = map(grid_value, key)
            found = self._cache[key] = self._price(
                PrefillBacklog(tokens, squares, products, prompts), batch, context
            )
        return found

    def decode_s(self, batch: int, context: int, units: int) -> float:
        """Guarded time of a decode step alone."""
        return self.cost_model.expected_and_guarded_s(self._decode(batch, context), units)[1]

    def _decode(self, batch: int, context: int) -> BatchShape:
        return BatchShape.decode(batch, context, self.layers)

    def _price(self, backlog: PrefillBacklog, batch: int, context: int) -> list[Candidate]:
        model, units = self.cost_model, self.units
        decode, prefill = self._decode(batch, context), backlog.batch_shape(self.layers)
        decode_s, prefill_s = model.seconds(decode, units), model.seconds(prefill, units)
        found = []
        for chunk in CHUNKS:
            taken = min(chunk - batch, backlog.tokens, self.max_pass_tokens)
            if taken <= 0:
                continue
            step_s, guarded_s = model.expected_and_guarded_s(
                backlog.chunk_shape(taken, batch, context, self.layers), units
            )
            backlog_s = mean_ttft_s = backlog.tokens / taken * step_s
            if taken != backlog.tokens:
                mean_ttft_s = backlog_s * (backlog.prompts + 1) / (2 * backlog.prompts)
            found.append(
                Candidate(
                    chunk,
                    units,
                    step_s,
                    guarded_s,
                    decode_slowdown=1 - decode_s / step_s,
                    backlog_s=backlog_s,
                    mean_ttft_s=mean_ttft_s,
                    prefill_slowdown=backlog_s / prefill_s,
                )
            )
            if taken == backlog.tokens:
                break
        for level in self.levels:
            rest = units - level
            step_s, guarded_s = model.expected_and_guarded_s(decode, level, (prefill, rest))
            backlog_s = model.seconds(prefill, rest, (decode, level))
            found.append(
                Candidate(
                    0,
                    level,
                    step_s,
                    guarded_s,
                    decode_slowdown=1 - decode_s / step_s,
                    backlog_s=backlog_s,
                    mean_ttft_s=backlog_s,
                    prefill_slowdown=backlog_s / prefill_s,
                )
            )
        return found


def grid_index(value: int) -> int:
    """Index of the nearest value of a logarithmic grid, whose steps are 10 %; -1 for 0."""
    return round(GRID_STEPS * math.log(value)) if value > 0 else -1


def grid_value(step: int) -> int:
    return max(1, round(math.exp(step / GRID_STEPS))) if step >= 0 else 0
