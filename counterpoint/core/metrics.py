"""Tally: what the engine counts.

Owns: counters; the time each split was in force; what each lane did with its time. Promises: derived from events and the state
alone, in a few operations an event (units at work: by a model, where the device does not tell). Must not: influence a decision.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from counterpoint.core.state import EngineState, LaneState
from counterpoint.stats import PolicyReport, Stats
from counterpoint.types import BatchShape, FinishReason, Role, Step, StepDone


class IdleReason(enum.StrEnum):
    """Why a lane has no step in flight."""

    NOTHING = "nothing"  # no request is in its phase
    FUSED = "fused"  # another lane runs its phase in mixed passes
    UNITS = "units"  # there is work, but other lanes hold every unit
    POLICY = "policy"  # there is work and there are units: the policy waits, for a target or the other lane
    MEMORY = "memory"  # requests wait for pages or slots


IN_FLIGHT = "in flight"


ActiveUnitsModel = Callable[[BatchShape, int], float]


class EngineCounters:
    """`active`: how many of its units a step keeps at work, for devices that do not tell; None: nobody knows."""

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
        self._last_shared_split: tuple[int, int] | None = (
            None  # the latest split with both phases active
        )

    def add_elapsed(self, now: float, state: EngineState) -> None:
        """Book the time since the last event on the split that was in force, and on what each lane did."""
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
        """All lanes have been offered work: note why those without a step have none. `waiting`: requests wait for admission."""
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

    def add_step(self, step: Step, done: StepDone) -> None:
        self.steps += 1
        took_s = done.ended_s - done.started_s
        self._busy_s[step.lane] = self._busy_s.get(step.lane, 0.0) + took_s
        key = (step.work.kind, step.units, done.units)
        self._step_s[key] = self._step_s.get(key, 0.0) + took_s
        active = done.active_units
        if not active and self.active_units_model is not None and not done.error:
            active = self.active_units_model(step.work, done.units)
        self._active_unit_s += active * took_s

    def note_split(self, state: EngineState) -> None:
        """Count a re-split: both phases active, on other units than the last time."""
        split = self._current_split(state)
        if split[0] and split[1]:
            self.resplits += (
                self._last_shared_split is not None and split != self._last_shared_split
            )
            self._last_shared_split = split

    def add_prefix_lookup(self, queried_tokens: int, hit_tokens: int) -> None:
        self._prefix_queries += queried_tokens
        self._prefix_hits += hit_tokens

    def add_finished(self, finish: FinishReason) -> None:
        self._finished[finish.value] = self._finished.get(finish.value, 0) + 1

    def stats(self, policy: PolicyReport, **gauges: Any) -> Stats:
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
        )

    def _lane_seconds(self) -> tuple[tuple[str, str, float], ...]:
        """A lane's time with a step in flight is busy as far as its steps ran, and launch otherwise."""
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
