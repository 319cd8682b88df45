"""The frames of /live, and what they cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_frames import first, watching
from serve_process import Running, poll

from counterpoint.serve.observability import lane_feed, rolling_stats
from counterpoint.serve.worker.wire import EngineOutputs
from counterpoint.stats import LaneStep, PolicyReport, Stats
from counterpoint.types import AddRequest, FinishReason, OutputDelta, Sampling

Start = Callable[..., Running]


# ---------------------------------------------------------------- over a real socket


def test_frames_show_what_runs(own_server: Start, tmp_path: Path):
    server = own_server().wait_ready()
    with watching(server) as frames:
        idle = first(frames, lambda f: f["about"]["units"])
        assert (
            idle["state"] == "ready"
            and idle["about"]["roles"] == ["both"]
            and idle["about"]["context_tokens"] == 4096
        )
        assert (
            idle["playing"] == []
            and idle["ttft_s"] is None
            and idle["kv_tokens"]["free"] == idle["kv_tokens"]["total"] == 16 * 1024
        )
        secret = f"HOLD UNTIL {tmp_path / 'go'} swordfish"
        body = {"prompt": secret, "max_tokens": 6, "stream": True, "ignore_eos": True}
        with server.http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            busy = first(frames, lambda f: f["playing"])
            (step,) = busy["playing"]
            assert step[0] == 0 and step[3] == 0 and step[4:] == [1, len(secret), 0], (
                "a step that has not ended is shown"
            )
            assert busy["running"] == 1 and busy["queued"] == 1 and step[2] <= busy["now_s"]
            (tmp_path / "go").touch()
            answer.read()
        done = first(frames, lambda f: f["finished"] == 1)
        assert done["last_step"] == 6 and done["ttft_s"][0] > done["itl_s"][0] > 0
        assert "swordfish" not in json.dumps([idle, busy, done])
    with watching(server) as frames:
        steps = next(frames)["steps"]
        assert [step[5:] for step in steps] == [[len(secret), 0]] + [[0, 1]] * 5, (
            "who comes later sees them too"
        )
    poll(lambda: server.get("/live/x").status_code == 404)
    assert "/live" not in server.get("/openapi.json").json()["paths"]
    assert server.stop() == 0


def test_viewers_are_limited_and_do_not_keep_the_server_alive(own_server: Start):
    server = own_server(drain_s=600.0).wait_ready()
    with contextlib.ExitStack() as viewers:
        for _ in range(lane_feed.MAX_VIEWERS):
            client = viewers.enter_context(httpx.Client(timeout=30, trust_env=False))
            viewers.enter_context(client.stream("GET", f"{server.url}/live"))
        refusal = server.get("/live")
        assert refusal.status_code == 503 and int(refusal.headers["retry-after"]) > 0
        assert server.post("/v1/completions", {"prompt": "hi"}).json()["choices"][0]["text"] == "hi"

    def free() -> bool:
        with server.http.stream("GET", f"{server.url}/live") as response:
            return response.status_code == 200

    poll(free, what="the places of viewers that have left are not free")
    with watching(server) as frames:
        next(frames)
        assert server.stop() == 0
        assert all(frame["state"] == "ready" for frame in frames), "and the stream ends whole"


# ---------------------------------------------------------------- viewers


class Sent:
    """An ASGI connection whose client reads, or does not."""

    def __init__(self, reads: bool) -> None:
        self.reads = reads
        self.bodies: list[bytes] = []

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if not self.reads:
                await asyncio.Event().wait()
            self.bodies.append(message["body"])

    async def receive(self) -> Any:
        await asyncio.Event().wait()


class Engine:
    stats, engine_info, state, error = Stats(), None, "ready", ""


def test_a_client_that_does_not_read_is_closed_and_slows_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lane_feed, "STALL_S", 0.3)
    monkeypatch.setattr(lane_feed, "FRAME_S", 0.01)
    monkeypatch.setattr(lane_feed, "QUIET_S", 0.01)

    async def scene() -> None:
        shown = lane_feed.LaneFeed(
            Engine(), rolling_stats.RollingStats(), lane_feed.AdmissionQueue(), "echo"
        )  # type: ignore[arg-type]
        reader, sleeper = Sent(True), Sent(False)
        tasks = [
            asyncio.create_task(shown.watch()({}, sent.receive, sent.send))
            for sent in (reader, sleeper)
        ]
        async with asyncio.timeout(20):
            await tasks[1]  # closed by us
            seen = len(reader.bodies)
            assert seen > 5 and len(shown.viewers) == 1
            while len(reader.bodies) < seen + 5:
                await asyncio.sleep(0)
            shown.close()
            await tasks[0]
        assert reader.bodies[-1] == b"" and not shown.viewers
        with pytest.raises(lane_feed.Overloaded):
            shown.watch()

    asyncio.run(scene())


def test_a_slow_viewer_gets_the_newest_frames():
    frames: lane_feed.Frames = asyncio.Queue(lane_feed.MAX_QUEUED_FRAMES)
    for n in range(10):
        lane_feed.put(frames, b"%d" % n)
    assert [frames.get_nowait() for _ in range(frames.qsize())] == [b"6", b"7", b"8", b"9"]


# ---------------------------------------------------------------- the last minute


def test_percentiles_are_right_and_forget():
    window = rolling_stats.Window()
    assert window.percentiles(0) is None
    random.seed(5)
    values = [random.lognormvariate(-3, 1.5) for _ in range(20_000)]
    for n, value in enumerate(values):
        window.add(100 + n / 1000, value)
    exact = statistics.quantiles(values, n=100)
    found = window.percentiles(120)
    assert found is not None
    assert found == pytest.approx([exact[49], exact[89], exact[98]], rel=0.04)
    window.add(175, 5.0)
    last = statistics.quantiles([*values[19_000:], 5.0], n=100)
    assert window.percentiles(178.5) == pytest.approx([last[49], last[89], last[98]], rel=0.04), (
        "only the last second is left"
    )
    assert window.percentiles(181) == pytest.approx([5.0] * 3, rel=0.03)
    assert window.percentiles(300) is None
    window.add(301, 1e9)
    window.add(301, 0.0)
    assert window.percentiles(301) is not None


def test_rolling_stats_count_tokens_as_they_come():
    beat = rolling_stats.RollingStats()
    beat.on_requests([AddRequest(id="a", prompt=(1,), sampling=Sampling(max_tokens=3))])
    begun_s = beat._last_s["a"][0]
    deltas = [
        (0.5, OutputDelta("a", (1,))),
        (0.6, OutputDelta("a", (2,))),
        (0.7, OutputDelta("a", (3,), finish_reason=FinishReason.LENGTH)),
    ]
    for after_s, delta in deltas:
        beat.on_outputs(EngineOutputs([delta, OutputDelta("unknown", (7,))], begun_s + after_s))
    assert beat.ttft.percentiles(begun_s + 1) == pytest.approx([0.5] * 3, rel=0.03)
    assert beat.itl.percentiles(begun_s + 1) == pytest.approx([0.1] * 3, rel=0.03)
    assert not beat._last_s, "nothing is kept of a request that has ended"


def test_rates_and_hits_are_of_the_last_seconds():
    beat = rolling_stats.RollingStats()
    begun_s = beat._counts[0].at_s
    assert beat.rates(begun_s) == (0.0, 0.0) and beat.hit_rate(begun_s) is None
    for n in range(1, 200):
        stats = Stats(
            generated_tokens=10 * n,
            prompt_tokens=3 * n,
            prefix_queries_tokens=4 * n,
            prefix_hits_tokens=n * (n > 150),
        )
        beat.on_outputs(EngineOutputs([], begun_s + n, stats))
    assert beat.rates(begun_s + 199) == pytest.approx((3, 10))
    assert beat.hit_rate(begun_s + 199) == pytest.approx(199 / (4 * 60))
    assert len(beat._counts) <= rolling_stats.WINDOW_S + 1


def test_what_the_lanes_did_in_the_last_minute():
    beat = rolling_stats.RollingStats()
    begun_s = beat._counts[0].at_s
    assert beat.lanes(begun_s) == {}
    for n in range(1, 100):
        rows = (
            ("decode", "busy", 0.75 * n),
            ("decode", "nothing", 0.25 * n),
            ("prefill", "busy", min(n, 10.0)),
            ("prefill", "memory", 0.0),
        )
        beat.on_outputs(EngineOutputs([], begun_s + n, Stats(lane_s=rows)))
    assert beat.lanes(begun_s + 15)["decode"] == {"busy": 0.75, "nothing": 0.25}
    assert beat.lanes(begun_s + 99) == {"decode": {"busy": 0.75, "nothing": 0.25}, "prefill": {}}, (
        "prefill was busy long ago"
    )


def test_each_step_is_taken_once():
    beat = rolling_stats.RollingStats()
    steps = [LaneStep(0, n, n, n + 1, 1, 0, 1) for n in range(300)]
    for end in (3, 3, 10, 100, 300):
        beat.on_outputs(
            EngineOutputs(
                [], 1.0, Stats(steps=end, recent_steps=tuple(steps[max(0, end - 128) : end]))
            )
        )
    assert [step.pass_id for step in beat.steps] == [*range(100), *range(172, 300)], (
        "what the ring has lost is lost"
    )


def test_splits_active_units_and_fallbacks_of_the_last_minute():
    beat = rolling_stats.RollingStats()
    begun_s = beat._counts[0].at_s
    assert (beat.splits(begun_s), beat.active_share(begun_s), beat.fallbacks(begun_s)) == (
        [],
        None,
        {},
    )
    for n in range(1, 100):
        old = min(n, 10.0)  # what was only so in the first seconds
        split_s = ((0, 8, 0.5 * n), (2, 6, 0.1 * n), (4, 4, 0.3 * n), (6, 2, old))
        policy = PolicyReport(
            fallbacks={"fused gains more": 2 * n, "no split meets tpot": int(old), "rare": n // 50}
        )
        stats = Stats(
            split_s=split_s,
            active_unit_s=6 * 0.9 * n,
            units_total=8,
            resplits=n // 2,
            policy=policy,
        )
        beat.on_outputs(EngineOutputs([], begun_s + n, stats))
    now_s = begun_s + 99
    assert beat.splits(now_s) == [(4, 4, 0.75), (2, 6, 0.25)], "of the time in which both ran"
    assert beat.active_share(now_s) == pytest.approx(0.75)
    assert beat.resplit_rate(now_s) == pytest.approx(0.5)
    assert beat.fallbacks(now_s) == {"fused gains more": 120, "rare": 1}
