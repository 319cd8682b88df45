"""Plan: which mode serves a load best on a machine, found by simulation.

Owns: the search for each mode's goodput: the highest rate at which a share of requests keeps all targets (DistServe, OSDI'24).
Promises: every mode gets the same requests in the same order, only the clock is stretched; rates stand on one grid for all modes;
deterministic, whatever the number of processes. Must not: simulate otherwise than `simulate` does.

A run is given up as soon as too many requests have missed. Attainment is taken to fall with the rate: where it does not, the
rate found is one that holds beside one, a grid step above it, that does not.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Annotated, Any

import msgspec
from cyclopts import Group, Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from counterpoint import __version__
from counterpoint.bench import tables, transform
from counterpoint.bench.load import LoadOptions, flag, parse_slo
from counterpoint.bench.report import ReplayResult, RequestLatency, is_complete, summarise
from counterpoint.bench.tables import format_number, format_share, format_short
from counterpoint.bench.workload import Query, describe_load
from counterpoint.config import Config, require_writable
from counterpoint.core.policy import nearest
from counterpoint.core.policy.ablations import ABLATIONS
from counterpoint.device.cores import usable_cores
from counterpoint.flags import config_flags
from counterpoint.simulator.machine import Machine
from counterpoint.simulator.simulate import JSON, SimOptions, query_slo, simulate
from counterpoint.types import BatchShape, RequestTiming, Slo

SEARCH = Group("PlanOptions", sort_key=0)
MODES = "serial,chunked:512,chunked:1024,chunked:2048,chunked:8192,multiplex,auto"
SLO = "ttft=1.0,tpot=50ms"  # unless something else is said
SIXTEENTHS = (
    2,
    3,
    4,
    6,
    8,
)  # of the device, for decode: the static splits that `multiplex` without a number stands for
REQUESTS = 1000  # of a made load, unless something else is said: fewer are soon all there at once
STRIDE = 16  # grid steps by which a rate that holds and one that does not are looked for, if they are of 2 %
REACH = 1.02**STRIDE  # the same as a factor, whatever the steps are
FARTHEST = 40  # strides from the start; beyond, a mode holds no rate or any
KEPT = (
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
class Mode:
    """A way to serve: a name, and the settings that it is. `without`: the part that auto lacks (core/policy/ablations.py)."""

    name: str
    settings: Mapping[str, Any]
    without: str | None = None

    def on(self, machine: Machine) -> Machine:
        """`machine` with auto as this mode has it."""
        return (
            dataclasses.replace(machine, without=self.without)
            if self.without is not None
            else machine
        )

    @property
    def machines(self) -> int:
        """Those that it names itself."""
        return self.settings.get("prefill", 0) + self.settings.get("decode", 0)


@dataclasses.dataclass(frozen=True, slots=True)
class PlanTask:
    """What is searched: the highest rate at which `wanted` of `queries` keep their targets, to one part in 1/`precision`."""

    machine: Machine
    config: Config
    queries: tuple[Query, ...]
    wanted: float = 0.9
    precision: float = 0.02
    seed: int = 0

    def at(self, step: int) -> float:
        """The rate of a grid step, in requests/s. Step 0 is 1 request/s."""
        return (1 + self.precision) ** step

    @property
    def stride(self) -> int:
        """Grid steps that are about REACH."""
        return max(1, round(math.log(REACH) / math.log1p(self.precision)))


class SloUnreachable(Exception):
    """Too many requests have missed their targets."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundRate:
    """A mode's goodput in requests/s (0.0: not even far below the start), the share within targets and other figures at that rate,
    and every (rate, share) tried; None where the run was given up."""

    mode: str
    rate: float
    attainment: float | None
    figures: Mapping[str, Any]
    tried: tuple[tuple[float, float | None], ...]


# ---------------------------------------------------------------- the search


