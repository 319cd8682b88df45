"""How well a calibration predicts steps that were not fitted.

Owns: relative errors by kind of step, and the report that `calibrate` writes and shows. It lists
every held-out step. Must not: choose or measure a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table as Sheet

from counterpoint.cost_model.calibration import Calibration, CalibrationPoint
from counterpoint.cost_model.fitted import Fitted
from counterpoint.cost_model.roofline import Roofline
from counterpoint.interfaces import Estimator


def kind_of(point: CalibrationPoint) -> str:
    return f"{point.work.kind}{' beside the other' if point.co_running else ''}"


def errors(estimator: Estimator, points: Sequence[CalibrationPoint]) -> dict[str, dict[str, float]]:
    found: dict[str, list[float]] = {}
    for point in points:
        off = abs(estimator.seconds(point.work, point.units, point.co_running) / point.seconds - 1)
        for kind in (kind_of(point), "all, beside the other" if point.co_running else "all, alone"):
            found.setdefault(kind, []).append(off)
    return {kind: {"points": len(offs), **quantiles(offs)} for kind, offs in sorted(found.items())}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for name, share in at.items()
    }


def report(table: Calibration, prior: Roofline) -> dict[str, Any]:
    """The report as JSON values: errors of the fit and of the bare roofline, by kind, on held-out
    steps."""
    held_out = [p for p in table.points if p.held_out]
    # Held-out steps were measured in short runs: without the sustained slowdown.
    fitted = Fitted(msgspec.structs.replace(table, on_and_on={}), prior)
    return {
        "key": msgspec.to_builtins(table.key),
        "about": table.about,
        "points": {"fitted": len(table.points) - len(held_out), "held_out": len(held_out)},
        "on_and_on": table.on_and_on,
        "held_out": {"fitted": errors(fitted, held_out), "roofline": errors(prior, held_out)},
        "rows": [
            {
                "kind": kind_of(p),
                "units": p.units,
                "work": msgspec.to_builtins(p.work),
                "beside": msgspec.to_builtins(p.co_running),
                "ms": 1e3 * p.seconds,
                "host_ms": 1e3 * p.host_s,
                "steps": p.steps,
                "start_ms": 1e3 * p.start_s,
                "fitted_ms": 1e3 * fitted.seconds(p.work, p.units, p.co_running),
                "roofline_ms": 1e3 * prior.seconds(p.work, p.units, p.co_running),
            }
            for p in held_out
        ],
    }


def show(console: Console, result: dict[str, Any]) -> None:
    sheet = Sheet(
        "held-out steps", "points", "error p50", "p95", "max", "roofline p50", "p95", box=None
    )
    bare = result["held_out"]["roofline"]
    for kind, off in result["held_out"]["fitted"].items():
        values = [f"{off[name]:.1%}" for name in ("p50", "p95", "max")]
        sheet.add_row(
            kind,
            str(off["points"]),
            *values,
            f"{bare[kind]['p50']:.1%}",
            f"{bare[kind]['p95']:.1%}",
        )
    console.print(sheet)
    for kind, factor in result["on_and_on"].items():
        console.print(f"{kind}: {factor:.3f} times as long where steps run on and on")
