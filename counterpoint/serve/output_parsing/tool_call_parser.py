"""Parses tool calls from the text of a call's region.

JSON is parsed as it streams; other forms by `transformers` once the region is complete. Promises:
the calls do not depend on how the text is cut; every call is of an allowed tool; JSON arguments
stream as they come. Text that is no call returns as content, unchanged, with its marker. Must not:
look for markers (marker_splitter.py).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import regex

from counterpoint.serve.output_parsing.marker_splitter import RegionOpened
from counterpoint.serve.output_parsing.output_parser import (
    CallArguments,
    CallStart,
    ContentDelta,
    OutputPart,
    new_call_id,
)

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

Json = dict[str, Any]
MAX_CALL_CHARACTERS = 2**18  # of a call that can't be streamed
# The start of a call, up to its arguments.
CALL_HEAD = regex.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:'
)
BRACKETS = regex.compile(r'["{}\[\]]')
QUOTES = regex.compile(r'["\\]')
QUOTED_OR_NESTED = '"{['
MAX_HEAD_CHARACTERS = 1024  # bounds the work for CALL_HEAD
SEPARATORS = " \t\r\n,;[]"
ENDS_OF_WORDS = " \t\r\n,}]"


@dataclasses.dataclass(frozen=True, slots=True)
class AllowedTools:
    """The tools of a request, as the API has them. Without `parallel`, the answer ends after one
    call."""

    tools: tuple[Json, ...]
    parallel: bool = True
    make_call_id: Callable[[], str] = new_call_id

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


class ToolCallState:
    """The calls of one choice so far."""

    def __init__(self, allowed_tools: AllowedTools) -> None:
        self.allowed_tools = allowed_tools
        self.count = 0
        self.done = False
        self._names = allowed_tools.names

    def is_allowed(self, name: object) -> bool:
        return isinstance(name, str) and name in self._names

    def start_call(self, name: str) -> CallStart:
        self.count += 1
        return CallStart(self.count - 1, self.allowed_tools.make_call_id(), name)

    def add_arguments(self, arguments: str) -> CallArguments:
        """To the call that was started last."""
        return CallArguments(self.count - 1, arguments)

    def finish_call(self) -> None:
        self.done = self.done or not self.allowed_tools.parallel


class CallReader(Protocol):
    """Reads one region. Not used again after `end`."""

    def feed(self, text: str) -> list[OutputPart]: ...

    def end(self, mark: str, complete: bool) -> list[OutputPart]:
        """The region ends with `mark`, or with the output. `complete`: it ends as it should."""
        ...


def make_call_reader(
    calls: ToolCallState, field: ResponseTemplateField, spec: Json, opened: RegionOpened
) -> CallReader:
    """For the region `opened` of `field`, with `spec` in the template."""
    if field.content != "json" or set(field.content_args) - {"allow_non_json"}:
        return BufferedCallReader(calls, spec, opened.mark, must_close=field.close_re is not None)
    return JsonCallReader(calls, opened.mark, opened.names.get("name"))


class JsonState(enum.Enum):
    BETWEEN = "between objects"
    HEAD = "an object, up to its arguments"
    OBJECT = "an object in another order, which must be complete"
    VALUE = "the arguments"
    TAIL = "the rest of the object after the arguments"
    TEXT = "no call: all of it is content"


class CallObject(msgspec.Struct):
    """A call as models write it, with either name of the arguments."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


decode_call = msgspec.json.Decoder(CallObject).decode


