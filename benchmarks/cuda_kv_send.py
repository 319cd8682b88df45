"""How fast KV goes to another process's pool on the same GPU, and how much of that a prefill hides.

    python -m benchmarks.cuda_kv_send [--model NAME] [--tokens N …] [--groups N …] [--json FILE]

Takes about a minute on one H200.

Promises: two processes, one of which only owns a pool. Prompts go through CudaExecutor in layer
groups; each group is sent by CudaIpcTransport when its step completes, as a worker does. Pages are
in random order on both sides. Times are CUDA events, as medians.
Must not: be imported by code that serves.

*Inside*: share of the copies' time before the end of the prefill. *Visible*: from the end of the
prefill to the end of the last copy. *Slower*: the prefill with copies, against the same without.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.cuda_steps import StepBench
from benchmarks.cuda_timing import print_table
from counterpoint.config import Config
from counterpoint.device.cuda.device_setup import open_cuda
from counterpoint.device.cuda.ipc import CudaCopier
from counterpoint.device.kv_memory import pool_memory
from counterpoint.kv_transfer.cuda_ipc import CudaIpcTransport
from counterpoint.kv_transfer.transport import Completed
from counterpoint.model.kv import KVPool
from counterpoint.spec import ModelSpec
from counterpoint.spec.source import resolve_model
from counterpoint.types import Role

WRITER, READER, GENERATION = 1, 2, 1
WRITE_PAGES = 256  # of a write, as the handoff cuts them (disagg/handoff_events.py)


class TimedCopier(CudaCopier):
    """Keeps the events of its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start_copy(
        self,
        source_RW: Tensor,
        sources: NDArray[np.int64],
        target_RW: Tensor,
        targets: NDArray[np.int64],
    ) -> Any:
        ticket = super().start_copy(source_RW, sources, target_RW, targets)
        self.copies.append(ticket)
        return ticket


def run_receiver(
    line: Connection, spec: ModelSpec, pages: int, page_tokens: int, dtype: torch.dtype
) -> None:
    """The other process: grants everything, and reports sums of its pages on request."""
    torch.cuda.set_device(0)
    pool = KVPool(spec, pages, page_tokens, dtype, "cuda")
    link = CudaIpcTransport(lambda: None, CudaCopier())
    line.send(link.register(pool_memory(pool)))
    link.connect(READER, WRITER, line.recv(), False)
    link.grant(READER, GENERATION, range(pages))
    line.send(None)
    while (wanted := line.recv()) is not None:
        line.send([pool.k[layer][page].float().sum().item() for layer, page in wanted])
    link.disconnect(READER)
    link.close()


