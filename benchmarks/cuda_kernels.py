"""How fast the kernels are in each SM partition, next to their ceilings and competing kernels.

    python -m benchmarks.cuda_kernels [ceilings] [attention] [gemm] [layer] [--json FILE]
        [--levels 16 24 32 48 64] [--fp8]

Takes some minutes on one H200; the first run also compiles every weight tile.

Promises: candidates are timed in turns, as medians of device time, with buffers larger than the L2
cache in all. Attention and bfloat16 products are also compared with a float32 reference. FlashInfer
is measured if installed.
Must not: be imported by code that serves.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda_attention import (
    AttentionProblem,
    bind_output,
    check_output,
    flashinfer_decode,
    make_our_decode,
    time_attention,
)
from benchmarks.cuda_timing import capture_calls, parse_cases, time_interleaved, write_json
from counterpoint.device.cuda.gemm_autotune import scaled_matmul
from counterpoint.device.cuda.green_contexts import Partitions, SmPartition
from counterpoint.device.cuda.kernels.attention import Layout
from counterpoint.device.cuda.kernels.gemm import SkinnyGemm
from counterpoint.device.cuda.kernels.nvcc import architecture, check_launch, load_library
from counterpoint.model.fp8 import quantise_rows

GEMMS_NK = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
LAYERS = 32
Run = Callable[[int, torch.Tensor], object]  # on buffer set i, into an output


def read_ceiling(parts: dict[str, SmPartition], device: int = 0) -> dict[str, dict[str, float]]:
    """GB/s that each partition reads from a 2 GiB buffer: pieces assigned to warps in advance
    ("dealt"), or taken by them from a counter ("claimed")."""
    launch = load_library("read", architecture(device)).counterpoint_read
    launch.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    buffer = torch.randint(
        0, 2**31, (2**29,), dtype=torch.int32, device=torch.device("cuda", device)
    )
    scratch = torch.zeros(2, dtype=torch.int32, device=buffer.device)
    torch.cuda.synchronize()
    table: dict[str, dict[str, float]] = {}

    def reader(part: SmPartition, claimed: int) -> Callable[[int], None]:
        arguments = (
            buffer.data_ptr(),
            buffer.nbytes,
            scratch.data_ptr(),
            part.sms,
            claimed,
            part.stream.cuda_stream,
        )
        return lambda _: check_launch(launch(*arguments), "read")

    for name, part in parts.items():
        times = time_interleaved(
            {"dealt": reader(part, 0), "claimed": reader(part, 1)}, part.stream, rounds=9
        )
        table[name] = {k: buffer.nbytes / t / 1e6 for k, t in times.items()}
    return table


def peak_tflops(parts: dict[str, SmPartition]) -> dict[str, dict[str, float]]:
    """TFLOP/s of a bfloat16 product of 8192 x 4096 x 4096 by cuBLAS in each partition: the compute
    ceiling."""
    x, w = (torch.randn(n, 4096, dtype=torch.bfloat16, device="cuda") for n in (8192, 4096))
    out = torch.empty(8192, 4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    table = {}
    for name, part in parts.items():
        time = time_interleaved({"mm": lambda _: torch.mm(x, w.T, out=out)}, part.stream, rounds=7)[
            "mm"
        ]
        table[name] = {"peak TFLOP/s": 2 * 8192 * 4096 * 4096 / time / 1e9}
    return table


def time_gemms(
    parts: dict[str, SmPartition], batches: Sequence[int], shapes: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Microseconds of each product of a decode step in each partition: cuBLAS and ours."""
    table: dict[str, dict[str, float]] = {name: {} for name in parts}
    for shape in shapes:
        n, k = GEMMS_NK[shape]
        sets = max(2, -(-(256 << 20) // (n * k * 2)))
        weights = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]
        for m in batches:
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
            reference = x.float() @ weights[0].float().T
            for name, part in parts.items():
                runs = {
                    "cublas": make_cublas_matmul(x, weights),
                    "ours": make_our_matmul(x, weights, part),
                }
                outs = {
                    label: torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
                    for label in runs
                }
                torch.cuda.synchronize()
                for label, run in runs.items():
                    with torch.cuda.stream(part.stream):
                        run(0, outs[label])
                    part.stream.synchronize()
                    check_output(
                        f"{label} {shape} M={m} on {name} SMs", outs[label], reference, 4e-3
                    )
                calls = 2 * sets
                graphs = {
                    label: capture_calls(bind_output(run, outs[label], sets), calls, part.stream)
                    for label, run in runs.items()
                }
                for label, t in time_interleaved(graphs, part.stream, rounds=7, warm=1).items():
                    table[name][f"{shape} M={m} {label} us"] = t / calls * 1e3
    return table


def time_fp8_gemms(
    parts: dict[str, SmPartition], batches: Sequence[int], shapes: Sequence[str]
) -> dict[str, dict[str, float]]:
    """The same in e4m3: torch's scaled product and ours."""
    table: dict[str, dict[str, float]] = {name: {} for name in parts}
    for shape in shapes:
        n, k = GEMMS_NK[shape]
        sets = max(2, -(-(256 << 20) // (n * k)))
        weights = [
            quantise_rows(torch.randn(n, k, dtype=torch.bfloat16, device="cuda"))
            for _ in range(sets)
        ]
        for m in batches:
            x = quantise_rows(torch.randn(m, k, dtype=torch.bfloat16, device="cuda"))
            for name, part in parts.items():
                kernel, out = (
                    SkinnyGemm(part.sms),
                    torch.empty(m, n, dtype=torch.bfloat16, device="cuda"),
                )
                runs: dict[str, Callable[[int], object]] = {
                    "scaled": lambda i, x=x, w=weights: scaled_matmul(x, w[i % len(w)]),
                    "ours": lambda i, x=x, w=weights, kernel=kernel, out=out: kernel(
                        x, w[i % len(w)], out
                    ),
                }
                torch.cuda.synchronize()
                graphs = {
                    label: capture_calls(run, 2 * sets, part.stream) for label, run in runs.items()
                }
                for label, t in time_interleaved(graphs, part.stream, rounds=7, warm=1).items():
                    table[name][f"{shape} M={m} {label} us"] = t / (2 * sets) * 1e3
    return table


def make_cublas_matmul(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Run:
    return lambda i, out: torch.mm(x, weights[i].T, out=out)


def make_our_matmul(
    x: torch.Tensor, weights: Sequence[torch.Tensor], part: SmPartition, chained: bool = False
) -> Run:
    kernel = SkinnyGemm(part.sms, chained=chained)
    return lambda i, out: kernel(x, weights[i], out)


class LayerProblem:
    """The products and the attention of `layers` decoder layers, with buffers of their own."""

    def __init__(self, batch: int, context: int, layers: int) -> None:
        self.attention = AttentionProblem(batch, context, layers, "HND")
        self.batch, self.layers = batch, layers
        self.shapes = {name: nk for name, nk in GEMMS_NK.items() if name != "lm_head"}
        self.weights = {
            name: [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
            for name, (n, k) in self.shapes.items()
        }
        self.x = {
            name: torch.randn(batch, k, dtype=torch.bfloat16, device="cuda")
            for name, (_, k) in self.shapes.items()
        }
        self.outs = {
            name: torch.empty(batch, n, dtype=torch.bfloat16, device="cuda")
            for name, (n, _) in self.shapes.items()
        }
        self.attended = torch.empty_like(self.attention.q)

    def bound_s(self, bytes_per_s: float, flops: float) -> float:
        """Of one layer, the sum of max(bytes / bandwidth, FLOPs / peak)."""
        return self.attention.bytes / bytes_per_s + sum(
            max(2 * n * k / bytes_per_s, 2 * self.batch * n * k / flops)
            for n, k in self.shapes.values()
        )

    def capture(
        self, matmuls: dict[str, Run], attend: Run, stream: torch.cuda.Stream
    ) -> Callable[[int], None]:
        def run(_: int) -> None:
            for layer in range(self.layers):
                matmuls["qkv"](layer, self.outs["qkv"])
                attend(layer, self.attended)
                for shape in ("o", "gate_up", "down"):
                    matmuls[shape](layer, self.outs[shape])

        return capture_calls(run, 1, stream)

    def our_matmuls(self, part: SmPartition, chained: bool) -> dict[str, Run]:
        return {
            shape: make_our_matmul(self.x[shape], self.weights[shape], part, chained)
            for shape in self.shapes
        }

    def cublas_matmuls(self) -> dict[str, Run]:
        return {
            shape: make_cublas_matmul(self.x[shape], self.weights[shape]) for shape in self.shapes
        }


def time_layers(
    parts: dict[str, SmPartition], batch: int, context: int, layers: int = 8
) -> dict[str, dict[str, float]]:
    """Milliseconds of the four products and the attention of 32 layers, measured on fewer, without
    the operations between them: ours, ours with chained launches, and cuBLAS with FlashInfer.
    `bound`: sum of max(bytes / bandwidth, FLOPs / peak), with this run's ceilings."""
    problem = LayerProblem(batch, context, layers)
    read, peak = read_ceiling(parts), peak_tflops(parts)
    try:
        flashinfer = flashinfer_decode(problem.attention)
    except ImportError:
        flashinfer = None
    table = {}
    for name, part in parts.items():
        bandwidth, flops = max(read[name].values()) * 1e9, peak[name]["peak TFLOP/s"] * 1e12
        candidates = {
            "ours" + " chained" * chained: problem.capture(
                problem.our_matmuls(part, chained),
                make_our_decode(problem.attention, part, chained),
                part.stream,
            )
            for chained in (False, True)
        }
        if flashinfer is not None:
            cublas = problem.cublas_matmuls()
            candidates["cuBLAS + FlashInfer"] = problem.capture(cublas, flashinfer, part.stream)
        times = time_interleaved(candidates, part.stream, rounds=7)
        bound_ms = problem.bound_s(bandwidth, flops) * 1e3 * LAYERS
        row = {f"{who} ms": time / layers * LAYERS for who, time in times.items()}
        row["bound ms"] = bound_ms
        row["bound / ours chained %"] = 100 * bound_ms / row["ours chained ms"]
        table[name] = row
    return table


def print_partitions(title: str, table: dict[str, dict[str, float]]) -> None:
    """Print a table with a column per partition."""
    print(f"\n{title}\n{'SMs':34s}" + "".join(f"{name:>9s}" for name in table))
    for row in next(iter(table.values())):
        cells = (column.get(row, float("nan")) for column in table.values())
        print(
            f"{row:34s}"
            + "".join(f"{x:9.3f}" if row.endswith("ms") else f"{x:9.1f}" for x in cells)
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["ceilings", "attention", "gemm", "layer"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--levels", type=int, nargs="+", default=[16, 24, 32, 48, 64])
    parser.add_argument(
        "--problems",
        nargs="+",
        default=["64x4096"],
        help="batch x context of attention, e.g. 64x4096 1x512",
    )
    parser.add_argument("--layouts", nargs="+", choices=["HND", "NHD"], default=["HND", "NHD"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--shapes", nargs="+", default=list(GEMMS_NK))
    parser.add_argument(
        "--fp8", action="store_true", help="attention over a cache of e4m3, products of e4m3"
    )
    args = parser.parse_args()
    layouts: list[Layout] = args.layouts
    partitions = Partitions(args.levels)
    measured = partitions.check()
    parts = {str(level): partitions.pair(level).decode for level in args.levels}
    parts[str(partitions.total_sms)] = partitions.full
    print(
        f"{torch.cuda.get_device_name()}, {partitions.total_sms} SMs, "
        f"torch {torch.__version__}, isolated {partitions.isolated}"
    )
    result: dict[str, Any] = {
        "realised": {k: {"prefill": v.prefill, "decode": v.decode} for k, v in measured.items()}
    }
    problems = parse_cases(args.problems)
    if "ceilings" in args.what:
        read, peak = read_ceiling(parts), peak_tflops(parts)
        result["ceilings"] = {name: read[name] | peak[name] for name in parts}
        print_partitions(
            "ceilings: GB/s read, pieces dealt out or claimed; TFLOP/s", result["ceilings"]
        )
    if "attention" in args.what:
        result["attention"] = time_attention(parts, problems, layouts, args.fp8)
        print_partitions("decode attention: layout, batch x context", result["attention"])
    if "gemm" in args.what:
        result["gemm"] = (time_fp8_gemms if args.fp8 else time_gemms)(parts, args.rows, args.shapes)
        print_partitions("products of a decode step", result["gemm"])
    if "layer" in args.what:
        for batch, context in ((64, 2048), (64, 4096)):
            result[f"layer {batch} x {context}"] = time_layers(parts, batch, context)
            print_partitions(
                f"products and attention of 32 layers, batch {batch}, context {context}",
                result[f"layer {batch} x {context}"],
            )
    write_json(args.json, result)


if __name__ == "__main__":
    main()
