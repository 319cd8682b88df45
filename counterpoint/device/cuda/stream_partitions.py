"""StreamPartitions: the streams on which a step may run.

Owns: the choice of a stream by a lane's role and units.
Promises: a stream serves one role. So all its work belongs to one lane and runs in order, and
memory that torch frees on it is safe to reuse. A step gets no more units than granted, if such a
split exists.
Must not: create a partition (green_contexts.py does).
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
    """A stream on `units` SMs.

    `decode_kernel` is its own, since no other stream may use its workspace. `prefill_planner` is
    shared by the partitions of a role, so its workspace belongs to that role's lane. `decode_ops`:
    the Ops of its captured decode steps.
    """

    name: str
    stream: Any
    units: int
    decode_kernel: DecodeKernel
    prefill_planner: AttentionPlanner
    decode_ops: Ops


class StreamPartitions:
    """`decode` and `prefill`: partitions by units, the whole device among them."""

    def __init__(
        self, decode: Mapping[int, StreamPartition], prefill: Mapping[int, StreamPartition]
    ) -> None:
        if not decode or not prefill:
            raise ValueError("each role needs at least one partition: the whole device")
        self._decode = dict(sorted(decode.items()))
        self._prefill = dict(sorted(prefill.items()))

    def choose(self, role: Role, units: int) -> StreamPartition:
        """The role's largest partition with at most `units` units, else its smallest."""
        partitions = self._decode if role is Role.DECODE else self._prefill
        fitting = [size for size in partitions if size <= units]
        return partitions[fitting[-1] if fitting else min(partitions)]

    def for_role(self, role: Role) -> list[StreamPartition]:
        """All partitions of a role, the whole device first."""
        partitions = self._decode if role is Role.DECODE else self._prefill
        return [partitions[units] for units in reversed(partitions)]


def make_stream_partitions(
    full: tuple[Any, Any],
    total_units: int,
    partitions: Any,
    kernels: Callable[[int], tuple[DecodeKernel, Ops]],
    planners: tuple[AttentionPlanner, AttentionPlanner],
) -> StreamPartitions:
    """`full_streams`: two streams over the whole device, for prefill and decode. `partitions`:
    Partitions, or None for an undivided device. `make_kernels` returns the decode kernel and the
    decode Ops for a number of units. `planners`: for prefill and decode."""
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
