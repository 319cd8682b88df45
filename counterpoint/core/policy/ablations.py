"""Ablations: Auto with one part taken out, to measure what that part is worth.

Only simulations use them (`simulate`, `plan` and `compare`). All of them lack fusion, as do Bullet
(arXiv 2504.19516) and MuxWise (ASPLOS'26), whose ablations these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from counterpoint.config import SchedulerConfig
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy import nearest
from counterpoint.core.policy.auto import Auto
from counterpoint.core.policy.candidates import Candidate, CandidatePricer, PrefillBacklog
from counterpoint.core.request import Request
from counterpoint.core.state import EngineState, Pass
from counterpoint.interfaces import BatchPlan, Estimator
from counterpoint.types import BatchShape, Lane


class SplitPricer(CandidatePricer):
    """Prices splits only: no chunk shares a pass with decodes."""

    def candidates(self, backlog: PrefillBacklog, batch: int, context: int) -> list[Candidate]:
        return [
            option for option in super().candidates(backlog, batch, context) if not option.chunk
        ]


class NoFusion(Auto):
    """Two lanes, and never a chunk in a decode pass."""

    pricer_class = SplitPricer


class NoPartition(NoFusion):
    """Both lanes may use all units at once; the device schedules them as it likes."""

    def _choose(
        self, decodes: Sequence[Request], state: EngineState, now: float, prefilling: bool
    ) -> Candidate:
        chosen = super()._choose(decodes, state, now, prefilling)
        self.preferred = msgspec.structs.replace(chosen, units=self.units)
        return self.preferred

    def _prefill_units(self, lane: Lane, state: EngineState) -> int:
        return state.free_units(lane)


class FixedSplit(NoFusion):
    """One split, in the middle."""

    def __init__(
        self, scheduler: SchedulerConfig, device: DeviceShape, estimator: Estimator
    ) -> None:
        middle = nearest(device.levels, device.units / 2)
        super().__init__(scheduler, replace(device, levels=(middle,)), estimator)


class NoEstimator(NoFusion):
    """The split follows the number of decodes; prompts run in order of arrival, in quarters."""

    def admission_order(self, waiting: Iterable[Request], now: float) -> Iterable[Request]:
        return waiting

    def should_preempt(self, lane: Lane, open_pass: Pass, state: EngineState, now: float) -> bool:
        return False

    def _select_admissible(
        self, prefills: list[Request], state: EngineState, now: float
    ) -> list[Request]:
        return prefills

    def _choose(
        self, decodes: Sequence[Request], state: EngineState, now: float, prefilling: bool
    ) -> Candidate:
        levels = self.pricer.levels
        index = min(len(levels) - 1, len(decodes) * len(levels) // self.scheduler.max_running)
        self.preferred = Candidate(0, levels[index], 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
        return self.preferred

    def _layer_group(self, work: BatchShape, units: int, state: EngineState) -> int:
        return max(1, self.layers // 4)

    def _should_pause(self, decodes: Sequence[Request], state: EngineState, now: float) -> bool:
        return False


class NoLending(NoFusion):
    """The split stays in force while one phase has no work."""

    def next_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        before = self.current
        plan = super().next_batch(lane, state, now)
        if lane.id == 0 and self.current is None:
            self.current = self.preferred = before  # the prefill lane keeps its units
            if plan is not None:
                limit = before.units if before else self.lane_units[0]
                return plan._replace(units=min(plan.units, limit))
        return plan

    def _prefill_units(self, lane: Lane, state: EngineState) -> int:
        decode_units = self.current.units if self.current else self.lane_units[0]
        return min(self.units - decode_units, state.free_units(lane))


class LockstepLanes(NoFusion):
    """No lane starts a step while the other runs, unless both start together.

    So a completion is waited for, not polled.
    """

    def __init__(
        self, scheduler: SchedulerConfig, device: DeviceShape, estimator: Estimator
    ) -> None:
        super().__init__(scheduler, replace(device, depth=1), estimator)
        self._started_s = [-1.0, -1.0]

    def next_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        plan = super().next_batch(lane, state, now) if self._may_start(lane, state, now) else None
        if plan is not None:
            self._started_s[lane.id] = now
        return plan

    def next_layers(
        self, lane: Lane, open_pass: Pass, state: EngineState, now: float
    ) -> tuple[int, int] | None:
        if not self._may_start(lane, state, now):
            return None
        step = super().next_layers(lane, open_pass, state, now)
        if step is not None:
            self._started_s[lane.id] = now
        return step

    def _may_start(self, lane: Lane, state: EngineState, now: float) -> bool:
        return not state.lanes[1 - lane.id].in_flight or self._started_s[1 - lane.id] == now


class NoPreemption(NoFusion):
    """A short prompt waits for the long one before it."""

    def should_preempt(self, lane: Lane, open_pass: Pass, state: EngineState, now: float) -> bool:
        return False


ABLATIONS: dict[str, type[Auto]] = {
    "fusion": NoFusion,
    "partition": NoPartition,
    "choice": FixedSplit,
    "estimator": NoEstimator,
    "lending": NoLending,
    "queries": LockstepLanes,
    "preemption": NoPreemption,
}


def ablated_auto(without: str | None) -> type[Auto]:
    """Auto without the named part; Auto itself for None."""
    return Auto if without is None else ABLATIONS[without]
