"""The policies decide which requests run next, in which order, mix and split of the device.

A policy decides from what the engine shows it and from what it has observed. It never launches,
allocates or sleeps, and does not know what kind of device runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from counterpoint.config import ConfigError, SchedulerConfig
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy.auto import Auto
from counterpoint.core.policy.chunked import Chunked
from counterpoint.core.policy.multiplex import Multiplex
from counterpoint.core.policy.serial import Serial
from counterpoint.interfaces import Estimator, Policy

__all__ = ["Auto", "Chunked", "Multiplex", "Serial", "make_policy", "nearest"]


def make_policy(
    scheduler: SchedulerConfig,
    device: DeviceShape,
    estimator: Estimator | None = None,
    auto_class: type[Auto] = Auto,
) -> Policy:
    """The policy that `scheduler` names.

    Auto needs an `estimator` and a device with splits to choose from; else it becomes chunked.
    `auto_class`: Auto or an ablation of it (ablations.py). Raises ConfigError for an ablation where
    auto would become chunked.
    """
    name, units, depth = scheduler.policy, device.units, device.depth
    if name == "serial":
        return Serial(scheduler.max_pass_tokens, units, depth, scheduler.layer_group)
    if name == "multiplex" and units > 1:
        split = scheduler.split or nearest(device.levels or range(1, units), units // 2)
        return Multiplex(scheduler.max_pass_tokens, units, split, scheduler.layer_group, depth)
    if name == "auto" and estimator is not None and device.levels:
        return auto_class(scheduler, device, estimator)
    if name == "auto" and auto_class is not Auto:
        why = "nothing is known of what steps take" if device.levels else "can't be split"
        raise ConfigError(f"{why}, so auto is chunked: no part of it can be left out")
    return Chunked(scheduler.chunk_tokens or device.chunk_tokens, units, depth)


def nearest(levels: Sequence[int], wanted: float) -> int:
    return min(levels, key=lambda level: abs(level - wanted))
