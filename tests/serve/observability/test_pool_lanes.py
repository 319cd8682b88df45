"""A pool on /live and the dashboard: each worker, and all lanes in one picture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser
from live_frames import Frame, first, watching
from pool_process import Pool
from serve_process import poll

from counterpoint.serve.observability.pool_lanes import (
    WorkerLanes,
    describe_workers,
    lanes_of_worker,
    worker_lane_times,
)
from counterpoint.stats import LaneStep, Stats

BODY = {
    "prompt": "what two workers do " * 3,
    "max_tokens": 30,
    "temperature": 0.0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("pool") / "log", tiny, prefill=1, decode=1, replicas=1)
    try:
        pool.wait_ready()
        yield pool
        assert pool.stop() == 0
    finally:
        if pool.process.poll() is None:
            pool.process.kill()
            pool.process.wait()


def test_frames_tell_of_each_worker_and_its_steps(pool: Pool):
    with watching(pool) as frames:
        idle = next(frames)
        assert [(worker["name"], worker["role"], worker["up"]) for worker in idle["workers"]] == [
            ("prefill-0", "prefill", True),
            ("decode-0", "decode", True),
            ("replica-0", "both", True),
        ]
        assert all(worker["kv_tokens"]["total"] == 600 for worker in idle["workers"])
        for _ in range(6):
            assert pool.post("/v1/completions", BODY).is_success

        seen: list[list[float]] = []

        def both_played(frame: Frame) -> bool:
            seen.extend(frame["steps"])
            return {step[0] for step in seen} >= {0, 2}

        played = first(frames, both_played)
        assert (
            played["about"]["bands"] == [[0, 1]] * 2 + [[1, 1]] * 2 + [[2, 1]] * 2
            and played["about"]["units"] == 3
        )
        prefill, decode = ([step for step in seen if step[0] == lane] for lane in (0, 2))
        assert all(step[5] and not step[6] for step in prefill) and all(step[6] for step in decode)
        assert all(abs(played["now_s"] - step[3]) < 60 for step in seen)
        busy = first(frames, lambda frame: {"prefill-0", "decode-0"} <= frame["lanes"].keys())
        assert all("busy" in busy["lanes"][name] for name in ("prefill-0", "decode-0"))


def test_the_page_shows_the_workers(pool: Pool, browser: Browser):
    tab = browser.tab(pool.url + "/")
    tab.until("document.querySelectorAll('#workers li').length === 3")
    assert pool.post("/v1/completions", BODY).is_success
    tab.until("view.steps.some(s => s[0] === 0) && view.steps.some(s => s[0] === 2)")
    rows = tab.run("[...document.querySelectorAll('#workers li')].map(row => row.textContent)")
    assert [
        row.startswith(name)
        for row, name in zip(rows, ("prefill-0", "decode-0", "replica-0"), strict=True)
    ] == [True] * 3
    assert "running" in rows[0] and not tab.run("document.getElementById('pool').hidden")
    places = tab.run(
        "(b => [[0,0,0,0,1,1,0],[2,0,0,0,1,0,1]].map(s => stepBox(s, b)[0] - b.staff.y))(layout())"
    )
    assert places[0] == 0 < places[1], "each worker has a band of its own"
    pool.worker("replica-0").kill()
    tab.until(
        "[...document.querySelectorAll('#workers small')]"
        ".some(words => words.textContent === 'not there')"
    )
    poll(lambda: pool.get("/health").json()["status"] == "ok", 60, "the worker does not come back")
    assert not tab.problems
    tab.close()


# ---------------------------------------------------------------- the arithmetic


def test_steps_keep_apart_and_those_of_another_clock_end_now():
    steps = [LaneStep(1, 7, 10.0, 11.0, 2, 0, 3), LaneStep(0, 8, 10.5, 0.0, 2, 5, 0)]
    near, far = (
        lanes_of_worker(WorkerLanes(0, "a"), steps, 12.0),
        lanes_of_worker(WorkerLanes(3, "b"), steps, 5000.0),
    )
    assert [(step.lane, step.started_s, step.ended_s) for step in near] == [
        (1, 10.0, 11.0),
        (0, 10.5, 0.0),
    ]
    assert [(step.lane, step.started_s, step.ended_s) for step in far] == [
        (7, 4999.0, 5000.0),
        (6, 4999.5, 0.0),
    ]
    assert len({step.pass_id for step in (*near, *far)}) == 4, "passes of two workers are not one"
    assert lanes_of_worker(WorkerLanes(0, "a"), [], 12.0) == ()


def test_a_workers_lanes_share_its_band():
    places = [
        WorkerLanes(0, "p", 4, ("prefill", "decode")),
        WorkerLanes(1, "d", 2, ("both",)),
        WorkerLanes(2, "missing"),
    ]
    told = describe_workers(places)
    assert told["roles"] == ["prefill", "decode", "both", "", "", ""]
    assert told["bands"] == [(0, 4), (0, 4), (4, 2), (4, 2), (6, 1), (6, 1)] and told["units"] == 7
    stats = Stats(lane_s=(("prefill", "busy", 1.0), ("decode", "nothing", 2.0)))
    assert worker_lane_times(places[0], stats) == (
        ("p prefill", "busy", 1.0),
        ("p decode", "nothing", 2.0),
    )
    assert worker_lane_times(places[1], Stats(lane_s=(("both", "busy", 1.0),))) == (
        ("d", "busy", 1.0),
    )
