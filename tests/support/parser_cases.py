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
OFFER = AllowedTools(TOOLS)
SHOWS = "{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}"  # all there is


def shown_with(marks: str) -> str:
    """A chat template that knows tools and writes these marks."""
    return f"{SHOWS}{{# {marks} #}}"


def parts(
    spoken: ChatFormat,
    text: str,
    cuts: list[int] | None = None,
    *,
    offer: AllowedTools | None = OFFER,
    begun: str = "",
    whole: bool = True,
    reasoning: bool = True,
) -> list[OutputPart]:
    hearing = make_parser_config(spoken, offer, reasoning, begun)
    assert hearing is not None
    voice, said = hearing(), []
    ends = [*(cuts or ()), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        said += voice.feed(text[start:end])
    return said + voice.end(whole)


def heard(
    spoken: ChatFormat, text: str, cuts: list[int] | None = None, **options
) -> tuple[str, str, list[tuple[str, str]]]:
    speech = merge_parts(parts(spoken, text, cuts, **options))
    return speech.reasoning, speech.content, [(call.name, call.arguments) for call in speech.calls]
