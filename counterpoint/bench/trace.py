"""Reads a trace file: finds its format, and spreads the arrivals of a coarse clock.

Whatever is changed is in the trace's notes. Must not: choose which rows are sent or when
(transform.py does), or tokenise by itself.
"""

from __future__ import annotations

import dataclasses
from typing import TextIO

import numpy as np
from numpy.typing import ArrayLike

from counterpoint.bench.trace_formats import (
    CSV_FORMATS,
    Format,
    Tokenize,
    Trace,
    TraceError,
    read_csv,
    read_mooncake,
    read_queries,
    read_sharegpt,
)


def read_trace(
    path: str,
    format: Format | None = None,
    *,
    tokenize: Tokenize | None = None,
    jitter_s: float | None = None,
    seed: int = 0,
) -> Trace:
    """Read the trace at `path`. `format` None: detect it.

    `tokenize` turns ShareGPT's texts into ids; without it, lengths are estimated at four bytes a
    token. `jitter_s` spreads equal times of a coarse clock over so many seconds; None: over one
    tick of that clock, if the trace has one; 0: never. Raises TraceError.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            format = format or detect_format(path, file)
            if format == "mooncake":
                trace = read_mooncake(path, file)
            elif format == "sharegpt":
                trace = read_sharegpt(path, file, tokenize)
            elif format == "queries":
                trace = read_queries(path, file)
            else:
                trace = read_csv(path, file, CSV_FORMATS[format])
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text (byte {error.start})") from None
    if not trace.queries:
        raise TraceError(f"{path}: no requests in it (read as {format})")
    return _spread_ticks(trace, jitter_s, seed) if trace.timed else trace


def detect_format(path: str, file: TextIO) -> Format:
    """The format, from the file's first line. Rewinds the file."""
    first = next((line.strip() for line in file if line.strip()), "")
    file.seek(0)
    if first.startswith("["):
        return "sharegpt"
    if first.startswith("{"):
        return "mooncake" if '"input_length"' in first else "queries"
    columns = {name.strip() for name in first.split(",")}
    for name, table in CSV_FORMATS.items():
        if columns >= {table.prompt, table.output} and (
            table.time is None or table.time in columns
        ):
            return name
    known = "; ".join(f"{name}: {', '.join(t.columns)}" for name, t in CSV_FORMATS.items())
    raise TraceError(
        f"{path}:1: neither JSON nor a CSV header known here ({known}); give the format with "
        "--trace-format"
    )


def clock_tick_s(times_s: ArrayLike) -> float | None:
    """The tick of a coarse clock: a second or more, and 99 % of the times within 5 ms of a
    multiple. None if the clock is fine."""
    distinct = np.unique(np.asarray(times_s))
    if len(distinct) < 3:
        return None
    tick_s = round(float(np.median(np.diff(distinct))), 2)
    if tick_s < 1:
        return None
    off = np.abs(distinct - np.rint(distinct / tick_s) * tick_s)
    return tick_s if (off <= 0.005).mean() >= 0.99 else None


def _spread_ticks(trace: Trace, jitter_s: float | None, seed: int) -> Trace:
    """Spread the arrivals of one tick over `jitter_s` at random; rows keep their order."""
    times = np.array([q.arrival_s for q in trace.queries])
    tick_s = clock_tick_s(times)
    jitter_s = tick_s if jitter_s is None else jitter_s
    if not jitter_s:
        notes = (
            (f"times are in ticks of {tick_s:g} s: requests of one tick arrive as a burst",)
            if tick_s
            else ()
        )
        return dataclasses.replace(trace, notes=trace.notes + notes)
    if tick_s:
        times = np.rint(times / tick_s) * tick_s
    times = np.sort(times + np.random.default_rng(seed).uniform(0, jitter_s, len(times)))
    note = f"arrivals are spread at random over {jitter_s:g} s" + (
        f" (the trace's clock ticks every {tick_s:g} s)" if tick_s else ""
    )
    queries = tuple(
        dataclasses.replace(q, arrival_s=float(t - times[0]))
        for q, t in zip(trace.queries, times, strict=True)
    )
    return Trace(queries, True, (*trace.notes, note))
