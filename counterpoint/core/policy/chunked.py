"""Chunked: every step holds all decodes and fills up to a token budget with pieces of prompts.

Stall-free batching of Sarathi-Serve (Agrawal et al., OSDI'24, section 4.2): decodes are never held back by a prefill, and a step's
length is bounded by the budget. The baseline that multiplexing must beat.

Owns: nothing. Promises: one lane, all units. Must not: cut a pass by layers.
"""

from __future__ import annotations

from counterpoint.core.policy.batching import pack_chunks
from counterpoint.core.state import EngineState
from counterpoint.interfaces import BatchPlan, Policy
from counterpoint.types import Lane, Role


class Chunked(Policy):
    def __init__(self, chunk_tokens: int, units: int, depth: int = 1) -> None:
        self.lanes = (Lane(0, Role.BOTH, depth),)
        self.chunk_tokens = chunk_tokens
        self.units = units
        self.lane_units = (units,)

    def next_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        picks = [(r, 1) for r in state.schedulable_decodes(lane)]
        picks += pack_chunks(state.schedulable_prefills(lane), self.chunk_tokens - len(picks))
        return BatchPlan(picks, self.units) if picks else None
