"""Results as text for people, and where their JSON is written.

Owns: which figures of a result are shown, in which words and units. A server, an engine in this
process and a simulation get the same tables. Whatever casts doubt on a result (a late generator,
failures, leaked pages) is shown. Must not: compute a figure (report.py does).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from counterpoint.config import name_file_in_errors

Result = Mapping[str, Any]

LATENCIES = {
    "ttft": "first token (TTFT)",
    "tpot": "per token (TPOT)",
    "itl": "gaps (ITL)",
    "longest_gap": "longest gap",
    "e2el": "whole answer (E2E)",
}
MIN_SPLIT_SHARE = 0.005  # of the time; splits in force for less are only in the JSON
STATISTICS = ("mean", "p50", "p90", "p99", "max")


def write_json(result: Result, path: str | None) -> bool:
    """Writes the whole result to `path`, if given. Returns False for - (standard output), where
    nothing else may be printed."""
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    if path == "-":
        print(text.decode())
    elif path:
        with name_file_in_errors(path):
            Path(path).write_bytes(text + b"\n")
    return path != "-"


def show_result(console: Console, result: Result, title: str = "") -> None:
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("ms", no_wrap=True)
    for point in STATISTICS:
        table.add_column(point, justify="right", no_wrap=True)
    for key, name in LATENCIES.items():
        table.add_row(name, *(format_short(result[f"{point}_{key}_ms"]) for point in STATISTICS))
    console.print(table)
    for line in result_lines(result):
        console.print(line, highlight=False)
    for line in warning_lines(result):
        console.print(line, style="yellow", highlight=False)


def show_comparison(console: Console, results: Mapping[str, Result], title: str = "") -> None:
    columns = [
        "TTFT\np50",
        "TTFT\np99",
        "TPOT\np50",
        "TPOT\np99",
        "gap\np50",
        "gap\nmax",
        "tokens\nper s",
    ]
    targets = any(r["slo_attainment"] is not None for r in results.values())
    columns += ["in\ntarget", "good\nper s"] if targets else []
    table = Table(
        title=title or None,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in results.items():
        cells = [
            ("p50", "ttft"),
            ("p99", "ttft"),
            ("p50", "tpot"),
            ("p99", "tpot"),
            ("p50", "longest_gap"),
            ("max", "longest_gap"),
        ]
        row = [format_short(result[f"{point}_{key}_ms"]) for point, key in cells]
        row.append(format_short(result["output_throughput"]))
        if targets:
            row += [
                format_share(result["slo_attainment"]),
                format_number(result["request_goodput"], 2),
            ]
        table.add_row(name, *row)
    console.print(table)
    console.print(
        "times in ms; gap: the longest of each request; tokens of output",
        style="dim",
        highlight=False,
    )
    for name, result in results.items():
        for line in warning_lines(result):
            console.print(f"{name}: {line}", style="yellow", highlight=False)


def result_lines(result: Result) -> list[str]:
    lines = [
        f"{result['completed']} of {result['num_prompts']} requests answered in "
        f"{format_number(result['duration'], 2)} s: "
        f"{format_number(result['request_throughput'], 2)} requests/s, "
        f"{format_number(result['output_throughput'])} output tokens/s, "
        f"{format_number(result['total_token_throughput'])} tokens/s; "
        f"at most {result['max_concurrent_requests']} at once"
    ]
    if result["slo_attainment"] is not None:
        low, high = result["slo_attainment_ci95"] or (None, None)
        lines.append(
            f"within all targets: {format_share(result['slo_attainment'])} "
            f"(95 % interval {format_share(low)} to {format_share(high)}), "
            f"goodput {format_number(result['request_goodput'], 2)} requests/s"
        )
    if result["prefix_hit_share"]:
        lines.append(
            f"prompt tokens from the prefix cache: {format_share(result['prefix_hit_share'])}"
        )
    if result["preemptions"]:
        lines.append(f"preemptions: {result['preemptions']}")
    if result.get("pages_free_after") is not None:
        lines.append(
            f"KV pages free at rest: {result['pages_free_before']:,} before, "
            f"{result['pages_free_after']:,} after"
        )
    for split in result.get("split_share", ()):
        if split["share"] < MIN_SPLIT_SHARE:
            continue
        units = f"prefill on {split['prefill_units']} units, decode on {split['decode_units']}"
        lines.append(f"{units}: {format_share(split['share'])} of the busy time")
    return lines + engine_lines(result)


def engine_lines(result: Result) -> list[str]:
    lines = []
    lanes: dict[str, list[str]] = {}
    for part in sorted(result.get("lane_share", ()), key=lambda part: -part["share"]):
        lanes.setdefault(part["lane"], []).append(f"{part['state']} {format_share(part['share'])}")
    lines += [f"{lane} lane: {', '.join(parts)}" for lane, parts in lanes.items()]
    if result.get("active_share") is not None:
        lines.append(f"units with work while anything ran: {format_share(result['active_share'])}")
    for kind, error in result.get("prediction_error", {}).items():
        lines.append(
            f"{kind} steps predicted within {format_share(error['p50'])} (p50), "
            f"{format_share(error['p95'])} (p95)"
        )
    for name in ("decisions", "fallbacks"):
        if result.get(name):
            lines.append(
                f"{name}: {', '.join(f'{key} {count:,}' for key, count in result[name].items())}"
            )
    return lines


def warning_lines(result: Result) -> list[str]:
    lines = []
    if result["failed"]:
        lines.append(f"{result['failed']} requests failed and count as misses")
        lines += [
            f"  {count} x {message}" for message, count in result.get("error_counts", {}).items()
        ]
    if result.get("degraded"):
        lines.append(
            "the load generator itself was late (p99 "
            f"{format_number(result['p99_send_lag_ms'])} ms): the load was not the one asked for; "
            "use a faster machine or a lower rate"
        )
    if result.get("pages_leaked"):
        lines.append(f"{result['pages_leaked']} pages of the KV cache did not come back")
    return lines + list(result.get("notes", ()))


def format_number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def format_short(value: float | None) -> str:
    """At least three digits: one decimal place below 100, none above."""
    return format_number(value, 1 if value is not None and value < 100 else 0)


def format_share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
