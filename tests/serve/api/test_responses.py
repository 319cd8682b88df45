"""/v1/responses through the openai package and raw requests."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from api_calls import RESPONSES, response_error, response_events
from serve_process import Running, poll

MODEL = "echo"


def respond(server: Running, said: Any = "hello there", **options: Any):
    return server.client.responses.create(model=MODEL, input=said, **options)


# ---------------------------------------------------------------- answers


def test_a_whole_response(server: Running):
    answer = respond(server)
    assert (
        answer.object == "response"
        and answer.id.startswith("resp_")
        and answer.status == "completed"
    )
    assert (
        answer.output_text == "hello there"
        and answer.error is None
        and answer.incomplete_details is None
    )
    (item,) = answer.output
    assert (
        item.type == "message"
        and item.role == "assistant"
        and item.status == "completed"
        and item.id
    )
    assert (
        answer.usage.output_tokens == len("hello there") + 1
        and answer.usage.output_tokens_details.reasoning_tokens == 0
    )
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.tools == [] and answer.tool_choice == "auto" and answer.parallel_tool_calls


def test_a_streamed_response_is_the_whole_one(server: Running):
    with server.client.responses.stream(model=MODEL, input="hello there") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert (
        len(deltas) > 1
        and "".join(event.delta for event in deltas) == "hello there" == final.output_text
    )
    assert (
        events[0].response.status == "in_progress"
        and events[0].response.output == []
        and events[0].response.usage is None
    )
    item_id = events[2].item.id
    assert {event.item_id for event in deltas} == {item_id} == {final.output[0].id}
    whole = respond(server)
    assert [o.model_dump(exclude={"id"}) for o in whole.output] == [
        o.model_dump(exclude={"id", "content"})
        | {"content": [c.model_dump(exclude={"parsed"}) for c in o.content]}
        for o in final.output
    ]
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_async_whole_and_streamed(server: Running):
    async def both() -> tuple[str, str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            whole = await client.responses.create(model=MODEL, input="hello there")
            async with client.responses.stream(model=MODEL, input="hello there") as stream:
                return whole.output_text, (await stream.get_final_response()).output_text

    assert asyncio.run(both()) == ("hello there", "hello there")


def test_an_answer_that_is_cut_is_incomplete(server: Running):
    answer = respond(server, max_output_tokens=4)
    assert (
        answer.output_text == "hell"
        and answer.status == "incomplete"
        and answer.usage.output_tokens == 4
    )
    assert (
        answer.incomplete_details.reason == "max_output_tokens"
        and answer.output[0].status == "incomplete"
    )
    last = response_events(server, {"input": "hello there", "max_output_tokens": 4})[-1]
    assert last["type"] == "response.incomplete" and last["response"]["incomplete_details"] == {
        "reason": "max_output_tokens"
    }
    assert (
        last["response"]["completed_at"]
        and last["response"]["output"][0]["content"][0]["text"] == "hell"
    )


def test_an_answer_of_no_text_has_one_empty_message(server: Running):
    body = {"input": "hello there", "logit_bias": {"257": 100}}
    whole = server.post(RESPONSES, body).json()
    last = response_events(server, body)[-1]["response"]
    for answer in (whole, last):
        assert [part["text"] for item in answer["output"] for part in item["content"]] == [""]


def test_logprobs(server: Running):
    answer = respond(server, "hé", include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = answer.output[0].content[0].logprobs
    assert bytes(b for entry in logprobs[:3] for b in entry.bytes).decode() == "hé"
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    events = response_events(server, {"input": "hé", "top_logprobs": 2})
    streamed = [
        entry
        for event in events
        if event["type"].endswith("text.delta")
        for entry in event["logprobs"]
    ]
    assert (
        streamed
        == [entry.model_dump() for entry in logprobs]
        == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    )


def test_stops_and_seeds(server: Running):
    assert respond(server, "one two three", extra_body={"stop": " two"}).output_text == "one"
    seeded = [
        respond(server, "random", max_output_tokens=20, extra_body={"seed": 5}).output_text
        for _ in range(2)
    ]
    unseeded = [respond(server, "random", max_output_tokens=20).output_text for _ in range(2)]
    assert seeded[0] == seeded[1] and unseeded[0] != unseeded[1]


def test_a_response_echoes_its_parameters(server: Running):
    sampling = {"temperature": 0.5, "top_p": 0.25}
    answer = respond(
        server,
        metadata={"a": "b"},
        user="u",
        instructions="be brief",
        store=True,
        truncation="disabled",
        **sampling,
    )
    assert (
        answer.metadata == {"a": "b"}
        and answer.user == "u"
        and (answer.temperature, answer.top_p) == (0.5, 0.25)
    )
    assert (
        answer.instructions == "be brief"
        and answer.text.format.type == "text"
        and answer.background is False
    )
    assert answer.model_extra["store"] is False, "nothing is stored, and that is said"


# ---------------------------------------------------------------- what goes in


ITEMS = [
    {"role": "user", "content": "first"},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "said", "annotations": [], "logprobs": []}],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "f",
        "arguments": '{"a":1}',
        "status": "completed",
    },
    {"type": "function_call_output", "call_id": "c1", "output": "4"},
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "last"}, {"type": "input_text", "text": "turn"}],
    },
]


def test_items_translate_into_the_same_chat(server: Running):
    """The prompt has as many tokens as that of the same turns as a chat."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "said", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "last"}, {"type": "text", "text": "turn"}],
        },
    ]
    answer = respond(server, ITEMS, instructions="be brief")
    assert answer.output_text == "last\nturn"
    assert (
        answer.usage.input_tokens
        == server.client.chat.completions.create(model=MODEL, messages=chat).usage.prompt_tokens
    )


