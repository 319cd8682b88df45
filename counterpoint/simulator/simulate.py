"""Simulate: a load played against a device that is only numbers, on a virtual clock.

Owns: putting the engine, the simulated device and a load together, and the `simulate` command. Promises: the very engine and
policies that serve; deterministic; no torch. Must not: decide anything that serving would decide otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Group, Parameter
from rich.console import Console

from counterpoint import __version__
from counterpoint.bench import tables, transform
from counterpoint.bench.load import LoadOptions, flag, json_flag, parse_slo
from counterpoint.bench.report import ReplayResult, bubble_shares, summarise
from counterpoint.bench.trace_formats import Trace
from counterpoint.bench.workload import Query, TokenRange, describe_load, offered_rate, prompt_ids
from counterpoint.builder.system_builder import find_model
from counterpoint.config import Config, ModelConfig, require_writable
from counterpoint.core.engine import Engine
from counterpoint.core.loop import DeliverOutputs, EventLog
from counterpoint.core.policy.ablations import ABLATIONS
from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.calibration import shape_key
from counterpoint.device.contract_checker import ContractChecker
from counterpoint.device.sim import VirtualEventQueue
from counterpoint.device.timeline import Timeline, run
from counterpoint.flags import config_flags
from counterpoint.interfaces import EventQueue, Executor
from counterpoint.serve.observability.merge_stats import merge
from counterpoint.simulator.machine import Machine, dtypes, make_pool, make_sim_engine
from counterpoint.spec.device import device_spec
from counterpoint.spec.source import load_spec
from counterpoint.stats import Stats
from counterpoint.types import AddRequest, Output, RequestTiming, Sampling, Slo

MODEL = "llama-3.1-8b"


@dataclasses.dataclass(frozen=True, slots=True)
class SimResult:
    """What came of a load. Times are seconds since its start; `records` are in the order of the queries, `errors` by request id.
    `stats`: of all engines together; `workers`: each one's, by name."""

    records: tuple[RequestTiming, ...]
    errors: dict[str, str]
    stats: Stats
    notes: tuple[str, ...] = ()
    workers: tuple[tuple[str, Stats], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SimFiles:
    """What is written on the way, if a path is given: the Chrome trace of the lanes, and the events that entered the engine."""

    timeline: str | None = None
    event_log: str | None = None


# ---------------------------------------------------------------- the run


def simulate(
    machine: Machine,
    queries: Sequence[Query],
    config: Config = Config(),
    *,
    seed: int = 0,
    files: SimFiles = SimFiles(),
    watched: bool = False,
    on_record: Callable[[RequestTiming], None] | None = None,
) -> SimResult:
    """Play `queries` in virtual time; what came of each, and the engine's counters. With workers in `config`, each of them is such
    a machine. `seed`: of the made prompts. `watched`: hold every command against the executor's contract. `on_record` is shown
    each request's record as it ends; what it raises ends the simulation. Raises ConfigError or ValueError if the machine can't be
    as it is asked."""
    queries = transform.drop_texts(queries)
    tokens = TokenRange.within(machine.model.vocab)
    collected = CollectedResults({query.id: query.arrival_s for query in queries}, on_record)
    if config.cluster.workers:
        if files != SimFiles() or watched:
            raise ValueError(
                "--timeline, --event-log and --watch are for one engine: leave out prefill, decode and replicas"
            )
        pool = make_pool(machine, config, collected.keep)
        for query in queries:
            pool.post(query.arrival_s, make_arrival(query, tokens, seed, config))
        pool.run()
        engines = {name: worker.engine for name, worker in pool.workers.items()}
        return simulated(machine, config, queries, collected, engines)
    engine, executor, inbox = make_sim_engine(machine, config)
    engine.emit_deltas = False
    for query in queries:
        inbox.call_at(query.arrival_s, make_arrival(query, tokens, seed, config))
    play(engine, executor, inbox, collected.deliver, files, watched)
    return simulated(machine, config, queries, collected, {"engine": engine})


def play(
    engine: Engine,
    executor: Executor,
    inbox: VirtualEventQueue,
    deliver: DeliverOutputs,
    files: SimFiles,
    watched: bool,
) -> None:
    source: EventQueue = inbox
    guard = check_contract(engine, executor, inbox) if watched else None
    if guard is not None:
        executor = source = guard
    timeline = Timeline(executor, source, engine.policy.lanes) if files.timeline else None
    log = EventLog(files.event_log) if files.event_log else None
    run(engine, (source, executor), deliver, log, timeline)
    if guard is not None:
        guard.check_idle()
    if log:
        log.close()
    if timeline and files.timeline:
        timeline.write(files.timeline)


def simulated(
    machine: Machine,
    config: Config,
    queries: Sequence[Query],
    collected: CollectedResults,
    engines: Mapping[str, Engine],
) -> SimResult:
    """What came of it. Times of several engines are added up, so their units are those of one."""
    workers = tuple((name, engine.stats()) for name, engine in engines.items())
    stats = workers[0][1]
    if len(workers) > 1:
        stats = msgspec.structs.replace(
            merge([one for _, one in workers]), units_total=machine.device.units
        )
    records = tuple(collected.records[q.id] for q in queries)
    engine = next(iter(engines.values()))
    return SimResult(records, collected.errors, stats, notes(machine, config, engine), workers)


class CollectedResults:
    """What the engine delivers, as far as a simulation wants it. A request arrives when it is sent (`sent_s`, by its id), even if
    the host hears of it later."""

    def __init__(
        self, sent_s: dict[str, float], on_record: Callable[[RequestTiming], None] | None = None
    ) -> None:
        self.sent_s = sent_s
        self.on_record = on_record
        self.records: dict[str, RequestTiming] = {}
        self.errors: dict[str, str] = {}

    def deliver(self, outputs: list[Output], _: Engine) -> None:
        for output in outputs:
            if isinstance(output, RequestTiming):
                self.keep(output)
            elif output.error:
                self.errors[output.id] = output.error

    def keep(self, record: RequestTiming, error: str = "") -> None:
        record = msgspec.structs.replace(record, arrival_s=self.sent_s[record.id])
        self.records[record.id] = record
        if error:
            self.errors[record.id] = error
        if self.on_record:
            self.on_record(record)


def check_contract(engine: Engine, executor: Executor, inbox: EventQueue) -> ContractChecker:
    return ContractChecker(executor, inbox, engine.limits, engine.policy.lanes)


def make_arrival(
    query: Query, tokens: TokenRange, seed: int, config: Config
) -> Callable[[], AddRequest]:
    """An alarm that makes the query's Arrive when its time has come: prompts of requests to come take no memory."""
    sampling = Sampling(
        max_tokens=query.output_tokens, temperature=0.0, seed=query.number, ignore_eos=True
    )
    slo = query_slo(query, config)
    return lambda: AddRequest(
        id=query.id, prompt=prompt_ids(query, tokens, seed), sampling=sampling, slo=slo
    )


def query_slo(query: Query, config: Config) -> Slo:
    """The query's own targets, and the configured ones where it has none."""
    return interned(query.slo.with_defaults(config.scheduler.slo(query.prompt_tokens)))


@lru_cache(1 << 10)
def interned(slo: Slo) -> Slo:
    """Equal targets are one object: policies need not look into it again."""
    return slo


def notes(machine: Machine, config: Config, engine: Engine) -> tuple[str, ...]:
    """What a reader of the result has to know."""
    device, asked, runs = (
        machine.device,
        config.scheduler.policy,
        type(engine.policy).__name__.lower(),
    )
    if machine.calibration is not None and machine.physics is None:
        about, points = machine.calibration.about, len(machine.calibration.points)
        found = [
            f"simulated {device.name}: steps as calibrated, {points} points of {about.get('date', 'unknown date')}"
        ]
    else:
        origin = "as measured on" if device.measured else "not measured:"
        found = [f"simulated {device.name}, {origin} {device.source}"]
    if machine.without and asked == "auto":
        found.append(f"auto without {machine.without}")
    elif runs != asked:
        found.append(f"policy {asked} runs as {runs} here")
    cluster = config.cluster
    if cluster.workers:
        kinds = (
            ("prefill", cluster.prefill),
            ("decode", cluster.decode),
            ("do both", cluster.replicas),
        )
        found.append(
            f"{cluster.workers} such machines: {', '.join(f'{count} {kind}' for kind, count in kinds if count)}"
        )
    if machine.belief_error:
        found.append(f"the policy's prices are off by up to {machine.belief_error:.0%}")
    if machine.hiccups:
        found.append(f"{machine.hiccups:.1%} of the steps take longer for once")
    return tuple(found)


# ---------------------------------------------------------------- the command

MACHINE = Group("Simulated machine", sort_key=0)
POOL = Group("Several of them", sort_key=0.5)
OUTPUT = Group("Output", sort_key=4)
JSON = json_flag(OUTPUT)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimOptions:
    """Which machine."""

    model: Annotated[
        str | None,
        flag(
            f"a known shape, a config.json, a Hugging Face folder or a GGUF file [default: {MODEL}]",
            MACHINE,
        ),
    ] = None
    gpu: Annotated[
        str,
        flag(
            "h200 (measured); h100, a100, a800, h20, b200 (by datasheet); 8xh100: of 8 in tensor parallelism; cpu-N, of N cores",
            MACHINE,
        ),
    ] = "h200"
    dtype: Annotated[
        str | None,
        flag("of weights and maths: bfloat16, float16, float32; unset: the device's", MACHINE),
    ] = None
    quantization: Annotated[str | None, flag("of the weights: none, fp8", MACHINE)] = None
    kv_cache_dtype: Annotated[str | None, flag("of the KV cache: auto, fp8", MACHINE)] = None
    kv_pages: Annotated[
        int | None,
        flag("pages of the KV cache; unset: what the memory holds beside the weights", MACHINE),
    ] = None
    max_context_tokens: Annotated[
        int | None, flag("prompt and answer together; unset: what the model allows", MACHINE)
    ] = None
    prefill: Annotated[
        int | None, flag("such machines that prefill, for others to decode", POOL)
    ] = None
    decode: Annotated[
        int | None, flag("such machines that decode what others have prefilled", POOL)
    ] = None
    replicas: Annotated[int | None, flag("such machines that do both", POOL)] = None
    local_tokens: Annotated[
        int | None,
        flag(
            "a prompt of which no more must be computed is prefilled where it is decoded; 0: never; unset: 512",
            POOL,
        ),
    ] = None
    link_bytes_per_s: Annotated[
        float | None, flag("what a link between two carries; unset: 1e11 a GPU, CPUs 1e9", POOL)
    ] = None
    host_overhead: Annotated[
        float | None,
        flag(
            "seconds from launching a step to its earliest start; unset: as calibrated, else 0.0003",
            MACHINE,
        ),
    ] = None
    depth: Annotated[
        int, flag("steps in flight per lane: 2 hides the host's overhead", MACHINE)
    ] = 2
    calibration: Annotated[
        str,
        flag(
            "what steps take: a file of `counterpoint calibrate`, none (the roofline), auto (one that came along, if any)",
            MACHINE,
        ),
    ] = "auto"
    without: Annotated[
        str | None, flag(f"take a part out of auto: {', '.join(ABLATIONS)}", MACHINE)
    ] = None
    belief_error: Annotated[
        float, flag("how far the policy's prices are off, as a share: 0.2 is up to 20 %", MACHINE)
    ] = 0.0
    hiccups: Annotated[
        float, flag("share of steps that take 1.3 to 4 times as long as they should", MACHINE)
    ] = 0.0

    def configured(self, config: Config) -> Config:
        """`config` with what is said here."""
        names = ("dtype", "quantization", "kv_cache_dtype", "kv_pages", "max_context_tokens")
        names += ("prefill", "decode", "replicas", "local_tokens", "link_bytes_per_s")
        said = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        named = config.model.model if config.model.model != ModelConfig().model else MODEL
        return config.replace(model=self.model or named, **said)

    def machine(self, config: Config) -> Machine:
        if self.depth < 1:
            raise ValueError(f"--depth is {self.depth}: it must be 1 or more")
        if not 0 <= (self.host_overhead or 0.0) < math.inf:
            raise ValueError(
                f"--host-overhead is {self.host_overhead}: it must be 0 or more seconds"
            )
        if not 0 <= self.belief_error < 1:
            raise ValueError(
                f"--belief-error is {self.belief_error}: it must be at least 0 and less than 1"
            )
        spec = load_spec(find_model(config), config.model.max_context_tokens)
        if not 0 <= self.hiccups <= 1:
            raise ValueError(f"--hiccups is {self.hiccups}: it must be between 0 and 1")
        if self.without is not None and self.without not in ABLATIONS:
            raise ValueError(
                f"--without is {self.without!r}: it must be one of {', '.join(ABLATIONS)}"
            )
        device = device_spec(self.gpu)
        table = None
        if self.calibration == "auto":
            table = calibration_store.shipped_calibration(device, spec, *dtypes(config, device))
        elif self.calibration != "none":
            table = calibration_store.load(Path(self.calibration))
            if (table.key.units, table.key.model) != (device.units, shape_key(spec)):
                raise ValueError(
                    f"--calibration {self.calibration}: measured on {table.key.device} with {table.key.model}"
                )
        return Machine(
            spec,
            device,
            self.host_overhead,
            depth=self.depth,
            belief_error=self.belief_error,
            hiccups=self.hiccups,
            calibration=table,
            without=self.without,
        )


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimReportOptions:
    """How it is judged, and where it goes."""

    slo: Annotated[
        str | None,
        flag(
            "targets, e.g. ttft=1.0,tpot=50ms,itl=0.2: for the policy, goodput and attainment",
            OUTPUT,
        ),
    ] = None
    json: Annotated[str | None, JSON] = None
    save_detailed: Annotated[bool, flag("with lists of every request's figures", OUTPUT)] = False
    timeline: Annotated[
        str | None, flag("write a Chrome/Perfetto trace of the lanes to this file", OUTPUT)
    ] = None
    event_log: Annotated[
        str | None, flag("record every event that enters the engine to this file", OUTPUT)
    ] = None
    watch: Annotated[
        bool, flag("hold every command against the executor's contract (slower)", OUTPUT)
    ] = False


@config_flags("scheduler")
def command(
    *,
    what: SimOptions = SimOptions(),
    load: LoadOptions = LoadOptions(),
    out: SimReportOptions = SimReportOptions(),
    config: Config,
) -> int:
    """Play a load against a simulated device: the engine that serves, on a virtual clock.

    counterpoint simulate --gpu h200 --model llama-3.1-8b --trace azure.csv --requests 1000 --policy chunked --chunk-tokens 512
    """
    if out.slo:
        config = config.replace(**msgspec.structs.asdict(parse_slo(out.slo)))
    config = what.configured(config)
    for name, path in (
        ("--json", out.json),
        ("--timeline", out.timeline),
        ("--event-log", out.event_log),
    ):
        require_writable(name, path)
    machine = what.machine(config)
    trace = load.build_trace()
    files = SimFiles(out.timeline, out.event_log)
    came = simulate(machine, trace.queries, config, seed=load.seed, files=files, watched=out.watch)
    result = report(machine, config, trace, came, load, out.save_detailed)
    if tables.write_json(result, out.json):
        tables.show_result(
            Console(),
            result,
            f"{machine.model.name} on {machine.device.name}, {config.scheduler.policy}",
        )
    return 0 if result["completed"] else 1


def report(
    machine: Machine,
    config: Config,
    trace: Trace,
    came: SimResult,
    load: LoadOptions,
    detailed: bool,
) -> dict[str, Any]:
    """What is written: the keys of `bench`, with the device in place of the server. No date: equal flags write equal bytes."""
    rate = offered_rate(trace.queries)
    return {
        "counterpoint_version": __version__,
        "backend": "counterpoint-simulate",
        "model_id": machine.model.name,
        "device": machine.device.name,
        "device_measured": machine.device.measured,
        "policy": config.scheduler.policy,
        "config": dataclasses.asdict(config),
        "host_overhead": machine.host_s,
        "depth": machine.depth,
        "belief_error": machine.belief_error,
        "hiccups": machine.hiccups,
        "request_rate": rate if rate != float("inf") else "inf",
        "seed": load.seed,
        "workload": describe_load(trace.queries) | {"trace": load.trace},
        **summarise(
            ReplayResult(came.records, came.errors, after=came.stats),
            {q.id: query_slo(q, config) for q in trace.queries},
            detailed,
        ),
        "bubbles": bubble_shares(came.workers, came.records),
        "pages_leaked": came.stats.pages_total - came.stats.pages_free - came.stats.pages_cached,
        "notes": [*trace.notes, *came.notes],
    }
