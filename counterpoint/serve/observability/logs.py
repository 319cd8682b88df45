"""Logs: the two formats, and the line of each 10 s.

Promises: one line for each entry, in JSON if set, with its figures as fields; no query string, key
or content of a request. Must not: read a clock.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import msgspec

from counterpoint.serve.observability.rolling_stats import RollingStats
from counterpoint.stats import Stats

LONG_STEP_S = 10.0
MOST_SPLITS = 3
TEXT = "%(asctime)s %(levelname)-7s %(message)s"


def start_logging(level: str, format: str) -> None:
    logging.basicConfig(level=level.upper(), format=TEXT, datefmt="%H:%M:%S")
    if format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())
    for noisy in ("uvicorn.error", "httpx", "asyncio", "urllib3"):
        logging.getLogger(noisy).setLevel("INFO" if level == "debug" else "WARNING")


class JsonLines(logging.Formatter):
    """Time (UTC), level, message, and the fields given as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
        }
        line |= {"message": record.getMessage()} | vars(record).get("fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's work in an interval, and its state at the end. Shares are 0 to 1; `splits`: the
    share of the time for each "prefill+decode" units. Percentiles are of the last minute (None: no
    sample). `step_s`: age of the oldest step in flight."""

    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    running: int
    waiting: int
    kv_used: float
    prefix_hits: float
    splits: dict[str, float]
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    step_s: float

    def words(self) -> str:
        splits = ", ".join(f"{split} {share:.0%}" for split, share in self.splits.items())
        line = (
            f"prompt {self.prompt_tokens_per_s:.0f} tok/s, "
            f"generated {self.generated_tokens_per_s:.0f} tok/s; "
            f"running {self.running}, waiting {self.waiting}; "
            f"KV in use {self.kv_used:.0%}, prefix hits {self.prefix_hits:.0%}; "
            f"prefill+decode units: {splits or 'idle'}"
        )
        if self.ttft_p50_s is not None and self.ttft_p99_s is not None:
            line += f"; TTFT p50 {self.ttft_p50_s:.2g} s, p99 {self.ttft_p99_s:.2g} s"
        if self.itl_p50_s is not None and self.itl_p99_s is not None:
            line += f"; ITL p50 {1000 * self.itl_p50_s:.3g} ms, p99 {1000 * self.itl_p99_s:.3g} ms"
        return line + (
            f"; a step runs since {self.step_s:.0f} s" if self.step_s >= LONG_STEP_S else ""
        )

    def fields(self) -> dict[str, Any]:
        """Rounded to four digits."""
        whole = {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in msgspec.structs.asdict(self).items()
        }
        return whole | {"splits": {split: round(share, 4) for split, share in self.splits.items()}}


def has_activity(last: Stats, stats: Stats) -> bool:
    """Whether anything ran since `last`."""
    return bool(stats.running or stats.waiting or stats.steps != last.steps)


def load_between(
    last: Stats, stats: Stats, seconds: float, pulse: RollingStats, now_s: float
) -> LoadSummary:
    queried = stats.prefix_queries_tokens - last.prefix_queries_tokens
    most = sorted(
        (
            (s, split)
            for split, s in step_time_between(last, stats, seconds, now_s).items()
            if s > 0
        ),
        reverse=True,
    )
    ttft, itl = pulse.ttft.percentiles(now_s), pulse.itl.percentiles(now_s)
    return LoadSummary(
        prompt_tokens_per_s=(stats.prompt_tokens - last.prompt_tokens) / seconds,
        generated_tokens_per_s=(stats.generated_tokens - last.generated_tokens) / seconds,
        running=stats.running,
        waiting=stats.waiting,
        kv_used=1 - (stats.pages_free + stats.pages_cached) / stats.pages_total
        if stats.pages_total
        else 0.0,
        prefix_hits=(stats.prefix_hits_tokens - last.prefix_hits_tokens) / queried
        if queried
        else 0.0,
        splits={f"{p}+{d}": s / seconds for s, (p, d) in most[:MOST_SPLITS]},
        ttft_p50_s=ttft[0] if ttft else None,
        ttft_p99_s=ttft[-1] if ttft else None,
        itl_p50_s=itl[0] if itl else None,
        itl_p99_s=itl[-1] if itl else None,
        step_s=max((now_s - step.started_s for step in stats.running_steps), default=0.0),
    )


def step_time_between(
    last: Stats, stats: Stats, seconds: float, now_s: float
) -> dict[tuple[int, int], float]:
    """Seconds that each (prefill, decode) units were in force. The engine counts them when a step
    ends, so the time of running steps is added."""
    before = {(prefill, decode): spent for prefill, decode, spent in last.split_s}
    spent = {(p, d): s - before.get((p, d), 0.0) for p, d, s in stats.split_s}
    if stats.running_steps:
        split = (
            max((step.units for step in stats.running_steps if step.prefill_tokens), default=0),
            max((step.units for step in stats.running_steps if step.decode_batch), default=0),
        )
        uncounted_s = min(
            now_s - max(step.started_s for step in stats.running_steps),
            seconds - sum(spent.values()),
        )
        spent[split] = spent.get(split, 0.0) + max(0.0, uncounted_s)
    return spent
