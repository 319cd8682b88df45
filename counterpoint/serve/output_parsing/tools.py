"""Tools in requests: their validation, how the prompt shows them, and the grammar of calls.

Promises: an invalid tool is named in a 400; a template never gets arguments that it would quote
twice. Must not: parse output (streaming_parser.py), or compile grammars.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from counterpoint.serve.api.errors import ApiError
from counterpoint.serve.api.openai import ChatMessage, ChatRequest, TokenizeRequest, ToolChoice
from counterpoint.serve.output_parsing.chat_formats import (
    HERMES_CALL_FORMAT,
    NAME_PLACEHOLDER,
    CallFormat,
    ChatFormat,
    find_reasoning_markers,
)
from counterpoint.serve.output_parsing.output_parser import new_call_id
from counterpoint.serve.output_parsing.streaming_parser import ParserConfig
from counterpoint.serve.output_parsing.template_capabilities import TemplateCapabilities
from counterpoint.serve.output_parsing.tool_call_parser import AllowedTools
from counterpoint.serve.structured_output.grammar import MAX_BLANKS, json_options
from counterpoint.serve.text.tokenizer import ModelTokenizer

Json = dict[str, Any]
SHORT_ID = 9
SHORT_ID_CHARACTERS = string.ascii_letters + string.digits
NO_PARAMETERS: Json = {"type": "object", "properties": {}, "additionalProperties": False}
FALLBACK_TOOL_PROMPT = (
    "You can call tools. These are the ones there are, each as JSON:\n"
    "{tools}\n"
    "To call one, write this, with nothing behind it but further calls; "
    "the result will be in the next turn:\n"
    "<tool_call>\n"
    '{{"name": NAME, "arguments": {{NAME: VALUE, ...}}}}\n'
    "</tool_call>"
)

encode = msgspec.json.encode


# ---------------------------------------------------------------- validation


def validate_tools(request: ChatRequest | TokenizeRequest) -> list[Json]:
    """The tools that the model is shown: none if it must not call. Raises ApiError."""
    tools = request.tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(
            400, f"tools: {twice!r} is there twice: give each its own name", param="tools"
        )
    choice = request.tool_choice if isinstance(request, ChatRequest) else None
    if not names and choice not in (None, "none", "auto"):
        raise ApiError(
            400, "tool_choice asks for a call, and there are no tools", param="tool_choice"
        )
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise ApiError(
            400,
            f"tool_choice: there is no tool {choice.function.name!r} in tools",
            param="tool_choice",
        )
    shown = [] if choice == "none" else [tool.model_dump(exclude_unset=True) for tool in tools]
    try:
        json.dumps(shown, allow_nan=False)
    except ValueError:  # for example 1e999
        raise ApiError(400, "tools: a number is not finite", param="tools") from None
    return shown


def find_allowed_tools(
    request: ChatRequest, tools: Sequence[Json], chat_format: ChatFormat
) -> AllowedTools | None:
    """The tools that the answer may call, None if there are none."""
    if isinstance(request.tool_choice, ToolChoice):
        tools = [
            tool for tool in tools if tool["function"]["name"] == request.tool_choice.function.name
        ]
    if not tools:
        return None
    capabilities = chat_format.capabilities
    parallel = request.parallel_tool_calls is not False and not capabilities.single_call
    return AllowedTools(
        tuple(tools), parallel, new_short_id if capabilities.short_ids else new_call_id
    )


def must_call(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, ToolChoice)


def new_short_id() -> str:
    return "".join(secrets.choice(SHORT_ID_CHARACTERS) for _ in range(SHORT_ID))


# ---------------------------------------------------------------- the prompt


def make_template_messages(
    messages: Sequence[ChatMessage], tools: Sequence[Json], chat_format: ChatFormat
) -> tuple[list[Json], Json]:
    """The messages for the chat template, and its option `tools`, if it has one."""
    turns = [make_template_message(message, chat_format) for message in messages]
    if chat_format.capabilities.supports_tools:
        return turns, {"tools": list(tools)} if tools else {}
    return make_plain_messages(turns, tools), {}


def make_template_message(message: ChatMessage, chat_format: ChatFormat) -> Json:
    turn, capabilities = message.to_template_message(), chat_format.capabilities
    calls = turn.get("tool_calls", ())
    if turn["content"] is None:  # allowed beside calls
        del turn["content"]
    if calls and not turn.get("content") and capabilities.empty_content != "left out":
        turn["content"] = None if capabilities.empty_content == "null" else ""
    for call in calls:
        call["function"]["arguments"] = convert_arguments(
            call["function"].get("arguments"), capabilities
        )
    if capabilities.short_ids:
        for named in (*calls, turn):
            key = "tool_call_id" if named is turn else "id"
            if key in named:
                named[key] = shorten_id(named[key])
    return turn


def convert_arguments(arguments: Any, capabilities: TemplateCapabilities) -> Any:
    """Most templates write arguments as JSON: JSON text is parsed for them, other text stays
    unchanged. Templates with `string_arguments` get JSON text."""
    if capabilities.string_arguments:
        return (
            arguments
            if isinstance(arguments, str) and arguments.strip()
            else encode(arguments or {}).decode()
        )
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def shorten_id(id: str) -> str:
    """The same for the same id; an id of that form already stays unchanged."""
    if len(id) == SHORT_ID and set(id) <= set(SHORT_ID_CHARACTERS):
        return id
    return hashlib.blake2b(id.encode(), digest_size=SHORT_ID).hexdigest()[:SHORT_ID]


def make_plain_messages(turns: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """For a template without tools: the system turn lists them, calls become text, results user
    turns."""
    out: list[Json] = []
    result_before = False
    for turn in turns:
        calls = turn.pop("tool_calls", ())
        turn.setdefault("content", "")
        if calls:
            turn["content"] = "\n".join([turn["content"], *map(write_call, calls)]).strip()
        is_result = turn["role"] == "tool"
        if is_result:
            turn = {
                "role": "user",
                "content": f"<tool_response>\n{turn['content']}\n</tool_response>",
            }
        if is_result and result_before:
            out[-1]["content"] += "\n" + turn["content"]
        else:
            out.append(turn)
        result_before = is_result
    if tools:
        instructions = FALLBACK_TOOL_PROMPT.format(
            tools="\n".join(encode(tool["function"]).decode() for tool in tools)
        )
        if out[0]["role"] == "system":
            instructions = f"{out.pop(0)['content']}\n\n{instructions}"
        out.insert(0, {"role": "system", "content": instructions})
    return out


def write_call(call: Json) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    body = arguments if isinstance(arguments, str) else encode(arguments).decode()
    return HERMES_CALL_FORMAT.start.replace(NAME_PLACEHOLDER, name) + body + HERMES_CALL_FORMAT.end


# ---------------------------------------------------------------- grammars


def make_answer_grammar(
    config: ParserConfig, tokenizer: ModelTokenizer, prompt: str, alternative: str = ""
) -> str:
    """A grammar in llguidance's Lark: optional reasoning, then one or more calls in the chat
    format, or the rule `alternative` instead. If the call format is unknown, `alternative` alone.
    """
    allowed_tools, call_format = config.allowed_tools, config.chat_format.call_format
    if allowed_tools is None or call_format is None:
        return with_reasoning_rules(alternative, config, tokenizer, prompt)
    literal = make_literal_writer(tokenizer)
    calls = "call"
    if allowed_tools.parallel and call_format.between is not None:
        calls = "call (" + " ".join([*literal(call_format.between), "call"]) + ")*"
    answer = f"(calls | {alternative})" if alternative else "calls"
    rules = [
        with_reasoning_rules(answer, config, tokenizer, prompt),
        " ".join(["calls:", *literal(call_format.before), calls, *literal(call_format.after)]),
        "call: " + " | ".join(f"call{n}" for n in range(len(allowed_tools.tools))),
    ]
    for n, tool in enumerate(allowed_tools.tools):
        rules.append(f"call{n}: {make_call_rule(tool, call_format, literal)}")
    return "\n".join(rules)


def with_reasoning_rules(
    item: str, config: ParserConfig, tokenizer: ModelTokenizer, prompt: str
) -> str:
    """The rules of an answer `item`, preceded by optional reasoning if that is parsed and `prompt`
    has not ended it."""
    markers = find_reasoning_markers(config.fields)
    if markers is None or prompt.rstrip().endswith(markers[1]):
        return f"start: {item}"
    inside = config.initial_field is not None
    thought = "thought" if inside else "thought?"
    rules = make_reasoning_rules(*markers, inside, make_literal_writer(tokenizer))
    return "\n".join([f"start: {thought} {item}", *rules])


def make_reasoning_rules(
    begin: str, end: str, inside: bool, literal: Callable[[str], list[str]]
) -> list[str]:
    begun = [] if inside else literal(begin)
    ended = literal(end)
    blanks = rf"BLANKS: /\s{{0,{MAX_BLANKS}}}/"
    if ended == [encode(end).decode()]:
        words = f"words[suffix={encode(end).decode()}]: /(?s:.*)/"
        return [" ".join(["thought:", *begun, "words", "BLANKS"]), words, blanks]
    return [" ".join(["thought:", *begun, "WORDS", *ended, "BLANKS"]), "WORDS: /(?s:.*)/", blanks]


def make_call_rule(tool: Json, call_format: CallFormat, literal: Callable[[str], list[str]]) -> str:
    function = tool["function"]
    schema = (function.get("parameters") or NO_PARAMETERS) | {
        "x-guidance": json_options(strict=bool(function.get("strict")))
    }
    start = literal(call_format.start.replace(NAME_PLACEHOLDER, function["name"]))
    return " ".join([*start, "%json " + encode(schema).decode(), *literal(call_format.end)])


def make_literal_writer(tokenizer: ModelTokenizer) -> Callable[[str], list[str]]:
    """Writes a literal as the items of a rule: special tokens by id, the rest as strings."""
    special = {token.content: id for id, token in tokenizer.added_tokens.items() if token.special}

    def items(literal: str) -> Iterator[str]:
        while literal:
            found = [(at, -len(name), name) for name in special if (at := literal.find(name)) >= 0]
            if not found:
                yield encode(literal).decode()
                return
            at, _, name = min(found)
            if at:
                yield encode(literal[:at]).decode()
            yield f"<[{special[name]}]>"
            literal = literal[at + len(name) :]

    return lambda literal: list(items(literal))
