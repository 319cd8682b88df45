"""Logs: the line of each 10 s, and JSON."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from serve_process import Running, poll

from counterpoint.serve.observability.logs import JsonLines, has_activity, load_between
from counterpoint.serve.observability.rolling_stats import RollingStats
from counterpoint.stats import LaneStep, Stats

Start = Callable[..., Running]


def json_lines(server: Running) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.said().splitlines() if line.startswith("{")]


def test_a_line_with_the_load_while_something_runs(own_server: Start, tmp_path: Path):
    server = own_server(log_format="json", log_level="debug").wait_ready()
    go = tmp_path / "go"
    answers: list[httpx.Response] = []
    body = {"prompt": f"HOLD UNTIL {go} "}
    held = threading.Thread(
        target=lambda: answers.append(server.post("/v1/completions?key=s3cret", body))
    )
    held.start()
    poll(lambda: [line for line in json_lines(server) if "kv_used" in line], 15)
    (line,) = (line for line in json_lines(server) if "kv_used" in line)
    assert (
        line["level"] == "info"
        and line["running"] == 1
        and line["waiting"] == 0
        and line["kv_used"] > 0
    )
    assert line["prompt_tokens_per_s"] > 0 and line["ttft_p50_s"] is None and line["step_s"] > 0
    assert line["splits"].keys() == {"1+0"} and 0 < line["splits"]["1+0"] <= 1
    go.touch()
    held.join(20)
    assert answers[0].is_success
    server.get("/nothing%0Ahere")
    told = poll(
        lambda: [line for line in json_lines(server) if "path" in line][1:] and json_lines(server)
    )
    told = [line for line in told if "path" in line]
    assert [(line["method"], line["path"], line["status"]) for line in told] == [
        ("POST", "/v1/completions", 200),
        ("GET", "/nothing%0Ahere", 404),
    ]
    assert told[0]["request_id"] == answers[0].headers["x-request-id"] and told[0]["seconds"] > 0
    assert "s3cret" not in server.said() and "HOLD" not in server.said()
    assert server.stop() == 0


def test_a_load_in_words():
    before = Stats(generated_tokens=100, prompt_tokens=1000, split_s=((0, 2, 5.0), (1, 1, 2.0)))
    after = Stats(
        generated_tokens=400,
        prompt_tokens=3000,
        running=3,
        waiting=2,
        pages_total=10,
        pages_free=5,
        pages_cached=1,
        prefix_queries_tokens=100,
        prefix_hits_tokens=25,
        split_s=((0, 2, 6.0), (1, 1, 10.0)),
        running_steps=(LaneStep(0, 1, 70.0, 0.0, 1, 512, 0),),
    )
    load = load_between(
        before, after, 10.0, RollingStats(), 100.0
    )  # all of the 10 s but one is booked
    words = load.words()
    for part in (
        "prompt 200 tok/s, generated 30 tok/s",
        "running 3, waiting 2",
        "in use 40%",
        "hits 25%",
        "1+1 80%, 1+0 10%, 0+2 10%",
    ):
        assert part in words
    assert "since 30 s" in words and "TTFT" not in words
    assert load.fields()["splits"] == {"1+1": 0.8, "1+0": 0.1, "0+2": 0.1}


def test_nothing_is_told_of_an_idle_engine():
    idle = Stats(steps=5, generated_tokens=9, pages_total=10, pages_cached=3)
    assert not has_activity(idle, idle)
    for busy in (Stats(steps=6), Stats(steps=5, running=1), Stats(steps=5, waiting=1)):
        assert has_activity(idle, busy)


def test_a_line_is_one_line():
    record = logging.LogRecord(
        "x", logging.INFO, "", 1, "two\nlines %s", ("and \x1b[31m more",), None
    )
    line = JsonLines().format(record)
    assert (
        "\n" not in line
        and "\x1b" not in line
        and json.loads(line)["message"] == "two\nlines and \x1b[31m more"
    )
