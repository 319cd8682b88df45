"""Structured output: JSON schemas, patterns, choices and grammars, and attacks on the checker.

The model has random weights over bytes, so only the grammar makes its answers fit.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jsonschema
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from serve_process import Running, poll

from counterpoint import LLM, SamplingParams
from counterpoint.device.grammar import compile_grammar, make_tokenizer
from counterpoint.serve.api.errors import ApiError
from counterpoint.serve.output_parsing.chat_formats import find_chat_format
from counterpoint.serve.output_parsing.streaming_parser import make_parser_config
from counterpoint.serve.output_parsing.tools import with_reasoning_rules
from counterpoint.serve.structured_output.grammar import (
    ANSWER_RULE,
    embed_answer,
    from_choice,
    from_json_schema,
    from_regex,
    make_vocabulary,
)
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.serve.text.tokenizer_loader import make_byte_tokenizer
from counterpoint.spec.model import ModelError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "hello"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "Käse", "漢字"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def bound(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with its real engine on random weights."""
    command = [
        sys.executable,
        "-m",
        "counterpoint",
        "serve",
        tiny,
        "--load-format",
        "dummy",
        "--port",
        "0",
        "--policy",
        "multiplex",
    ]
    running = Running(tmp_path_factory.mktemp("bound") / "log", command)
    try:
        yield running.wait_ready()
        assert running.metric("counterpoint_requests_running") == 0
        assert running.stop() == 0
    finally:
        if running.process.poll() is None:
            running.process.kill()


def answer(server: Running, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    asked = {"prompt": "hello"} if path == COMPLETIONS else {"messages": SAID}
    response = server.post(path, {"max_tokens": 400, **asked, **body})
    assert response.status_code == 200, response.text
    return response.json()


def text(server: Running, path: str = COMPLETIONS, **body: Any) -> str:
    """The text of a finished answer."""
    (choice,) = answer(server, path, **body)["choices"]
    assert choice["finish_reason"] == "stop", choice
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


def refused(server: Running, **body: Any) -> dict[str, Any]:
    response = server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 4, **body})
    assert response.status_code == 400, response.text
    assert len(response.content) < 3000
    return response.json()["error"]


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


# ---------------------------------------------------------------- what may be asked for


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "body",
    [
        {"response_format": schema_format(PERSON)},
        {"response_format": schema_format(PERSON, strict=True)},
        {"response_format": {"type": "json_object", "schema": PERSON}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
        {"structured_outputs": {"json": PERSON}},
    ],
)
def test_schemas(bound: Running, path: str, body: dict[str, Any]):
    jsonschema.validate(json.loads(text(bound, path, **body)), PERSON)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-c]+x"}, "[0-9]{3}-[a-c]+x"),
        ({"guided_regex": "(é|漢){2,5}"}, "(é|漢){2,5}"),
        ({"structured_outputs": {"regex": "yes|no"}}, "yes|no"),
        ({"choice": ["north", "south-east"]}, "north|south-east"),
        ({"guided_choice": ['"', "\\", "a\nb"]}, '"|\\\\|a\nb'),
        ({"structured_outputs": {"choice": ["one"]}}, "one"),
        ({"grammar": 'start: "a" b+\nb: "b" | "c"'}, "a[bc]+"),
        ({"guided_grammar": 'root ::= "a" b b?\nb ::= [0-9] | "c"'}, "a[0-9c]{1,2}"),
        ({"structured_outputs": {"grammar": 'start: "x"~3'}}, "xxx"),
        ({"regex": "[0-9]{2}", "ignore_eos": True}, "[0-9]{2}"),
        ({"regex": "[0-9]{2}", "min_tokens": 9}, "[0-9]{2}"),
        ({"regex": "[0-9]{2}", "logit_bias": {str(ord("x")): 100}}, "[0-9]{2}"),
        ({"regex": "[0-9]{2}", "repetition_penalty": 9, "top_k": 1}, "[0-9]{2}"),
        ({"regex": "[a-z]{20}", "top_p": 0.1, "min_p": 0.5}, "[a-z]{20}"),
    ],
)
def test_patterns_lists_and_grammars(bound: Running, path: str, body: dict[str, Any], pattern: str):
    assert re.fullmatch(pattern, text(bound, path, **body))


