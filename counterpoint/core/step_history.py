"""Recent: what the lanes run now, and have just run, for whoever watches.

Owns: a bounded ring of steps. Promises: a few operations for each step, and no more memory than the ring's.
Must not: influence a decision.
"""

from __future__ import annotations

from collections import deque

from counterpoint.core.state import EngineState, LaneState
from counterpoint.stats import LaneStep
from counterpoint.types import Step, StepDone

RECENT_STEPS = 128


class StepHistory:
    def __init__(self) -> None:
        self._steps: deque[LaneStep] = deque(maxlen=RECENT_STEPS)
        self._started_s: dict[
            int, float
        ] = {}  # when a lane's oldest step in flight began, as far as we know

    def on_launch(self, lane: LaneState, now: float) -> None:
        """The last of the lane's steps in flight has been launched."""
        if len(lane.in_flight) == 1:
            self._started_s[lane.lane.id] = now

    def on_step_done(self, step: Step, done: StepDone, now: float) -> None:
        started_s = done.started_s or self._started_s[step.lane]
        self._steps.append(
            make_lane_step(step, started_s, done.ended_s or now, done.units or step.units)
        )
        self._started_s[step.lane] = now

    def recent_steps(self) -> tuple[LaneStep, ...]:
        return tuple(self._steps)

    def running_steps(self, state: EngineState) -> tuple[LaneStep, ...]:
        oldest = ((id, lane.in_flight[0][0]) for id, lane in state.lanes.items() if lane.in_flight)
        return tuple(
            make_lane_step(step, self._started_s[id], 0.0, step.units) for id, step in oldest
        )


def make_lane_step(step: Step, started_s: float, ended_s: float, units: int) -> LaneStep:
    work = step.work
    return LaneStep(
        step.lane, step.pass_id, started_s, ended_s, units, work.prefill_tokens, work.decode_batch
    )
