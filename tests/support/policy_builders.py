"""Builders for tests of policies: an estimator with plain prices, requests, an SLO tracker."""

from __future__ import annotations

from engine_harness import Harness

from counterpoint.config import SchedulerConfig
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy import Auto, make_policy
from counterpoint.core.policy.online_cost import OnlineCostModel
from counterpoint.core.policy.slo import SloTracker
from counterpoint.core.request import Request
from counterpoint.types import AddRequest, BatchShape, Sampling, Slo


class LinearEstimator:
    """`fixed` seconds per pass (reading weights), then per prefill token and per token of decode
    context. `sharing`: how far fewer units slow a decode step (0: not at all).
    """

    def __init__(self, fixed=1.0, prefill=0.1, context=0.001, sharing=1.0, contention=1.0) -> None:
        self.fixed, self.prefill, self.context = fixed, prefill, context
        self.sharing, self.contention = sharing, contention

    def seconds(self, work: BatchShape, units: int, co_running=None) -> float:
        layers = (work.last_layer - work.first_layer) / work.layers
        less = 4 / units
        compute = work.prefill_tokens * self.prefill * less
        read = (self.fixed + work.decode_context * self.context) * (1 + (less - 1) * self.sharing)
        both = (
            compute + read
            if work.decode_batch
            else max(compute, self.fixed * (1 + (less - 1) * self.sharing))
        )
        return layers * both * (self.contention if co_running else 1.0)


def auto_harness(estimator, **settings) -> Harness:
    scheduler = SchedulerConfig(policy="auto", max_pass_tokens=64, **settings)
    policy = make_policy(scheduler, DeviceShape(4, 6, levels=(1, 2, 3)), estimator)
    assert isinstance(policy, Auto)
    return Harness(policy, estimator, pages=400, max_context_tokens=800, max_pass_tokens=64)


def make_request(id: str, prompt: int, arrival_s: float = 0.0, **slo) -> Request:
    arrive = AddRequest(
        id=id, prompt=tuple(range(prompt)), sampling=Sampling(max_tokens=4), slo=Slo(**slo)
    )
    return Request(arrive, arrival_s, prefill_target=prompt)


def make_slo_tracker(**settings) -> SloTracker:
    return SloTracker(
        SchedulerConfig(**settings),
        OnlineCostModel(LinearEstimator(fixed=0.0, prefill=0.1)),
        units=4,
        layers=6,
    )


def decode_in_progress(tokens: int, now: float, mean_s: float, **slo) -> Request:
    """A decode that has `tokens` tokens, of which each took `mean_s`."""
    one = make_request("r", 8, **slo)
    one.output, one.token_s = [1] * tokens, [now - mean_s * (tokens - 1)] * tokens
    return one
