"""The same loads on the real engine and in the simulator, side by side: the `compare` command.

Owns: the command and its file of loads. Promises: both places run the same queries at the same
times, with the same settings and the same end; the device is opened once for all runs; a case that
the file of results has is not run again. Must not: judge a load otherwise than `bench` does.

A file of loads is YAML. Each load has a name, the flags of `bench` about the workload (with
underscores), its targets, and its modes, with the rates (requests/s) at which they run:

    conversation:
      trace: azure_2023_conv.csv
      requests: 300
      arrivals: poisson
      slo: ttft=1,tpot=25ms
      modes: {"chunked:1024": 14, "multiplex:32": 16, auto: 18}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from cyclopts import Group, Parameter
from rich.console import Console

from counterpoint.bench import transform
from counterpoint.bench.load import LoadOptions, flag, parse_slo
from counterpoint.bench.replay import ReplayOptions, replay_engine
from counterpoint.bench.report import ReplayResult, summarise
from counterpoint.bench.stopwatch import Stopwatch
from counterpoint.bench.tables import format_share
from counterpoint.bench.workload import TokenRange
from counterpoint.builder import system_builder
from counterpoint.config import Config, ConfigError, require_writable
from counterpoint.core.policy.ablations import ablated_auto
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.timeline import Timeline
from counterpoint.flags import config_flags
from counterpoint.simulator.comparison_results import (
    PLACES,
    ComparisonCase,
    ComparisonResults,
    Place,
    show,
)
from counterpoint.simulator.machine import Machine
from counterpoint.simulator.modes import parse_modes
from counterpoint.simulator.options import SimOptions
from counterpoint.simulator.simulate import SimRun, simulate
from counterpoint.types import FinishReason, RequestTiming

COMPARISON = Group("Comparison", sort_key=0)
NUM_WARMUP = 3  # requests before each load, not counted


# ---------------------------------------------------------------- cases


def read_cases(path: Path, machine: Machine) -> list[ComparisonCase]:
    """Raises ValueError naming the load and what is wrong with it."""
    try:
        loads = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    if not isinstance(loads, Mapping):
        raise ValueError(f"{path}: the file must hold loads by name")
    return [
        case for name, load in loads.items() for case in cases_of(path, str(name), load, machine)
    ]


def cases_of(path: Path, name: str, load: Any, machine: Machine) -> list[ComparisonCase]:
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
        raise ValueError(f"{where}: no such flag of a load: {', '.join(sorted(unknown))}")
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


def config_of_case(config: Config, case: ComparisonCase) -> Config:
    return config.replace(**msgspec.structs.asdict(parse_slo(case.slo)), **case.mode.settings)


# ---------------------------------------------------------------- where a case runs


class RealEngineRunner:
    """The device is opened once, for all modes."""

    def __init__(self, config: Config, on_progress: Callable[[str], None]) -> None:
        self._inbox = WallClockEventQueue()
        self._system = system_builder.build_system(
            config.replace(policy="auto"), self._inbox, on_progress
        )

    def run(
        self, config: Config, case: ComparisonCase, limit_s: float, trace: Path | None
    ) -> dict[str, Any]:
        self._system.executor.close()
        if self._system.rebuild is None:
            raise ConfigError("this device takes one engine only")
        inbox = WallClockEventQueue()
        system = self._system = self._system.rebuild(config, inbox, ablated_auto(case.mode.without))
        stopwatch = Stopwatch(system.executor, inbox)
        timeline = None if trace is None else Timeline(stopwatch, inbox, system.engine.policy.lanes)
        options = ReplayOptions(
            warmup=transform.warmup_queries(case.queries, NUM_WARMUP),
            tokens=TokenRange.within(system.spec.vocab),
            limit_s=limit_s,
            timeline=timeline,
        )
        replayed = replay_engine(system.engine, inbox, stopwatch, case.queries, options)
        if timeline is not None and trace is not None:
            timeline.write(trace)
        notes = [note for note in system.notes if note.startswith(("prices", "auto"))]
        return summarise_case(case, replayed) | {
            "notes": notes,
            "pages_leaked": replayed.pages_leaked,
            "host": stopwatch.summarise(),
        }

    def close(self) -> None:
        self._system.executor.close()


class SimulatedEngineRunner:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def run(
        self, config: Config, case: ComparisonCase, limit_s: float, trace: Path | None
    ) -> dict[str, Any]:
        run = SimRun(timeline=None if trace is None else str(trace))
        result = simulate(case.mode.apply_to(self._machine), case.queries, config, run)
        records = [truncate_timing(record, limit_s) for record in result.records]
        summary = summarise_case(case, ReplayResult(records, result.errors, after=result.stats))
        return summary | {"notes": list(result.notes)}

    def close(self) -> None:
        pass


def truncate_timing(record: RequestTiming, limit_s: float) -> RequestTiming:
    """As if the run had ended at `limit_s`."""
    if record.finished_s <= limit_s:
        return record
    times = tuple(at for at in record.token_s if at <= limit_s)
    return msgspec.structs.replace(
        record, finished_s=limit_s, token_s=times, finish_reason=FinishReason.ABORT
    )


def summarise_case(case: ComparisonCase, result: ReplayResult) -> dict[str, Any]:
    return summarise(result, {query.id: query.slo for query in case.queries})


# ---------------------------------------------------------------- the command


# ---------------------------------------------------------------- the command


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """Which cases run, and where."""

    on: Annotated[str, flag("engine, simulator, or both", COMPARISON)] = "engine,simulator"
    only: Annotated[str | None, flag("of the loads, those whose name holds this", COMPARISON)] = (
        None
    )
    drain: Annotated[
        float,
        flag("seconds after the last arrival; what is unanswered then has failed", COMPARISON),
    ] = 10.0
    json: Annotated[
        Path | None,
        Parameter(help="file of results; what it has already is not run again", group=COMPARISON),
    ] = None
    timelines: Annotated[
        Path | None, flag("write a Chrome/Perfetto trace of each run into this folder", COMPARISON)
    ] = None
    gpu: Annotated[str, flag("what is simulated, as in `counterpoint simulate`", COMPARISON)] = (
        "h200"
    )
    calibration: Annotated[
        str, flag("what simulated steps take, as in `counterpoint simulate`", COMPARISON)
    ] = "auto"
    host_overhead: Annotated[
        float | None,
        flag(
            "seconds from launching a simulated step to its start, as in `counterpoint simulate`",
            COMPARISON,
        ),
    ] = None

    @property
    def places(self) -> list[Place]:
        """Raises ValueError if `on` names another place."""
        found: list[Place] = [place for place in PLACES if place in self.on.split(",")]
        if not found or len(found) != len(self.on.split(",")):
            raise ValueError(f"--on is {self.on}: write engine, simulator or engine,simulator")
        return found

    def settings(self, place: Place, config: Config) -> dict[str, Any]:
        """What makes a result of `place` what it is."""
        found: dict[str, Any] = {"drain": self.drain}
        for section in dataclasses.asdict(config).values():
            found |= section
        if place == "simulator":
            found |= {
                "gpu": self.gpu,
                "calibration": self.calibration,
                "host_overhead": self.host_overhead,
            }
        return found


@config_flags("model", "device", "scheduler")
def command(
    loads: Annotated[Path, flag("YAML file of loads", COMPARISON)],
    *,
    options: CompareOptions = CompareOptions(),
    config: Config,
) -> int:
    """Play the same loads on the engine here and in the simulator, side by side.

    counterpoint compare loads.yaml --model llama-3.1-8b --json results.json
    """
    places = options.places
    require_writable("--json", options.json)
    if system_builder.find_model(config).kind == "spec":
        config = config.replace(load_format="dummy")
    machine = SimOptions(
        gpu=options.gpu, calibration=options.calibration, host_overhead=options.host_overhead
    ).make_machine(config)
    cases = read_cases(loads, machine)
    cases = [case for case in cases if options.only is None or options.only in case.load]
    if not cases:
        raise ValueError(f"--only {options.only}: no load of {loads} has that in its name")
    if not options.drain >= 0:
        raise ValueError(f"--drain is {options.drain}: it must be 0 or more seconds")
    results = ComparisonResults(
        options.json, {place: options.settings(place, config) for place in places}
    )
    if options.timelines is not None:
        options.timelines.mkdir(parents=True, exist_ok=True)
    for place in places:
        missing = [case for case in cases if not results.has(case, place)]
        if missing:
            run_cases(place, missing, machine, config, ComparisonOutput(options, results))
    names = {case.name for case in cases}
    show(Console(), [row for row in results.rows if row["cell"] in names])
    return 0


class ComparisonOutput:
    """Where results and progress go."""

    def __init__(self, options: CompareOptions, results: ComparisonResults) -> None:
        self.options = options
        self.results = results
        self._console = Console(stderr=True, highlight=False)

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def timeline(self, case: ComparisonCase, place: Place) -> Path | None:
        folder = self.options.timelines
        return None if folder is None else folder / f"{case.file_stem}-{place}.json"

    def add(self, case: ComparisonCase, place: Place, result: Mapping[str, Any]) -> None:
        self.results.add(case, place, result)
        attainment = result["slo_attainment"]
        share = "" if attainment is None else format_share(attainment)
        self.say(f"{place}: {case.name}: {share} in {result['duration']:.1f} s")


def run_cases(
    place: Place,
    cases: Sequence[ComparisonCase],
    machine: Machine,
    config: Config,
    output: ComparisonOutput,
) -> None:
    runner = (
        RealEngineRunner(config, output.say)
        if place == "engine"
        else SimulatedEngineRunner(machine)
    )
    try:
        for case in cases:
            limit_s = case.queries[-1].arrival_s + output.options.drain
            timeline = output.timeline(case, place)
            try:
                result = runner.run(config_of_case(config, case), case, limit_s, timeline)
            except ConfigError as error:
                output.say(f"{case.name}: {error}")
                continue
            output.add(case, place, result)
    finally:
        runner.close()
