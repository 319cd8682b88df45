"""The engine in a program: counterpoint.LLM, on tiny random weights."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import TINY

import counterpoint
from counterpoint import LLM, SamplingParams
from counterpoint.config import ConfigError
from counterpoint.serve.api.errors import ApiError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[LLM]:
    with LLM(tiny, load_format="dummy", policy="chunked", cores=1) as engine:
        yield engine


def test_texts(llm: LLM):
    outputs = llm.generate(["once", "twice upon", "once"], GREEDY)
    assert [o.prompt_token_ids for o in outputs] == [
        tuple(b"once"),
        tuple(b"twice upon"),
        tuple(b"once"),
    ]
    assert outputs[0] != outputs[1] and outputs[0].text == outputs[2].text
    for output in outputs:
        assert len(output.token_ids) == 6 and output.finish_reason == "length"
        assert output.usage["completion_tokens"] == 6 and output.usage["prompt_tokens"] == len(
            output.prompt_token_ids
        )
    assert (
        llm.generate("once", GREEDY)[0].text
        == llm.generate(list(b"once"), GREEDY)[0].text
        == outputs[0].text
    )
    assert llm.generate([], GREEDY) == []


def test_more_prompts_than_are_asked_at_once(llm: LLM):
    outputs = llm.generate(
        [f"{i}" for i in range(600)], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    )
    assert [bytes(o.prompt_token_ids).decode() for o in outputs] == [f"{i}" for i in range(600)]


def test_each_its_own_parameters(llm: LLM):
    params = [SamplingParams(seed=i, max_tokens=i + 1, n=i + 1, ignore_eos=True) for i in range(2)]
    one, two = llm.generate(["once", "once"], params)
    assert [len(c.token_ids) for c in one.outputs] == [1] and [
        len(c.token_ids) for c in two.outputs
    ] == [2, 2]
    with pytest.raises(ValueError, match="params"):
        llm.generate(["once"], params)


def test_stops(llm: LLM):
    (free,) = llm.generate(
        "once", SamplingParams(logit_bias={97: 100, 98: 100}, seed=4, max_tokens=40)
    )
    assert set(free.text) == {"a", "b"}
    first = min(free.text.find("ab"), free.text.find("ba"))
    (cut,) = llm.generate(
        "once",
        SamplingParams(logit_bias={97: 100, 98: 100}, seed=4, max_tokens=40, stop=["ab", "ba"]),
    )
    assert (
        cut.text == free.text[:first]
        and cut.finish_reason == "stop"
        and cut.outputs[0].stop_reason in ("ab", "ba")
    )
    (ended,) = llm.generate("once", SamplingParams(logit_bias={97: 100}, stop_token_ids=[97]))
    assert (ended.text, ended.token_ids, ended.outputs[0].stop_reason) == ("", (97,), 97)


def test_log_probabilities(llm: LLM):
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=3
    )
    for output in (
        *llm.generate(["once", "once again"], params),
        *llm.chat([{"role": "user", "content": "once"}], params),
    ):
        (choice,) = output.outputs
        assert len(choice.logprobs) == 4 and [
            known.top_ids[0] for known in choice.logprobs
        ] == list(choice.token_ids)
        assert all(
            known.logprob == known.top_logprobs[0] and len(known.top_ids) == 2
            for known in choice.logprobs
        )
        first, *others = output.prompt_logprobs
        assert first is None and len(others) == len(output.prompt_token_ids) - 1
        assert all(known.logprob < 0 and len(known.top_ids) == 3 for known in others)
    (plain,) = llm.generate("once", GREEDY)
    assert plain.prompt_logprobs is None and plain.outputs[0].logprobs is None


def test_chats(llm: LLM):
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, GREEDY)
    assert bytes(t for t in one.prompt_token_ids if t < 256).decode() == "user\nhi\nassistant\n"
    assert [o.text for o in llm.chat([messages, messages], GREEDY)] == [one.text] * 2


def test_tools(tmp_path: Path):
    """Random weights, made to call by a grammar."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 2048}))
    days = {
        "type": "object",
        "properties": {"days": {"enum": [1, 2]}},
        "required": ["days"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": days}}
        for name in ("weather", "time")
    ]
    named = {"type": "function", "function": {"name": "time"}}
    with LLM(
        str(tmp_path / "config.json"), load_format="dummy", policy="chunked", cores=1
    ) as engine:
        outputs = engine.chat(
            [{"role": "user", "content": "hi"}],
            SamplingParams(n=4, seed=1, max_tokens=120),
            tools=tools,
            tool_choice=named,
        )[0].outputs
    for choice in outputs:
        call, *_ = choice.calls
        assert call.name == "time" and json.loads(call.arguments)["days"] in (1, 2)
        assert not choice.text or choice.finish_reason == "length", (
            "text is a call that was cut before its name"
        )
    assert len({choice.calls[0].id for choice in outputs}) == 4


def test_what_is_wrong_is_named(llm: LLM):
    for prompts, params, words in (
        ("once", SamplingParams(temperature=9), "temperature"),
        (["fine", ""], GREEDY, "prompt"),
        ("x" * 600, GREEDY, "512"),
    ):
        with pytest.raises(ApiError, match=words):
            llm.generate(prompts, params)
    with pytest.raises(ConfigError, match="polcy"):
        LLM("smollm2", polcy="auto")
    with pytest.raises(ConfigError, match="event_log"):
        LLM("smollm2", event_log="/nowhere/events")
    assert llm.generate("once", GREEDY)[0].finish_reason == "length"


def test_what_is_none_of_the_api_s_is_named(llm: LLM):
    with pytest.raises(ApiError, match=r"temperature.*finite"):
        llm.generate("once", SamplingParams(temperature=float("nan")))
    with pytest.raises(ApiError, match="JSON"):
        llm.generate("half an emoji \ud83d", GREEDY)
    for prompts, params, word in (
        (None, GREEDY, "prompts"),
        (7, GREEDY, "prompts"),
        ("once", {}, "params"),
        ("once", None, "params"),
    ):
        with pytest.raises(TypeError, match=word):
            llm.generate(prompts, params)


def test_settings_that_it_has_no_use_for_are_named(tiny: str):
    wrong: list[dict[str, Any]] = [
        {"replicas": 2},
        {"prefill": 1},
        {"port": 9000},
        {"timeline": "lanes.json"},
    ]
    for setting in wrong:
        with pytest.raises(ConfigError, match=next(iter(setting))):
            LLM(tiny, load_format="dummy", **setting)


def test_no_tokens_are_none(llm: LLM):
    (output,) = llm.generate("once", SamplingParams(max_tokens=0))
    assert (output.text, output.token_ids, output.usage["completion_tokens"]) == ("", (), 0)


def test_inside_an_event_loop(llm: LLM):
    """As in a notebook."""

    async def cell() -> str:
        return (
            llm.generate("once", GREEDY)[0].text
            + llm.chat([{"role": "user", "content": "once"}], GREEDY)[0].text
        )

    assert asyncio.run(cell()) == asyncio.run(cell())


def test_a_closed_one_says_so(tiny: str):
    before = threading.active_count()
    llm = LLM(tiny, load_format="dummy", policy="serial", cores=1)
    llm.close()
    assert threading.active_count() <= before + 1
    with pytest.raises(ConnectionError, match="closed"):
        llm.generate("once", GREEDY)


def test_importing_the_package_is_light():
    heavy = ("torch", "msgspec", "counterpoint.serve")
    code = f"import sys, counterpoint; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
    assert not hasattr(counterpoint, "Nothing")
