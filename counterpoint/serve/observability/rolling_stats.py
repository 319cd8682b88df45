"""RollingStats: latencies and rates of the last minute, counted as tokens come.

Owns: rolling percentiles and rates, and the newest steps. Promises: a few operations a token;
memory that does not grow with the load; percentiles right to within 3 %.
Must not: keep a request's content.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from counterpoint.serve.worker.wire import EngineOutputs
from counterpoint.stats import LaneStep, Stats
from counterpoint.types import AddRequest, OutputDelta

WINDOW_S = 60
# Windows of the rates. A prompt counts in full when it is admitted, so its window is longer.
WRITTEN_S, PROMPTS_S = 5.0, 30.0
KEPT_STEPS = 512
SHARES = (0.5, 0.9, 0.99)
LEAST_S, RATIO = 1e-5, 1.05  # the first bucket, and the ratio of two neighbours


class Window:
    """Durations of the last WINDOW_S seconds, a histogram for each second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counter[int]]] = deque()
        self._total: Counter[int] = Counter()

    def add(self, now_s: float, duration_s: float) -> None:
        second = int(now_s)
        if not self._seconds or self._seconds[-1][0] < second:
            self._expire(now_s)
            self._seconds.append((second, Counter()))
        bucket = math.floor(math.log(max(duration_s, LEAST_S) / LEAST_S, RATIO))
        self._seconds[-1][1][bucket] += 1
        self._total[bucket] += 1

    def percentiles(self, now_s: float) -> list[float] | None:
        """The durations that SHARES of all do not exceed, in seconds; None if there are none."""
        self._expire(now_s)
        count = self._total.total()
        if not count:
            return None
        found: list[float] = []
        below = 0
        for bucket in sorted(self._total):
            below += self._total[bucket]
            while len(found) < len(SHARES) and below >= SHARES[len(found)] * count:
                found.append(LEAST_S * RATIO ** (bucket + 0.5))
        return found

    def _expire(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] <= now_s - WINDOW_S:
            self._total -= self._seconds.popleft()[1]  # which also forgets what falls to 0


class StatsSample(NamedTuple):
    """The engine's counters at one time: fields of Stats, and PolicyReport.fallbacks."""

    at_s: float
    prompt: int
    generated: int
    queries: int
    hits: int
    lane_s: tuple[tuple[str, str, float], ...] = ()
    split_s: tuple[tuple[int, int, float], ...] = ()
    active_unit_s: float = 0.0
    units: int = 0
    resplits: int = 0
    fallbacks: Mapping[str, int] = MappingProxyType({})


