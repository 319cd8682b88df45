"""Prefill tables of cuda_speed.py: whole passes, layer groups, graphs, products, mixed passes.

Must not: be imported by code that serves.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.cuda_steps import PREFILL_SLOT, StepBench
from benchmarks.cuda_timing import PowerMeter, print_table
from counterpoint.device.cuda.gemm_autotune import by_cublas, by_cublas_limited, time_in_graph_ms
from counterpoint.device.cuda.partition_setup import weights_by_shape
from counterpoint.device.cuda.piecewise_graphs import PiecewiseGraphs
from counterpoint.types import BatchShape, Role, Segment, StepDone

SMALL_PASSES = (16, 64, 128, 200, 256, 320, 384, 512, 600, 768, 1024, 1100, 1536, 2048)  # tokens


def prefill_table(bench: StepBench, levels: Sequence[int], sizes: Sequence[int]) -> dict[str, Any]:
    result = {}
    for units in (bench.device.units, *(bench.device.units - level for level in levels)):
        for tokens in sizes:
            with PowerMeter() as meter:
                took = bench.measure_prefill_s(tokens, units)
            rates = {
                "TFLOP/s": bench.prefill_flops(tokens) / took / 1e12,
                "tokens/s": tokens / took,
            }
            result[f"{tokens} tokens, {units} SMs"] = {
                "ms": took * 1e3,
                **rates,
                **(meter.summary if tokens >= 4096 else {}),
            }
    print_table("prefill, whole passes", result)
    return result


def groups_table(bench: StepBench) -> dict[str, Any]:
    result = {}
    for tokens in (1024, 4096):
        whole = bench.measure_prefill_s(tokens, bench.device.units)
        for group in (1, 2, 4, 8):
            took = bench.measure_prefill_s(tokens, bench.device.units, group)
            result[f"{tokens} tokens, {group} layers at a time"] = {
                "ms": took * 1e3,
                "slower %": (took / whole - 1) * 100,
            }
    print_table("prefill in layer groups against whole passes, full device", result)
    return result


def small_table(bench: StepBench, sizes: Sequence[int], passes: int = 6) -> dict[str, Any]:
    """Whole prompts on the full device, by graphs and eagerly: back to back, and one at a time."""
    result: dict[str, Any] = {}
    device = bench.device
    ways = {
        "graph": device.piecewise_graphs,
        "eager": PiecewiseGraphs(device.decoder, device.kv, device.tables, device.driver, ()),
    }
    for way, used in ways.items():
        bench.use_device(dataclasses.replace(device, piecewise_graphs=used))
        for tokens in sizes:
            bench.run_steps(bench.prompt_steps(2, tokens))
            queued, host_s = bench.prompt_steps(passes, tokens), []
            for step in queued:
                began_s = time.perf_counter()
                bench.executor.submit(step)
                host_s.append(time.perf_counter() - began_s)
            dones: list[StepDone] = []
            while len(dones) < passes:
                dones += bench.wait_done()
            alone = [bench.run_steps([step])[0] for step in bench.prompt_steps(passes, tokens)]
            row = result.setdefault(f"{tokens} tokens", {})
            row[f"{way}: ms"] = (dones[-1].ended_s - dones[0].ended_s) / (passes - 1) * 1e3
            row[f"{way}: alone"] = (
                statistics.median(done.ended_s - done.started_s for done in alone) * 1e3
            )
            row[f"{way}: launch"] = statistics.median(host_s) * 1e3
    bench.use_device(device)
    print_table("small prefill passes, full device", result)
    return result


def products_table(
    bench: StepBench, levels: Sequence[int], sizes: Sequence[int] = (256, 512, 1024, 2048)
) -> dict[str, Any]:
    """Products of all layers on the prefill side of each split: by cuBLAS, by cuBLAS limited to
    those SMs ("told"), and as tuned ("chosen")."""
    result: dict[str, Any] = {}
    kinds, total = weights_by_shape(bench.device.decoder)[:4], bench.device.units
    for units in (total, *(total - level for level in levels)):
        partition = bench.device.stream_partitions.choose(Role.PREFILL, units)
        ways = {
            "as it is": by_cublas,
            "told": by_cublas_limited(units),
            "chosen": lambda x, w, partition=partition: partition.decode_ops.linear(x, (w, None)),
        }
        for rows in sizes:
            row = result.setdefault(f"{rows} rows, {units} SMs", {})
            for way, product in ways.items():
                row[f"{way}: ms"] = 0.0
                for same in kinds:
                    x = torch.randn(rows, same[0].shape[1], device=bench.device.driver.device).to(
                        same[0].dtype
                    )
                    row[f"{way}: ms"] += (
                        time_in_graph_ms(product, x, same[:4], partition.stream) / 4 * bench.layers
                    )
                    torch.cuda.empty_cache()
    print_table("products of all layers", result)
    return result


def chunk_table(
    bench: StepBench,
    cases: Sequence[tuple[int, int]],
    chunks: Sequence[int] = (512, 1024, 2048),
    start: int = 1536,
) -> dict[str, Any]:
    """Mixed passes: every decode, and a chunk from the middle of a prompt of 4096 tokens. `launch
    ms`: host time to launch; below the time of the pass, a graph has nothing to save."""
    result = {}
    for batch, context in cases:
        bench.open_decode_batch(batch, context)
        bench.measure_decode_s(batch, bench.device.units, 4)
        for chunk in chunks:
            took, host = [], []
            for _ in range(4):
                pages = bench.open_prefill(4096)
                rows = tuple(Segment(slot, context - 1, 1, True) for slot in range(1, batch + 1))
                segments = (*rows, Segment(PREFILL_SLOT, start, chunk, False, pages))
                work = BatchShape(
                    prefill_tokens=chunk, prefill_requests=1, decode_batch=batch, samples=batch
                )
                step = bench.make_step(segments, work, bench.device.units, lane=0)
                began_s = time.perf_counter()
                bench.executor.submit(step)
                host.append(time.perf_counter() - began_s)
                (done,) = bench.wait_done()
                took.append(done.ended_s - done.started_s)
            step_s = statistics.median(took[1:])
            result[f"{batch} x {context}, chunk {chunk}"] = {
                "ms": step_s * 1e3,
                "prefill tokens/s": chunk / step_s,
                "launch ms": statistics.median(host[1:]) * 1e3,
            }
    print_table("fused passes", result)
    return result
