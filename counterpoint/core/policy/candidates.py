"""Options: the ways to run a prefill backlog beside running decodes, each with its price.

Owns: the list of what can be done at an edge and what it would give. Promises: no clock; prices are remembered until corrections
move. Must not: choose.

    fused(chunk)   decodes and a piece of a prompt in one pass on the whole device: weights are read once for both. A chunk counts
                   the rows of both, so that its products fill whole tiles
    split(units)   decodes on `units` units, whole prompts on the rest, side by side
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy.online_cost import OnlineCostModel
from counterpoint.types import BatchShape

CHUNKS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
MAX_CACHED = 4096
GRID = 10.5  # steps of the grid per factor of e: sizes are priced to about 10 %


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """`chunk` tokens in a step, decodes and prompt pieces together (0: a split), or `units` for decode beside prefill on the rest.
    `step_s`: from one decode step to the next, expected; `period_s`: what most stay under. `lag`: share of their time that decodes
    lose by the prefill. `whole_s`: till all of the backlog is done; `first_s`: till the mean of its first tokens. `stretch`:
    `whole_s` as a multiple of what prefill alone on the whole device would take."""

    chunk: int
    units: int
    step_s: float
    guarded_step_s: float
    decode_slowdown: float
    backlog_s: float
    mean_ttft_s: float
    prefill_slowdown: float


class PrefillBacklog(NamedTuple):
    """Prefill work: `tokens` in all over `prompts`; `squares` = sum n*n and `products` = sum n*r, of n tokens after r."""

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
        """A chunk out of the middle of the backlog, with the decodes in the same pass. Positions before it in the same prompts
        count as reused: on average half of each prompt."""
        tokens = self.tokens
        chunk = min(chunk, tokens)
        inside = max(
            0.0, (self.squares / tokens - chunk) / 2
        )  # tokens of its own prompt before the chunk
        before = self.reused_products / tokens + inside
        return BatchShape(
            chunk,
            chunk * chunk,
            int(chunk * before),
            1,
            batch,
            context,
            batch + 1,
            0,
            layers,
            layers,
        )


class CandidatePricer:
    """Of every option on a device of `units` units. `levels`: decode units of the splits there are. `most`: tokens in one pass."""

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
        """Every option for `backlog` beside `batch` decodes whose contexts sum to `context`."""
        if self._version != self.cost_model.version or len(self._cache) > MAX_CACHED:
            self._cache.clear()
            self._version = self.cost_model.version
        key = (*map(grid_index, backlog), grid_index(batch), grid_index(context))
        found = self._cache.get(key)
        if found is None:
            # On the grid too is what is priced, so that the estimator meets the same steps again.
            tokens, squares, products, prompts, batch, context = map(grid_value, key)
            found = self._cache[key] = self._price(
                PrefillBacklog(tokens, squares, products, prompts), batch, context
            )
        return found

    def decode_s(self, batch: int, context: int, units: int) -> float:
        """Guarded time of a decode step alone."""
        return self.cost_model.expected_and_guarded_s(self._decode(batch, context), units)[1]

    def _decode(self, batch: int, context: int) -> BatchShape:
        return BatchShape(
            decode_batch=batch,
            decode_context=context,
            samples=batch,
            last_layer=self.layers,
            layers=self.layers,
        )

    def _price(self, backlog: PrefillBacklog, batch: int, context: int) -> list[Candidate]:
        belief, units = self.cost_model, self.units
        decode, prefill = self._decode(batch, context), backlog.batch_shape(self.layers)
        decode_s, prefill_s = belief.seconds(decode, units), belief.seconds(prefill, units)
        found = []
        for chunk in CHUNKS:
            taken = min(chunk - batch, backlog.tokens, self.max_pass_tokens)
            if taken <= 0:
                continue
            step_s, guarded_s = belief.expected_and_guarded_s(
                backlog.chunk_shape(taken, batch, context, self.layers), units
            )
            whole_s = backlog.tokens / taken * step_s
            first_s = (
                whole_s
                if taken == backlog.tokens
                else whole_s * (backlog.prompts + 1) / (2 * backlog.prompts)
            )
            found.append(
                Candidate(
                    chunk,
                    units,
                    step_s,
                    guarded_s,
                    1 - decode_s / step_s,
                    whole_s,
                    first_s,
                    whole_s / prefill_s,
                )
            )
            if taken == backlog.tokens:
                break
        for level in self.levels:
            rest = units - level
            step_s, guarded_s = belief.expected_and_guarded_s(decode, level, (prefill, rest))
            whole_s = belief.seconds(prefill, rest, (decode, level))
            found.append(
                Candidate(
                    0,
                    level,
                    step_s,
                    guarded_s,
                    1 - decode_s / step_s,
                    whole_s,
                    whole_s,
                    whole_s / prefill_s,
                )
            )
        return found


def grid_index(value: int) -> int:
    """The nearest step of the grid, on which neighbours are 10 % apart; -1 for 0."""
    return round(GRID * math.log(value)) if value > 0 else -1


def grid_value(step: int) -> int:
    return max(1, round(math.exp(step / GRID))) if step >= 0 else 0
