"""The OutputParser for chat formats: separates reasoning, content and calls as text streams in.

Promises: parts, joined, do not depend on how the text is cut; text without regions passes
unchanged; whitespace that only separates regions is dropped. Must not: know tokens, stop strings or
any API.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from counterpoint.serve.output_parsing.chat_formats import CALLS, ChatFormat, field_kind
from counterpoint.serve.output_parsing.marker_splitter import (
    MarkerSplitter,
    RegionClosed,
    RegionOpened,
    RegionText,
    SplitEvent,
)
from counterpoint.serve.output_parsing.output_parser import (
    CallStart,
    ContentDelta,
    OutputPart,
    ReasoningDelta,
)
from counterpoint.serve.output_parsing.tool_call_parser import (
    AllowedTools,
    CallReader,
    ToolCallState,
    make_call_reader,
)

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField


@dataclasses.dataclass(frozen=True, slots=True)
class ParserConfig:
    """What to parse in the choices of one request; calling it makes a parser. `initial_field`: the
    region in which the prompt ends. Without `allowed_tools`, calls are not parsed."""

    chat_format: ChatFormat
    fields: tuple[ResponseTemplateField, ...]
    allowed_tools: AllowedTools | None
    default_kind: str  # of text outside all regions
    initial_field: ResponseTemplateField | None = None

    def __call__(self) -> StreamingParser:
        return StreamingParser(self)


def make_parser_config(
    chat_format: ChatFormat,
    allowed_tools: AllowedTools | None,
    separate_reasoning: bool,
    answer_prefix: str,
) -> ParserConfig | None:
    """`answer_prefix`: what the prompt holds of the answer already. None if there is nothing to
    parse."""
    template = chat_format.template
    wanted = {
        "content": True,
        "reasoning": separate_reasoning,
        "call": allowed_tools is not None,
        "": chat_format.from_tokenizer,
    }
    fields = tuple(
        field
        for name, field in template.fields.items()
        if wanted[field_kind(name)] and field.open_re is not None
    )
    if not fields:
        return None
    splitter = MarkerSplitter([field for field in fields if field.name != CALLS])
    for _ in splitter.feed(answer_prefix):
        pass
    default_kind = field_kind(template.implicit) if template.implicit is not None else ""
    return ParserConfig(chat_format, fields, allowed_tools, default_kind, splitter.region)


class WhitespaceFilter:
    """Holds back trailing whitespace of a growing text; drops leading one if `strip_leading`."""

    def __init__(self) -> None:
        self.strip_leading = False
        self.held = ""

    def feed(self, text: str) -> str:
        if self.strip_leading:
            text = text.lstrip()
            self.strip_leading = not text
        text = self.held + text
        out = text.rstrip()
        self.held = text[len(out) :]
        return out


class StreamingParser:
    def __init__(self, config: ParserConfig) -> None:
        self.config = config
        self._splitter = MarkerSplitter(config.fields, config.initial_field)
        self._call_state = ToolCallState(config.allowed_tools or AllowedTools(()))
        self._call_reader: CallReader | None = None
        self._content_whitespace = WhitespaceFilter()
        self._reasoning_whitespace = WhitespaceFilter()
        self._kind = config.default_kind
        self._after_region = False  # since the last content
        self._no_content_yet = True
        if config.initial_field is not None:
            self._enter_region(config.initial_field)

    @property
    def num_held(self) -> int:
        return self._splitter.num_held

    @property
    def in_reasoning(self) -> bool:
        return self._kind == "reasoning"

    @property
    def done(self) -> bool:
        return self._call_state.done

    def feed(self, text: str) -> list[OutputPart]:
        return self._process(self._splitter.feed(text)) if text else []

    def end(self, complete: bool) -> list[OutputPart]:
        parts = self._process(self._splitter.end())
        if self._call_reader is not None and not self.done:
            self._emit(self._call_reader.end("", complete), parts)
        if self._content_whitespace.held and not self._after_region:
            parts.append(ContentDelta(self._content_whitespace.held))
        return parts

    def _process(self, events: Iterable[SplitEvent]) -> list[OutputPart]:
        parts: list[OutputPart] = []
        for event in events:
            if self.done:
                continue
            match event:
                case RegionOpened():
                    self._open_region(event, parts)
                case RegionText(text):
                    self._add_text(text, parts)
                case RegionClosed(mark):
                    self._close_region(mark, parts)
        return parts

    def _open_region(self, opened: RegionOpened, parts: list[OutputPart]) -> None:
        field = opened.field
        if field.name == CALLS:
            spec = self.config.chat_format.spec["fields"][CALLS]
            self._kind = "call"
            self._call_reader = make_call_reader(self._call_state, field, spec, opened)
            self._emit(self._call_reader.feed(""), parts)
        else:
            self._enter_region(field)

    def _enter_region(self, field: ResponseTemplateField) -> None:
        self._kind = field_kind(field.name)
        if self.in_reasoning:
            self._reasoning_whitespace.strip_leading = not self._reasoning_whitespace.held
            self._leave_content()

    def _leave_content(self) -> None:
        """Whitespace from here on lies between a region and what follows it."""
        self._after_region = True
        self._content_whitespace.strip_leading = self._no_content_yet

    def _add_text(self, text: str, parts: list[OutputPart]) -> None:
        if self._call_reader is not None:
            self._emit(self._call_reader.feed(text), parts)
        elif self.in_reasoning:
            if out := self._reasoning_whitespace.feed(text):
                parts.append(ReasoningDelta(out))
        elif self._kind == "content":
            self._emit([ContentDelta(text)], parts)

    def _close_region(self, mark: str, parts: list[OutputPart]) -> None:
        if self._call_reader is not None:
            reader, self._call_reader = self._call_reader, None
            self._emit(reader.end(mark, complete=True), parts)
        self._kind = self.config.default_kind

    def _emit(self, parts: Iterable[OutputPart], out_parts: list[OutputPart]) -> None:
        for part in parts:
            if isinstance(part, CallStart):
                self._leave_content()
            if isinstance(part, ContentDelta):
                if out := self._content_whitespace.feed(part.text):
                    out_parts.append(ContentDelta(out))
                    self._after_region = self._no_content_yet = False
            else:
                out_parts.append(part)
