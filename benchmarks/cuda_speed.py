"""How fast the CUDA device is: decode, prefill, and both at once, through the executor that serves.

    python -m benchmarks.cuda_speed [decode] [sampling] [prefill] [parts] [groups] [small]
        [products] [together] [chunk] [loop] [--json FILE]

Takes about a minute on one H200, most of it loading and graph capture.

Promises: random weights and KV contents; device times (StepDone), medians where repeated.
Everything goes through CudaExecutor, so launching is part of what is measured.
Must not: be imported by code that serves.

*Multiplexing gain*: the time of the same prefills and decode steps one after another on the whole
device, divided by their time side by side.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda_limits import ceilings, decode_floor_s, decode_read_bytes, parts_table
from benchmarks.cuda_prefill import (
    SMALL_PASSES,
    chunk_table,
    groups_table,
    prefill_table,
    products_table,
    small_table,
)
from benchmarks.cuda_steps import GREEDY, StepBench, StepRecorder
from benchmarks.cuda_timing import PowerMeter, parse_cases, print_table, write_json
from counterpoint.config import Config
from counterpoint.core.engine import Engine
from counterpoint.core.limits import EngineLimits
from counterpoint.core.loop import run
from counterpoint.core.policy import Multiplex, Serial
from counterpoint.device.cuda.device_setup import CudaDevice, open_cuda
from counterpoint.spec.source import resolve_model
from counterpoint.types import AddRequest, Output, OutputDelta, Sampling

CASES = ("1x2048", "8x2048", "64x2048", "100x8192")  # batch, context
TABLES = (
    *("decode", "sampling", "prefill", "parts", "groups", "small"),
    *("products", "together", "chunk", "loop"),
)
Cases = Sequence[tuple[int, int]]


def decode_table(bench: StepBench, levels: Sequence[int], cases: Cases) -> dict[str, Any]:
    """`floor %`: the floor of cuda_limits.py, as a share of the time."""
    limits = ceilings(bench, levels)
    result: dict[str, Any] = {
        f"ceilings, {units} SMs": {
            "GB/s": c.bandwidth / 1e9,
            "TFLOP/s": c.flops / 1e12,
            "fp8 TFLOP/s": c.flops_fp8 / 1e12,
        }
        for units, c in limits.items()
    }
    for batch, context in cases:
        bench.open_decode_batch(batch, context)
        for units in (*levels, bench.device.units):
            took = bench.measure_decode_s(batch, units)
            floor = decode_floor_s(bench, batch, context, limits[units])
            result[f"{batch} x {context}, {units} SMs"] = {
                "ms": took * 1e3,
                "GB/s": decode_read_bytes(bench, batch, context) / took / 1e9,
                "floor ms": floor * 1e3,
                "floor %": 100 * floor / took,
            }
    print_table("decode step", result)
    return result


def together_table(
    bench: StepBench, levels: Sequence[int], cases: Cases, tokens: int = 4096
) -> dict[str, Any]:
    result, units = {}, bench.device.units
    prefill_s = bench.measure_prefill_s(tokens, units)
    for batch, context in cases:
        bench.open_decode_batch(batch, context)
        alone_s = bench.measure_decode_s(batch, units)
        for level in levels:
            split_alone_s, rest_s = (
                bench.measure_decode_s(batch, level, 8),
                bench.measure_prefill_s(tokens, units - level, times=1),
            )
            group = max(
                1,
                min(bench.layers, -(-int(1e6 * split_alone_s) * bench.layers // int(1e6 * rest_s))),
            )
            with PowerMeter() as meter:
                got = bench.measure_overlap(batch, level, tokens, group)
            in_turns_s = prefill_s + alone_s * got["prefill_s"] / got["decode_s"]
            result[f"{batch} x {context}, split {level}"] = {
                "gain": in_turns_s / got["prefill_s"],
                "decode ms": got["decode_s"] * 1e3,
                "alone there": split_alone_s * 1e3,
                "prefill ms": got["prefill_s"] * 1e3,
                "alone there.": rest_s * 1e3,
                "prefill tokens/s": tokens / got["prefill_s"],
                "layers/group": group,
                **meter.summary,
            }
        result[f"{batch} x {context}, in turns"] = {
            "decode ms": alone_s * 1e3,
            "prefill ms": prefill_s * 1e3,
            "gain": 1.0,
        }
    print_table(f"prefill of {tokens} and decode together", result)
    return result


SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": Sampling(max_tokens=1 << 20, temperature=0.8),
    "temperature, top-p": Sampling(max_tokens=1 << 20, temperature=0.8, top_p=0.9),
    "temperature, top-k, top-p": Sampling(max_tokens=1 << 20, temperature=0.8, top_k=50, top_p=0.9),
    "penalties": Sampling(max_tokens=1 << 20, temperature=0.8, top_p=0.9, repetition_penalty=1.1),
    "penalties, bias, 5 logprobs": Sampling(
        max_tokens=1 << 20,
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.1,
        logit_bias=((5, 1.0),),
        logprobs=5,
    ),
    "21 logprobs (outside the graph)": Sampling(max_tokens=1 << 20, temperature=0.0, logprobs=21),
}


def sampling_table(bench: StepBench, batch: int = 64, context: int = 2048) -> dict[str, Any]:
    """A decode step by its rows' sampling settings, and the host time to launch it."""
    result = {}
    for name, sampling in SAMPLINGS.items():
        bench.open_decode_batch(batch, context, sampling)
        took = bench.measure_decode_s(batch, bench.device.units)
        steps, host = [bench.decode_step(batch, bench.device.units) for _ in range(6)], []
        for step in steps:
            began_s = time.perf_counter()
            bench.executor.submit(step)
            host.append(time.perf_counter() - began_s)
            while not bench.wait_done():
                pass
        result[name] = {"ms": took * 1e3, "launch ms": statistics.median(host) * 1e3}
    print_table(f"decode step of {batch} x {context} by sampling", result)
    return result


