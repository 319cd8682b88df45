"""From the timings of finished requests to one flat result.

Owns: the definition of every metric (docs/bench.md). CUDA, CPU, simulator and HTTP replay share it.
A failed request counts in every SLO share. What is undefined is None, never 0.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterpoint.stats import PolicyReport, Stats
from counterpoint.types import FinishReason, RequestTiming, Slo

PERCENTILES = (50, 90, 95, 99)
MAX_ERROR_KINDS = 10  # only the most frequent messages are counted
Z_95 = 1.959963984540054  # the 97.5 % point of the normal distribution


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayResult:
    """The outcome of a load; times are seconds since its start. `records`: every request sent,
    failed ones too. `errors`: messages by request id. `lag_s`: how late each request was sent.
    `before`, `after`: the engine's Stats, where available."""

    records: Sequence[RequestTiming]
    errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lag_s: Sequence[float] = ()
    before: Stats | None = None
    after: Stats | None = None
    notes: tuple[str, ...] = ()

    @property
    def pages_leaked(self) -> int | None:
        """Pages that were usable before the load but not after it, though all requests ended."""
        if self.before is None or self.after is None or not self.before.pages_total:
            return None
        free_before = self.before.pages_free + self.before.pages_cached
        return free_before - (self.after.pages_free + self.after.pages_cached)


class RequestLatency:
    """What the client of one completed request saw, in seconds.

    `ttft_s`: arrival to first token. `gaps_s`: between deliveries; tokens with one time are one
    delivery. `tpot_s`: (last token - first token) / (tokens - 1); None for one token. `e2e_s`:
    arrival to end.
    """

    __slots__ = ("e2e_s", "gaps_s", "tokens", "tpot_s", "ttft_s")

    def __init__(self, record: RequestTiming) -> None:
        times = np.asarray(record.token_s)
        self.tokens = len(times)
        self.ttft_s = float(times[0] - record.arrival_s) if len(times) else None
        gaps = np.diff(times)
        self.gaps_s: NDArray[np.float64] = gaps[gaps > 0]
        self.tpot_s = float((times[-1] - times[0]) / (len(times) - 1)) if len(times) > 1 else None
        self.e2e_s = record.finished_s - record.arrival_s

    @property
    def longest_gap_s(self) -> float | None:
        return float(self.gaps_s.max()) if len(self.gaps_s) else None

    def meets(self, slo: Slo) -> dict[str, bool]:
        """Which targets are met. A target on a value that a one-token reply does not have is
        met."""
        return {
            "ttft": slo.ttft_s is None or (self.ttft_s is not None and self.ttft_s <= slo.ttft_s),
            "tpot": slo.tpot_s is None or self.tpot_s is None or self.tpot_s <= slo.tpot_s,
            "itl": slo.itl_s is None
            or self.longest_gap_s is None
            or self.longest_gap_s <= slo.itl_s,
        }


def is_complete(record: RequestTiming) -> bool:
    return record.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def wilson_interval(hits: int, trials: int) -> tuple[float, float] | None:
    """The 95 % Wilson score interval of a share (Wilson, JASA 1927). None for no trials."""
    if trials == 0:
        return None
    share, spread = hits / trials, Z_95 * Z_95 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise(
    outcome: ReplayResult, slo: Slo | Mapping[str, Slo] = Slo(), detailed: bool = False
) -> dict[str, Any]:
    """One flat result of JSON values: the keys of `vllm bench serve`, and ours.

    `slo` is for all requests, or by request id. Counters are `after` minus `before`. `detailed`
    adds lists per request. The duration is from the first arrival to the last end.
    """
    records = outcome.records
    done = [r for r in records if is_complete(r)]
    latency = {r.id: RequestLatency(r) for r in done}
    duration_s = max((r.finished_s for r in records), default=0.0) - min(
        (r.arrival_s for r in records), default=0.0
    )
    result = _throughput(records, done, latency, duration_s)
    result |= _goodput(records, latency, slo, duration_s)
    values = list(latency.values())
    result |= _distribution("ttft", [v.ttft_s for v in values])
    result |= _distribution("tpot", [v.tpot_s for v in values])
    result |= _distribution("itl", np.concatenate([v.gaps_s for v in values]) if values else ())
    result |= _distribution("e2el", [v.e2e_s for v in values])
    result |= _distribution("longest_gap", [v.longest_gap_s for v in values])
    result |= _engine_counters(records, outcome.after, outcome.before)
    result |= _send_lag(outcome.lag_s)
    result["error_counts"] = dict(
        collections.Counter(outcome.errors.values()).most_common(MAX_ERROR_KINDS)
    )
    if detailed:
        result |= _per_request(records, outcome.errors)
    return result


