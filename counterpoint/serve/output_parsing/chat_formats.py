"""How models spell reasoning and tool calls: one response template for each known family.

Response templates are data in the form of `transformers` (docs: chat response parsing). A model's
own one, from its tokenizer files, comes first; else the chat template's markers select one. Must
not: parse.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from counterpoint.serve.output_parsing.template_capabilities import (
    NO_TOOLS,
    TemplateCapabilities,
    detect_capabilities,
)
from counterpoint.serve.text.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import (
        ResponseTemplate,
        ResponseTemplateField,
    )

Json = dict[str, Any]
log = logging.getLogger("counterpoint")

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names in templates
CALLS, CONTENT = "tool_calls", "content"
TRANSFORM = {"type": "function", "function": "{content}"}
NAMED_TRANSFORM = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
NAME = r"(?P<name>[\w.-]+)"

THINK: Json = {"open": "<think>", "close": "</think>"}
THINK_BRACKETS: Json = {"open": "[THINK]", "close": "[/THINK]"}

HERMES: Json = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "repeats": True,
    "transform": TRANSFORM,
}
QWEN_XML: Json = {
    "open_pattern": rf"<tool_call>\s*<function={NAME}>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?"
        r"(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
    },
    "repeats": True,
    "transform": NAMED_TRANSFORM,
}
LLAMA: Json = {
    "open_pattern": r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{)|<\|python_tag\|>\s*(?=\{)",
    "content": "json",
    "repeats": True,
    "transform": {
        "type": "function",
        "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
    },
}
MISTRAL: Json = {
    "open": "[TOOL_CALLS]",
    "content": "json",
    "repeats": True,
    "transform": TRANSFORM | {"function": {"name": "{name}", "arguments": "{arguments}"}},
    "transform_each": True,
}
MISTRAL_NAMED: Json = {
    "open_pattern": rf"\[TOOL_CALLS\]\s*{NAME}\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\s*\{{)",
    "close_pattern": r"(?=\[TOOL_CALLS\])",
    "content": "json",
    "repeats": True,
    "transform": NAMED_TRANSFORM,
}
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
DEEPSEEK: Json = {
    "open_pattern": rf"(?:{DEEPSEEK_BEGIN}\s*)?{DEEPSEEK_CALL}"
    rf"(?:function{DEEPSEEK_SEP}{NAME}\s*```json\n|(?!function){NAME}{DEEPSEEK_SEP})",
    # Spells out all that may follow: an optional end would match before it has arrived.
    "close_pattern": rf"(?:\s*```)?\s*{DEEPSEEK_CALL_END}"
    rf"(?:\s*{DEEPSEEK_END}|(?=\s*(?:{DEEPSEEK_CALL}|[^\s<]|<[^｜]))|\s*\Z)",
    "content": "json",
    "repeats": True,
    "transform": NAMED_TRANSFORM,
}


@dataclasses.dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written, for grammars: `before`, calls with `between` between them, `after`.

    A call is `start` (with NAME_PLACEHOLDER as the tool's name), the arguments, `end`. If `between`
    is None, there can be one call only.
    """

    start: str
    end: str
    before: str = ""
    after: str = ""
    between: str | None = None


NAME_PLACEHOLDER = "NAME"
HERMES_CALL_FORMAT = CallFormat(
    '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n"
)
CALL_FORMATS: list[tuple[Json, CallFormat | None]] = [
    (HERMES, HERMES_CALL_FORMAT),
    (QWEN_XML, None),
    (LLAMA, CallFormat('{"name": "NAME", "parameters": ', "}")),
    (
        MISTRAL,
        CallFormat(
            '{"name": "NAME", "arguments": ', "}", before="[TOOL_CALLS][", after="]", between=", "
        ),
    ),
    (MISTRAL_NAMED, CallFormat("[TOOL_CALLS]NAME[ARGS]", "", between="")),
    (
        DEEPSEEK,
        CallFormat(
            f"{DEEPSEEK_CALL}function{DEEPSEEK_SEP}NAME\n```json\n",
            f"\n```{DEEPSEEK_CALL_END}",
            before=DEEPSEEK_BEGIN,
            after=DEEPSEEK_END,
            between="\n",
        ),
    ),
]


