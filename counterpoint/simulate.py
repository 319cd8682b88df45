"""Simulate: a load played against a device that is only numbers, on a virtual clock.

Owns: putting the engine, the simulated device and a load together, and the `simulate` command. Promises: the very engine and
policies that serve; deterministic; no torch. Must not: decide anything that serving would decide otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Group, Parameter

from counterpoint.bench.load import Load, parse_slo
from counterpoint.bench.report import summarise
from counterpoint.bench.timeline import Timeline
from counterpoint.bench.workload import Query, TokenRange, prompt_ids
from counterpoint.build import find_model, make_limits
from counterpoint.config import Config, ConfigError, SchedulerConfig
from counterpoint.core.engine import Engine
from counterpoint.core.loop import EventLog, run
from counterpoint.core.policy import make_policy
from counterpoint.device.sim import SimExecutor, VirtualInbox
from counterpoint.device.watch import Watch
from counterpoint.perf.roofline import ELEMENT_BYTES, Roofline
from counterpoint.ports import Estimator, Executor, Inbox, Policy
from counterpoint.spec.device import DeviceSpec, device_spec
from counterpoint.spec.model import ModelSpec
from counterpoint.spec.source import load_spec
from counterpoint.types import Arrive, Delta, Output, Record, Sampling, Slo, Stats

MEMORY_SHARE = 0.9  # of the device's memory for weights and KV cache; the rest is for activations and the driver


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated. `host_s`: from submitting a step to the device being able to start it. `depth`: steps in flight per lane.
    `physics`: None is the roofline of model and device."""

    model: ModelSpec
    device: DeviceSpec
    host_s: float = 0.0003
    depth: int = 2
    physics: Estimator | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Simulated:
    """What came of a load. Times are seconds since its start; `records` are in the order of the queries, `errors` by request id."""

    records: tuple[Record, ...]
    errors: dict[str, str]
    stats: Stats
    notes: tuple[str, ...] = ()


def dtypes(config: Config, device: DeviceSpec) -> tuple[str, str]:
    """Element types of weights and of the KV cache that `config` means on `device`."""
    weights = device.dtype if config.model.dtype == "auto" else config.model.dtype
    if config.device.quantization == "fp8":
        weights = "fp8"
    if config.device.kv_cache_dtype == "fp8":
        return weights, "fp8"
    return weights, device.kv_dtype if config.model.dtype == "auto" else config.model.dtype


def kv_pages(model: ModelSpec, device: DeviceSpec, config: Config) -> int:
    """Pages of the KV cache: as configured, or what nine tenths of the memory hold beside the weights.
    Raises ConfigError if nothing is left."""
    if config.device.kv_pages is not None:
        return config.device.kv_pages
    weights, kv = dtypes(config, device)
    weight_bytes = model.weight_bytes(ELEMENT_BYTES[weights])
    left = config.device.kv_memory_bytes or int(device.memory_bytes * MEMORY_SHARE) - weight_bytes
    pages = left // (model.kv_bytes_per_token(ELEMENT_BYTES[kv]) * config.device.page_tokens)
    if pages < 1:
        raise ConfigError(
            f"{model.name} has {weight_bytes / 1e9:.1f} GB of {weights} weights, which leaves no room for a KV cache in the "
            f"{device.memory_bytes / 1e9:.0f} GB of {device.name}: choose a larger device or a smaller model"
        )
    return pages


