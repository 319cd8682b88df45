"""Multiplex: two lanes, prefill on some units and decode on the others, with a fixed split.

While both phases have work, decode has `split` units and prefill the rest. While one phase is
empty, the other gets the whole device at its next step. The prefill lane never decodes.

One prefill pass at a time runs in layer groups, so that the split can change inside a prompt
(layer-wise prefill: MuxWise, ASPLOS'26). A layer group takes about as long as a decode step,
learned from past steps. So prefill returns borrowed units within that time.
"""

from __future__ import annotations

import math

from counterpoint.core.policy.batching import pack_prompts
from counterpoint.core.state import EngineState, Pass
from counterpoint.interfaces import BatchPlan, Policy
from counterpoint.types import Lane, Role, Step, StepDone

EMA_WEIGHT = 0.2  # of the newest step in a moving average


class Multiplex(Policy):
    """Raises ValueError if `split` leaves one lane without units."""

    def __init__(
        self,
        max_pass_tokens: int,
        units: int,
        split: int,
        layer_group: int | None = None,
        depth: int = 1,
    ) -> None:
        if not 0 < split < units:
            raise ValueError(
                f"split is {split}: the decode lane must get 1 to {units - 1} of the {units} units"
            )
        self.lanes = (Lane(0, Role.DECODE, depth), Lane(1, Role.PREFILL, depth))
        self.max_pass_tokens = max_pass_tokens
        self.units = units
        self.split = split
        self.lane_units = (split, units - split)
        self.layer_group = layer_group
        # Moving averages: of a decode step, and of prefill seconds x units per token and layer.
        self._decode_s = 0.0
        self._token_layer_unit_s = 0.0

    def next_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        if lane.role is Role.DECODE:
            items = [(r, 1) for r in state.schedulable_decodes(lane)]
            units = min(self.split if state.has_prefill else self.units, state.free_units(lane))
            return BatchPlan(items, units) if items and units else None
        items = pack_prompts(state.schedulable_prefills(lane), self.max_pass_tokens)
        units = self._prefill_units(lane, state)
        if not items or not units:
            return None
        tokens = sum(tokens for _, tokens in items)
        return BatchPlan(items, units, self._layer_group(tokens, units, state))

    def next_layers(
        self, lane: Lane, open_pass: Pass, state: EngineState, now: float
    ) -> tuple[int, int] | None:
        units = self._prefill_units(lane, state)
        if not units:
            return None
        return units, self._layer_group(open_pass.work.prefill_tokens, units, state)

    def observe(self, step: Step, done: StepDone, co_running: Step | None) -> None:
        took_s = done.ended_s - done.started_s
        if took_s <= 0:
            return
        if step.work.decode_batch:
            self._decode_s = moving_average(self._decode_s, took_s)
        else:
            token_layers = step.work.prefill_tokens * (step.last_layer - step.first_layer)
            self._token_layer_unit_s = moving_average(
                self._token_layer_unit_s, took_s * step.units / token_layers
            )

    def _prefill_units(self, lane: Lane, state: EngineState) -> int:
        """All that decode leaves. Decode keeps its share while it has requests, even idle ones."""
        decode_units = self.split if state.has_decode else 0
        return min(self.units - decode_units, state.free_units(lane))

    def _layer_group(self, tokens: int, units: int, state: EngineState) -> int:
        """Layers that take as long as one decode step: N = ceil(T_decode * L / T_prefill).

        (MuxWise.)
        """
        if self.layer_group:
            return self.layer_group
        if not self._decode_s or not self._token_layer_unit_s:
            return max(1, state.layers // 4)
        layer_s = self._token_layer_unit_s * tokens / units
        return max(1, min(state.layers, math.ceil(self._decode_s / layer_s)))


def moving_average(mean: float, new: float) -> float:
    return new if not mean else mean + EMA_WEIGHT * (new - mean)
