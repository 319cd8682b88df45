"""Chat and completions through the openai package and raw requests, against a server process."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import openai
import pytest
from api_calls import CHAT, COMPLETIONS, HELLO, openai_error
from serve_process import Running, poll

MODEL = "echo"


def chat(server: Running, said: str = "hello there", **options: Any):
    return server.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": said}], **options
    )


def complete(server: Running, prompt: Any = "hello", **options: Any):
    return server.client.completions.create(model=MODEL, prompt=prompt, **options)


def streamed(server: Running, said: str, **options: Any) -> tuple[str, list[Any]]:
    chunks = list(chat(server, said, stream=True, **options))
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


# ---------------------------------------------------------------- answers


def test_a_whole_chat(server: Running):
    answer = chat(server)
    assert (
        answer.object == "chat.completion"
        and answer.id.startswith("chatcmpl-")
        and answer.model == MODEL
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == "hello there"
    assert choice.finish_reason == "stop" and choice.logprobs is None
    assert answer.usage.completion_tokens == len("hello there") + 1, (
        "the token that ended it was sampled too"
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat(server: Running):
    text, chunks = streamed(server, "hello there", stream_options={"include_usage": True})
    assert text == "hello there"
    assert chunks[0].choices[0].delta.role == "assistant" and not chunks[0].choices[0].delta.content
    assert all(c.choices[0].delta.role is None for c in chunks[1:-1])
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [
        "stop"
    ]
    assert chunks[-2].choices[0].finish_reason == "stop" and not chunks[-2].choices[0].delta.content
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len("hello there") + 1
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks[:-1])


def test_a_stream_ends_with_done_and_has_no_usage_unasked(server: Running):
    events = server.events({"prompt": "abc", "max_tokens": 3})
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    assert not any(event.get("usage") for event in events[:-1])


def test_usage_in_every_chunk(server: Running):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events({"prompt": "é漢", "max_tokens": 5, "stream_options": options})[:-1]
    counts = [e["usage"]["completion_tokens"] for e in events if e["choices"]]
    assert counts == sorted(counts) and set(counts) == {1, 2, 3, 4, 5}, (
        "a chunk for each token, even inside a character"
    )
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 5


def test_one_token_is_one_content_chunk(server: Running):
    events = server.events(
        {"prompt": "x" * 1000, "max_tokens": 1, "stream_options": {"include_usage": True}}
    )[:-1]
    assert [c["text"] for e in events for c in e["choices"]] == ["x", ""]
    assert (
        events[-1]["usage"]["completion_tokens"] == 1
        and events[-1]["usage"]["prompt_tokens"] == 1000
    )


@pytest.mark.parametrize("said", ["héllo 漢字 😀", "�� real replacement", "👩‍👩‍👧‍👦"])
def test_streams_keep_characters_whole(server: Running, said: str):
    text, chunks = streamed(server, said)
    assert text == said == chat(server, said).choices[0].message.content
    if "�" not in said:
        assert not any("�" in (c.choices[0].delta.content or "") for c in chunks)


def test_length_ends_an_answer(server: Running):
    answer = chat(server, max_tokens=4)
    assert (
        answer.choices[0].message.content == "hell" and answer.choices[0].finish_reason == "length"
    )
    assert answer.usage.completion_tokens == 4
    assert chat(server, max_completion_tokens=2).choices[0].message.content == "he"


def test_completions_have_sixteen_tokens_unless_told(server: Running):
    assert complete(server, "x" * 30).choices[0].text == "x" * 16
    for body in (
        {"prompt": "x" * 30, "max_tokens": None},
        {"prompt": "x" * 30, "max_tokens": None, "stream": True},
    ):
        assert server.post(COMPLETIONS, body).status_code == 200


def test_every_shape_of_prompt(server: Running):
    assert complete(server, [104, 105], max_tokens=2).choices[0].text == "hi"
    both = complete(server, ["ab", "cd"], max_tokens=2)
    assert [(c.index, c.text) for c in both.choices] == [(0, "ab"), (1, "cd")]
    both = complete(server, [[104, 105], [106]], max_tokens=2, n=2)
    assert [(c.index, c.text[:1]) for c in both.choices] == [(0, "h"), (1, "h"), (2, "j"), (3, "j")]
    assert both.usage.prompt_tokens == 3, "a prompt counts once, however many answers it has"
    assert both.usage.completion_tokens == sum(
        len(c.text) + (c.finish_reason == "stop") for c in both.choices
    )


def test_no_character_of_an_answer_ends_a_line_of_a_stream(server: Running):
    """Some clients split at every line end of Unicode, not only at line feeds."""
    prompt = "one\u2028two\u2029three\x85four\x0bfive"
    events = server.events({"prompt": prompt, "echo": True, "max_tokens": 1})[:-1]
    assert "".join(event["choices"][0]["text"] for event in events).startswith(prompt)


def test_echo(server: Running):
    assert complete(server, "hello", echo=True, max_tokens=2).choices[0].text == "hellohe"
    assert complete(server, [104, 105], echo=True, max_tokens=0).choices[0].text == "hi"
    events = server.events({"prompt": "hello", "echo": True, "max_tokens": 2})[:-1]
    assert "".join(c["text"] for e in events for c in e["choices"]) == "hellohe"


def test_no_tokens_asked_for(server: Running):
    answer = complete(server, "hello", max_tokens=0)
    assert answer.choices[0].text == "" and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("stop", "left", "by"),
    [
        ("lo th", "hel", "lo th"),
        (["zzz", "lo th"], "hel", "lo th"),
        (["hello there", "lo th", "ello t"], "h", "ello t"),
    ],
)
def test_stop_strings(server: Running, stop, left: str, by: str):
    whole = chat(server, stop=stop)
    text, chunks = streamed(server, "hello there", stop=stop)
    assert whole.choices[0].message.content == text == left
    assert (
        whole.choices[0].finish_reason == "stop" and chunks[-1].choices[0].finish_reason == "stop"
    )
    assert whole.choices[0].model_extra["stop_reason"] == by


def test_an_incomplete_stop_string_is_released(server: Running):
    text, _ = streamed(server, "alpha beta", stop=["beta gamma"])
    assert text == "alpha beta"


def test_stop_token_ids_and_ignore_eos(server: Running):
    answer = chat(server, extra_body={"stop_token_ids": [ord("o")]})
    assert answer.choices[0].message.content == "hell" and answer.choices[0].model_extra[
        "stop_reason"
    ] == ord("o")
    answer = complete(server, "ab", max_tokens=7, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == "ab.ab.a" and answer.choices[0].finish_reason == "length"


def test_a_stopped_request_leaves_the_engine(server: Running):
    before = server.metric("counterpoint_requests_finished_total", finished_reason="stop")
    chat(server, "stop HERE and not at the end" * 20, stop="HERE")
    poll(lambda: server.metric("counterpoint_requests_running") == 0)
    poll(
        lambda: (
            server.metric("counterpoint_requests_finished_total", finished_reason="stop")
            == before + 1
        )
    )


def test_n_choices(server: Running):
    answer = chat(server, "random", n=4, temperature=1.0, max_tokens=8)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and len(set(texts)) == 4
    assert answer.usage.completion_tokens == 32

    chunks = list(
        chat(
            server,
            "random",
            n=3,
            temperature=1.0,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert sorted(c.choices[0].index for c in chunks[:-1] if c.choices[0].finish_reason) == [
        0,
        1,
        2,
    ]
    assert (
        chunks[-1].usage.completion_tokens == 24
        and chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens
    )


def test_seeds(server: Running):
    def said(**options: Any) -> str:
        return (
            chat(server, "random", temperature=1.0, max_tokens=12, **options)
            .choices[0]
            .message.content
        )

    assert said(seed=7) == said(seed=7) != said(seed=8)
    assert said(seed=-3) == said(seed=-3)
    assert said() != said(), "without a seed, answers differ"
    several = chat(server, "random", temperature=1.0, max_tokens=12, seed=7, n=3).choices
    assert several[0].message.content == said(seed=7)
    assert len({choice.message.content for choice in several}) == 3


def test_logit_bias(server: Running):
    assert (
        complete(server, "aaa", max_tokens=2, logit_bias={str(ord("a")): -100}).choices[0].text
        == "bb"
    )
    assert (
        complete(server, "aaa", max_tokens=2, logit_bias={str(ord("z")): 100}).choices[0].text
        == "zz"
    )
    assert complete(server, "aaa", max_tokens=2, logit_bias={}).choices[0].text == "aa"


def test_cached_tokens_are_reported(server: Running):
    said = "a prefix that is longer than one page of the cache " * 3
    assert chat(server, said).usage.prompt_tokens_details.cached_tokens == 0
    assert chat(server, said).usage.prompt_tokens_details.cached_tokens > 100
    assert (
        chat(
            server, said, extra_body={"cache_salt": "mine"}
        ).usage.prompt_tokens_details.cached_tokens
        == 0
    )


def test_continue_the_final_message(server: Running):
    messages = [*HELLO, {"role": "assistant", "content": "and so"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 3}
    plain = server.post(CHAT, {"messages": messages, "max_tokens": 3}).json()
    continued = server.post(CHAT, body).json()
    assert continued["usage"]["prompt_tokens"] < plain["usage"]["prompt_tokens"]


def test_content_parts_and_roles(server: Running):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "me"},
    ]
    answer = server.client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "one\ntwo"


# ---------------------------------------------------------------- log-probabilities


def test_chat_logprobs(server: Running):
    answer = chat(server, "né 漢", logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == "né 漢"
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(
        entry.top_logprobs[0].bytes == entry.bytes and entry.logprob < 0 for entry in content
    )
    assert chat(server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []

    chunks = list(chat(server, "né 漢", logprobs=True, top_logprobs=3, stream=True))
    entries = [
        entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content
    ]
    assert [entry.bytes for entry in entries] == [entry.bytes for entry in content]


def test_completion_logprobs(server: Running):
    answer = complete(server, "né!", max_tokens=4, logprobs=5)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["n", r"bytes:\xc3", r"bytes:\xa9", "!"]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert all(len(top) == 5 for top in logprobs.top_logprobs)


def test_alternatives_with_the_same_text_are_all_listed(server: Running):
    (top,) = complete(server, "ALIKE", max_tokens=1, logprobs=4).choices[0].logprobs.top_logprobs
    assert list(top) == ["A", "", "token_id:259", "B"], (
        "a second one of the same spelling goes by its id"
    )


def test_echoed_logprobs(server: Running):
    """What lm-eval sends: a prompt of token ids, its log-probabilities, and no generated tokens."""
    answer = complete(server, list(b"hello"), max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text == "hello"
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.token_logprobs == [None, -0.25, -0.25, -0.25, -0.25]
    assert logprobs.top_logprobs == [None, *({letter: -0.25} for letter in "ello")]


def test_echoed_logprobs_are_all_there_for_long_and_known_prompts(server: Running):
    prompt = list(b"a prompt of several chunks " * 60)
    complete(server, prompt, max_tokens=1)
    for options in ({"max_tokens": 0}, {"max_tokens": 3}):
        logprobs = complete(server, prompt, echo=True, logprobs=2, **options).choices[0].logprobs
        assert logprobs.token_logprobs == [None] + [-0.25] * (
            len(prompt) - 1 + options["max_tokens"]
        )
        assert logprobs.text_offset == list(range(len(prompt) + options["max_tokens"]))
    events = server.events({"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2})[:-1]
    told = [
        value
        for e in events
        for c in e["choices"]
        if c["logprobs"]
        for value in c["logprobs"]["token_logprobs"]
    ]
    assert told == [None] + [-0.25] * (len(prompt) + 1)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("top_p", 1.5),
        ("top_p", True),
        ("min_p", -1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("n", 0),
        ("n", 129),
        ("n", 10**30),
        ("max_tokens", -1),
        ("max_tokens", 2**40),
        ("max_tokens", "10"),
        ("min_tokens", 100_000),
        ("seed", 2**63),
        ("seed", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("stop", ""),
        ("stop", [""]),
        ("stop", 5),
        ("stop", ["x"] * 65),
        ("stop", "x" * 2000),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**6]),
        ("logit_bias", {"AI": -100}),
        ("logit_bias", {"999999999": 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"0": 1e9}),
        ("logit_bias", {"1" * 5000: 1}),
        ("logit_bias", []),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("priority", 2**31),
        ("cache_salt", "x" * 1000),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": 7}}),
        ("regex", 7),
        ("choice", [""]),
        ("choice", ["x"] * 4097),
        ("structured_outputs", {"jason": {}}),
        ("prompt_logprobs", -1),
    ],
)
def test_wrong_fields_are_named(server: Running, field: str, value: Any):
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hi"})):
        error = openai_error(server.post(path, {"model": MODEL, **body, field: value}))
        assert field in error["message"] and error["param"] == field


def test_what_is_wrong_between_fields_names_one(server: Running):
    for field, body in (("max_tokens", {"max_tokens": 0}), ("top_logprobs", {"top_logprobs": 2})):
        assert openai_error(server.post(CHAT, {"messages": HELLO, **body}))["param"] == field


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_finite(server: Running, field: str, number: str):
    assert (
        openai_error(server.post(COMPLETIONS, f'{{"prompt": "hi", "{field}": {number}}}'.encode()))[
            "param"
        ]
        == field
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        [[], [1]],
        [260],
        [2**40],
        [-1],
        [1.5],
        [[1], "a"],
        {"a": 1},
        None,
        7,
        [None],
    ],
)
def test_wrong_prompts(server: Running, prompt: Any):
    openai_error(server.post(COMPLETIONS, {"prompt": prompt}))
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        "hi",
        [{}],
        [{"role": "wizard", "content": "hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ],
)
def test_wrong_messages(server: Running, messages: Any):
    assert openai_error(server.post(CHAT, {"messages": messages}))["param"] == "messages"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'{"prompt": "\\ud83d"}',
        b'{"prompt": "hi", "user": "\\udc00"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "hi", "unknown": NaN}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "hi", "n": ' + b"9" * 10_000 + b"}",
    ],
)
def test_bodies_that_are_not_json(server: Running, body: bytes):
    openai_error(server.post(COMPLETIONS, body))


def test_prompt_logprobs(server: Running):
    for path, body in ((COMPLETIONS, {"prompt": "hé", "n": 2}), (CHAT, {"messages": HELLO})):
        answer = server.post(path, body | {"prompt_logprobs": 2}).json()
        for choice in answer["choices"]:
            first, *others = choice["prompt_logprobs"]
            assert first is None and len(others) == answer["usage"]["prompt_tokens"] - 1
            assert all(
                len(known) == 2 and {known[id]["rank"] for id in known} == {1, 2}
                for known in others
            )
        assert "prompt_logprobs" not in server.post(path, body).json()["choices"][0]
    assert others and server.post(COMPLETIONS, {"prompt": "hi", "prompt_logprobs": 0}).json()[
        "choices"
    ][0]["prompt_logprobs"][1] == {"105": {"logprob": -0.25, "rank": None, "decoded_token": "i"}}
    for much in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}):
        error = openai_error(
            server.post(COMPLETIONS, {"prompt": [65] * 4000, "n": 20, "max_tokens": 1} | much)
        )
        assert "1048576" in error["message"] and error["param"] in much
    for wrong in (
        {"prompt_logprobs": 21},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 1, "stream": True},
    ):
        assert (
            "prompt_logprobs"
            in openai_error(server.post(COMPLETIONS, {"prompt": "hi"} | wrong))["message"]
        )
    both = {"prompt": "hi", "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    assert "leave it out" in openai_error(server.post(COMPLETIONS, both))["message"]


@pytest.mark.parametrize("name", ["messages", "self", "tools", "chat_template", "conversations"])
def test_reserved_template_options_are_refused(server: Running, name: str):
    for path, body in (
        (CHAT, {"messages": HELLO}),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", {"messages": HELLO}),
    ):
        error = openai_error(server.post(path, body | {"chat_template_kwargs": {name: []}}))
        assert error["param"] == "chat_template_kwargs" and name in error["message"]


def test_a_body_is_not_sent_back(server: Running):
    response = server.post(
        CHAT, {"messages": [{"role": "user", "content": i} for i in range(1000)]}
    )
    assert "messages[0].content" in openai_error(response)["message"]
    secret = "swordfish" * 10
    assert "swordfish" not in server.post(COMPLETIONS, {"prompt": "hi", "temperature": secret}).text


def test_unsupported_fields_are_refused(server: Running):
    for field, value in (
        ("functions", [{"name": "f"}]),
        ("chat_template", "{{ 1 }}"),
        ("return_token_ids", True),
    ):
        assert openai_error(server.post(CHAT, {"messages": HELLO, field: value}))["param"] == field
    harmless = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "user": "me",
    }
    assert (
        server.post(
            CHAT, {"messages": HELLO, "some_field_of_tomorrow": {"a": 1}, **harmless}
        ).status_code
        == 200
    )


def test_another_model(server: Running):
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hi"})):
        error = openai_error(server.post(path, {"model": "gpt-9", **body}), 404)
        assert error["code"] == "model_not_found" and "gpt-9" in error["message"]
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-9")


def test_a_context_error_names_both_sizes(server: Running):
    error = openai_error(server.post(COMPLETIONS, {"prompt": [65] * 5000}))
    assert (
        "4096" in error["message"]
        and "5000" in error["message"]
        and error["code"] == "context_length_exceeded"
    )
    error = openai_error(server.post(COMPLETIONS, {"prompt": [65] * 4000, "max_tokens": 500}))
    assert all(number in error["message"] for number in ("4096", "4500", "4000", "500"))
    error = openai_error(
        server.post(CHAT, {"messages": [{"role": "user", "content": "x" * 2_000_000}]})
    )
    assert "4096" in error["message"] and error["code"] == "context_length_exceeded"
    assert complete(server, [65] * 4095).choices[0].text == "A", "the last token that fits is there"


def test_the_content_type_must_be_json(server: Running):
    openai_error(
        server.post(
            COMPLETIONS, b"prompt=hi", headers={"content-type": "application/x-www-form-urlencoded"}
        ),
        415,
    )
    assert server.post(
        COMPLETIONS, {"prompt": "hi"}, headers={"content-type": "application/json; charset=utf-8"}
    ).is_success


def test_paths_and_methods(server: Running):
    openai_error(server.get("/v1/nothing"), 404)
    openai_error(server.get(CHAT), 405)
    assert server.get("/version").json().keys() == {"version"}
    models = server.client.models.list()
    assert [m.id for m in models] == [MODEL] and models.data[0].model_extra["max_model_len"] == 4096
    assert server.client.models.retrieve(MODEL).id == MODEL


def test_request_ids(server: Running):
    assert (
        server.post(COMPLETIONS, {"prompt": "hi"}, headers={"x-request-id": "mine-1"}).headers[
            "x-request-id"
        ]
        == "mine-1"
    )
    given = server.post(COMPLETIONS, {"prompt": "hi"}, headers={"x-request-id": "a b"}).headers[
        "x-request-id"
    ]
    assert given and given != "a b"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        same = [
            pool.submit(
                server.post, COMPLETIONS, {"prompt": f"prompt {i}"}, headers={"x-request-id": "one"}
            )
            for i in range(16)
        ]
    answers = [future.result().json() for future in same]
    assert [a["choices"][0]["text"] for a in answers] == [f"prompt {i}" for i in range(16)]
    assert len({a["id"] for a in answers}) == 16


def test_the_openapi_document_says_what_bodies_are(server: Running):
    document = server.get("/openapi.json").json()
    for path, name in ((CHAT, "ChatRequest"), (COMPLETIONS, "CompletionRequest")):
        post = document["paths"][path]["post"]
        assert post["requestBody"]["content"]["application/json"]["schema"] == {
            "$ref": f"#/components/schemas/{name}"
        }
        assert "text/event-stream" in post["responses"]["200"]["content"]
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= document["components"]["schemas"].keys()


# ---------------------------------------------------------------- failures of one request


def test_a_failed_step_fails_its_request_alone(server: Running):
    assert (
        "as asked"
        in openai_error(server.post(COMPLETIONS, {"prompt": "FAIL THE STEP"}), 500)["message"]
    )
    events = server.events({"prompt": "GIVE NAN"})
    assert "error" in events[-1] and "[DONE]" not in events
    assert not any(c["finish_reason"] for e in events for c in e.get("choices", []))
    assert chat(server).choices[0].message.content == "hello there"


def test_many_streams_at_once(server: Running):
    def one(i: int) -> bool:
        said = f"stream number {i} says this and no more"
        return streamed(server, said)[0] == said

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert all(pool.map(one, range(100)))


def test_metrics(server: Running):
    before = server.metric("counterpoint_generated_tokens_total")
    finished = server.metric("counterpoint_time_to_first_token_seconds_count")
    complete(server, "abcdef", max_tokens=6)
    poll(lambda: server.metric("counterpoint_time_to_first_token_seconds_count") == finished + 1)
    poll(lambda: server.metric("counterpoint_generated_tokens_total") == before + 6)
    pages = {
        state: server.metric(f"counterpoint_kv_pages_{state}")
        for state in ("total", "free", "cached")
    }
    assert pages["free"] + pages["cached"] == pages["total"] == 1024
    for name in (
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
        "kv_cache_usage_perc",
        "num_requests_running",
    ):
        ours = {
            "generation_tokens_total": "generated_tokens_total",
            "kv_cache_usage_perc": "kv_usage_ratio",
        }.get(name, name)
        ours = ours.removeprefix("num_")
        assert server.metric(f"vllm:{name}") == server.metric(f"counterpoint_{ours}"), name
    assert server.metric("counterpoint_split_seconds_total") > 0
