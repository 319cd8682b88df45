"""Simulate: a load played against a device that is only numbers, on a virtual clock.

Owns: putting the engine, the simulated device and a load together, and the `simulate` command. Promises: the very engine and
policies that serve; deterministic; no torch. Must not: decide anything that serving would decide otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Group, Parameter
from rich.console import Console

from counterpoint import __version__
from counterpoint.bench import reshape, tables
from counterpoint.bench.load import Load, flag, parse_slo
from counterpoint.bench.report import summarise
from counterpoint.bench.trace import Trace
from counterpoint.bench.workload import Query, TokenRange, describe, offered_rate, prompt_ids
from counterpoint.build import find_model, make_limits
from counterpoint.config import Config, ConfigError, ModelConfig
from counterpoint.core.engine import Engine
from counterpoint.core.loop import EventLog, run
from counterpoint.core.policy import make_policy
from counterpoint.core.policy.ablated import ABLATIONS
from counterpoint.device.sim import Host, Latency, SimExecutor, VirtualInbox
from counterpoint.device.timeline import Timeline
from counterpoint.device.watch import Watch
from counterpoint.flags import settings
from counterpoint.perf import shelf
from counterpoint.perf.active import ActiveUnits
from counterpoint.perf.fitted import Fitted
from counterpoint.perf.host import Launching
from counterpoint.perf.perturbed import Perturbed
from counterpoint.perf.roofline import ELEMENT_BYTES, Roofline
from counterpoint.perf.table import Table, shape_of
from counterpoint.ports import Estimator, Executor, Inbox
from counterpoint.spec.device import DeviceSpec, device_spec
from counterpoint.spec.model import ModelSpec
from counterpoint.spec.source import load_spec
from counterpoint.types import Arrive, Output, Record, Sampling, Slo, Stats

MEMORY_SHARE = 0.9  # of the device's memory for weights and KV cache; the rest is for activations and the driver
SPLITS = 16  # at most so many splits for a policy to choose from: finer ones gain nothing (MuxWise uses steps of 16 SMs)
MODEL = "llama-3.1-8b"
HOST_S = 0.0003
TURN_S = 0.00025  # events, decisions and answers of auto on the loads of docs/results/simulator_against_h200_*: 0.11 to 0.32 ms


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated: a model on a device. `host_s`: from submitting a step to the device being able to start it (None: what the
    calibration says of the host and its launches, and then a turn of the loop takes TURN_S beside them; else HOST_S). `depth`:
    steps in flight per lane. `belief_error`: how far the policy's prices are off from what steps take, as a share. What steps take:
    as `physics` says, else as fitted to `calibration`, else as the roofline of model and device has it. `without`: the part that
    auto lacks (core/policy/ablated.py)."""

    model: ModelSpec
    device: DeviceSpec
    host_s: float | None = None
    depth: int = 2
    belief_error: float = 0.0
    physics: Estimator | None = None
    calibration: Table | None = None
    without: str | None = None

    @property
    def levels(self) -> tuple[int, ...]:
        """Decode units of the splits that a policy may choose from: where there is a calibration, those measured, as on the device
        itself."""
        if self.calibration is not None:
            return self.calibration.splits
        levels = self.device.partitions()
        return levels[:: -(-len(levels) // SPLITS)]

    def host(self, physics: Estimator) -> Host:
        if self.host_s is None and isinstance(physics, Fitted) and physics.launching.known:
            return physics.launching
        return Latency(HOST_S if self.host_s is None else self.host_s)

    def estimators(self, config: Config) -> tuple[Estimator, Estimator]:
        """Physics, for the device, and belief, for the policy."""
        physics = self.physics
        if physics is None:
            prior = Roofline(self.model, self.device, *dtypes(config, self.device))
            physics = prior if self.calibration is None else Fitted(self.calibration, prior)
        return physics, Perturbed(physics, self.belief_error) if self.belief_error else physics


@dataclasses.dataclass(frozen=True, slots=True)
class Simulated:
    """What came of a load. Times are seconds since its start; `records` are in the order of the queries, `errors` by request id."""

    records: tuple[Record, ...]
    errors: dict[str, str]
    stats: Stats
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    """What is written on the way, if a path is given: the Chrome trace of the lanes, and the events that entered the engine."""

    timeline: str | None = None
    event_log: str | None = None


# ---------------------------------------------------------------- the machine


def dtypes(config: Config, device: DeviceSpec) -> tuple[str, str]:
    """Element types of weights and of the KV cache that `config` means on `device`."""
    asked = None if config.model.dtype == "auto" else config.model.dtype
    weights = "fp8" if config.device.quantization == "fp8" else asked or device.dtype
    kv = "fp8" if config.device.kv_cache_dtype == "fp8" else asked or device.kv_dtype
    return weights, kv


def kv_pages(model: ModelSpec, device: DeviceSpec, config: Config) -> int:
    """Pages of the KV cache: as configured, or what nine tenths of the memory hold beside the weights.
    Raises ConfigError if nothing is left."""
    if config.device.kv_pages is not None:
        return config.device.kv_pages
    weights, kv = dtypes(config, device)
    weight_bytes = model.weight_bytes(ELEMENT_BYTES[weights])
    copies = device.degree * model.sharded(device.degree).cached_features / model.cached_features  # of the cache, over all devices
    left = config.device.kv_memory_bytes or int(device.memory_bytes * MEMORY_SHARE) - weight_bytes
    pages = int(left // (copies * model.kv_bytes_per_token(ELEMENT_BYTES[kv]) * config.device.page_tokens))
    if pages < 1:
        raise ConfigError(
            f"{model.name} has {weight_bytes / 1e9:.1f} GB of {weights} weights, which leaves no room for a KV cache in the "
            f"{device.memory_bytes / 1e9:.0f} GB of {device.name}: choose a larger device or a smaller model"
        )
    return pages


def make_engine(machine: Machine, config: Config, belief: Estimator) -> Engine:
    """The engine that would serve `machine`. Raises ConfigError if `config` does not suit it."""
    model, device = machine.model, machine.device
    limits = make_limits(config, model, kv_pages(model, device, config), device.units, device.overlap)
    scheduler, variant = config.scheduler, ABLATIONS.get(machine.without or "")
    if variant is not None and scheduler.policy == "auto":
        return Engine(limits, variant(scheduler, device.units, model.layers, machine.levels, belief, machine.depth))
    try:
        policy = make_policy(config.scheduler, device.units, model.layers, machine.depth, levels=machine.levels, belief=belief)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Engine(limits, policy)


# ---------------------------------------------------------------- the run


def simulate(
    machine: Machine,
    queries: Sequence[Query],
    config: Config = Config(),
    *,
    seed: int = 0,
    files: Files = Files(),
    watched: bool = False,
    on_record: Callable[[Record], None] | None = None,
) -> Simulated:
    """Play `queries` in virtual time; what came of each, and the engine's counters. `seed`: of the made prompts. `watched`: hold
    every command against the executor's contract. `on_record` is shown each request's record as it ends; what it raises ends the
    simulation. Raises ConfigError or ValueError if the machine can't be as it is asked."""
    physics, belief = machine.estimators(config)
    engine = make_engine(machine, config, belief)
    host = machine.host(physics)
    inbox = VirtualInbox(TURN_S if isinstance(host, Launching) else 0.0)
    tokens = TokenRange.within(machine.model.vocab)
    for query in reshape.without_texts(queries):
        inbox.call(query.arrival_s, arrival(query, tokens, seed, config))
    roofline = physics.prior if isinstance(physics, Fitted) else physics
    active = ActiveUnits(roofline) if isinstance(roofline, Roofline) else None
    executor: Executor = SimExecutor(physics, inbox, machine.model.layers, host, active=active)
    source: Inbox = inbox
    if watched:
        executor = source = watch(engine, executor, source)
    collected = Collected({query.id: query.arrival_s for query in queries}, on_record)
    deliver = collected.deliver
    timeline = None
    if files.timeline:
        timeline = Timeline(executor, source, {lane.id: str(lane.role) for lane in engine.policy.lanes})
        executor = source = timeline
        deliver = timeline.deliver_to(deliver)
    log = EventLog(files.event_log) if files.event_log else None
    run(engine, source, executor, deliver, log)
    if log:
        log.close()
    if timeline and files.timeline:
        timeline.write(files.timeline)
    records = tuple(collected.records[q.id] for q in queries)
    return Simulated(records, collected.errors, engine.stats(), notes(machine, config, engine))


class Collected:
    """What the engine delivers, as far as a simulation wants it. A request arrives when it is sent (`sent_s`, by its id), even if
    the host hears of it later."""

    def __init__(self, sent_s: dict[str, float], on_record: Callable[[Record], None] | None = None) -> None:
        self.sent_s = sent_s
        self.on_record = on_record
        self.records: dict[str, Record] = {}
        self.errors: dict[str, str] = {}

    def deliver(self, outputs: list[Output], _: Engine) -> None:
        for output in outputs:
            if isinstance(output, Record):
                record = msgspec.structs.replace(output, arrival_s=self.sent_s[output.id])
                self.records[record.id] = record
                if self.on_record:
                    self.on_record(record)
            elif output.error:
                self.errors[output.id] = output.error


def watch(engine: Engine, executor: Executor, inbox: Inbox) -> Watch:
    limits = engine.limits
    return Watch(
        executor,
        inbox,
        units=limits.units,
        layers=limits.layers,
        pages=limits.pages,
        page_tokens=limits.page_tokens,
        overlap=limits.overlap,
        lanes=engine.policy.lanes,
    )


def arrival(query: Query, tokens: TokenRange, seed: int, config: Config) -> Callable[[], Arrive]:
    """An alarm that makes the query's Arrive when its time has come: prompts of requests to come take no memory."""
    sampling = Sampling(max_tokens=query.output_tokens, temperature=0.0, seed=query.number, ignore_eos=True)
    slo = targets(query, config)
    return lambda: Arrive(id=query.id, prompt=prompt_ids(query, tokens, seed), sampling=sampling, slo=slo)


def targets(query: Query, config: Config) -> Slo:
    """The query's own targets, and the configured ones where it has none."""
    scheduler, own = config.scheduler, query.slo
    ttft_s = scheduler.ttft_s
    if scheduler.ttft_per_token_s is not None:
        ttft_s = max(ttft_s or 0.0, scheduler.ttft_per_token_s * query.prompt_tokens)
    return one_slo(
        ttft_s if own.ttft_s is None else own.ttft_s,
        scheduler.tpot_s if own.tpot_s is None else own.tpot_s,
        scheduler.itl_s if own.itl_s is None else own.itl_s,
    )


@lru_cache(1 << 10)
def one_slo(ttft_s: float | None, tpot_s: float | None, itl_s: float | None) -> Slo:
    """Equal targets are one object: policies need not look into it again."""
    return Slo(ttft_s, tpot_s, itl_s)


def notes(machine: Machine, config: Config, engine: Engine) -> tuple[str, ...]:
    """What a reader of the result has to know."""
    device, asked, runs = machine.device, config.scheduler.policy, type(engine.policy).__name__.lower()
    if machine.calibration is not None and machine.physics is None:
        about, points = machine.calibration.about, len(machine.calibration.points)
        found = [f"simulated {device.name}: steps as calibrated, {points} points of {about.get('date', 'unknown date')}"]
    else:
        origin = "as measured on" if device.measured else "not measured:"
        found = [f"simulated {device.name}, {origin} {device.source}"]
    if machine.without and asked == "auto":
        found.append(f"auto without {machine.without}")
    elif runs != asked:
        found.append(f"policy {asked} runs as {runs} here")
    if machine.belief_error:
        found.append(f"the policy's prices are off by up to {machine.belief_error:.0%}")
    return tuple(found)


# ---------------------------------------------------------------- the command

MACHINE = Group("Simulated machine", sort_key=0)
OUTPUT = Group("Output", sort_key=4)
JSON = Parameter(
    help="write the result to this file; - : standard output, which then has JSON alone", group=OUTPUT, allow_leading_hyphen=True
)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class What:
    """Which machine."""

    model: Annotated[
        str | None, flag(f"a known shape, a config.json, a Hugging Face folder or a GGUF file [default: {MODEL}]", MACHINE)
    ] = None
    gpu: Annotated[str, flag("h200 (measured); h100, a100, a800, h20, b200 (by datasheet); cpu-N, of N cores", MACHINE)] = "h200"
    dtype: Annotated[str | None, flag("of weights and maths: bfloat16, float16, float32; unset: the device's", MACHINE)] = None
    quantization: Annotated[str | None, flag("of the weights: none, fp8", MACHINE)] = None
    kv_cache_dtype: Annotated[str | None, flag("of the KV cache: auto, fp8", MACHINE)] = None
    kv_pages: Annotated[int | None, flag("pages of the KV cache; unset: what the memory holds beside the weights", MACHINE)] = None
    max_context_tokens: Annotated[int | None, flag("prompt and answer together; unset: what the model allows", MACHINE)] = None
    host_overhead: Annotated[
        float | None, flag("seconds from launching a step to its earliest start; unset: as calibrated, else 0.0003", MACHINE)
    ] = None
    depth: Annotated[int, flag("steps in flight per lane: 2 hides the host's overhead", MACHINE)] = 2
    calibration: Annotated[
        str,
        flag(
            "what steps take: a file of `counterpoint calibrate`, none (the roofline), auto (one that came along, if any)", MACHINE
        ),
    ] = "auto"
    without: Annotated[str | None, flag(f"take a part out of auto: {', '.join(ABLATIONS)}", MACHINE)] = None
    belief_error: Annotated[float, flag("how far the policy's prices are off, as a share: 0.2 is up to 20 %", MACHINE)] = 0.0

    def configured(self, config: Config) -> Config:
        """`config` with what is said here."""
        names = ("dtype", "quantization", "kv_cache_dtype", "kv_pages", "max_context_tokens")
        said = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        named = config.model.model if config.model.model != ModelConfig().model else MODEL
        return config.replace(model=self.model or named, **said)

    def machine(self, config: Config) -> Machine:
        if self.depth < 1 or (self.host_overhead or 0.0) < 0:
            raise ValueError(f"--depth is {self.depth} and --host-overhead {self.host_overhead}: at least 1 and 0")
        spec = load_spec(find_model(config), config.model.max_context_tokens)
        if self.without is not None and self.without not in ABLATIONS:
            raise ValueError(f"--without is {self.without!r}: it must be one of {', '.join(ABLATIONS)}")
        device = device_spec(self.gpu)
        table = None
        if self.calibration == "auto":
            table = shelf.shipped(device, spec, *dtypes(config, device))
        elif self.calibration != "none":
            table = shelf.load(Path(self.calibration))
            if (table.key.units, table.key.model) != (device.units, shape_of(spec)):
                raise ValueError(f"--calibration {self.calibration}: measured on {table.key.device} with {table.key.model}")
        return Machine(
            spec,
            device,
            self.host_overhead,
            depth=self.depth,
            belief_error=self.belief_error,
            calibration=table,
            without=self.without,
        )


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Out:
    """How it is judged, and where it goes."""

    slo: Annotated[str | None, flag("targets, e.g. ttft=1.0,tpot=50ms,itl=0.2: for the policy, goodput and attainment", OUTPUT)] = (
        None
    )
    json: Annotated[str | None, JSON] = None
    save_detailed: Annotated[bool, flag("with lists of every request's figures", OUTPUT)] = False
    timeline: Annotated[str | None, flag("write a Chrome/Perfetto trace of the lanes to this file", OUTPUT)] = None
    event_log: Annotated[str | None, flag("record every event that enters the engine to this file", OUTPUT)] = None
    watch: Annotated[bool, flag("hold every command against the executor's contract (slower)", OUTPUT)] = False


@settings("scheduler")
def command(*, what: What = What(), load: Load = Load(), out: Out = Out(), config: Config) -> int:
    """Play a load against a simulated device: the engine that serves, on a virtual clock.

    counterpoint simulate --gpu h200 --model llama-3.1-8b --trace azure.csv --requests 1000 --policy chunked --chunk-tokens 512
    """
    if out.slo:
        config = config.replace(**msgspec.structs.asdict(parse_slo(out.slo)))
    config = what.configured(config)
    machine = what.machine(config)
    trace = load.make()
    files = Files(out.timeline, out.event_log)
    came = simulate(machine, trace.queries, config, seed=load.seed, files=files, watched=out.watch)
    result = report(machine, config, trace, came, load, out.save_detailed)
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    if out.json == "-":
        print(text.decode())
    elif out.json:
        Path(out.json).write_bytes(text + b"\n")
    if out.json != "-":
        tables.show(Console(), result, f"{machine.model.name} on {machine.device.name}, {config.scheduler.policy}")
    return 0 if result["completed"] else 1


def report(machine: Machine, config: Config, trace: Trace, came: Simulated, load: Load, detailed: bool) -> dict[str, Any]:
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
        "request_rate": rate if rate != float("inf") else "inf",
        "seed": load.seed,
        "workload": describe(trace.queries) | {"trace": load.trace},
        **summarise(
            came.records,
            slo={q.id: targets(q, config) for q in trace.queries},
            stats=came.stats,
            errors=came.errors,
            detailed=detailed,
        ),
        "pages_leaked": came.stats.pages_total - came.stats.pages_free - came.stats.pages_cached,
        "notes": [*trace.notes, *came.notes],
    }
