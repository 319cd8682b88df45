"""Promises: what has been promised to each request, and what that asks of the next steps.

Owns: targets, due times, urgency, slack. Promises: answers follow from the requests, the time and the belief alone.
Must not: decide anything.

A target is the request's own (`slo`), else the configured one, else one that suits the device. The time to first token may grow
with the prompt. Slack: a decode that is ahead of its time per token may wait, within its longest gap.
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

LONGEST_GAP = 4.0  # in times the target per token, where no longest gap is asked for
PATIENCE = 8.0  # in targets: a prompt that has waited so long goes first, and nobody overtakes it
LOAD_DECAY_S = 4.0  # time after which load has faded to a third
MAX_CACHED = 4096  # prices of prompts
LOOK_AHEAD = 64  # waiting requests that are thought of


class DecodeTargets(NamedTuple):
    tpot_s: float
    itl_s: float


class DecodeBudget(NamedTuple):
    """Of decode steps. `mean_s`: over the tokens that are still to come; more if every request is ahead of its target per token,
    less if one is behind. `gap_s`: the longest gap; `next_s`: what the next token may take by all that a request is ahead.
    `to_come`: tokens still to come of the request that asks for `mean_s`. `stake`: what a second of delay costs all of them, in
    shares of what is allowed for the rest of their answers."""

    mean_s: float
    gap_s: float
    next_s: float
    remaining_tokens: int
    delay_weight: float


class DelayWeights(NamedTuple):
    """What a second of delay costs, in shares of what is allowed: of the prompts that are `next`, of those `behind` them, of the
    running `decodes`; and of the prompts that come each second (`future`), if they are as those that wait. As multiples of the
    prompts that are next: `load`, what was computed in each of the last seconds; `demand`, that and what waits; `queue`, all that
    is there. `blocked`: of the prompts that wait for a decode to end, since no slot or page is left. `last`: nothing comes behind
    the prompts that are next."""

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
    """A prompt in the order of service. `alone_s`: the rest of it on the whole device."""

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
        self.prefill_slowdown = 1.0  # prompts take so many times as long as alone, and an edge comes every `step_s`: the option in force
        self.step_s = 0.0
        self._load_tokens = (
            0.0  # prompt tokens computed lately, and over how many seconds, both fading
        )
        self._load_span_s = 0.0
        self._load_at_s = 0.0

    def add_prefilled(self, tokens: float, now: float) -> None:
        """So many prompt tokens have been computed until `now`."""
        faded = math.exp((self._load_at_s - now) / LOAD_DECAY_S)
        self._load_tokens = self._load_tokens * faded + tokens
        self._load_span_s = self._load_span_s * faded + (now - self._load_at_s)
        self._load_at_s = now

    @property
    def load_tokens_per_s(self) -> float:
        """Prompt tokens per second, in the last seconds."""
        return self._load_tokens / max(self._load_span_s, LOAD_DECAY_S / 4)

    def set_pace(self, prefill_slowdown: float, step_s: float) -> None:
        """From here on prompts take `stretch` times as long as alone on the whole device, and an edge comes every `step_s`."""
        self.prefill_slowdown, self.step_s = prefill_slowdown, step_s

    # ------------------------------------------------------------ of one request

    def targets(self, slo: Slo) -> DecodeTargets:
        known = self._by_slo.get(slo)
        if known is None:
            scheduler = self.scheduler
            usual_s = scheduler.tpot_s or max(0.025, 3 * self._single_decode_s())
            tpot_s = slo.tpot_s or usual_s
            usual_gap_s = max(scheduler.itl_s, tpot_s) if scheduler.itl_s else LONGEST_GAP * tpot_s
            known = DecodeTargets(tpot_s, slo.itl_s or usual_gap_s)
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
        """It has waited so long that nobody may go before it any more."""
        return now > request.arrival_s + PATIENCE * self.ttft_s(request)

    def solo_prefill_s(self, request: Request) -> float:
        """The rest of its prompt alone on the whole device, expected."""
        return self._solo_s(request.remaining_tokens, request.reusable_tokens)

    def expected_prefill_s(self, request: Request) -> float:
        """The rest of its prompt at the pace in force."""
        return self.prefill_slowdown * self.solo_prefill_s(request)

    # ------------------------------------------------------------ of many

    def sort_by_urgency(self, requests: Iterable[Request], now: float) -> list[Request]:
        """Order of prefills: by priority; in each, first those that have waited too long; then those that can all be in time at the
        pace in force, by due time; then the others, the shortest first."""
        known = list(requests)
        return (
            known
            if len(known) < 2
            else [plan.request for plan in self._plan_order(known, now, self.prefill_slowdown)]
        )

    def max_prefill_slowdown(
        self,
        running: Iterable[Request],
        waiting: Sequence[Request],
        now: float,
        prefill_slowdown: float,
    ) -> float:
        """How many times as long as alone on the whole device prompts may take, for all to be in time that can be at `stretch`."""
        spent_s, least = 0.0, math.inf
        for plan in self._plan_order([*running, *waiting[:LOOK_AHEAD]], now, prefill_slowdown):
            if plan.in_time:
                spent_s += plan.solo_s
                least = min(least, (plan.due_s - now - self.step_s) / spent_s)
        return max(0.0, least)

    def _plan_order(
        self, requests: Iterable[Request], now: float, prefill_slowdown: float
    ) -> list[PrefillPlan]:
        """Requests in order of service, and which of them will be in time. One after another by due time; whenever one would be
        late, the longest until then is put behind: so the fewest are late (Moore, Management Science 15, 1968)."""
        ranked: list[tuple[int, bool, float, int, float, Request]] = []
        for request in requests:
            ttft_s, arrival_s = self.ttft_s(request), request.arrival_s
            patient, due = now <= arrival_s + PATIENCE * ttft_s, arrival_s + ttft_s
            ranked.append(
                (
                    -request.input.priority,
                    patient,
                    due,
                    request.arrival_index,
                    self.solo_prefill_s(request),
                    request,
                )
            )
        ranked.sort()
        planned: list[PrefillPlan] = []
        ends_s = now + self.step_s
        for (_, patient), group in itertools.groupby(ranked, lambda row: row[:2]):
            plans = [
                PrefillPlan(request, patient, due, alone_s)
                for _, _, due, _, alone_s, request in group
            ]
            takes_s = [prefill_slowdown * plan.solo_s for plan in plans]
            lost = find_late(plans, takes_s, ends_s) if patient else []
            gone = set(lost)
            planned += [plan for index, plan in enumerate(plans) if index not in gone]
            planned += [plans[index]._replace(in_time=False) for index in lost]
            ends_s += sum(takes_s)
        return planned

    def decode_budget(
        self,
        decodes: Sequence[Request],
        output_lengths: OutputLengths,
        now: float,
        decode_only_s: float,
    ) -> DecodeBudget:
        """What the next decode steps may take, where one without prefill takes `quiet_s`."""
        mean_s = gap_s = next_s = math.inf
        to_come, stake, mean_tokens = 1, 0.0, output_lengths.mean_tokens
        slo, tpot_s, still_to_come = None, 0.0, output_lengths.likely_remaining
        for request in decodes:
            if request.input.slo is not slo:  # most share one
                slo = request.input.slo
                tpot_s, itl_s = self.targets(slo)
                gap_s = min(gap_s, itl_s)
            tokens = len(request.output)
            left = still_to_come(tokens)
            ahead_s = request.token_s[0] + tpot_s * (tokens - 1) - now
            own_s = tpot_s + ahead_s / left
            if own_s < decode_only_s:
                own_s = tpot_s  # it can't catch up: no reason to hold up others, nor to let it fall farther behind
            if own_s < mean_s:
                mean_s, to_come = own_s, left
            if tpot_s + ahead_s < next_s:
                next_s = tpot_s + ahead_s
            usual = mean_tokens - tokens
            stake += 1 / (tpot_s * (left if left > usual else usual))
        return DecodeBudget(mean_s, gap_s, min(next_s, gap_s), to_come, stake)

    def delay_weights(
        self,
        running: Collection[Request],
        waiting: Sequence[Request],
        blocked: Sequence[Request],
        decodes: float,
        backlog: PrefillBacklog,
    ) -> DelayWeights:
        """Of the prompts that run, of which `backlog` is next, of those that wait for them, and of those that wait for a decode to
        end. `decodes`: stake of the running decodes."""
        tokens, last = backlog.tokens, not waiting and backlog.prompts == len(running)
        behind_tokens = sum([r.remaining_tokens for r in waiting])
        next_, behind = (
            sum([1 / self.ttft_s(r) for r in running]),
            sum([1 / self.ttft_s(r) for r in waiting]),
        )
        queue = 1 + behind_tokens / tokens
        demand = self.load_tokens_per_s + behind_tokens / max(
            LOAD_DECAY_S, len(waiting) / behind if waiting else 0.0
        )
        future = demand * (next_ + behind) / (tokens + behind_tokens)
        held = sum([1 / self.ttft_s(r) for r in blocked])
        return DelayWeights(
            next_,
            behind,
            decodes,
            future,
            self.load_tokens_per_s / tokens,
            demand / tokens,
            queue,
            held,
            last,
        )

    def min_tpot_s(self, decodes: Sequence[Request]) -> float:
        tightest_s, slo = math.inf, None
        for request in decodes:
            if request.input.slo is not slo:  # most share one
                slo = request.input.slo
                tightest_s = min(tightest_s, self.targets(slo).tpot_s)
        return tightest_s

    def _solo_s(self, tokens: int, after: int) -> float:
        """So many tokens of a prompt, after so many of it, alone on the whole device, expected."""
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
        """A decode step of one request with a short context, on the whole device: the device's own tempo."""
        return self.cost_model.seconds(BatchShape.decode(1, 512, self.layers), self.units)


def find_late(plans: Sequence[PrefillPlan], takes_s: Sequence[float], begins_s: float) -> list[int]:
    """Which of `plans`, one after another by due time, are to give way for the fewest to be late: the shortest first."""
    lost: list[int] = []
    longest: list[tuple[float, int]] = []
    for index, own_s in enumerate(takes_s):
        begins_s += own_s
        heapq.heappush(longest, (-own_s, index))
        if begins_s > plans[index].due_s:
            lost.append(heapq.heappop(longest)[1])
            begins_s -= takes_s[lost[-1]]
    return sorted(lost, key=lambda index: (takes_s[index], index))