def simulate(
    machine: Machine,
    queries: Sequence[Query],
    config: Config = Config(),
    *,
    seed: int = 0,
    timeline: str | None = None,
    log: str | None = None,
    watched: bool = False,
) -> Simulated:
    """Play `queries` in virtual time; what came of each, and the engine's counters. `seed`: of the made prompts. `timeline`: file
    for the Chrome trace. `log`: file for the events. `watched`: hold every command against the executor's contract.
    Raises ConfigError or ValueError if the machine can't be as it is asked."""
    model, device = machine.model, machine.device
    weights, kv = dtypes(config, device)
    physics = machine.physics or Roofline(model, device, weights, kv)
    limits = make_limits(config, model, kv_pages(model, device, config), device.units, device.overlap)
    policy = make_policy(config.scheduler, device.units, model.layers, machine.depth)
    engine = Engine(limits, policy)
    inbox = VirtualInbox()
    for query in queries:
        inbox.call(query.arrival_s, arrival(query, TokenRange.within(model.vocab), seed, config))
    executor: Executor = SimExecutor(physics, inbox, model.layers, machine.host_s)
    source: Inbox = inbox
    if watched:
        executor = source = Watch(
            executor,
            source,
            units=limits.units,
            layers=limits.layers,
            pages=limits.pages,
            page_tokens=limits.page_tokens,
            overlap=limits.overlap,
            lanes=policy.lanes,
        )
    records: dict[str, Record] = {}
    errors: dict[str, str] = {}

    def deliver(outputs: list[Output], _: Engine) -> None:
        for output in outputs:
            if isinstance(output, Record):
                records[output.id] = output
            elif isinstance(output, Delta) and output.error:
                errors[output.id] = output.error

    recorder = Timeline(executor, source, {lane.id: str(lane.role) for lane in policy.lanes}) if timeline else None
    if recorder:
        executor = source = recorder
    events = EventLog(log) if log else None
    run(engine, source, executor, recorder.deliver_to(deliver) if recorder else deliver, events)
    if events:
        events.close()
    if recorder and timeline:
        recorder.write(timeline)
    return Simulated(tuple(records[q.id] for q in queries), errors, engine.stats(), notes(machine, config, policy))


def arrival(query: Query, tokens: TokenRange, seed: int, config: Config) -> Callable[[], Arrive]:
    """An alarm that makes the query's Arrive when its time has come: prompts of requests to come take no memory. Of a prompt that
    is a text, only the length is known here."""
    scheduler = config.scheduler
    slo = Slo(
        query.slo.ttft_s if query.slo.ttft_s is not None else scheduler.ttft_s,
        query.slo.tpot_s if query.slo.tpot_s is not None else scheduler.tpot_s,
        query.slo.itl_s if query.slo.itl_s is not None else scheduler.itl_s,
    )
    sampling = Sampling(max_tokens=query.output_tokens, temperature=0.0, seed=query.number, ignore_eos=True)
    known = query if query.ids is not None else dataclasses.replace(query, prompt=None)
    return lambda: Arrive(id=query.id, prompt=prompt_ids(known, tokens, seed), sampling=sampling, slo=slo)


def notes(machine: Machine, config: Config, policy: Policy) -> tuple[str, ...]:
    """What a reader of the result has to know."""
    device, asked, runs = machine.device, config.scheduler.policy, type(policy).__name__.lower()
    origin = "measured" if device.measured else "not measured"
    found = [f"simulated {device.name} ({origin}: {device.source})"]
    if runs != asked:
        found.append(f"policy {asked} runs as {runs} here")
    return tuple(found)


# ---------------------------------------------------------------- the command

MACHINE = Group("Simulated machine", sort_key=0)
OUTPUT = Group("Output", sort_key=9)


def flag(help: str, group: Group) -> Parameter:
    return Parameter(help=help, group=group)


