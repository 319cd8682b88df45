"""Ablated: Auto with one part taken out, to see what that part is worth.

Owns: the variants. Promises: each lacks what its name says. Must not: serve anyone (`simulate`, `plan` and `compare` alone have
them).

All but the full Auto lack fusion too, as do Bullet (arXiv 2504.19516) and MuxWise (ASPLOS'26), whose ablations these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from counterpoint.config import SchedulerConfig
from counterpoint.core.policy import nearest
from counterpoint.core.policy.auto import Auto
from counterpoint.core.policy.candidates import Candidate, CandidatePricer, PrefillBacklog
from counterpoint.core.request import Request
from counterpoint.core.state import EngineState, Pass
from counterpoint.interfaces import BatchPlan, Estimator
from counterpoint.types import BatchShape, Lane


class SplitPricer(CandidatePricer):
    """No chunk shares a pass with decodes."""

    def candidates(self, backlog: PrefillBacklog, batch: int, context: int) -> list[Candidate]:
        return [
            option for option in super().candidates(backlog, batch, context) if not option.chunk
        ]


class NoFusion(Auto):
    """Two lanes and nothing else."""

    def __init__(
        self,
        scheduler: SchedulerConfig,
        units: int,
        layers: int,
        levels: tuple[int, ...],
        estimator: Estimator,
        depth: int = 1,
    ) -> None:
        super().__init__(scheduler, units, layers, levels, estimator, depth)
        self.levels = levels
        self.pricer = SplitPricer(self.cost_model, units, layers, levels, scheduler.max_pass_tokens)


class NoPartition(NoFusion):
    """Both lanes on all units, side by side: the device shares them out as it likes."""

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
        self,
        scheduler: SchedulerConfig,
        units: int,
        layers: int,
        levels: tuple[int, ...],
        estimator: Estimator,
        depth: int = 1,
    ) -> None:
        super().__init__(scheduler, units, layers, (nearest(levels, units / 2),), estimator, depth)


class NoEstimator(NoFusion):
    """The split follows the number of decodes; prompts go first come, first served, in quarters."""

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
        level = self.levels[
            min(len(self.levels) - 1, len(decodes) * len(self.levels) // self.scheduler.max_running)
        ]
        self.preferred = Candidate(0, level, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
        return self.preferred

    def _layer_group(self, work: BatchShape, units: int, state: EngineState) -> int:
        return max(1, self.layers // 4)

    def _should_pause(self, decodes: Sequence[Request], state: EngineState, now: float) -> bool:
        return False


class NoLending(NoFusion):
    """The split stays in force while one side is empty."""

    def next_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        before = self.current
        fill = super().next_batch(lane, state, now)
        if lane.id == 0 and self.current is None:
            self.current = self.preferred = before  # an empty prefill side changes nothing
            if fill is not None:
                return fill._replace(
                    units=min(fill.units, before.units if before else self.lane_units[0])
                )
        return fill

    def _prefill_units(self, lane: Lane, state: EngineState) -> int:
        return min(
            self.units - (self.current.units if self.current else self.lane_units[0]),
            state.free_units(lane),
        )


class LockstepLanes(NoFusion):
    """Completion is waited for, not asked: a lane starts when the other has come back, or together with it."""

    def __init__(
        self,
        scheduler: SchedulerConfig,
        units: int,
        layers: int,
        levels: tuple[int, ...],
        estimator: Estimator,
        depth: int = 1,
    ) -> None:
        super().__init__(scheduler, units, layers, levels, estimator, 1)
        self._started_s = [-1.0, -1.0]

    def next_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        fill = super().next_batch(lane, state, now) if self._may_start(lane, state, now) else None
        if fill is not None:
            self._started_s[lane.id] = now
        return fill

    def next_layers(
        self, lane: Lane, open_pass: Pass, state: EngineState, now: float
    ) -> tuple[int, int] | None:
        turn = (
            super().next_layers(lane, open_pass, state, now)
            if self._may_start(lane, state, now)
            else None
        )
        if turn is not None:
            self._started_s[lane.id] = now
        return turn

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
    """Auto, or what is left of it without that part."""
    return Auto if without is None else ABLATIONS[without]
