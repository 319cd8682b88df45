"""The modes that are compared: a name for the settings of a way to serve.

Owns: how a mode is written. Promises: the part of a list that is wrong is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from counterpoint.core.policy import nearest
from counterpoint.core.policy.ablations import ABLATIONS
from counterpoint.simulator.machine import Machine

DECODE_SIXTEENTHS = (2, 3, 4, 6, 8)  # of the device: the splits that a bare `multiplex` tries


@dataclasses.dataclass(frozen=True, slots=True)
class Mode:
    """`without`: the part that auto lacks (core/policy/ablations.py)."""

    name: str
    settings: Mapping[str, Any]
    without: str | None = None

    def apply_to(self, machine: Machine) -> Machine:
        if self.without is None:
            return machine
        return dataclasses.replace(machine, without=self.without)

    @property
    def machines(self) -> int:
        """That the mode names itself; 0 if it names none."""
        return self.settings.get("prefill", 0) + self.settings.get("decode", 0)


def parse_modes(text: str, machine: Machine) -> list[Mode]:
    """Modes as "serial,chunked:512,multiplex:32,auto,pools:1:1", or "auto without fusion".

    chunked takes a budget in tokens; multiplex the units of decode (several splits without them);
    pools the machines that prefill and those that decode. With pools among them, the other modes
    get as many machines, as replicas. Raises ValueError naming the part that is wrong.
    """
    parts = [part for part in (p.strip() for p in text.split(",")) if part]
    modes = [mode for part in parts for mode in parse_mode(part, machine)]
    if not modes:
        raise ValueError("--modes names no mode")
    sizes = {mode.machines for mode in modes} - {0}
    if len(sizes) > 1:
        counts = " and ".join(map(str, sorted(sizes)))
        raise ValueError(f"--modes {text!r}: compare pools of one size, not of {counts} machines")
    alike = {"prefill": 0, "decode": 0, "replicas": sizes.pop()} if sizes else {}
    return [
        mode if mode.machines else dataclasses.replace(mode, settings={**mode.settings, **alike})
        for mode in modes
    ]


def parse_mode(part: str, machine: Machine) -> list[Mode]:
    whole, _, without = part.partition(" without ")
    if whole == "auto" and without:
        if without not in ABLATIONS:
            raise ValueError(f"--modes {part!r}: auto can be without one of {', '.join(ABLATIONS)}")
        return [Mode(part, {"policy": "auto"}, without)]
    policy, colon, value = part.partition(":")
    prefill, _, decode = value.partition(":")
    if policy == "pools" and prefill.isdigit() and decode.isdigit() and int(prefill) * int(decode):
        return [Mode(part, {"prefill": int(prefill), "decode": int(decode), "replicas": 0})]
    if policy not in ("serial", "chunked", "multiplex", "auto") or (colon and not value.isdigit()):
        known = (
            "serial, chunked:TOKENS, multiplex:UNITS, auto, auto without PART or "
            "pools:PREFILL:DECODE"
        )
        raise ValueError(f"--modes {part!r}: write {known}, joined by commas")
    if policy == "multiplex":
        splits = [int(value)] if colon else static_splits(machine)
        return [Mode(f"multiplex:{split}", {"policy": policy, "split": split}) for split in splits]
    if policy == "chunked" and colon:
        return [Mode(part, {"policy": policy, "chunk_tokens": int(value)})]
    if colon:
        raise ValueError(f"--modes {part!r}: {policy} takes no number")
    return [Mode(policy, {"policy": policy})]


def static_splits(machine: Machine) -> list[int]:
    """Decode units worth trying; none if the device can't be split."""
    levels, units = machine.levels, machine.device.units
    if not levels:
        return []
    return sorted({nearest(levels, units * share / 16) for share in DECODE_SIXTEENTHS})
