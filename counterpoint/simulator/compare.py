"""Compare: the same loads on the engine that serves and in the simulator, under several modes, side by side.

Owns: the `compare` command and its file of results. Promises: both play the same queries at the same times with the same settings
and the same end; the device is opened once for all runs; a result is on disk as soon as there is one, and what is there already is
not run again. Must not: judge a load otherwise than `bench` does.

A file of loads is YAML: names, and for each the flags of `bench` about the workload (with underscores), its targets, and which
modes are played, at which rates (requests/s):

    conversation:
      trace: azure_2023_conv.csv
      requests: 300
      arrivals: poisson
      slo: ttft=1,tpot=25ms
      modes: {"chunked:1024": 14, "multiplex:32": 16, auto: 18}
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from cyclopts import Group, Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from counterpoint import __version__
from counterpoint.bench import transform
from counterpoint.bench.load import LoadOptions, flag, parse_slo
from counterpoint.bench.replay import ReplayOptions, replay_engine
from counterpoint.bench.report import ReplayResult, summarise
from counterpoint.bench.stopwatch import Stopwatch
from counterpoint.bench.tables import format_number, format_share
from counterpoint.bench.workload import Query, TokenRange, describe_load
from counterpoint.builder import system_builder
from counterpoint.config import Config, ConfigError, require_writable
from counterpoint.core.policy.ablations import ablated_auto
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.timeline import Timeline
from counterpoint.flags import config_flags
from counterpoint.simulator.machine import Machine
from counterpoint.simulator.plan import Mode, parse_modes
from counterpoint.simulator.simulate import SimFiles, SimOptions, simulate
from counterpoint.stats import Stats
from counterpoint.types import FinishReason, RequestTiming

COMPARISON = Group("Comparison", sort_key=0)
Place = Literal["engine", "simulator"]
PLACES: tuple[Place, ...] = ("engine", "simulator")
WARMUP = 3  # requests before each load, not counted
FIGURES = {
    "TTFT\np50": "p50_ttft_ms",
    "TTFT\np90": "p90_ttft_ms",
    "TPOT\np50": "p50_tpot_ms",
    "TPOT\np90": "p90_tpot_ms",
    "gap\np99": "p99_itl_ms",
    "good\nper s": "request_goodput",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ComparisonCase:
    """One run: a load at a rate, under a mode."""

    load: str
    mode: Mode
    rate: float | None
    slo: str
    queries: tuple[Query, ...]

    @property
    def name(self) -> str:
        at = "" if self.rate is None else f" at {self.rate:g}/s"
        return f"{self.load}, {self.mode.name}{at}, {self.slo or 'no targets'}"

    @property
    def file(self) -> str:
        """Its name as a file's."""
        at = "" if self.rate is None else f"_{self.rate:g}"
        return re.sub(r"[^\w.-]+", "_", f"{self.load}_{self.mode.name}{at}")


# ---------------------------------------------------------------- what is played


def read_cells(path: Path, machine: Machine) -> list[ComparisonCase]:
    """The cells of a file of loads. Raises ValueError naming the load and what is wrong with it."""
    try:
        loads = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    if not isinstance(loads, Mapping):
        raise ValueError(f"{path}: the file must hold loads by name")
    return [
        cell for name, load in loads.items() for cell in cells_of(path, str(name), load, machine)
    ]


