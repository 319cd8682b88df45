"""The settings of two papers, simulated: `python -m benchmarks.papers --traces FOLDER [--requests N] [--json FILE]`.

Owns: which settings, and the papers' figures beside ours. Promises: the policies that serve, on devices that are known by their
datasheets alone; every setting that is run is shown, and what is not run is named. Must not: be tuned to the figures.

MuxWise: arXiv 2504.14489. Bullet: arXiv 2504.19516. Neither's engine is run here: what is compared is a ratio between two modes of
this engine with the ratio that the paper reports between its engine and another.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.bench import transform
from counterpoint.bench.load import LoadOptions, parse_slo
from counterpoint.bench.report import ReplayResult, summarise, time_with_requests_s
from counterpoint.bench.workload import TokenRange
from counterpoint.config import Config, require_writable
from counterpoint.core.policy import nearest
from counterpoint.cost_model.roofline import MatrixProduct, Roofline, busy_units
from counterpoint.simulator.machine import Machine, make_pool
from counterpoint.simulator.plan import (
    FoundRate,
    Mode,
    PlanTask,
    SloUnreachable,
    find_rate,
    guessed_rate,
    highest,
    judge,
    play,
)
from counterpoint.simulator.simulate import CollectedResults, make_arrival, query_slo
from counterpoint.spec.device import device_spec
from counterpoint.spec.presets import PRESETS
from counterpoint.stats import Stats

SHAREGPT = {
    "prompt_tokens": 161,
    "output_tokens": 338,
    "prompt_spread": 1.0,
    "output_spread": 0.8,
}  # means: vLLM, SOSP'23, 6.1
CODE, CONVERSATION = {"trace": "azure_2023_code.csv"}, {"trace": "azure_2023_conv.csv"}
CHUNKS = (256, 512, 1024, 2048)
PRECISION = 0.05
CONTEXT = 16384


@dataclasses.dataclass(frozen=True, slots=True)
class PaperSetting:
    """`per_token_s`: a target for the first token per prompt token, beside `slo`. `gain`: of the paper's system over chunked
    prefill, in goodput or throughput, as it words it."""

    paper: str
    gpu: str
    model: str
    name: str
    load: Mapping[str, Any]
    slo: str
    per_token_s: float | None
    gain: str


SETTINGS = (
    PaperSetting(
        "MuxWise",
        "a100",
        "llama-2-13b",
        "ShareGPT-like",
        SHAREGPT,
        "ttft=1,tpot=50ms",
        None,
        "2.20x mean, 3.06x most",
    ),
    PaperSetting(
        "MuxWise",
        "a100",
        "llama-3.1-8b",
        "ShareGPT-like",
        SHAREGPT,
        "ttft=1,tpot=50ms",
        None,
        "1.2x (one A100, 8B)",
    ),
    PaperSetting(
        "Bullet",
        "a100",
        "llama-3.1-8b",
        "ShareGPT-like",
        SHAREGPT,
        "ttft=0.5,tpot=150ms",
        0.003,
        "1.09x mean, 1.20x most",
    ),
    PaperSetting(
        "Bullet",
        "a100",
        "llama-3.1-8b",
        "Azure code",
        CODE,
        "ttft=0.5,tpot=200ms",
        0.0015,
        "1.09x mean, 1.20x most",
    ),
    PaperSetting(
        "Bullet",
        "8xa100",
        "llama-3.1-70b",
        "Azure code",
        CODE,
        "ttft=0.5,tpot=200ms",
        0.0015,
        "1.26x mean, 1.55x most",
    ),
    PaperSetting(
        "Bullet",
        "8xh20",
        "qwen3-235b-a22b",
        "Azure conversation",
        CONVERSATION,
        "ttft=1.4,tpot=60ms",
        None,
        "about 3P1D's",
    ),
    PaperSetting(
        "Bullet",
        "h100",
        "llama-3.1-8b",
        "Azure conversation",
        CONVERSATION,
        "ttft=1,tpot=50ms",
        None,
        "less than on A100",
    ),
)


# ---------------------------------------------------------------- goodput


def modes_of(machine: Machine) -> list[Mode]:
    """Chunked prefill, fixed splits with half of the device for decode among them, and auto."""
    units, levels = machine.device.units, machine.levels
    splits = sorted({nearest(levels, units * share) for share in (0.15, 0.25, 0.35, 0.5)})
    found = [Mode(f"chunked:{n}", {"policy": "chunked", "chunk_tokens": n}) for n in CHUNKS]
    found += [Mode(f"multiplex:{n}", {"policy": "multiplex", "split": n}) for n in splits]
    return [*found, Mode("auto", {"policy": "auto"})]


def task_of(setting: PaperSetting, traces: Path, requests: int) -> PlanTask:
    machine = Machine(PRESETS[setting.model], device_spec(setting.gpu))
    flags: dict[str, Any] = {
        key: str(traces / value) if key == "trace" else value for key, value in setting.load.items()
    }
    queries = LoadOptions(requests=requests, arrivals="poisson", **flags).build_trace().queries
    longest = machine.model.max_context_tokens
    config = Config().replace(
        **msgspec.structs.asdict(parse_slo(setting.slo)),
        ttft_per_token_s=setting.per_token_s,
        max_context_tokens=CONTEXT if longest > CONTEXT else None,
    )
    queries = tuple(q for q in queries if q.prompt_tokens + q.output_tokens < min(CONTEXT, longest))
    return PlanTask(machine, config, queries, precision=PRECISION)


def run(
    setting: PaperSetting, traces: Path, requests: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The goodput of each mode, and chunked 1024 and auto at the rate that chunked 1024 holds."""
    task = task_of(setting, traces, requests)
    start, found = None, dict[str, FoundRate]()
    for mode in modes_of(task.machine):
        if start is None:
            start = step_of(guessed_rate(task))
        one = found[mode.name] = find_rate(task, mode, start)
        start = step_of(one.rate) if one.rate else start
        tell(f"{title(setting)}: {mode.name} {one.rate:.2f} requests/s")
    return summary(setting, task, found)


