"""Changes to a load: fewer requests, another clock, other lengths.

Each function returns a new load in order of arrival, from time 0 on. Shared prefixes stay shared.
Must not: read files or generate queries.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from counterpoint.bench.workload import Arrivals, Query, arrival_times, offered_rate
from counterpoint.types import Slo

FIRST_WARMUP_NUMBER = 1 << 40  # warm-up queries are numbered from here on, above any load


def scale_to_rate(queries: Sequence[Query], rate: float) -> list[Query]:
    """The same arrivals on a clock scaled so that `rate` requests arrive per second on average."""
    if not rate > 0:
        raise ValueError(f"rate is {rate}: it must be more than 0 requests per second")
    now = offered_rate(queries)
    if now == float("inf"):
        raise ValueError(
            "all requests arrive at once: stretching their clock can't give a rate; give --arrivals"
        )
    return stretch_time(queries, now / rate)


def stretch_time(queries: Sequence[Query], factor: float) -> list[Query]:
    """Multiplies every time by `factor`: 0.1 plays ten times as fast."""
    if not 0 < factor < math.inf:
        raise ValueError(
            f"time scale is {factor}: it must be more than 0 (0.1 plays ten times as fast)"
        )
    return [dataclasses.replace(q, arrival_s=q.arrival_s * factor) for q in queries]


def replace_arrivals(
    queries: Sequence[Query], kind: Arrivals, rate: float, burstiness: float, seed: int
) -> list[Query]:
    """The same requests in the same order at generated times (see `workload.arrival_times`)."""
    times = arrival_times(len(queries), kind, rate, np.random.default_rng(seed), burstiness)
    return [dataclasses.replace(q, arrival_s=float(t)) for q, t in zip(queries, times, strict=True)]


def take_first(queries: Sequence[Query], count: int) -> list[Query]:
    """The first `count` requests, from time 0 on."""
    if count < 1:
        raise ValueError(f"requests is {count}: it must be 1 or more")
    return _start_at_zero(queries[:count])


def skip_first(queries: Sequence[Query], count: int) -> list[Query]:
    """All but the first `count` requests, from time 0 on."""
    if not 0 <= count < len(queries):
        raise ValueError(
            f"skip is {count}: the workload has {len(queries)} requests, so it must be 0 to "
            f"{len(queries) - 1}"
        )
    return _start_at_zero(queries[count:])


def _start_at_zero(queries: Sequence[Query]) -> list[Query]:
    start_s = queries[0].arrival_s if queries else 0.0
    return [dataclasses.replace(q, arrival_s=q.arrival_s - start_s) for q in queries]


# ---------------------------------------------------------------- lengths


def scale_lengths(queries: Sequence[Query], factor: float) -> list[Query]:
    """Prompts and outputs `factor` times as long, at least 1 token.

    A block of a shared prefix becomes a whole number of tokens. Prompts with blocks are scaled by
    the resulting factor, so that they end at the same place among their blocks.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"length scale is {factor}: it must be more than 0")
    if any(q.prompt is not None for q in queries):
        raise ValueError(
            "requests with a given text or given tokens can't be scaled in length; cut them with "
            "--max-prompt-tokens"
        )

    def one(query: Query) -> Query:
        block = max(1, round(query.block_tokens * factor)) if query.prefix_ids else 0
        by = block / query.block_tokens if query.prefix_ids else factor
        return dataclasses.replace(
            query,
            prompt_tokens=max(1, round(query.prompt_tokens * by)),
            output_tokens=max(1, round(query.output_tokens * factor)),
            block_tokens=block,
        )

    return [one(q) for q in queries]


def clip_lengths(
    queries: Sequence[Query], max_prompt_tokens: int | None, max_output_tokens: int | None
) -> list[Query]:
    """Cuts prompts and outputs to the given lengths. Requests with a longer given text are left
    out."""
    for name, most in (
        ("max_prompt_tokens", max_prompt_tokens),
        ("max_output_tokens", max_output_tokens),
    ):
        if most is not None and most < 1:
            raise ValueError(f"{name} is {most}: it must be 1 or more")
    kept = []
    for query in queries:
        length = min(query.prompt_tokens, max_prompt_tokens or query.prompt_tokens)
        if length < query.prompt_tokens and query.prompt is not None and query.ids is None:
            continue
        blocks = query.prefix_ids[: -(-length // query.block_tokens)] if query.prefix_ids else ()
        kept.append(
            dataclasses.replace(
                query,
                prompt_tokens=length,
                output_tokens=min(query.output_tokens, max_output_tokens or query.output_tokens),
                prefix_ids=blocks,
                prompt=query.prompt if query.ids is None else query.ids[:length],
            )
        )
    return _start_at_zero(kept)


# ---------------------------------------------------------------- contents and targets


def drop_texts(queries: Sequence[Query]) -> list[Query]:
    """Replaces given texts by synthetic tokens of their (estimated) length, for a target that takes
    token ids alone."""
    return [
        q if q.prompt is None or q.ids is not None else dataclasses.replace(q, prompt=None)
        for q in queries
    ]


def warmup_queries(queries: Sequence[Query], count: int) -> list[Query]:
    """`count` warm-up queries like the first ones: other tokens, no shared prefix, at most 8 output
    tokens. Given texts and ids stay as they are."""
    return [
        dataclasses.replace(
            q,
            number=FIRST_WARMUP_NUMBER + q.number,
            arrival_s=0.0,
            prefix_ids=(),
            output_tokens=min(q.output_tokens, 8),
        )
        for q in queries[:count]
    ]


def apply_slo(queries: Sequence[Query], slo: Slo) -> list[Query]:
    """Gives each query the targets of `slo` where it has none of its own."""
    return [dataclasses.replace(q, slo=q.slo.with_defaults(slo)) for q in queries]


# ---------------------------------------------------------------- fewer requests


def group_by_prefix(queries: Sequence[Query], max_share: float = 0.01) -> list[int]:
    """A group number per query: the queries of a group share a prefix.

    A group is a largest subtree of the tree of prefix blocks with at most `max_share` of all
    queries. A more common prefix (a system prompt) makes no group. Queries without blocks are
    alone.
    """
    limit = max(1, int(len(queries) * max_share))
    groups: dict[tuple[int, ...] | int, int] = {}
    label = [0] * len(queries)
    pending = [(list(range(len(queries))), 0)]
    while pending:
        part, depth = pending.pop()
        children = collections.defaultdict(list)
        for i in part:
            ids = queries[i].prefix_ids
            # A query without more blocks is a group of its own.
            children[ids[: depth + 1] if len(ids) > depth else -1 - i].append(i)
        for key, members in children.items():
            if len(members) > limit and isinstance(key, tuple):
                pending.append((members, depth + 1))
                continue
            number = groups.setdefault(key, len(groups))
            for i in members:
                label[i] = number
    return label


def thin(queries: Sequence[Query], share: float, seed: int) -> list[Query]:
    """About `share` of the queries, as random whole prefix groups, which keep their cache hits.
    (Random rows would lose them.) Arrival times stay, so the rate falls by `share`."""
    if not 0 < share <= 1:
        raise ValueError(f"thin is {share}: it must be more than 0 and at most 1")
    label = group_by_prefix(queries)
    size = collections.Counter(label)
    wanted, kept, chosen = share * len(queries), 0, set()
    for group in np.random.default_rng(seed).permutation(len(size)).tolist():
        if kept and kept + size[group] / 2 > wanted:
            continue
        chosen.add(group)
        kept += size[group]
    return _start_at_zero([q for q, group in zip(queries, label, strict=True) if group in chosen])