class RollingStats:
    """An OutputListener. Times are on the machine's monotonic clock."""

    def __init__(self) -> None:
        self.ttft = Window()
        self.itl = Window()
        self.steps: deque[LaneStep] = deque(maxlen=KEPT_STEPS)  # up to number `last_step`
        self.last_step = 0
        self._counts: deque[StatsSample] = deque(
            [StatsSample(time.monotonic(), 0, 0, 0, 0)], maxlen=WINDOW_S + 1
        )  # one a second
        self._now = self._counts[0]
        # Of each request, since when its next token is due, and where that counts.
        self._last_s: dict[str, tuple[float, Window]] = {}

    # ------------------------------------------------------------ streams.OutputListener

    def on_requests(self, arrives: Sequence[AddRequest]) -> None:
        now_s = time.monotonic()
        self._last_s.update((arrive.id, (now_s, self.ttft)) for arrive in arrives)

    def on_outputs(self, outputs: EngineOutputs) -> None:
        for item in outputs.items:
            if isinstance(item, OutputDelta):
                self._delta(outputs.now_s, item)
        if outputs.stats is not None:
            self._stats(outputs.now_s, outputs.stats)

    def _delta(self, now_s: float, delta: OutputDelta) -> None:
        if delta.tokens and (due := self._last_s.get(delta.id)) is not None:
            since_s, window = due
            window.add(now_s, now_s - since_s)
            self._last_s[delta.id] = (now_s, self.itl)
        if delta.finish_reason is not None:
            self._last_s.pop(delta.id, None)

    def _stats(self, now_s: float, stats: Stats) -> None:
        fresh = min(stats.steps - self.last_step, len(stats.recent_steps))
        self.steps.extend(stats.recent_steps[len(stats.recent_steps) - fresh :])
        self.last_step = stats.steps
        self._now = StatsSample(
            now_s,
            stats.prompt_tokens,
            stats.generated_tokens,
            stats.prefix_queries_tokens,
            stats.prefix_hits_tokens,
            stats.lane_s,
            stats.split_s,
            stats.active_unit_s,
            stats.units_total,
            stats.resplits,
            stats.policy.fallbacks,
        )
        if now_s - self._counts[-1].at_s >= 1:
            self._counts.append(self._now)

    # ------------------------------------------------------------ figures

    def rates(self, now_s: float) -> tuple[float, float]:
        """Prompt tokens a second over PROMPTS_S, generated tokens a second over WRITTEN_S."""
        prompts, written = self._since(now_s - PROMPTS_S - 1), self._since(now_s - WRITTEN_S - 1)
        return (
            (self._now.prompt - prompts.prompt) / max(1.0, now_s - prompts.at_s),
            (self._now.generated - written.generated) / max(1.0, now_s - written.at_s),
        )

    def _since(self, at_s: float) -> StatsSample:
        """The oldest sample that is not older than `at_s`."""
        return next((counts for counts in self._counts if counts.at_s >= at_s), self._now)

    def hit_rate(self, now_s: float) -> float | None:
        """Prefix cache hit rate over WINDOW_S; None: nothing was looked up."""
        before = self._since(now_s - WINDOW_S)
        queries = self._now.queries - before.queries
        return (self._now.hits - before.hits) / queries if queries else None

    def lanes(self, now_s: float) -> dict[str, dict[str, float]]:
        """By role: share of the lanes' time in WINDOW_S (0 to 1) by activity, largest first."""
        before = {
            (role, what): seconds for role, what, seconds in self._since(now_s - WINDOW_S).lane_s
        }
        spent: dict[str, dict[str, float]] = {}
        for role, what, seconds in self._now.lane_s:
            spent.setdefault(role, {})[what] = max(0.0, seconds - before.get((role, what), 0.0))
        shares: dict[str, dict[str, float]] = {}
        for role, parts in spent.items():
            whole_s = sum(parts.values())
            ordered = sorted(parts.items(), key=lambda part: -part[1])
            shares[role] = {
                what: round(seconds / whole_s, 3) for what, seconds in ordered if seconds > 0
            }
        return shares

    def splits(self, now_s: float) -> list[tuple[int, int, float]]:
        """(prefill units, decode units, share of the time in WINDOW_S in which both phases ran),
        longest first."""
        both = [
            (prefill, decode, seconds)
            for prefill, decode, seconds in self._active_lanes(now_s)
            if prefill and decode
        ]
        whole_s = sum(seconds for _, _, seconds in both)
        return [
            (p, d, round(seconds / whole_s, 3))
            for p, d, seconds in sorted(both, key=lambda row: -row[2])
        ]

    def active_share(self, now_s: float) -> float | None:
        """Share of the units that had work while anything ran in WINDOW_S; None: not known."""
        ran_s = sum(seconds for _, _, seconds in self._active_lanes(now_s))
        active = self._now.active_unit_s - self._since(now_s - WINDOW_S).active_unit_s
        return min(1.0, active / (ran_s * self._now.units)) if active > 0 and ran_s else None

    def resplit_rate(self, now_s: float) -> float:
        """Re-splits a second, over WINDOW_S."""
        before = self._since(now_s - WINDOW_S)
        return (self._now.resplits - before.resplits) / max(1.0, now_s - before.at_s)

    def fallbacks(self, now_s: float) -> dict[str, int]:
        """Counts of reasons why the device was not split in WINDOW_S while both phases had work,
        most frequent first."""
        before = self._since(now_s - WINDOW_S).fallbacks
        counts = Counter(
            {reason: count - before.get(reason, 0) for reason, count in self._now.fallbacks.items()}
        )
        return {reason: count for reason, count in counts.most_common() if count > 0}

    def _active_lanes(self, now_s: float) -> list[tuple[int, int, float]]:
        """Seconds of each split in WINDOW_S, as in Stats."""
        before = {
            (prefill, decode): seconds
            for prefill, decode, seconds in self._since(now_s - WINDOW_S).split_s
        }
        rows = [(p, d, seconds - before.get((p, d), 0.0)) for p, d, seconds in self._now.split_s]
        return [row for row in rows if row[2] > 0]
