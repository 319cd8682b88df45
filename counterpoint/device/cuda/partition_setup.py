"""Stream partitions at start: which splits there are, and which kernels run in each.

Owns: the split of the device by config, and the tuning of every partition's kernels.
Promises: the measured SM sets are checked and reported.
Must not: capture graphs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from counterpoint.config import Config, ConfigError
from counterpoint.device.cuda.attention import AttentionPlanner, DecodeKernel, choose_decode_kernel
from counterpoint.device.cuda.device_tables import buckets_for
from counterpoint.device.cuda.gemm_autotune import (
    PREFILL_PROBES,
    GemmAutotuner,
    Matrix,
    build_tiles,
    decode_probes_up_to,
)
from counterpoint.device.cuda.green_contexts import Partitions, granularity
from counterpoint.device.cuda.kernels.nvcc import KernelError
from counterpoint.device.cuda.ops import layer_kernels, make_decode_ops
from counterpoint.device.cuda.stream_partitions import (
    StreamPartition,
    StreamPartitions,
    make_stream_partitions,
)
from counterpoint.model.decoder import Decoder
from counterpoint.model.ops import Ops
from counterpoint.types import Role

ReportProgress = Callable[[str], None]
LEVELS = (16, 24, 32, 48, 64, 80)  # decode SMs of the default splits


def split_device(config: Config) -> tuple[Partitions, tuple[str, ...]]:
    """The policy's splits, with their SM sets measured, and notes for the user."""
    properties = torch.cuda.get_device_properties(0)
    least, step = granularity(torch.cuda.get_device_capability(0))
    total, scheduler = properties.multi_processor_count, config.scheduler
    if scheduler.policy in ("serial", "chunked"):
        levels = ()
    elif scheduler.split is not None:
        levels = (scheduler.split,)
    else:
        levels = tuple(
            level
            for level in LEVELS
            if level >= least and not level % step and level <= total - 2 * least
        )
    try:
        partitions = Partitions(levels)
    except ValueError as error:
        raise ConfigError(f"split is {scheduler.split}: {error}") from None
    if not levels:
        return partitions, ()
    if not partitions.isolated:
        return partitions, (
            "no SM partitions here: prefill and decode share all SMs through plain streams",
        )
    try:
        measured = partitions.check()
    except KernelError as error:
        raise ConfigError(
            f"a split needs its SMs to be measured: {error}; or set policy to chunked"
        ) from None
    return partitions, tuple(
        f"split {level}: decode on SMs {format_ranges(sets.decode)}, "
        f"prefill on {format_ranges(sets.prefill)}"
        for level, sets in measured.items()
    )


def format_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges, e.g. 0-3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def tune_partitions(
    config: Config,
    decoder: Decoder,
    partitions: Partitions,
    planners: tuple[AttentionPlanner, AttentionPlanner],
    progress: ReportProgress,
) -> StreamPartitions:
    """The partitions with their own kernels, and products tuned where steps will run."""
    spec, dtype, device = decoder.spec, decoder.ops.weight_dtype, torch.device("cuda", 0)
    max_rows = buckets_for(config.scheduler.max_running)[-1]
    tuners: dict[int, GemmAutotuner] = {}
    names: set[str] = set()

    def make_kernels(units: int) -> tuple[DecodeKernel, Ops]:
        layer = layer_kernels(spec, dtype, device, units, chained=True)
        name, kernel = choose_decode_kernel(spec, decoder.ops, device, units, max_rows)
        names.add(name)
        if units not in tuners:
            tuners[units] = GemmAutotuner(units, layer, device, chained=True)
        return kernel, make_decode_ops(decoder.ops, layer, tuners[units])

    full = (partitions.full.stream, partitions.full_high_priority.stream)
    stream_partitions = make_stream_partitions(
        full, partitions.total_sms, partitions, make_kernels, planners
    )
    weights = weights_by_shape(decoder)
    used = partitions_to_capture(config, stream_partitions)
    began_s = time.perf_counter()
    build_tiles(
        set().union(*(tuners[part.units].tiles_to_build(weights, max_rows) for part in used)),
        device,
    )
    for part in used:
        tuners[part.units].tune(weights, part.stream, decode_probes_up_to(max_rows))
    counts = count_choices(tuners[part.units] for part in used)
    prefill = stream_partitions.for_role(Role.PREFILL)[1:]
    for part in prefill:
        tuners[part.units].tune([same[:2] for same in weights[:-1]], part.stream, PREFILL_PROBES)
    torch.cuda.synchronize(device)
    took_s = time.perf_counter() - began_s
    attention = ", ".join(sorted(names))
    progress(f"decode attention: {attention}; products: {counts}, in {took_s:.1f} s")
    if prefill:
        counts = count_choices(tuners[part.units] for part in prefill)
        progress(f"products of prefill in a partition: {counts}")
    return stream_partitions


def count_choices(tuners: Iterable[GemmAutotuner]) -> str:
    """How often each kernel was chosen, for the log."""
    counts = Counter(name for tuner in tuners for name in tuner.names.values())
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def invariant_partitions(
    decoder: Decoder, partitions: Partitions, planner: AttentionPlanner
) -> StreamPartitions:
    """The partitions, all with the batch-invariant kernels."""
    from counterpoint.device.cuda import batch_invariant

    full = (partitions.full.stream, partitions.full_high_priority.stream)
    kernels = (batch_invariant.decode_attention, decoder.ops)
    return make_stream_partitions(
        full, partitions.total_sms, partitions, lambda units: kernels, (planner, planner)
    )


def weights_by_shape(decoder: Decoder) -> list[list[Matrix]]:
    """The matrices of a decode step that have no bias, grouped by kind."""
    kinds: list[list[Matrix]] = []
    packed = [
        [getattr(layer, name) for layer in decoder.weights.layers[:8]]
        for name in ("qkv", "output", "gate_up", "down")
    ]
    for same in (*packed, [decoder.weights.head]):
        if same[0][1] is None:
            kinds.append([weight for weight, _ in same])
    return kinds


def partitions_to_capture(
    config: Config, stream_partitions: StreamPartitions
) -> list[StreamPartition]:
    """Where to capture decode graphs at start; elsewhere they are captured when first needed."""
    if config.scheduler.policy in ("serial", "chunked"):
        return stream_partitions.for_role(Role.BOTH)[:1]
    return stream_partitions.for_role(Role.DECODE)


def prefill_partitions(
    config: Config, stream_partitions: StreamPartitions
) -> list[tuple[Role, StreamPartition]]:
    """Where passes with prompt tokens run, with their role: all prefill partitions, and the decode
    partition where `auto` runs mixed passes. Their graphs are captured at start: the 20 ms of a
    later capture would distort a step time that the policy learns from."""
    fusing = (
        stream_partitions.for_role(Role.DECODE)[:1] if config.scheduler.policy == "auto" else []
    )
    return [
        *((Role.PREFILL, partition) for partition in stream_partitions.for_role(Role.PREFILL)),
        *((Role.DECODE, partition) for partition in fusing),
    ]