@pytest.mark.parametrize(
    "body",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
)
def test_json_mode_begins_an_object(bound: Running, body: dict[str, Any]):
    (choice,) = answer(bound, max_tokens=60, temperature=2, **body)["choices"]
    assert choice["text"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["text"]), dict)


def test_an_empty_structure_changes_nothing(bound: Running):
    free = answer(bound, temperature=0, max_tokens=20)["choices"][0]["text"]
    for body in (
        {"response_format": {"type": "text"}},
        {"regex": ""},
        {"choice": []},
        {"structured_outputs": {}},
    ):
        assert answer(bound, temperature=0, max_tokens=20, **body)["choices"][0]["text"] == free


def test_choices_streams_and_logprobs(bound: Running):
    found = answer(bound, regex="[a-f]{6}", n=5, logprobs=2, seed=1)
    texts = [choice["text"] for choice in found["choices"]]
    assert all(re.fullmatch("[a-f]{6}", each) for each in texts) and len(set(texts)) > 1
    assert texts == [
        choice["text"] for choice in answer(bound, regex="[a-f]{6}", n=5, seed=1)["choices"]
    ], "a seed reproduces"
    for choice in found["choices"]:
        assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
        assert all(logprob <= 0 for logprob in choice["logprobs"]["token_logprobs"])
    events = bound.events(
        {"prompt": "hello", "regex": "[a-f]{6}", "n": 5, "seed": 1, "max_tokens": 20}
    )
    pieces = [each for event in events[:-1] for each in event["choices"]]  # type: ignore[index]
    assert ["".join(p["text"] for p in pieces if p["index"] == i) for i in range(5)] == texts


def test_a_cut_answer_is_the_beginning_of_one(bound: Running):
    (choice,) = answer(bound, regex="[a-f]{60}", max_tokens=5)["choices"]
    assert re.fullmatch("[a-f]{5}", choice["text"]) and choice["finish_reason"] == "length"


def test_other_apis(bound: Running):
    form = {"type": "json_schema", "name": "s", "schema": PERSON, "strict": True}
    response = bound.post(
        "/v1/responses", {"input": "hello", "max_output_tokens": 300, "text": {"format": form}}
    )
    assert response.status_code == 200 and response.json()["text"]["format"]["schema"] == PERSON
    (item,) = response.json()["output"]
    jsonschema.validate(json.loads(item["content"][0]["text"]), PERSON)
    config = {"format": {"type": "json_schema", "schema": PERSON}}
    response = bound.post(
        "/v1/messages", {"messages": SAID, "max_tokens": 300, "output_config": config}
    )
    jsonschema.validate(json.loads(response.json()["content"][0]["text"]), PERSON)
    wrong = {"type": "json_schema", "name": "s", "schema": {"type": "not-a-type"}}
    response = bound.post("/v1/responses", {"input": "hello", "text": {"format": wrong}})
    assert response.status_code == 400 and response.json()["error"]["param"] == "text"
    response = bound.post(
        "/v1/responses", {"input": "hello", "response_format": {"type": "json_object"}}
    )
    assert response.status_code == 400 and "text.format" in response.json()["error"]["message"]


# ---------------------------------------------------------------- any schema


