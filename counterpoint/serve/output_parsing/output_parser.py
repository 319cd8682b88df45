"""Speech: what a model says, told apart: what it thinks, what it tells the user, which tools it calls. For any API.

Owns: the parts of an answer as plain structs, and how they are put together again. Promises: parts in the order in which they were
said, joined, are the whole answer, so a stream and a whole answer are equal. Must not: know how a model spells any of it
(splitter.py), or how an API does.

How they stream. A `Piece` has a tuple of parts, maybe empty. Text comes as `ReasoningDelta` or `ContentDelta`, each to be put behind what
came before of its kind. A call comes as one `CallStart`, then any number of `CallArguments` with its index, which joined are the
JSON text of its arguments. Calls are numbered from 0 within a choice and never overlap: a block (a run of reasoning, a run of
content, a call) goes on until a part of another block comes, or the piece with `finish`. No text is empty.
Arguments are as the model wrote them: JSON if the answer was not cut short and the model did not err. The answer's `finish` is
"stop" beside calls too; an API that has another word for it looks at `Answer.calls`.
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
    """All that a choice said."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class OutputParser(Protocol):
    """Tells apart what one choice says. `held`: characters that are kept back, as more must be known. `reasoning`: it is thinking.
    `over`: nothing that follows is wanted."""

    @property
    def num_held(self) -> int: ...

    @property
    def in_reasoning(self) -> bool: ...

    @property
    def done(self) -> bool: ...

    def feed(self, text: str) -> list[OutputPart]: ...

    def end(self, complete: bool) -> list[OutputPart]:
        """What was kept back, when no more comes; `whole`: the model ended by itself."""
        ...


class PlainParser:
    """All of it is content."""

    num_held = 0
    in_reasoning = done = False

    def feed(self, text: str) -> list[OutputPart]:
        return [ContentDelta(text)] if text else []

    def end(self, complete: bool) -> list[OutputPart]:
        return []


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def merge_parts(parts: Iterable[OutputPart]) -> ParsedOutput:
    """The whole of what was said in `parts`."""
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
    """The same in as few parts as can be."""
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