def find_rate(task: PlanTask, mode: Mode, start: int = 0) -> FoundRate:
    """The mode's goodput. `start`: the grid step at which the search begins. Raises ValueError if the load is too small to be
    served late at any rate."""
    task = dataclasses.replace(
        task, config=task.config.replace(**mode.settings), machine=mode.on(task.machine)
    )
    seen: dict[int, dict[str, Any] | None] = {}

    def holds(step: int) -> bool:
        if step not in seen:
            seen[step] = play(task, task.at(step))
        return seen[step] is not None

    if play(task, math.inf) is not None:
        few = f"{len(task.queries)} requests are too few: {mode.name} serves them in time even when all come at once"
        raise ValueError(f"{few}; give more requests or tighter targets")
    low = highest(holds, start, task.stride)
    tried = tuple(
        (task.at(step), result["slo_attainment"] if result else None)
        for step, result in sorted(seen.items())
    )
    result = seen[low] if low is not None else None
    if low is None or result is None:
        return FoundRate(mode.name, 0.0, None, {}, tried)
    return FoundRate(
        mode.name,
        task.at(low),
        result["slo_attainment"],
        {key: result.get(key) for key in KEPT},
        tried,
    )


def highest(holds: Callable[[int], bool], start: int, stride: int = STRIDE) -> int | None:
    """The highest step that holds, if all below it do; None if none within FARTHEST strides does."""
    up = holds(start)
    low = high = start
    for _ in range(FARTHEST):
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


def play(task: PlanTask, rate: float) -> dict[str, Any] | None:
    """The report of the load at `rate` requests/s (infinite: all at once); None if too many requests missed their targets."""
    if math.isinf(rate):
        queries = transform.replace_arrivals(
            task.queries, "once", rate, burstiness=1.0, seed=task.seed
        )
    else:
        queries = transform.scale_to_rate(task.queries, rate)
    slo = {query.id: query_slo(query, task.config) for query in queries}
    try:
        came = simulate(
            task.machine, queries, task.config, seed=task.seed, on_record=judge(slo, task.wanted)
        )
    except SloUnreachable:
        return None
    return summarise(ReplayResult(came.records, after=came.stats), slo)


def judge(slo: Mapping[str, Slo], wanted: float) -> Callable[[RequestTiming], None]:
    """Raises Hopeless as soon as so many of the records shown have missed that less than the share `wanted` can be in time."""
    allowed, missed = int(len(slo) * (1 - wanted) + 1e-9), 0

    def one(record: RequestTiming) -> None:
        nonlocal missed
        missed += not (
            is_complete(record) and all(RequestLatency(record).meets(slo[record.id]).values())
        )
        if missed > allowed:
            raise SloUnreachable

    return one


def search(task: PlanTask, modes: Sequence[Mode], jobs: int, start: int = 0) -> Iterator[FoundRate]:
    """Each mode's goodput, as it is found."""
    if jobs < 2:
        yield from (find_rate(task, mode, start) for mode in modes)
        return
    with ProcessPoolExecutor(jobs, initializer=follow_parent) as pool:
        try:
            for done in as_completed([pool.submit(find_rate, task, mode, start) for mode in modes]):
                yield done.result()
        except BaseException:  # a mode can't be, or Ctrl-C: nobody waits for the others
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def follow_parent() -> None:
    """In a process of `search`: a Ctrl-C is the parent's to heed, and the parent's end is the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


# ---------------------------------------------------------------- modes


def parse_modes(text: str, machine: Machine) -> list[Mode]:
    """Modes as "serial,chunked:512,multiplex:32,auto,pools:1:1"; chunked takes a budget in tokens, multiplex the units of decode
    (without: several), pools machines that prefill and that decode; "auto without fusion" and the like lack a part of it. Beside
    pools, the other modes have as many machines, each with all of the engine. Raises ValueError naming the part that is wrong."""
    parts = [part for part in (p.strip() for p in text.split(",")) if part]
    found = [mode for part in parts for mode in parse_mode(part, machine)]
    if not found:
        raise ValueError("--modes names no mode")
    sizes = {mode.machines for mode in found} - {0}
    if len(sizes) > 1:
        raise ValueError(
            f"--modes {text!r}: compare pools of one size, not of {' and '.join(map(str, sorted(sizes)))} machines"
        )
    alike = {"prefill": 0, "decode": 0, "replicas": sizes.pop()} if sizes else {}
    return [
        mode if mode.machines else dataclasses.replace(mode, settings={**mode.settings, **alike})
        for mode in found
    ]


def parse_mode(part: str, machine: Machine) -> list[Mode]:
    whole, _, without = part.partition(" without ")
    if whole == "auto" and without:
        if without not in ABLATIONS:
            raise ValueError(f"--modes {part!r}: auto can be without one of {', '.join(ABLATIONS)}")
        return [Mode(part, {"policy": "auto"}, without)]
    policy, colon, value = part.partition(":")
    prefill, _, decode = value.partition(":")
    if policy == "pools" and prefill.isdigit() and decode.isdigit() and int(prefill) * int(decode):
        return [Mode(part, {"prefill": int(prefill), "decode": int(decode), "replicas": 0})]
    if policy not in ("serial", "chunked", "multiplex", "auto") or (colon and not value.isdigit()):
        known = "serial, chunked:TOKENS, multiplex:UNITS, auto, auto without PART or pools:PREFILL:DECODE"
        raise ValueError(f"--modes {part!r}: write {known}, joined by commas")
    if policy == "multiplex":
        splits = [int(value)] if colon else static_splits(machine)
        return [Mode(f"multiplex:{split}", {"policy": policy, "split": split}) for split in splits]
    if policy == "chunked" and colon:
        return [Mode(part, {"policy": policy, "chunk_tokens": int(value)})]
    if colon:
        raise ValueError(f"--modes {part!r}: {policy} takes no number")
    return [Mode(policy, {"policy": policy})]


def static_splits(machine: Machine) -> list[int]:
    """Decode units worth trying; none where the device can't be split."""
    levels = machine.levels
    return (
        sorted({nearest(levels, machine.device.units * share / 16) for share in SIXTEENTHS})
        if levels
        else []
    )


