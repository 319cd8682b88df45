"""A load on a simulated device, on a virtual clock, and the `simulate` command.

Owns: putting the engine, the simulated device and a load together. Promises: the engine and
policies that serve; deterministic; no torch. Must not: decide what serving would decide otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from rich.console import Console

from counterpoint import __version__
from counterpoint.bench import tables, transform
from counterpoint.bench.load import LoadOptions, parse_slo
from counterpoint.bench.report import ReplayResult, bubble_shares, summarise
from counterpoint.bench.trace_formats import Trace
from counterpoint.bench.workload import (
    Query,
    TokenRange,
    describe_load,
    offered_rate,
    prompt_ids,
)
from counterpoint.config import Config, require_writable
from counterpoint.core.engine import Engine
from counterpoint.core.loop import DeliverOutputs, EventLog
from counterpoint.device.contract_checker import ContractChecker
from counterpoint.device.timeline import Timeline, run
from counterpoint.flags import config_flags
from counterpoint.interfaces import EventQueue, Executor
from counterpoint.serve.observability.merge_stats import merge
from counterpoint.simulator.machine import Machine, SimEngine, make_sim_engine
from counterpoint.simulator.options import SimOptions, SimReportOptions
from counterpoint.simulator.pool import make_sim_pool
from counterpoint.stats import Stats
from counterpoint.types import AddRequest, Output, RequestTiming, Sampling, Slo


@dataclasses.dataclass(frozen=True, slots=True)
class SimResult:
    """Times are seconds since the load's start. `records` are in the order of the queries, `errors`
    by request id. `stats`: all engines together; `workers`: each one's, by name."""

    records: tuple[RequestTiming, ...]
    errors: dict[str, str]
    stats: Stats
    notes: tuple[str, ...] = ()
    workers: tuple[tuple[str, Stats], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimRun:
    """`seed`: of the synthetic prompts. `timeline`, `event_log`: files to write. `check_contract`:
    check every command against the executor's contract. `on_timing` gets each request's timing as
    it ends; what it raises ends the simulation."""

    seed: int = 0
    timeline: str | None = None
    event_log: str | None = None
    check_contract: bool = False
    on_timing: Callable[[RequestTiming], None] | None = None


# ---------------------------------------------------------------- the run


def simulate(
    machine: Machine,
    queries: Sequence[Query],
    config: Config = Config(),
    run: SimRun = SimRun(),
) -> SimResult:
    """With workers in `config`, each of them is such a machine. Raises ConfigError or ValueError if
    the machine and `config` do not fit."""
    queries = transform.drop_texts(queries)
    tokens = TokenRange.within(machine.model.vocab)
    collected = CollectedResults({query.id: query.arrival_s for query in queries}, run.on_timing)
    if config.cluster.workers:
        if run.timeline or run.event_log or run.check_contract:
            raise ValueError(
                "--timeline, --event-log and --watch are for one engine: "
                "leave out prefill, decode and replicas"
            )
        pool = make_sim_pool(machine, config, collected.add)
        for query in queries:
            pool.submit_at(query.arrival_s, make_arrival(query, tokens, run.seed, config))
        pool.run()
        engines = {name: worker.engine for name, worker in pool.workers.items()}
        return make_result(machine, config, queries, collected, engines)
    sim = make_sim_engine(machine, config)
    sim.engine.emit_deltas = False
    for query in queries:
        sim.events.call_at(query.arrival_s, make_arrival(query, tokens, run.seed, config))
    run_engine(sim, collected.deliver, run)
    return make_result(machine, config, queries, collected, {"engine": sim.engine})


def run_engine(sim: SimEngine, deliver: DeliverOutputs, options: SimRun) -> None:
    executor: Executor = sim.executor
    source: EventQueue = sim.events
    checker = check_contract(sim) if options.check_contract else None
    if checker is not None:
        executor = source = checker
    timeline = Timeline(executor, source, sim.engine.policy.lanes) if options.timeline else None
    log = EventLog(options.event_log) if options.event_log else None
    run(sim.engine, (source, executor), deliver, log, timeline)
    if checker is not None:
        checker.check_idle()
    if log:
        log.close()
    if timeline and options.timeline:
        timeline.write(options.timeline)


def make_result(
    machine: Machine,
    config: Config,
    queries: Sequence[Query],
    collected: CollectedResults,
    engines: Mapping[str, Engine],
) -> SimResult:
    """Times of several engines are summed, so `units_total` is one engine's."""
    workers = tuple((name, engine.stats()) for name, engine in engines.items())
    stats = workers[0][1]
    if len(workers) > 1:
        stats = msgspec.structs.replace(
            merge([one for _, one in workers]), units_total=machine.device.units
        )
    records = tuple(collected.records[q.id] for q in queries)
    engine = next(iter(engines.values()))
    return SimResult(
        records, collected.errors, stats, result_notes(machine, config, engine), workers
    )


class CollectedResults:
    """What engines deliver. A request arrives when it is sent (`sent_s`, by id), even if the host
    is busy then."""

    def __init__(
        self, sent_s: dict[str, float], on_timing: Callable[[RequestTiming], None] | None = None
    ) -> None:
        self.sent_s = sent_s
        self.on_timing = on_timing
        self.records: dict[str, RequestTiming] = {}
        self.errors: dict[str, str] = {}

    def deliver(self, outputs: list[Output], _: Engine) -> None:
        for output in outputs:
            if isinstance(output, RequestTiming):
                self.add(output)
            elif output.error:
                self.errors[output.id] = output.error

    def add(self, record: RequestTiming, error: str = "") -> None:
        record = msgspec.structs.replace(record, arrival_s=self.sent_s[record.id])
        self.records[record.id] = record
        if error:
            self.errors[record.id] = error
        if self.on_timing:
            self.on_timing(record)


def check_contract(sim: SimEngine) -> ContractChecker:
    engine = sim.engine
    return ContractChecker(sim.executor, sim.events, engine.limits, engine.policy.lanes)


def make_arrival(
    query: Query, tokens: TokenRange, seed: int, config: Config
) -> Callable[[], AddRequest]:
    """Makes the request when it is called, so that prompts of future requests take no memory."""
    sampling = Sampling(
        max_tokens=query.output_tokens, temperature=0.0, seed=query.number, ignore_eos=True
    )
    slo = query_slo(query, config)
    return lambda: AddRequest(
        id=query.id, prompt=prompt_ids(query, tokens, seed), sampling=sampling, slo=slo
    )


def query_slo(query: Query, config: Config) -> Slo:
    """The query's own targets; the configured ones where it has none."""
    return intern_slo(query.slo.with_defaults(config.scheduler.slo(query.prompt_tokens)))


@lru_cache(1 << 10)
def intern_slo(slo: Slo) -> Slo:
    """Equal targets become one object, so policies compare them by identity."""
    return slo


def result_notes(machine: Machine, config: Config, engine: Engine) -> tuple[str, ...]:
    """What limits the result."""
    device, asked = machine.device, config.scheduler.policy
    runs = type(engine.policy).__name__.lower()
    if machine.calibration is not None and machine.physics is None:
        about, points = machine.calibration.about, len(machine.calibration.points)
        date = about.get("date", "unknown date")
        found = [f"simulated {device.name}: steps as calibrated, {points} points of {date}"]
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
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds if count)
        found.append(f"{cluster.workers} such machines: {counts}")
    if machine.belief_error:
        found.append(f"the policy's prices are off by up to {machine.belief_error:.0%}")
    if machine.hiccups:
        found.append(f"{machine.hiccups:.1%} of the steps take longer for once")
    return tuple(found)


