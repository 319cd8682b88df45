"""/tokenize, /detokenize, and latency targets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serve_process import Running

from counterpoint.core.loop import read_log
from counterpoint.serve.text.tokenizer_loader import CHATML
from counterpoint.types import AddRequest, Slo

HELLO = [{"role": "user", "content": "hé"}]
RENDERED = "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"


def refused(server: Running, path: str, body: Any, status: int = 400) -> str:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


# ---------------------------------------------------------------- tokens


def test_the_tokens_of_a_text(server: Running):
    answer = server.post("/tokenize", {"model": "echo", "prompt": "hé"}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [104, 0xC3, 0xA9],
        "token_strs": None,
    }
    assert server.post("/tokenize", {"prompt": "hi", "return_token_strs": True}).json()[
        "token_strs"
    ] == ["h", "i"]
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert server.post("/tokenize", {"prompt": "x" * 5000}).json()["count"] == 5000, (
        "longer than the context is no error"
    )


def test_the_tokens_of_a_conversation_are_those_of_its_chat(server: Running):
    assert "im_start" in CHATML
    answer = server.post("/tokenize", {"messages": HELLO}).json()
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": RENDERED}
    usage = server.post("/v1/chat/completions", {"messages": HELLO}).json()["usage"]
    assert answer["count"] == usage["prompt_tokens"] == len(answer["tokens"])
    plain = server.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()
    assert (
        server.post("/detokenize", {"tokens": plain["tokens"]}).json()["prompt"]
        == RENDERED.partition("<|im_start|>a")[0]
    )


@pytest.mark.parametrize("said", ["héllo 漢字 😀", "", "<|im_start|>", "\x00 \ufffd"])
def test_tokenize_and_detokenize_invert_each_other(server: Running, said: str):
    tokens = server.post("/tokenize", {"prompt": said}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": said}


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "hi", "messages": HELLO}, {"prompt": 5}, {"messages": []}, {"prompt": ["hi"]}],
)
def test_wrong_tokenize_requests_are_named(server: Running, body: dict[str, Any]):
    refused(server, "/tokenize", body)


@pytest.mark.parametrize("tokens", [[260], [-1], [2**70], ["a"], "a", None, [1.5]])
def test_wrong_tokens(server: Running, tokens: Any):
    assert "tokens" in refused(server, "/detokenize", {"tokens": tokens})


def test_tokens_of_another_model_and_of_too_much(server: Running):
    for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [1]})):
        assert "gpt-9" in refused(server, path, {"model": "gpt-9", **body}, 404)
    assert "prompt" in refused(server, "/tokenize", {"prompt": "x" * (2**22 + 1)})
    many = [{"role": "user", "content": "x" * 2**20}] * 5
    assert str(2**22) in refused(server, "/tokenize", {"messages": many})


def test_a_long_text_does_not_delay_other_requests(server: Running):
    answers: list[int] = []
    body = {"prompt": "several words of it " * 200_000}
    thread = threading.Thread(
        target=lambda: answers.append(server.post("/tokenize", body).json()["count"])
    )
    thread.start()
    served = 0
    while thread.is_alive():
        assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).is_success
        served += 1
    assert answers == [4_000_000] and served > 3


# ---------------------------------------------------------------- targets


def test_targets_reach_the_engine(own_server: Callable[..., Running], tmp_path: Path):
    log = tmp_path / "events"
    server = own_server(event_log=str(log), tpot_s=0.5, ttft_s=3.0).wait_ready()
    messages = [{"role": "user", "content": "hi"}]
    for slo in ({"ttft_s": 1, "itl_s": 0.25}, {}, None):
        assert server.post("/v1/completions", {"prompt": "hi", "slo": slo}).is_success
    assert server.post(
        "/v1/chat/completions", {"messages": messages, "slo": {"tpot_s": 0.125}, "n": 2}
    ).is_success
    assert server.stop() == 0
    arrived = [
        event.slo
        for _, events in read_log(log)
        for event in events
        if isinstance(event, AddRequest)
    ]
    default = Slo(ttft_s=3.0, tpot_s=0.5)
    assert arrived == [Slo(1.0, 0.5, 0.25), default, default, Slo(3.0, 0.125), Slo(3.0, 0.125)]


@pytest.mark.parametrize(
    "slo",
    [
        {"ttft_s": 0},
        {"tpot_s": -1},
        {"itl_s": 1e9},
        {"ttft_s": "1"},
        {"ttft": 1},
        5,
        [],
        {"itl_s": True},
    ],
)
def test_wrong_targets(server: Running, slo: Any):
    assert "slo" in refused(server, "/v1/completions", {"prompt": "hi", "slo": slo})