# ---------------------------------------------------------------- the command


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What is tried."""

    modes: Annotated[
        str,
        flag(
            "serial, chunked[:TOKENS], multiplex[:UNITS], auto, pools:PREFILL:DECODE (machines; the others get as many); multiplex "
            "alone tries several splits",
            SEARCH,
        ),
    ] = MODES
    slo: Annotated[
        str | None,
        flag(
            "targets of every request without its own, e.g. ttft=1.0,tpot=50ms,itl=0.2; unset: the settings' (--ttft-s and so on), "
            f"or {SLO}",
            SEARCH,
        ),
    ] = None
    share: Annotated[
        float, flag("share of the requests that must keep all their targets", SEARCH)
    ] = 0.9
    precision: Annotated[float, flag("of the rates found, as a share", SEARCH)] = 0.02
    jobs: Annotated[int | None, flag("simulations at a time; unset: one a core", SEARCH)] = None
    json: Annotated[str | None, JSON] = None


def show(console: Console, result: Mapping[str, Any]) -> None:
    title = f"{result['model_id']} on {result['device']}: {format_share(result['share'])} within {result['slo']}"
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.add_column("", no_wrap=True)
    for name in (
        "requests\nper s",
        "of\nbest",
        "TTFT\np50",
        "TTFT\np90",
        "TPOT\np50",
        "TPOT\np90",
        "gap\np99",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["modes"]:
        cells = [format_number(row["rate"], 2), format_share(row["of_best"])]
        cells += [format_short(row.get(key)) for key in KEPT[:5]]
        table.add_row(row["mode"], *cells)
    console.print(table)
    console.print("latencies at that rate, in ms", style="dim", highlight=False)
    for note in result["notes"]:
        console.print(note, style="yellow", highlight=False)


@config_flags("scheduler")
def command(
    *,
    what: SimOptions = SimOptions(),
    search_for: PlanOptions = PlanOptions(),
    load: LoadOptions = LoadOptions(),
    config: Config,
) -> int:
    """Find the highest rate at which each mode keeps the targets of nine requests in ten, by simulation.

    counterpoint plan --gpu h200 --model llama-3.1-8b --trace azure.csv --requests 2000 --arrivals poisson --slo ttft=1,tpot=25ms
    """
    if not 0 < search_for.share <= 1 or not 0 < search_for.precision < 1:
        raise ValueError(
            f"--share is {search_for.share} and --precision {search_for.precision}: more than 0, and at most 1"
        )
    if search_for.jobs is not None and search_for.jobs < 1:
        raise ValueError(f"--jobs is {search_for.jobs}: it must be 1 or more")
    require_writable("--json", search_for.json)
    slo = search_for.slo or slo_of(config) or SLO
    config = what.configured(config.replace(**msgspec.structs.asdict(parse_slo(slo))))
    machine = what.machine(config)
    if load.trace is None and load.requests is None:
        load = dataclasses.replace(load, requests=REQUESTS)
    trace = load.build_trace()
    modes = parse_modes(search_for.modes, machine)
    if config.scheduler.policy != "auto" and all("policy" in mode.settings for mode in modes):
        raise ValueError(
            f"policy is {config.scheduler.policy!r}: it is for pools alone, the other --modes name their own"
        )
    machines = max(1, *(config.replace(**mode.settings).cluster.workers for mode in modes))
    task = PlanTask(
        machine, config, trace.queries, search_for.share, search_for.precision, load.seed
    )
    start = round(math.log(guessed_rate(task) * machines) / math.log(1 + task.precision))
    found: dict[str, FoundRate] = {}
    with Progress(
        *Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True)
    ) as bar:
        row = bar.add_task("searching", total=len(modes))
        for one in search(task, modes, search_for.jobs or len(usable_cores()), start):
            found[one.mode] = one
            bar.update(
                row, advance=1, description=f"{one.mode}: {format_number(one.rate, 2)} requests/s"
            )
    notes = [
        *trace.notes,
        *(
            [f"{machines} such machines in each mode: rates are of all together"]
            if machines > 1
            else []
        ),
    ]
    notes += brevity(task, found.values())
    result = report(task, slo, load, [found[mode.name] for mode in modes], notes)
    if tables.write_json(result, search_for.json):
        show(Console(), result)
    return 0


def brevity(task: PlanTask, found: Iterable[FoundRate]) -> list[str]:
    """What is to be said of modes whose requests, at the rate found, are all sent before the first need be answered: then their
    number was measured, more than the rate."""
    scheduler = task.config.scheduler
    answer = sum(q.output_tokens for q in task.queries) / len(task.queries)
    allowed_s = (scheduler.ttft_s or 0.0) + answer * (scheduler.tpot_s or 0.0)
    brief = [one.mode for one in found if one.rate and len(task.queries) / one.rate < allowed_s]
    if not brief:
        return []
    return [
        f"{', '.join(brief)}: the load lasts less than the {allowed_s:.1f} s that an answer may take; give more requests"
    ]


def slo_of(config: Config) -> str:
    """The settings' targets as --slo has them; empty if there are none."""
    scheduler = config.scheduler
    named = {"ttft": scheduler.ttft_s, "tpot": scheduler.tpot_s, "itl": scheduler.itl_s}
    return ",".join(f"{name}={seconds}" for name, seconds in named.items() if seconds is not None)


