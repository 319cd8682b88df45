"""The search for a mode's goodput: the highest rate at which enough requests meet their targets.

Promises: every mode gets the same requests in the same order and only their times are stretched;
rates are on one grid; deterministic, whatever the number of processes. Goodput as in DistServe
(OSDI'24).

A run stops as soon as too many requests have missed. Attainment is assumed to fall with the rate;
where it does not, the rate found is one that holds while the next grid step does not.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from counterpoint.bench import transform
from counterpoint.bench.report import ReplayResult, RequestLatency, is_complete, summarise
from counterpoint.bench.workload import Query
from counterpoint.config import Config
from counterpoint.simulator.machine import Machine
from counterpoint.simulator.modes import Mode
from counterpoint.simulator.simulate import SimRun, query_slo, simulate
from counterpoint.types import BatchShape, RequestTiming, Slo

STRIDE = 16  # grid steps by which the search moves at first, if steps are of 2 %
REACH = 1.02**STRIDE  # the same as a factor, for any precision
MAX_STRIDES = 40  # from the start; beyond, a mode holds no rate, or any
REPORTED = (
    "p50_ttft_ms",
    "p90_ttft_ms",
    "p50_tpot_ms",
    "p90_tpot_ms",
    "p99_itl_ms",
    "output_throughput",
    "active_share",
    "preemptions",
)


@dataclasses.dataclass(frozen=True, slots=True)
class PlanTask:
    """Find the highest rate, to a relative `precision`, at which a share `min_attainment` of the
    queries meets its targets."""

    machine: Machine
    config: Config
    queries: tuple[Query, ...]
    min_attainment: float = 0.9
    precision: float = 0.02
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Requests/s of a grid step; step 0 is 1 request/s."""
        return (1 + self.precision) ** step

    @property
    def stride(self) -> int:
        """Grid steps that make about REACH."""
        return max(1, round(math.log(REACH) / math.log1p(self.precision)))


class SloUnreachable(Exception):
    """Too many requests have missed their targets."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundRate:
    """A mode's goodput in requests/s (0.0: it holds no rate), attainment and other figures there.
    `tried`: every (rate, attainment); None where the run was stopped."""

    mode: str
    rate: float
    attainment: float | None
    figures: Mapping[str, Any]
    tried: tuple[tuple[float, float | None], ...]


def find_rate(task: PlanTask, mode: Mode, start: int = 0) -> FoundRate:
    """The search begins at grid step `start`. Raises ValueError if the load is so small that no
    rate makes it miss its targets."""
    task = dataclasses.replace(
        task, config=task.config.replace(**mode.settings), machine=mode.apply_to(task.machine)
    )
    seen: dict[int, dict[str, Any] | None] = {}

    def holds(step: int) -> bool:
        if step not in seen:
            seen[step] = run_at_rate(task, task.rate_at(step))
        return seen[step] is not None

    if run_at_rate(task, math.inf) is not None:
        raise ValueError(
            f"{len(task.queries)} requests are too few: {mode.name} serves them in time even when "
            "all come at once; give more requests or tighter targets"
        )
    low = find_highest(holds, start, task.stride)
    tried = tuple(
        (task.rate_at(step), result["slo_attainment"] if result else None)
        for step, result in sorted(seen.items())
    )
    result = seen[low] if low is not None else None
    if low is None or result is None:
        return FoundRate(mode.name, 0.0, None, {}, tried)
    return FoundRate(
        mode.name,
        task.rate_at(low),
        result["slo_attainment"],
        {key: result.get(key) for key in REPORTED},
        tried,
    )


def find_highest(holds: Callable[[int], bool], start: int, stride: int = STRIDE) -> int | None:
    """The highest step that holds, if all below it do; None: none within MAX_STRIDES strides."""
    up = holds(start)
    low = high = start
    for _ in range(MAX_STRIDES):
        if up:
            low, high = high, high + stride
            if not holds(high):
                break
        else:
            low, high = low - stride, low
            if holds(low):
                break
    else:
        return low if up else None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def run_at_rate(task: PlanTask, rate: float) -> dict[str, Any] | None:
    """The report at `rate` requests/s (infinite: all at once); None if attainment was too low."""
    if math.isinf(rate):
        queries = transform.replace_arrivals(
            task.queries, "once", rate, burstiness=1.0, seed=task.seed
        )
    else:
        queries = transform.scale_to_rate(task.queries, rate)
    slo = {query.id: query_slo(query, task.config) for query in queries}
    try:
        run = SimRun(seed=task.seed, on_timing=stop_when_unreachable(slo, task.min_attainment))
        result = simulate(task.machine, queries, task.config, run)
    except SloUnreachable:
        return None
    return summarise(ReplayResult(result.records, after=result.stats), slo)


def stop_when_unreachable(
    slo: Mapping[str, Slo], min_attainment: float
) -> Callable[[RequestTiming], None]:
    """Raises SloUnreachable as soon as attainment can't reach `min_attainment` any more."""
    allowed, missed = int(len(slo) * (1 - min_attainment) + 1e-9), 0

    def on_timing(record: RequestTiming) -> None:
        nonlocal missed
        missed += not (
            is_complete(record) and all(RequestLatency(record).meets(slo[record.id]).values())
        )
        if missed > allowed:
            raise SloUnreachable

    return on_timing


def search(task: PlanTask, modes: Sequence[Mode], jobs: int, start: int = 0) -> Iterator[FoundRate]:
    """Each mode's goodput, as it is found."""
    if jobs < 2:
        yield from (find_rate(task, mode, start) for mode in modes)
        return
    with ProcessPoolExecutor(jobs, initializer=exit_with_parent) as pool:
        try:
            for done in as_completed([pool.submit(find_rate, task, mode, start) for mode in modes]):
                yield done.result()
        except BaseException:  # a wrong mode, or Ctrl-C: end the other searches
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def exit_with_parent() -> None:
    """In a process of `search`: ignore Ctrl-C (the parent handles it), and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def initial_rate(task: PlanTask) -> float:
    """Where the search begins: the device's rate if prefill and decode took turns on all units,
    with decode batches of 32."""
    physics, _ = task.machine.estimators(task.config)
    layers, units = task.machine.model.layers, task.machine.device.units
    prompt = round(sum(q.prompt_tokens for q in task.queries) / len(task.queries))
    answer = round(sum(q.output_tokens for q in task.queries) / len(task.queries))
    prefill = BatchShape.prefill(prompt, 0, layers)
    decode = BatchShape.decode(32, 32 * (prompt + answer), layers)
    return 1 / (physics.seconds(prefill, units) + answer * physics.seconds(decode, units) / 32)
