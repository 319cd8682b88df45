"""The results of a comparison: the cases, the file that holds their figures, and the tables.

Owns: what `compare` writes and shows. Promises: a result is on disk as soon as it exists.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from counterpoint import __version__
from counterpoint.bench.tables import format_number, format_share
from counterpoint.bench.workload import Query, describe_load
from counterpoint.simulator.modes import Mode

Place = Literal["engine", "simulator"]
PLACES: tuple[Place, ...] = ("engine", "simulator")
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
    """A load at a rate, under a mode."""

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
    def file_stem(self) -> str:
        at = "" if self.rate is None else f"_{self.rate:g}"
        return re.sub(r"[^\w.-]+", "_", f"{self.load}_{self.mode.name}{at}")


class SavedResults(msgspec.Struct):
    """The file's content."""

    about: dict[str, Any]
    rows: list[dict[str, Any]]


class ComparisonResults:
    """The file of results: a row per case and place. `about`: each place's settings. Raises
    ValueError if the file has runs of a place under other settings."""

    def __init__(self, path: Path | None, about: Mapping[Place, Mapping[str, Any]]) -> None:
        self.path = path
        self.about: dict[str, Any] = {"counterpoint": __version__, **msgspec.to_builtins(about)}
        self.rows: list[dict[str, Any]] = []
        if path is None or not path.is_file():
            return
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=SavedResults)
        except msgspec.DecodeError as error:
            raise ValueError(
                f"--json {path}: no file of results of this command ({error}); choose another"
            ) from None
        for place in about:
            changed = changed_settings(saved.about.get(place, {}), self.about[place])
            if changed:
                raise ValueError(
                    f"--json {path}: its runs on the {place} were made with {changed}; "
                    "choose another file"
                )
        self.rows, self.about = saved.rows, saved.about | self.about

    def has(self, case: ComparisonCase, place: Place) -> bool:
        return any(row["cell"] == case.name and row["place"] == place for row in self.rows)

    def add(self, case: ComparisonCase, place: Place, result: Mapping[str, Any]) -> None:
        about = {
            "cell": case.name,
            "place": place,
            "load": case.load,
            "mode": case.mode.name,
            "rate": case.rate,
            "slo": case.slo,
        }
        self.rows.append({**about, "workload": describe_load(case.queries), **result})
        if self.path is not None:
            content = msgspec.json.encode({"about": self.about, "rows": self.rows})
            part = self.path.with_name(self.path.name + ".part")
            part.write_bytes(msgspec.json.format(content, indent=1) + b"\n")
            part.replace(self.path)


def changed_settings(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Which settings differ, with both values."""
    return ", ".join(
        f"{name} {was} (now {asked.get(name)})"
        for name, was in saved.items()
        if asked.get(name) != was
    )


def show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table per load with a line per run. Where both places ran a case, a third line has the
    simulator's figures over the engine's."""
    for load, slo in dict.fromkeys((row["load"], row["slo"]) for row in rows):
        table = Table(
            title=f"{load}: {slo or 'no targets'}",
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for name in ("mode", "at", "", "within", *FIGURES):
            side = "left" if name in ("mode", "") else "right"
            table.add_column(name, justify=side, no_wrap=True)
        here = [row for row in rows if (row["load"], row["slo"]) == (load, slo)]
        for case in dict.fromkeys(row["cell"] for row in here):
            found = {row["place"]: row for row in here if row["cell"] == case}
            for place, row in found.items():
                attainment = row["slo_attainment"]
                cells = [row["mode"], format_number(row["rate"], 2), place]
                cells.append("-" if attainment is None else format_share(attainment))
                table.add_row(*cells, *map(format_number, figures(row)))
            if len(found) == len(PLACES):
                over = ratios(found["simulator"], found["engine"])
                table.add_row("", "", "ratio", "", *(format_number(ratio, 2) for ratio in over))
        console.print(table)


def figures(row: Mapping[str, Any]) -> list[float | None]:
    return [row[key] for key in FIGURES.values()]


def ratios(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[float | None]:
    return [
        a / b if a is not None and b else None
        for a, b in zip(figures(one), figures(other), strict=True)
    ]