def members(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(
        st.text('abcé" \\', min_size=1, max_size=4), min_size=1, max_size=3, unique=True
    )

    @st.composite
    def objects(draw: Callable[[Any], Any]) -> dict[str, Any]:
        properties = {name: draw(schemas) for name in draw(names)}
        required = [name for name in properties if draw(st.booleans())]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return objects()


def ranges(kind: str) -> st.SearchStrategy[Any]:
    bounds = st.tuples(st.integers(-1000, 1000), st.integers(0, 2000))
    return bounds.map(lambda b: {"type": kind, "minimum": b[0], "maximum": b[0] + b[1]})


values = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text(max_size=4))
leaves = st.one_of(
    st.sampled_from(
        [{"type": "null"}, {"type": "boolean"}, {"type": "string", "pattern": "^[a-f]{2}x?$"}]
    ),
    ranges("integer"),
    st.integers(0, 5).map(lambda size: {"type": "string", "maxLength": size}),
    st.integers(0, 3).map(
        lambda size: {"type": "string", "minLength": size, "maxLength": size + 2}
    ),
    st.lists(values, min_size=1, max_size=3).map(lambda options: {"enum": options}),
    values.map(lambda value: {"const": value}),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        members(inner),
        st.tuples(inner, st.integers(0, 3)).map(
            lambda it: {"type": "array", "items": it[0], "maxItems": it[1]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=schemas, seed=st.integers(0, 2**30), temperature=st.sampled_from([0, 1, 2]))
def test_any_schema_is_satisfied(
    bound: Running, schema: dict[str, Any], seed: int, temperature: float
):
    (choice,) = answer(bound, guided_json=schema, seed=seed, temperature=temperature)["choices"]
    if choice["finish_reason"] == "stop":  # bounded but for blanks, of which there may be many
        jsonschema.validate(json.loads(choice["text"]), schema)
    else:
        assert sum(map(choice["text"].count, " \t\n\r")) > 100  # JSON's blanks: RFC 8259, section 2


# ---------------------------------------------------------------- what is wrong


def chain(length: int) -> dict[str, Any]:
    """A schema whose nesting crashes a process that compiles it."""
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "not-a-type"}, "not-a-type"),
        ({"$ref": "#"}, "no text"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"$ref": "https://example.org/schema.json"}, "example.org"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "string", "format": "no-such-format"}, "no-such-format"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": [{"type": "string"}], "additionalItems": 7}, ""),
        ({"enum": []}, ""),
        ({"properties": 7}, ""),
        ({"type": "integer", "minimum": 5, "maximum": 3}, ""),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "integer", "minimum": 10**40}, ""),
        ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}, ""),
        (chain(2500), "deep"),
    ],
)
def test_a_wrong_schema_is_named(bound: Running, schema: Any, word: str):
    for field, value in (("response_format", schema_format(schema)), ("guided_json", schema)):
        error = refused(bound, **{field: value})
        assert (
            error["param"] == field
            and word in error["message"]
            and len(error["message"]) > len(field) + 5
        ), error


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "not-a-type"}, "not-a-type"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
        ({"not": {}}, '"not"'),
    ],
)
def test_a_wrong_schema_of_a_tool_is_named_and_no_grammar_of_ours_shown(
    bound: Running, schema: Any, word: str
):
    function = {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": schema}},
    }
    body = {
        "messages": SAID,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    error = bound.post(CHAT, body).json()["error"]
    assert error["param"] == "tools" and word in error["message"]
    assert all(hidden not in error["message"] for hidden in ("x-guidance", "call0")) and (
        "oneOf" in error["message"]
    ) == (word == "oneOf")


def test_without_strict_unenforceable_keywords_are_ignored(bound: Running):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    assert "uniqueItems" in refused(bound, response_format=schema_format(schema))["message"]
    assert set(json.loads(text(bound, response_format=schema_format(schema, strict=False)))) <= {
        1,
        2,
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"regex": "("}, "regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"regex": "[^\\s\\S]"}, "regex"),
        ({"regex": "((a{1000}){1000}){1000}"}, "regex"),
        ({"guided_regex": "x" * 200_000}, "guided_regex"),
        ({"grammar": "no grammar"}, "grammar"),
        ({"grammar": 'start: "a" b'}, "grammar"),
        ({"grammar": "root ::= b"}, "grammar"),
        ({"grammar": "start: " + "(" * 5000}, "grammar"),
        ({"grammar": "\\"}, "grammar"),
        (
            {
                "guided_grammar": "start: a0\n"
                + "\n".join(f"a{i}: a{i + 1}" for i in range(8000))
                + '\na8000: "x"'
            },
            "guided_grammar",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 50_000}, "guided_json"),
        ({"regex": "a", "choice": ["b"]}, "choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ],
)
def test_unenforceable_structures_are_named(bound: Running, body: dict[str, Any], param: str):
    error = refused(bound, **body)
    assert error["param"] == param and len(error["message"]) > len(param) + 5, error


