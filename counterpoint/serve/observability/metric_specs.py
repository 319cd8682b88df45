"""The server's metrics as tables: names, vLLM's names, help texts and buckets.

Owns: these tables; docs/metrics.md has every name. Must not: hold a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from counterpoint.stats import Stats

TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
ITL_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1, 2.5, 5, 10, 40,
)  # fmt: skip
LATENCY_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
    1920, 7680,
)  # fmt: skip
TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
    200_000,
)  # fmt: skip
COUNTS = (0, 1, 2, 3, 5, 10)


class MetricSpec(NamedTuple):
    """`vllm`: vLLM's names without `vllm:`, the present one first; "" if it has none."""

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
        "Units with work x seconds: by count of tiles (cost_model/active_units.py), "
        "not by a profiler; 0 where the device is not known.",
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
