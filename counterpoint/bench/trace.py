"""Traces: files of requests, read into queries.

Owns: the formats, finding out which one a file has, and what a format's times mean.
Promises: a bad row is a TraceError that names file, line and field; whatever is changed on the way (rows left out, times jittered,
lengths estimated) is said in the trace's notes.
Must not: choose which rows are sent or when (bench/transform.py), tokenise by itself.

    azure     CSV    TIMESTAMP, ContextTokens, GeneratedTokens                      (Azure LLM inference traces 2023, 2024)
    burstgpt  CSV    Timestamp (s), Request tokens, Response tokens                 (BurstGPT)
    lengths   CSV    num_prefill_tokens, num_decode_tokens                          (Vidur's processed traces; no times)
    mooncake  JSONL  timestamp (ms), input_length, output_length, hash_ids          (Mooncake, FAST'25; blocks of 512 tokens)
    sharegpt  JSON   a list of {conversations: [{from, value}, ...]}                (no times; the first question and its answer)
    queries   JSONL  arrival_s, prompt_tokens, output_tokens, prefix_ids ...        (our own: `write_queries`)
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Annotated, Literal, TextIO, TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from counterpoint.bench.workload import Message, Query
from counterpoint.types import Slo

Format = Literal["azure", "burstgpt", "lengths", "mooncake", "sharegpt", "queries"]
T = TypeVar("T")
Number = TypeVar("Number", int, float)
Tokenize = Callable[[str], Sequence[int]]

MOONCAKE_BLOCK_TOKENS = 512
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
TargetSeconds = Annotated[float, msgspec.Meta(gt=0)]


class TraceError(ValueError):
    """A trace can't be read; the message names file, line and field."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Queries in order of arrival. `timed`: the file has arrival times (else all are 0). `notes`: what was changed, in words."""

    queries: tuple[Query, ...]
    timed: bool
    notes: tuple[str, ...] = ()


def read_trace(
    path: str,
    format: Format | None = None,
    *,
    tokenize: Tokenize | None = None,
    jitter_s: float | None = None,
    seed: int = 0,
) -> Trace:
    """Read the trace at `path`; its format is found out unless given.

    `tokenize` turns ShareGPT's texts into ids; without it, lengths are estimated at four bytes a token. `jitter_s` spreads the
    equal times of a coarse clock over so many seconds; unset: over one tick of that clock, if the trace has one; 0: never.
    Raises TraceError.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            format = format or detect_format(path, file)
            if format == "mooncake":
                trace = _read_mooncake(path, file)
            elif format == "sharegpt":
                trace = _read_sharegpt(path, file, tokenize)
            elif format == "queries":
                trace = _read_queries(path, file)
            else:
                trace = _read_csv(path, file, CSV_FORMATS[format])
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text (byte {error.start})") from None
    if not trace.queries:
        raise TraceError(f"{path}: no requests in it (read as {format})")
    return _spread_ticks(trace, jitter_s, seed) if trace.timed else trace


def detect_format(path: str, file: TextIO) -> Format:
    """The format, from the file's first line; the file stands at its start again afterwards."""
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
        f"{path}:1: neither JSON nor a CSV header known here ({known}); give the format with --trace-format"
    )


# ---------------------------------------------------------------- CSV


def parse_time_s(text: str) -> float:
    """Seconds of a date and time as ISO 8601 or Azure writes it (seven digits of a second)."""
    return datetime.fromisoformat(text).timestamp()


@dataclasses.dataclass(frozen=True, slots=True)
class TraceColumns:
    """Which columns of a CSV mean what. `seconds` reads a cell of `time`."""

    prompt: str
    output: str
    time: str | None = None
    seconds: Callable[[str], float] = float

    @property
    def columns(self) -> list[str]:
        return [name for name in (self.time, self.prompt, self.output) if name]


CSV_FORMATS: dict[Format, TraceColumns] = {
    "azure": TraceColumns("ContextTokens", "GeneratedTokens", "TIMESTAMP", parse_time_s),
    "burstgpt": TraceColumns("Request tokens", "Response tokens", "Timestamp"),
    "lengths": TraceColumns("num_prefill_tokens", "num_decode_tokens"),
}


