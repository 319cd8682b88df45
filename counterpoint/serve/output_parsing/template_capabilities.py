"""Manners: how a chat template wants tools, calls and results put before it.

Owns: a small conversation that is rendered in each way that templates of known models want, until one shows all of it.
Promises: what is found is what the template does, whatever its source looks like; a template that shows no tools, or can't show a
call, is said to know none. Must not: know a request.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

from counterpoint.serve.text.tokenizer import ModelTokenizer, TokenizerError

Json = dict[str, Any]
NoContent = Literal["left out", "null", "empty"]
NO_CONTENT: tuple[NoContent, ...] = ("left out", "null", "empty")
ID = "abcdef012"  # nine letters or digits: some want no other
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "told-of-it",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """`native`: the template shows tools, calls and results. `text_arguments`: it wants arguments as text, not as an object.
    `no_content`: what it wants beside calls if nothing is said. `single`: it shows but one call in a turn. `short_ids`: it wants
    ids of nine letters or digits."""

    native: bool = False
    text_arguments: bool = False
    no_content: NoContent = "left out"
    single: bool = False
    short_ids: bool = False


PLAIN = TemplateCapabilities()


def detect_capabilities(text: ModelTokenizer) -> TemplateCapabilities:
    if text.chat_template is None:
        return PLAIN
    for text_arguments, no_content in itertools.product((False, True), NO_CONTENT):
        manners = TemplateCapabilities(True, text_arguments, no_content)
        if shows(text, manners, ["first"]):
            single = not shows(text, manners, ["first", "second"])
            return dataclasses.replace(
                manners,
                single=single,
                short_ids=not shows(text, manners, ["first"], "call_0123456789"),
            )
    return PLAIN


def shows(
    text: ModelTokenizer, manners: TemplateCapabilities, said: Sequence[str], id: str = ID
) -> bool:
    """All that is in a conversation with calls that have these arguments."""
    calls = [call_of(f"called-{word}", id, manners) for word in said]
    results = [{"role": "tool", "tool_call_id": id, "content": f"gave-{word}"} for word in said]
    turns = [{"role": "user", "content": "asked"}, turn_of(calls, manners), *results]
    try:
        prompt = text.apply_chat_template(turns, tools=[TOOL])
    except TokenizerError:
        return False
    wanted = ["told-of-it", *(f"{what}-{word}" for what in ("called", "gave") for word in said)]
    return all(word in prompt for word in wanted) and "None" not in prompt


def turn_of(calls: list[Json], manners: TemplateCapabilities) -> Json:
    """The turn of one who calls and says nothing."""
    content: Json = {"left out": {}, "null": {"content": None}, "empty": {"content": ""}}[
        manners.no_content
    ]
    return {"role": "assistant", **content, "tool_calls": calls}


def call_of(word: str, id: str, manners: TemplateCapabilities) -> Json:
    arguments = f'{{"word": "{word}"}}' if manners.text_arguments else {"word": word}
    return {"id": id, "type": "function", "function": {"name": "tool", "arguments": arguments}}
