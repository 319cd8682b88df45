"""A worker finishes its requests before it changes its role; choices of one prompt send its KV
once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from held_pool import ASKED, HeldPool, asked, held_pool
from pool_process import text_of
from serve_process import poll

DECODES = ("decode-0", "decode-1")
EASY = {"ttft_s": 100.0}  # so that the router leaves the pools' roles as they are


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[HeldPool]:
    """Prefill workers miss their target with any request; decode workers never do."""
    with held_pool(tmp_path, elastic=True, elastic_s=0.2, ttft_s=1e-9, tpot_s=100.0) as pool:
        yield pool


def test_a_worker_finishes_what_it_decodes_before_it_prefills(elastic: HeldPool):
    pool = elastic
    whole = text_of(asked(pool, slo=EASY).end())
    pool.hold("decoding")
    held = []
    for count in (1, 2):
        held.append(asked(pool, slo=EASY))
        poll(lambda count=count: pool.adopted() == pool.before + count)  # one on each decode worker
    pool.hold("prefilling")
    late = asked(pool, slo=EASY)
    poll(lambda: "StartDrain" in pool.said(), what="no worker is asked to change")
    donor = next(name for name in DECODES if f"StartDrain(worker='{name}')" in pool.said())
    assert "Commit" not in pool.said() and pool.metric("counterpoint_role_changes_total") == 0, (
        "it still decodes"
    )
    assert pool.metric("counterpoint_worker_up", worker=donor, role="decode") == 1
    pool.let_go()
    assert [text_of(stream.end()) for stream in (*held, late)] == [whole] * 3
    poll(lambda: pool.metric("counterpoint_role_changes_total") == 1, what="it does not change")
    assert pool.metric("counterpoint_worker_up", worker=donor, role="prefill") == 1
    assert text_of(asked(pool, slo=EASY).end()) == whole
    poll(lambda: pool.at_rest, 20, "something is still held")


def test_choices_of_one_prompt_send_its_kv_once(tmp_path: Path):
    with held_pool(tmp_path, prefix_cache=True) as pool:

        def sent(beginning: str, n: int) -> float:
            before = pool.metric("counterpoint_worker_handoff_sent_bytes_total")
            body = ASKED | {
                "prompt": beginning + ASKED["prompt"],
                "n": n,
                "stream": False,
                "max_tokens": 5,
            }
            answer = pool.post("/v1/completions", body).json()
            assert (
                len({choice["text"] for choice in answer["choices"]}) == 1
                and len(answer["choices"]) == n
            )
            assert answer["usage"]["completion_tokens"] == 5 * n
            poll(
                lambda: pool.metric("counterpoint_worker_handoff_sent_bytes_total") > before,
                what="nothing was sent",
            )
            poll(lambda: pool.at_rest, 20, "something is still held")
            return pool.metric("counterpoint_worker_handoff_sent_bytes_total") - before

        once, thrice = sent("one ", 1), sent("two ", 3)
        assert once == thrice > 0
        assert pool.metric("counterpoint_routes_total", reason="fork") == 2
        assert pool.metric("counterpoint_prefix_hits_tokens_total") > len(ASKED["prompt"])
