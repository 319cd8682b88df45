"""Chunked: every step holds all decodes and fills a token budget with chunks of prompts.

This is the stall-free batching of Sarathi-Serve (Agrawal et al., OSDI'24, section 4.2): no prefill
holds a decode back, and the budget bounds a step's length. It is the baseline for multiplexing. It
runs one lane on all units, and never cuts a pass by layers.
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
        items = [(r, 1) for r in state.schedulable_decodes(lane)]
        items += pack_chunks(state.schedulable_prefills(lane), self.chunk_tokens - len(items))
        return BatchPlan(items, self.units) if items else None
