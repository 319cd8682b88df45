"""What becomes of the requests of a pool, as their clients are told it.

Owns: what is remembered of a request until it is over, and how news of it become one stream. Promises: pure.
Must not: know workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from counterpoint.core.life import RequestLifetime
from counterpoint.disagg.dispatch import DeliverTokens, RequestFinished
from counterpoint.disagg.messages import SampledToken
from counterpoint.disagg.pool_frontend import ToClient, ToWorker
from counterpoint.serve.worker.streams import OutputQueue
from counterpoint.types import AddRequest, OutputDelta


@dataclass(slots=True, eq=False, kw_only=True)
class ClientRequest(RequestLifetime):
    """A request and where its client is told of it. `picked_s`: a worker was chosen for it."""

    output_queue: OutputQueue
    routed_s: float = 0.0


def group_siblings(arrives: Sequence[AddRequest], least_tokens: int) -> list[list[AddRequest]]:
    """Requests in groups of one prompt, of which one is prefilled and the others fork from it; short prompts stay apart, and those
    that are to be told of themselves."""
    groups: dict[object, list[AddRequest]] = {}
    for arrive in arrives:
        apart = len(arrive.prompt) < least_tokens or arrive.sampling.prompt_logprobs is not None
        groups.setdefault(arrive.id if apart else (arrive.prompt, arrive.salt), []).append(arrive)
    return list(groups.values())


def pair_finishes(
    items: list[ToWorker | ToClient],
) -> Iterator[tuple[ToWorker | ToClient, RequestFinished | None]]:
    """Each item; the sound end of a request that follows its last tokens comes together with them."""
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
