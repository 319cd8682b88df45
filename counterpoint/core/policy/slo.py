"""Latency targets of requests, and what they demand of the next steps.

A target is the request's own (`slo`), else the configured one, else one that suits the device. The
time to first token may grow with the prompt. A decode ahead of its time per token has slack: it may
wait, up to its longest gap. Results follow from the requests, the time and the cost model alone.
This module decides nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from counterpoint.config import SchedulerConfig
from counterpoint.core.policy.candidates import PrefillBacklog
from counterpoint.core.policy.online_cost import OnlineCostModel
from counterpoint.core.request import Request
from counterpoint.core.state import OutputLengths
from counterpoint.types import BatchShape, Slo

DEFAULT_GAP_FACTOR = 4.0  # longest gap over the target per token, where none is configured
PATIENCE = 8.0  # targets: a prompt that has waited longer is starved and goes first
LOAD_DECAY_S = 4.0  # time constant of the load average
MAX_CACHED = 4096  # prices of prompts
LOOK_AHEAD = 64  # waiting requests that count


class DecodeTargets(NamedTuple):
    tpot_s: float
    itl_s: float


class DecodeBudget(NamedTuple):
    """How long decode steps may take.

    `mean_s`: the mean over the remaining tokens; above the target if every request is ahead of it,
    below if one is behind. `gap_s`: the longest gap. `next_s`: limit for the next token, with all
    the slack of each request. `remaining_tokens`: of the request that sets `mean_s`.
    `delay_weight`: cost of one second of delay for all decodes, as a fraction of the time allowed
    for the rest of their outputs.
    """

    mean_s: float
    gap_s: float
    next_s: float
    remaining_tokens: int
    delay_weight: float


class DelayWeights(NamedTuple):
    """Cost of one second of delay as a fraction of the SLO budget, summed over groups of requests.

    The groups: `next_prompts`, `queued_prompts` behind them, running `decodes`, `blocked_prompts`
    (no slot or page is left, so they wait for a decode to end), and `future_prompts` (those that
    arrive in one second, if they are like the queued ones).

    As multiples of the next prompts' tokens: `load` (computed per second lately), `demand` (load
    and what waits, per second), `backlog_multiple` (all that is there). `is_queue_empty`: nothing
    comes behind the next prompts.
    """

    next_prompts: float
    queued_prompts: float
    decodes: float
    future_prompts: float
    load: float
    demand: float
    backlog_multiple: float
    blocked_prompts: float = 0.0
    is_queue_empty: bool = False


class PrefillPlan(NamedTuple):
    """A prompt in the order of service. `solo_s`: the rest of it, alone on the whole device."""

    request: Request
    in_time: bool
    due_s: float
    solo_s: float


class SloTracker:
    def __init__(
        self, scheduler: SchedulerConfig, cost_model: OnlineCostModel, units: int, layers: int
    ) -> None:
        self.scheduler = scheduler
        self.cost_model = cost_model
        self.units = units
        self.layers = layers
        self._by_slo: dict[Slo, DecodeTargets] = {}
        self._prompt_s: dict[tuple[int, int], float] = {}
        self._version = 0
        # Of the option in force: prefill time over that alone on the whole device, and the time
        # from one decision to the next.
        self.prefill_slowdown, self.step_s = 1.0, 0.0
        # Prompt tokens computed lately and the seconds that took, both with exponential decay.
        self._load_tokens = 0.0
        self._load_span_s = 0.0
        self._load_at_s = 0.0

    def add_prefilled(self, tokens: float, now: float) -> None:
        """`tokens` prompt tokens have been computed by `now`."""
        decay = math.exp((self._load_at_s - now) / LOAD_DECAY_S)
        self._load_tokens = self._load_tokens * decay + tokens
        self._load_span_s = self._load_span_s * decay + (now - self._load_at_s)
        self._load_at_s = now

    @property
    def load_tokens_per_s(self) -> float:
        """Prompt tokens computed per second lately."""
        return self._load_tokens / max(self._load_span_s, LOAD_DECAY_S / 4)

    def set_pace(self, prefill_slowdown: float, step_s: float) -> None:
        """Set the prefill slowdown and the time between decisions of the option in force."""
        self.prefill_slowdown, self.step_s = prefill_slowdown, step_s

    # ------------------------------------------------------------ one request

    def targets(self, slo: Slo) -> DecodeTargets:
        known = self._by_slo.get(slo)
        if known is None:
            scheduler = self.scheduler
            default_s = scheduler.tpot_s or max(0.025, 3 * self._single_decode_s())
            tpot_s = slo.tpot_s or default_s
            gap_s = DEFAULT_GAP_FACTOR * tpot_s
            if scheduler.itl_s:
                gap_s = max(scheduler.itl_s, tpot_s)
            known = DecodeTargets(tpot_s, slo.itl_s or gap_s)
            if len(self._by_slo) < 1024:
                self._by_slo[slo] = known
        return known

    def ttft_s(self, request: Request) -> float:
        scheduler = self.scheduler
        target_s = request.input.slo.ttft_s or scheduler.ttft_s
        if target_s is None:
            target_s = max(1.0, 10 * self._solo_s(len(request.input.prompt), 0))
        return max(target_s, (scheduler.ttft_per_token_s or 0.0) * len(request.input.prompt))

    def due_s(self, request: Request) -> float:
        """When its first token is due."""
        return request.arrival_s + self.ttft_s(request)

    def is_starved(self, request: Request, now: float) -> bool:
        """Whether it has waited so long that nobody may overtake it."""
        return now > request.arrival_s + PATIENCE * self.ttft_s(request)

    def solo_prefill_s(self, request: Request) -> float:
        """Expected time of the rest of its prompt, alone on the whole device."""
        return self._solo_s(request.remaining_tokens, request.reusable_tokens)

    def expected_prefill_s(self, request: Request) -> float:
        """Expected time of the rest of its prompt, at the slowdown in force."""
        return self.prefill_slowdown * self.solo_prefill_s(request)

    # ------------------------------------------------------------ many requests

    def sort_by_urgency(self, requests: Iterable[Request], now: float) -> list[Request]:
        """Order of prefills: by priority, and within one priority in three groups.

        First starved ones; then those that can all be in time at the slowdown in force, by due
        time; then the others, the shortest first.
        """
        prompts = list(requests)
        if len(prompts) < 2:
            return prompts
        return [plan.request for plan in self._plan_order(prompts, now, self.prefill_slowdown)]

    def max_prefill_slowdown(
        self,
        running: Iterable[Request],
        waiting: Sequence[Request],
        now: float,
        prefill_slowdown: float,
    ) -> float:
        """The largest slowdown at which those prompts are in time that can be at the given one."""
        spent_s, limit = 0.0, math.inf
        for plan in self._plan_order([*running, *waiting[:LOOK_AHEAD]], now, prefill_slowdown):
            if plan.in_time:
                spent_s += plan.solo_s
                limit = min(limit, (plan.due_s - now - self.step_s) / spent_s)
        return max(0.0, limit)

    def _plan_order(
        self, requests: Iterable[Request], now: float, prefill_slowdown: float
    ) -> list[PrefillPlan]:
        """Requests in order of service, and which of them will be in time.

        They run one after another by due time. Whenever one would be late, the longest so far is
        deferred, so that the fewest are late (Moore, Management Science 15, 1968).
        """
        ranked: list[tuple[int, bool, float, int, float, Request]] = []
        for request in requests:
            ttft_s, arrival_s = self.ttft_s(request), request.arrival_s
            patient, due_s = now <= arrival_s + PATIENCE * ttft_s, arrival_s + ttft_s
            key = (-request.input.priority, patient, due_s, request.arrival_index)
            ranked.append((*key, self.solo_prefill_s(request), request))
        ranked.sort()
        planned: list[PrefillPlan] = []
        ends_s = now + self.step_s
        for (_, patient), group in itertools.groupby(ranked, lambda row: row[:2]):
            plans = [
                PrefillPlan(request, patient, due_s, solo_s)
                for _, _, due_s, _, solo_s, request in group
            ]
            takes_s = [prefill_slowdown * plan.solo_s for plan in plans]
            late = find_late(plans, takes_s, ends_s) if patient else []
            deferred = set(late)
            planned += [plan for index, plan in enumerate(plans) if index not in deferred]
            planned += [plans[index]._replace(in_time=False) for index in late]
            ends_s += sum(takes_s)
        return planned

    def decode_budget(
        self,
        decodes: Sequence[Request],
        output_lengths: OutputLengths,
        now: float,
        decode_only_s: float,
    ) -> DecodeBudget:
        """How long the next decode steps may take; one without prefill takes `decode_only_s`."""
        mean_s = gap_s = next_s = math.inf
        remaining_tokens, weight, mean_tokens = 1, 0.0, output_lengths.mean_tokens
        slo, tpot_s, likely_remaining = None, 0.0, output_lengths.likely_remaining
        for request in decodes:
            if request.input.slo is not slo:  # most share one
                slo = request.input.slo
                tpot_s, itl_s = self.targets(slo)
                gap_s = min(gap_s, itl_s)
            tokens = len(request.output)
            remaining = likely_remaining(tokens)
            ahead_s = request.token_s[0] + tpot_s * (tokens - 1) - now
            own_s = tpot_s + ahead_s / remaining
            if own_s < decode_only_s:
                own_s = tpot_s  # it can't catch up; at least it falls no farther behind
            if own_s < mean_s:
                mean_s, remaining_tokens = own_s, remaining
            if tpot_s + ahead_s < next_s:
                next_s = tpot_s + ahead_s
            mean_remaining = mean_tokens - tokens
            longer = remaining if remaining > mean_remaining else mean_remaining
            weight += 1 / (tpot_s * longer)
        return DecodeBudget(mean_s, gap_s, min(next_s, gap_s), remaining_tokens, weight)

    def delay_weights(
        self,
        running: Collection[Request],
        waiting: Sequence[Request],
        blocked: Sequence[Request],
        decodes: float,
        backlog: PrefillBacklog,
    ) -> DelayWeights:
        """Weights of the `running` prompts, of which `backlog` is next, and of the others.

        `waiting` ones wait for these prompts, `blocked` ones for a decode to end. `decodes`: delay
        weight of the running decodes.
        """
        tokens = backlog.tokens
        is_queue_empty = not waiting and backlog.prompts == len(running)
        queued_tokens = sum([r.remaining_tokens for r in waiting])
        next_prompts = sum([1 / self.ttft_s(r) for r in running])
        queued_prompts = sum([1 / self.ttft_s(r) for r in waiting])
        backlog_multiple = 1 + queued_tokens / tokens
        queued_ttft_s = len(waiting) / queued_prompts if waiting else 0.0
        demand = self.load_tokens_per_s + queued_tokens / max(LOAD_DECAY_S, queued_ttft_s)
        future_prompts = demand * (next_prompts + queued_prompts) / (tokens + queued_tokens)
        return DelayWeights(
            next_prompts,
            queued_prompts,
            decodes,
            future_prompts,
            load=self.load_tokens_per_s / tokens,
            demand=demand / tokens,
            backlog_multiple=backlog_multiple,
            blocked_prompts=sum([1 / self.ttft_s(r) for r in blocked]),
            is_queue_empty=is_queue_empty,
        )

    def min_tpot_s(self, decodes: Sequence[Request]) -> float:
        tightest_s, slo = math.inf, None
        for request in decodes:
            if request.input.slo is not slo:  # most share one
                slo = request.input.slo
                tightest_s = min(tightest_s, self.targets(slo).tpot_s)
        return tightest_s

    def _solo_s(self, tokens: int, after: int) -> float:
        """Expected time of `tokens` prompt tokens after `after`, alone on the whole device."""
        if self._version != self.cost_model.version or len(self._prompt_s) > MAX_CACHED:
            self._version = self.cost_model.version
            self._prompt_s.clear()
            self._by_slo.clear()
        key = (tokens, after)
        known = self._prompt_s.get(key)
        if known is None:
            work = BatchShape.prefill(tokens, after, self.layers)
            known = self._prompt_s[key] = self.cost_model.seconds(work, self.units)
        return known

    def _single_decode_s(self) -> float:
        """A decode step of one request with a short context, on the whole device."""
        return self.cost_model.seconds(BatchShape.decode(1, 512, self.layers), self.units)


def find_late(plans: Sequence[PrefillPlan], takes_s: Sequence[float], begins_s: float) -> list[int]:
    """Indices of the plans to defer, so that the fewest are late; the shortest first.

    `plans` run one after another by due time, from `begins_s` on.
    """
    late: list[int] = []
    longest: list[tuple[float, int]] = []
    for index, own_s in enumerate(takes_s):
        begins_s += own_s
        heapq.heappush(longest, (-own_s, index))
        if begins_s > plans[index].due_s:
            late.append(heapq.heappop(longest)[1])
            begins_s -= takes_s[late[-1]]
    return sorted(late, key=lambda index: (takes_s[index], index))
