"""The parts of a model's output: reasoning, content, tool calls; and the interface of a parser.

Promises: parts in order, joined, are the whole output, so streamed and whole responses are equal.
Must not: know how a model or an API spells any of it.

An OutputPiece has a tuple of parts, maybe empty. Text comes as `ReasoningDelta` or `ContentDelta`,
to be appended to earlier text of its kind. A call is one `CallStart`, then any number of
`CallArguments` with its index, which joined are the JSON text of its arguments. Calls are numbered
from 0 within a choice and never overlap: a block (a run of reasoning, a run of content, a call)
lasts until a part of another block or the piece with `finish_reason`. No text is empty. Arguments
are as the model wrote them: JSON unless the output was cut short or the model erred. The finish
reason is "stop" after calls too; APIs with another word look at `num_calls`.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


OutputPart = ReasoningDelta | ContentDelta | CallStart | CallArguments


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The whole output of a choice."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class OutputParser(Protocol):
    """Parses one choice. `num_held`: characters held back until more is known. `in_reasoning`: the
    text is reasoning now. `done`: nothing that follows is wanted."""

    @property
    def num_held(self) -> int: ...

    @property
    def in_reasoning(self) -> bool: ...

    @property
    def done(self) -> bool: ...

    def feed(self, text: str) -> list[OutputPart]: ...

    def end(self, complete: bool) -> list[OutputPart]:
        """Releases what is held back at the end. `complete`: the model ended by itself."""
        ...


class PlainParser:
    """All text is content."""

    num_held = 0
    in_reasoning = done = False

    def feed(self, text: str) -> list[OutputPart]:
        return [ContentDelta(text)] if text else []

    def end(self, complete: bool) -> list[OutputPart]:
        return []


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def merge_parts(parts: Iterable[OutputPart]) -> ParsedOutput:
    """The whole output in `parts`."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[CallStart] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case CallStart():
                calls.append(part)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    whole = (
        Call(call.id, call.name, "".join(texts))
        for call, texts in zip(calls, arguments, strict=True)
    )
    return ParsedOutput("".join(content), "".join(reasoning), tuple(whole))


def join_parts(parts: Iterable[OutputPart]) -> tuple[OutputPart, ...]:
    """The same with adjacent deltas joined."""
    out: list[OutputPart] = []
    for part in parts:
        match out[-1] if out else None, part:
            case ContentDelta(before), ContentDelta(text):
                out[-1] = ContentDelta(before + text)
            case ReasoningDelta(before), ReasoningDelta(text):
                out[-1] = ReasoningDelta(before + text)
            case CallArguments(index, before), CallArguments(_, text):
                out[-1] = CallArguments(index, before + text)
            case _:
                out.append(part)
    return tuple(out)