def title(setting: PaperSetting) -> str:
    return f"{setting.paper}, {setting.model} on {setting.gpu}, {setting.name}"


def step_of(rate: float) -> int:
    return round(math.log(rate) / math.log(1 + PRECISION))


def summary(
    setting: PaperSetting, task: PlanTask, found: Mapping[str, FoundRate]
) -> dict[str, Any]:
    units = task.machine.device.units
    chunked = max(
        (one for name, one in found.items() if name.startswith("chunked")), key=lambda one: one.rate
    )
    splits = {
        int(name.partition(":")[2]): one.rate
        for name, one in found.items()
        if name.startswith("multiplex")
    }
    half = splits[nearest(tuple(splits), units / 2)]
    best = max(one.rate for one in found.values())
    auto, plain = found["auto"], found["chunked:1024"]
    same = {name: at_rate(task, name, plain.rate) for name in ("chunked:1024", "auto")}
    return {
        "setting": dataclasses.asdict(setting),
        "rates": {name: one.rate for name, one in found.items()},
        "auto over chunked 1024": ratio(auto.rate, plain.rate),
        "auto over best chunked": ratio(auto.rate, chunked.rate),
        "best chunked": chunked.mode,
        "best split": ratio(max(splits.values()), best),
        "half and half": ratio(half, best),
        "auto of best": ratio(auto.rate, best),
        "at the rate of chunked 1024": same,
    }


def at_rate(task: PlanTask, name: str, rate: float) -> dict[str, Any]:
    policy, _, value = name.partition(":")
    flags = {"policy": policy} | ({"chunk_tokens": int(value)} if value else {})
    result = play(dataclasses.replace(task, config=task.config.replace(**flags), wanted=0.0), rate)
    assert result is not None
    keys = (
        "mean_ttft_ms",
        "p90_ttft_ms",
        "mean_tpot_ms",
        "p99_itl_ms",
        "active_share",
        "slo_attainment",
    )
    return {key: result[key] for key in keys}


def ratio(one: float, other: float) -> float | None:
    return one / other if other else None