class JsonScanner:
    """Finds the end of a JSON value by its brackets and quotes."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False
        self._skip = 0  # of the next text, after a backslash at the end of this one

    def find_end(self, text: str) -> int:
        """The position after the value's end, -1 if it is not in `text`. Each text follows the one
        before."""
        at, self._skip = self._skip, 0
        while (found := (QUOTES if self._quoted else BRACKETS).search(text, at)) is not None:
            at = found.end()
            match found[0]:
                case '"':
                    self._quoted = not self._quoted
                case "\\":
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if self._depth <= 0 and not self._quoted:
                return at
        self._skip = max(0, at - len(text))
        return -1


class JsonCallReader:
    """Calls as JSON objects with name and arguments, in sequence or in a list. With `name`, the
    text begins with the arguments of that tool."""

    def __init__(self, calls: ToolCallState, mark: str, name: str | None = None) -> None:
        self.calls = calls
        self.state = JsonState.BETWEEN
        self._returned_text = mark  # content if this is no call
        self._pending = ""  # undecided text of the current object or value
        self._scanner = JsonScanner()
        self._name_in_marker = name is not None
        self._first_character = ""  # of the arguments
        self._any_call = False
        self._queued_parts: list[OutputPart] = []
        if name is not None:
            self._start_call(name, "", self._queued_parts)

    def feed(self, text: str) -> list[OutputPart]:
        parts, self._queued_parts = self._queued_parts, []
        while text and not self.calls.done:
            text = self._read(text, parts)
        return parts

    def end(self, mark: str, complete: bool) -> list[OutputPart]:
        parts, self._queued_parts = self._queued_parts, []
        if self.state in (JsonState.VALUE, JsonState.TAIL):
            # An object has been streamed already; another value has not.
            if self.state is JsonState.VALUE and self._first_character != "{":
                ended = complete or bool(mark)
                value = normalise_arguments(self._pending) if ended else self._pending
                parts.append(self.calls.add_arguments(value))
            self.calls.finish_call()
        elif not self._any_call or self._pending:
            parts.append(ContentDelta(self._returned_text + self._pending + mark))
        return [
            part
            for part in parts
            if not isinstance(part, ContentDelta | CallArguments) or part.text
        ]

    def _read(self, text: str, parts: list[OutputPart]) -> str:
        """Reads some of `text`; returns the rest."""
        match self.state:
            case JsonState.BETWEEN:
                return self._read_between(text, parts)
            case JsonState.HEAD:
                return self._read_head(text, parts)
            case JsonState.OBJECT:
                return self._read_object(text, parts)
            case JsonState.VALUE:
                return self._read_value(text, parts)
            case JsonState.TAIL:
                return self._read_tail(text)
            case JsonState.TEXT:
                return self._return_as_content(text, parts)

    def _read_between(self, text: str, parts: list[OutputPart]) -> str:
        rest = text.lstrip(SEPARATORS)
        self._returned_text += text[: len(text) - len(rest)]
        if not rest:
            return ""
        if rest[0] != "{":
            return self._return_as_content(rest, parts)
        self.state, self._scanner = JsonState.HEAD, JsonScanner()
        return rest

    def _read_head(self, text: str, parts: list[OutputPart]) -> str:
        text, self._pending = self._pending + text, ""
        found = CALL_HEAD.match(text, partial=True)
        if found is None or found.end() > MAX_HEAD_CHARACTERS:
            self.state = JsonState.OBJECT
            return text
        if found.partial:
            self._pending = text
            return ""
        try:
            name = msgspec.json.decode(found[1])
        except msgspec.DecodeError:
            name = ""
        return text[found.end() :] if self._start_call(name, text, parts) else ""

    def _start_call(self, name: str, text: str, parts: list[OutputPart]) -> bool:
        """Starts the call if the tool is allowed; else returns `text` as content."""
        if not self.calls.is_allowed(name):
            self._return_as_content(text, parts)
            return False
        parts.append(self.calls.start_call(name))
        self._any_call = True
        self._returned_text = self._first_character = ""
        self.state, self._scanner = JsonState.VALUE, JsonScanner()
        return True

    def _read_object(self, text: str, parts: list[OutputPart]) -> str:
        end = self._scanner.find_end(text)
        if end < 0:
            self._pending += text
            if len(self._pending) > MAX_CALL_CHARACTERS:
                return self._return_as_content("", parts)
            return ""
        whole, self._pending = self._pending + text[:end], ""
        try:
            call = decode_call(whole)
        except (msgspec.DecodeError, RecursionError):
            return self._return_as_content(whole + text[end:], parts)
        if not self._start_call(call.name, whole + text[end:], parts):
            return ""
        arguments = bytes(call.arguments or call.parameters).decode()
        parts.append(self.calls.add_arguments(normalise_arguments(arguments)))
        self.state = JsonState.BETWEEN
        self.calls.finish_call()
        return text[end:]

    def _read_value(self, text: str, parts: list[OutputPart]) -> str:
        if not self._first_character:
            text = text.lstrip()
            self._first_character = text[:1]
            if not text:
                return ""
        end = (
            self._scanner.find_end(text)
            if self._first_character in QUOTED_OR_NESTED
            else find_word_end(text)
        )
        part = text if end < 0 else text[:end]
        if self._first_character == "{":
            parts.append(self.calls.add_arguments(part))
        else:
            self._pending += part
        if end < 0:
            return ""
        if self._first_character != "{":
            parts.append(self.calls.add_arguments(normalise_arguments(self._pending)))
        self._pending = ""
        self.state, self._scanner = JsonState.TAIL, JsonScanner(depth=1)
        if self._name_in_marker:
            self.state = JsonState.BETWEEN
            self.calls.finish_call()
        return text[end:]

    def _read_tail(self, text: str) -> str:
        end = self._scanner.find_end(text)
        if end < 0:
            return ""
        self.state = JsonState.BETWEEN
        self.calls.finish_call()
        return text[end:]

    def _return_as_content(self, text: str, parts: list[OutputPart]) -> str:
        """There is no call from here to the region's end."""
        parts.append(ContentDelta(self._returned_text + self._pending + text))
        self._returned_text = self._pending = ""
        self.state = JsonState.TEXT
        return ""


