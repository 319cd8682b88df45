"""The policies: who runs now, on how many units.

Owns: every decision about order, mixing and splits. Promises: each is a pure function of what it is shown and what it has observed.
Must not: launch, allocate, sleep, or know what kind of device runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from counterpoint.config import ConfigError, SchedulerConfig
from counterpoint.core.policy.auto import Auto
from counterpoint.core.policy.chunked import Chunked
from counterpoint.core.policy.multiplex import Multiplex
from counterpoint.core.policy.serial import Serial
from counterpoint.interfaces import Estimator, Policy

__all__ = ["Auto", "Chunked", "Multiplex", "Serial", "make_policy", "nearest"]


def make_policy(
    scheduler: SchedulerConfig,
    units: int,
    layers: int,
    depth: int = 1,
    *,
    levels: tuple[int, ...] = (),
    estimator: Estimator | None = None,
    chunk_tokens: int = 512,
    auto_class: type[Auto] = Auto,
) -> Policy:
    """The policy that `scheduler` names, for a device of `units` units and a model of `layers` layers. `depth`: steps that a lane
    may have in flight. `levels`: decode units of the splits there are (auto). `belief`: prices steps; auto without one, or
    without a split to choose, is chunked. `chunk`: the device's usual `chunk_tokens`. `auto`: a variant of it (ablated.py)."""
    name = scheduler.policy
    if name == "serial":
        return Serial(scheduler.max_pass_tokens, units, depth, scheduler.layer_group)
    if name == "multiplex" and units > 1:
        split = scheduler.split or nearest(levels or range(1, units), units // 2)
        return Multiplex(
            scheduler.max_pass_tokens, units, split, layers, scheduler.layer_group, depth
        )
    if name == "auto" and estimator is not None and levels:
        return auto_class(scheduler, units, layers, levels, estimator, depth)
    if name == "auto" and auto_class is not Auto:
        why = "nothing is known of what steps take" if levels else "can't be split"
        raise ConfigError(f"{why}, so auto is chunked: no part of it can be left out")
    return Chunked(scheduler.chunk_tokens or chunk_tokens, units, depth)


def nearest(levels: Sequence[int], wanted: float) -> int:
    return min(levels, key=lambda level: abs(level - wanted))
