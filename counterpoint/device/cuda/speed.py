"""How fast the CUDA device is: decode, prefill, and both at once, through the executor that serves.

    python -m counterpoint.device.cuda.speed [decode] [sampling] [prefill] [groups] [together] [chunk] [loop] [--json FILE]

Owns: the measurement. Promises: random weights, random KV contents; times are the device's own (StepDone), medians where a thing is
repeated; everything goes through CudaExecutor, so launching is part of what is measured.
Must not: be imported by what serves.

*Multiplexing gain*: the time that the same prefills and decode steps take in turns on the whole device, over the time they took
together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from counterpoint.config import Config
from counterpoint.core.engine import Engine, Limits
from counterpoint.core.loop import run
from counterpoint.core.policy import Multiplex, Serial
from counterpoint.device.cuda.start import CudaDevice, open_cuda
from counterpoint.device.wall import WallInbox
from counterpoint.spec.source import resolve
from counterpoint.types import (
    Arrive,
    Close,
    Command,
    Delta,
    Event,
    Lane,
    Open,
    Output,
    Role,
    Sampling,
    Segment,
    Step,
    StepDone,
    Work,
)

LANES = (Lane(0, Role.DECODE, 2), Lane(1, Role.PREFILL, 2))
GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)
PREFILL_SLOT = 0
CASES = ((1, 2048), (8, 2048), (64, 2048), (100, 8192))  # batch, context


@dataclass
class Bench:
    """A device, an executor and steps by hand. Decode rows are slots 1, 2, …, over shuffled pages; slot 0 is for prefills."""

    device: CudaDevice
    inbox: WallInbox = field(default_factory=WallInbox)
    serial: int = 0
    context: int = 0

    def __post_init__(self) -> None:
        self.executor = self.device.executor(LANES, self.inbox)
        self.layers = self.device.spec.layers
        self.size = self.device.tables.page_tokens
        torch.manual_seed(0)
        for pool in (*self.device.kv.k, *self.device.kv.v):
            pool.normal_()
        self.order = torch.randperm(self.device.pages).tolist()

    # ---------------------------------------------------------------- setting up

    def open_batch(self, batch: int, context: int, sampling: Sampling = GREEDY) -> None:
        """Slots 1 to `batch` with `context` tokens each, in the cache."""
        per_slot = -(-(context + 1) // self.size)
        for slot in range(1, batch + 1):
            pages = tuple(self.order[-slot * per_slot :][:per_slot])
            tokens = [random.randrange(1000, 30000) for _ in range(context)]
            self.executor.submit(Open(slot, tuple(tokens), context, pages, sampling))
        self.context = context

    def open_prefill(self, tokens: int) -> tuple[int, ...]:
        """Slot 0 with a random prompt; its pages."""
        prompt = tuple(random.randrange(1000, 30000) for _ in range(tokens))
        self.executor.submit(Close(PREFILL_SLOT))
        self.executor.submit(Open(PREFILL_SLOT, prompt, tokens, (), GREEDY))
        return tuple(self.order[: -(-tokens // self.size)])

    # ---------------------------------------------------------------- steps

    def decode_step(self, batch: int, units: int) -> Step:
        """Always at the same position: the context does not grow while it is measured."""
        segments = tuple(Segment(slot, self.context - 1, 1, True) for slot in range(1, batch + 1))
        work = Work(
            decode_batch=batch, decode_context=batch * self.context, samples=batch, last_layer=self.layers, layers=self.layers
        )
        return self.made(0, None, 0, self.layers, units, segments, work)

    def prefill_steps(self, tokens: int, units: int, group: int) -> list[Step]:
        segments = (Segment(PREFILL_SLOT, 0, tokens, True, self.open_prefill(tokens)),)
        work = Work(prefill_tokens=tokens, prefill_squares=tokens * tokens, prefill_requests=1, samples=1, layers=self.layers)
        self.serial += 1
        batch, edges = self.serial, range(0, self.layers, group)
        return [self.made(1, batch, a, min(a + group, self.layers), units, segments, work) for a in edges]

    def made(self, lane: int, batch: int | None, first: int, last: int, units: int, segments: Any, work: Work) -> Step:
        self.serial += 1
        return Step(self.serial, lane, self.serial if batch is None else batch, first, last, units, segments, work)

    def done(self) -> list[StepDone]:
        got = self.inbox.get()
        assert got is not None
        dones = [event for event in got[1] if isinstance(event, StepDone)]
        for done in dones:
            if done.error:
                raise RuntimeError(done.error)
        return dones

    def play(self, steps: Sequence[Step], depth: int = 2) -> list[StepDone]:
        """One lane, `depth` steps in flight."""
        waiting, finished = list(steps), []
        for _ in range(min(depth, len(waiting))):
            self.executor.submit(waiting.pop(0))
        while len(finished) < len(steps):
            for done in self.done():
                finished.append(done)
                if waiting:
                    self.executor.submit(waiting.pop(0))
        return finished

    # ---------------------------------------------------------------- what is measured

    def decode_s(self, batch: int, units: int, steps: int = 16) -> float:
        """A decode step, one always queued ahead: from end to end."""
        dones = self.play([self.decode_step(batch, units) for _ in range(steps)])
        ends = [done.ended_s for done in dones[2:]]
        return statistics.median(b - a for a, b in itertools.pairwise(ends))

    def prefill_s(self, tokens: int, units: int, group: int | None = None, times: int = 3) -> float:
        took = []
        for _ in range(times + 1):
            dones = self.play(self.prefill_steps(tokens, units, group or self.layers))
            took.append(dones[-1].ended_s - dones[0].started_s)
        return statistics.median(took[1:])

    def together(self, batch: int, level: int, tokens: int, group: int, passes: int = 3) -> dict[str, float]:
        """Prefills one after another on the rest of the device, decode steps all the while on `level` SMs."""
        rest = self.device.units - level
        queue = [step for _ in range(passes) for step in self.prefill_steps(tokens, rest, group)]
        total, prefill_dones, decode_dones = len(queue), [], []
        for _ in range(2):
            self.executor.submit(self.decode_step(batch, level))
            self.executor.submit(queue.pop(0))
        in_flight = 2
        while len(prefill_dones) < total or in_flight:
            for done in self.done():
                if done.lane == 1:
                    prefill_dones.append(done)
                    if queue:
                        self.executor.submit(queue.pop(0))
                    continue
                decode_dones.append(done)
                in_flight -= 1
                if len(prefill_dones) < total:
                    self.executor.submit(self.decode_step(batch, level))
                    in_flight += 1
        began, ended = prefill_dones[0].started_s, prefill_dones[-1].ended_s
        ends = [done.ended_s for done in decode_dones if began <= done.ended_s <= ended]
        period = (ends[-1] - ends[0]) / (len(ends) - 1)
        return {"prefill_s": (ended - began) / passes, "decode_s": period}


# ---------------------------------------------------------------- tables


def decode_table(bench: Bench, levels: Sequence[int]) -> dict[str, Any]:
    spec, result = bench.device.spec, {}
    for batch, context in CASES:
        bench.open_batch(batch, context)
        read = spec.weight_bytes(2) + batch * context * spec.kv_bytes_per_token(2)
        if not spec.tied_embeddings:
            read -= spec.vocab * spec.hidden * 2  # of the input embeddings, a row per token is read
        for units in (*levels, bench.device.units):
            took = bench.decode_s(batch, units)
            result[f"{batch} x {context}, {units} SMs"] = {"ms": took * 1e3, "GB/s": read / took / 1e9}
    show("decode step", result)
    return result


def prefill_flops(bench: Bench, tokens: int) -> float:
    spec = bench.device.spec
    return tokens * spec.flops_per_token((tokens + 1) // 2, sampled=False) + 2 * spec.vocab * spec.hidden


def prefill_table(bench: Bench, levels: Sequence[int]) -> dict[str, Any]:
    result = {}
    for units in (bench.device.units, *(bench.device.units - level for level in levels)):
        for tokens in (512, 1024, 4096, 8192):
            took = bench.prefill_s(tokens, units)
            rates = {"TFLOP/s": prefill_flops(bench, tokens) / took / 1e12, "tokens/s": tokens / took}
            result[f"{tokens} tokens, {units} SMs"] = {"ms": took * 1e3, **rates}
    show("prefill, whole passes", result)
    return result


def groups_table(bench: Bench) -> dict[str, Any]:
    result = {}
    for tokens in (1024, 4096):
        whole = bench.prefill_s(tokens, bench.device.units)
        for group in (1, 2, 4, 8):
            took = bench.prefill_s(tokens, bench.device.units, group)
            result[f"{tokens} tokens, {group} layers at a time"] = {"ms": took * 1e3, "slower %": (took / whole - 1) * 100}
    show("prefill in layer groups against whole passes, full device", result)
    return result


def together_table(bench: Bench, levels: Sequence[int], tokens: int = 4096) -> dict[str, Any]:
    result, units = {}, bench.device.units
    prefill_s = bench.prefill_s(tokens, units)
    for batch, context in CASES[2:]:
        bench.open_batch(batch, context)
        alone_s = bench.decode_s(batch, units)
        for level in levels:
            split_alone_s, rest_s = bench.decode_s(batch, level, 8), bench.prefill_s(tokens, units - level, times=1)
            group = max(1, min(bench.layers, -(-int(1e6 * split_alone_s) * bench.layers // int(1e6 * rest_s))))
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
            }
        result[f"{batch} x {context}, in turns"] = {"decode ms": alone_s * 1e3, "prefill ms": prefill_s * 1e3, "gain": 1.0}
    show(f"prefill of {tokens} and decode together", result)
    return result


def chunk_table(bench: Bench, chunks: Sequence[int] = (512, 1024, 2048), start: int = 1536) -> dict[str, Any]:
    """Fused passes: every decode and a piece of a prompt of 4096 tokens, from its middle on."""
    result = {}
    for batch, context in CASES[2:]:
        bench.open_batch(batch, context)
        bench.decode_s(batch, bench.device.units, 4)
        for chunk in chunks:
            took = []
            for _ in range(4):
                pages = bench.open_prefill(4096)
                rows = tuple(Segment(slot, context - 1, 1, True) for slot in range(1, batch + 1))
                segments = (*rows, Segment(PREFILL_SLOT, start, chunk, False, pages))
                work = Work(prefill_tokens=chunk, prefill_requests=1, decode_batch=batch, samples=batch)
                (done,) = bench.play([bench.made(0, None, 0, bench.layers, bench.device.units, segments, work)])
                took.append(done.ended_s - done.started_s)
            step_s = statistics.median(took[1:])
            result[f"{batch} x {context}, chunk {chunk}"] = {"ms": step_s * 1e3, "prefill tokens/s": chunk / step_s}
    show("fused passes", result)
    return result


SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": Sampling(max_tokens=1 << 20, temperature=0.8),
    "temperature, top-p": Sampling(max_tokens=1 << 20, temperature=0.8, top_p=0.9),
    "temperature, top-k, top-p": Sampling(max_tokens=1 << 20, temperature=0.8, top_k=50, top_p=0.9),
    "penalties (outside the graph)": Sampling(max_tokens=1 << 20, temperature=0.8, top_p=0.9, repetition_penalty=1.1),
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


# ---------------------------------------------------------------- the real loop


class Tap:
    """Stands between loop and device, and keeps what passes."""

    def __init__(self, device: CudaDevice, lanes: Sequence[Lane]) -> None:
        self.inbox = WallInbox()
        self.executor = device.executor(lanes, self.inbox)
        self.steps: dict[int, Step] = {}
        self.dones: list[StepDone] = []
        self.submit_s: list[float] = []

    def get(self) -> tuple[float, Sequence[Event]] | None:
        got = self.inbox.get()
        self.dones += [event for event in got[1] if isinstance(event, StepDone)] if got else []
        return got

    def submit(self, command: Command) -> None:
        began_s = time.perf_counter()
        self.executor.submit(command)
        if isinstance(command, Step):
            self.steps[command.id] = command
            if not command.work.prefill_tokens:
                self.submit_s.append(time.perf_counter() - began_s)

    def close(self) -> None:
        self.executor.close()


def loop_table(device: CudaDevice, batch: int = 64, prompt: int = 512, answer: int = 160) -> dict[str, Any]:
    """Requests through engine and loop: how long the GPU waits between decode steps of a full batch."""
    result = {}
    units, layers = device.units, device.spec.layers
    for name, policy in (("serial", Serial(8192, units, 2)), ("multiplex 32", Multiplex(8192, units, 32, layers, depth=2))):
        tap = Tap(device, policy.lanes)
        inbox = tap.inbox
        limits = Limits(device.pages, device.tables.page_tokens, batch, device.max_context_tokens, 8192, (), units, layers, True)
        engine, finished = Engine(limits, policy), []

        def deliver(outputs: list[Output], engine: Engine, inbox: WallInbox = inbox, finished: list[str] = finished) -> None:
            finished += [o.id for o in outputs if isinstance(o, Delta) and o.finish]
            if len(finished) == batch and engine.idle:
                inbox.stop()

        chance = random.Random(1)
        for n in range(batch):
            tokens = tuple(chance.randrange(1000, 30000) for _ in range(prompt))
            sampling = Sampling(max_tokens=answer, temperature=0.0, ignore_eos=True)
            inbox.put(Arrive(id=str(n), prompt=tokens, sampling=sampling))
        began_s = time.perf_counter()
        run(engine, tap, tap, deliver)
        wall_s = time.perf_counter() - began_s
        tap.close()
        full = [d for d in tap.dones if tap.steps[d.step].work.decode_batch == batch and not tap.steps[d.step].work.prefill_tokens]
        full.sort(key=lambda done: done.ended_s)
        pairs = list(itertools.pairwise(full))
        idle = sum(max(0.0, b.started_s - a.ended_s) for a, b in pairs) / (full[-1].ended_s - full[0].started_s)
        result[name] = {
            "decode ms": statistics.median(b.ended_s - a.ended_s for a, b in pairs) * 1e3,
            "GPU idle %": idle * 100,
            "launch ms": statistics.median(tap.submit_s) * 1e3,
            "steps": len(full),
            "wall s": wall_s,
        }
    show(f"engine loop, {batch} requests of {prompt} + {answer} tokens", result)
    return result


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"\n{title}\n{'':36s}" + "".join(f"{name.rstrip('.'):>18s}" for name in columns))
    for label, row in rows.items():
        print(f"{label:36s}" + "".join(f"{row[name]:18.3f}" if name in row else " " * 18 for name in columns), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["decode", "sampling", "prefill", "groups", "together", "chunk", "loop"]
    parser.add_argument("what", nargs="*", default=parts)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--levels", type=int, nargs="+", default=[24, 32, 48, 64])
    parser.add_argument("--max-running", type=int, default=112)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flags = {"policy": "multiplex", "load_format": "dummy", "max_running": args.max_running, "max_context_tokens": 16384}
    config = Config().replace(model=args.model, **flags)
    began_s = time.perf_counter()
    device = open_cuda(
        config, resolve(args.model), lambda line: print(f"{time.perf_counter() - began_s:6.1f} s  {line}", flush=True)
    )
    print(*device.notes, sep="\n")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ops": device.decoder.ops.name,
        "graphs": {"count": device.graphs.count, "seconds": device.graphs.capture_s},
    }
    if "loop" in args.what:
        result["loop"] = loop_table(device)
    bench = Bench(device)
    tables = {
        "decode": lambda: decode_table(bench, args.levels),
        "sampling": lambda: sampling_table(bench),
        "prefill": lambda: prefill_table(bench, args.levels),
        "groups": lambda: groups_table(bench),
        "together": lambda: together_table(bench, args.levels),
        "chunk": lambda: chunk_table(bench),
    }
    for name, table in tables.items():
        if name in args.what:
            result[name] = table()
            if args.json:
                args.json.write_text(json.dumps(result, indent=1))
    bench.executor.close()
    print(f"\n{torch.cuda.max_memory_reserved() / 2**30:.1f} GiB reserved at most; {time.perf_counter() - began_s:.0f} s in all")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
