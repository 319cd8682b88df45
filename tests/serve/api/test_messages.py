"""/v1/messages through the anthropic package and raw requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from api_calls import (
    HELLO,
    MESSAGES,
    MESSAGES_BODY,
    HeldRequest,
    anthropic_client,
    message_error,
    message_events,
)
from serve_process import Running, poll


def create(server: Running, **options: Any):
    return anthropic_client(server).messages.create(**MESSAGES_BODY | options)


# ---------------------------------------------------------------- answers


def test_a_whole_message(server: Running):
    message = create(server)
    assert (
        message.type == "message" and message.role == "assistant" and message.id.startswith("msg_")
    )
    assert [(block.type, block.text) for block in message.content] == [("text", "hello there")]
    assert (
        message.stop_reason == "end_turn"
        and message.stop_sequence is None
        and message.model == "echo"
    )
    assert message.usage.output_tokens == len("hello there") + 1
    prompt = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    tokens = server.post("/tokenize", {"prompt": prompt}).json()["count"]
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == tokens


def test_a_streamed_message_is_the_whole_one(server: Running):
    with anthropic_client(server).messages.stream(**MESSAGES_BODY) as stream:
        events = list(stream)
        final = stream.get_final_message()
    kinds = [event.type for event in events if event.type not in ("text", "ping")]
    deltas = [event for event in events if event.type == "content_block_delta"]
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert len(deltas) > 1 and "".join(event.delta.text for event in deltas) == "hello there"
    whole = create(server)
    assert (
        final.content[0].text == "hello there"
        and final.stop_reason == whole.stop_reason == "end_turn"
    )
    assert final.usage.output_tokens == whole.usage.output_tokens
    start = message_events(server, {})[0]["message"]
    assert (
        start["content"] == []
        and start["stop_reason"] is None
        and start["usage"]["output_tokens"] <= 1
    )


def test_async_messages(server: Running):
    async def both() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key="none", max_retries=0
        ) as client:
            whole = await client.messages.create(**MESSAGES_BODY)
            async with client.messages.stream(**MESSAGES_BODY) as stream:
                return whole.content[0].text, "".join([text async for text in stream.text_stream])

    assert asyncio.run(both()) == ("hello there", "hello there")


def test_why_a_message_ends(server: Running):
    cut = create(server, max_tokens=4)
    assert cut.content[0].text == "hell" and cut.stop_reason == "max_tokens"
    stopped = create(server, stop_sequences=["nothing", " th"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        "hello",
        "stop_sequence",
        " th",
    )
    *_, delta, stop = message_events(server, {"stop_sequences": [" th"]})
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " th"} and stop == {
        "type": "message_stop"
    }
    assert delta["usage"]["output_tokens"] == len("hello th")


def test_more_tokens_than_the_context_has_left(server: Running):
    """max_tokens is required, so clients set it high: no error, but a stop reason of its own."""
    said = [{"role": "user", "content": "on and on " * 400}]
    answer = create(server, max_tokens=100_000, messages=said, extra_body={"ignore_eos": True})
    assert answer.stop_reason == "model_context_window_exceeded"
    assert (
        answer.usage.input_tokens
        + answer.usage.cache_read_input_tokens
        + answer.usage.output_tokens
        == 4096
    )
    assert create(server, max_tokens=100_000).stop_reason == "end_turn"


def test_an_answer_of_no_text_has_one_empty_block(server: Running):
    assert [
        block.text for block in create(server, extra_body={"logit_bias": {"257": 100}}).content
    ] == [""]


def test_sampling_fields(server: Running):
    said = {"messages": [{"role": "user", "content": "random"}], "max_tokens": 20}
    seeded = {"extra_body": {"seed": 7, "temperature": 1, "top_k": 5, "top_p": 0.9}}
    assert (
        create(server, **said, **seeded).content[0].text
        == create(server, **said, **seeded).content[0].text
    )
    assert create(server, **said).content[0].text != create(server, **said).content[0].text
    assert create(server, **said, extra_body={"temperature": 0}).content[0].text == "random"


# ---------------------------------------------------------------- what goes in


TURNS = [
    {"role": "user", "content": "first"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "said", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "text", "text": "4"}],
            },
            {"type": "text", "text": "last"},
        ],
    },
]


def test_blocks_translate_into_the_same_chat(server: Running):
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    chat = [
        {"role": "system", "content": "be brief\nand kind"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "said", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "t1"},
        {"role": "user", "content": "last"},
    ]
    system = [{"type": "text", "text": "be brief"}, {"type": "text", "text": "and kind"}]
    answer = create(server, messages=TURNS, system=system)
    assert answer.content[0].text == "last"
    asked = server.client.chat.completions.create(model="echo", messages=chat).usage.prompt_tokens
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == asked
    counted = anthropic_client(server).messages.count_tokens(
        model="echo", messages=TURNS, system=system
    )
    assert counted.input_tokens == asked


def test_a_last_assistant_turn_is_continued(server: Running):
    begun = [*HELLO, {"role": "assistant", "content": "he"}]
    plain = (
        anthropic_client(server).messages.count_tokens(model="echo", messages=HELLO).input_tokens
    )
    assert (
        anthropic_client(server).messages.count_tokens(model="echo", messages=begun).input_tokens
        == plain + 2
    )
    assert create(server, messages=begun).content[0].text


def test_an_answer_goes_back_in(server: Running):
    first = create(server)
    said = [*HELLO, first.to_param(), {"role": "user", "content": "two"}]
    assert create(server, messages=said).content[0].text == "two"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": 5}]}, "messages[0]"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                    }
                ]
            },
            "tool_use",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": 1}],
                    }
                ]
            },
            "input",
        ),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a"}] * 20_000,
                    }
                ]
            },
            "messages",
        ),
        ({"system": 5}, "system"),
        ({"system": [IMAGE]}, "system"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": "x"}, "stop_sequences"),
        ({"thinking": {"type": "deeply"}}, "thinking"),
        ({"metadata": {"user_id": 5}}, "metadata"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n"),
    ],
)
def test_wrong_fields_of_a_message_are_named(server: Running, body: dict[str, Any], named: str):
    error = message_error(server, MESSAGES_BODY | body)
    assert named in error["message"] and error["type"] == "invalid_request_error", error
    assert "role_of" not in error["message"]


def test_errors_have_the_envelope_of_their_path(server: Running):
    assert (
        message_error(server, MESSAGES_BODY | {"model": "gpt-9"}, 404)["type"] == "not_found_error"
    )
    assert (
        message_error(server, {}, 400, f"{MESSAGES}/count_tokens")["type"]
        == "invalid_request_error"
    )
    assert message_error(server, {}, 404, f"{MESSAGES}/batches")["type"] == "not_found_error"
    assert server.post("/v1/messages-of-mine", {}).json().keys() == {"error"}
    assert (
        server.get(MESSAGES).status_code == 405 and server.get(MESSAGES).json()["type"] == "error"
    )
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        create(server, max_tokens=-1)
    with pytest.raises(anthropic.NotFoundError):
        create(server, model="gpt-9")


def test_a_failed_step_fails_the_message(server: Running):
    said = [{"role": "user", "content": "FAIL THE STEP"}]
    assert message_error(server, MESSAGES_BODY | {"messages": said}, 500)["type"] == "api_error"
    (only,) = message_events(server, {"messages": said})
    assert only["type"] == "error" and "a failed step" in only["error"]["message"]
    with pytest.raises(anthropic.APIStatusError, match="a failed step"):
        list(
            anthropic_client(server).messages.create(
                **MESSAGES_BODY | {"messages": said}, stream=True
            )
        )


def test_leaving_a_message_ends_it(server: Running):
    with anthropic_client(server).messages.stream(
        **MESSAGES_BODY | {"max_tokens": 4000}, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream.text_stream))
    poll(lambda: server.metric("counterpoint_requests_running") == 0)


def test_a_full_queue_has_the_anthropic_envelope(
    own_server: Callable[..., Running], tmp_path: Path
):
    server = own_server(max_queued_requests=1).wait_ready()
    held = HeldRequest(server, tmp_path / "go")
    response = server.post(MESSAGES, MESSAGES_BODY | {"stream": True})
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["type"] == "overloaded_error" and response.headers["request-id"]
    assert held.release()
    assert anthropic_client(server).messages.create(**MESSAGES_BODY)._request_id


def test_the_key_may_be_an_x_api_key(own_server: Callable[..., Running]):
    server = own_server(api_key="swordfish-7").wait_ready()
    assert (
        anthropic_client(server, "swordfish-7").messages.create(**MESSAGES_BODY).content[0].text
        == "hello there"
    )
    bearer = anthropic.Anthropic(
        base_url=server.url, api_key=None, auth_token="swordfish-7", max_retries=0
    )
    assert bearer.messages.count_tokens(model="echo", messages=HELLO).input_tokens
    for key in ("swordfish", "", "swordfish-77"):
        response = server.post(MESSAGES, MESSAGES_BODY, headers={"x-api-key": key})
        assert (
            response.status_code == 401
            and response.json()["error"]["type"] == "authentication_error"
        )
    with pytest.raises(anthropic.AuthenticationError):
        anthropic_client(server).messages.create(**MESSAGES_BODY)
    assert (
        server.post("/v1/completions", {"prompt": "hi"}).json()["error"]["code"]
        == "invalid_api_key"
    )
    wrong = {"authorization": "Bearer wrong", "x-api-key": "swordfish-7"}
    assert server.post(MESSAGES, MESSAGES_BODY, headers=wrong).status_code == 401, (
        "one that is given wrongly is not made up for"
    )
