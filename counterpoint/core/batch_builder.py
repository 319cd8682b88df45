"""From a policy's plan to a pass: segments, their sums, and which sampled token belongs to which.

A pass names only requests that have pages for all its tokens.
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
    """A pass on `lane` of the items of `plan` that get pages; None if none does.

    `reserve_pages(request, tokens)` extends the request's block table to `tokens` tokens, if it
    can. It may preempt other requests of the plan.
    """
    requests: list[Request] = []
    segments: list[Segment] = []
    prefill_tokens = squares = reused = prefills = context = samples = 0
    size = limits.page_tokens
    for request, tokens in plan.items:
        if request.preempt_pending or request.slot < 0:  # preempted for one before it
            continue
        start, pages = request.scheduled_tokens, request.pages
        end = start + tokens
        if end > len(pages) * size and not reserve_pages(request, end):
            continue
        new_pages = ()
        if request.pages_sent < len(pages):
            new_pages = tuple(pages[request.pages_sent :])
            request.pages_sent = len(pages)
        if request.phase is DECODE:
            segments.append(Segment(request.slot, start, tokens, True, new_pages))
            context += end
        else:
            sample = end >= request.prefill_target
            segments.append(Segment(request.slot, start, tokens, sample, new_pages))
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
    decodes = len(requests) - prefills
    work = BatchShape(
        prefill_tokens=prefill_tokens,
        prefill_squares=squares,
        prefill_reused=reused,
        prefill_requests=prefills,
        decode_batch=decodes,
        decode_context=context,
        samples=decodes + samples,
        last_layer=limits.layers,
        layers=limits.layers,
    )
    return Pass(new_id(), lane, requests, tuple(segments), work)


def align_with_segments(
    sampled: tuple[T, ...], segments: tuple[Segment, ...]
) -> Iterable[T | None]:
    """The entry of `sampled` that belongs to each segment.

    `sampled` has one entry per segment with `sample`, or none at all.
    """
    if len(sampled) == len(segments):
        return sampled
    if not sampled:
        return itertools.repeat(None, len(segments))
    entries = iter(sampled)
    return [next(entries) if segment.sample else None for segment in segments]
