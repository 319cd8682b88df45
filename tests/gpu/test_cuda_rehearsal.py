"""What a rehearsal leaves behind: everything made, nothing changed. On a GPU or, without one, in place on the CPU."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

import cuda_rig
import pytest
import torch
from cuda_rig import HAS_GPU, TINY, Parts, Service, make_parts, requests, rig

from counterpoint.core.policy import Multiplex
from counterpoint.device.cuda.attention import AttentionPlan
from counterpoint.device.cuda.piecewise_graphs import next_larger
from counterpoint.device.cuda.sampling import SamplingMode
from counterpoint.device.cuda.stream_partitions import StreamPartition
from counterpoint.device.cuda.warmup import passes, sizes_between, warm_up
from counterpoint.model.decoder import Decoder
from counterpoint.types import Role, Segment

SIZES = (4, 8, 16)
TOKENS = 200


def everywhere(parts: Parts) -> list[tuple[Role, StreamPartition]]:
    return [
        (role, place) for role in (Role.PREFILL, Role.DECODE) for place in parts.places.of(role)
    ]


def ask(parts: Parts, seed: int = 4) -> dict[str, list[int]]:
    service = Service(
        parts,
        Multiplex(160, parts.units, parts.places.of(Role.DECODE)[-1].units, depth=2),
        overlap=HAS_GPU,
    )
    answers = service.ask(requests(24, seed=seed))
    service.close()
    return answers


def played(
    parts: Parts, places: Sequence[tuple[Role, StreamPartition]] | None = None, tokens: int = TOKENS
) -> str:
    return warm_up(parts.executor, everywhere(parts) if places is None else places, tokens)


def test_answers_are_the_same_after_it():
    found = []
    for first in (False, True):
        parts = make_parts(sizes=SIZES)
        if first:
            played(parts)
        found.append(ask(parts))
    assert found[0] == found[1]


def test_only_the_spare_page_is_written():
    parts = make_parts(sizes=SIZES)
    played(parts)
    for pool in (*parts.kv.k, *parts.kv.v):
        assert not pool[:-1].any(), "a page that a request may be given"
        assert pool[-1].any()


def test_the_largest_comes_first_and_every_bucket_is_sampled():
    with rig(sizes=SIZES, slots=24) as r:
        found = list(passes(r.executor, TOKENS))
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
def test_a_bucket_may_be_larger_than_all_that_may_run(slots: int):
    parts = make_parts(sizes=SIZES, slots=slots)
    played(parts)
    with rig(sizes=SIZES, slots=slots) as r:
        found = [segment.slot for segments, _ in passes(r.executor, TOKENS) for segment in segments]
        assert max(found) == slots - 1


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_no_pass_is_larger_than_allowed(tokens: int):
    with rig(sizes=SIZES) as r:
        assert all(
            sum(segment.tokens for segment in segments) <= tokens
            for segments, _ in passes(r.executor, tokens)
        )


def test_a_pass_that_fails_is_told_and_the_others_are_played(caplog: pytest.LogCaptureFixture):
    parts = make_parts(sizes=SIZES)
    start, calls = parts.passes.start, 0

    def failing(inputs):
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("no room for this one")
        return start(inputs)

    parts.passes.start = failing
    with caplog.at_level(logging.WARNING, logger="counterpoint.device.cuda.warmup"):
        note = played(parts, everywhere(parts)[:1])
    assert [r.message for r in caplog.records if "rehearsed" in r.message] == [
        "a pass could not be rehearsed: OutOfMemoryError: no room for this one"
    ]
    assert note.startswith(f"{calls} passes rehearsed")


@pytest.mark.skipif(HAS_GPU, reason="in place: products are counted where ops are the reference's")
def test_serving_multiplies_no_number_of_rows_that_was_not_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: set[tuple[int, tuple[int, ...]]] = set()
    plain = cuda_rig.in_place_ops()

    def linear(x, packed):
        seen.add((x.shape[0], tuple(packed[0].shape)))
        return plain.linear(x, packed)

    monkeypatch.setattr(cuda_rig, "in_place_ops", lambda: dataclasses.replace(plain, linear=linear))
    new = {}
    for rehearsed in (False, True):
        seen.clear()
        parts = make_parts(sizes=SIZES, pages=128)
        parts.graphs.capture(
            parts.places.of(Role.DECODE), (SamplingMode.GREEDY, SamplingMode.DRAWN)
        )
        if rehearsed:
            played(parts, tokens=160)
        before = set(seen)
        ask(parts)
        ask(parts, seed=9)
        new[rehearsed] = seen - before
    assert new[False] and not new[True]


@pytest.mark.parametrize(
    ("captured", "tokens"),
    [(2048, 8192), (2048, 131072), (640, 5000), (16, 20), (2048, 2048), (2048, 100)],
)
def test_every_large_pass_is_filled_up_to_a_number_of_rows_that_is_played(
    captured: int, tokens: int
):
    sizes = sizes_between(captured, tokens)
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


def test_a_pass_that_fails_on_the_way_gives_its_plan_back(monkeypatch: pytest.MonkeyPatch):
    with rig(sizes=(), slots=4) as r:
        closed = []
        monkeypatch.setattr(AttentionPlan, "close", lambda self: closed.append(self))
        behind = Decoder.after_attention
        for fails in (True, False):

            def failing(decoder, x_TD, attended_TE, index, fails=fails):
                if fails and index == 2:
                    raise torch.OutOfMemoryError("no room")
                return behind(decoder, x_TD, attended_TE, index)

            monkeypatch.setattr(Decoder, "behind_attention", failing)
            first = r.step([Segment(0, 0, 5, True)], lane=1, layers=(0, 2), batch=100 + fails)
            assert not r.wait(first).error and not closed, "a pass that goes on keeps its plan"
            last = r.step(
                [Segment(0, 0, 5, True)], lane=1, layers=(2, TINY.layers), batch=100 + fails
            )
            assert bool(r.wait(last).error) == fails
            assert len(closed) == 1
            closed.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")
def test_the_same_load_again_gets_no_memory_from_the_driver():
    parts = make_parts(sizes=SIZES, dtype=torch.bfloat16)
    played(parts)
    ask(
        parts
    )  # whatever the engine's own steps take: decode graphs are captured when first needed here
    before = torch.cuda.memory_stats()["num_device_alloc"]
    ask(parts, seed=9)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
