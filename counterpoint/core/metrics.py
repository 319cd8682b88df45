"""What the engine counts, and the latest steps of its lanes.

All of it derives from events and the state alone, in a few operations per event. No policy reads
it, so no decision depends on it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Any

from counterpoint.core.state import EngineState, LaneState
from counterpoint.stats import LaneStep, PolicyReport, Stats
from counterpoint.types import BatchShape, FinishReason, Role, Step, StepDone


class IdleReason(enum.StrEnum):
    """Why a lane has no step in flight."""

    NOTHING = "nothing"  # no request is in its phase
    FUSED = "fused"  # another lane runs its phase in mixed passes
    UNITS = "units"  # there is work, but other lanes hold every unit
    POLICY = "policy"  # there are work and units, but the policy waits
    MEMORY = "memory"  # requests wait for pages or slots


IN_FLIGHT = "in flight"
RECENT_STEPS = 128

ActiveUnitsModel = Callable[[BatchShape, int], float]  # (step, units) -> units with work


class EngineCounters:
    """`active_units_model`: for devices that do not report active units (None: not counted)."""

    def __init__(self, units: int, active_units_model: ActiveUnitsModel | None = None) -> None:
        self.units = units
        self.active_units_model = active_units_model
        self.preemptions = 0
        self.overtakes = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.steps = 0
        self.resplits = 0
        self._finished: dict[str, int] = {}
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._split_s: dict[tuple[int, int], float] = {}
        self._lane_s: dict[tuple[int, str], float] = {}
        self._busy_s: dict[int, float] = {}
        self._step_s: dict[tuple[str, int, int], float] = {}
        self._active_unit_s = 0.0
        self._idle: dict[int, IdleReason] = {}
        self._roles: dict[int, Role] = {}
        self._last_s: float | None = None
        self._last_shared_split: tuple[int, int] | None = None  # latest with both phases active
        self._recent: deque[LaneStep] = deque(maxlen=RECENT_STEPS)
        # When a lane's oldest step in flight began: exact only for a step that found it idle.
        self._started_s: dict[int, float] = {}

    def add_elapsed(self, now: float, state: EngineState) -> None:
        """Add the time since the last event to the split in force and to each lane's state."""
        if self._last_s is not None and now > self._last_s:
            took_s = now - self._last_s
            split = self._current_split(state)
            if split != (0, 0):
                self._split_s[split] = self._split_s.get(split, 0.0) + took_s
            for id, lane in state.lanes.items():
                what = IN_FLIGHT if lane.in_flight else self._idle.get(id, IdleReason.NOTHING)
                self._lane_s[id, what] = self._lane_s.get((id, what), 0.0) + took_s
        self._last_s = now

    def note_idle_reasons(self, state: EngineState, waiting: bool) -> None:
        """Record why lanes without a step have none, once all have been offered work.

        `waiting`: requests wait for admission.
        """
        for id, lane in state.lanes.items():
            self._roles[id] = lane.lane.role
            if not lane.in_flight:
                self._idle[id] = idle_reason(lane, state, waiting)

    def _current_split(self, state: EngineState) -> tuple[int, int]:
        """(prefill units, decode units) in force; a mixed step counts on both sides."""
        prefill = decode = 0
        for lane in state.lanes.values():
            if lane.in_flight:
                step = lane.in_flight[0][0]
                prefill = max(prefill, step.units if step.work.prefill_tokens else 0)
                decode = max(decode, step.units if step.work.decode_batch else 0)
        return prefill, decode

    def on_launch(self, lane: LaneState, state: EngineState, now: float) -> None:
        """The last of the lane's steps in flight has been launched.

        Counts a re-split: both phases active, on other units than the last time.
        """
        split = self._current_split(state)
        if split[0] and split[1]:
            self.resplits += self._last_shared_split is not None and (
                split != self._last_shared_split
            )
            self._last_shared_split = split
        if len(lane.in_flight) == 1:
            self._started_s[lane.lane.id] = now

    def on_step_done(self, step: Step, done: StepDone, now: float) -> None:
        self.steps += 1
        took_s = done.ended_s - done.started_s
        self._busy_s[step.lane] = self._busy_s.get(step.lane, 0.0) + took_s
        key = (step.work.kind, step.units, done.units)
        self._step_s[key] = self._step_s.get(key, 0.0) + took_s
        active = done.active_units
        if not active and self.active_units_model is not None and not done.error:
            active = self.active_units_model(step.work, done.units)
        self._active_unit_s += active * took_s
        started_s, ended_s = done.started_s or self._started_s[step.lane], done.ended_s or now
        self._recent.append(make_lane_step(step, started_s, ended_s, done.units or step.units))
        self._started_s[step.lane] = now

    def add_prefix_lookup(self, queried_tokens: int, hit_tokens: int) -> None:
        self._prefix_queries += queried_tokens
        self._prefix_hits += hit_tokens

    def add_finished(self, finish: FinishReason) -> None:
        self._finished[finish.value] = self._finished.get(finish.value, 0) + 1

    def stats(self, policy: PolicyReport, state: EngineState, **gauges: Any) -> Stats:
        return Stats(
            **gauges,
            units_total=self.units,
            prefix_queries_tokens=self._prefix_queries,
            prefix_hits_tokens=self._prefix_hits,
            preemptions=self.preemptions,
            overtakes=self.overtakes,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            finished=dict(self._finished),
            steps=self.steps,
            resplits=self.resplits,
            split_s=tuple((p, d, s) for (p, d), s in sorted(self._split_s.items())),
            lane_s=self._lane_seconds(),
            step_s=tuple((*key, s) for key, s in sorted(self._step_s.items())),
            active_unit_s=self._active_unit_s,
            policy=policy,
            running_steps=self._running_steps(state),
            recent_steps=tuple(self._recent),
        )

    def _running_steps(self, state: EngineState) -> tuple[LaneStep, ...]:
        oldest = ((id, lane.in_flight[0][0]) for id, lane in state.lanes.items() if lane.in_flight)
        return tuple(
            make_lane_step(step, self._started_s[id], 0.0, step.units) for id, step in oldest
        )

    def _lane_seconds(self) -> tuple[tuple[str, str, float], ...]:
        """(role, state, seconds). With a step in flight, a lane is busy while the step runs and in
        launch until then."""
        found: list[tuple[str, str, float]] = []
        for (id, what), seconds in sorted(self._lane_s.items()):
            role = self._roles[id].value
            if what != IN_FLIGHT:
                found.append((role, str(what), seconds))
                continue
            busy_s = min(seconds, self._busy_s.get(id, 0.0))
            found += [(role, "busy", busy_s), (role, "launch", seconds - busy_s)]
        return tuple(row for row in found if row[2] > 0)


def idle_reason(lane: LaneState, state: EngineState, waiting: bool) -> IdleReason:
    role = lane.lane.role
    for other in state.lanes.values():
        for step, _ in other.in_flight:
            if step.work.decode_batch if role is Role.DECODE else step.work.prefill_tokens:
                return IdleReason.FUSED
    prefills = role is not Role.DECODE and (
        lane.open_pass is not None or bool(state.schedulable_prefills(lane.lane))
    )
    decodes = role is not Role.PREFILL and bool(state.schedulable_decodes(lane.lane))
    if prefills or decodes:
        return IdleReason.POLICY if state.free_units(lane.lane) else IdleReason.UNITS
    return IdleReason.MEMORY if waiting and role is not Role.DECODE else IdleReason.NOTHING


def make_lane_step(step: Step, started_s: float, ended_s: float, units: int) -> LaneStep:
    work = step.work
    return LaneStep(
        step.lane, step.pass_id, started_s, ended_s, units, work.prefill_tokens, work.decode_batch
    )
