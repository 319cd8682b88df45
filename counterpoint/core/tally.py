"""Tally: what the engine counts.

Owns: counters and the time each split was in force. Promises: derived from events alone. Must not: influence a decision.
"""

from __future__ import annotations

from counterpoint.core.state import State
from counterpoint.types import Finish, Stats, Step, StepDone


class Tally:
    def __init__(self, units: int) -> None:
        self.units = units
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.steps = 0
        self.resplits = 0
        self._finished: dict[str, int] = {}
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._split_s: dict[tuple[int, int], float] = {}
        self._last_s: float | None = None
        self._last_both: tuple[int, int] | None = None  # the latest split with both phases active

    def advance(self, now: float, state: State) -> None:
        """Book the time since the last event on the split that was in force."""
        if self._last_s is not None and now > self._last_s:
            split = self._split(state)
            if split != (0, 0):
                self._split_s[split] = self._split_s.get(split, 0.0) + now - self._last_s
        self._last_s = now

    def _split(self, state: State) -> tuple[int, int]:
        """(prefill units, decode units) in force; a mixed step counts on both sides."""
        prefill = decode = 0
        for lane in state.lanes.values():
            if lane.in_flight:
                step = lane.in_flight[0][0]
                prefill = max(prefill, step.units if step.work.prefill_tokens else 0)
                decode = max(decode, step.units if step.work.decode_batch else 0)
        return prefill, decode

    def step(self, step: Step, done: StepDone) -> None:
        self.steps += 1

    def note_split(self, state: State) -> None:
        """Count a re-split: both phases active, on other units than the last time."""
        split = self._split(state)
        if split[0] and split[1]:
            self.resplits += self._last_both is not None and split != self._last_both
            self._last_both = split

    def prefix(self, queried_tokens: int, hit_tokens: int) -> None:
        self._prefix_queries += queried_tokens
        self._prefix_hits += hit_tokens

    def finished(self, finish: Finish) -> None:
        self._finished[finish.value] = self._finished.get(finish.value, 0) + 1

    def stats(self, **gauges: int) -> Stats:
        return Stats(
            **gauges,
            units_total=self.units,
            prefix_queries_tokens=self._prefix_queries,
            prefix_hits_tokens=self._prefix_hits,
            preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            finished=dict(self._finished),
            steps=self.steps,
            resplits=self.resplits,
            split_s=tuple((p, d, s) for (p, d), s in sorted(self._split_s.items())),
        )
