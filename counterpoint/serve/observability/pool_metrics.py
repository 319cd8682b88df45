"""Metrics of a pool: its workers one by one, and the handoffs between them.

Owns: names and buckets. Promises: a missing worker has `up` 0, so that an alert can be set on it;
counters of a worker start again with its process, as Prometheus expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from counterpoint.disagg.handoff_events import HandoffEnded, HandoffTimes
from counterpoint.disagg.load_tracker import LoadTracker
from counterpoint.serve.worker.wire import HandoffStats
from counterpoint.stats import Stats

TRANSFER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
PREFIX = "counterpoint_"


class WorkerState(NamedTuple):
    """`up`: it takes requests. `pid`: 0 while it is missing. `starts`: by this server."""

    name: str
    role: str
    up: bool
    pid: int
    starts: int
    stats: Stats
    handoff_stats: HandoffStats


class WorkerMetricSpec(NamedTuple):
    name: str
    help: str
    value: Callable[[WorkerState], float]


GAUGES = (
    WorkerMetricSpec("worker_up", "1 if the worker takes requests.", lambda w: w.up),
    WorkerMetricSpec(
        "worker_pid", "Its process on its machine; 0 while it is not there.", lambda w: w.pid
    ),
    WorkerMetricSpec(
        "worker_requests_running", "Requests that hold its pages.", lambda w: w.stats.running
    ),
    WorkerMetricSpec(
        "worker_requests_waiting", "Requests in its queue.", lambda w: w.stats.waiting
    ),
    WorkerMetricSpec(
        "worker_kv_pages_total", "Pages of its KV cache.", lambda w: w.stats.pages_total
    ),
    WorkerMetricSpec(
        "worker_kv_pages_free", "Of these, holding nothing.", lambda w: w.stats.pages_free
    ),
    WorkerMetricSpec(
        "worker_kv_pages_cached", "Of these, kept for their prefix.", lambda w: w.stats.pages_cached
    ),
)
COUNTERS = (
    WorkerMetricSpec("worker_starts", "Times that this server has started it.", lambda w: w.starts),
    WorkerMetricSpec(
        "worker_prompt_tokens", "Prompt tokens that it was given.", lambda w: w.stats.prompt_tokens
    ),
    WorkerMetricSpec(
        "worker_generated_tokens", "Tokens that it has sampled.", lambda w: w.stats.generated_tokens
    ),
    WorkerMetricSpec(
        "worker_preemptions",
        "Requests that it has put back into its queue.",
        lambda w: w.stats.preemptions,
    ),
    WorkerMetricSpec(
        "worker_handoff_strays",
        "Late or unknown messages that it has dropped.",
        lambda w: w.handoff_stats.unexpected,
    ),
    WorkerMetricSpec(
        "worker_handoff_sent_bytes",
        "KV that it has sent to others.",
        lambda w: w.handoff_stats.bytes_sent,
    ),
)


class TransferTimingSpec(NamedTuple):
    help: str
    value: Callable[[HandoffTimes], float]


TIMINGS = {
    "handoff_visible_seconds": TransferTimingSpec(
        "KV transfer that the prefill did not hide.", lambda t: t.visible_s
    ),
    "handoff_reserve_seconds": TransferTimingSpec(
        "Offer to the decode worker's pages.", lambda t: t.reserved_s - t.admitted_s
    ),
    "handoff_behind_seconds": TransferTimingSpec(
        "First token to adoption by the decode worker.", lambda t: t.adopted_s - t.prefilled_s
    ),
}


class PoolMetrics:
    """`routing` gives the load tracker, once there is one."""

    def __init__(
        self,
        worker_states: Callable[[], Sequence[WorkerState]],
        routing: Callable[[], LoadTracker | None],
    ) -> None:
        self.worker_states = worker_states
        self.routing = routing
        self.role_changes = 0
        self.handoffs_ended: Counter[tuple[str, str]] = Counter()
        self.histograms = {
            name: prometheus_client.Histogram(
                PREFIX + name, timing.help, buckets=TRANSFER_S, registry=None
            )
            for name, timing in TIMINGS.items()
        }

    def observe(self, ended: HandoffEnded) -> None:
        self.handoffs_ended[ended.disagg_role.value, ended.outcome.value] += 1
        if ended.times is not None:
            for name, timing in TIMINGS.items():
                self.histograms[name].observe(max(0.0, timing.value(ended.times)))

    def collect(self) -> Iterator[Metric]:
        workers = self.worker_states()
        for figure in GAUGES:
            gauge = GaugeMetricFamily(PREFIX + figure.name, figure.help, labels=["worker", "role"])
            for worker in workers:
                gauge.add_metric([worker.name, worker.role], figure.value(worker))
            yield gauge
        for figure in COUNTERS:
            counter = CounterMetricFamily(
                PREFIX + figure.name, figure.help, labels=["worker", "role"]
            )
            for worker in workers:
                counter.add_metric([worker.name, worker.role], figure.value(worker))
            yield counter
        yield from self._handoffs(workers)
        yield counter_family(
            "handoffs_ended",
            "Parts of handoffs, by how they ended.",
            ["part", "outcome"],
            self.handoffs_ended,
        )
        yield from self._choices(self.routing())
        yield counter_family(
            "role_changes", "Workers that were given another role.", [], {(): self.role_changes}
        )
        for histogram in self.histograms.values():
            for metric in histogram.collect():
                metric.samples = [
                    sample for sample in metric.samples if not sample.name.endswith("_created")
                ]
                yield metric

    def _choices(self, routing: LoadTracker | None) -> Iterator[Metric]:
        """Routes chosen, and the predictions they were chosen by."""
        chosen = routing.route_counts if routing is not None else {}
        yield counter_family(
            "routes",
            "Requests by the way that was chosen for them.",
            ["reason"],
            {(r,): n for r, n in chosen.items()},
        )
        if routing is None:
            return
        forecast, wires = routing.ttft_correction, routing.router.link_bandwidth
        about = "|predicted - actual| / actual of the latest times to first token."
        errors = {(str(quantile),): forecast.relative_error(quantile) for quantile in (0.5, 0.95)}
        yield gauge_family("route_ttft_error_ratio", about, ["quantile"], errors)
        yield counter_family(
            "route_ttft_predictions",
            "First tokens that were compared with their prediction.",
            [],
            {(): forecast.num_observed},
        )
        about = "What predicted times to first token are multiplied with, as learnt."
        yield gauge_family(
            "route_ttft_factor",
            about,
            ["worker"],
            {(worker,): factor for worker, factor in forecast.factors().items()},
        )
        about = "KV that a transfer between two workers can expect, as measured."
        speeds = {
            ends: carried.bytes_per_s
            for ends, carried in wires.links.items()
            if carried.is_reliable
        }
        yield gauge_family("link_bytes_per_second", about, ["source", "target"], speeds)

    def _handoffs(self, workers: Sequence[WorkerState]) -> Iterator[Metric]:
        about = (
            ("handoffs", "Handoffs under way, by state.", "state", lambda stats: stats.states),
            (
                "handoff_pages",
                "Pages that handoffs hold, by what for.",
                "hold",
                lambda stats: stats.pages,
            ),
            (
                "handoff_links",
                "Links to other workers, by what carries KV.",
                "transport",
                lambda stats: stats.links,
            ),
        )
        for name, help, label, parts in about:
            gauge = GaugeMetricFamily(PREFIX + name, help, labels=["worker", label])
            for worker in workers:
                for part, count in parts(worker.handoff_stats).items():
                    gauge.add_metric([worker.name, part], count)
            yield gauge


def counter_family(
    name: str, help: str, labels: list[str], counts: Mapping[tuple[str, ...], int]
) -> Metric:
    return fill_family(CounterMetricFamily(PREFIX + name, help, labels=labels), counts)


def gauge_family(
    name: str, help: str, labels: list[str], values: Mapping[tuple[str, ...], float]
) -> Metric:
    return fill_family(GaugeMetricFamily(PREFIX + name, help, labels=labels), values)


def fill_family(
    family: CounterMetricFamily | GaugeMetricFamily, samples: Mapping[tuple[str, ...], float]
) -> Metric:
    for labels, value in samples.items():
        family.add_metric(list(labels), value)
    return family
