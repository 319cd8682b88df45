"""What an operator sees: traces and logs."""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_process import Running, poll

from counterpoint.config import Config, ConfigError
from counterpoint.serve.observability.logs import JsonLines, has_activity, load_between
from counterpoint.serve.observability.otel import Tracing
from counterpoint.serve.observability.rolling_stats import RollingStats
from counterpoint.stats import LaneStep, Stats

Start = Callable[..., Running]
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


# ---------------------------------------------------------------- traces


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.got = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def spans(collector: Any) -> list[dict[str, Any]]:
    """Of all batches: name, trace, parent, status and attributes."""
    protocol = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    found = []
    for path, body in tuple(collector.got):
        assert path == "/v1/traces"
        for resource in protocol.ExportTraceServiceRequest.FromString(body).resource_spans:
            assert {a.key: a.value.string_value for a in resource.resource.attributes}[
                "service.name"
            ] == "counterpoint"
            found += [about(span) for scope in resource.scope_spans for span in scope.spans]
    return found


def about(span: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return (
            [value(v) for v in one.array_value.values]
            if kind == "array_value"
            else getattr(one, kind)
        )

    words = {
        "name": span.name,
        "trace": span.trace_id.hex(),
        "parent": span.parent_span_id.hex(),
        "status": span.status.code,
    }
    words["seconds"] = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    return words | {attribute.key: value(attribute.value) for attribute in span.attributes}


def test_a_span_for_each_request(own_server: Start, collector: Any):
    pytest.importorskip("opentelemetry.sdk")
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
    server = own_server(otlp_endpoint=endpoint).wait_ready()
    chat = {
        "messages": [{"role": "user", "content": "swordfish"}],
        "max_tokens": 5,
        "temperature": 0.5,
        "stream": True,
        "n": 2,
    }
    assert server.post("/v1/chat/completions", chat, headers={"traceparent": PARENT}).is_success
    assert server.post(
        "/v1/completions", {"prompt": "stop it here", "stop": "it", "max_tokens": 50}
    ).is_success
    assert server.post("/v1/completions", {"prompt": "FAIL THE STEP"}).status_code == 500
    assert (
        server.post("/v1/completions", {"prompt": ""}).status_code == 400
    )  # which is no request of the model
    with contextlib.suppress(httpx.ReadTimeout):
        endless = {"prompt": "on and on ", "max_tokens": 4000, "ignore_eos": True}
        server.post("/v1/completions", endless, timeout=httpx.Timeout(5, read=0.5))
    poll(lambda: len(spans(collector)) == 4, what="the spans")
    chatted, stopped, failed, left = spans(collector)
    assert (chatted["name"], chatted["trace"], chatted["parent"]) == (
        "chat echo",
        PARENT[3:35],
        PARENT[36:52],
    )
    assert chatted["gen_ai.request.model"] == "echo" and chatted["gen_ai.operation.name"] == "chat"
    assert (chatted["gen_ai.request.max_tokens"], chatted["gen_ai.request.temperature"]) == (5, 0.5)
    assert (chatted["gen_ai.request.choice.count"], chatted["gen_ai.usage.output_tokens"]) == (
        2,
        10,
    )
    assert chatted["gen_ai.usage.input_tokens"] > 9 and chatted[
        "gen_ai.response.finish_reasons"
    ] == ["length", "length"]
    assert 0 < chatted["gen_ai.latency.time_to_first_token"] < chatted["gen_ai.latency.e2e"]
    assert chatted["gen_ai.latency.e2e"] == pytest.approx(chatted["seconds"], abs=1e-6)
    parts = [
        chatted[f"gen_ai.latency.time_in_{part}"]
        for part in ("queue", "model_prefill", "model_decode")
    ]
    assert all(part >= 0 for part in parts) and sum(parts) < chatted["seconds"] and parts[2] > 0
    assert chatted["status"] == 0 and "error.type" not in chatted
    assert (stopped["name"], stopped["gen_ai.response.finish_reasons"], stopped["parent"]) == (
        "text_completion echo",
        ["stop"],
        "",
    )
    assert (failed["error.type"], failed["status"], left["error.type"], left["status"]) == (
        "engine_error",
        2,
        "cancelled",
        2,
    )
    assert 0 < left["gen_ai.usage.output_tokens"] < 4000
    assert server.stop() == 0
    assert not any(b"swordfish" in body or b"stop it" in body for _, body in collector.got)


def test_a_collector_that_is_gone_costs_spans_alone(own_server: Start):
    pytest.importorskip("opentelemetry.sdk")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it takes connections, and says nothing
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        server = own_server(otlp_endpoint=endpoint, drain_s=60.0).wait_ready()
        for _ in range(20):
            assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).is_success
        assert server.stop() == 0
    server = own_server(otlp_endpoint=endpoint).wait_ready()  # nobody is there any more
    assert server.post("/v1/completions", {"prompt": "hi"}).is_success
    poll(lambda: "does not take spans" in server.said(), 40)
    assert (
        server.post("/v1/completions", {"prompt": "hi"}).is_success
        and "Traceback" not in server.said()
    )
    assert server.stop() == 0


def test_traces_without_the_extra_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"counterpoint\[otel\]"):
        Tracing("http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        Config().replace(otlp_endpoint="localhost:4318")


# ---------------------------------------------------------------- logs


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
