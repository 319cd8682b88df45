"""What becomes of the requests of a pool, as their clients are told it.

Owns: what is remembered of a request until it is over, and how news of it become one stream. Promises: pure.
Must not: know workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from counterpoint.cluster.dispatch import Deliver, Finished
from counterpoint.cluster.front import ToClient, ToWorker
from counterpoint.cluster.messages import Sampled
from counterpoint.core.life import Life
from counterpoint.serve.client import Mail
from counterpoint.types import Arrive, Delta


@dataclass(slots=True, eq=False, kw_only=True)
class Posted(Life):
    """A request and where its client is told of it. `picked_s`: a worker was chosen for it."""

    mail: Mail
    picked_s: float = 0.0


def alike(arrives: Sequence[Arrive], least_tokens: int) -> list[list[Arrive]]:
    """Requests in groups of one prompt, of which one is prefilled and the others fork from it; short prompts stay apart, and those
    that are to be told of themselves."""
    groups: dict[object, list[Arrive]] = {}
    for arrive in arrives:
        apart = len(arrive.prompt) < least_tokens or arrive.sampling.prompt_logprobs is not None
        groups.setdefault(arrive.id if apart else (arrive.prompt, arrive.salt), []).append(arrive)
    return list(groups.values())


def with_ends(items: list[ToWorker | ToClient]) -> Iterator[tuple[ToWorker | ToClient, Finished | None]]:
    """Each item; the sound end of a request that follows its last tokens comes together with them."""
    skip = False
    for item, following in itertools.zip_longest(items, items[1:]):
        if skip:
            skip = False
            continue
        end = None
        if isinstance(item, ToClient) and isinstance(item.news, Deliver) and isinstance(following, ToClient):
            last = following.news if following.id == item.id else None
            end = last if isinstance(last, Finished) and not last.lost else None
            skip = end is not None
        yield item, end


def delta_of(id: str, tokens: Sequence[Sampled], end: Finished | None, cached_tokens: int = 0) -> Delta:
    logprobs = tuple(sampled.logprobs for sampled in tokens)
    return Delta(
        id,
        tuple(sampled.token for sampled in tokens),
        logprobs=logprobs if any(one is not None for one in logprobs) else (),
        finish=end.finish if end is not None else None,
        stopped_by=end.stopped_by if end is not None else None,
        cached_tokens=cached_tokens,
        error=end.error if end is not None else "",
    )