def guessed_rate(task: PlanTask) -> float:
    """Where the search begins: what the device could do if prefill and decode took turns at full speed, in batches of 32."""
    physics, _ = task.machine.estimators(task.config)
    layers, units = task.machine.model.layers, task.machine.device.units
    prompt = round(sum(q.prompt_tokens for q in task.queries) / len(task.queries))
    answer = round(sum(q.output_tokens for q in task.queries) / len(task.queries))
    prefill = BatchShape.prefill(prompt, 0, layers)
    decode = BatchShape.decode(32, 32 * (prompt + answer), layers)
    return 1 / (physics.seconds(prefill, units) + answer * physics.seconds(decode, units) / 32)


def report(
    task: PlanTask, slo: str, load: LoadOptions, found: Sequence[FoundRate], notes: Sequence[str]
) -> dict[str, Any]:
    """What is written. No date: equal flags write equal bytes."""
    best = max(one.rate for one in found)
    device = task.machine.device
    rows = [
        {
            "mode": one.mode,
            "rate": one.rate,
            "of_best": one.rate / best if best else None,
            "attainment": one.attainment,
            **one.figures,
            "tried": [{"rate": rate, "attainment": attainment} for rate, attainment in one.tried],
        }
        for one in found
    ]
    return {
        "counterpoint_version": __version__,
        "model_id": task.machine.model.name,
        "device": device.name,
        "device_measured": device.measured,
        "belief_error": task.machine.belief_error,
        "hiccups": task.machine.hiccups,
        "slo": slo,
        "share": task.wanted,
        "precision": task.precision,
        "workload": describe_load(task.queries) | {"trace": load.trace, "seed": load.seed},
        "modes": rows,
        "best": next((one.mode for one in found if best and one.rate == best), None),
        "notes": list(notes),
    }
