"""Reasoning, tools and structures in /v1/responses and /v1/messages, through their own packages."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from api_calls import (
    anthropic_client,
    message_error,
    message_events,
    response_error,
    response_events,
)
from serve_process import Running
from tool_cases import CALLS, ONE, PARAMETERS, TWO

from counterpoint.serve.api.messages_format import parse_arguments
from counterpoint.serve.api.response_format import encode

SAID = f"<think>\nI look.\n</think>\n\nLet me see.\n{TWO}"
FUNCTIONS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": PARAMETERS,
        "strict": False,
    },
    {"type": "function", "name": "time", "parameters": {"type": "object"}, "strict": None},
]
CUSTOM: list[Any] = [
    {"name": "weather", "description": "Tells the weather.", "input_schema": PARAMETERS},
    {
        "name": "time",
        "input_schema": {"type": "object"},
        "type": "custom",
        "cache_control": {"type": "ephemeral"},
    },
]
ASKED = {"model": "echo", "max_tokens": 300}


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# ---------------------------------------------------------------- /v1/responses


def test_a_response_with_reasoning_and_calls(thinker: Running):
    answer = thinker.client.responses.create(model="echo", input=SAID, tools=FUNCTIONS)
    reasoning, message, *calls = answer.output
    assert reasoning.type == "reasoning" and [part.text for part in reasoning.content] == [
        "I look."
    ]
    assert message.type == "message" and answer.output_text == "Let me see."
    assert [(call.name, call.arguments, call.status) for call in calls] == [
        (*call, "completed") for call in CALLS
    ]
    assert (
        len({call.call_id for call in calls}) == 2 and len({item.id for item in answer.output}) == 4
    )
    assert answer.status == "completed" and answer.usage.output_tokens_details.reasoning_tokens > 0
    assert [tool.name for tool in answer.tools] == [
        "weather",
        "time",
    ] and answer.tool_choice == "auto"


def test_a_streamed_response_with_reasoning_and_calls(thinker: Running):
    with thinker.client.responses.stream(model="echo", input=SAID, tools=FUNCTIONS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    grown: dict[int, str] = {}
    living: set[int] = set()
    for event in events:
        index = getattr(event, "output_index", None)
        if event.type == "response.output_item.added":
            assert not living and index == len(grown)
            living, grown[index] = {index}, ""
        elif event.type == "response.output_item.done":
            assert living == {index}
            living = set()
        elif event.type.endswith(".delta"):
            assert living == {index}
            grown[index] += event.delta
    arguments = [
        event.arguments for event in events if event.type == "response.function_call_arguments.done"
    ]
    assert arguments == [call[1] for call in CALLS]
    assert grown == {0: "I look.", 1: "Let me see.", 2: CALLS[0][1], 3: CALLS[1][1]}
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert [event.text for event in events if event.type == "response.reasoning_text.done"] == [
        "I look."
    ]
    whole = thinker.post("/v1/responses", {"input": SAID, "tools": FUNCTIONS}).json()["output"]
    streamed = response_events(thinker, {"input": SAID, "tools": FUNCTIONS})[-1]["response"][
        "output"
    ]
    drop = ("id", "call_id")
    assert [{k: v for k, v in i.items() if k not in drop} for i in whole] == [
        {k: v for k, v in i.items() if k not in drop} for i in streamed
    ]


def test_a_response_goes_back_in_with_the_results(thinker: Running):
    first = thinker.client.responses.create(model="echo", input=SAID, tools=FUNCTIONS)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "21"}
        for item in first.output
        if item.type == "function_call"
    ]
    items = [*said(SAID), *(item.model_dump(exclude_none=True) for item in first.output), *results]
    second = thinker.client.responses.create(model="echo", input=items, tools=FUNCTIONS)
    calls = [
        {
            "id": c.call_id,
            "type": "function",
            "function": {"name": c.name, "arguments": c.arguments},
        }
        for c in first.output[2:]
    ]
    turns = [
        *said(SAID),
        {
            "role": "assistant",
            "reasoning_content": "I look.",
            "content": "Let me see.",
            "tool_calls": calls,
        },
        *({"role": "tool", "tool_call_id": call["id"], "content": "21"} for call in calls),
    ]
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in FUNCTIONS
    ]
    chat = thinker.post("/v1/chat/completions", {"messages": turns, "tools": tools})
    assert (
        second.output_text == "21"
        and second.usage.input_tokens == chat.json()["usage"]["prompt_tokens"]
    )


def test_which_functions_may_be_called(thinker: Running):
    def kinds(**options: Any) -> list[str]:
        return [
            item.type
            for item in thinker.client.responses.create(model="echo", input=TWO, **options).output
        ]

    assert kinds(tools=FUNCTIONS) == ["function_call"] * 2
    assert kinds(tools=FUNCTIONS, parallel_tool_calls=False) == ["function_call"]
    assert kinds(tools=FUNCTIONS, tool_choice="none") == kinds() == ["message"]
    assert (
        kinds(tools=FUNCTIONS, tool_choice={"type": "function", "name": "weather"})[0]
        == "function_call"
    )
    cut = thinker.client.responses.create(
        model="echo", input=ONE, tools=FUNCTIONS, max_output_tokens=50
    )
    assert (
        cut.status == "incomplete"
        and cut.output[0].status == "incomplete"
        and cut.output[0].arguments == '{"cit'
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "a b", "parameters": {}}]}, "tools"),
        ({"tools": [FUNCTIONS[0], FUNCTIONS[0]]}, "tools"),
        ({"tools": FUNCTIONS, "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "nothing"}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": FUNCTIONS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_wrong_functions_are_named(thinker: Running, body: dict[str, Any], param: str):
    assert response_error(thinker, body)["param"] == param


def test_reasoning_effort(thinker: Running):
    thinking = thinker.client.responses.create(
        model="echo", input="hm</think>yes", reasoning={"effort": "low"}
    )
    assert [item.type for item in thinking.output] == [
        "reasoning",
        "message",
    ] and thinking.reasoning.effort == "low"
    plain = thinker.client.responses.create(model="echo", input="yes", reasoning={"effort": "none"})
    assert [item.type for item in plain.output] == ["message"]
    body = {"messages": said("hm</think>yes"), "reasoning_effort": "high"}
    assert (
        thinker.post("/v1/chat/completions", body).json()["choices"][0]["message"]["reasoning"]
        == "hm"
    )


class Place(pydantic.BaseModel):
    city: str


def test_parse(thinker: Running):
    """The engine echoes JSON, which the package parses into an object."""
    found = thinker.client.responses.parse(
        model="echo", input='{"city": "Paris"}', text_format=Place
    )
    assert found.output_parsed == Place(city="Paris") and found.text.format.type == "json_schema"

    async def streamed() -> Any:
        async with (
            openai.AsyncOpenAI(
                base_url=f"{thinker.url}/v1", api_key="none", max_retries=0
            ) as client,
            client.responses.stream(
                model="echo", input='{"city": "Rome"}', text_format=Place
            ) as stream,
        ):
            return (await stream.get_final_response()).output_parsed

    assert asyncio.run(streamed()) == Place(city="Rome")


# ---------------------------------------------------------------- /v1/messages


def test_a_message_with_thinking_and_calls(thinker: Running):
    message = anthropic_client(thinker).messages.create(**ASKED, messages=said(SAID), tools=CUSTOM)
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "I look.", "Let me see.")
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", n, json.loads(a)) for n, a in CALLS
    ]
    assert (
        message.stop_reason == "tool_use"
        and message.usage.output_tokens_details.thinking_tokens > 0
    )


def test_a_streamed_message_with_thinking_and_calls(thinker: Running):
    with anthropic_client(thinker).messages.stream(
        **ASKED, messages=said(SAID), tools=CUSTOM
    ) as stream:
        final = stream.get_final_message()
    whole = anthropic_client(thinker).messages.create(**ASKED, messages=said(SAID), tools=CUSTOM)
    assert [b.model_dump(exclude={"id"}) for b in final.content] == [
        b.model_dump(exclude={"id"}) for b in whole.content
    ]
    assert (
        final.stop_reason == "tool_use" and final.usage.output_tokens == whole.usage.output_tokens
    )
    kinds = [
        e["type"]
        for e in message_events(
            thinker, {"messages": said(SAID), "tools": CUSTOM, "max_tokens": 300}
        )
    ]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks = [kind for kind in kinds if kind in ("content_block_start", "content_block_stop")]
    assert blocks == ["content_block_start", "content_block_stop"] * 4


def test_a_message_goes_back_in_with_the_results(thinker: Running):
    client = anthropic_client(thinker)
    first = client.messages.create(**ASKED, messages=said(SAID), tools=CUSTOM)
    results = [
        {"type": "tool_result", "tool_use_id": b.id, "content": "21"}
        for b in first.content
        if b.type == "tool_use"
    ]
    turns = [*said(SAID), first.to_param(), {"role": "user", "content": results}]
    second = client.messages.create(**ASKED, messages=turns, tools=CUSTOM)
    counted = client.messages.count_tokens(model="echo", messages=turns, tools=CUSTOM).input_tokens
    assert second.content[0].text == "21"
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens == counted
    assert client.messages.count_tokens(model="echo", messages=turns).input_tokens < counted
    none = client.messages.count_tokens(
        model="echo", messages=turns, tools=CUSTOM, tool_choice={"type": "none"}
    )
    assert (
        none.input_tokens == client.messages.count_tokens(model="echo", messages=turns).input_tokens
    )


def test_which_tools_may_be_used(thinker: Running):
    def kinds(**options: Any) -> list[str]:
        message = anthropic_client(thinker).messages.create(**ASKED, messages=said(TWO), **options)
        return [block.type for block in message.content]

    assert (
        kinds(tools=CUSTOM) == kinds(tools=CUSTOM, tool_choice={"type": "auto"}) == ["tool_use"] * 2
    )
    assert kinds(tools=CUSTOM, tool_choice={"type": "auto", "disable_parallel_tool_use": True}) == [
        "tool_use"
    ]
    assert kinds(tools=CUSTOM, tool_choice={"type": "none"}) == kinds() == ["text"]
    assert kinds(tools=CUSTOM, tool_choice={"type": "any"})[0] == "tool_use"
    assert kinds(tools=CUSTOM, tool_choice={"type": "tool", "name": "weather"})[0] == "tool_use"
    cut = anthropic_client(thinker).messages.create(
        model="echo", max_tokens=len(ONE) - 17, messages=said(ONE), tools=CUSTOM
    )
    assert cut.stop_reason == "max_tokens" and cut.content[0].input.keys() <= {"city"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            '{"n": 123456789012345678901234567890, "m": 1e400}',
            '{"n": 123456789012345678901234567890, "m": 1e400}',
        ),
        ('{"a": {"b": [1, 2', '{"a":{"b":[1,2]}}'),
        ('{"n": 123456789012345678901234567890, "a', '{"n":123456789012345678901234567890}'),
        ("", "{}"),
        ("{broken", "{}"),
        ("[1]", "{}"),
        ('{"a":' * 100_000, "{}"),
    ],
)
def test_arguments_are_returned_as_written_or_as_far_as_they_parse(arguments: str, told: str):
    assert encode(parse_arguments(arguments)).decode() == told


def test_a_very_large_number_in_arguments_is_kept(thinker: Running):
    arguments = '{"n": 123456789012345678901234567890}'
    call = f'<tool_call>\n{{"name": "time", "arguments": {arguments}}}\n</tool_call>'
    (block,) = (
        anthropic_client(thinker)
        .messages.create(**ASKED, messages=said(call), tools=CUSTOM)
        .content
    )
    assert block.input == {"n": 123456789012345678901234567890}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [CUSTOM[0], CUSTOM[0]]}, "tools"),
        ({"tools": CUSTOM, "tool_choice": "any"}, "tool_choice"),
        ({"tools": CUSTOM, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": CUSTOM, "tool_choice": {"type": "tool", "name": "nothing"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_wrong_tools_of_a_message_are_named(thinker: Running, body: dict[str, Any], named: str):
    assert named in message_error(thinker, ASKED | {"messages": said("hi")} | body)["message"]


def test_the_thinking_option(thinker: Running):
    def kinds(text: str, thinking: Any) -> list[str]:
        message = anthropic_client(thinker).messages.create(
            **ASKED, messages=said(text), thinking=thinking
        )
        return [block.type for block in message.content]

    assert kinds("hm</think>yes", {"type": "enabled", "budget_tokens": 1024}) == [
        "thinking",
        "text",
    ]
    assert kinds("yes", {"type": "disabled"}) == ["text"]
    assert kinds("hm</think>yes", {"type": "adaptive"}) == ["thinking", "text"]
