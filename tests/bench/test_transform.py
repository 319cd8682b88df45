"""Transforms of a load: what they change, and the prefixes they keep."""

from __future__ import annotations

import dataclasses

import pytest

from counterpoint.bench.trace import read_trace
from counterpoint.bench.transform import (
    apply_slo,
    clip_lengths,
    drop_texts,
    group_by_prefix,
    replace_arrivals,
    scale_lengths,
    scale_to_rate,
    skip_first,
    stretch_time,
    take_first,
    thin,
    warmup_queries,
)
from counterpoint.bench.workload import Query, offered_rate, prompt_ids, reusable_prefix_share
from counterpoint.types import Slo


def chats(groups: int, turns: int, system: tuple[int, ...] = (0,)) -> list[Query]:
    """`groups` interleaved conversations of `turns` requests. All start with the system blocks;
    each turn adds a block."""
    load = []
    for turn in range(turns):
        for group in range(groups):
            blocks = system + tuple(1000 + group * 100 + t for t in range(turn + 1))
            number = len(load)
            load.append(Query(number, float(number), 64 * len(blocks), 10, blocks, 64))
    return load


def test_rate_and_stretch_change_the_clock_alone():
    load = chats(3, 3)
    fast = scale_to_rate(load, 4.0)
    assert offered_rate(fast) == pytest.approx(4.0)
    assert [dataclasses.replace(q, arrival_s=0.0) for q in fast] == [
        dataclasses.replace(q, arrival_s=0.0) for q in load
    ]
    assert [q.arrival_s for q in stretch_time(load, 0.1)] == pytest.approx(
        [q.arrival_s / 10 for q in load]
    )
    with pytest.raises(ValueError, match="at once"):
        scale_to_rate(stretch_time(load, 1e-9)[:1], 2.0)


def test_new_arrivals():
    load = replace_arrivals(chats(4, 5), "poisson", 10.0, 1.0, seed=2)
    assert offered_rate(load) == pytest.approx(10.0)
    assert [q.number for q in load] == list(range(20))


def test_the_first_ones_start_at_zero():
    load = take_first(chats(3, 2)[2:], 2)
    assert [(q.number, q.arrival_s) for q in load] == [(2, 0.0), (3, 1.0)]
    with pytest.raises(ValueError, match="requests"):
        take_first(load, 0)


@pytest.mark.parametrize("factor", [0.1, 0.25, 0.013, 2.0])
def test_scaled_prompts_keep_what_they_have_in_common(data, factor):
    load = list(read_trace(str(data / "mooncake.jsonl")).queries)
    small = scale_lengths(load, factor)
    block = small[0].block_tokens
    assert block == max(1, round(512 * factor))
    assert reusable_prefix_share(small) == pytest.approx(reusable_prefix_share(load), abs=0.02)
    ids = [prompt_ids(q) for q in small]
    assert ids[0][: 2 * block] == ids[1][: 2 * block]
    assert ids[0][2 * block :] != ids[1][2 * block : len(ids[0])]
    assert ids[0] == ids[3][: len(ids[0])]
    assert [q.output_tokens for q in small] == [
        max(1, round(q.output_tokens * factor)) for q in load
    ]


def test_scaling_plain_lengths():
    assert [
        (q.prompt_tokens, q.output_tokens)
        for q in scale_lengths([Query(0, 0.0, 10, 3), Query(1, 0.0, 1, 1)], 0.5)
    ] == [
        (5, 2),
        (1, 1),
    ]
    with pytest.raises(ValueError, match="given text"):
        scale_lengths([Query(0, 0.0, 2, 3, prompt="hi there")], 0.5)


def test_clipping():
    load = [
        Query(0, 0.0, 100, 50),
        Query(1, 1.0, 100, 5, (1, 2, 3, 4), 32),
        Query(2, 2.0, 4, 5, prompt=(1, 2, 3, 4)),
        Query(3, 3.0, 90, 5, prompt="long " * 70),
        Query(4, 4.0, 2, 5, prompt="short"),
    ]
    cut = clip_lengths(load, max_prompt_tokens=40, max_output_tokens=20)
    assert [(q.number, q.prompt_tokens, q.output_tokens) for q in cut] == [
        (0, 40, 20),
        (1, 40, 5),
        (2, 4, 5),
        (4, 2, 5),
    ]
    assert cut[1].prefix_ids == (1, 2)
    assert prompt_ids(cut[1]) == prompt_ids(load[1])[:40]
    assert clip_lengths(load, max_prompt_tokens=2, max_output_tokens=None)[2].prompt == (1, 2)