# ---------------------------------------------------------------- the command


@config_flags("scheduler")
def command(
    *,
    what: SimOptions = SimOptions(),
    load: LoadOptions = LoadOptions(),
    out: SimReportOptions = SimReportOptions(),
    config: Config,
) -> int:
    """Play a load against a simulated device: the engine that serves, on a virtual clock.

    counterpoint simulate --gpu h200 --model llama-3.1-8b --trace azure.csv --requests 1000
    --policy chunked --chunk-tokens 512
    """
    if out.slo:
        config = config.replace(**msgspec.structs.asdict(parse_slo(out.slo)))
    config = what.apply_to(config)
    for name, path in (
        ("--json", out.json),
        ("--timeline", out.timeline),
        ("--event-log", out.event_log),
    ):
        require_writable(name, path)
    machine = what.make_machine(config)
    trace = load.build_trace()
    run = SimRun(
        seed=load.seed,
        timeline=out.timeline,
        event_log=out.event_log,
        check_contract=out.watch,
    )
    result = simulate(machine, trace.queries, config, run)
    written = describe_run(machine, config, trace, load) | summarise(
        ReplayResult(result.records, result.errors, after=result.stats),
        {q.id: query_slo(q, config) for q in trace.queries},
        out.save_detailed,
    )
    stats = result.stats
    written |= {
        "bubbles": bubble_shares(result.workers, result.records),
        "pages_leaked": stats.pages_total - stats.pages_free - stats.pages_cached,
        "notes": [*trace.notes, *result.notes],
    }
    if tables.write_json(written, out.json):
        title = f"{machine.model.name} on {machine.device.name}, {config.scheduler.policy}"
        tables.show_result(Console(), written, title)
    return 0 if written["completed"] else 1


def describe_run(
    machine: Machine, config: Config, trace: Trace, load: LoadOptions
) -> dict[str, Any]:
    """The head of what is written: the keys of `bench`, with the device in place of the server.
    There is no date, so equal flags write equal bytes."""
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
    }
