"""Calls: from the text of a call's region to the call.

Owns: how a name and arguments are read out of JSON as it comes, or by `transformers` once a region is whole. Promises: the same
calls however the text arrives, and never one of a tool that was not offered; arguments of JSON go out as they come; what turns out
to be no call is given back as content, to the letter, with the mark that opened it.
Must not: look for marks (splitter.py).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import regex

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
MOST_CHARACTERS = 2**18  # of a call that is read only once it is whole
HEAD = regex.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:'
)  # then its arguments follow
BRACKETS = regex.compile(r'["{}\[\]]')
QUOTES = regex.compile(r'["\\]')
QUOTED_OR_NESTED = '"{['
HEAD_CHARACTERS = 1024  # of HEAD: bounds the work of looking for it
SEPARATORS = " \t\r\n,;[]"
ENDS_OF_WORDS = " \t\r\n,}]"


@dataclasses.dataclass(frozen=True, slots=True)
class AllowedTools:
    """The tools of a request. `tools`: as the API has them. Not `parallel`: one call, and the answer is over."""

    tools: tuple[Json, ...]
    parallel: bool = True
    new_id: Callable[[], str] = new_call_id

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


class ToolCallParser:
    """The calls of one choice, so far."""

    def __init__(self, offer: AllowedTools) -> None:
        self.offer = offer
        self.count = 0
        self.over = False
        self._names = offer.names

    def knows(self, name: object) -> bool:
        return isinstance(name, str) and name in self._names

    def start(self, name: str) -> CallStart:
        self.count += 1
        return CallStart(self.count - 1, self.offer.new_id(), name)

    def more(self, arguments: str) -> CallArguments:
        """Of the call that was started last."""
        return CallArguments(self.count - 1, arguments)

    def finish(self) -> None:
        self.over = self.over or not self.offer.parallel


class CallReader(Protocol):
    """Reads one region. After `end` it is not used again."""

    def feed(self, text: str) -> list[OutputPart]: ...

    def end(self, mark: str, whole: bool) -> list[OutputPart]:
        """The region ends with `mark`, or with the answer; `whole`: as it should."""
        ...


def reader_of(
    calls: ToolCallParser,
    field: ResponseTemplateField,
    spec: Json,
    mark: str,
    names: dict[str, str],
) -> CallReader:
    """For a region of `field`, whose data in the template is `spec`, opened by `mark` with these `names`."""
    if field.content != "json" or set(field.content_args) - {"allow_non_json"}:
        return WholeReader(calls, spec, mark, must_close=field.close_re is not None)
    return JsonReader(calls, mark, names.get("name"))


class JsonState(enum.Enum):
    BETWEEN = "between objects"
    HEAD = "an object, up to its arguments"
    OBJECT = "an object that is not in the usual order: it must be whole"
    VALUE = "the arguments"
    TAIL = "what of the object is behind the arguments"
    TEXT = "no call: all of it is content"


class CallObject(msgspec.Struct):
    """A call as models write it. Both names of the arguments are in use."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


decode_call = msgspec.json.Decoder(CallObject).decode


class Nesting:
    """Finds the end of a JSON value, by brackets and quotes."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False
        self._skip = 0  # of the next text: a backslash was the last of this one

    def end(self, text: str) -> int:
        """The place behind the value's end; -1 if it is not in `text`. Each text is behind the one before."""
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


