"""Probes a chat template: how it wants tools, calls and results.

Renders a small conversation in each way that templates of known models want, until one shows all of
it. A template that shows no tools or no call is reported as not supporting tools. Must not: know a
request.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

from counterpoint.serve.text.tokenizer import ModelTokenizer, TokenizerError

Json = dict[str, Any]
EmptyContent = Literal["left out", "null", "empty"]
EMPTY_CONTENTS: tuple[EmptyContent, ...] = ("left out", "null", "empty")
PROBE_ID = "abcdef012"  # some templates accept only nine letters or digits
PROBE_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "told-of-it",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """`supports_tools`: the template shows tools, calls and results. `string_arguments`: it wants
    arguments as text, not as an object. `empty_content`: what it wants beside calls without
    content. `single_call`: it shows one call per turn. `short_ids`: ids must be nine letters or
    digits."""

    supports_tools: bool = False
    string_arguments: bool = False
    empty_content: EmptyContent = "left out"
    single_call: bool = False
    short_ids: bool = False


NO_TOOLS = TemplateCapabilities()


def detect_capabilities(tokenizer: ModelTokenizer) -> TemplateCapabilities:
    if tokenizer.chat_template is None:
        return NO_TOOLS
    for string_arguments, empty_content in itertools.product((False, True), EMPTY_CONTENTS):
        capabilities = TemplateCapabilities(True, string_arguments, empty_content)
        if renders_calls(tokenizer, capabilities, ["first"]):
            single = not renders_calls(tokenizer, capabilities, ["first", "second"])
            return dataclasses.replace(
                capabilities,
                single_call=single,
                short_ids=not renders_calls(tokenizer, capabilities, ["first"], "call_0123456789"),
            )
    return NO_TOOLS


def renders_calls(
    tokenizer: ModelTokenizer,
    capabilities: TemplateCapabilities,
    words: Sequence[str],
    id: str = PROBE_ID,
) -> bool:
    """Whether the prompt shows all of a conversation with calls of these arguments."""
    calls = [make_call(f"called-{word}", id, capabilities) for word in words]
    results = [{"role": "tool", "tool_call_id": id, "content": f"gave-{word}"} for word in words]
    turns = [{"role": "user", "content": "asked"}, make_call_turn(calls, capabilities), *results]
    try:
        prompt = tokenizer.apply_chat_template(turns, tools=[PROBE_TOOL])
    except TokenizerError:
        return False
    wanted = ["told-of-it", *(f"{what}-{word}" for what in ("called", "gave") for word in words)]
    return all(word in prompt for word in wanted) and "None" not in prompt


def make_call_turn(calls: list[Json], capabilities: TemplateCapabilities) -> Json:
    """An assistant's turn of calls without content."""
    content: Json = {"left out": {}, "null": {"content": None}, "empty": {"content": ""}}[
        capabilities.empty_content
    ]
    return {"role": "assistant", **content, "tool_calls": calls}


def make_call(word: str, id: str, capabilities: TemplateCapabilities) -> Json:
    arguments = f'{{"word": "{word}"}}' if capabilities.string_arguments else {"word": word}
    return {"id": id, "type": "function", "function": {"name": "tool", "arguments": arguments}}
