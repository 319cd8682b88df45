"""The Stats of several engines as if they were one.

Promises: counters never fall, not even when an engine leaves: its last `without_gauges` stays in
the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from counterpoint.stats import PolicyReport, Stats

GAUGES = ("waiting", "running", "pages_total", "pages_free", "pages_cached", "units_total")
TIMES = ("split_s", "lane_s", "step_s")  # rows whose last column is seconds


def without_gauges(stats: Stats) -> Stats:
    """Only the counters, of an engine that is gone."""
    return msgspec.structs.replace(stats, **dict.fromkeys(GAUGES, 0))


def merge(parts: Sequence[Stats]) -> Stats:
    """Sums, also of pages. Prediction errors of policies and steps of lanes are left out."""
    trees = [msgspec.structs.asdict(part) for part in parts]
    plain = [
        name
        for name, value in trees[0].items()
        if isinstance(value, int | float) and name != "page_tokens"
    ]
    summed: dict[str, Any] = {name: sum(tree[name] for tree in trees) for name in plain}
    times: dict[str, Any] = {name: add_rows(tree[name] for tree in trees) for name in TIMES}
    return Stats(
        **summed,
        **times,
        finished=add_counts(part.finished for part in parts),
        page_tokens=max(part.page_tokens for part in parts),
        policy=PolicyReport(
            decisions=add_counts(part.policy.decisions for part in parts),
            fallbacks=add_counts(part.policy.fallbacks for part in parts),
        ),
    )


def add_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for count in counts:
        found.update(count)
    return dict(found)


def add_rows(tables: Iterable[tuple[tuple[Any, ...], ...]]) -> tuple[Any, ...]:
    found: dict[tuple[Any, ...], float] = {}
    for table in tables:
        for *key, seconds in table:
            found[tuple(key)] = found.get(tuple(key), 0.0) + seconds
    return tuple((*key, seconds) for key, seconds in sorted(found.items()))