def test_an_answer_goes_back_in(server: Running):
    first = respond(server, "one")
    said = [
        {"role": "user", "content": "one"},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": "two"},
    ]
    assert respond(server, said).output_text == "two"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"type": 5}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}]},
            "input",
        ),
        ({"input": [{"type": "function_call_output", "output": "1"}]}, "input"),
        ({"input": "x" * 200_000}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "all"}, "include"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"store": "no"}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"effort": "huge"}}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"text": {"format": {"type": "sonnet"}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"n": 2}, "n"),
    ],
)
def test_wrong_fields_of_a_response_are_named(server: Running, body: dict[str, Any], param: str):
    error = response_error(server, body)
    assert error["param"] == param and error["type"] == "invalid_request_error", error
    assert "kind_of" not in error["message"]


def test_fields_that_need_storage_say_what_to_do(server: Running):
    assert (
        "send the earlier turns in input"
        in response_error(server, {"previous_response_id": "resp_1"})["message"]
    )
    with pytest.raises(openai.BadRequestError, match="earlier turns"):
        respond(server, previous_response_id="resp_1")
    for way in ("get", "delete"):
        assert server.http.request(way, f"{server.url}{RESPONSES}/resp_1").status_code in (404, 405)
    assert response_error(server, {"model": "gpt-9"}, 404)["code"] == "model_not_found"


# ---------------------------------------------------------------- ends


def test_a_failed_step_fails_the_response(server: Running):
    assert "a failed step" in response_error(server, {"input": "FAIL THE STEP"}, 500)["message"]
    *before, last = response_events(server, {"input": "FAIL THE STEP"})
    assert [event["type"] for event in before] == ["response.created", "response.in_progress"]
    assert (
        last["type"] == "response.failed"
        and last["response"]["status"] == "failed"
        and last["sequence_number"] == 2
    )
    assert (
        last["response"]["error"]["code"] == "server_error"
        and "a failed step" in last["response"]["error"]["message"]
    )


def test_leaving_a_response_ends_it(server: Running):
    stream = server.client.responses.create(
        model=MODEL, input="on and on ", stream=True, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).type == "response.created"
    poll(lambda: server.metric("counterpoint_requests_running") == 1)
    stream.close()
    poll(lambda: server.metric("counterpoint_requests_running") == 0)