class JsonReader:
    """Calls as JSON objects with a name and arguments, one behind another or in a list. With `name`, the text begins with the
    arguments of that tool."""

    def __init__(self, calls: ToolCallParser, mark: str, name: str | None = None) -> None:
        self.calls = calls
        self.state = JsonState.BETWEEN
        self._given = mark  # what is given back if no call comes of it
        self._held = ""  # of the object or value at hand: what is not decided yet
        self._nesting = Nesting()
        self._named = name is not None
        self._first = ""  # character of the arguments
        self._called = False
        self._begun: list[OutputPart] = []
        if name is not None:
            self._begin(name, "", self._begun)

    def feed(self, text: str) -> list[OutputPart]:
        said, self._begun = self._begun, []
        while text and not self.calls.over:
            text = self._step(text, said)
        return said

    def end(self, mark: str, whole: bool) -> list[OutputPart]:
        said, self._begun = self._begun, []
        if self.state in (JsonState.VALUE, JsonState.TAIL):
            if (
                self.state is JsonState.VALUE and self._first != "{"
            ):  # an object has gone out as it came
                whole = whole or bool(mark)
                said.append(self.calls.more(arguments_of(self._held) if whole else self._held))
            self.calls.finish()
        elif not self._called or self._held:
            said.append(ContentDelta(self._given + self._held + mark))
        return [
            part for part in said if not isinstance(part, ContentDelta | CallArguments) or part.text
        ]

    def _step(self, text: str, said: list[OutputPart]) -> str:
        """Read some of `text`; what of it is left to read."""
        match self.state:
            case JsonState.BETWEEN:
                return self._between(text, said)
            case JsonState.HEAD:
                return self._head(text, said)
            case JsonState.OBJECT:
                return self._object(text, said)
            case JsonState.VALUE:
                return self._value(text, said)
            case JsonState.TAIL:
                return self._tail(text)
            case JsonState.TEXT:
                return self._give_back(text, said)

    def _between(self, text: str, said: list[OutputPart]) -> str:
        rest = text.lstrip(SEPARATORS)
        self._given += text[: len(text) - len(rest)]
        if not rest:
            return ""
        if rest[0] != "{":
            return self._give_back(rest, said)
        self.state, self._nesting = JsonState.HEAD, Nesting()
        return rest

    def _head(self, text: str, said: list[OutputPart]) -> str:
        text, self._held = self._held + text, ""
        found = HEAD.match(text, partial=True)
        if found is None or found.end() > HEAD_CHARACTERS:
            self.state = JsonState.OBJECT
            return text
        if found.partial:
            self._held = text
            return ""
        try:
            name = msgspec.json.decode(found[1])
        except msgspec.DecodeError:
            name = ""
        return text[found.end() :] if self._begin(name, text, said) else ""

    def _begin(self, name: str, text: str, said: list[OutputPart]) -> bool:
        """The call of `name`, if there is such a tool; else `text` is given back."""
        if not self.calls.knows(name):
            self._give_back(text, said)
            return False
        said.append(self.calls.start(name))
        self._called, self._given, self._first, self.state = True, "", "", JsonState.VALUE
        self._nesting = Nesting()
        return True

    def _object(self, text: str, said: list[OutputPart]) -> str:
        end = self._nesting.end(text)
        if end < 0:
            self._held += text
            return "" if len(self._held) <= MOST_CHARACTERS else self._give_back("", said)
        whole, self._held = self._held + text[:end], ""
        try:
            call = decode_call(whole)
        except (msgspec.DecodeError, RecursionError):
            return self._give_back(whole + text[end:], said)
        if not self._begin(call.name, whole + text[end:], said):
            return ""
        said.append(
            self.calls.more(arguments_of(bytes(call.arguments or call.parameters).decode()))
        )
        self.state = JsonState.BETWEEN
        self.calls.finish()
        return text[end:]

    def _value(self, text: str, said: list[OutputPart]) -> str:
        if not self._first:
            text = text.lstrip()
            self._first = text[:1]
            if not text:
                return ""
        end = self._nesting.end(text) if self._first in QUOTED_OR_NESTED else end_of_word(text)
        part = text if end < 0 else text[:end]
        if self._first == "{":
            said.append(self.calls.more(part))
        else:
            self._held += part
        if end < 0:
            return ""
        if self._first != "{":
            said.append(self.calls.more(arguments_of(self._held)))
        self._held = ""
        self.state, self._nesting = JsonState.TAIL, Nesting(depth=1)
        if self._named:
            self.state = JsonState.BETWEEN
            self.calls.finish()
        return text[end:]

    def _tail(self, text: str) -> str:
        end = self._nesting.end(text)
        if end < 0:
            return ""
        self.state = JsonState.BETWEEN
        self.calls.finish()
        return text[end:]

    def _give_back(self, text: str, said: list[OutputPart]) -> str:
        """No call, from here to the region's end."""
        said.append(ContentDelta(self._given + self._held + text))
        self._given = self._held = ""
        self.state = JsonState.TEXT
        return ""


def end_of_word(text: str) -> int:
    return next((at for at, character in enumerate(text) if character in ENDS_OF_WORDS), -1)


def arguments_of(value: str) -> str:
    """The arguments as a client wants them, if they are anything but an object: some models write them as a string that holds JSON,
    and none at all as null."""
    if not value.strip() or value == "null":
        return "{}"
    if not value.startswith('"'):
        return value
    try:
        return msgspec.json.decode(value) or "{}"
    except msgspec.DecodeError:
        return value


class WholeReader:
    """Regions in any other form: read once they are whole, by `transformers`, which casts arguments as the tools' schemas say."""

    def __init__(self, calls: ToolCallParser, spec: Json, mark: str, must_close: bool) -> None:
        self.calls = calls
        self._spec = {"start_anchor_pattern": r"\A", "fields": {"content": {}, "tool_calls": spec}}
        self._text = mark
        self._must_close = must_close
        self._given_back = False

    def feed(self, text: str) -> list[OutputPart]:
        if self._given_back:
            return [ContentDelta(text)]
        self._text += text
        if len(self._text) <= MOST_CHARACTERS:
            return []
        self._given_back = True
        return [ContentDelta(self._text)]

    def end(self, mark: str, whole: bool) -> list[OutputPart]:
        text = mark if self._given_back else self._text + mark
        calls = (
            []
            if self._given_back or not (whole or mark or not self._must_close)
            else self._read(text)
        )
        if not calls:
            return [ContentDelta(text)] if text else []
        said: list[OutputPart] = []
        for name, arguments in calls:
            if not self.calls.over:
                said += [self.calls.start(name), self.calls.more(arguments)]
                self.calls.finish()
        return said

    def _read(self, text: str) -> list[tuple[str, str]]:
        """Empty if it is anything but calls of known tools."""
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(
                text, self._spec, prefix="", tools=list(self.calls.offer.tools)
            )
            found = [
                (call["function"]["name"], call["function"]["arguments"])
                for call in flat(message.get("tool_calls"))
            ]
            written = [(name, encode(arguments or {}).decode()) for name, arguments in found]
        except Exception:  # a template is a program that runs on what the model wrote
            return []
        return (
            []
            if message.get("content") or not all(self.calls.knows(name) for name, _ in written)
            else written
        )


encode = msgspec.json.encode


def flat(value: Any) -> Iterator[Any]:
    """The calls in what a template made of them: one, a list, or lists in a list."""
    if isinstance(value, list):
        for one in value:
            yield from flat(one)
    elif value is not None:
        yield value
