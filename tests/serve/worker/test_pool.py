"""`serve --prefill 2 --decode 2`: real workers behind one endpoint."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from pool_process import Pool, answers, mixed_requests, others
from serve_process import poll

TRANSPORTS = ["shm", "tcp", "nixl"]
BODIES = mixed_requests(200)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> list[Any]:
    """The answers of one engine."""
    one = Pool(tmp_path_factory.mktemp("one") / "log", tiny)
    try:
        return answers(one.wait_ready(), BODIES)
    finally:
        one.stop()


@pytest.fixture
def clean() -> Iterator[None]:
    files = set(os.listdir("/dev/shm"))
    children = set(psutil.Process().children(recursive=True))
    yield
    assert set(os.listdir("/dev/shm")) <= files, "a shared-memory file was left"
    poll(lambda: set(psutil.Process().children(recursive=True)) <= children, what="orphans")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_answer_is_that_of_one_engine(tmp_path, tiny, truth, clean, transport):
    if transport == "nixl" and importlib.util.find_spec("nixl_cu13") is None:
        pytest.skip("NIXL is not installed: pip install --no-deps nixl-cu13")
    pool = Pool(tmp_path / "log", tiny, prefill=2, decode=2, transport=transport)
    try:
        pool.wait_ready()

        def tried() -> bool:
            """How full workers are at each routing is chance: repeat until enough found room."""
            assert not others(answers(pool, BODIES), truth)
            forks = pool.metric("counterpoint_routes_total", reason="fork")
            adopted = pool.metric("counterpoint_handoffs_ended_total", outcome="adopted")
            return (
                pool.metric("counterpoint_preemptions_total") > 0 and forks > 10 and adopted > 150
            )

        poll(
            tried,
            120,
            "no decode worker has run out of pages, or hardly a choice was forked or handed over",
        )
        poll(lambda: pool.at_rest, what="the pool does not come to rest")
        links = pool.metric("counterpoint_handoff_links")
        assert (
            pool.metric("counterpoint_link_bytes_per_second") > 0
            and pool.metric("counterpoint_route_ttft_predictions_total") > 150
        )
        half, most = (
            pool.metric("counterpoint_route_ttft_error_ratio", quantile=q) for q in ("0.5", "0.95")
        )
        assert 0 < half <= most
        assert (
            links >= 4 and pool.metric("counterpoint_handoff_links", transport=transport) == links
        )
        assert pool.stop() == 0
    finally:
        if pool.process.poll() is None:
            pool.process.kill()
            pool.process.wait()


def test_roles_follow_the_load_and_a_timeline_shows_kv_under_way(tmp_path, tiny, truth, clean):
    """No prefill can meet its target and every decode can: a decode worker becomes a prefill
    worker."""
    flags = {
        "elastic": True,
        "elastic_s": 0.02,
        "ttft_s": 1e-6,
        "tpot_s": 100.0,
        "kv_pages": 1000,
        "timeline": tmp_path / "lanes.json",
    }
    pool = Pool(tmp_path / "log", tiny, prefill=1, decode=2, **flags)
    try:
        pool.wait_ready()

        def changed() -> float:
            assert not others(answers(pool, BODIES), truth)
            return pool.metric("counterpoint_role_changes_total")

        assert poll(changed, 60) == 1
        assert pool.metric("counterpoint_worker_up", role="prefill") == 2
        assert pool.stop() == 0
    finally:
        if pool.process.poll() is None:
            pool.process.kill()
            pool.process.wait()
    events = json.loads((tmp_path / "lanes.prefill-0.json").read_text())["traceEvents"]
    steps = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X"]
    begun = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    sent = [(begun[event["id"]], event["ts"]) for event in events if event["ph"] == "e"]
    assert len(sent) == len(begun) > 50
    assert any(start < ended and began < end for start, end in steps for began, ended in sent), (
        "nothing overlaps"
    )


def test_replicas_hand_nothing_on(tmp_path, tiny, truth, clean):
    pool = Pool(tmp_path / "log", tiny, replicas=2)
    try:
        assert not others(answers(pool.wait_ready(), BODIES), truth)
        assert all(
            pool.metric("counterpoint_worker_generated_tokens_total", worker=f"replica-{n}") > 500
            for n in range(2)
        )
        assert "counterpoint_handoff_links{" not in pool.get("/metrics").text
        poll(lambda: pool.at_rest, what="the pool does not come to rest")
        assert pool.stop() == 0
    finally:
        if pool.process.poll() is None:
            pool.process.kill()
            pool.process.wait()
