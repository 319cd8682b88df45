"""The `bench` command: a load, a target, a result.

Owns: its own flags, and the shape of the JSON it writes. A bad flag is a ValueError, an unreachable
--url a ConnectionError. With `--json -` standard output has JSON alone; progress goes to standard
error. The exit status is 1 if no request was answered. Must not: measure or compute.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
from cyclopts import Group, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from counterpoint import __version__
from counterpoint.bench import tables, transform
from counterpoint.bench.client import HttpTarget
from counterpoint.bench.load import LoadOptions, flag, json_flag, parse_slo
from counterpoint.bench.replay import OnRequest, ReplayOptions, replay_engine, replay_http
from counterpoint.bench.report import ReplayResult, summarise
from counterpoint.bench.trace_formats import Trace, write_queries
from counterpoint.bench.workload import TokenRange, describe_load, offered_rate
from counterpoint.builder import system_builder
from counterpoint.config import Config, require_writable
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.timeline import Timeline
from counterpoint.flags import config_flags
from counterpoint.stats import Stats
from counterpoint.types import Slo

TARGET = Group("Target", sort_key=0)
OUTPUT = Group("Measuring and output", sort_key=4)
JSON = json_flag(OUTPUT)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TargetOptions:
    url: Annotated[str | None, flag("a server of the OpenAI API, with or without /v1", TARGET)] = (
        None
    )
    in_process: Annotated[
        bool, flag("an engine in this process, with the engine's flags below", TARGET)
    ] = False
    compare: Annotated[
        str | None,
        flag(
            "in this process: the same load under each policy, e.g. serial,chunked,multiplex",
            TARGET,
        ),
    ] = None
    endpoint: Annotated[
        Literal["completions", "chat"],
        flag("chat takes texts and messages, completions also token ids", TARGET),
    ] = "completions"
    api_model: Annotated[
        str | None, flag("the model's name at the server; unset: the first it lists", TARGET)
    ] = None
    api_key: Annotated[
        str | None,
        Parameter(help="sent as Bearer", group=TARGET, env_var="OPENAI_API_KEY", show_env_var=True),
    ] = None
    ignore_eos: Annotated[
        bool,
        flag("ask for answers of exactly the load's length, and hold the server to it", TARGET),
    ] = True
    token_ids: Annotated[
        str | None,
        flag("range of ids for made prompts; unset: 1000:30000, within the vocabulary", TARGET),
    ] = None
    timeout: Annotated[
        float, flag("seconds without a byte after which a request has failed", TARGET)
    ] = 600.0


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    slo: Annotated[
        str | None,
        flag("targets, e.g. ttft=1.0,tpot=50ms,itl=0.2: for goodput and attainment", OUTPUT),
    ] = None
    warmup: Annotated[int, flag("requests sent beforehand and not counted", OUTPUT)] = 1
    json: Annotated[str | None, JSON] = None
    save_detailed: Annotated[bool, flag("with lists of every request's figures", OUTPUT)] = False
    save_load: Annotated[
        str | None, flag("write the load itself to this file, to be used as --trace", OUTPUT)
    ] = None
    timeline: Annotated[
        str | None,
        flag("in this process: write a Chrome/Perfetto trace of the lanes to this file", OUTPUT),
    ] = None
    label: Annotated[str | None, flag("a name for this run, kept in the result", OUTPUT)] = None


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRun:
    target: TargetOptions
    load: LoadOptions
    out: ReportOptions
    trace: Trace
    console: Console


@config_flags("model", "device", "scheduler")
def bench(
    *,
    where: TargetOptions = TargetOptions(),
    load: LoadOptions = LoadOptions(),
    out: ReportOptions = ReportOptions(),
    config: Config,
) -> int:
    """Measure a server, or an engine in this process, under a load played open loop.

    counterpoint bench --url http://127.0.0.1:8000 --trace azure.csv --requests 200 --rate 2
    --slo ttft=1,tpot=100ms

    counterpoint bench --compare serial,chunked,multiplex --requests 32 --rate 1
    --prompt-tokens 400 --output-tokens 40
    """
    _check(where, out)
    slo = parse_slo(out.slo) if out.slo else _config_slo(config)
    config = config.replace(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, itl_s=slo.itl_s)
    trace = load.build_trace()
    trace = dataclasses.replace(trace, queries=tuple(transform.apply_slo(trace.queries, slo)))
    if out.save_load:
        write_queries(out.save_load, trace.queries)
    run = BenchRun(where, load, out, trace, Console(stderr=True, highlight=False))
    if where.url is not None:
        results = {"": _run_over_http(run, where.url)}
    else:
        policies = [config.scheduler.policy]
        if where.compare:
            policies = [policy.strip() for policy in where.compare.split(",")]
        configs = {policy: config.replace(policy=policy) for policy in policies}
        results = {policy: _run_in_process(run, one) for policy, one in configs.items()}
    _write_results(results, out)
    return 0 if all(r["completed"] for r in results.values()) else 1


def _check(where: TargetOptions, out: ReportOptions) -> None:
    if (where.url is None) == (not (where.in_process or where.compare)):
        raise ValueError(
            "say what is to be measured: either --url http://HOST:PORT or --in-process"
        )
    require_writable("--json", out.json)
    require_writable("--save-load", out.save_load)
    require_writable("--timeline", out.timeline)
    if out.warmup < 0:
        raise ValueError(f"--warmup is {out.warmup}: it must be 0 or more")
    if not where.timeout > 0:
        raise ValueError(f"--timeout is {where.timeout}: it must be more than 0 seconds")


def _config_slo(config: Config) -> Slo:
    scheduler = config.scheduler
    return Slo(scheduler.ttft_s, scheduler.tpot_s, scheduler.itl_s)


# ---------------------------------------------------------------- the two targets


def _run_over_http(run: BenchRun, url: str) -> dict[str, Any]:
    target = HttpTarget(
        url,
        run.target.api_model or "",
        api_key=run.target.api_key,
        endpoint=run.target.endpoint,
        extensions=run.target.ignore_eos,
        timeout_s=run.target.timeout,
    )
    if not target.model:
        target = dataclasses.replace(target, model=fetch_first_model(target))
    queries = run.trace.queries
    with _progress_bar(run.console, target.root, len(queries)) as on_request:
        options = ReplayOptions(
            warmup=transform.warmup_queries(queries, run.out.warmup),
            tokens=_token_range(run.target.token_ids) or TokenRange(),
            seed=run.load.seed,
            on_request=on_request,
        )
        outcome = replay_http(target, queries, options)
    about = {
        "backend": "openai",
        "base_url": target.root,
        "endpoint": target.endpoint,
        "model_id": target.model,
    }
    return _build_result(about, run, run.trace, outcome)


def fetch_first_model(target: HttpTarget) -> str:
    """The first model that the server lists. Raises ConnectionError if it lists none."""
    try:
        response = httpx.get(
            f"{target.root}/v1/models", headers=target.headers(), timeout=10.0, trust_env=False
        )
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except (httpx.HTTPError, OSError) as error:
        raise ConnectionError(
            f"{target.root}: no list of models ({describe_http_error(error)})"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise ConnectionError(
            f"{target.root}/v1/models lists no model; name one with --api-model"
        ) from None


def describe_http_error(error: Exception) -> str:
    if not isinstance(error, httpx.HTTPStatusError):
        return f"{error}; is the server up?"
    status = f"{error.response.status_code} {error.response.reason_phrase}"
    unauthorised = error.response.status_code in (401, 403)
    return f"{status}; give the right --api-key" if unauthorised else status


def _run_in_process(run: BenchRun, config: Config) -> dict[str, Any]:
    inbox, policy = WallClockEventQueue(), config.scheduler.policy
    with run.console.status("starting the engine") as status:
        system = system_builder.build_system(config, inbox, status.update)
    queries = transform.drop_texts(run.trace.queries)
    timeline = None
    if run.out.timeline:
        timeline = Timeline(system.executor, inbox, system.engine.policy.lanes)
    title = f"{system.spec.name}, {policy}"
    try:
        with _progress_bar(run.console, title, len(queries)) as on_request:
            options = ReplayOptions(
                warmup=transform.warmup_queries(queries, run.out.warmup),
                tokens=_token_range(run.target.token_ids) or TokenRange.within(system.spec.vocab),
                seed=run.load.seed,
                on_request=on_request,
                timeline=timeline,
            )
            outcome = replay_engine(system.engine, inbox, system.executor, queries, options)
    finally:
        system.executor.close()
    if timeline and run.out.timeline:
        timeline.write(_labelled_path(run.out.timeline, policy if run.target.compare else ""))
    notes = [*run.trace.notes, *system.notes]
    if queries != list(run.trace.queries):
        notes.append("given texts were played as made tokens of their estimated length")
    about = {
        "backend": "counterpoint",
        "model_id": system.spec.name,
        "policy": policy,
        "lanes": system.lanes,
        "config": dataclasses.asdict(config),
    }
    played = dataclasses.replace(run.trace, queries=tuple(queries), notes=tuple(notes))
    return _build_result(about, run, played, outcome)


def _labelled_path(path: str, label: str) -> Path:
    """`path` with -`label` before its suffix: one file per policy."""
    file = Path(path)
    return file.with_name(f"{file.stem}-{label}{file.suffix}") if label else file


def _token_range(text: str | None) -> TokenRange | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit()):
        raise ValueError(f"--token-ids {text!r}: write FIRST:LAST, for instance 1000:30000")
    return TokenRange(int(first), int(last))


# ---------------------------------------------------------------- the result


def _build_result(
    about: dict[str, Any], run: BenchRun, trace: Trace, outcome: ReplayResult
) -> dict[str, Any]:
    load, rate = run.load, offered_rate(trace.queries)
    arrivals = load.arrivals or ("trace" if load.trace else "poisson")
    slo = {query.id: query.slo for query in trace.queries}
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "counterpoint_version": __version__,
        "label": run.out.label,
        **about,
        "tokenizer_id": load.tokenizer,
        "request_rate": rate if rate != float("inf") else "inf",
        "burstiness": load.burstiness if arrivals == "gamma" else 1.0,
        "max_concurrency": None,
        "arrivals": arrivals,
        "seed": load.seed,
        "workload": describe_load(trace.queries) | {"trace": load.trace},
        "slo": parse_slo(run.out.slo) if run.out.slo else None,
        **summarise(outcome, slo, detailed=run.out.save_detailed),
        "pages_free_before": _usable_pages(outcome.before),
        "pages_free_after": _usable_pages(outcome.after),
        "pages_leaked": outcome.pages_leaked,
        "notes": [*trace.notes, *outcome.notes],
    }


def _usable_pages(stats: Stats | None) -> int | None:
    return None if stats is None else stats.pages_free + stats.pages_cached


def _write_results(results: dict[str, dict[str, Any]], out: ReportOptions) -> None:
    runs = list(results.values())
    if not tables.write_json(runs[0] if len(runs) == 1 else {"runs": runs}, out.json):
        return
    console, model = Console(), runs[0]["model_id"]
    if len(runs) == 1:
        where = runs[0].get("policy", "at " + runs[0].get("base_url", ""))
        tables.show_result(console, runs[0], f"{model} {where}")
    else:
        title = f"{model}, the same {runs[0]['num_prompts']} requests"
        tables.show_comparison(console, results, title)


@contextlib.contextmanager
def _progress_bar(console: Console, title: str, count: int) -> Iterator[OnRequest]:
    """A progress bar while a load is played. Yields the callback for each request."""
    counts: collections.Counter[str] = collections.Counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task(title, total=count, state="")

        def on_request(event: Literal["sent", "done", "failed"]) -> None:
            counts[event] += 1
            ended = counts["done"] + counts["failed"]
            failed = f", {counts['failed']} failed" if counts["failed"] else ""
            bar.update(task, completed=ended, state=f"{counts['sent'] - ended} in flight{failed}")

        yield on_request
