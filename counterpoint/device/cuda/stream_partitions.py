"""Places: where on the device a step may run.

Owns: the choice of a stream for a lane's role and units. Promises: a stream serves one role only, so that all work on it belongs to
one lane and follows in order (which is what makes memory that torch frees on a stream safe to use again); what a step is given is
never more units than it was granted, if there is such a split.
Must not: create a partition (green.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from counterpoint.device.cuda.attention import AttentionPlanner, DecodeKernel
from counterpoint.model.ops import Ops
from counterpoint.types import Role


@dataclass(frozen=True, slots=True, eq=False)
class StreamPartition:
    """A stream on `units` SMs, with its own decode attention kernel (whose workspace no other stream may touch) and the prefill
    planner of its role (whose workspace belongs to the role's lane). `ops`: the record of its captured decode steps."""

    name: str
    stream: Any
    units: int
    decode_kernel: DecodeKernel
    prefill_planner: AttentionPlanner
    decode_ops: Ops


class StreamPartitions:
    """`decode` and `prefill`: places by units, the whole device among them."""

    def __init__(
        self, decode: Mapping[int, StreamPartition], prefill: Mapping[int, StreamPartition]
    ) -> None:
        if not decode or not prefill:
            raise ValueError(
                "there must be a decode place and a prefill place: the whole device, at least"
            )
        self._decode = dict(sorted(decode.items()))
        self._prefill = dict(sorted(prefill.items()))

    def choose(self, role: Role, units: int) -> StreamPartition:
        """The largest place of the role with at most `units` units; the smallest there is if none is so small."""
        places = self._decode if role is Role.DECODE else self._prefill
        fitting = [size for size in places if size <= units]
        return places[fitting[-1] if fitting else min(places)]

    def for_role(self, role: Role) -> list[StreamPartition]:
        """All places of a role, the whole device first."""
        places = self._decode if role is Role.DECODE else self._prefill
        return [places[units] for units in reversed(places)]


def make_stream_partitions(
    full: tuple[Any, Any],
    total_units: int,
    partitions: Any,
    kernels: Callable[[int], tuple[DecodeKernel, Ops]],
    planners: tuple[AttentionPlanner, AttentionPlanner],
) -> StreamPartitions:
    """`full`: streams over the whole device; `partitions`: a Partitions (green.py), or None where the device is not split;
    `kernels` makes the decode kernel and the record of decode steps for so many units. Pairs are (prefill, decode)."""
    sides: tuple[dict[int, StreamPartition], dict[int, StreamPartition]] = ({}, {})
    wanted = [(0, "prefill", full[0], total_units), (1, "decode", full[1], total_units)]
    if partitions is not None and partitions.isolated:
        for level in partitions.levels:
            pair = partitions.pair(level)
            wanted.append((0, f"prefill {pair.prefill.sms}", pair.prefill.stream, pair.prefill.sms))
            wanted.append((1, f"decode {pair.decode.sms}", pair.decode.stream, pair.decode.sms))
    for side, name, stream, units in wanted:
        kernel, ops = kernels(units)
        sides[side][units] = StreamPartition(name, stream, units, kernel, planners[side], ops)
    return StreamPartitions(decode=sides[1], prefill=sides[0])
