"""The demo's model gives the same greedy tokens under every policy, cold and with prefix hits."""

from __future__ import annotations

import random

import pytest

from counterpoint.bench.replay import replay_engine
from counterpoint.bench.workload import Query
from counterpoint.builder import system_builder
from counterpoint.config import Config
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.spec.model import ModelError
from counterpoint.types import OutputDelta

POLICIES = ["serial", "chunked", "multiplex", "auto"]


def queries() -> list[Query]:
    """32 prompts that begin alike in 8 groups, sent twice: cold, then with their prefixes
    cached."""
    draw = random.Random(0)
    starts = [[draw.randrange(1000, 40000) for _ in range(draw.randrange(5, 90))] for _ in range(8)]
    prompts = [
        (*starts[i % 8], *(draw.randrange(1000, 40000) for _ in range(draw.randrange(1, 60))))
        for i in range(32)
    ]
    return [
        Query(i, 3.0 * (i // 32), len(p), 12, prompt=p) for i, p in enumerate([*prompts, *prompts])
    ]


def tokens(policy: str) -> tuple[dict[str, list[int]], int]:
    inbox = WallClockEventQueue()
    config = Config().replace(policy=policy, device="cpu", chunk_tokens=48, kv_pages=2000)
    try:
        system = system_builder.build_system(config, inbox, lambda _: None)
    except ModelError as error:
        pytest.skip(str(error))
    got: dict[str, list[int]] = {}
    take = system.engine.take_outputs

    def noting():
        outputs = take()
        for output in outputs:
            if isinstance(output, OutputDelta):
                got.setdefault(output.id, []).extend(output.tokens)
        return outputs

    system.engine.take_outputs = noting  # type: ignore[method-assign]
    try:
        outcome = replay_engine(system.engine, inbox, system.executor, queries())
    finally:
        system.executor.close()
    assert outcome.pages_leaked == 0
    return got, sum(record.cached_tokens for record in outcome.records[32:])


def test_the_same_tokens_under_every_policy():
    answers = {policy: tokens(policy) for policy in POLICIES}
    reference, _ = answers["serial"]
    assert len(reference) == 64 and all(len(answer) == 12 for answer in reference.values())
    assert all(reference[f"q{i}"] == reference[f"q{i + 32}"] for i in range(32)), (
        "a prefix hit changed an answer"
    )
    for policy, (answer, cached) in answers.items():
        assert answer == reference, policy
        assert cached > 1000, policy
