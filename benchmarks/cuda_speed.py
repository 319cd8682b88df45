"""How fast the CUDA device is: decode, prefill, and both at once, through the executor that serves.

    python -m benchmarks.cuda_speed [decode] [sampling] [prefill] [parts] [groups] [small] [products] [together] [chunk]
        [loop] [--json FILE]

Owns: the measurement. Promises: random weights, random KV contents; times are the device's own (StepDone), medians where a thing is
repeated; everything goes through CudaExecutor, so launching is part of what is measured.
Must not: be imported by what serves.

*Multiplexing gain*: the time that the same prefills and decode steps take in turns on the whole device, over the time they took
together.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda_limits import ceilings, decode_bytes, floor_s, parts_table
from benchmarks.cuda_steps import GREEDY, PREFILL_SLOT, Bench, Meter, Tap, show
from counterpoint.config import Config
from counterpoint.core.engine import Engine
from counterpoint.core.limits import EngineLimits
from counterpoint.core.loop import run
from counterpoint.core.policy import Multiplex, Serial
from counterpoint.device.cuda.device_setup import CudaDevice, open_cuda, weights_by_shape
from counterpoint.device.cuda.gemm_autotune import by_cublas, by_cublas_limited, captured_ms
from counterpoint.device.cuda.piecewise_graphs import PiecewiseGraphs
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.spec.source import resolve_model
from counterpoint.types import (
    AddRequest,
    BatchShape,
    Output,
    OutputDelta,
    Role,
    Sampling,
    Segment,
    StepDone,
)

SMALL = (16, 64, 128, 200, 256, 320, 384, 512, 600, 768, 1024, 1100, 1536, 2048)
CASES = ("1x2048", "8x2048", "64x2048", "100x8192")  # batch, context
Cases = Sequence[tuple[int, int]]

# ---------------------------------------------------------------- tables


def decode_table(bench: Bench, levels: Sequence[int], cases: Cases) -> dict[str, Any]:
    """`floor %`: of the time, what the ceilings of that partition, measured here, leave no way around (floors.py)."""
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
        bench.open_batch(batch, context)
        for units in (*levels, bench.device.units):
            took = bench.decode_s(batch, units)
            floor = floor_s(bench, batch, context, limits[units])
            result[f"{batch} x {context}, {units} SMs"] = {
                "ms": took * 1e3,
                "GB/s": decode_bytes(bench, batch, context) / took / 1e9,
                "floor ms": floor * 1e3,
                "floor %": 100 * floor / took,
            }
    show("decode step", result)
    return result


def prefill_table(bench: Bench, levels: Sequence[int], sizes: Sequence[int]) -> dict[str, Any]:
    result = {}
    for units in (bench.device.units, *(bench.device.units - level for level in levels)):
        for tokens in sizes:
            with Meter() as meter:
                took = bench.prefill_s(tokens, units)
            rates = {
                "TFLOP/s": bench.prefill_flops(tokens) / took / 1e12,
                "tokens/s": tokens / took,
            }
            result[f"{tokens} tokens, {units} SMs"] = {
                "ms": took * 1e3,
                **rates,
                **(meter.seen if tokens >= 4096 else {}),
            }
    show("prefill, whole passes", result)
    return result


def groups_table(bench: Bench) -> dict[str, Any]:
    result = {}
    for tokens in (1024, 4096):
        whole = bench.prefill_s(tokens, bench.device.units)
        for group in (1, 2, 4, 8):
            took = bench.prefill_s(tokens, bench.device.units, group)
            result[f"{tokens} tokens, {group} layers at a time"] = {
                "ms": took * 1e3,
                "slower %": (took / whole - 1) * 100,
            }
    show("prefill in layer groups against whole passes, full device", result)
    return result


def small_table(bench: Bench, sizes: Sequence[int], passes: int = 6) -> dict[str, Any]:
    """Whole prompts on the full device, as graphs and operation by operation: one after another without a gap, and one alone."""
    result: dict[str, Any] = {}
    device = bench.device
    ways = {
        "graph": device.piecewise_graphs,
        "eager": PiecewiseGraphs(device.decoder, device.kv, device.tables, device.driver, ()),
    }
    for way, used in ways.items():
        bench.use(dataclasses.replace(device, piecewise_graphs=used))
        for tokens in sizes:
            bench.play(bench.prompts(2, tokens))
            queued, host_s = bench.prompts(passes, tokens), []
            for step in queued:
                began_s = time.perf_counter()
                bench.executor.submit(step)
                host_s.append(time.perf_counter() - began_s)
            dones: list[StepDone] = []
            while len(dones) < passes:
                dones += bench.done()
            alone = [bench.play([step])[0] for step in bench.prompts(passes, tokens)]
            row = result.setdefault(f"{tokens} tokens", {})
            row[f"{way}: ms"] = (dones[-1].ended_s - dones[0].ended_s) / (passes - 1) * 1e3
            row[f"{way}: alone"] = (
                statistics.median(done.ended_s - done.started_s for done in alone) * 1e3
            )
            row[f"{way}: launch"] = statistics.median(host_s) * 1e3
    bench.use(device)
    show("small prefill passes, full device", result)
    return result


def products_table(
    bench: Bench, levels: Sequence[int], sizes: Sequence[int] = (256, 512, 1024, 2048)
) -> dict[str, Any]:
    """Products of all layers on the rest of each split: by cuBLAS as it is, told of those SMs, and as the place has chosen."""
    result: dict[str, Any] = {}
    kinds, total = weights_by_shape(bench.device.decoder)[:4], bench.device.units
    for units in (total, *(total - level for level in levels)):
        place = bench.device.stream_partitions.choose(Role.PREFILL, units)
        ways = {
            "as it is": by_cublas,
            "told": by_cublas_limited(units),
            "chosen": lambda x, w, place=place: place.ops.linear(x, (w, None)),
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
                        captured_ms(product, x, same[:4], place.stream) / 4 * bench.layers
                    )
                    torch.cuda.empty_cache()
    show("products of all layers", result)
    return result


def together_table(
    bench: Bench, levels: Sequence[int], cases: Cases, tokens: int = 4096
) -> dict[str, Any]:
    result, units = {}, bench.device.units
    prefill_s = bench.prefill_s(tokens, units)
    for batch, context in cases:
        bench.open_batch(batch, context)
        alone_s = bench.decode_s(batch, units)
        for level in levels:
            split_alone_s, rest_s = (
                bench.decode_s(batch, level, 8),
                bench.prefill_s(tokens, units - level, times=1),
            )
            group = max(
                1,
                min(bench.layers, -(-int(1e6 * split_alone_s) * bench.layers // int(1e6 * rest_s))),
            )
            with Meter() as meter:
                got = bench.together(batch, level, tokens, group)
            in_turns_s = prefill_s + alone_s * got["prefill_s"] / got["decode_s"]
            result[f"{batch} x {context}, split {level}"] = {
                "gain": in_turns_s / got["prefill_s"],
                "decode ms": got["decode_s"] * 1e3,
                "alone there": split_alone_s * 1e3,
                "prefill ms": got["prefill_s"] * 1e3,
                "alone there.": rest_s * 1e3,
                "prefill tokens/s": tokens / got["prefill_s"],
                "layers/group": group,
                **meter.seen,
            }
        result[f"{batch} x {context}, in turns"] = {
            "decode ms": alone_s * 1e3,
            "prefill ms": prefill_s * 1e3,
            "gain": 1.0,
        }
    show(f"prefill of {tokens} and decode together", result)
    return result


def chunk_table(
    bench: Bench, cases: Cases, chunks: Sequence[int] = (512, 1024, 2048), start: int = 1536
) -> dict[str, Any]:
    """Fused passes: every decode and a piece of a prompt of 4096 tokens, from its middle on. `launch ms`: what launching costs the
    host; while it is less than the pass takes, a graph has nothing to save."""
    result = {}
    for batch, context in cases:
        bench.open_batch(batch, context)
        bench.decode_s(batch, bench.device.units, 4)
        for chunk in chunks:
            took, host = [], []
            for _ in range(4):
                pages = bench.open_prefill(4096)
                rows = tuple(Segment(slot, context - 1, 1, True) for slot in range(1, batch + 1))
                segments = (*rows, Segment(PREFILL_SLOT, start, chunk, False, pages))
                work = BatchShape(
                    prefill_tokens=chunk, prefill_requests=1, decode_batch=batch, samples=batch
                )
                step, began_s = (
                    bench.made(0, None, 0, bench.layers, bench.device.units, segments, work),
                    time.perf_counter(),
                )
                bench.executor.submit(step)
                host.append(time.perf_counter() - began_s)
                (done,) = bench.done()
                took.append(done.ended_s - done.started_s)
            step_s, rates = (
                statistics.median(took[1:]),
                {"launch ms": statistics.median(host[1:]) * 1e3},
            )
            result[f"{batch} x {context}, chunk {chunk}"] = {
                "ms": step_s * 1e3,
                "prefill tokens/s": chunk / step_s,
                **rates,
            }
    show("fused passes", result)
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


def sampling_table(bench: Bench, batch: int = 64, context: int = 2048) -> dict[str, Any]:
    """A decode step by how its rows are sampled, and what launching it costs the host."""
    result = {}
    for name, sampling in SAMPLINGS.items():
        bench.open_batch(batch, context, sampling)
        took = bench.decode_s(batch, bench.device.units)
        steps, host = [bench.decode_step(batch, bench.device.units) for _ in range(6)], []
        for step in steps:
            began_s = time.perf_counter()
            bench.executor.submit(step)
            host.append(time.perf_counter() - began_s)
            while not bench.done():
                pass
        result[name] = {"ms": took * 1e3, "launch ms": statistics.median(host) * 1e3}
    show(f"decode step of {batch} x {context} by sampling", result)
    return result


def loop_table(
    device: CudaDevice, batch: int = 64, prompt: int = 1900, answer: int = 448
) -> dict[str, Any]:
    """Requests through engine and loop: how long the GPU waits between decode steps of a full batch."""
    result = {}
    units, layers = device.units, device.spec.layers
    for name, policy in (
        ("serial", Serial(8192, units, 2)),
        ("multiplex 32", Multiplex(8192, units, 32, depth=2)),
    ):
        tap = Tap(device, policy.lanes)
        inbox = tap.inbox
        limits = EngineLimits(
            device.pages,
            device.tables.page_tokens,
            batch,
            device.max_context_tokens,
            8192,
            (),
            units,
            layers,
            True,
        )
        engine, finished = Engine(limits, policy), []

        def deliver(
            outputs: list[Output],
            engine: Engine,
            inbox: WallClockEventQueue = inbox,
            finished: list[str] = finished,
        ) -> None:
            finished += [o.id for o in outputs if isinstance(o, OutputDelta) and o.finish_reason]
            if len(finished) == batch and engine.idle:
                inbox.stop()

        chance = random.Random(1)
        for n in range(batch):
            tokens = tuple(chance.randrange(1000, 30000) for _ in range(prompt))
            sampling = Sampling(max_tokens=answer, temperature=0.0, ignore_eos=True)
            inbox.put(AddRequest(id=str(n), prompt=tokens, sampling=sampling))
        began_s = time.perf_counter()
        run(engine, tap, tap, deliver)
        wall_s = time.perf_counter() - began_s
        tap.close()
        full = [
            d
            for d in tap.dones
            if tap.steps[d.step].work.decode_batch == batch
            and not tap.steps[d.step].work.prefill_tokens
        ]
        full.sort(key=lambda done: done.ended_s)
        pairs = list(itertools.pairwise(full))
        idle = sum(max(0.0, b.started_s - a.ended_s) for a, b in pairs) / (
            full[-1].ended_s - full[0].started_s
        )
        result[name] = {
            "decode ms": statistics.median(b.ended_s - a.ended_s for a, b in pairs) * 1e3,
            "GPU idle %": idle * 100,
            "launch ms": statistics.median(tap.submit_s) * 1e3,
            "launch %": 100
            * statistics.median(tap.submit_s)
            / statistics.median(b.ended_s - a.ended_s for a, b in pairs),
            "steps": len(full),
            "wall s": wall_s,
        }
    show(f"engine loop, {batch} requests of {prompt} + {answer} tokens", result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = [
        "decode",
        "sampling",
        "prefill",
        "parts",
        "groups",
        "small",
        "products",
        "together",
        "chunk",
        "loop",
    ]
    parser.add_argument("what", nargs="*", default=parts)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--levels", type=int, nargs="+", default=[24, 32, 48, 64])
    parser.add_argument(
        "--cases",
        nargs="+",
        default=CASES,
        help="batch x context of decode steps; the last two also together",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[512, 1024, 4096, 8192],
        help="of the prefill passes",
    )
    parser.add_argument("--max-running", type=int, default=112)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flags = {
        "policy": "multiplex",
        "load_format": "dummy",
        "max_running": args.max_running,
        "max_context_tokens": 16384,
    }
    flags |= {
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "batch_invariant": args.batch_invariant,
    }
    config = Config().replace(model=args.model, **flags)
    cases = [
        (int(batch), int(context)) for batch, context in (case.split("x") for case in args.cases)
    ]
    began_s = time.perf_counter()
    device = open_cuda(
        config,
        resolve_model(args.model),
        lambda line: print(f"{time.perf_counter() - began_s:6.1f} s  {line}", flush=True),
    )
    print(*device.notes, sep="\n")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "power limit W": Meter().limit_w,
        "torch": torch.__version__,
        "ops": device.decoder.ops.name,
        "graphs": {"count": device.decode_graphs.count, "seconds": device.decode_graphs.capture_s},
        "graphs of passes": {
            "count": device.piecewise_graphs.count,
            "seconds": device.piecewise_graphs.capture_s,
        },
    }
    if "loop" in args.what:
        result["loop"] = loop_table(device)
    bench = Bench(device)
    tables = {
        "decode": lambda: decode_table(bench, args.levels, cases),
        "sampling": lambda: sampling_table(bench),
        "prefill": lambda: prefill_table(bench, args.levels, args.tokens),
        "parts": lambda: shown("a prefill pass of 4096 tokens, taken apart", parts_table(bench)),
        "groups": lambda: groups_table(bench),
        "small": lambda: small_table(bench, SMALL),
        "products": lambda: products_table(bench, (16, *args.levels, 64)),
        "together": lambda: together_table(bench, args.levels, cases[-2:]),
        "chunk": lambda: chunk_table(bench, cases[-2:]),
    }
    for name, table in tables.items():
        if name in args.what:
            result[name] = table()
            if args.json:
                args.json.write_text(json.dumps(result, indent=1))
    bench.executor.close()
    print(
        f"\n{torch.cuda.max_memory_reserved() / 2**30:.1f} GiB reserved at most; {time.perf_counter() - began_s:.0f} s in all"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


def shown(title: str, table: dict[str, Any]) -> dict[str, Any]:
    show(title, table)
    return table


if __name__ == "__main__":
    main()