class TimedSender:
    """A device, a transport to the other process, and prompts to send."""

    def __init__(self, bench: StepBench) -> None:
        self.bench, device = bench, bench.device
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        pages = device.kv.pages
        shape = (device.spec, pages, device.tables.page_tokens, device.decoder.kv_dtype)
        self.process = context.Process(target=run_receiver, args=(there, *shape), daemon=True)
        self.process.start()
        self.copier, self.progress = TimedCopier(), threading.Event()
        self.transport = CudaIpcTransport(self.progress.set, self.copier)
        self.memory = pool_memory(device.kv)
        blob, theirs = self.transport.register(self.memory), self.pipe.recv()
        self.pipe.send(blob)
        self.pipe.recv()
        self.transport.connect(WRITER, READER, theirs, True)
        self.order = random.Random(2).sample(range(pages), pages)
        self.ops = 0
        self.pending: set[int] = set()

    def send(self, first_layer: int, last_layer: int, pages: list[int]) -> None:
        for start in range(0, len(pages), WRITE_PAGES):
            here = pages[start : start + WRITE_PAGES]
            there = self.order[start : start + len(here)]
            self.ops += 1
            self.pending.add(self.ops)
            self.transport.write(
                WRITER,
                GENERATION,
                self.memory.spans(first_layer, last_layer, here, there),
                self.ops,
            )

    def wait(self) -> None:
        while self.pending:
            self.progress.wait()
            self.progress.clear()
            for notice in self.transport.poll():
                assert isinstance(notice, Completed) and not notice.error, notice
                self.pending.discard(notice.op)

    def check(self, pages: list[int]) -> None:
        """Raises RuntimeError if a page differs from the one sent."""
        wanted = [
            (layer, index) for layer in (0, self.bench.layers - 1) for index in (0, len(pages) - 1)
        ]
        self.pipe.send([(layer, self.order[index]) for layer, index in wanted])
        kv = self.bench.device.kv
        if self.pipe.recv() != [
            kv.k[layer][pages[index]].float().sum().item() for layer, index in wanted
        ]:
            raise RuntimeError("pages differ from those that were sent")

    def close(self) -> None:
        self.transport.disconnect(WRITER)
        self.pipe.send(None)
        self.process.join(20)
        self.transport.close()

    # ---------------------------------------------------------------- what is measured

    def measure_copy(self, tokens: int, times: int = 5) -> tuple[float, float, int]:
        """(seconds from posting to Completed, GPU seconds, bytes) of a prompt's pages, on an idle
        GPU."""
        pages = self.bench.page_order[: -(-tokens // self.bench.page_tokens)]
        host, own = [], []
        for _ in range(times + 1):
            self.copier.copies.clear()
            began_s = time.perf_counter()
            self.send(0, self.bench.layers, pages)
            self.wait()
            host.append(time.perf_counter() - began_s)
            own.append(sum(a.elapsed_time(b) for a, b in self.copier.copies) * 1e-3)
        self.check(pages)
        return (
            statistics.median(host[1:]),
            statistics.median(own[1:]),
            len(pages) * self.bench.layers * 2 * self.memory.page_bytes,
        )

    def measure_prefill(self, tokens: int, group: int, sends: bool) -> dict[str, float]:
        """One prompt in layer groups, each sent when its step completes. Milliseconds."""
        bench, driver = self.bench, self.bench.device.driver
        stream = bench.device.stream_partitions.choose(Role.PREFILL, bench.device.units).stream
        steps = bench.prefill_steps(tokens, bench.device.units, group)
        pages = list(steps[0].segments[0].pages)
        layers = {step.id: (step.first_layer, step.last_layer) for step in steps}
        self.copier.copies.clear()
        torch.cuda.synchronize()
        start, waiting, finished, end = driver.record_event(stream), list(steps), 0, None
        for _ in range(min(2, len(waiting))):
            bench.executor.submit(waiting.pop(0))
        while finished < len(steps):
            if not waiting and end is None:
                end = driver.record_event(stream)
            for done in bench.wait_done():
                finished += 1
                if waiting:
                    bench.executor.submit(waiting.pop(0))
                if sends:
                    self.send(*layers[done.step], pages)
        end = end or driver.record_event(stream)
        self.wait()
        torch.cuda.synchronize()
        took = start.elapsed_time(end)
        if not sends:
            return {"prefill ms": took}
        spans = [(start.elapsed_time(a), start.elapsed_time(b)) for a, b in self.copier.copies]
        total = sum(b - a for a, b in spans)
        inside = sum(max(0.0, min(b, took) - a) for a, b in spans)
        return {
            "prefill ms": took,
            "copies ms": total,
            "inside %": 100 * inside / total,
            "visible ms": spans[-1][1] - took,
        }


def column_medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flags = {
        "policy": "serial",
        "load_format": "dummy",
        "max_running": 4,
        "max_context_tokens": 16384,
        "kv_memory_bytes": 8 << 30,
    }
    device = open_cuda(
        Config().replace(model=args.model, **flags),
        resolve_model(args.model),
        lambda line: print(line, flush=True),
    )
    bench = StepBench(device)
    sender = TimedSender(bench)
    copies: dict[str, dict[str, float]] = {}
    overlap: dict[str, dict[str, float]] = {}
    for tokens in args.tokens:
        host_s, own_s, size = sender.measure_copy(tokens)
        copies[f"{tokens} tokens"] = {
            "MB": size / 1e6,
            "ms": host_s * 1e3,
            "GPU ms": own_s * 1e3,
            "GB/s": size / host_s / 1e9,
            "GPU GB/s": size / own_s / 1e9,
        }
    print_table("KV to another process, alone", copies)
    for tokens in args.tokens:
        for group in args.groups:
            alone, beside = [
                column_medians(
                    [sender.measure_prefill(tokens, group, sends) for _ in range(args.times + 1)][
                        1:
                    ]
                )
                for sends in (False, True)
            ]
            slower = 100 * (beside["prefill ms"] / alone["prefill ms"] - 1)
            name = "whole" if group >= bench.layers else f"{group} layers at a time"
            overlap[f"{tokens} tokens, {name}"] = beside | {"slower %": slower}
    print_table("KV sent while the prompt is computed", overlap)
    sender.close()
    bench.executor.close()
    if args.json:
        args.json.write_text(
            json.dumps(
                {"device": torch.cuda.get_device_name(), "copies": copies, "overlap": overlap},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
