"""Pages that a dead writer of another host may still write (NIXL): they stay quarantined, and a
worker with too many of them is replaced."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from held_pool import asked, held_pool
from pool_process import text_of
from serve_process import poll


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="NIXL is not installed")
def test_a_worker_whose_pages_are_lost_is_started_again(tmp_path: Path):
    with held_pool(tmp_path, system="far_system", transport="nixl", worker_lost_s=5.0) as pool:
        whole = text_of(asked(pool).end())
        pool.hold("prefilling")
        stream = asked(pool)
        worker = pool.at("reserved")
        pages = pool.metric("counterpoint_handoff_pages", worker=worker, hold="receiving")
        pool.worker("prefill-0").kill()
        poll(
            lambda: (
                pool.metric("counterpoint_handoff_pages", worker=worker, hold="quarantine") == pages
            )
        )
        pool.let_go()
        assert text_of(stream.end()) == whole
        poll(lambda: pool.sum_of("worker_starts_total", worker="prefill-0") == 2)
        ended = pool.worker(worker)
        poll(
            lambda: pool.sum_of("worker_starts_total", worker=worker) == 2, 30, "it is not replaced"
        )
        poll(pool.well, 60, "it does not come back")
        assert pool.worker(worker) != ended and "Replace" in pool.said()
        poll(lambda: pool.at_rest, 20, "something is still held")
        assert text_of(asked(pool).end()) == whole