def _read_csv(path: str, file: TextIO, table: TraceColumns) -> Trace:
    rows = csv.DictReader(file, skipinitialspace=True)
    header = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = header
    for name in table.columns:
        if name not in header:
            raise TraceError(
                f"{path}:1: no column {name!r}; the header has {', '.join(header) or 'nothing'}"
            )
    found = []
    for row in rows:
        where = f"{path}:{rows.line_num}"
        arrival_s = (
            _parse_cell(where, row, table.time, table.seconds, "a time") if table.time else 0.0
        )
        found.append(
            (
                arrival_s,
                _parse_cell(where, row, table.prompt, int, "a whole number"),
                _parse_cell(where, row, table.output, int, "a whole number"),
                (),
            )
        )
    return _build_trace(found, timed=table.time is not None)


def _parse_cell(
    where: str, row: dict[str, str | None], column: str, read: Callable[[str], Number], kind: str
) -> Number:
    text = row[column]
    if text is None:
        raise TraceError(f"{where}: field {column} is missing")
    try:
        value = read(text)
        if not math.isfinite(value):
            raise ValueError
    except ValueError:
        raise TraceError(f"{where}: field {column} is {text!r}: it must be {kind}") from None
    if isinstance(value, int) and value < 0:
        raise TraceError(f"{where}: field {column} is {value}: it must not be negative")
    return value


def _build_trace(
    rows: Iterable[tuple[float, int, int, tuple[int, ...]]], timed: bool, block_tokens: int = 0
) -> Trace:
    """Queries from (time, prompt, output, blocks) rows, timed from the first; those with an empty prompt or answer are left out."""
    rows = list(rows)
    first_s = min((row[0] for row in rows), default=0.0)
    queries = [
        Query(i, time_s - first_s, prompt, output, blocks, block_tokens if blocks else 0)
        for i, (time_s, prompt, output, blocks) in enumerate(rows)
        if prompt > 0 and output > 0
    ]
    empty = len(rows) - len(queries)
    notes = (
        (f"{empty} of {len(rows)} rows have an empty prompt or answer and are left out",)
        if empty
        else ()
    )
    return Trace(tuple(sorted(queries, key=lambda q: q.arrival_s)), timed, notes)


# ---------------------------------------------------------------- JSON


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[BlockId] = []


def _read_mooncake(path: str, file: TextIO) -> Trace:
    rows = []
    for where, row in _read_json_lines(path, file, _MooncakeRow):
        for name, value in (
            ("input_length", row.input_length),
            ("output_length", row.output_length),
        ):
            if value < 0:
                raise TraceError(f"{where}: field {name} is {value}: it must not be negative")
        rows.append((row.timestamp / 1e3, row.input_length, row.output_length, tuple(row.hash_ids)))
    return _build_trace(rows, timed=True, block_tokens=MOONCAKE_BLOCK_TOKENS)


def _read_json_lines(path: str, file: TextIO, row: type[T]) -> Iterator[tuple[str, T]]:
    decoder = msgspec.json.Decoder(row)
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", decoder.decode(line)
        except msgspec.ValidationError as error:
            raise TraceError(f"{path}:{number}: {_name_field(str(error))}") from None
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}:{number}: not JSON: {error}") from None


def _name_field(message: str) -> str:
    """msgspec's message with the field in front: "Expected `int`, got `str` - at `$.a`" becomes "field a: Expected ..."."""
    text, at, place = message.partition(" - at `$.")
    return f"field {place.rstrip('`')}: {text}" if at else message


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn]
    id: str | int = ""