def _throughput(
    records: Sequence[RequestTiming],
    done: Sequence[RequestTiming],
    latency: Mapping[str, RequestLatency],
    duration_s: float,
) -> dict[str, Any]:
    inputs, outputs = sum(r.prompt_tokens for r in done), sum(v.tokens for v in latency.values())
    return {
        "num_prompts": len(records),
        "completed": len(done),
        "failed": len(records) - len(done),
        "duration": duration_s,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _rate_per_s(len(done), duration_s),
        "output_throughput": _rate_per_s(outputs, duration_s),
        "total_token_throughput": _rate_per_s(inputs + outputs, duration_s),
        "max_output_tokens_per_s": _max_tokens_per_s(done),
        "max_concurrent_requests": _max_concurrency(records),
    }


def _goodput(
    records: Sequence[RequestTiming],
    latency: Mapping[str, RequestLatency],
    slo: Slo | Mapping[str, Slo],
    duration_s: float,
) -> dict[str, Any]:
    """Shares are of every request sent: a failed one meets no target."""
    met = {"ttft": 0, "tpot": 0, "itl": 0}
    good, targets = 0, 0
    for record in records:
        wanted = slo if isinstance(slo, Slo) else slo.get(record.id, Slo())
        targets += wanted != Slo()
        if record.id not in latency:
            continue
        on_time = latency[record.id].meets(wanted)
        good += all(on_time.values())
        for name, ok in on_time.items():
            met[name] += ok
    if not targets:
        return {"request_goodput": None, "slo_attainment": None, "slo_attainment_ci95": None}
    interval = wilson_interval(good, len(records))
    return {
        "request_goodput": _rate_per_s(good, duration_s),
        "slo_attainment": good / len(records),
        "slo_attainment_ci95": list(interval) if interval else None,
        **{f"slo_attainment_{name}": count / len(records) for name, count in met.items()},
    }


def _engine_counters(
    records: Sequence[RequestTiming], stats: Stats | None, before: Stats | None
) -> dict[str, Any]:
    """Cached prompt tokens, preemptions, splits and lanes over time, prediction errors."""
    ran = [r for r in records if is_complete(r)]
    prompts = sum(r.prompt_tokens for r in ran)
    result: dict[str, Any] = {
        "prefix_hit_share": sum(r.cached_tokens for r in ran) / prompts if prompts else None,
        "preemptions": sum(r.preemptions for r in records),
    }
    if stats is None:
        return result
    before = before or Stats()
    result["preemptions"] = stats.preemptions - before.preemptions
    result["overtakes"] = stats.overtakes - before.overtakes
    result["resplits"] = stats.resplits - before.resplits
    result |= _split_shares(stats, before)
    result |= _lane_shares(stats, before)
    result |= _prediction_counters(stats.policy, before.policy)
    return result


def _seconds_since(
    now: Sequence[tuple[Any, ...]], before: Sequence[tuple[Any, ...]]
) -> list[tuple[Any, ...]]:
    """Rows of (names ..., seconds) minus those of `before`, without empty rows."""
    earlier = {row[:-1]: row[-1] for row in before}
    spent = [(*row[:-1], row[-1] - earlier.get(row[:-1], 0.0)) for row in sorted(now)]
    return [row for row in spent if row[-1] > 0]


def _split_shares(stats: Stats, before: Stats) -> dict[str, Any]:
    """How long each split was in force, and the share of units with work while any step ran."""
    spent = _seconds_since(stats.split_s, before.split_s)
    total = sum(seconds for _, _, seconds in spent)
    both = sum(seconds for p, d, seconds in spent if p and d)
    active = stats.active_unit_s - before.active_unit_s
    result: dict[str, Any] = {
        "resplits_per_s": _rate_per_s(stats.resplits - before.resplits, total)
    }
    result["active_share"] = (
        min(1.0, active / (stats.units_total * total)) if active and total else None
    )
    result["split_share"] = [
        {
            "prefill_units": p,
            "decode_units": d,
            "seconds": seconds,
            "share": seconds / total if total else None,
            "share_while_both": seconds / both if p and d and both else None,
        }
        for p, d, seconds in spent
    ]
    return result


def _lane_shares(stats: Stats, before: Stats) -> dict[str, Any]:
    """The time of each lane by state, and of steps by the units they really ran on."""
    spent = _seconds_since(stats.lane_s, before.lane_s)
    total: collections.Counter[str] = collections.Counter()
    for role, _, seconds in spent:
        total[role] += seconds
    return {
        "lane_share": [
            {"lane": role, "state": what, "seconds": seconds, "share": seconds / total[role]}
            for role, what, seconds in spent
        ],
        "unit_seconds": [
            {"kind": kind, "units": asked, "realised_units": ran, "seconds": seconds}
            for kind, asked, ran, seconds in _seconds_since(stats.step_s, before.step_s)
        ],
    }


