"""Small engines on simulated devices."""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.types import BatchShape, InitSlot, Lane, Role, Sampling, Segment, Step


@dataclass
class Constant:
    """Physics in which a step takes `alone_s`, and `slower` times as long beside another."""

    alone_s: float = 1.0
    slower: float = 2.0

    def seconds(
        self, work: BatchShape, units: int, co_running: tuple[BatchShape, int] | None = None
    ) -> float:
        return self.alone_s * (self.slower if co_running else 1.0)


class ByTokens:
    """Physics in which a step takes a second per token, three times as long beside another."""

    def seconds(
        self, work: BatchShape, units: int, co_running: tuple[BatchShape, int] | None = None
    ) -> float:
        return float(work.prefill_tokens + work.decode_batch) * (3.0 if co_running else 1.0)


LANES = (Lane(0, Role.DECODE, 2), Lane(1, Role.PREFILL, 2))


def init_slot(
    slot: int, tokens: int = 8, pages: tuple[int, ...] = (), seed: int = 0, first: int = 0
) -> InitSlot:
    return InitSlot(
        slot, tuple(range(first, first + tokens)), tokens, pages, Sampling(max_tokens=4, seed=seed)
    )


def make_step(
    id: int,
    *segments: Segment,
    lane: int = 0,
    batch: int | None = None,
    layers: tuple[int, int] = (0, 4),
    of: int = 4,
    units: int = 2,
    decodes: int = 0,
) -> Step:
    """A step of prefill segments, but for the last `decodes`."""
    fills = segments[: len(segments) - decodes]
    work = BatchShape(
        sum(s.tokens for s in fills),
        sum(s.tokens**2 for s in fills),
        sum(s.tokens * s.start for s in fills),
        len(fills),
        decodes,
        sum(s.start + 1 for s in segments[len(fills) :]),
        sum(s.sample for s in segments),
        *layers,
        of,
    )
    return Step(id, lane, id if batch is None else batch, *layers, units, segments, work)
