"""Which candidate to take: the least harm to SLO targets, then the least delay of all requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from counterpoint.config import SchedulerConfig
from counterpoint.core.policy.candidates import Candidate
from counterpoint.core.policy.slo import DecodeBudget, DelayWeights

HYSTERESIS = 1.04  # the current option stays unless another is at least 4 % better
TARGET_SHARE = 0.95  # decode steps aim at this share of their target
# A step with prefill may always take this many times one without. Else no option could be met.
MIN_ALLOWED_SLOWDOWN = 1.25


class CandidateSelector:
    def __init__(self, scheduler: SchedulerConfig) -> None:
        self.tbt_weight = scheduler.tbt_weight
        self.ttft_weight = scheduler.ttft_weight

    def decode_excess(
        self,
        candidates: Sequence[Candidate],
        budget: DecodeBudget,
        decode_only_s: float,
        weights: DelayWeights,
    ) -> list[float]:
        """By which share decode steps would exceed `budget`, for each candidate.

        Every step has prefill until the waiting prompts are done. After that, steps with and
        without prefill alternate, as `weights.load` says. The faster prompts are done, the fewer
        steps have prefill. So a longer step does not always mean a longer mean.
        """
        limit_s = max(TARGET_SHARE * budget.mean_s, MIN_ALLOWED_SLOWDOWN * decode_only_s)
        gap_s = TARGET_SHARE * budget.gap_s
        excess: list[float] = []
        for option in candidates:
            backlog_s, step_s = option.backlog_s, option.step_s
            # Shares of the steps: with prefill later on, and of the remaining ones until then.
            busy = min(1.0, weights.load * backlog_s)
            queue_s = weights.backlog_multiple * backlog_s
            queued = min(1.0, queue_s / step_s / budget.remaining_tokens)
            later_s = 1 / (busy / step_s + (1 - busy) / decode_only_s)
            mean_s = queued * step_s + (1 - queued) * later_s
            excess.append(max(0.0, mean_s / limit_s - 1, option.guarded_step_s / gap_s - 1))
        return excess

    def pick(
        self,
        candidates: Sequence[Candidate],
        excess: Sequence[float],
        max_slowdown: float,
        weights: DelayWeights,
        before: Candidate | None,
    ) -> Candidate:
        """The candidate with the least harm, compared to 0.01; then the one with the least delay.

        Prompts are in time up to a prefill slowdown of `max_slowdown`. `before`: the last choice.
        """
        best, least_harm, least_delay = candidates[0], math.inf, math.inf
        for option, by in zip(candidates, excess, strict=True):
            harm = by
            if by < math.inf:
                late = saturate(self._prefill_load(option, max_slowdown, weights) - 1)
                harm = round(by * self.tbt_weight + late * self.ttft_weight, 2)
            if harm > least_harm:
                continue
            delay = total_delay(option, weights)
            if before is not None and option.chunk == before.chunk and option.units == before.units:
                delay /= HYSTERESIS
            if harm < least_harm or delay < least_delay:
                best, least_harm, least_delay = option, harm, delay
        return best

    def _prefill_load(self, option: Candidate, max_slowdown: float, weights: DelayWeights) -> float:
        """Over 1, prompts are late: the waiting ones, or those that will arrive."""
        takes_all = weights.is_queue_empty and option.chunk and option.backlog_s <= option.step_s
        arriving = 0.0 if takes_all else weights.demand * option.backlog_s
        waiting = option.prefill_slowdown / max_slowdown if max_slowdown else math.inf
        return max(waiting, arriving)


def total_delay(option: Candidate, weights: DelayWeights) -> float:
    """Delay of all requests until the waiting prompts are done, as a fraction of their SLO budgets.

    Prompts that arrive meanwhile wait for half of that time. A split costs decode half a step more,
    because steps in flight keep their units.
    """
    backlog_s = option.backlog_s
    decodes_s = backlog_s if option.chunk else backlog_s + option.guarded_step_s / 2
    later = weights.queued_prompts + weights.future_prompts * backlog_s / 2
    prompts = weights.next_prompts * option.mean_ttft_s + later * backlog_s
    decodes = (weights.decodes + weights.blocked_prompts) * option.decode_slowdown * decodes_s
    return prompts + decodes


def saturate(excess: float) -> float:
    """Harm of prompts that take `excess` times longer than they may.

    It is linear up to 1, then grows ever slower and stays below 2. So it still matters how late
    prompts are when all will be late, and that never outweighs every decode target.
    """
    return max(0.0, excess) if excess <= 1 else 2 - 1 / excess
