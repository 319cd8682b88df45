"""Traces: a span for each request, at a collector."""

from __future__ import annotations

import contextlib
import http.server
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from serve_process import Running, poll

from counterpoint.config import Config, ConfigError
from counterpoint.serve.observability.otel import Tracing

Start = Callable[..., Running]
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


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
