"""Listener: the Voice that tells a choice's reasoning, content and calls apart.

Owns: what becomes of each region of the text, and of the blanks between them. Promises: parts, joined, are the same however the
text arrives; text without any region comes out to the letter; blanks that only set regions apart are dropped.
Must not: know tokens, stop strings or any API.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from counterpoint.serve.output_parsing.chat_formats import CALLS, ChatFormat, kind_of
from counterpoint.serve.output_parsing.marker_splitter import Body, Closed, Event, Opened, Splitter
from counterpoint.serve.output_parsing.output_parser import (
    CallStart,
    ContentDelta,
    OutputPart,
    ReasoningDelta,
)
from counterpoint.serve.output_parsing.tool_call_parser import (
    AllowedTools,
    CallReader,
    ToolCallParser,
    reader_of,
)

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField


@dataclasses.dataclass(frozen=True, slots=True)
class ParserConfig:
    """What is listened for in the answers to one request, and the Voice of each. `inside`: the prompt ends within this region.
    No `offer`: no calls are."""

    dialect: ChatFormat
    fields: tuple[ResponseTemplateField, ...]
    offer: AllowedTools | None
    implicit: str  # the kind of text that is in no region
    inside: ResponseTemplateField | None = None

    def __call__(self) -> StreamingParser:
        return StreamingParser(self)


def make_parser_config(
    dialect: ChatFormat, offer: AllowedTools | None, reasoning: bool, begun: str
) -> ParserConfig | None:
    """`reasoning`: it is told apart. `begun`: what the prompt has of the answer already. None if there is nothing to listen for."""
    template = dialect.template
    wanted = {"content": True, "reasoning": reasoning, "call": offer is not None, "": dialect.own}
    fields = tuple(
        field
        for name, field in template.fields.items()
        if wanted[kind_of(name)] and field.open_re is not None
    )
    if not fields:
        return None
    splitter = Splitter([field for field in fields if field.name != CALLS])
    for _ in splitter.feed(begun):
        pass
    implicit = kind_of(template.implicit) if template.implicit is not None else ""
    return ParserConfig(dialect, fields, offer, implicit, splitter.inside)


class Blanks:
    """Holds back the blanks at the end of a text that grows by parts, and drops those at its beginning if `fresh`."""

    def __init__(self) -> None:
        self.fresh = False
        self.held = ""

    def feed(self, text: str) -> str:
        if self.fresh:
            text = text.lstrip()
            self.fresh = not text
        text = self.held + text
        out = text.rstrip()
        self.held = text[len(out) :]
        return out


class StreamingParser:
    def __init__(self, hearing: ParserConfig) -> None:
        self.hearing = hearing
        self._splitter = Splitter(hearing.fields, hearing.inside)
        self._calls = ToolCallParser(hearing.offer or AllowedTools(()))
        self._reader: CallReader | None = None
        self._content = Blanks()
        self._thought = Blanks()
        self._kind = hearing.implicit
        self._after_region = False  # there was one behind the last content
        self._silent = True  # no content yet
        if hearing.inside is not None:
            self._enter(hearing.inside)

    @property
    def held(self) -> int:
        return self._splitter.held

    @property
    def reasoning(self) -> bool:
        return self._kind == "reasoning"

    @property
    def over(self) -> bool:
        return self._calls.over

    def feed(self, text: str) -> list[OutputPart]:
        return self._hear(self._splitter.feed(text)) if text else []

    def end(self, whole: bool) -> list[OutputPart]:
        said = self._hear(self._splitter.end())
        if self._reader is not None and not self.over:
            self._tell(self._reader.end("", whole), said)
        if self._content.held and not self._after_region:
            said.append(ContentDelta(self._content.held))
        return said

    def _hear(self, events: Iterable[Event]) -> list[OutputPart]:
        said: list[OutputPart] = []
        for event in events:
            if self.over:
                continue
            match event:
                case Opened():
                    self._open(event, said)
                case Body(text):
                    self._body(text, said)
                case Closed(mark):
                    self._close(mark, said)
        return said

    def _open(self, opened: Opened, said: list[OutputPart]) -> None:
        field = opened.field
        if field.name == CALLS:
            spec = self.hearing.dialect.spec["fields"][CALLS]
            self._kind, self._reader = (
                "call",
                reader_of(self._calls, field, spec, opened.mark, opened.names),
            )
            self._tell(self._reader.feed(""), said)
        else:
            self._enter(field)

    def _enter(self, field: ResponseTemplateField) -> None:
        self._kind = kind_of(field.name)
        if self.reasoning:
            self._thought.fresh = not self._thought.held
            self._leave_content()

    def _leave_content(self) -> None:
        """Blanks from here on are between a region and what follows it."""
        self._after_region = True
        self._content.fresh = self._silent

    def _body(self, text: str, said: list[OutputPart]) -> None:
        if self._reader is not None:
            self._tell(self._reader.feed(text), said)
        elif self.reasoning:
            if out := self._thought.feed(text):
                said.append(ReasoningDelta(out))
        elif self._kind == "content":
            self._tell([ContentDelta(text)], said)

    def _close(self, mark: str, said: list[OutputPart]) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            self._tell(reader.end(mark, whole=True), said)
        self._kind = self.hearing.implicit

    def _tell(self, parts: Iterable[OutputPart], said: list[OutputPart]) -> None:
        for part in parts:
            if isinstance(part, CallStart):
                self._leave_content()
            if isinstance(part, ContentDelta):
                if out := self._content.feed(part.text):
                    said.append(ContentDelta(out))
                    self._after_region = self._silent = False
            else:
                said.append(part)
