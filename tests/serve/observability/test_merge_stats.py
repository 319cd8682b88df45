"""Stats of several engines as one."""

from __future__ import annotations

from counterpoint.serve.observability.merge_stats import merge, without_gauges
from counterpoint.stats import Stats


def test_counters_do_not_fall_when_a_worker_goes():
    a = Stats(
        running=1,
        steps=5,
        generated_tokens=7,
        pages_total=10,
        page_tokens=16,
        finished={"stop": 2},
        split_s=((1, 0, 2.0),),
    )
    b = Stats(
        running=2,
        steps=1,
        generated_tokens=3,
        pages_total=10,
        page_tokens=16,
        finished={"stop": 1},
        split_s=((1, 0, 1.0),),
    )
    both, left = merge([a, b]), merge([without_gauges(a), b])
    assert (both.steps, both.generated_tokens, both.finished, both.split_s) == (
        6,
        10,
        {"stop": 3},
        ((1, 0, 3.0),),
    )
    assert (left.steps, left.generated_tokens, left.finished, left.split_s) == (
        6,
        10,
        {"stop": 3},
        ((1, 0, 3.0),),
    )
    assert (both.running, left.running, both.pages_total, left.pages_total) == (3, 2, 20, 10)
