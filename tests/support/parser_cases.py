"""Chat templates with given markers, and a choice's text parsed in given pieces."""

from __future__ import annotations

from counterpoint.serve.output_parsing.chat_formats import ChatFormat
from counterpoint.serve.output_parsing.output_parser import OutputPart, merge_parts
from counterpoint.serve.output_parsing.streaming_parser import make_parser_config
from counterpoint.serve.output_parsing.tool_call_parser import AllowedTools

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("weather", "time")
)
ALLOWED_TOOLS = AllowedTools(TOOLS)
SHOWS_ALL = (
    "{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
)


def template_with(marks: str) -> str:
    """A chat template that knows tools and writes these marks."""
    return f"{SHOWS_ALL}{{# {marks} #}}"


def parse_parts(
    chat_format: ChatFormat,
    text: str,
    cuts: list[int] | None = None,
    *,
    allowed_tools: AllowedTools | None = ALLOWED_TOOLS,
    answer_prefix: str = "",
    complete: bool = True,
    reasoning: bool = True,
) -> list[OutputPart]:
    config = make_parser_config(chat_format, allowed_tools, reasoning, answer_prefix)
    assert config is not None
    parser, out = config(), []
    ends = [*(cuts or ()), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        out += parser.feed(text[start:end])
    return out + parser.end(complete)


def parse_text(
    chat_format: ChatFormat, text: str, cuts: list[int] | None = None, **options
) -> tuple[str, str, list[tuple[str, str]]]:
    output = merge_parts(parse_parts(chat_format, text, cuts, **options))
    return output.reasoning, output.content, [(call.name, call.arguments) for call in output.calls]
