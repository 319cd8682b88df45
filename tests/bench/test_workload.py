"""Synthetic loads: their statistics, and prompts that share tokens exactly as their blocks do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.bench.workload import (
    Lengths,
    PrefixGroups,
    Query,
    SyntheticLoad,
    TokenRange,
    arrival_times,
    describe_load,
    offered_rate,
    prompt_ids,
    reusable_prefix_share,
)


def gaps(kind, burstiness=1.0, count=20_000):
    return np.diff(arrival_times(count, kind, 8.0, np.random.default_rng(1), burstiness))


@pytest.mark.parametrize(
    ("kind", "burstiness", "cv"),
    [("poisson", 0.1, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5), ("constant", 1.0, 0.0)],
)
def test_arrivals_have_the_rate_and_the_burstiness(kind, burstiness, cv):
    between = gaps(kind, burstiness)
    assert between.mean() == pytest.approx(1 / 8)
    assert between.std() / between.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_once_is_all_at_the_start():
    assert arrival_times(3, "once", 8.0, np.random.default_rng(0)).tolist() == [0, 0, 0]
    assert arrival_times(1, "poisson", 8.0, np.random.default_rng(0)).tolist() == [0]


@pytest.mark.parametrize(
    ("rate", "burstiness", "named"), [(0.0, 1.0, "rate"), (1.0, 0.0, "burstiness")]
)
def test_impossible_arrivals_are_refused(rate, burstiness, named):
    with pytest.raises(ValueError, match=named):
        arrival_times(5, "gamma", rate, np.random.default_rng(0), burstiness)


@pytest.mark.parametrize("kind", ["constant", "uniform", "lognormal"])
def test_lengths_have_their_mean_and_bounds(kind):
    drawn = Lengths(200, kind, spread=0.5).draw(20_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(200, rel=0.02)
    assert drawn.min() >= 1
    capped = Lengths(200, kind, spread=0.5, max_tokens=220).draw(1_000, np.random.default_rng(0))
    assert capped.max() <= 220
    if kind == "uniform":
        assert (drawn.min(), drawn.max()) == (100, 300)


def test_a_load_follows_from_its_seed():
    def load(seed):
        return SyntheticLoad(
            50,
            Lengths(80, "lognormal"),
            Lengths(20, "uniform"),
            rate=5.0,
            groups=PrefixGroups(3, 0.5),
            seed=seed,
        ).queries()

    assert load(3) == load(3)
    assert load(3) != load(4)
    assert offered_rate(load(3)) == pytest.approx(5.0)
    assert [q.arrival_s for q in load(3)] == sorted(q.arrival_s for q in load(3))


def common(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_groups_share_their_part_of_the_prompt():
    load = SyntheticLoad(
        40, Lengths(320, "uniform", 0.5), Lengths(4), groups=PrefixGroups(2, 0.5), seed=0
    ).queries()
    for a in load:
        for b in load:
            if a is b:
                continue
            shared = common(prompt_ids(a), prompt_ids(b))
            least = min(a.prompt_tokens, b.prompt_tokens) // 2 // 16 * 16
            assert shared == (least if a.session == b.session else 0)


# ---------------------------------------------------------------- tokens


def test_equal_blocks_give_equal_tokens_and_others_differ():
    a = prompt_ids(Query(0, 0.0, 100, 1, prefix_ids=(5, 6, 7), block_tokens=32))
    b = prompt_ids(Query(1, 0.0, 80, 1, prefix_ids=(5, 6, 8), block_tokens=32))
    assert a[:64] == b[:64]
    assert a[64] != b[64]
    assert a[:32] != a[32:64]


def test_a_last_block_may_be_cut():
    long = prompt_ids(Query(0, 0.0, 64, 1, prefix_ids=(5, 6), block_tokens=32))
    short = prompt_ids(Query(1, 0.0, 40, 1, prefix_ids=(5, 6), block_tokens=32))
    assert long[:40] == short


def test_what_is_beyond_the_blocks_is_the_querys_own():
    a = prompt_ids(Query(0, 0.0, 80, 1, prefix_ids=(5,), block_tokens=32))
    b = prompt_ids(Query(1, 0.0, 80, 1, prefix_ids=(5,), block_tokens=32))
    assert common(a, b) == 32
    plain = [prompt_ids(Query(i, 0.0, 80, 1)) for i in range(20)]
    assert len({p[:8] for p in plain}) == 20


def test_tokens_depend_on_the_seed_only():
    query = Query(4, 0.0, 200, 1, prefix_ids=(9,), block_tokens=16)
    assert prompt_ids(query, seed=1) == prompt_ids(query, seed=1)
    assert prompt_ids(query, seed=1) != prompt_ids(query, seed=2)


def test_tokens_are_the_documented_hash():
    """Recomputed with Python ints, one token at a time: a load has the same tokens on every machine
    and in every version."""

    def mix(word):
        word = (word + 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    def token(stream, position):
        return 1_000 + mix((mix(stream ^ mix(11)) + position) % 2**64) % 29_000

    in_blocks = [token(2 * block, offset) for block in (3, 8) for offset in (0, 1)]
    beyond = [token(2 * 5 + 1, position) for position in (4, 5, 6)]
    assert (
        list(prompt_ids(Query(5, 0.0, 7, 1, prefix_ids=(3, 8), block_tokens=2), seed=11))
        == in_blocks + beyond
    )


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**62), max_size=4),
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(0, 50),
    st.integers(1, 50),
)
def test_ids_are_of_the_range_and_as_many_as_asked(
    number, blocks, block_tokens, length, first, size
):
    ids = prompt_ids(
        Query(number, 0.0, length, 1, tuple(blocks), block_tokens),
        TokenRange(first, first + size),
        seed=7,
    )
    assert len(ids) == length
    assert all(type(i) is int and first <= i < first + size for i in ids)


def test_given_ids_stay_and_texts_are_refused():
    assert prompt_ids(Query(0, 0.0, 3, 1, prompt=(9, 8, 7))) == (9, 8, 7)
    for prompt in ("a text", (("user", "hello"),)):
        with pytest.raises(ValueError, match="tokenised"):
            prompt_ids(Query(0, 0.0, 3, 1, prompt=prompt))


def test_token_range_within_a_vocabulary():
    assert TokenRange.within(128_256) == TokenRange(1_000, 30_000)
    assert TokenRange.within(256) == TokenRange(64, 256)
    with pytest.raises(ValueError, match="empty"):
        TokenRange(5, 5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"output_tokens": 0}, "output_tokens"),
        ({"prefix_ids": (1,)}, "block_tokens"),
    ],
)
def test_a_query_that_cannot_be_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        Query(**({"number": 0, "arrival_s": 0.0, "prompt_tokens": 5, "output_tokens": 5} | fields))


def test_description():
    load = [
        Query(0, 0.0, 64, 10, (1, 2), 32),
        Query(1, 1.0, 64, 20, (1, 3), 32),
        Query(2, 4.0, 32, 30, (1,), 32),
        Query(3, 5.0, 40, 40),
    ]
    about = describe_load(load)
    assert reusable_prefix_share(load) == 64 / 200
    assert (about["requests"], about["span_s"], about["rate"]) == (4, 5.0, 0.6)
    assert about["prompt_tokens"]["mean"] == 50
    assert about["output_tokens"]["max"] == 40
    assert about["gap_cv"] == pytest.approx(np.std([1, 3, 1]) / np.mean([1, 3, 1]))
