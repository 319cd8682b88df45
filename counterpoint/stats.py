"""What the engine reports of itself: gauges, counters and the steps of its lanes.

Plain frozen structs that serialise with msgspec. This module imports nothing of this package.
"""

from __future__ import annotations

import msgspec


class PolicyReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a policy reports of itself. `errors`: (kind of step, median and 95th percentile of
    |predicted - actual| / actual over its latest steps, number of steps). `cells`: (name of a
    correction cell, mean ratio of actual to predicted time, guard on top). `decisions` and
    `fallbacks` (why the device was not split while both phases had work) are counts by name."""

    errors: tuple[tuple[str, float, float, int], ...] = ()
    cells: tuple[tuple[str, float, float], ...] = ()
    decisions: dict[str, int] = {}
    fallbacks: dict[str, int] = {}


class LaneStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step as dashboards see it: lane `lane` ran it on `units` units in [started_s, ended_s).
    Times are on the event queue's clock; `ended_s` 0: it still runs. The steps of one forward pass
    share `pass_id`, and each has the token counts of the whole pass."""

    lane: int
    pass_id: int
    started_s: float
    ended_s: float
    units: int
    prefill_tokens: int
    decode_batch: int


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine's gauges and counters now. Pages: free + cached (unreferenced, evictable) + in use
    = total. `split_s`: time each split was in force, as [[prefill units, decode units, seconds],
    ...]; 0 units: no step of that phase was in flight. `lane_s`: how each lane spent its time, as
    (role, state, seconds). States: busy, launch (a step is in flight, the device has not begun it)
    and, with none in flight, an IdleReason (core/metrics.py). `step_s`: device time by (prefill,
    decode or mixed; units asked for; units it ran on). `active_unit_s`: units with work times
    seconds, from the device or a model of it. `overtakes`: prefills suspended between two layer
    groups for a shorter one. `running_steps`: the step that each busy lane runs. `recent_steps`:
    the latest of the `steps` that came back, oldest first."""

    waiting: int = 0
    running: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    page_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = {}
    steps: int = 0
    split_s: tuple[tuple[int, int, float], ...] = ()
    lane_s: tuple[tuple[str, str, float], ...] = ()
    step_s: tuple[tuple[str, int, int, float], ...] = ()
    active_unit_s: float = 0.0
    units_total: int = 0
    resplits: int = 0
    overtakes: int = 0
    policy: PolicyReport = PolicyReport()
    running_steps: tuple[LaneStep, ...] = ()
    recent_steps: tuple[LaneStep, ...] = ()
