"""The requests of a pool, as their clients see them.

Owns: the record of a request until it ends, and how updates become one stream. Promises: pure.
Must not: know workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from counterpoint.core.request import RequestLifetime
from counterpoint.disagg.dispatch import DeliverTokens, RequestFinished
from counterpoint.disagg.messages import SampledToken
from counterpoint.disagg.pool_frontend import ToClient, ToWorker
from counterpoint.serve.worker.streams import OutputQueue
from counterpoint.types import AddRequest, OutputDelta, RequestTiming


@dataclass(slots=True, eq=False, kw_only=True)
class ClientRequest(RequestLifetime):
    """A request and its client's queue. `routed_s`: when a worker was chosen for it."""

    output_queue: OutputQueue
    routed_s: float = 0.0

    def add_engine_timing(self, timing: RequestTiming) -> None:
        """Of an engine's part of it, by that engine's clock: only differences hold here."""
        self.preemptions += timing.preemptions
        if self.admitted_s is None and timing.admitted_s is not None:
            self.admitted_s = self.arrival_s + timing.admitted_s - timing.arrival_s


def group_siblings(arrives: Sequence[AddRequest], min_tokens: int) -> list[list[AddRequest]]:
    """Groups of one prompt: the first is prefilled, the others fork from its KV. Prompts shorter
    than `min_tokens`, and those whose log-probabilities are wanted, are not grouped."""
    groups: dict[object, list[AddRequest]] = {}
    for arrive in arrives:
        alone = len(arrive.prompt) < min_tokens or arrive.sampling.prompt_logprobs is not None
        groups.setdefault(arrive.id if alone else (arrive.prompt, arrive.salt), []).append(arrive)
    return list(groups.values())


def pair_finishes(
    items: list[ToWorker | ToClient],
) -> Iterator[tuple[ToWorker | ToClient, RequestFinished | None]]:
    """Each item, with the end of its request if that follows at once; an end by a lost worker stays
    an item of its own."""
    skip = False
    for item, following in itertools.zip_longest(items, items[1:]):
        if skip:
            skip = False
            continue
        end = None
        if (
            isinstance(item, ToClient)
            and isinstance(item.update, DeliverTokens)
            and isinstance(following, ToClient)
        ):
            last = following.update if following.id == item.id else None
            end = last if isinstance(last, RequestFinished) and not last.worker_lost else None
            skip = end is not None
        yield item, end


def make_delta(
    id: str, tokens: Sequence[SampledToken], end: RequestFinished | None, cached_tokens: int = 0
) -> OutputDelta:
    logprobs = tuple(sampled.logprobs for sampled in tokens)
    return OutputDelta(
        id,
        tuple(sampled.token for sampled in tokens),
        logprobs=logprobs if any(one is not None for one in logprobs) else (),
        finish_reason=end.finish if end is not None else None,
        stop_reason=end.stop_reason if end is not None else None,
        cached_tokens=cached_tokens,
        error=end.error if end is not None else "",
    )
