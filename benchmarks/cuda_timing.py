"""Timing on the device, clock and power readings, and tables, for the CUDA benchmarks.

Must not: be imported by code that serves.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Candidates = Mapping[str, Callable[[int], object]]  # name: run it on buffer set i


def time_interleaved(
    candidates: Candidates, stream: torch.cuda.Stream, rounds: int = 15, warm: int = 3
) -> dict[str, float]:
    """Median milliseconds of each candidate on `stream`; each round calls every candidate once."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    with torch.cuda.stream(stream):
        for i in range(warm):
            for run in candidates.values():
                run(i)
        events = []
        for i in range(rounds):
            for name, run in candidates.items():
                begin, end = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                begin.record(stream)
                run(i)
                end.record(stream)
                events.append((name, begin, end))
    stream.synchronize()
    for name, begin, end in events:
        times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def capture_calls(
    run: Callable[[int], object], calls: int, stream: torch.cuda.Stream
) -> Callable[[int], None]:
    """A graph of `calls` calls over the buffer sets in turn, so launching costs nothing. Keeps
    `run` alive."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for i in range(calls):
            run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            run(i)

    def replay(_: int, owner: object = run) -> None:
        graph.replay()

    return replay


def time_repeated(
    run: Callable[[], object], stream: torch.cuda.Stream, for_s: float = 0.3
) -> tuple[float, dict[str, float]]:
    """Median seconds of `run` in the second half of `for_s`, and the power meter's summary."""
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    with PowerMeter() as meter:
        while sum(times) < for_s:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            run()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times[len(times) // 2 :]), meter.summary


class PowerMeter:
    """The GPU's SM clock and power, read every few milliseconds by a thread, through NVML."""

    EVERY_S = 0.004

    def __init__(self, device: int = 0) -> None:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._card = pynvml.nvmlDeviceGetHandleByIndex(device)
        self.limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(self._card) / 1e3
        self._stopped = threading.Event()
        self._readings: list[tuple[float, float]] = []  # MHz, W
        self._num_capped = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PowerMeter:
        self._readings, self._num_capped = [], 0
        self._stopped.clear()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        assert self._thread is not None
        self._thread.join()

    @property
    def summary(self) -> dict[str, float]:
        """Medians since the last entry, and the share of readings at which NVML reports a power
        cap."""
        if not self._readings:
            return {}
        clocks, watts = zip(*self._readings, strict=True)
        return {
            "MHz": statistics.median(clocks),
            "W": statistics.median(watts),
            "power-capped %": 100 * self._num_capped / len(clocks),
        }

    def _loop(self) -> None:
        nvml, card = self._nvml, self._card
        while not self._stopped.wait(self.EVERY_S):
            clock = nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)
            self._readings.append((clock, nvml.nvmlDeviceGetPowerUsage(card) / 1e3))
            self._num_capped += bool(
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)
                & nvml.nvmlClocksThrottleReasonSwPowerCap
            )


def print_table(title: str, rows: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"\n{title}\n{'':36s}" + "".join(f"{name.rstrip('.'):>18s}" for name in columns))
    for label, row in rows.items():
        print(
            f"{label:36s}"
            + "".join(f"{row[name]:18.3f}" if name in row else " " * 18 for name in columns),
            flush=True,
        )


def parse_cases(texts: Sequence[str]) -> list[tuple[int, int]]:
    """(batch, context) of texts like 64x4096."""
    return [(int(batch), int(context)) for batch, context in (text.split("x") for text in texts)]


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(result, indent=1))
