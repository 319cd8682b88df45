"""Prometheus metrics, from the engine's Stats and the Records of finished requests.

Owns: names, units, buckets. Promises: one registry in one process, so that no gauge is lost; figures that dashboards made for vLLM
query are also there under vLLM's names, present and older, with the same meaning; docs/metrics.md has every name.
Must not: keep a clock, or touch a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from counterpoint.serve.api.limits import AdmissionQueue
from counterpoint.serve.observability.pool_metrics import PoolMetrics
from counterpoint.serve.worker.wire import EngineInfo
from counterpoint.stats import Stats
from counterpoint.types import FinishReason, RequestTiming

TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL_S = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    40,
)
LATENCY_S = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
TOKENS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
)
COUNTS = (0, 1, 2, 3, 5, 10)


class MetricSpec(NamedTuple):
    """`vllm`: the names after `vllm:`, the present one first; "" if it has none there."""

    name: str
    vllm: str
    help: str
    value: Callable[[Stats], float]


def used_pages(stats: Stats) -> int:
    return stats.pages_total - stats.pages_free - stats.pages_cached


GAUGES = (
    MetricSpec(
        "requests_running", "num_requests_running", "Requests that hold pages.", lambda s: s.running
    ),
    MetricSpec(
        "requests_waiting", "num_requests_waiting", "Requests in the queue.", lambda s: s.waiting
    ),
    MetricSpec(
        "kv_pages_total",
        "",
        "Pages of the KV cache: free, cached and in use.",
        lambda s: s.pages_total,
    ),
    MetricSpec("kv_pages_free", "", "Pages that hold nothing.", lambda s: s.pages_free),
    MetricSpec(
        "kv_pages_cached",
        "",
        "Pages kept for their prefix, which may be taken.",
        lambda s: s.pages_cached,
    ),
    MetricSpec("kv_page_tokens", "", "Tokens in a page.", lambda s: s.page_tokens),
    MetricSpec(
        "kv_usage_ratio",
        "kv_cache_usage_perc gpu_cache_usage_perc",
        "Share of the pages in use, 0 to 1.",
        lambda s: used_pages(s) / s.pages_total if s.pages_total else 0.0,
    ),
    MetricSpec("units", "", "Units of the device (SMs, cores).", lambda s: s.units_total),
)
COUNTERS = (
    MetricSpec(
        "prompt_tokens",
        "prompt_tokens",
        "Prompt tokens of admitted requests.",
        lambda s: s.prompt_tokens,
    ),
    MetricSpec(
        "generated_tokens", "generation_tokens", "Tokens sampled.", lambda s: s.generated_tokens
    ),
    MetricSpec(
        "prefix_queries_tokens",
        "prefix_cache_queries",
        "Tokens looked up as prefix.",
        lambda s: s.prefix_queries_tokens,
    ),
    MetricSpec(
        "prefix_hits_tokens",
        "prefix_cache_hits",
        "Tokens found as prefix.",
        lambda s: s.prefix_hits_tokens,
    ),
    MetricSpec(
        "preemptions",
        "num_preemptions",
        "Requests put back into the queue.",
        lambda s: s.preemptions,
    ),
    MetricSpec("steps", "", "Steps that have come back from the device.", lambda s: s.steps),
    MetricSpec("resplits", "", "Changes of the split between the lanes.", lambda s: s.resplits),
    MetricSpec(
        "overtakes",
        "",
        "Prefills put aside between two layer groups for a shorter one.",
        lambda s: s.overtakes,
    ),
    MetricSpec(
        "active_unit_seconds",
        "",
        "Units with work x seconds: by count of tiles (cost_model/active_units.py), not by a profiler; 0 where the device is not known.",
        lambda s: s.active_unit_s,
    ),
)


class HistogramSpec(NamedTuple):
    vllm: str
    help: str
    buckets: tuple[float, ...]


DISTRIBUTIONS = {
    "time_to_first_token_seconds": HistogramSpec(
        "time_to_first_token_seconds", "Arrival to first token.", TTFT_S
    ),
    "inter_token_latency_seconds": HistogramSpec(
        "inter_token_latency_seconds time_per_output_token_seconds",
        "Between two tokens of a request.",
        ITL_S,
    ),
    "time_per_output_token_seconds": HistogramSpec(
        "request_time_per_output_token_seconds",
        "Mean time per token after the first, of a request.",
        ITL_S,
    ),
    "request_latency_seconds": HistogramSpec(
        "e2e_request_latency_seconds", "Arrival to the end.", LATENCY_S
    ),
    "request_queue_seconds": HistogramSpec(
        "request_queue_time_seconds", "Arrival to admission.", LATENCY_S
    ),
    "request_prefill_seconds": HistogramSpec(
        "request_prefill_time_seconds", "Admission to first token.", LATENCY_S
    ),
    "request_inference_seconds": HistogramSpec(
        "request_inference_time_seconds", "Admission to the end.", LATENCY_S
    ),
    "request_decode_seconds": HistogramSpec(
        "request_decode_time_seconds", "First to last token.", LATENCY_S
    ),
    "request_prompt_tokens": HistogramSpec("request_prompt_tokens", "Tokens of a prompt.", TOKENS),
    "request_generated_tokens": HistogramSpec(
        "request_generation_tokens", "Tokens of an answer.", TOKENS
    ),
    "request_preemptions": HistogramSpec(
        "request_num_preemptions", "Preemptions of a request.", COUNTS
    ),
}


class Metrics(Collector):
    """`stats`, `hello`, `queue` and `pool` are set by the server; `observe` takes each finished request."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.stats = Stats()
        self.engine_info: EngineInfo | None = None
        self.queue = AdmissionQueue()
        self.pool: PoolMetrics | None = None
        self.finished = dict.fromkeys(FinishReason, 0)
        self.cut_short: set[str] = (
            set()
        )  # ids that a stop string ended: to the engine they are aborted
        self.histograms = {
            name: prometheus_client.Histogram(
                name, about.help, buckets=about.buckets, registry=None
            )
            for name, about in DISTRIBUTIONS.items()
        }
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return prometheus_client.generate_latest(self._registry)

    def observe(self, record: RequestTiming) -> None:
        self.finished[
            FinishReason.STOP if record.id in self.cut_short else record.finish_reason
        ] += 1
        self.cut_short.discard(record.id)
        seen: dict[str, float] = {
            "request_prompt_tokens": record.prompt_tokens,
            "request_preemptions": record.preemptions,
        }
        if record.admitted_s is not None:
            seen["request_queue_seconds"] = record.admitted_s - record.arrival_s
        if record.token_s:
            first_s, last_s, tokens = record.token_s[0], record.token_s[-1], len(record.token_s)
            seen["time_to_first_token_seconds"] = first_s - record.arrival_s
            seen["request_latency_seconds"] = record.finished_s - record.arrival_s
            seen["request_decode_seconds"] = last_s - first_s
            seen["request_generated_tokens"] = tokens
            if record.admitted_s is not None:
                seen["request_prefill_seconds"] = first_s - record.admitted_s
                seen["request_inference_seconds"] = record.finished_s - record.admitted_s
            if tokens > 1:
                seen["time_per_output_token_seconds"] = (last_s - first_s) / (tokens - 1)
        for name, value in seen.items():
            self.histograms[name].observe(value)
        for before_s, after_s in zip(record.token_s, record.token_s[1:], strict=False):
            self.histograms["inter_token_latency_seconds"].observe(after_s - before_s)

    # ------------------------------------------------------------ what prometheus_client asks for

    def collect(self) -> Iterator[Metric]:
        for figure in GAUGES:
            for name, labels in self._names(figure.name, figure.vllm):
                gauge = GaugeMetricFamily(name, figure.help, labels=list(labels))
                gauge.add_metric(list(labels.values()), figure.value(self.stats))
                yield gauge
        for figure in COUNTERS:
            for name, labels in self._names(figure.name, figure.vllm):
                counter = CounterMetricFamily(name, figure.help, labels=list(labels))
                counter.add_metric(list(labels.values()), figure.value(self.stats))
                yield counter
        for name, labels in self._names("requests_finished", "request_success"):
            counter = CounterMetricFamily(
                name, "Finished requests, by reason.", labels=[*labels, "finished_reason"]
            )
            for reason, count in self.finished.items():
                counter.add_metric([*labels.values(), reason], count)
            yield counter
        for what, count in (
            ("requests", self.queue.queued_requests),
            ("tokens", self.queue.queued_tokens),
        ):
            help = f"Without a first token, by the HTTP process's count: {what}, which --max-queued-{what} limits."
            gauge = GaugeMetricFamily(f"counterpoint_queued_{what}", help, labels=["model_name"])
            gauge.add_metric([self.model], count)
            yield gauge
        for name, labels in self._names("requests_refused", "admission_rejections"):
            refused = CounterMetricFamily(
                name,
                "Requests answered 503 as too much waited, by reason.",
                labels=[*labels, "reason"],
            )
            for reason, count in self.queue.rejected.items():
                refused.add_metric([*labels.values(), reason], count)
            yield refused
        yield self._split()
        yield from self._lanes()
        yield from self._policy()
        for name, histogram in self.histograms.items():
            yield from self._histogram(name, histogram)
        if self.pool is not None:
            yield from self.pool.collect()
        if self.engine_info is not None:
            words = {
                "model_name": self.model,
                "policy": self.engine_info.policy,
                "lanes": self.engine_info.lanes,
            }
            info = GaugeMetricFamily(
                "counterpoint_info", "What serves, in words; always 1.", labels=list(words)
            )
            info.add_metric(list(words.values()), 1)
            yield info
            pages = {
                "engine": "0",
                "block_size": str(self.stats.page_tokens),
                "num_gpu_blocks": str(self.stats.pages_total),
            }
            cache = GaugeMetricFamily(
                "vllm:cache_config_info", "The KV cache, in words; always 1.", labels=list(pages)
            )
            cache.add_metric(list(pages.values()), 1)
            yield cache

    def _split(self) -> Metric:
        split = CounterMetricFamily(
            "counterpoint_split_seconds",
            "Time in which so many units ran prefill and decode; 0: that side had nothing to do.",
            labels=["model_name", "prefill_units", "decode_units"],
        )
        for prefill, decode, seconds in self.stats.split_s:
            split.add_metric([self.model, str(prefill), str(decode)], seconds)
        return split

    def _lanes(self) -> Iterator[Metric]:
        lanes = CounterMetricFamily(
            "counterpoint_lane_seconds",
            "What each lane did: busy, launch (a step is in flight, not begun), or why it had none: nothing (to do), fused "
            "(another lane runs its phase), units (others hold them), policy (held back), memory (requests wait for pages).",
            labels=["model_name", "lane", "state"],
        )
        for role, what, seconds in self.stats.lane_s:
            lanes.add_metric([self.model, role, what], seconds)
        yield lanes
        steps = CounterMetricFamily(
            "counterpoint_step_seconds",
            "Time steps took on the device, by kind, units asked for and units they ran on.",
            labels=["model_name", "kind", "units", "realised_units"],
        )
        for kind, asked, ran, seconds in self.stats.step_s:
            steps.add_metric([self.model, kind, str(asked), str(ran)], seconds)
        yield steps

    def _policy(self) -> Iterator[Metric]:
        report = self.stats.policy
        errors = GaugeMetricFamily(
            "counterpoint_prediction_error_ratio",
            "|predicted - actual| / actual of the latest steps' durations.",
            labels=["model_name", "kind", "quantile"],
        )
        seen = GaugeMetricFamily(
            "counterpoint_prediction_steps", "Over how many steps.", labels=["model_name", "kind"]
        )
        for kind, median, high, steps in report.errors:
            errors.add_metric([self.model, kind, "0.5"], median)
            errors.add_metric([self.model, kind, "0.95"], high)
            seen.add_metric([self.model, kind], steps)
        ratio = GaugeMetricFamily(
            "counterpoint_prediction_ratio",
            "Mean of actual over predicted.",
            labels=["model_name", "cell"],
        )
        guard = GaugeMetricFamily(
            "counterpoint_prediction_guard",
            "Factor on top, for slow steps.",
            labels=["model_name", "cell"],
        )
        for cell, mean, high in report.cells:
            ratio.add_metric([self.model, cell], mean)
            guard.add_metric([self.model, cell], high)
        yield from (errors, seen, ratio, guard)
        for name, label, help, counts in (
            ("decisions", "decision", "What the policy decided.", report.decisions),
            (
                "fallbacks",
                "reason",
                "Why the device was not split while both phases had work.",
                report.fallbacks,
            ),
        ):
            counter = CounterMetricFamily(
                f"counterpoint_{name}", help, labels=["model_name", label]
            )
            for key, count in counts.items():
                counter.add_metric([self.model, key], count)
            yield counter

    def _histogram(self, name: str, histogram: prometheus_client.Histogram) -> Iterator[Metric]:
        (known,) = histogram.collect()
        for family, labels in self._names(name, DISTRIBUTIONS[name].vllm):
            metric = Metric(family, known.documentation, "histogram")
            for sample in known.samples:
                suffix = sample.name.removeprefix(name)
                if suffix != "_created":
                    metric.add_sample(family + suffix, {**labels, **sample.labels}, sample.value)
            yield metric

    def _names(self, name: str, vllm: str) -> Iterator[tuple[str, dict[str, str]]]:
        yield f"counterpoint_{name}", {"model_name": self.model}
        for theirs in vllm.split():
            yield f"vllm:{theirs}", {"model_name": self.model, "engine": "0"}