def loop_table(
    device: CudaDevice, batch: int = 64, prompt: int = 1900, output: int = 448
) -> dict[str, Any]:
    """Requests through engine and loop: how long the GPU idles between steps of a full batch."""
    units = device.units
    policies = {
        "serial": Serial(8192, units, 2),
        "multiplex 32": Multiplex(8192, units, 32, depth=2),
    }
    result = {}
    for name, policy in policies.items():
        recorder = StepRecorder(device, policy.lanes)
        engine = Engine(make_limits(device, batch), policy)
        wall_s = serve_batch(engine, recorder, batch, prompt, output)
        result[name] = loop_row(recorder, batch) | {"wall s": wall_s}
    print_table(f"engine loop, {batch} requests of {prompt} + {output} tokens", result)
    return result


def make_limits(device: CudaDevice, batch: int) -> EngineLimits:
    return EngineLimits(
        pages=device.pages,
        page_tokens=device.tables.page_tokens,
        max_running=batch,
        max_context_tokens=device.max_context_tokens,
        max_pass_tokens=8192,
        eos_token_ids=(),
        units=device.units,
        layers=device.spec.layers,
        overlap=True,
    )


def serve_batch(
    engine: Engine, recorder: StepRecorder, batch: int, prompt: int, output: int
) -> float:
    """Seconds to run `batch` random requests to their end."""
    inbox, finished = recorder.inbox, list[str]()

    def deliver(outputs: list[Output], engine: Engine) -> None:
        finished.extend(o.id for o in outputs if isinstance(o, OutputDelta) and o.finish_reason)
        if len(finished) == batch and engine.idle:
            inbox.stop()

    rng = random.Random(1)
    sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
    for n in range(batch):
        tokens = tuple(rng.randrange(1000, 30000) for _ in range(prompt))
        inbox.put(AddRequest(id=str(n), prompt=tokens, sampling=sampling))
    began_s = time.perf_counter()
    run(engine, recorder, recorder, deliver)
    took_s = time.perf_counter() - began_s
    recorder.close()
    return took_s


