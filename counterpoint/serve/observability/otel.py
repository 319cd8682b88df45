"""Tracing: a span for each request, sent to an OpenTelemetry collector.

Owns: the spans' names and attributes: OpenTelemetry's GenAI conventions, and vLLM's
gen_ai.latency.* (seconds) for times that these do not name. Promises: a client's traceparent is
honoured; nothing waits for the collector: while it is gone, spans are lost, never requests.
Must not: send the content of a request or an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import counterpoint
from counterpoint.config import ConfigError
from counterpoint.serve.api.response_format import Json
from counterpoint.serve.text.preprocess import PreparedRequest
from counterpoint.types import AddRequest, RequestTiming

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

SEND_S = 5.0  # for one attempt, in a thread of its own
EVERY_S = 1.0  # between two batches
KEPT_SPANS = 4096  # waiting to be sent; later ones are lost
CLOSE_S = 2.0  # at exit, for the remaining spans
log = logging.getLogger("counterpoint")


class Tracing:
    """Raises ConfigError if OpenTelemetry is not installed."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(
                "otlp_endpoint needs OpenTelemetry, which is not installed:"
                " pip install 'counterpoint[otel]'"
            ) from None
        logging.getLogger("opentelemetry").setLevel("CRITICAL")  # Exporter logs what matters
        exporter = Exporter(
            OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=SEND_S), endpoint
        )
        about = {"service.name": "counterpoint", "service.version": counterpoint.__version__}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        batches = BatchSpanProcessor(
            exporter,  # type: ignore[arg-type]
            KEPT_SPANS,
            schedule_delay_millis=1000 * EVERY_S,
        )
        self._provider.add_span_processor(batches)
        self._tracer = self._provider.get_tracer("counterpoint", counterpoint.__version__)
        self._parents = TraceContextTextMapPropagator()
        # Of the engine requests of open spans.
        self._records: dict[str, RequestTiming | None] = {}

    def begin(
        self, ask: PreparedRequest, path: str, headers: Mapping[str, str], began_ns: int
    ) -> TracedRequest:
        """`began_ns`: the request's arrival, on the wall clock."""
        from opentelemetry.trace import SpanKind

        operation = "text_completion" if path.endswith("/v1/completions") else "chat"
        span = self._tracer.start_span(
            f"{operation} {ask.model}",
            self._parents.extract(
                {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
            ),
            SpanKind.SERVER,
            span_attributes(ask, operation),
            start_time=began_ns,
        )
        self._records.update((arrive.id, None) for arrive in ask.engine_requests)
        return TracedRequest(self, span, ask.engine_requests, began_ns)

    def observe(self, record: RequestTiming) -> None:
        if record.id in self._records:
            self._records[record.id] = record

    def pop_timings(self, arrives: Sequence[AddRequest]) -> list[RequestTiming]:
        """Removes and returns the timings of these requests that have come."""
        return [
            record
            for arrive in arrives
            if (record := self._records.pop(arrive.id, None)) is not None
        ]

    def close(self) -> None:
        """Send the remaining spans, for at most CLOSE_S."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(CLOSE_S)


class TracedRequest:
    """The span of one request, until `end`."""

    def __init__(
        self, tracing: Tracing, span: Span, arrives: Sequence[AddRequest], began_ns: int
    ) -> None:
        self._tracing = tracing
        self._span = span
        self._arrives = arrives
        self._began_ns = began_ns
        self._first_ns: int | None = None

    def token(self) -> None:
        """Called for each token."""
        if self._first_ns is None:
            self._first_ns = time.time_ns()

    def end(self, usage: Json, finishes: Sequence[str | None], error: str | None) -> None:
        """`finishes`: of each choice, None if it has not ended; `error`: a word for why the request
        failed."""
        from opentelemetry.trace import StatusCode

        span, end_ns = self._span, time.time_ns()
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage["prompt_tokens"],
                "gen_ai.usage.output_tokens": usage["completion_tokens"],
                "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"][
                    "cached_tokens"
                ],
                "gen_ai.response.finish_reasons": [finish for finish in finishes if finish],
                "gen_ai.latency.e2e": (end_ns - self._began_ns) / 1e9,
            }
        )
        if self._first_ns is not None:
            span.set_attribute(
                "gen_ai.latency.time_to_first_token", (self._first_ns - self._began_ns) / 1e9
            )
        span.set_attributes(engine_attributes(self._tracing.pop_timings(self._arrives)))
        if error is None and not all(finishes):
            error = "cancelled"
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(end_ns)


def span_attributes(ask: PreparedRequest, operation: str) -> dict[str, Any]:
    sampling = ask.engine_requests[0].sampling
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "counterpoint",
        "gen_ai.request.model": ask.model,
        "gen_ai.response.model": ask.model,
        "gen_ai.response.id": ask.id,
        "gen_ai.request.choice.count": len(ask.engine_requests),
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }


def engine_attributes(records: Sequence[RequestTiming]) -> dict[str, float]:
    """The longest times of all choices."""
    found: dict[str, float] = {}
    for record in records:
        if record.admitted_s is None or not record.token_s:
            continue
        times = {
            "gen_ai.latency.time_in_queue": record.admitted_s - record.arrival_s,
            "gen_ai.latency.time_in_model_prefill": record.token_s[0] - record.admitted_s,
            "gen_ai.latency.time_in_model_decode": record.token_s[-1] - record.token_s[0],
        }
        found = {name: max(seconds, found.get(name, 0.0)) for name, seconds in times.items()}
    return found


class Exporter:
    """OpenTelemetry's, with log entries when spans begin to be lost, and when they arrive again."""

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._lost = 0

    def export(self, spans: Sequence[Any]) -> Any:
        result = self._inner.export(spans)
        if result.name != "SUCCESS":
            if not self._lost:
                log.warning(
                    "the collector at %s does not take spans: they are lost", self._endpoint
                )
            self._lost += len(spans)
        elif self._lost:
            log.warning(
                "the collector at %s takes spans again, %d were lost", self._endpoint, self._lost
            )
            self._lost = 0
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)