def test_an_empty_schema_is_an_object(bound: Running):
    for body in (
        {"response_format": schema_format({})},
        {"guided_json": {}},
        {"guided_json": "{}"},
    ):
        (choice,) = answer(bound, max_tokens=30, **body)["choices"]
        assert choice["text"].lstrip().startswith("{"), "not a number that never ends"


def test_whitespace_in_json_is_bounded(bound: Running):
    blanks = {str(byte): 100 for byte in b" \n\t"}
    (choice,) = answer(bound, guided_json=PERSON, logit_bias=blanks)["choices"]
    assert max(map(len, re.findall(r"[ \n\t]+", choice["text"]))) == 32


# ---------------------------------------------------------------- company


def test_structured_requests_leave_free_ones_unchanged(bound: Running):
    def plain(server: Running = bound) -> str:
        return answer(server, temperature=0, max_tokens=12)["choices"][0]["text"]

    before = plain()
    for _ in range(20):
        answer(bound, response_format={"type": "json_object"}, max_tokens=12)
        assert plain() == before
    with ThreadPoolExecutor(8) as pool:
        mixed = [
            pool.submit(plain) if i % 2 else pool.submit(text, bound, regex="[0-9]{9}")
            for i in range(40)
        ]
    assert all(
        each.result() == before if i % 2 else each.result().isdigit()
        for i, each in enumerate(mixed)
    )


def trier(server: Running) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(
        child
        for child in children
        if "counterpoint.serve.structured_output.checker_process" in child.cmdline()
    )


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_crash_of_the_checker_affects_no_other_request(bound: Running):
    engine, done = bound.engine.pid, []
    text(bound, choice=["a"])
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(bound.events, {"prompt": "hello", "max_tokens": 400, "ignore_eos": True})
        for length in (2700, 2800):
            first = trier(bound)
            assert "deep" in refused(bound, guided_json=chain(length))["message"]
            poll(lambda process=first: ended(process))
            done.append(first.pid)
            assert text(bound, choice=[f"a{length}"]) == f"a{length}"
        assert long.result()[-1] == "[DONE]"
    assert trier(bound).pid not in done and bound.engine.pid == engine
    last = trier(bound)
    last.kill()
    poll(lambda: ended(last))
    assert text(bound, choice=["b"]) == "b", "one that died by itself is replaced"


def test_a_grammar_too_costly_while_decoding_fails_alone(bound: Running):
    many = {
        "type": "object",
        "properties": {f"p{i}": {"type": "null"} for i in range(800)},
        "required": ["p799"],
    }
    grammar = f"start: X many\nX: /[xy]{{40}}/\nmany: %json {json.dumps(many)}"
    blanks = {str(byte): -100 for byte in b" \n\t\r"}
    body = {"prompt": "hello", "grammar": grammar, "max_tokens": 100, "logit_bias": blanks}
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(text, bound, regex="[a-z]{90}")
        response = bound.post(COMPLETIONS, body)
        error = response.json()["error"]
        assert (
            response.status_code == 400
            and error["code"] == "invalid_structure"
            and "costs too much" in error["message"]
        )
        assert len(other.result()) == 90
    events = bound.events(body)
    assert "costs too much" in events[-1]["error"]["message"] and len(events) > 40  # type: ignore[index]


def test_the_checker_ends_with_its_server(own_server: Callable[..., Running]):
    running = own_server().wait_ready()
    assert running.post(COMPLETIONS, {"prompt": "hello", "choice": ["hello"]}).status_code == 200
    process = trier(running)
    running.process.kill()
    poll(lambda: ended(process))