def loop_row(recorder: StepRecorder, batch: int) -> dict[str, float]:
    shapes = {step.id: step.work for step in recorder.steps.values()}
    full = [
        done
        for done in recorder.dones
        if shapes[done.step].decode_batch == batch and not shapes[done.step].prefill_tokens
    ]
    full.sort(key=lambda done: done.ended_s)
    pairs = list(itertools.pairwise(full))
    idle_s = sum(max(0.0, b.started_s - a.ended_s) for a, b in pairs)
    period_s = statistics.median(b.ended_s - a.ended_s for a, b in pairs)
    launch_s = statistics.median(recorder.submit_s)
    return {
        "decode ms": period_s * 1e3,
        "GPU idle %": 100 * idle_s / (full[-1].ended_s - full[0].started_s),
        "launch ms": launch_s * 1e3,
        "launch %": 100 * launch_s / period_s,
        "steps": len(full),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", nargs="*", default=list(TABLES), help=f"tables: {', '.join(TABLES)}; unset: all")
    add("--model", default="llama-3.1-8b")
    add("--quantization", default="none")
    add("--kv-cache-dtype", default="auto")
    add("--batch-invariant", action="store_true")
    add("--levels", type=int, nargs="+", default=[24, 32, 48, 64], help="decode SMs of the splits")
    help = "batch x context of decode steps; `together` and `chunk` use the last two"
    add("--cases", nargs="+", default=CASES, help=help)
    sizes = [512, 1024, 4096, 8192]
    add("--tokens", type=int, nargs="+", default=sizes, help="tokens of the prefill passes")
    add("--max-running", type=int, default=112)
    add("--json", type=Path)
    return parser.parse_args()


def open_device(args: argparse.Namespace, began_s: float) -> CudaDevice:
    flags = {
        "policy": "multiplex",
        "load_format": "dummy",
        "max_running": args.max_running,
        "max_context_tokens": 16384,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "batch_invariant": args.batch_invariant,
    }
    device = open_cuda(
        Config().replace(model=args.model, **flags),
        resolve_model(args.model),
        lambda line: print(f"{time.perf_counter() - began_s:6.1f} s  {line}", flush=True),
    )
    print(*device.notes, sep="\n")
    return device


def describe(device: CudaDevice) -> dict[str, Any]:
    decode, pieces = device.decode_graphs, device.piecewise_graphs
    return {
        "device": torch.cuda.get_device_name(),
        "power limit W": PowerMeter().limit_w,
        "torch": torch.__version__,
        "ops": device.decoder.ops.name,
        "graphs": {"count": decode.num_graphs, "seconds": decode.capture_s},
        "graphs of passes": {"count": pieces.num_graphs, "seconds": pieces.capture_s},
    }


def print_parts(bench: StepBench) -> dict[str, Any]:
    table = parts_table(bench)
    print_table("a prefill pass of 4096 tokens, by operation", table)
    return table


def main() -> None:
    args, began_s = parse_args(), time.perf_counter()
    cases = parse_cases(args.cases)
    device = open_device(args, began_s)
    result = describe(device)
    if "loop" in args.what:
        result["loop"] = loop_table(device)
    bench = StepBench(device)
    tables: dict[str, Callable[[], dict[str, Any]]] = {
        "decode": lambda: decode_table(bench, args.levels, cases),
        "sampling": lambda: sampling_table(bench),
        "prefill": lambda: prefill_table(bench, args.levels, args.tokens),
        "parts": lambda: print_parts(bench),
        "groups": lambda: groups_table(bench),
        "small": lambda: small_table(bench, SMALL_PASSES),
        "products": lambda: products_table(bench, (16, *args.levels, 64)),
        "together": lambda: together_table(bench, args.levels, cases[-2:]),
        "chunk": lambda: chunk_table(bench, cases[-2:]),
    }
    for name, make_table in tables.items():
        if name in args.what:
            result[name] = make_table()
            write_json(args.json, result)
    bench.executor.close()
    reserved, took_s = torch.cuda.max_memory_reserved() / 2**30, time.perf_counter() - began_s
    print(f"\n{reserved:.1f} GiB reserved at most; {took_s:.0f} s in all")
    write_json(args.json, result)


if __name__ == "__main__":
    main()
