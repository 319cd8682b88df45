"""Serial: prefill first, whole prompts; no token is decoded while a prompt waits.

It is the reference that every other policy is compared with. A worker that only prefills uses it
with layer groups, so that the KV of each group can leave while the next group is computed. It runs
one lane on all units.
"""

from __future__ import annotations

from counterpoint.core.policy.batching import pack_prompts
from counterpoint.core.state import EngineState, Pass
from counterpoint.interfaces import BatchPlan, Policy
from counterpoint.types import Lane, Role


class Serial(Policy):
    def __init__(
        self, max_pass_tokens: int, units: int, depth: int = 1, layer_group: int | None = None
    ) -> None:
        self.lanes = (Lane(0, Role.BOTH, depth),)
        self.max_pass_tokens = max_pass_tokens
        self.units = units
        self.lane_units = (units,)
        self.layer_group = layer_group

    def next_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        prompts = pack_prompts(state.schedulable_prefills(lane), self.max_pass_tokens)
        if prompts:
            return BatchPlan(prompts, self.units, self.layer_group)
        items = [(r, 1) for r in state.schedulable_decodes(lane)]
        return BatchPlan(items, self.units) if items else None

    def next_layers(
        self, lane: Lane, open_pass: Pass, state: EngineState, now: float
    ) -> tuple[int, int] | None:
        assert self.layer_group is not None, "only a pass with layer groups is cut"
        return self.units, self.layer_group