def test_a_server_without_structures_has_no_checker(own_server: Callable[..., Running]):
    server = own_server().wait_ready()
    assert server.post(COMPLETIONS, {"prompt": "hello"}).status_code == 200
    commands = [
        child.cmdline() for child in psutil.Process(server.process.pid).children(recursive=True)
    ]
    assert commands and not any(
        "counterpoint.serve.structured_output.checker_process" in command for command in commands
    )


# ---------------------------------------------------------------- models that think


THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}<think></think>{{ m.content }}"
    "{% endfor %}{{ tools }}"
)


@pytest.mark.parametrize(
    ("prompt", "inside", "said", "fits"),
    [
        ("hi", False, '{"a":1}', True),
        ("hi", False, '<think>so, {"b"}</think>\n{"a":1}', True),
        ("hi", False, "<think>so", False),
        ("hi", False, '<think>so</think>{"b":1}', False),
        ("hi<think>\n", True, 'so</think>\n\n{"a":1}', True),
        ("hi<think>\n", True, '{"a":1}', False),
        ("hi<think></think>\n", False, '{"a":1}', True),
        ("hi<think></think>\n", False, '<think></think>{"a":1}', False),
    ],
)
def test_a_model_may_think_first(prompt: str, inside: bool, said: str, fits: bool):
    plain = make_byte_tokenizer()
    text = ModelTokenizer(plain.tokenizer, THINKS, plain.special_tokens)
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    hearing = make_parser_config(find_chat_format(text), None, True, "<think>" if inside else "")
    assert hearing is not None
    before = with_reasoning_rules(ANSWER_RULE, hearing, text, prompt)
    tokenizer = make_tokenizer(make_vocabulary(text), 258, (257,))
    for grammar in (from_json_schema(schema), from_choice(['{"a":1}']), from_regex(r'\{"a":1\}')):
        matcher = compile_grammar(embed_answer(before, grammar), tokenizer)
        read = matcher.try_consume_tokens(list(said.encode()))
        assert not matcher.is_error(), matcher.get_error()
        assert (read == len(said.encode()) and matcher.is_accepting()) == fits


def test_the_grammar_of_a_forced_call_is_checked_too(bound: Running):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}
    body = {"messages": SAID, "tools": [tool], "tool_choice": "required", "max_tokens": 4}
    response = bound.post(CHAT, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tools"
    response = bound.post(
        CHAT, body | {"tools": [{"type": "function", "function": {"name": "f"}}], "regex": "a"}
    )
    assert response.status_code == 400 and response.json()["error"]["param"] == "regex"


# ---------------------------------------------------------------- in a program


def test_structured_output_through_llm(tiny: str):
    with LLM(tiny, load_format="dummy", policy="chunked", cores=1) as llm:
        (one,) = llm.generate(
            "hello", SamplingParams(max_tokens=400, structured_outputs={"json": PERSON})
        )
        jsonschema.validate(json.loads(one.text), PERSON)
        (two,) = llm.generate("hello", SamplingParams(choice=["left", "right"], n=3))
        assert {choice.text for choice in two.outputs} <= {"left", "right"}
        (three,) = llm.chat(SAID, SamplingParams(regex="[0-9]{4}"))
        assert three.text.isdigit() and three.finish_reason == "stop"
        with pytest.raises(ApiError, match="regex"):
            llm.generate("hello", SamplingParams(regex="("))


def test_smollm2(tmp_path: Path):
    try:
        llm = LLM("smollm2", device="cpu", kv_pages=200)
    except ModelError as error:
        pytest.skip(str(error))
    with llm:
        asked = [{"role": "user", "content": "Describe a person as JSON."}]
        params = SamplingParams(temperature=0, max_tokens=80, response_format=schema_format(PERSON))
        jsonschema.validate(json.loads(llm.chat(asked, params)[0].text), PERSON)
        asked = [{"role": "user", "content": "Is water wet? Answer yes or no."}]
        (found,) = llm.chat(asked, SamplingParams(choice=["yes", "no"], n=4, max_tokens=5))
        assert all(choice.text in ("yes", "no") for choice in found.outputs)
