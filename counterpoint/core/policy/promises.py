"""Promises: what has been promised to each request, and what that asks of the next steps.

Owns: targets, due times, urgency, slack. Promises: answers follow from the requests, the time and the belief alone.
Must not: decide anything.

A target is the request's own (`slo`), else the configured one, else one that suits the device. The time to first token may grow
with the prompt. Slack: a decode that is ahead of its time per token may wait, within its longest gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from counterpoint.config import SchedulerConfig
from counterpoint.core.policy.belief import Belief
from counterpoint.core.request import Request
from counterpoint.core.state import Answers
from counterpoint.types import Slo, Work

LONGEST_GAP = 4.0  # in times the target per token, where no longest gap is asked for
PATIENCE = 8.0  # in targets: a prompt that has waited so long goes first, and nobody overtakes it
LATELY_S = 4.0  # time after which load has faded to a third
LONG = 64  # tokens of an answer over which steps with and without prefill even out
LOOK_AHEAD = 64  # waiting requests that are thought of


class Targets(NamedTuple):
    tpot_s: float
    itl_s: float


class Limits(NamedTuple):
    """Of decode steps. `mean_s`: the target per token; more if every request is ahead of it, less if one is behind, so that it has
    caught up before its answer is likely to end. `gap_s`: the longest gap. `evens_out`: how far (0 to 1) the mean is what
    counts, as answers are long; that of a short one hangs on a few steps."""

    mean_s: float
    gap_s: float
    evens_out: float


class Promises:
    def __init__(self, scheduler: SchedulerConfig, belief: Belief, units: int, layers: int) -> None:
        self.scheduler = scheduler
        self.belief = belief
        self.units = units
        self.layers = layers
        self._by_slo: dict[Slo, Targets] = {}
        self._prompt_s: dict[tuple[int, int], float] = {}
        self._version = 0
        self.rate = math.inf  # prompt tokens per second, and seconds per step, of the option in force
        self.step_s = 0.0
        self._load_tokens = 0.0  # prompt tokens computed lately, and over how many seconds, both fading
        self._load_span_s = 0.0
        self._load_at_s = 0.0

    def prefilled(self, tokens: float, now: float) -> None:
        """So many prompt tokens have been computed until `now`."""
        faded = math.exp((self._load_at_s - now) / LATELY_S)
        self._load_tokens = self._load_tokens * faded + tokens
        self._load_span_s = self._load_span_s * faded + (now - self._load_at_s)
        self._load_at_s = now

    def busy_share(self, rate: float) -> float:
        """Share of the time in which prefill at `rate` tokens per second would be under way, by the load of the last seconds."""
        span_s = max(self._load_span_s, LATELY_S / 4)
        return min(1.0, self._load_tokens / span_s / rate)

    def pace(self, rate: float, step_s: float) -> None:
        """From here on prompts go at `rate` tokens per second, and an edge comes every `step_s`."""
        self.rate, self.step_s = rate, step_s

    # ------------------------------------------------------------ of one request

    def targets(self, slo: Slo) -> Targets:
        known = self._by_slo.get(slo)
        if known is None:
            scheduler = self.scheduler
            usual_s = scheduler.tpot_s or max(0.025, 3 * self._tempo_s())
            tpot_s = slo.tpot_s or usual_s
            usual_gap_s = LONGEST_GAP * tpot_s if slo.tpot_s or not scheduler.itl_s else scheduler.itl_s
            known = Targets(tpot_s, slo.itl_s or usual_gap_s)
            if len(self._by_slo) < 1024:
                self._by_slo[slo] = known
        return known

    def ttft_s(self, request: Request) -> float:
        scheduler = self.scheduler
        target_s = request.arrive.slo.ttft_s or scheduler.ttft_s
        if target_s is None:
            target_s = max(1.0, 10 * self.prompt_s(request))
        return max(target_s, (scheduler.ttft_per_token_s or 0.0) * len(request.arrive.prompt))

    def due(self, request: Request) -> float:
        """When its first token is due."""
        return request.arrival_s + self.ttft_s(request)

    def impatient(self, request: Request, now: float) -> bool:
        """It has waited so long that nobody may go before it any more."""
        return now > request.arrival_s + PATIENCE * self.ttft_s(request)

    def prompt_s(self, request: Request) -> float:
        """The rest of its prompt alone on the whole device, expected."""
        if self._version != self.belief.version:
            self._version = self.belief.version
            self._prompt_s.clear()
            self._by_slo.clear()
        left = max(1, (request.target or len(request.arrive.prompt)) - request.computed)
        key = (left, request.computed)
        known = self._prompt_s.get(key)
        if known is None:
            work = Work(left, left * left, left * request.computed, 1, samples=1, last_layer=self.layers, layers=self.layers)
            known = self._prompt_s[key] = self.belief.seconds(work, self.units)
        return known

    def takes_s(self, request: Request) -> float:
        """From now to its first token if it is next: at the pace in force, and with the step that already runs."""
        left = (request.target or len(request.arrive.prompt)) - request.computed
        return max(self.prompt_s(request), left / self.rate) + self.step_s

    def urgency(self, request: Request, now: float) -> tuple[int, int, float, int]:
        """Order of prefills: priority; then those that have waited too long; those that can be in time, by slack; the late ones,
        the shortest first."""
        takes_s, due = self.takes_s(request), self.due(request)
        if self.impatient(request, now):
            return (-request.arrive.priority, 0, due, request.serial)
        if now + takes_s <= due:
            return (-request.arrive.priority, 1, due - takes_s, request.serial)
        return (-request.arrive.priority, 2, takes_s, request.serial)

    def by_urgency(self, requests: Iterable[Request], now: float) -> list[Request]:
        return sorted(requests, key=lambda r: self.urgency(r, now))

    # ------------------------------------------------------------ of many

    def limits(self, decodes: Sequence[Request], answers: Answers, now: float) -> Limits:
        """What the next decode steps may take."""
        mean_s = gap_s = math.inf
        for request in decodes:
            tpot_s, itl_s = self.targets(request.arrive.slo)
            ahead_s = request.token_s[0] + tpot_s * (len(request.output) - 1) - now
            if ahead_s < 0:
                ahead_s = max(-tpot_s / 2, ahead_s / answers.still_to_come(len(request.output)))
            mean_s, gap_s = min(mean_s, tpot_s + ahead_s), min(gap_s, itl_s)
        return Limits(min(mean_s, gap_s), gap_s, min(1.0, answers.still_to_come(1) / LONG))

    def tightest_tpot_s(self, decodes: Sequence[Request]) -> float:
        return min((self.targets(r.arrive.slo).tpot_s for r in decodes), default=math.inf)

    def needed_rate(self, running: Iterable[Request], waiting: Sequence[Request], now: float) -> float:
        """Prefill tokens per second that bring every prompt in time that still can be, in order of urgency."""
        todo = self.by_urgency([*running, *waiting[:LOOK_AHEAD]], now)
        tokens, need = 0, 0.0
        for request in todo:
            left_s = self.due(request) - now
            if left_s < self.takes_s(request):
                continue
            tokens += max(1, (request.target or len(request.arrive.prompt)) - request.computed)
            need = max(need, tokens / left_s)
        return need

    def _tempo_s(self) -> float:
        """A decode step of one request with a short context, on the whole device: the device's own tempo."""
        return self.belief.seconds(Work(0, 0, 0, 0, 1, 512, 1, 0, self.layers, self.layers), self.units)