def _read_sharegpt(path: str, file: TextIO, tokenize: Tokenize | None) -> Trace:
    try:
        items = msgspec.json.decode(file.read(), type=list[_Conversation])
    except msgspec.ValidationError as error:
        raise TraceError(f"{path}: {_name_field(str(error).replace('`$[', '`$.['))}") from None
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}: not JSON: {error}") from None
    queries = []
    for number, item in enumerate(items):
        if len(item.conversations) < 2:
            continue
        question, answer = item.conversations[0].value, item.conversations[1].value
        if not question or not answer:
            continue
        prompt = tuple(tokenize(question)) if tokenize else question
        queries.append(
            Query(
                number,
                0.0,
                len(prompt) if tokenize else estimate_tokens(question),
                len(tokenize(answer)) if tokenize else estimate_tokens(answer),
                prompt=prompt,
                session=str(item.id),
            )
        )
    notes = []
    if len(queries) < len(items):
        notes.append(
            f"{len(items) - len(queries)} of {len(items)} conversations have no question with an answer and are left out"
        )
    if not tokenize:
        notes.append(
            "token counts of texts are estimated at 4 bytes a token (give --tokenizer for exact ones)"
        )
    return Trace(tuple(queries), False, tuple(notes))


def estimate_tokens(text: str) -> int:
    """About how many tokens `text` has: four bytes each."""
    return max(1, round(len(text.encode()) / 4))


# ---------------------------------------------------------------- our own


class _QueryRow(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One of `text`, `ids`, `messages`, or none: then `prompt_tokens` is needed, and the tokens are made."""

    output_tokens: int
    prompt_tokens: int = 0
    arrival_s: float | None = None
    prefix_ids: tuple[BlockId, ...] = ()
    block_tokens: int = 0
    text: str = ""
    ids: tuple[TokenId, ...] = ()
    messages: tuple[Message, ...] = ()
    session: str = ""
    ttft_s: TargetSeconds | None = None
    tpot_s: TargetSeconds | None = None
    itl_s: TargetSeconds | None = None

    def query(self, number: int) -> Query:
        length = len(self.ids) or estimate_tokens(
            self.text + "".join(content for _, content in self.messages)
        )
        return Query(
            number=number,
            arrival_s=self.arrival_s or 0.0,
            prompt_tokens=self.prompt_tokens or length,
            output_tokens=self.output_tokens,
            prefix_ids=self.prefix_ids,
            block_tokens=self.block_tokens,
            prompt=self.text or self.ids or self.messages or None,
            session=self.session,
            slo=Slo(self.ttft_s, self.tpot_s, self.itl_s),
        )


def _read_queries(path: str, file: TextIO) -> Trace:
    queries, timed = [], 0
    for where, row in _read_json_lines(path, file, _QueryRow):
        given = [
            name
            for name, value in (("text", row.text), ("ids", row.ids), ("messages", row.messages))
            if value
        ]
        if len(given) > 1 or not (given or row.prompt_tokens):
            raise TraceError(
                f"{where}: give one of the fields text, ids, messages and prompt_tokens (has {', '.join(given) or 'none'})"
            )
        try:
            queries.append(row.query(len(queries)))
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from None
        timed += row.arrival_s is not None
    if timed not in (0, len(queries)):
        raise TraceError(
            f"{path}: {timed} of {len(queries)} rows have the field arrival_s: give it in all of them or in none"
        )
    return Trace(tuple(sorted(queries, key=lambda q: q.arrival_s)), bool(timed))


def write_queries(path: str, queries: Iterable[Query]) -> None:
    """Write a load as our own JSONL; reading it gives the same queries, numbered anew."""
    with open(path, "wb") as file:
        for q in queries:
            row = _QueryRow(
                output_tokens=q.output_tokens,
                prompt_tokens=q.prompt_tokens,
                arrival_s=q.arrival_s,
                prefix_ids=q.prefix_ids,
                block_tokens=q.block_tokens,
                text=q.prompt if isinstance(q.prompt, str) else "",
                ids=q.ids or (),
                messages=q.messages or (),
                session=q.session,
                ttft_s=q.slo.ttft_s,
                tpot_s=q.slo.tpot_s,
                itl_s=q.slo.itl_s,
            )
            file.write(msgspec.json.encode(row) + b"\n")


# ---------------------------------------------------------------- coarse clocks


def clock_tick_s(times_s: ArrayLike) -> float | None:
    """The tick of a coarse clock: a second or more, 99 % of the times within 5 ms of a multiple. None if the clock is fine."""
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