# ---------------------------------------------------------------- bubbles

TOO_LARGE = ("qwen3-235b-a22b",)  # for half of its setting's GPUs
SETTLED = 0.2  # of the time in which requests come, after which idle time counts


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """Machines that share a load: so many `gpus` in all. `strict`: pools of which one prefills everything and the other decodes
    everything, whatever the targets, as DistServe does."""

    name: str
    machine: Machine
    gpus: int
    settings: Mapping[str, Any]
    strict: bool = False


def fleets(setting: PaperSetting, split: int, wanted: int) -> list[Fleet]:
    """`wanted` GPUs as replicas of one mode (`split`: for decode, of the fixed one), as strict pools and as pools that serve. A
    model that takes several GPUs is served by all of them at once, by two halves alike, or by pools of such halves."""
    whole = Machine(PRESETS[setting.model], device_spec(setting.gpu))
    degree = whole.device.degree
    part = (
        whole
        if degree == 1
        else Machine(whole.model, device_spec(f"{degree // 2}x{setting.gpu.partition('x')[2]}"))
    )
    gpus, parts = (wanted, wanted) if degree == 1 else (degree, 2)
    chunked, auto = {"policy": "chunked", "chunk_tokens": 1024}, {"policy": "auto"}
    fixed = {"policy": "multiplex", "split": split}
    found = [
        Fleet(name, whole, gpus, {**flags, "replicas": gpus // degree})
        for name, flags in (
            ("chunked:1024", chunked),
            (f"multiplex:{split}", fixed),
            ("auto", auto),
        )
    ]
    if degree > 1:
        found += [
            Fleet(f"{name}, two halves", part, gpus, {**flags, "replicas": 2})
            for name, flags in (("chunked:1024", chunked), ("auto", auto))
        ]
    for prefill in range(1, parts):
        workers = {"prefill": prefill, "decode": parts - prefill}
        name = f"{prefill * gpus // parts}:{workers['decode'] * gpus // parts}"
        found.append(
            Fleet(f"strict pools {name}", part, gpus, {"policy": "serial", **workers}, strict=True)
        )
        found.append(Fleet(f"pools {name}", part, gpus, {**auto, **workers}))
    return found


def work(fleet: Fleet, task: PlanTask, rate: float) -> dict[str, Any] | None:
    """What `fleet` makes of the load at `rate` requests/s a GPU; None if too many requests miss their targets. `idle`: the share of
    all units x time that no step had, while new requests came and any was there."""
    queries = transform.scale_to_rate(task.queries, rate * fleet.gpus)
    slo = {query.id: query_slo(query, task.config) for query in queries}
    config = task.config.replace(**fleet.settings)
    if fleet.strict:
        config = config.replace(
            ttft_s=None, ttft_per_token_s=None, tpot_s=None, local_tokens=0, spill_s=1e9
        )
    collected = CollectedResults(
        {query.id: query.arrival_s for query in queries}, judge(slo, task.wanted)
    )
    pool = make_pool(fleet.machine, config, collected.keep)
    if fleet.strict:  # nor does it matter how many a worker may run
        for seat in pool.routing.workers.values():
            seat.shape = msgspec.structs.replace(seat.shape, slots=len(queries) + 1)
    tokens = TokenRange.within(fleet.machine.model.vocab)
    for query in queries:
        pool.post(query.arrival_s, make_arrival(query, tokens, task.seed, config))
    seen: list[dict[str, float]] = []
    last_s = queries[-1].arrival_s
    for at_s in (SETTLED * last_s, last_s):
        pool.door.call_at(
            at_s,
            lambda: seen.append(
                {name: used_s(worker.engine.stats()) for name, worker in pool.workers.items()}
            ),
        )
    try:
        pool.run()
    except SloUnreachable:
        return None
    records = list(collected.records.values())
    room_s = time_with_requests_s(records, SETTLED * last_s, last_s) * fleet.machine.device.units
    idle = {name: max(0.0, 1 - (used - seen[0][name]) / room_s) for name, used in seen[1].items()}
    result = summarise(ReplayResult(records), slo)
    kept = {key: result[key] for key in ("slo_attainment", "mean_ttft_ms", "mean_tpot_ms")}
    return kept | {"idle": sum(idle.values()) / len(idle), "idle by worker": idle}


def used_s(stats: Stats) -> float:
    """Units times seconds that steps have had."""
    return sum(
        [
            seconds * min(stats.units_total, prefill + decode)
            for prefill, decode, seconds in stats.split_s
        ]
    )


def bubble_rows(
    setting: PaperSetting, traces: Path, requests: int, gpus: int, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Of each fleet: what it holds, its idle share there, and at the rate that the best strict pools hold."""
    degree = device_spec(setting.gpu).degree
    start = step_of(guessed_rate(task_of(setting, traces, requests)) / degree)
    known = fleets(setting, best_split(task_of(setting, traces, requests)), gpus)
    task = task_of(setting, traces, requests * gpus)
    rows: list[dict[str, Any]] = []
    for fleet in known:
        rate, there = held(fleet, task, start)
        start = step_of(rate) if rate else start
        rows.append(
            {
                "setting": dataclasses.asdict(setting),
                "fleet": fleet.name,
                "rate": rate,
                "there": there,
            }
        )
        tell(
            f"{title(setting)}: {fleet.name} {rate:.2f} requests/s a GPU, {percent(there['idle'] if there else None)} idle"
        )
    common = max(row["rate"] for row, fleet in zip(rows, known, strict=True) if fleet.strict)
    for row, fleet in zip(rows, known, strict=True):
        row["common rate"] = common
        row["at the common rate"] = work(fleet, dataclasses.replace(task, wanted=0.0), common)
    return rows


def best_split(task: PlanTask) -> int:
    """Units for decode of the fixed split that holds most on one machine."""
    splits = [mode for mode in modes_of(task.machine) if "split" in mode.settings]
    start = step_of(guessed_rate(task))
    return max(splits, key=lambda mode: find_rate(task, mode, start).rate).settings["split"]


def held(fleet: Fleet, task: PlanTask, start: int) -> tuple[float, dict[str, Any] | None]:
    """The highest rate per GPU at which enough requests keep their targets, and what is seen there."""
    seen: dict[int, dict[str, Any] | None] = {}

    def holds(step: int) -> bool:
        if step not in seen:
            seen[step] = work(fleet, task, task.at(step))
        return seen[step] is not None

    low = highest(holds, start)
    return (task.at(low), seen[low]) if low is not None else (0.0, None)


# ---------------------------------------------------------------- waves

WAVES = {
    1024: 0.194,
    2048: 0.104,
    4096: 0.091,
    16384: 0.005,
}  # Bullet, section 2: idle SMs of a layer, A100, Llama-3.1-8B


def wave_rows() -> Iterator[dict[str, float]]:
    """Idle share of an A100's SMs in the products of a layer: with one tile for all (128 x 256, nothing cut along the inner
    dimension), and with the tiles that the roofline chooses."""
    device = device_spec("a100")
    roofline = Roofline(PRESETS["llama-3.1-8b"], device)
    for tokens, paper in WAVES.items():
        fixed = [one_tile(product, tokens, device.units) for product in roofline.layer_products]
        chosen = [
            roofline.tiled_cost(product, tokens, device.units)
            for product in roofline.layer_products
        ]
        yield {
            "tokens": tokens,
            "paper": paper,
            "one tile": 1 - sum(work for work, _ in fixed) / sum(room for _, room in fixed),
            "chosen tiles": 1
            - sum(c.seconds * busy for c, busy in chosen)
            / sum(c.seconds for c, _ in chosen)
            / device.units,
        }


def one_tile(product: MatrixProduct, rows: int, units: int) -> tuple[float, float]:
    """Unit-time with a tile, and in all, both in units of a tile's time per element of the inner dimension."""
    tiles = -(-rows // 128) * -(-product.columns // 256)
    waves = tiles / busy_units(tiles, units)
    return tiles * product.inner, waves * units * product.inner


# ---------------------------------------------------------------- as text


def show(results: Sequence[Mapping[str, Any]], waves: Sequence[Mapping[str, float]]) -> str:
    lines = [
        "| tokens | idle, paper | one tile for all | tiles as the roofline chooses |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {w['tokens']:,} | {w['paper']:.1%} | {w['one tile']:.1%} | {w['chosen tiles']:.1%} |"
        for w in waves
    ]
    columns = ["paper", "setting", "targets", "its gain"]
    columns += ["auto / chunked 1024", "auto / best chunked", "50:50 of best", "auto of best"]
    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for result in results:
        s = result["setting"]
        per_token = f", or {s['per_token_s'] * 1e3:g} ms a prompt token" if s["per_token_s"] else ""
        cells = [
            times(result["auto over chunked 1024"]),
            f"{times(result['auto over best chunked'])} ({result['best chunked']})",
        ]
        cells += [percent(result["half and half"]), percent(result["auto of best"])]
        where = f"{s['model']}, {s['gpu']}, {s['name']}"
        lines.append(
            f"| {s['paper']} | {where} | {s['slo']}{per_token} | {s['gain']} | {' | '.join(cells)} |"
        )
    lines += ["", "At the rate that chunked 1024 holds:", ""]
    lines += [
        "| setting | mean TTFT ms, chunked → auto | mean TPOT ms | SMs with work |",
        "|---|---|---|---|",
    ]
    for result in results:
        s, (a, b) = result["setting"], result["at the rate of chunked 1024"].values()
        pairs = [f"{a[key]:.0f} → {b[key]:.0f}" for key in ("mean_ttft_ms", "mean_tpot_ms")]
        active = f"{percent(a['active_share'])} → {percent(b['active_share'])}"
        lines.append(
            f"| {s['paper']}: {s['model']}, {s['gpu']}, {s['name']} | {' | '.join(pairs)} | {active} |"
        )
    return "\n".join(lines)


def show_bubbles(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = [
        "paper",
        "setting",
        "GPUs",
        "requests/s a GPU",
        "idle",
        "common rate",
        "within targets",
        "idle",
        "mean TTFT, TPOT ms",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        s, there, same = row["setting"], row["there"], row["at the common rate"]
        cells = [
            s["paper"],
            f"{s['model']}, {s['gpu']}, {s['name']}",
            row["fleet"],
            f"{row['rate']:.2f}",
        ]
        cells += [
            percent(there["idle"] if there else None),
            f"{row['common rate']:.2f}",
            percent(same["slo_attainment"]),
        ]
        cells += [percent(same["idle"]), f"{same['mean_ttft_ms']:.0f}, {same['mean_tpot_ms']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--traces",
        type=Path,
        required=True,
        help="folder with azure_2023_code.csv and azure_2023_conv.csv",
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--part", choices=("all", "goodput", "bubbles"), default="all")
    parser.add_argument(
        "--gpus",
        type=int,
        default=4,
        help="in each fleet whose bubbles are asked, where one holds the model",
    )
    parser.add_argument("--only", type=int, nargs="+", help="settings by number, from 0")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in ("azure_2023_code.csv", "azure_2023_conv.csv"):
        if not (options.traces / name).is_file():
            parser.error(f"--traces {options.traces}: there is no {name} in it")
    try:
        require_writable("--json", options.json)
        simulate_all(options)
    except ValueError as error:
        parser.error(str(error))


def simulate_all(options: argparse.Namespace) -> None:
    waves, results, bubbles = list(wave_rows()), list[dict[str, Any]](), list[dict[str, Any]]()

    def tell(line: str) -> None:
        print(line, flush=True)

    for number, setting in enumerate(SETTINGS):
        if options.only is not None and number not in options.only:
            continue
        if options.part != "bubbles":
            results.append(run(setting, options.traces, options.requests, tell))
        if options.part != "goodput" and setting.model not in TOO_LARGE:
            bubbles += bubble_rows(setting, options.traces, options.requests, options.gpus, tell)
        if options.json is not None:
            found = {"waves": waves, "settings": results, "bubbles": bubbles}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(show(results, waves))
    print(show_bubbles(bubbles))


if __name__ == "__main__":
    main()