def time_with_requests_s(
    records: Iterable[RequestTiming], since_s: float = -math.inf, until_s: float = math.inf
) -> float:
    """How long at least one request was present, between two moments."""
    total_s, covered_s = 0.0, since_s
    for record in sorted(records, key=lambda r: r.arrival_s):
        ends_s = min(record.finished_s, until_s)
        total_s += max(0.0, ends_s - max(covered_s, record.arrival_s))
        covered_s = max(covered_s, ends_s)
    return total_s


def bubble_shares(
    engines: Iterable[tuple[str, Stats]], records: Sequence[RequestTiming]
) -> dict[str, float | None]:
    """The idle share of each engine, by name, and their mean as `all`.

    Idle are units without a step while any request is present anywhere, also on another worker.
    (Units that a step has but does not use are `active_share`.)
    """
    present_s = time_with_requests_s(records)
    idle: dict[str, float | None] = {}
    for name, stats in engines:
        used_s = sum(
            seconds * min(stats.units_total, prefill + decode)
            for prefill, decode, seconds in stats.split_s
        )
        idle[name] = max(0.0, 1 - used_s / (stats.units_total * present_s)) if present_s else None
    known = [share for share in idle.values() if share is not None]
    return idle | {"all": sum(known) / len(known) if known else None}


def _prediction_counters(report: PolicyReport, before: PolicyReport) -> dict[str, Any]:
    """Errors are of the latest steps, corrections are those at the end, counts are of this run."""
    return {
        "prediction_error": {
            kind: {"p50": median, "p95": high, "steps": steps}
            for kind, median, high, steps in report.errors
        },
        "prediction_cells": [
            {"cell": cell, "ratio": ratio, "guard": guard} for cell, ratio, guard in report.cells
        ],
        "decisions": _counts_since(report.decisions, before.decisions),
        "fallbacks": _counts_since(report.fallbacks, before.fallbacks),
    }


def _counts_since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {
        name: count - before.get(name, 0)
        for name, count in sorted(now.items())
        if count > before.get(name, 0)
    }


MAX_SEND_LAG_S = 0.05


def _send_lag(lag_s: Sequence[float]) -> dict[str, Any]:
    """Whether the load generator kept time: `degraded` if over 1 % of requests left over 50 ms
    late."""
    if not len(lag_s):
        return {}
    p50, p99 = np.percentile(lag_s, [50, 99])
    return {
        "p50_send_lag_ms": float(p50) * 1e3,
        "p99_send_lag_ms": float(p99) * 1e3,
        "max_send_lag_ms": float(max(lag_s)) * 1e3,
        "degraded": bool(p99 > MAX_SEND_LAG_S),
    }


def _per_request(records: Sequence[RequestTiming], errors: Mapping[str, str]) -> dict[str, Any]:
    """Lists with one entry per request, in the order of `records`; seconds."""
    latency = [RequestLatency(r) for r in records]
    return {
        "ids": [r.id for r in records],
        "start_times": [r.arrival_s for r in records],
        "input_lens": [r.prompt_tokens for r in records],
        "cached_lens": [r.cached_tokens for r in records],
        "output_lens": [v.tokens for v in latency],
        "ttfts": [v.ttft_s for v in latency],
        "itls": [v.gaps_s.tolist() for v in latency],
        "latencies": [v.e2e_s for v in latency],
        "finish_reasons": [str(r.finish_reason) for r in records],
        "errors": [errors.get(r.id, "") for r in records],
    }


def _distribution(name: str, seconds: Iterable[float | None]) -> dict[str, float | None]:
    """Mean, median, std (population), p50 ... p99 (linear interpolation) and max, in
    milliseconds."""
    ms = np.array([v for v in seconds if v is not None]) * 1e3
    keys = ["mean", "median", "std", *(f"p{p}" for p in PERCENTILES), "max"]
    if not len(ms):
        return {f"{key}_{name}_ms": None for key in keys}
    values = [ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, PERCENTILES), ms.max()]
    return {f"{key}_{name}_ms": float(value) for key, value in zip(keys, values, strict=True)}


def _rate_per_s(count: float, duration_s: float) -> float | None:
    return count / duration_s if duration_s > 0 else None


def _max_tokens_per_s(records: Sequence[RequestTiming]) -> float | None:
    """Most output tokens in one of the seconds counted from the first arrival."""
    if not records:
        return None
    start_s = min(r.arrival_s for r in records)
    times = np.concatenate([np.asarray(r.token_s) for r in records])
    return (
        float(np.unique(np.floor(times - start_s), return_counts=True)[1].max())
        if len(times)
        else None
    )


def _max_concurrency(records: Sequence[RequestTiming]) -> int:
    """Most requests between arrival and end at any instant. An end and an arrival at the same
    instant do not overlap."""
    edges = sorted([(r.arrival_s, 1) for r in records] + [(r.finished_s, -1) for r in records])
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most
