"""The formats of trace files: rows into queries, and queries into our own format.

A bad row is a TraceError with file, line and field. Rows that are left out and lengths that are
estimated are in the trace's notes. Must not: choose which rows are sent or when.

    azure     CSV    TIMESTAMP, ContextTokens, GeneratedTokens
                     (Azure LLM inference traces 2023, 2024)
    burstgpt  CSV    Timestamp (s), Request tokens, Response tokens
    lengths   CSV    num_prefill_tokens, num_decode_tokens
                     (Vidur's processed traces; no times)
    mooncake  JSONL  timestamp (ms), input_length, output_length, hash_ids
                     (Mooncake, FAST'25; blocks of 512 tokens)
    sharegpt  JSON   a list of {conversations: [{from, value}, ...]}
                     (no times; the first question and its answer)
    queries   JSONL  arrival_s, prompt_tokens, output_tokens, prefix_ids, ...
                     (ours: `write_queries`)
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Annotated, Literal, TextIO, TypeVar

import msgspec

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
    """A trace can't be read; the message has file, line and field."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Queries in order of arrival. `timed`: the file has arrival times; otherwise all are 0.
    `notes`: what was changed, in words."""

    queries: tuple[Query, ...]
    timed: bool
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------- CSV


def parse_time_s(text: str) -> float:
    """Seconds of a date and time in ISO 8601 or Azure's form (seven digits of a second)."""
    return datetime.fromisoformat(text).timestamp()


@dataclasses.dataclass(frozen=True, slots=True)
class TraceColumns:
    """The column names of a CSV. `seconds` parses a cell of `time`."""

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


def read_csv(path: str, file: TextIO, table: TraceColumns) -> Trace:
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
    """Queries from (time, prompt, output, blocks) rows, with times from the first row's. Rows with
    an empty prompt or answer are left out."""
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


def read_mooncake(path: str, file: TextIO) -> Trace:
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
    """Puts the field first in msgspec's message: "Expected `int`, got `str` - at `$.a`" becomes
    "field a: Expected ..."."""
    text, at, place = message.partition(" - at `$.")
    return f"field {place.rstrip('`')}: {text}" if at else message


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn]
    id: str | int = ""


def read_sharegpt(path: str, file: TextIO, tokenize: Tokenize | None) -> Trace:
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
            f"{len(items) - len(queries)} of {len(items)} conversations have no question with an "
            "answer and are left out"
        )
    if not tokenize:
        notes.append(
            "token counts of texts are estimated at 4 bytes a token (give --tokenizer for exact "
            "ones)"
        )
    return Trace(tuple(queries), False, tuple(notes))


def estimate_tokens(text: str) -> int:
    """Estimated tokens of `text`: four bytes each."""
    return max(1, round(len(text.encode()) / 4))


# ---------------------------------------------------------------- our own


class _QueryRow(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Give one of `text`, `ids` and `messages`; or none, and `prompt_tokens` for a synthetic
    prompt."""

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


def read_queries(path: str, file: TextIO) -> Trace:
    queries, timed = [], 0
    for where, row in _read_json_lines(path, file, _QueryRow):
        given = [
            name
            for name, value in (("text", row.text), ("ids", row.ids), ("messages", row.messages))
            if value
        ]
        if len(given) > 1 or not (given or row.prompt_tokens):
            raise TraceError(
                f"{where}: give one of the fields text, ids, messages and prompt_tokens (has "
                f"{', '.join(given) or 'none'})"
            )
        try:
            queries.append(row.query(len(queries)))
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from None
        timed += row.arrival_s is not None
    if timed not in (0, len(queries)):
        raise TraceError(
            f"{path}: {timed} of {len(queries)} rows have the field arrival_s: give it in all of "
            "them or in none"
        )
    return Trace(tuple(sorted(queries, key=lambda q: q.arrival_s)), bool(timed))


def write_queries(path: str, queries: Iterable[Query]) -> None:
    """Write a load as our own JSONL. Reading it gives the same queries, renumbered."""
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
