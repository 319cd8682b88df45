"""The settings of two papers, simulated: `python -m counterpoint.papers --traces FOLDER [--requests N] [--json FILE]`.

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

from counterpoint.bench.load import Load, parse_slo
from counterpoint.config import Config
from counterpoint.machine import Machine
from counterpoint.perf.roofline import Product, Roofline, busy_units
from counterpoint.plan import Found, Mode, Task, find_rate, guessed_rate, play
from counterpoint.spec.device import device_spec
from counterpoint.spec.presets import PRESETS

SHAREGPT = {"prompt_tokens": 161, "output_tokens": 338, "prompt_spread": 1.0, "output_spread": 0.8}  # means: vLLM, SOSP'23, 6.1
CODE, CONVERSATION = {"trace": "azure_2023_code.csv"}, {"trace": "azure_2023_conv.csv"}
CHUNKS = (256, 512, 1024, 2048)
PRECISION = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
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
    Setting("MuxWise", "a100", "llama-2-13b", "ShareGPT-like", SHAREGPT, "ttft=1,tpot=50ms", None, "2.20x mean, 3.06x most"),
    Setting("MuxWise", "a100", "llama-3.1-8b", "ShareGPT-like", SHAREGPT, "ttft=1,tpot=50ms", None, "1.2x (one A100, 8B)"),
    Setting("Bullet", "a100", "llama-3.1-8b", "ShareGPT-like", SHAREGPT, "ttft=0.5,tpot=150ms", 0.003, "1.09x mean, 1.20x most"),
    Setting("Bullet", "a100", "llama-3.1-8b", "Azure code", CODE, "ttft=0.5,tpot=200ms", 0.0015, "1.09x mean, 1.20x most"),
    Setting("Bullet", "8xa100", "llama-3.1-70b", "Azure code", CODE, "ttft=0.5,tpot=200ms", 0.0015, "1.26x mean, 1.55x most"),
    Setting("Bullet", "8xh20", "qwen3-235b-a22b", "Azure conversation", CONVERSATION, "ttft=1.4,tpot=60ms", None, "about 3P1D's"),
    Setting("Bullet", "h100", "llama-3.1-8b", "Azure conversation", CONVERSATION, "ttft=1,tpot=50ms", None, "less than on A100"),
)


# ---------------------------------------------------------------- goodput


def modes_of(machine: Machine) -> list[Mode]:
    """Chunked prefill, fixed splits with half of the device for decode among them, and auto."""
    units, levels = machine.device.units, machine.levels
    splits = sorted({min(levels, key=lambda level: abs(level - units * share)) for share in (0.15, 0.25, 0.35, 0.5)})
    found = [Mode(f"chunked:{n}", {"policy": "chunked", "chunk_tokens": n}) for n in CHUNKS]
    found += [Mode(f"multiplex:{n}", {"policy": "multiplex", "split": n}) for n in splits]
    return [*found, Mode("auto", {"policy": "auto"})]


def run(setting: Setting, traces: Path, requests: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """The goodput of each mode, and chunked 1024 and auto at the rate that chunked 1024 holds."""
    machine = Machine(PRESETS[setting.model], device_spec(setting.gpu))
    flags: dict[str, Any] = {key: str(traces / value) if key == "trace" else value for key, value in setting.load.items()}
    queries = Load(requests=requests, arrivals="poisson", **flags).make().queries
    config = Config().replace(
        **msgspec.structs.asdict(parse_slo(setting.slo)), ttft_per_token_s=setting.per_token_s, max_context_tokens=16384
        if PRESETS[setting.model].max_context_tokens > 16384 else None,
    )  # fmt: skip
    queries = tuple(q for q in queries if q.prompt_tokens + q.output_tokens < min(16384, machine.model.max_context_tokens))
    task = Task(machine, config, queries, precision=PRECISION)
    start, found = None, dict[str, Found]()
    for mode in modes_of(machine):
        if start is None:
            start = step_of(guessed_rate(task))
        one = found[mode.name] = find_rate(task, mode, start)
        start = step_of(one.rate) if one.rate else start
        tell(f"{setting.paper}, {setting.model} on {setting.gpu}, {setting.name}: {mode.name} {one.rate:.2f} requests/s")
    return summary(setting, task, found)


def step_of(rate: float) -> int:
    return round(math.log(rate) / math.log(1 + PRECISION))


def summary(setting: Setting, task: Task, found: Mapping[str, Found]) -> dict[str, Any]:
    units = task.machine.device.units
    chunked = max((one for name, one in found.items() if name.startswith("chunked")), key=lambda one: one.rate)
    splits = {int(name.partition(":")[2]): one.rate for name, one in found.items() if name.startswith("multiplex")}
    half = splits[min(splits, key=lambda split: abs(split - units / 2))]
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


def at_rate(task: Task, name: str, rate: float) -> dict[str, Any]:
    policy, _, value = name.partition(":")
    flags = {"policy": policy} | ({"chunk_tokens": int(value)} if value else {})
    result = play(dataclasses.replace(task, config=task.config.replace(**flags), wanted=0.0), rate)
    assert result is not None
    keys = ("mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "active_share", "slo_attainment")
    return {key: result[key] for key in keys}


def ratio(one: float, other: float) -> float | None:
    return one / other if other else None


# ---------------------------------------------------------------- waves

WAVES = {1024: 0.194, 2048: 0.104, 4096: 0.091, 16384: 0.005}  # Bullet, section 2: idle SMs of a layer, A100, Llama-3.1-8B


def wave_rows() -> Iterator[dict[str, float]]:
    """Idle share of an A100's SMs in the products of a layer: with one tile for all (128 x 256, nothing cut along the inner
    dimension), and with the tiles that the roofline chooses."""
    device = device_spec("a100")
    roofline = Roofline(PRESETS["llama-3.1-8b"], device)
    for tokens, paper in WAVES.items():
        fixed = [one_tile(product, tokens, device.units) for product in roofline.layer_products]
        chosen = [roofline.tiled(product, tokens, device.units) for product in roofline.layer_products]
        yield {
            "tokens": tokens,
            "paper": paper,
            "one tile": 1 - sum(work for work, _ in fixed) / sum(room for _, room in fixed),
            "chosen tiles": 1 - sum(c.seconds * busy for c, busy in chosen) / sum(c.seconds for c, _ in chosen) / device.units,
        }


def one_tile(product: Product, rows: int, units: int) -> tuple[float, float]:
    """Unit-time with a tile, and in all, both in units of a tile's time per element of the inner dimension."""
    tiles = -(-rows // 128) * -(-product.columns // 256)
    waves = tiles / busy_units(tiles, units)
    return tiles * product.inner, waves * units * product.inner


# ---------------------------------------------------------------- as text


def show(results: Sequence[Mapping[str, Any]], waves: Sequence[Mapping[str, float]]) -> str:
    lines = ["| tokens | idle, paper | one tile for all | tiles as the roofline chooses |", "|---|---|---|---|"]
    lines += [f"| {w['tokens']:,} | {w['paper']:.1%} | {w['one tile']:.1%} | {w['chosen tiles']:.1%} |" for w in waves]
    columns = ["paper", "setting", "targets", "its gain"]
    columns += ["auto / chunked 1024", "auto / best chunked", "50:50 of best", "auto of best"]
    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for result in results:
        s = result["setting"]
        per_token = f", or {s['per_token_s'] * 1e3:g} ms a prompt token" if s["per_token_s"] else ""
        cells = [times(result["auto over chunked 1024"]), f"{times(result['auto over best chunked'])} ({result['best chunked']})"]
        cells += [percent(result["half and half"]), percent(result["auto of best"])]
        where = f"{s['model']}, {s['gpu']}, {s['name']}"
        lines.append(f"| {s['paper']} | {where} | {s['slo']}{per_token} | {s['gain']} | {' | '.join(cells)} |")
    lines += ["", "At the rate that chunked 1024 holds:", ""]
    lines += ["| setting | mean TTFT ms, chunked → auto | mean TPOT ms | SMs with work |", "|---|---|---|---|"]
    for result in results:
        s, (a, b) = result["setting"], result["at the rate of chunked 1024"].values()
        pairs = [f"{a[key]:.0f} → {b[key]:.0f}" for key in ("mean_ttft_ms", "mean_tpot_ms")]
        active = f"{percent(a['active_share'])} → {percent(b['active_share'])}"
        lines.append(f"| {s['paper']}: {s['model']}, {s['gpu']}, {s['name']} | {' | '.join(pairs)} | {active} |")
    return "\n".join(lines)


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m counterpoint.papers", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder with azure_2023_code.csv and azure_2023_conv.csv")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    waves = list(wave_rows())
    results: list[dict[str, Any]] = []
    for setting in SETTINGS:
        results.append(run(setting, options.traces, options.requests, lambda line: print(line, flush=True)))
        if options.json is not None:
            options.json.write_text(json.dumps({"waves": waves, "settings": results}, indent=1) + "\n")
    print(show(results, waves))


if __name__ == "__main__":
    main()