@dataclasses.dataclass(frozen=True, slots=True)
class ChatFormat:
    """`template` is compiled from the response template `spec`. `special_tokens`: (id, text) of
    those in its markers. `call_format`: how to write a call, if known. `from_tokenizer`: the spec
    came with the model. `capabilities`: of the chat template."""

    spec: Json
    template: ResponseTemplate
    call_format: CallFormat | None = None
    special_tokens: tuple[tuple[int, str], ...] = ()
    from_tokenizer: bool = False
    capabilities: TemplateCapabilities = NO_TOOLS

    def marker_token_ids(self, fields: Iterable[ResponseTemplateField]) -> frozenset[int]:
        """The special tokens in the markers of these fields."""
        sources = [source for field in fields for source in marker_patterns(field)]
        return frozenset(
            token
            for token, name in self.special_tokens
            if any(name in source for source in sources)
        )

    def with_known_call_format(self) -> ChatFormat:
        """This one if its `call_format` is known, else one with the same reasoning and HERMES
        calls."""
        if self.call_format is not None:
            return self
        spec = self.spec | {"fields": self.spec["fields"] | {CALLS: HERMES}}
        return dataclasses.replace(
            self, spec=spec, template=load_template(spec), call_format=HERMES_CALL_FORMAT
        )


def load_template(spec: Json) -> ResponseTemplate:
    """Raises ValueError."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(spec)


def find_chat_format(tokenizer: ModelTokenizer) -> ChatFormat:
    """The model's format. If its chat template does not support tools, it is told to call as
    HERMES."""
    source, capabilities = tokenizer.chat_template or "", detect_capabilities(tokenizer)
    reasoning = THINK if "</think>" in source else THINK_BRACKETS if "[/THINK]" in source else None
    calls = find_call_spec(source)
    spec, from_tokenizer = make_spec(reasoning, calls), False
    if tokenizer.response_template is not None:
        try:
            load_template(tokenizer.response_template)
            spec, from_tokenizer = tokenizer.response_template, True
        except ValueError as error:
            log.warning("the tokeniser's response_template is not used: %s", error)
    call_format = None
    if capabilities.supports_tools and not from_tokenizer:
        call_format = next(written for known, written in CALL_FORMATS if known is calls)
    template = load_template(spec)
    markers = "\n".join(
        source for field in template.fields.values() for source in marker_patterns(field)
    )
    special = tuple(
        (id, token.content)
        for id, token in tokenizer.added_tokens.items()
        if token.special and token.content in markers
    )
    found = ChatFormat(spec, template, call_format, special, from_tokenizer, capabilities)
    return found if capabilities.supports_tools else found.with_known_call_format()


def find_call_spec(source: str) -> Json:
    """By the markers in a chat template's source."""
    if "<tool_call>" in source:
        return QWEN_XML if "<function=" in source else HERMES
    if "[TOOL_CALLS]" in source:
        return MISTRAL_NAMED if "[ARGS]" in source else MISTRAL
    if DEEPSEEK_CALL in source:
        return DEEPSEEK
    if "<|python_tag|>" in source or '"parameters": dictionary' in source:
        return LLAMA
    return HERMES


def make_spec(reasoning: Json | None, calls: Json | None) -> Json:
    fields: Json = {CONTENT: {}}
    if reasoning is not None:
        fields[REASONING_FIELDS[0]] = reasoning
    if calls is not None:
        fields[CALLS] = calls
    return {"start_anchor_pattern": r"\A", "fields": fields}


def field_kind(name: str) -> str:
    """ "reasoning", "content", "call", or "" for a field that is not shown."""
    if name in REASONING_FIELDS:
        return "reasoning"
    return {CALLS: "call", CONTENT: "content"}.get(name, "")


def find_reasoning_markers(fields: Iterable[ResponseTemplateField]) -> tuple[str, str] | None:
    """The literals that open and close reasoning, if known."""
    for field in fields:
        if field_kind(field.name) == "reasoning" and field.open_literals and field.close_literals:
            return field.open_literals[0], field.close_literals[0]
    return None


def marker_patterns(field: ResponseTemplateField) -> Iterator[str]:
    """The patterns of its markers, without backslashes that only escape punctuation."""
    for pattern in (field.open_re, field.close_re):
        if pattern is not None:
            yield re.sub(r"\\(?=\W)", "", pattern.pattern)


def find_answer_prefix(chat_format: ChatFormat, prompt: str, continued: str | None) -> str:
    """What the prompt holds of the answer. `continued`: the message that the answer continues, if
    any."""
    if chat_format.from_tokenizer:
        return chat_format.template.truncate_past_last_anchor(prompt)
    if continued is not None:
        return continued
    markers = find_reasoning_markers(chat_format.template.fields.values())
    begun = markers is not None and prompt.rstrip().endswith(markers[0])
    return markers[0] if markers is not None and begun else ""
