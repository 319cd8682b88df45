"""Warmup creates everything and changes nothing: on a GPU or, without one, in place."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

import cuda_rig
import pytest
import torch
from cuda_rig import HAS_GPU, TINY, CudaParts, make_parts, rig
from cuda_service import EngineService, random_requests

from counterpoint.core.policy import Multiplex
from counterpoint.device.cuda.attention import AttentionPlan
from counterpoint.device.cuda.piecewise_graphs import next_larger
from counterpoint.device.cuda.sampling import SamplingMode
from counterpoint.device.cuda.stream_partitions import StreamPartition
from counterpoint.device.cuda.warmup import eager_sizes, warm_up, warmup_passes
from counterpoint.model.decoder import Decoder
from counterpoint.types import Role, Segment

SIZES = (4, 8, 16)
TOKENS = 200


def all_partitions(parts: CudaParts) -> list[tuple[Role, StreamPartition]]:
    return [
        (role, partition)
        for role in (Role.PREFILL, Role.DECODE)
        for partition in parts.stream_partitions.for_role(role)
    ]


def serve_requests(parts: CudaParts, seed: int = 4) -> dict[str, list[int]]:
    service = EngineService(
        parts,
        Multiplex(
            160,
            parts.units,
            parts.stream_partitions.for_role(Role.DECODE)[-1].units,
            depth=2,
        ),
        overlap=HAS_GPU,
    )
    answers = service.run_requests(random_requests(24, seed=seed))
    service.close()
    return answers


def run_warmup(
    parts: CudaParts,
    partitions: Sequence[tuple[Role, StreamPartition]] | None = None,
    tokens: int = TOKENS,
) -> str:
    return warm_up(
        parts.executor, all_partitions(parts) if partitions is None else partitions, tokens
    )


def test_tokens_are_the_same_after_warmup():
    found = []
    for first in (False, True):
        parts = make_parts(sizes=SIZES)
        if first:
            run_warmup(parts)
        found.append(serve_requests(parts))
    assert found[0] == found[1]


def test_only_the_padding_page_is_written():
    parts = make_parts(sizes=SIZES)
    run_warmup(parts)
    for pool in (*parts.kv.k, *parts.kv.v):
        assert not pool[:-1].any(), "a page that a request may be given"
        assert pool[-1].any()


def test_the_largest_pass_comes_first_and_every_bucket_is_sampled():
    with rig(sizes=SIZES, slots=24) as r:
        found = list(warmup_passes(r.executor, TOKENS))
        rows = [sum(segment.tokens for segment in segments) for segments, _ in found]
        assert rows[0] == max(rows) == TOKENS
        sampled = {
            sum(segment.sample for segment in segments)
            for segments, layers in found
            if layers == TINY.layers
        }
        assert sampled == {1, 2, 4, 8, 16, 24}
        ends = [segment.start + segment.tokens for segments, _ in found for segment in segments]
        assert max(ends) == TINY.max_context_tokens


@pytest.mark.parametrize("slots", [1, 5, 20])
def test_a_bucket_may_exceed_the_number_of_slots(slots: int):
    parts = make_parts(sizes=SIZES, slots=slots)
    run_warmup(parts)
    with rig(sizes=SIZES, slots=slots) as r:
        found = [
            segment.slot
            for segments, _ in warmup_passes(r.executor, TOKENS)
            for segment in segments
        ]
        assert max(found) == slots - 1


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_no_warmup_pass_exceeds_max_tokens(tokens: int):
    with rig(sizes=SIZES) as r:
        assert all(
            sum(segment.tokens for segment in segments) <= tokens
            for segments, _ in warmup_passes(r.executor, tokens)
        )


def test_a_failed_warmup_pass_is_logged_and_the_others_run(caplog: pytest.LogCaptureFixture):
    parts = make_parts(sizes=SIZES)
    start, calls = parts.piecewise_graphs.start_pass, 0

    def failing(inputs):
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("no room for this one")
        return start(inputs)

    parts.piecewise_graphs.start_pass = failing
    with caplog.at_level(logging.WARNING, logger="counterpoint.device.cuda.warmup"):
        note = run_warmup(parts, all_partitions(parts)[:1])
    assert [r.message for r in caplog.records if "warmup" in r.message] == [
        "a warmup pass failed: OutOfMemoryError: no room for this one"
    ]
    assert note.startswith(f"{calls} warmup passes")


@pytest.mark.skipif(HAS_GPU, reason="in place: products are counted where ops are the reference's")
def test_serving_uses_no_row_count_that_warmup_did_not_run(monkeypatch: pytest.MonkeyPatch):
    seen: set[tuple[int, tuple[int, ...]]] = set()
    plain = cuda_rig.in_place_ops()

    def linear(x, packed):
        seen.add((x.shape[0], tuple(packed[0].shape)))
        return plain.linear(x, packed)

    monkeypatch.setattr(cuda_rig, "in_place_ops", lambda: dataclasses.replace(plain, linear=linear))
    new = {}
    for warmed in (False, True):
        seen.clear()
        parts = make_parts(sizes=SIZES, pages=128)
        parts.decode_graphs.capture(
            parts.stream_partitions.for_role(Role.DECODE),
            (SamplingMode.GREEDY, SamplingMode.RANDOM),
        )
        if warmed:
            run_warmup(parts, tokens=160)
        before = set(seen)
        serve_requests(parts)
        serve_requests(parts, seed=9)
        new[warmed] = seen - before
    assert new[False] and not new[True]


@pytest.mark.parametrize(
    ("captured", "tokens"),
    [(2048, 8192), (2048, 131072), (640, 5000), (16, 20), (2048, 2048), (2048, 100)],
)
def test_warmup_runs_every_padded_row_count_of_large_passes(captured: int, tokens: int):
    sizes = eager_sizes(captured, tokens)
    filled = {next_larger(rows) for rows in range(captured + 1, tokens + 1)}
    assert {next_larger(rows) for rows in sizes} == filled
    assert sizes == sorted(sizes, reverse=True) and all(captured < rows <= tokens for rows in sizes)
    assert len(sizes) <= 64 * max(1, math.log2(max(1.0, tokens / max(captured, 1)))), (
        "few enough to be played"
    )
    assert all(
        rows <= size < rows + max(128, rows / 32)
        for rows in range(captured + 1, tokens + 1)
        for size in [next_larger(rows)]
    )


def test_a_pass_that_fails_midway_closes_its_plan(monkeypatch: pytest.MonkeyPatch):
    with rig(sizes=(), slots=4) as r:
        closed = []
        monkeypatch.setattr(AttentionPlan, "close", lambda self: closed.append(self))
        behind = Decoder.after_attention
        for fails in (True, False):

            def failing(decoder, x_TD, attended_TE, index, fails=fails):
                if fails and index == 2:
                    raise torch.OutOfMemoryError("no room")
                return behind(decoder, x_TD, attended_TE, index)

            monkeypatch.setattr(Decoder, "after_attention", failing)
            first = r.submit_step(
                [Segment(0, 0, 5, True)], lane=1, layers=(0, 2), pass_id=100 + fails
            )
            assert not r.wait(first).error and not closed, "a pass that goes on keeps its plan"
            last = r.submit_step(
                [Segment(0, 0, 5, True)], lane=1, layers=(2, TINY.layers), pass_id=100 + fails
            )
            assert bool(r.wait(last).error) == fails
            assert len(closed) == 1
            closed.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")
def test_a_repeated_load_allocates_no_device_memory():
    parts = make_parts(sizes=SIZES, dtype=torch.bfloat16)
    run_warmup(parts)
    serve_requests(
        parts
    )  # whatever the engine's own steps take: decode graphs are captured when first needed here
    before = torch.cuda.memory_stats()["num_device_alloc"]
    serve_requests(parts, seed=9)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
