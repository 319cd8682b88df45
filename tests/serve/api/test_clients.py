"""Client libraries, unmodified, against a real server over a socket."""

from __future__ import annotations

import asyncio
import functools
import operator
import os
from typing import Any

import openai
import pytest
from serve_process import Running, poll

os.environ.setdefault(
    "LITELLM_LOCAL_MODEL_COST_MAP", "True"
)  # else it asks the network for prices when it is imported

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:pydantic", "ignore::DeprecationWarning:litellm"
)
SAID = "now say this: Grüße, 漢字 and 🎼"
HELLO = [{"role": "user", "content": SAID}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
CALL = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


# ---------------------------------------------------------------- openai, asynchronous


def test_the_async_client(server: Running):
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30
        ) as client:
            whole = client.chat.completions.create(model="echo", messages=HELLO)
            stream = await client.chat.completions.create(model="echo", messages=HELLO, stream=True)
            text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
            completion = client.completions.create(
                model="echo", prompt=["abc", "xyz"], max_tokens=3
            )
            models = [model.id async for model in await client.models.list()]
            return [
                (await whole).choices[0].message.content,
                text,
                (await completion).choices,
                models,
            ]

    content, text, choices, models = asyncio.run(ask())
    assert content == text == SAID and models == ["echo"]
    assert [choice.text for choice in choices] == ["abc", "xyz"]


def test_async_requests_at_once_get_their_own_answers(server: Running):
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:

            async def one(number: int) -> str | None:
                said = [{"role": "user", "content": f"number {number}"}]
                answer = await client.chat.completions.create(model="echo", messages=said)  # type: ignore[arg-type]
                return answer.choices[0].message.content

            return await asyncio.gather(*(one(i) for i in range(50)))

    assert asyncio.run(ask()) == [f"number {i}" for i in range(50)]


def test_a_streams_context_left_early_ends_the_request(server: Running):
    async def ask() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30
        ) as client:
            stream = await client.completions.create(
                model="echo",
                prompt="on and on ",
                max_tokens=4000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async with stream:
                return (await anext(aiter(stream))).choices[0].text

    before = server.metric("counterpoint_requests_finished_total", reason="abort")
    assert asyncio.run(ask())
    poll(lambda: server.metric("counterpoint_requests_finished_total", reason="abort") > before)


def test_the_clients_own_errors(server: Running):
    with pytest.raises(openai.BadRequestError) as wrong:
        server.client.chat.completions.create(model="echo", messages=HELLO, temperature=9)
    assert wrong.value.param == "temperature" and "temperature" in wrong.value.message
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(model="another", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("another")


# ---------------------------------------------------------------- langchain


@pytest.fixture(scope="module")
def langchain(server: Running) -> Any:
    module = pytest.importorskip("langchain_openai")
    return module.ChatOpenAI(
        model="echo", base_url=f"{server.url}/v1", api_key="none", max_retries=0, stream_usage=True
    )


def test_langchain_whole(langchain: Any):
    answer = langchain.invoke([("system", "be brief"), ("human", SAID)])
    assert answer.content == SAID and answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == len(SAID.encode()) + 1
    assert (
        answer.usage_metadata["total_tokens"]
        == answer.usage_metadata["input_tokens"] + answer.usage_metadata["output_tokens"]
    )


def test_langchain_streamed(langchain: Any):
    chunks = list(langchain.stream(SAID))
    assert "".join(chunk.content for chunk in chunks) == SAID
    assert [c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata] == [
        len(SAID.encode()) + 1
    ]
    assert any(chunk.content for chunk in chunks[:2]), "it streams"


def test_langchain_async_and_batched(langchain: Any):
    async def ask() -> tuple[list[str], str]:
        answers = await langchain.abatch([f"number {i}" for i in range(8)])
        return [answer.content for answer in answers], "".join(
            [chunk.content async for chunk in langchain.astream(SAID)]
        )

    assert asyncio.run(ask()) == ([f"number {i}" for i in range(8)], SAID)


def test_langchain_options(langchain: Any):
    assert langchain.bind(stop=["漢"]).invoke(SAID).content == SAID.partition("漢")[0]
    assert langchain.bind(max_tokens=3).invoke(SAID).response_metadata["finish_reason"] == "length"
    told = (
        langchain.bind(logprobs=True, top_logprobs=2)
        .invoke("ab")
        .response_metadata["logprobs"]["content"]
    )
    assert [entry["token"] for entry in told][:2] == ["a", "b"] and len(
        told[0]["top_logprobs"]
    ) == 2


def test_langchain_tools(langchain: Any):
    """Tools are bound, called, and their results sent back."""
    messages = pytest.importorskip("langchain_core.messages")
    model = langchain.bind_tools([WEATHER])
    answer = model.invoke(CALL)
    (call,) = answer.tool_calls
    assert (
        (call["name"], call["args"]) == ("weather", {"city": "Paris"})
        and call["id"]
        and answer.content == "I look."
    )
    streamed = functools.reduce(operator.add, model.stream(CALL))
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("weather", {"city": "Paris"})]
    result = messages.ToolMessage("21 degrees", tool_call_id=call["id"])
    assert (
        model.invoke([("human", CALL), answer, result]).content
        == "<tool_response>\n21 degrees\n</tool_response>"
    )
    assert langchain.bind_tools([WEATHER], tool_choice="weather").invoke(CALL).tool_calls


# ---------------------------------------------------------------- litellm


@pytest.fixture(scope="module")
def litellm(server: Running) -> Any:
    module = pytest.importorskip("litellm")
    module.suppress_debug_info = True
    return module


def asked(server: Running, **options: Any) -> dict[str, Any]:
    """The arguments of each call; "hosted_vllm" is the provider's name for servers like this."""
    return {
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "num_retries": 0,
        "timeout": 30,
    } | options


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_whole_and_streamed(litellm: Any, server: Running, provider: str):
    options = asked(server, model=f"{provider}/echo", messages=HELLO)
    whole = litellm.completion(**options)
    assert whole.choices[0].message.content == SAID and whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == len(SAID.encode()) + 1
    chunks = list(
        litellm.completion(**options, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SAID
    assert [
        c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason
    ] == ["stop"]
    assert [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)] == [
        len(SAID.encode()) + 1
    ]


def test_litellm_tools(litellm: Any, server: Running):
    options = asked(
        server,
        model="hosted_vllm/echo",
        messages=[{"role": "user", "content": CALL}],
        tools=[WEATHER],
    )
    (call,) = litellm.completion(**options).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    chunks = list(litellm.completion(**options, stream=True))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')


def test_litellm_text_completion(litellm: Any, server: Running):
    answer = litellm.text_completion(
        **asked(server, model="text-completion-openai/echo", prompt="abc", max_tokens=3)
    )
    assert answer.choices[0].text == "abc"


def test_litellm_async_and_its_errors(litellm: Any, server: Running):
    async def ask() -> str:
        return (
            (await litellm.acompletion(**asked(server, model="openai/echo", messages=HELLO)))
            .choices[0]
            .message.content
        )

    assert asyncio.run(ask()) == SAID
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked(server, model="openai/echo", messages=HELLO, temperature=9))
