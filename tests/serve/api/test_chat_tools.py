"""Tools and reasoning in chats, through the openai package and a socket.

The echoing engine repeats what it is sent, so an answer can be anything. A grammar makes SmolLM2
call.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from api_calls import CHAT, openai_error
from rich.console import Console
from serve_process import Running, poll
from tool_cases import CALLS, ONE, TOOLS, TWO

from counterpoint.builder.system_builder import cache_folder
from counterpoint.serve.offline.chat import show
from counterpoint.serve.output_parsing.output_parser import ContentDelta, ReasoningDelta
from counterpoint.spec.source import find_pulled

WRONG_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(server: Running, said: str, **options: Any) -> Any:
    body = {"messages": [{"role": "user", "content": said}], **options}
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks_of(server: Running, said: str, **options: Any) -> list[Any]:
    messages = [{"role": "user", "content": said}]
    return list(
        server.client.chat.completions.create(
            model="echo", messages=messages, stream=True, **options
        )
    )  # type: ignore[arg-type]


def put_together(chunks: list[Any]) -> tuple[dict[str, Any], list[dict[str, Any]], str | None]:
    """(text by field, calls, finish reason), joined from chunks as a client would."""
    text: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    finish = None
    for chunk in chunks:
        for choice in chunk.choices:
            assert finish is None, "something follows the finish reason"
            finish = choice.finish_reason
            delta = choice.delta.model_dump()
            for key in text:
                text[key] += delta.get(key) or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(calls):
                    assert call["id"] and call["type"] == "function" and call["function"]["name"]
                    calls.append(
                        {"id": call["id"], "name": call["function"]["name"], "arguments": ""}
                    )
                else:
                    assert (
                        call["index"] == len(calls) - 1
                        and not call["id"]
                        and not call["function"]["name"]
                    )
                calls[-1]["arguments"] += call["function"]["arguments"]
    return text, calls, finish


def pairs(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["name"], call["arguments"]) for call in calls]


# ---------------------------------------------------------------- calls


def test_whole_calls(thinker: Running):
    answer = thinker.client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": f"Let me look.\n{TWO}"}],
        tools=TOOLS,  # type: ignore[arg-type]
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    calls = choice.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    assert len({call.id for call in calls}) == 2 and all(
        call.id.startswith("call_") for call in calls
    )
    assert ask(thinker, ONE, tools=TOOLS)["choices"][0]["message"]["content"] is None


def test_streamed_calls_have_an_index_and_an_id_each(thinker: Running):
    """Case 15."""
    text, calls, finish = put_together(chunks_of(thinker, f"Let me look.\n{TWO}", tools=TOOLS))
    assert pairs(calls) == CALLS and text["content"] == "Let me look." and finish == "tool_calls"
    assert len({call["id"] for call in calls}) == 2


def test_streamed_calls_of_several_choices(thinker: Running):
    chunks = chunks_of(thinker, TWO, tools=TOOLS, n=2)
    ids = set()
    for choice in (0, 1):
        mine = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == choice]
        _, calls, finish = put_together(mine)
        assert pairs(calls) == CALLS and finish == "tool_calls"
        ids |= {call["id"] for call in calls}
    assert len(ids) == 4


@pytest.mark.parametrize("tokens", [1, 8, *range(5, len(TWO), 7), len(TWO), len(TWO) + 1])
def test_a_call_that_max_tokens_cuts(thinker: Running, tokens: int):
    """Case 16, at many places."""
    whole = ask(thinker, TWO, tools=TOOLS, max_tokens=tokens)["choices"][0]
    text, calls, finish = put_together(chunks_of(thinker, TWO, tools=TOOLS, max_tokens=tokens))
    assert finish == whole["finish_reason"] == ("length" if tokens <= len(TWO) else "tool_calls")
    assert (whole["message"]["content"] or "") == text["content"]
    assert [
        (c["function"]["name"], c["function"]["arguments"])
        for c in whole["message"].get("tool_calls", [])
    ] == pairs(calls)
    for (name, arguments), (full_name, full_arguments) in zip(pairs(calls), CALLS, strict=False):
        assert name == full_name and full_arguments.startswith(arguments)


def test_parallel_tool_calls_false_allows_one_call(thinker: Running):
    before = thinker.metric("counterpoint_requests_finished_total", finished_reason="stop")
    text, calls, finish = put_together(
        chunks_of(thinker, TWO + " and more", tools=TOOLS, parallel_tool_calls=False)
    )
    assert pairs(calls) == CALLS[:1] and finish == "tool_calls" and not text["content"]
    poll(lambda: thinker.metric("counterpoint_requests_running") == 0)
    poll(
        lambda: (
            thinker.metric("counterpoint_requests_finished_total", finished_reason="stop")
            == before + 1
        )
    )


def test_tool_choice_none_gives_no_call(thinker: Running):
    for options in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {}):
        choice = ask(thinker, TWO, **options)["choices"][0]
        assert (
            choice["message"]["content"] == TWO
            and "tool_calls" not in choice["message"]
            and choice["finish_reason"] == "stop"
        )


def test_a_call_of_an_unknown_tool_is_content(thinker: Running):
    choice = ask(thinker, TWO, tools=TOOLS[:1])["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["message"]["content"] == TWO.removeprefix(ONE + "\n")


def test_stop_strings_count_in_content_alone(thinker: Running):
    choice = ask(thinker, f"Now look. {ONE}", tools=TOOLS, stop="Paris")["choices"][0]
    assert (
        choice["finish_reason"] == "tool_calls"
        and choice["message"]["tool_calls"][0]["function"]["arguments"] == CALLS[0][1]
    )
    choice = ask(thinker, f"Now Paris. {ONE}", tools=TOOLS, stop="Paris")["choices"][0]
    assert (
        choice["finish_reason"] == "stop"
        and choice["message"]["content"] == "Now "
        and choice["stop_reason"] == "Paris"
    )


def test_logprobs_cover_all_tokens(thinker: Running):
    said = f"<think>a</think>b{ONE}"
    whole = ask(thinker, said, tools=TOOLS, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in whole).decode() == said
    chunks = chunks_of(thinker, said, tools=TOOLS, logprobs=True)
    entries = [
        entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content
    ]
    assert [entry.bytes for entry in entries] == [entry["bytes"] for entry in whole]


def test_a_template_without_tools_gets_them_as_text(server: Running):
    """The system turn lists the tools, calls and results are text; calls are parsed as ever."""
    answer = ask(server, TWO, tools=TOOLS)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    prompt = prompt_of(server, HISTORY, tools=TOOLS)
    assert prompt.index("Be brief.") < prompt.index('"name":"weather"') < prompt.index("How warm?")
    assert (
        '<tool_call>\n{"name": "weather", "arguments": {"city":"Paris"}}\n</tool_call><|im_end|>'
        in prompt
    )
    assert (
        "<|im_start|>user\n<tool_response>\n21\n</tool_response>\n"
        "<tool_response>\n22\n</tool_response><|im_end|>" in prompt
    )
    answer = server.post(CHAT, {"messages": HISTORY, "max_tokens": 12})
    assert answer.json()["choices"][0]["message"]["content"] == "<tool_respon", (
        "the last turn is the result"
    )


# ---------------------------------------------------------------- what the model is shown

HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How warm?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I look.",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "21"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "22"}]},
]


def prompt_of(server: Running, messages: list[dict[str, Any]], **options: Any) -> str:
    tokens = server.post("/tokenize", {"messages": messages, **options}).json()["tokens"]
    return server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_templates_get_tools_calls_and_results(thinker: Running):
    prompt = prompt_of(thinker, HISTORY, tools=TOOLS)
    shown = json.loads(prompt.partition("system\n")[2].partition(" as <tool_call>")[0])
    assert shown == TOOLS
    assert (
        "<think>I look.</think><tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    )
    assert "<|im_start|>tool\n21<|im_end|>" in prompt and "<|im_start|>tool\n22<|im_end|>" in prompt


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("", "{}"), ({"a": 1}, '{"a": 1}'), (None, "{}"), ('{"a": ', r'"{\"a\": "'), ("7", '"7"')],
)
def test_arguments_that_the_model_got_wrong_may_be_sent_back(
    thinker: Running, arguments: Any, shown: str
):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    prompt = prompt_of(thinker, [HISTORY[1], {"role": "assistant", "tool_calls": [call]}])
    assert f'"arguments": {shown}}}' in prompt


def test_tools_that_must_not_be_called_are_not_shown(thinker: Running):
    with_tools = ask(thinker, "hi", tools=TOOLS)["usage"]["prompt_tokens"]
    without = ask(thinker, "hi", tools=TOOLS, tool_choice="none")["usage"]["prompt_tokens"]
    assert without == ask(thinker, "hi")["usage"]["prompt_tokens"] < with_tools


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": "weather"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nothing"}}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [WRONG_SCHEMA], "tool_choice": "required"}, "tools"),
    ],
)
def test_wrong_tools_are_named(thinker: Running, options: dict[str, Any], param: str):
    error = openai_error(thinker.post(CHAT, {"messages": HISTORY[:2], **options}))
    assert error["param"] == param and param in error["message"]


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000])
def test_numbers_in_tools_are_finite(thinker: Running, number: str):
    function = f'{{"name": "f", "parameters": {{"maximum": {number}}}}}'
    tool = f'{{"type": "function", "function": {function}}}'
    openai_error(
        thinker.post(
            CHAT,
            f'{{"messages": [{{"role": "user", "content": "hi"}}], "tools": [{tool}]}}'.encode(),
        )
    )


@pytest.mark.parametrize(
    "calls",
    [
        [{"id": "a", "type": "function"}],
        [{"id": "a", "type": "function", "function": {"name": 7, "arguments": "{}"}}],
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": [1]}}],
        "f",
        [7],
    ],
)
def test_wrong_calls_in_messages_are_named(thinker: Running, calls: Any):
    error = openai_error(
        thinker.post(CHAT, {"messages": [*HISTORY[:2], {"role": "assistant", "tool_calls": calls}]})
    )
    assert error["param"] == "messages" and "tool_calls" in error["message"]


# ---------------------------------------------------------------- reasoning

THOUGHT = "<think>\nIs 9.8 more?\n</think>\n\nIt is 9.8."


def test_reasoning_is_separated(thinker: Running):
    answer = ask(thinker, THOUGHT)
    message = answer["choices"][0]["message"]
    assert (
        message["reasoning_content"] == message["reasoning"] == "Is 9.8 more?"
        and message["content"] == "It is 9.8."
    )
    assert answer["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": len("<think>\nIs 9.8 more?\n</think>") - 6
    }
    chunks = chunks_of(thinker, THOUGHT, stream_options={"include_usage": True})
    text, _, finish = put_together(chunks)
    assert text == {key: message[key] for key in text} and finish == "stop"
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0


def test_a_stop_string_in_the_reasoning_ends_nothing(thinker: Running):
    """Case 3."""
    choice = ask(thinker, THOUGHT, stop="9.8")["choices"][0]
    assert (
        choice["message"]["reasoning"] == "Is 9.8 more?"
        and choice["message"]["content"] == "It is "
    )
    text, _, finish = put_together(chunks_of(thinker, THOUGHT, stop="9.8"))
    assert text["reasoning"] == "Is 9.8 more?" and text["content"] == "It is " and finish == "stop"
    asked_for = ask(thinker, THOUGHT, stop="9.8", separate_reasoning=False)["choices"][0]
    assert asked_for["message"]["content"] == "<think>\nIs " and asked_for["stop_reason"] == "9.8"


def test_reasoning_that_the_prompt_began(thinker: Running):
    said = "hm\n</think>\n\nyes"
    message = ask(thinker, said, chat_template_kwargs={"enable_thinking": True})["choices"][0][
        "message"
    ]
    assert (message["reasoning"], message["content"]) == ("hm", "yes")
    message = ask(thinker, "yes", chat_template_kwargs={"enable_thinking": False})["choices"][0][
        "message"
    ]
    assert message["content"] == "yes" and "reasoning" not in message
    cut = ask(thinker, said, chat_template_kwargs={"enable_thinking": True}, max_tokens=2)[
        "choices"
    ][0]
    assert (
        cut["message"]["reasoning"] == "hm"
        and cut["message"]["content"] is None
        and cut["finish_reason"] == "length"
    )


def test_reasoning_continues_the_final_message(thinker: Running):
    messages = [
        {"role": "user", "content": "a</think>b"},
        {"role": "assistant", "content": "<think>so far"},
    ]
    message = thinker.post(CHAT, {"messages": messages, "continue_final_message": True}).json()[
        "choices"
    ][0]["message"]
    assert (message["reasoning"], message["content"]) == ("a", "b")


def test_reasoning_may_be_left_out(thinker: Running):
    answer = ask(thinker, THOUGHT, include_reasoning=False)
    assert (
        "reasoning" not in answer["choices"][0]["message"]
        and answer["choices"][0]["message"]["content"] == "It is 9.8."
    )
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    text, _, _ = put_together(chunks_of(thinker, THOUGHT, extra_body={"include_reasoning": False}))
    assert text == {"content": "It is 9.8.", "reasoning": "", "reasoning_content": ""}


def test_markers_in_user_messages_open_nothing(thinker: Running):
    message = ask(thinker, "<think>", chat_template_kwargs={"enable_thinking": False})["choices"][
        0
    ]["message"]
    assert message["content"] is None or "<think>" not in message["content"]
    message = ask(thinker, "plain", chat_template_kwargs={"note": "<think>"})["choices"][0][
        "message"
    ]
    assert message["content"] == "plain"


def test_reasoning_is_shown_in_the_terminal_and_not_sent_back(thinker: Running):
    said = "<think>hm, hm</think>one"
    done = subprocess.run(
        [sys.executable, "-m", "counterpoint", "chat", "--url", thinker.url],
        input=f"{said}\n/exit\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "hm, hm\n\none\n" in done.stdout, done.stderr
    console = Console(quiet=True)
    assert (
        show(
            iter(
                [
                    ReasoningDelta("hm"),
                    ReasoningDelta(", hm"),
                    ContentDelta("one"),
                    ContentDelta("!"),
                ]
            ),
            console,
        )
        == "one!"
    )


# ---------------------------------------------------------------- a model that is made to call


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if not find_pulled("smollm2", cache_folder()).exists():
        pytest.skip("smollm2 is not here: counterpoint pull smollm2")
    command = [
        sys.executable,
        "-m",
        "counterpoint",
        "serve",
        "smollm2",
        "--port",
        "0",
        "--max-context-tokens",
        "2048",
    ]
    running = Running(tmp_path_factory.mktemp("smollm2") / "log", command=command)
    try:
        yield running.wait_ready()
        assert running.stop() == 0
    finally:
        if running.process.poll() is None:
            running.process.kill()


WEATHER = [{"role": "user", "content": "What will the weather be in Lima for 3 days?"}]


def call(server: Running, **options: Any) -> Any:
    return server.client.chat.completions.create(
        model="smollm2",
        messages=WEATHER,  # type: ignore[arg-type]
        tools=TOOLS,
        temperature=0,
        **options,
    )


def fits(arguments: str) -> bool:
    value = json.loads(arguments)
    return (
        value.keys() == {"city", "days"}
        and isinstance(value["city"], str)
        and 1 <= value["days"] <= 9
    )


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_model_that_must_call_does(smollm2: Running, choice: Any):
    whole = call(smollm2, tool_choice=choice, parallel_tool_calls=False).choices[0]
    (called,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and not whole.message.content
    assert called.function.name == "weather" or choice == "required"
    assert fits(called.function.arguments) or called.function.name == "time"
    text, calls, finish = put_together(
        list(call(smollm2, tool_choice=choice, parallel_tool_calls=False, stream=True))
    )
    assert pairs(calls) == [(called.function.name, called.function.arguments)]
    assert finish == "tool_calls" and not text["content"]


def test_several_calls_of_a_model_that_must(smollm2: Running):
    choice = call(smollm2, tool_choice="required", max_tokens=150).choices[0]
    assert choice.message.tool_calls and choice.finish_reason in ("tool_calls", "length")
    for called in choice.message.tool_calls[: None if choice.finish_reason == "tool_calls" else -1]:
        assert called.function.name == "time" or fits(called.function.arguments)


def test_a_forced_call_that_max_tokens_cuts(smollm2: Running):
    """Case 16, its probe."""
    for stream in (False, True):
        answer = call(smollm2, tool_choice="required", max_tokens=8, stream=stream)
        finish = put_together(list(answer))[2] if stream else answer.choices[0].finish_reason
        assert finish == "length"


def test_a_model_may_call_or_answer_by_a_schema(smollm2: Running):
    schema = {
        "name": "answer",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    }
    options = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 60}
    choice = call(smollm2, **options).choices[0]
    assert choice.message.tool_calls or choice.message.content.lstrip().startswith("{")
    assert call(smollm2, tool_choice="required", **options).choices[0].message.tool_calls, (
        "a call that must be goes first"
    )