def find_word_end(text: str) -> int:
    return next((at for at, character in enumerate(text) if character in ENDS_OF_WORDS), -1)


def normalise_arguments(value: str) -> str:
    """Some models write arguments as a string that holds JSON, and none as null."""
    if not value.strip() or value == "null":
        return "{}"
    if not value.startswith('"'):
        return value
    try:
        return msgspec.json.decode(value) or "{}"
    except msgspec.DecodeError:
        return value


class BufferedCallReader:
    """Reads regions of any other form once complete. `transformers` casts arguments by the tools'
    schemas."""

    def __init__(self, calls: ToolCallState, spec: Json, mark: str, must_close: bool) -> None:
        self.calls = calls
        self._spec = {"start_anchor_pattern": r"\A", "fields": {"content": {}, "tool_calls": spec}}
        self._text = mark
        self._must_close = must_close
        self._returned = False

    def feed(self, text: str) -> list[OutputPart]:
        if self._returned:
            return [ContentDelta(text)]
        self._text += text
        if len(self._text) <= MAX_CALL_CHARACTERS:
            return []
        self._returned = True
        return [ContentDelta(self._text)]

    def end(self, mark: str, complete: bool) -> list[OutputPart]:
        text = mark if self._returned else self._text + mark
        ended = complete or mark or not self._must_close
        calls = self._parse(text) if ended and not self._returned else []
        if not calls:
            return [ContentDelta(text)] if text else []
        parts: list[OutputPart] = []
        for name, arguments in calls:
            if not self.calls.done:
                parts += [self.calls.start_call(name), self.calls.add_arguments(arguments)]
                self.calls.finish_call()
        return parts

    def _parse(self, text: str) -> list[tuple[str, str]]:
        """Empty unless the text is calls of allowed tools and nothing else."""
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(
                text, self._spec, prefix="", tools=list(self.calls.allowed_tools.tools)
            )
            found = [
                (call["function"]["name"], call["function"]["arguments"])
                for call in flatten(message.get("tool_calls"))
            ]
            calls = [(name, encode(arguments or {}).decode()) for name, arguments in found]
        except Exception:  # a template may fail in any way on what the model wrote
            return []
        if message.get("content") or not all(self.calls.is_allowed(name) for name, _ in calls):
            return []
        return calls


encode = msgspec.json.encode


def flatten(value: Any) -> Iterator[Any]:
    """The calls that a template made: one, a list, or nested lists."""
    if isinstance(value, list):
        for one in value:
            yield from flatten(one)
    elif value is not None:
        yield value
