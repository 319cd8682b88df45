"""Which mode serves a load best on a machine: the `plan` command.

Owns: the command and its report. Must not: simulate otherwise than `simulate` does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from cyclopts import Group, Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from counterpoint import __version__
from counterpoint.bench import tables
from counterpoint.bench.load import LoadOptions, flag, parse_slo
from counterpoint.bench.tables import format_number, format_share, format_short
from counterpoint.bench.workload import describe_load
from counterpoint.config import Config, require_writable
from counterpoint.device.cores import usable_cores
from counterpoint.flags import config_flags
from counterpoint.simulator.modes import Mode, parse_modes
from counterpoint.simulator.options import JSON, SimOptions
from counterpoint.simulator.rate_search import REPORTED, FoundRate, PlanTask, initial_rate, search

SEARCH = Group("Search", sort_key=0)
MODES = "serial,chunked:512,chunked:1024,chunked:2048,chunked:8192,multiplex,auto"
SLO = "ttft=1.0,tpot=50ms"  # by default
REQUESTS = 1000  # of a synthetic load by default: with fewer, all soon run at once


# ---------------------------------------------------------------- the command


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What is tried."""

    modes: Annotated[
        str,
        flag(
            "serial, chunked[:TOKENS], multiplex[:UNITS], auto, pools:PREFILL:DECODE (machines; "
            "the others get as many); multiplex alone tries several splits",
            SEARCH,
        ),
    ] = MODES
    slo: Annotated[
        str | None,
        flag(
            "targets of every request without its own, e.g. ttft=1.0,tpot=50ms,itl=0.2; unset: "
            f"the settings' (--ttft-s and so on), or {SLO}",
            SEARCH,
        ),
    ] = None
    share: Annotated[
        float, flag("share of the requests that must keep all their targets", SEARCH)
    ] = 0.9
    precision: Annotated[float, flag("of the rates found, as a share", SEARCH)] = 0.02
    jobs: Annotated[int | None, flag("simulations at a time; unset: one a core", SEARCH)] = None
    json: Annotated[str | None, JSON] = None

    def check(self) -> None:
        """Raises ValueError naming the flag that is wrong."""
        if not 0 < self.share <= 1 or not 0 < self.precision < 1:
            raise ValueError(
                f"--share is {self.share} and --precision {self.precision}: more than 0, "
                "and at most 1"
            )
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"--jobs is {self.jobs}: it must be 1 or more")
        require_writable("--json", self.json)


def show(console: Console, result: Mapping[str, Any]) -> None:
    place = f"{result['model_id']} on {result['device']}"
    title = f"{place}: {format_share(result['share'])} within {result['slo']}"
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
        cells += [format_short(row.get(key)) for key in REPORTED[:5]]
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
    """Find by simulation the highest rate at which each mode keeps nine in ten requests on target.

    counterpoint plan --gpu h200 --model llama-3.1-8b --trace azure.csv --requests 2000
    --arrivals poisson --slo ttft=1,tpot=25ms
    """
    search_for.check()
    slo = search_for.slo or configured_slo(config) or SLO
    config = what.apply_to(config.replace(**msgspec.structs.asdict(parse_slo(slo))))
    machine = what.make_machine(config)
    if load.trace is None and load.requests is None:
        load = dataclasses.replace(load, requests=REQUESTS)
    trace = load.build_trace()
    modes = parse_modes(search_for.modes, machine)
    if config.scheduler.policy != "auto" and all("policy" in mode.settings for mode in modes):
        raise ValueError(
            f"policy is {config.scheduler.policy!r}: it is for pools alone, the other --modes "
            "name their own"
        )
    machines = max(1, *(config.replace(**mode.settings).cluster.workers for mode in modes))
    task = PlanTask(
        machine, config, trace.queries, search_for.share, search_for.precision, load.seed
    )
    start = round(math.log(initial_rate(task) * machines) / math.log(1 + task.precision))
    found = search_with_progress(task, modes, search_for.jobs or len(usable_cores()), start)
    notes = list(trace.notes)
    if machines > 1:
        notes.append(f"{machines} such machines in each mode: rates are of all together")
    notes += short_load_notes(task, found)
    result = report(task, slo, load, found, notes)
    if tables.write_json(result, search_for.json):
        show(Console(), result)
    return 0


def search_with_progress(
    task: PlanTask, modes: Sequence[Mode], jobs: int, start: int
) -> list[FoundRate]:
    """In the order of `modes`, with a progress bar on standard error."""
    found: dict[str, FoundRate] = {}
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        row = bar.add_task("searching", total=len(modes))
        for one in search(task, modes, jobs, start):
            found[one.mode] = one
            rate = format_number(one.rate, 2)
            bar.update(row, advance=1, description=f"{one.mode}: {rate} requests/s")
    return [found[mode.name] for mode in modes]


def short_load_notes(task: PlanTask, found: Iterable[FoundRate]) -> list[str]:
    """A warning for modes at whose rate the load ends before the first answer is due: then the
    number of requests was measured, more than the rate."""
    scheduler = task.config.scheduler
    answer = sum(q.output_tokens for q in task.queries) / len(task.queries)
    allowed_s = (scheduler.ttft_s or 0.0) + answer * (scheduler.tpot_s or 0.0)
    brief = [one.mode for one in found if one.rate and len(task.queries) / one.rate < allowed_s]
    if not brief:
        return []
    return [
        f"{', '.join(brief)}: the load lasts less than the {allowed_s:.1f} s that an answer may "
        "take; give more requests"
    ]


def configured_slo(config: Config) -> str:
    """The configured targets as --slo writes them; empty if there are none."""
    scheduler = config.scheduler
    named = {"ttft": scheduler.ttft_s, "tpot": scheduler.tpot_s, "itl": scheduler.itl_s}
    return ",".join(f"{name}={seconds}" for name, seconds in named.items() if seconds is not None)


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
        "share": task.min_attainment,
        "precision": task.precision,
        "workload": describe_load(task.queries) | {"trace": load.trace, "seed": load.seed},
        "modes": rows,
        "best": next((one.mode for one in found if best and one.rate == best), None),
        "notes": list(notes),
    }
