"""counterpoint batch: a file in, a file out, and on again after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cli import run_command

FLAGS = ["--load-format", "dummy", "--policy", "chunked", "--cores", "1"]
BODY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def completion(id: str, prompt: str = "once", **fields: Any) -> dict[str, Any]:
    return {
        "custom_id": id,
        "method": "POST",
        "url": "/v1/completions",
        "body": BODY | {"prompt": prompt} | fields,
    }


def chat(id: str, **fields: Any) -> dict[str, Any]:
    body = BODY | {"messages": [{"role": "user", "content": id}]} | fields
    return {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def response(id: str, **fields: Any) -> dict[str, Any]:
    body = {"max_output_tokens": 4, "temperature": 0, "ignore_eos": True, "input": id} | fields
    return {"custom_id": id, "method": "POST", "url": "/v1/responses", "body": body}


class Batch:
    def __init__(self, folder: Path, model: str) -> None:
        self.source, self.out = folder / "in.jsonl", folder / "out.jsonl"
        self.command = ["batch", str(self.source), "-o", str(self.out), "--model", model, *FLAGS]

    def run(self, *lines: dict[str, Any]) -> int:
        self.source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run_command(self.command)

    def answers(self) -> dict[str, Any]:
        lines = [json.loads(line) for line in self.out.read_text().splitlines()]
        assert all(line.keys() == {"id", "custom_id", "response", "error"} for line in lines)
        assert (
            len({line["id"] for line in lines})
            == len({line["custom_id"] for line in lines})
            == len(lines)
        )
        return {line["custom_id"]: line["response"] for line in lines}


@pytest.fixture
def batch(tmp_path: Path, tiny: str) -> Batch:
    return Batch(tmp_path, tiny)


def test_each_request_has_its_answer(batch: Batch, capsys: pytest.CaptureFixture[str]):
    assert (
        batch.run(
            completion("a"), chat("b"), completion("c", "once", n=2), completion("d", "twice")
        )
        == 0
    )
    answers = batch.answers()
    assert answers.keys() == {"a", "b", "c", "d"} and {
        a["status_code"] for a in answers.values()
    } == {200}
    a, b, c = (answers[id]["body"] for id in "abc")
    assert (
        a["object"] == "text_completion"
        and b["object"] == "chat.completion"
        and answers["a"]["request_id"] == a["id"]
    )
    assert [choice["text"] for choice in c["choices"]] == [a["choices"][0]["text"]] * 2
    assert (
        b["choices"][0]["message"]["role"] == "assistant" and b["usage"]["completion_tokens"] == 4
    )
    out, err = capsys.readouterr()
    assert not out and "4 answered" in err


def test_responses(batch: Batch):
    assert (
        batch.run(
            response("a"),
            chat("a2"),
            response("b", max_output_tokens=10**6),
            response("c", stream=True),
        )
        == 1
    )
    answers = batch.answers()
    body = answers["a"]["body"]
    assert (
        body["object"] == "response"
        and body["status"] == "incomplete"
        and body["usage"]["output_tokens"] == 4
    )
    assert (
        answers["b"]["body"]["error"]["param"] == "max_output_tokens"
        and answers["c"]["status_code"] == 400
    )


def test_wrong_requests_have_their_errors(batch: Batch, capsys: pytest.CaptureFixture[str]):
    wrong = [
        completion("hot", temperature=9),
        completion("long", "x" * 600),
        chat("live", stream=True),
    ]
    elsewhere = chat("where") | {"url": "/v1/embeddings"}
    assert batch.run(*wrong, elsewhere, completion("fine")) == 1
    answers = batch.answers()
    statuses = {id: answer["status_code"] for id, answer in answers.items()}
    assert statuses == {"hot": 400, "long": 400, "live": 400, "where": 404, "fine": 200}
    assert answers["hot"]["body"]["error"]["param"] == "temperature"
    assert "4 of them with an error" in capsys.readouterr().err


def test_answers_that_must_look_like_something(batch: Batch):
    assert (
        batch.run(
            completion("digits", regex="[0-9]{3}"),
            chat("one", choice=["x"]),
            completion("wrong", regex="("),
        )
        == 1
    )
    answers = batch.answers()
    (digits,), (one,) = (answers[id]["body"]["choices"] for id in ("digits", "one"))
    assert (
        digits["text"].isdigit()
        and digits["finish_reason"] == "stop"
        and one["message"]["content"] == "x"
    )
    assert (
        answers["wrong"]["status_code"] == 400
        and answers["wrong"]["body"]["error"]["param"] == "regex"
    )


def test_it_goes_on_where_it_was(batch: Batch, capsys: pytest.CaptureFixture[str]):
    lines = [completion("a"), chat("b"), completion("c", "and c")]
    assert batch.run(*lines) == 0
    whole = batch.answers()
    first, second, *_ = batch.out.read_bytes().splitlines(keepends=True)
    batch.out.write_bytes(first + second[:40])  # as a kill would leave it
    assert batch.run(*lines) == 0
    assert batch.out.read_bytes().startswith(first)
    again = batch.answers()
    texts = [
        {id: answer["body"]["choices"] for id, answer in answers.items()}
        for answers in (whole, again)
    ]
    assert texts[0] == texts[1]
    assert "2 answered" in capsys.readouterr().err
    before = batch.out.read_bytes()
    assert batch.run(*lines) == 0 and batch.out.read_bytes() == before
    assert "nothing is left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"custom_id": "a"}\n', "in.jsonl:1"),
        ("\n{\n", "in.jsonl:2"),
        (json.dumps(chat("a")) + "\n", "twice"),
    ],
)
def test_a_wrong_file_is_refused_as_a_whole(
    batch: Batch, text: str, words: str, capsys: pytest.CaptureFixture[str]
):
    batch.source.write_text(text * (2 if words == "twice" else 1))
    assert run_command(batch.command) == 2
    assert words in capsys.readouterr().err and not batch.out.exists()


def test_a_file_that_is_something_else_is_left_alone(
    batch: Batch, capsys: pytest.CaptureFixture[str]
):
    batch.out.write_text("my diary\n")
    assert batch.run(completion("a")) == 2
    assert "out.jsonl:1" in capsys.readouterr().err and batch.out.read_text() == "my diary\n"


def test_the_input_and_other_files_are_no_output(batch: Batch, capsys: pytest.CaptureFixture[str]):
    batch.source.write_text(json.dumps(completion("a")) + "\n")
    line = list(batch.command)
    for name, text in (
        ("in.jsonl", batch.source.read_text()),
        ("notes.txt", "a line without an end"),
    ):
        path = batch.source.with_name(name)
        path.write_text(text)
        line[3] = str(path)
        assert (
            run_command(line) == 2 and name in capsys.readouterr().err and path.read_text() == text
        )
    line[3] = "/nowhere/out.jsonl"
    assert run_command(line) == 2 and "--out" in capsys.readouterr().err
