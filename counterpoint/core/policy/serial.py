"""Serial: prefill first, whole prompts. The naive engine, kept as the reference that every other policy is held against; and what a
worker that only prefills wants, in layer groups, so that each group's KV can leave while the next is computed.

Owns: nothing. Promises: one lane, all units; while any prompt waits, no token is decoded. Must not: be anyone's choice for latency.
"""

from __future__ import annotations

from counterpoint.core.policy.pick import whole_prompts
from counterpoint.core.state import Pass, State
from counterpoint.ports import Fill, Policy
from counterpoint.types import Lane, Role


class Serial(Policy):
    def __init__(self, max_pass_tokens: int, units: int, depth: int = 1, layer_group: int | None = None) -> None:
        self.lanes = (Lane(0, Role.BOTH, depth),)
        self.max_pass_tokens = max_pass_tokens
        self.units = units
        self.shares = (units,)
        self.layer_group = layer_group

    def fill(self, lane: Lane, state: State, now: float) -> Fill | None:
        prompts = whole_prompts(state.prefills(lane), self.max_pass_tokens)
        if prompts:
            return Fill(prompts, self.units, self.layer_group)
        picks = [(r, 1) for r in state.decodes(lane)]
        return Fill(picks, self.units) if picks else None

    def advance(self, lane: Lane, open_pass: Pass, state: State, now: float) -> tuple[int, int] | None:
        assert self.layer_group is not None, "no other pass is cut"
        return self.units, self.layer_group