def command(
    *,
    model: Annotated[str, flag("a known shape, a config.json, a Hugging Face folder or a GGUF file", MACHINE)] = "llama-3.1-8b",
    gpu: Annotated[str, flag("h200 (measured), h100, a100, a800, h20, b200 (by datasheet), or cpu-2", MACHINE)] = "h200",
    dtype: Annotated[str, flag("weights and maths: bfloat16, float16, fp8; auto: the device's", MACHINE)] = "auto",
    kv_pages: Annotated[int | None, flag("pages of the KV cache; unset: what the memory holds beside the weights", MACHINE)] = None,
    host_overhead: Annotated[float, flag("seconds from launching a step to its earliest start", MACHINE)] = 0.0003,
    depth: Annotated[int, flag("steps in flight per lane: 2 hides the host's overhead", MACHINE)] = 2,
    scheduler: Annotated[SchedulerConfig, Parameter(name="*", group="Scheduler")] = SchedulerConfig(),
    load: Load = Load(),
    slo: Annotated[str | None, flag("targets, e.g. ttft=1,tpot=50ms,itl=200ms: for goodput and for the policy", OUTPUT)] = None,
    json: Annotated[
        str | None,
        Parameter(help="write the result as JSON to this file; -: standard output, alone", group=OUTPUT, allow_leading_hyphen=True),
    ] = None,
    timeline: Annotated[str | None, flag("write a Chrome/Perfetto trace of the lanes to this file", OUTPUT)] = None,
    event_log: Annotated[str | None, flag("record every event that enters the engine to this file", OUTPUT)] = None,
    watch: Annotated[bool, flag("hold every command against the executor's contract (slower)", OUTPUT)] = False,
) -> None:
    """Play a load against a simulated device: the serving engine itself, on a virtual clock.

    counterpoint simulate --gpu h200 --model llama-3.1-8b --trace azure.csv --requests 1000 --policy chunked --chunk-tokens 512
    """
    targets = parse_slo(slo) if slo else Slo(scheduler.ttft_s, scheduler.tpot_s, scheduler.itl_s)
    scheduler = dataclasses.replace(scheduler, ttft_s=targets.ttft_s, tpot_s=targets.tpot_s, itl_s=targets.itl_s)
    config = dataclasses.replace(Config(), scheduler=scheduler).replace(model=model, dtype=dtype, kv_pages=kv_pages)
    spec = load_spec(find_model(config))
    trace = load.make()
    machine = Machine(spec, device_spec(gpu), host_overhead, depth)
    came = simulate(machine, trace.queries, config, seed=load.seed, timeline=timeline, log=event_log, watched=watch)
    result = {
        "backend": "counterpoint-simulate",
        "model_id": spec.name,
        "device": machine.device.name,
        "device_measured": machine.device.measured,
        "policy": scheduler.policy,
        "chunk_tokens": scheduler.chunk_tokens,
        "split": scheduler.split,
        **summarise(came.records, slo=targets, stats=came.stats, errors=came.errors),
        "notes": [*trace.notes, *came.notes],
    }
    if json == "-":
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
        return
    if json is not None:
        Path(json).write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    show(result)


def show(result: dict[str, Any]) -> None:
    """The result as a table on standard output, and its notes."""
    from rich.console import Console
    from rich.table import Table

    def number(key: str, digits: int = 1) -> str:
        value = result.get(key)
        return "–" if value is None else f"{value:,.{digits}f}"

    console = Console(highlight=False)
    title = f"{result['model_id']} on {result['device']}, {result['policy']}"
    table = Table("", "mean", "p50", "p90", "p99", "max", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    names = {"ttft": "first token, ms", "tpot": "per token after, ms", "itl": "gap, ms", "longest_gap": "longest gap, ms"}
    for key, name in names.items():
        table.add_row(name, *(number(f"{which}_{key}_ms") for which in ("mean", "p50", "p90", "p99", "max")))
    console.print(table)
    console.print(
        f"{result['completed']} of {result['num_prompts']} requests completed in {number('duration')} s; "
        f"{number('request_throughput', 2)} requests/s, {number('output_throughput', 0)} output tokens/s, "
        f"{number('total_token_throughput', 0)} tokens/s; {result['preemptions']} preemptions"
    )
    if result["slo_attainment"] is not None:
        low, high = result["slo_attainment_ci95"]
        share = f"{result['slo_attainment']:.1%} ({low:.1%} to {high:.1%})"
        console.print(f"within all targets: {share}; goodput {number('request_goodput', 2)} requests/s")
    for split in result["split_share"]:
        console.print(
            f"prefill on {split['prefill_units']}, decode on {split['decode_units']} units: {split['share']:.1%} of busy time"
        )
    for note in result["notes"]:
        console.print(f"* {note}", style="dim")
