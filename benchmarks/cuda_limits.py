"""What bounds a step: the ceilings of each partition, and the time of a pass by operation.

Owns: the floor of a decode step, and the operations of a prefill pass (tables of cuda_speed.py).
Promises: everything is measured or computed on the device that ran the step, with its weights.
Must not: be imported by code that serves.

*Floor* of a decode step: the sum over its products and attention of max(bytes / bandwidth, FLOPs /
peak), with the measured bandwidth and peak of the same partition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cuda_kernels import read_ceiling
from benchmarks.cuda_steps import StepBench
from benchmarks.cuda_timing import PowerMeter, time_interleaved, time_repeated
from counterpoint.device.cuda.gemm_autotune import Matrix, scaled_matmul
from counterpoint.device.cuda.green_contexts import SmPartition
from counterpoint.device.cuda.stream_partitions import StreamPartition
from counterpoint.device.slot_tables import make_pass_rows
from counterpoint.model.decoder import Layer
from counterpoint.model.fp8 import ScaledWeight, quantise_rows
from counterpoint.types import Role, Segment


class Ceiling(NamedTuple):
    """Of a partition: bytes/s read, FLOP/s of a large product in bfloat16 and in e4m3."""

    bandwidth: float
    flops: float
    flops_fp8: float


def ceilings(bench: StepBench, levels: Sequence[int]) -> dict[int, Ceiling]:
    partitions = bench.device.partitions
    parts = {str(level): partitions.pair(level).decode for level in levels} | {
        str(bench.device.units): partitions.full
    }
    read = read_ceiling(parts)
    return {
        int(name): Ceiling(max(read[name].values()) * 1e9, *peak_flops(part))
        for name, part in parts.items()
    }


def peak_flops(part: SmPartition, rows: int = 8192, size: int = 4096) -> tuple[float, float]:
    x, w = (torch.randn(n, size, dtype=torch.bfloat16, device="cuda") for n in (rows, size))
    x8, w8 = quantise_rows(x), quantise_rows(w)
    torch.cuda.synchronize()
    times = time_interleaved(
        {"bf16": lambda _: torch.mm(x, w.T), "fp8": lambda _: scaled_matmul(x8, w8)},
        part.stream,
        rounds=7,
    )
    flops = 2 * rows * size * size
    return flops / times["bf16"] * 1e3, flops / times["fp8"] * 1e3


def decode_floor_s(bench: StepBench, batch: int, context: int, ceiling: Ceiling) -> float:
    spec, weights = bench.device.spec, bench.device.decoder.weights
    layer = weights.layers[0]
    products = [layer.qkv, layer.output, layer.gate_up, layer.down] * spec.layers + [weights.head]
    total = sum(matmul_floor_s(packed[0], batch, ceiling) for packed in products)
    cache = batch * context * spec.kv_bytes_per_token(bench.device.decoder.kv_dtype.itemsize)
    scores = 4 * batch * context * spec.heads * spec.head_dim * spec.layers
    return total + max(cache / ceiling.bandwidth, scores / ceiling.flops)


def matmul_floor_s(weight: Matrix, rows: int, ceiling: Ceiling) -> float:
    outputs, inputs = weight.shape
    flops = ceiling.flops_fp8 if isinstance(weight, ScaledWeight) else ceiling.flops
    return max(
        outputs * inputs * weight.dtype.itemsize / ceiling.bandwidth,
        2 * rows * outputs * inputs / flops,
    )


def decode_read_bytes(bench: StepBench, batch: int, context: int) -> int:
    """Bytes that a decode step must read: weights without input embeddings, and the KV cache."""
    spec, weights = bench.device.spec, bench.device.decoder.weights
    packed = [
        each
        for layer in weights.layers
        for each in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ] + [weights.head]
    matrices = sum(
        weight.shape[0] * weight.shape[1] * weight.dtype.itemsize for weight, _ in packed
    )
    return matrices + batch * context * spec.kv_bytes_per_token(
        bench.device.decoder.kv_dtype.itemsize
    )


def parts_table(bench: StepBench, tokens: int = 4096) -> dict[str, dict[str, float]]:
    """A prefill pass by operation: each kind of operation of all layers, one kind at a time, on the
    whole device. Each repeats for as long as some passes take, so that the GPU is as warm as in a
    pass. `MHz`, `W`: clock and power meanwhile."""
    spec, partition = bench.device.spec, bench.device.stream_partitions.for_role(Role.PREFILL)[0]
    flops = {
        "qkv": spec.hidden * spec.qkv_features,
        "output": spec.heads * spec.head_dim * spec.hidden,
        "gate and up": 2 * spec.hidden * spec.ffn,
        "down": spec.hidden * spec.ffn,
        "attention": (tokens + 1) * spec.heads * spec.head_dim,
    }
    result: dict[str, dict[str, float]] = {}
    with torch.cuda.stream(partition.stream), torch.inference_mode():
        kinds, over = make_operations(bench, partition, tokens)
        for name, run in kinds.items():
            took_s, seen = time_repeated(run, partition.stream)
            rate = (
                {"TFLOP/s": 2 * tokens * spec.layers * flops[name] / took_s / 1e12}
                if name in flops
                else {}
            )
            result[name] = {"ms": took_s * 1e3, **rate, **seen}
        over()
    result["sum"] = {"ms": sum(row["ms"] for row in result.values())}
    with PowerMeter() as meter:
        took_s = bench.measure_prefill_s(tokens, bench.device.units, times=8)
    result["a pass"] = {
        "ms": took_s * 1e3,
        "TFLOP/s": bench.prefill_flops(tokens) / took_s / 1e12,
        **meter.summary,
    }
    return result


def make_operations(
    bench: StepBench, partition: StreamPartition, tokens: int
) -> tuple[dict[str, Callable[[], None]], Callable[[], None]]:
    """Each kind of operation of a prefill pass, through all layers, and a function to call
    afterwards."""
    device, spec, ops, weights = (
        bench.device,
        bench.device.spec,
        bench.device.decoder.ops,
        bench.device.decoder.weights,
    )
    segments = (Segment(0, 0, tokens, True, bench.open_prefill(tokens)),)
    device.tables.upload_pending(segments)
    batch = device.tables.make_batch(
        device.tables.make_inputs(
            make_pass_rows(segments),
            partition.prefill_planner,
            partition.decode_kernel,
            device.piecewise_graphs.pad_rows,
        )
    )
    angles, x = device.decoder.angles(batch), device.decoder.embed(batch)
    first = weights.layers[0]
    normed = ops.add_rms_norm(x.clone(), x.clone(), first.ffn_norm_D, spec.norm_eps)[1]
    qkv = ops.linear(normed, first.qkv)

    def rotate(layer: Layer, k: Tensor, v: Tensor) -> Tensor:
        return ops.rope_and_append(
            qkv, angles, layer.query_norm, layer.key_norm, spec.norm_eps, k, v, batch.kv_rows_T
        )

    q = rotate(first, device.kv.k[0], device.kv.v[0])
    attended = ops.attention(q, device.kv.k[0], device.kv.v[0], batch.attention)
    delta, wide = torch.randn_like(x), ops.linear(normed, first.gate_up)
    gated = ops.silu_mul(wide)
    layers = list(zip(weights.layers, device.kv.k, device.kv.v, strict=True))

    def every(run: Callable[[Layer, Tensor, Tensor], object], times: int = 1) -> Callable[[], None]:
        def loop() -> None:
            for layer, k, v in layers * times:
                run(layer, k, v)

        return loop

    kinds = {
        "qkv": every(lambda layer, k, v: ops.linear(normed, layer.qkv)),
        "output": every(lambda layer, k, v: ops.linear(attended, layer.output)),
        "gate and up": every(lambda layer, k, v: ops.linear(normed, layer.gate_up)),
        "down": every(lambda layer, k, v: ops.linear(gated, layer.down)),
        "attention": every(lambda layer, k, v: ops.attention(q, k, v, batch.attention)),
        "RoPE, append": every(rotate),
        "norms": every(
            lambda layer, k, v: ops.add_rms_norm(x, delta, layer.ffn_norm_D, spec.norm_eps), 2
        ),
        "SwiGLU": every(lambda layer, k, v: ops.silu_mul(wide)),
    }
    return kinds, batch.attention.close
