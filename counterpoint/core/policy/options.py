"""Options: the ways to run a prefill backlog beside running decodes, each with its price.

Owns: the list of what can be done at an edge and what it would give. Promises: no clock, no state. Must not: choose.

    fused(chunk)   decodes and a piece of a prompt in one pass on the whole device: weights are read once for both
    split(units)   decodes on `units` units, whole prompts on the rest, side by side
"""

from __future__ import annotations

from typing import NamedTuple

from counterpoint.core.policy.belief import Belief
from counterpoint.types import Work

CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Option(NamedTuple):
    """`chunk` tokens fused with every decode step (0: a split), or `units` for decode beside prefill on the rest. `period_s`:
    guarded time from one decode step to the next. `rate`: prefill tokens per second. `gain`: work done per second, as a multiple
    of what taking turns on the whole device would do (the multiplexing gain)."""

    chunk: int
    units: int
    period_s: float
    rate: float
    gain: float


class Backlog(NamedTuple):
    """Prefill work: `tokens` in all, of which the first prompt has `first` left after `reused`; `squares` = sum n*n and `products`
    = sum n*r over the prompts."""

    tokens: int
    squares: int
    products: int
    prompts: int

    def work(self, layers: int) -> Work:
        return Work(self.tokens, self.squares, self.products, self.prompts, samples=self.prompts, last_layer=layers, layers=layers)

    def piece(self, chunk: int, batch: int, context: int, layers: int) -> Work:
        """A chunk out of the middle of the backlog, with the decodes in the same pass. Positions before it in the same prompts
        count as reused: on average half of each prompt."""
        chunk = min(chunk, self.tokens)
        inside = max(0.0, (self.squares / self.tokens - chunk) / 2)  # tokens of its own prompt before the chunk
        before = self.products / self.tokens + inside
        return Work(chunk, chunk * chunk, int(chunk * before), 1, batch, context, batch + 1, 0, layers, layers)


def options(
    belief: Belief, backlog: Backlog, batch: int, context: int, units: int, layers: int, levels: tuple[int, ...], most: int
) -> list[Option]:
    """Every option for `backlog` beside `batch` decodes whose contexts sum to `context`. `levels`: decode units of the splits."""
    decode = Work(decode_batch=batch, decode_context=context, samples=batch, last_layer=layers, layers=layers)
    prefill = backlog.work(layers)
    decode_s, prefill_s = belief.seconds(decode, units), belief.seconds(prefill, units)
    found = []
    for chunk in CHUNKS:
        taken = min(chunk, backlog.tokens, most)
        mixed = backlog.piece(taken, batch, context, layers)
        alone = backlog.piece(taken, 0, 0, layers)
        step_s = belief.seconds(mixed, units)
        # What a chunk is worth is its share of the backlog done whole: re-reading its own prompt is no gain.
        worth = taken / backlog.tokens * prefill_s if taken < backlog.tokens else belief.seconds(alone, units)
        found.append(Option(taken, units, belief.guarded(mixed, units), taken / step_s, (worth + decode_s) / step_s))
        if taken < chunk:
            break
    for level in levels:
        rest = units - level
        period_s = belief.guarded(decode, level, (prefill, rest))
        step_s = belief.seconds(decode, level, (prefill, rest))
        whole_s = belief.seconds(prefill, rest, (decode, level))
        found.append(Option(0, level, period_s, backlog.tokens / whole_s, decode_s / step_s + prefill_s / whole_s))
    return found