def cells_of(path: Path, name: str, load: Any, machine: Machine) -> list[ComparisonCase]:
    where = f"{path}: load {name!r}"
    if not isinstance(load, Mapping) or not load.get("modes"):
        raise ValueError(f"{where}: give it modes, as a list, or as a mapping to rates")
    flags = {key: value for key, value in load.items() if key not in ("modes", "slo")}
    if "trace" in flags:
        flags["trace"] = str(path.parent / flags["trace"])
    try:
        workload = msgspec.convert(flags, LoadOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None
    unknown = flags.keys() - {field.name for field in dataclasses.fields(LoadOptions)}
    if unknown:
        raise ValueError(f"{where}: no such flag of the workload: {', '.join(sorted(unknown))}")
    slo = str(load.get("slo", ""))
    queries = transform.apply_slo(
        transform.drop_texts(workload.build_trace().queries), parse_slo(slo)
    )
    modes = load["modes"] if isinstance(load["modes"], Mapping) else dict.fromkeys(load["modes"])
    found = []
    for text, rates in modes.items():
        for rate in rates if isinstance(rates, list) else [rates]:
            if rate is not None and not isinstance(rate, int | float):
                raise ValueError(f"{where}: the rate {rate!r} of {text} is no number")
            timed = queries if rate is None else transform.scale_to_rate(queries, rate)
            found += [
                ComparisonCase(name, mode, rate, slo, tuple(timed))
                for mode in parse_modes(str(text), machine)
            ]
    return found


def configured(config: Config, cell: ComparisonCase) -> Config:
    return config.replace(**msgspec.structs.asdict(parse_slo(cell.slo)), **cell.mode.settings)


# ---------------------------------------------------------------- the two places


class OnEngine:
    """The device, opened for all modes at once."""

    def __init__(self, config: Config, tell: Callable[[str], None]) -> None:
        self._inbox = WallClockEventQueue()
        self._system = system_builder.build_system(config.replace(policy="auto"), self._inbox, tell)

    def play(
        self, config: Config, cell: ComparisonCase, limit_s: float, trace: Path | None
    ) -> dict[str, Any]:
        self._system.executor.close()
        if self._system.rebuild is None:
            raise ConfigError("this device takes one engine only")
        inbox = WallClockEventQueue()
        system = self._system = self._system.rebuild(config, inbox, ablated_auto(cell.mode.without))
        stopwatch = Stopwatch(system.executor, inbox)
        timeline = None if trace is None else Timeline(stopwatch, inbox, system.engine.policy.lanes)
        options = ReplayOptions(
            warmup=transform.warmup_queries(cell.queries, WARMUP),
            tokens=TokenRange.within(system.spec.vocab),
            limit_s=limit_s,
            timeline=timeline,
        )
        came = replay_engine(system.engine, inbox, stopwatch, cell.queries, options)
        if timeline is not None and trace is not None:
            timeline.write(trace)
        notes = [note for note in system.notes if note.startswith(("prices", "auto"))]
        return judged(cell, came.records, came.after, came.before, came.errors) | {
            "notes": notes,
            "pages_leaked": came.pages_leaked,
            "host": stopwatch.summarise(),
        }

    def close(self) -> None:
        self._system.executor.close()


class OnSimulator:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def play(
        self, config: Config, cell: ComparisonCase, limit_s: float, trace: Path | None
    ) -> dict[str, Any]:
        came = simulate(
            cell.mode.on(self._machine),
            cell.queries,
            config,
            files=SimFiles(None if trace is None else str(trace)),
        )
        records = [cut(record, limit_s) for record in came.records]
        return judged(cell, records, came.stats, None, came.errors) | {"notes": list(came.notes)}

    def close(self) -> None:
        pass


def cut(record: RequestTiming, limit_s: float) -> RequestTiming:
    """`record` as it would be if all had ended at `limit_s`."""
    if record.finished_s <= limit_s:
        return record
    times = tuple(at for at in record.token_s if at <= limit_s)
    return msgspec.structs.replace(
        record, finished_s=limit_s, token_s=times, finish_reason=FinishReason.ABORT
    )


def judged(
    cell: ComparisonCase,
    records: Sequence[RequestTiming],
    stats: Stats | None,
    before: Stats | None,
    errors: Mapping[str, str],
) -> dict[str, Any]:
    slo = {query.id: query.slo for query in cell.queries}
    return summarise(ReplayResult(records, errors, before=before, after=stats), slo)


# ---------------------------------------------------------------- results


class SavedResults(msgspec.Struct):
    """What the file of results holds."""

    about: dict[str, Any]
    rows: list[dict[str, Any]]


class Results:
    """The file of results: one row per cell and place. Raises ValueError where it has runs of the same place under other settings
    than `about` says."""

    def __init__(self, path: Path | None, about: Mapping[Place, Mapping[str, Any]]) -> None:
        self.path = path
        self.about: dict[str, Any] = {"counterpoint": __version__, **msgspec.to_builtins(about)}
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.is_file():
            try:
                kept = msgspec.json.decode(path.read_bytes(), type=SavedResults)
            except msgspec.DecodeError as error:
                raise ValueError(
                    f"--json {path}: no file of results of this command ({error}); choose another"
                ) from None
            for place in about:
                other = different(kept.about.get(place, {}), self.about[place])
                if other:
                    raise ValueError(
                        f"--json {path}: its runs on the {place} were made with {other}; choose another file"
                    )
            self.rows, self.about = kept.rows, kept.about | self.about

    def has(self, cell: ComparisonCase, place: Place) -> bool:
        return any(row["cell"] == cell.name and row["place"] == place for row in self.rows)

    def add(self, cell: ComparisonCase, place: Place, result: Mapping[str, Any]) -> None:
        about = {
            "cell": cell.name,
            "place": place,
            "load": cell.load,
            "mode": cell.mode.name,
            "rate": cell.rate,
            "slo": cell.slo,
        }
        self.rows.append({**about, "workload": describe_load(cell.queries), **result})
        if self.path is not None:
            text = msgspec.json.format(
                msgspec.json.encode({"about": self.about, "rows": self.rows}), indent=1
            )
            part = self.path.with_name(self.path.name + ".part")
            part.write_bytes(text + b"\n")
            part.replace(self.path)


def different(kept: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Which settings are others, and which they were."""
    return ", ".join(
        f"{name} {was} (now {asked.get(name)})"
        for name, was in kept.items()
        if asked.get(name) != was
    )


def show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table per load, a line per run; where both places have it, a third with the simulator's figures over the engine's."""
    for load, slo in dict.fromkeys((row["load"], row["slo"]) for row in rows):
        table = Table(
            title=f"{load}: {slo or 'no targets'}",
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for name in ("mode", "at", "", "within", *FIGURES):
            table.add_column(
                name, justify="left" if name in ("mode", "") else "right", no_wrap=True
            )
        here = [row for row in rows if (row["load"], row["slo"]) == (load, slo)]
        for cell in dict.fromkeys(row["cell"] for row in here):
            found = {row["place"]: row for row in here if row["cell"] == cell}
            for place, row in found.items():
                within = (
                    "-" if row["slo_attainment"] is None else format_share(row["slo_attainment"])
                )
                table.add_row(
                    row["mode"],
                    format_number(row["rate"], 2),
                    place,
                    within,
                    *map(format_number, figures(row)),
                )
            if len(found) == len(PLACES):
                table.add_row(
                    "",
                    "",
                    "ratio",
                    "",
                    *(
                        format_number(ratio, 2)
                        for ratio in ratios(found["simulator"], found["engine"])
                    ),
                )
        console.print(table)


def figures(row: Mapping[str, Any]) -> list[float | None]:
    return [row[key] for key in FIGURES.values()]


def ratios(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[float | None]:
    return [
        a / b if a is not None and b else None
        for a, b in zip(figures(one), figures(other), strict=True)
    ]


# ---------------------------------------------------------------- the command


@config_flags("model", "device", "scheduler")
def command(
    loads: Annotated[Path, flag("YAML file of loads", COMPARISON)],
    *,
    on: Annotated[str, flag("engine, simulator, or both", COMPARISON)] = "engine,simulator",
    only: Annotated[
        str | None, flag("of the loads, those whose name holds this", COMPARISON)
    ] = None,
    drain: Annotated[
        float,
        flag("seconds after the last arrival; what is unanswered then has failed", COMPARISON),
    ] = 10.0,
    json: Annotated[
        Path | None,
        Parameter(help="file of results; what it has already is not run again", group=COMPARISON),
    ] = None,
    timelines: Annotated[
        Path | None, flag("write a Chrome/Perfetto trace of each run into this folder", COMPARISON)
    ] = None,
    gpu: Annotated[
        str, flag("what is simulated, as in `counterpoint simulate`", COMPARISON)
    ] = "h200",
    calibration: Annotated[
        str, flag("what simulated steps take, as in `counterpoint simulate`", COMPARISON)
    ] = "auto",
    host_overhead: Annotated[
        float | None,
        flag(
            "seconds from launching a simulated step to its start, as in `counterpoint simulate`",
            COMPARISON,
        ),
    ] = None,
    config: Config,
) -> int:
    """Play the same loads on the engine here and in the simulator, and set the figures side by side.

    counterpoint compare loads.yaml --model llama-3.1-8b --json results.json
    """
    places: list[Place] = [place for place in PLACES if place in on.split(",")]
    if not places or len(places) != len(on.split(",")):
        raise ValueError(f"--on is {on}: write engine, simulator or engine,simulator")
    require_writable("--json", json)
    if system_builder.find_model(config).kind == "spec":
        config = config.replace(load_format="dummy")
    machine = SimOptions(gpu=gpu, calibration=calibration, host_overhead=host_overhead).machine(
        config
    )
    cells = [cell for cell in read_cells(loads, machine) if only is None or only in cell.load]
    if not cells:
        raise ValueError(f"--only {only}: no load of {loads} has that in its name")
    if not drain >= 0:
        raise ValueError(f"--drain is {drain}: it must be 0 or more seconds")
    asked = {"drain": drain}
    for section in dataclasses.asdict(config).values():
        asked |= section
    simulated = {"gpu": gpu, "calibration": calibration, "host_overhead": host_overhead}
    results = Results(
        json, {place: asked | (simulated if place == "simulator" else {}) for place in places}
    )
    if timelines is not None:
        timelines.mkdir(parents=True, exist_ok=True)
    notes = Console(stderr=True, highlight=False)
    for place in places:
        missing = [cell for cell in cells if not results.has(cell, place)]
        if missing:
            play(place, missing, machine, config, drain, results, timelines, notes)
    names = {cell.name for cell in cells}
    show(Console(), [row for row in results.rows if row["cell"] in names])
    return 0


def play(
    place: Place,
    cells: Sequence[ComparisonCase],
    machine: Machine,
    config: Config,
    drain_s: float,
    results: Results,
    timelines: Path | None,
    notes: Console,
) -> None:
    def tell(line: str) -> None:
        notes.print(line, soft_wrap=True)

    player = OnEngine(config, tell) if place == "engine" else OnSimulator(machine)
    try:
        for cell in cells:
            try:
                trace = None if timelines is None else timelines / f"{cell.file}-{place}.json"
                result = player.play(
                    configured(config, cell), cell, cell.queries[-1].arrival_s + drain_s, trace
                )
            except ConfigError as error:
                tell(f"{cell.name}: {error}")
                continue
            results.add(cell, place, result)
            within = result["slo_attainment"]
            tell(
                f"{place}: {cell.name}: {'' if within is None else format_share(within)} in {result['duration']:.1f} s"
            )
    finally:
        player.close()
