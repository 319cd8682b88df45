"""Prometheus metrics, from the engine's Stats and the RequestTiming of finished requests.

Owns: their registry. Promises: one registry in one process, so that no gauge is lost; what
dashboards made for vLLM query is also there under vLLM's names, with the same meaning.
Must not: read a clock, or touch a request.
"""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from counterpoint.serve.api.limits import AdmissionQueue
from counterpoint.serve.observability.metric_specs import COUNTERS, DISTRIBUTIONS, GAUGES
from counterpoint.serve.observability.pool_metrics import PoolMetrics
from counterpoint.serve.worker.wire import EngineInfo
from counterpoint.stats import Stats
from counterpoint.types import FinishReason, RequestTiming


class Metrics(Collector):
    """The server sets `stats`, `engine_info`, `queue` and `pool`."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.stats = Stats()
        self.engine_info: EngineInfo | None = None
        self.queue = AdmissionQueue()
        self.pool: PoolMetrics | None = None
        self.finished = dict.fromkeys(FinishReason, 0)
        # Ids that a stop string ended: the engine counts them as aborted.
        self.cut_short: set[str] = set()
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
        """Each finished request."""
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

    # ------------------------------------------------------------ prometheus_client's Collector

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
        yield from self._requests()
        yield self._split()
        yield from self._lanes()
        yield from self._policy()
        for name, histogram in self.histograms.items():
            yield from self._histogram(name, histogram)
        if self.pool is not None:
            yield from self.pool.collect()
        if self.engine_info is not None:
            yield from self._info(self.engine_info)

    def _requests(self) -> Iterator[Metric]:
        """How requests ended, waited and were refused."""
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
            help = (
                f"Without a first token, by the HTTP process's count: {what}, "
                f"which --max-queued-{what} limits."
            )
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

    def _info(self, engine: EngineInfo) -> Iterator[Metric]:
        words = {
            "model_name": self.model,
            "policy": engine.policy,
            "lanes": engine.lanes,
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
            "What each lane did: busy, launch (a step is in flight, not begun), "
            "or why it had none: nothing (to do), fused (another lane runs its phase), "
            "units (others hold them), policy (held back), memory (requests wait for pages).",
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