def test_texts_become_made_tokens_of_their_length():
    text, ids, made = (
        Query(0, 0.0, 9, 3, prompt="some text"),
        Query(1, 0.0, 2, 3, prompt=(4, 5)),
        Query(2, 0.0, 5, 3),
    )
    plain = drop_texts([text, ids, made])
    assert plain[1:] == [ids, made]
    assert len(prompt_ids(plain[0])) == 9


def test_a_querys_own_targets_come_first():
    load = [Query(0, 0.0, 1, 1, slo=Slo(ttft_s=0.3)), Query(1, 0.0, 1, 1)]
    assert [q.slo for q in apply_slo(load, Slo(ttft_s=1.0, itl_s=0.2))] == [
        Slo(ttft_s=0.3, itl_s=0.2),
        Slo(ttft_s=1.0, itl_s=0.2),
    ]


def test_warmup_queries_share_no_prefix_with_the_load():
    load = chats(3, 3)
    warm = warmup_queries(load, 2)
    assert [(q.prompt_tokens, q.arrival_s) for q in warm] == [
        (load[0].prompt_tokens, 0.0),
        (load[1].prompt_tokens, 0.0),
    ]
    assert not {q.id for q in warm} & {q.id for q in load}
    assert all(prompt_ids(w)[:8] != prompt_ids(q)[:8] for w in warm for q in load)
    assert warmup_queries(load, 0) == []


# ---------------------------------------------------------------- thinning


def test_groups_are_conversations_not_the_common_system_prompt():
    load = chats(groups=100, turns=3)
    label = group_by_prefix(load, max_share=0.05)
    assert len(set(label)) == 100
    for q, group in zip(load, label, strict=True):
        assert group == label[q.number % 100]


def test_two_system_prompts_make_no_groups():
    load = chats(50, 3, system=(0,)) + [
        dataclasses.replace(
            q, number=q.number + 150, prefix_ids=(1, *[b + 10_000 for b in q.prefix_ids[1:]])
        )
        for q in chats(50, 3)
    ]
    assert len(set(group_by_prefix(load, max_share=0.05))) == 100


def test_requests_without_blocks_or_ending_in_the_system_prompt_stand_alone():
    load = [
        *chats(40, 2),
        Query(80, 80.0, 64, 1, (0,), 64),
        Query(81, 81.0, 64, 1, (0,), 64),
        Query(82, 82.0, 64, 1),
    ]
    label = group_by_prefix(load, max_share=0.05)
    assert len(set(label)) == 43


def test_thinning_keeps_groups_whole():
    load = chats(groups=200, turns=4)
    kept_load = thin(load, 0.2, seed=5)
    assert len(kept_load) == pytest.approx(160, abs=4)
    kept = {q.number % 200 for q in kept_load}
    assert [q.number for q in kept_load] == [q.number for q in load if q.number % 200 in kept]
    assert kept_load[0].arrival_s == 0
    assert reusable_prefix_share(kept_load) == pytest.approx(reusable_prefix_share(load), abs=0.01)
    assert thin(load, 1.0, seed=5) == load
    with pytest.raises(ValueError, match="thin"):
        thin(load, 0.0, seed=5)


def test_thinning_the_public_trace_keeps_its_hits(public_trace):
    load = read_trace(public_trace("mooncake_conversation_trace.jsonl")).queries
    kept_load = thin(load, 0.05, seed=0)
    assert len(kept_load) / len(load) == pytest.approx(0.05, abs=0.002)
    assert reusable_prefix_share(kept_load) > 0.3  # random rows would leave 0.09


def test_the_first_can_be_left_out():
    queries = [Query(i, float(i), 10, 1) for i in range(5)]
    left = skip_first(queries, 3)
    assert [(q.number, q.arrival_s) for q in left] == [(3, 0.0), (4, 1.0)]
    for wrong in (5, -1):
        with pytest.raises(ValueError, match="skip is"):
            skip_first(queries, wrong)
