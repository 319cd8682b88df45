"""From a policy's wish to a pass.

Owns: how picked tokens become segments, the sums that they cost, and which segment has which of what is sampled. Promises: a pass
names only requests that have pages for all its tokens. Must not: choose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

from counterpoint.core.limits import EngineLimits
from counterpoint.core.request import DECODE, Request
from counterpoint.core.state import Pass
from counterpoint.interfaces import BatchPlan
from counterpoint.types import BatchShape, Segment

T = TypeVar("T")


def make_pass(
    plan: BatchPlan,
    new_id: Callable[[], int],
    lane: int,
    limits: EngineLimits,
    reserve_pages: Callable[[Request, int], bool],
) -> Pass | None:
    """A pass on `lane` of what `fill` picks, as far as pages allow: `cover` makes a request's block table long enough for so
    many tokens, if it can. None if nothing is left."""
    requests: list[Request] = []
    segments: list[Segment] = []
    prefill_tokens = squares = reused = prefills = context = samples = 0
    size = limits.page_tokens
    for request, tokens in plan.items:
        if request.preempt_pending or request.slot < 0:  # preempted to make room for one before it
            continue
        start, pages = request.scheduled_tokens, request.pages
        end = start + tokens
        if end > len(pages) * size and not reserve_pages(request, end):
            continue
        fresh = ()
        if request.pages_sent < len(pages):
            fresh = tuple(pages[request.pages_sent :])
            request.pages_sent = len(pages)
        if request.phase is DECODE:
            segments.append(Segment(request.slot, start, tokens, True, fresh))
            context += end
        else:
            sample = end >= request.prefill_target
            segments.append(Segment(request.slot, start, tokens, sample, fresh))
            prefill_tokens += tokens
            squares += tokens * tokens
            reused += tokens * start
            prefills += 1
            samples += sample
        requests.append(request)
        request.scheduled_tokens = end
        request.open_passes += 1
        request.lane = lane
    if not segments:
        return None
    layers, batch = limits.layers, len(requests) - prefills
    work = BatchShape(
        prefill_tokens,
        squares,
        reused,
        prefills,
        batch,
        context,
        batch + samples,
        0,
        layers,
        layers,
    )
    return Pass(new_id(), lane, requests, tuple(segments), work)


def align_with_segments(
    sampled: tuple[T, ...], segments: tuple[Segment, ...]
) -> Iterable[T | None]:
    """What each segment has of `sampled`, which holds one for each with `sample`, or none at all."""
    if len(sampled) == len(segments):
        return sampled
    if not sampled:
        return itertools.repeat(None, len(segments))
    left = iter(sampled)
    return [next(left) if segment.sample else None for segment in segments]
