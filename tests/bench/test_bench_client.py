"""Reading a stream of answers: what counts as a token, and its time."""

from __future__ import annotations

import json

import pytest

from counterpoint.bench.client import HttpTarget, StreamedReply, read_stats
from counterpoint.bench.workload import Query, TokenRange, prompt_ids
from counterpoint.serve.observability.metrics import Metrics
from counterpoint.stats import PolicyReport, Stats
from counterpoint.types import Slo


def event(
    text: str | None = None,
    finish: str | None = None,
    total: int | None = None,
    choices: bool = True,
) -> bytes:
    chunk: dict = {
        "choices": [{"index": 0, "text": text, "finish_reason": finish}] if choices else []
    }
    if total is not None:
        details = {"cached_tokens": 16}
        chunk["usage"] = {
            "prompt_tokens": 40,
            "completion_tokens": total,
            "prompt_tokens_details": details,
        }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def read(*parts: tuple[float, bytes]) -> StreamedReply:
    reply = StreamedReply()
    for at_s, data in parts:
        reply.feed(data, at_s)
    return reply


def test_a_token_per_chunk_without_usage():
    reply = read(
        (1.0, event("a")), (2.0, event("b")), (3.0, event("", "length")), (3.0, b"data: [DONE]\n\n")
    )
    assert reply.token_times() == (1.0, 2.0)
    assert reply.finish_reason == "length"
    assert reply.prompt_tokens is None


def test_counts_in_every_chunk_say_how_many_tokens_came():
    reply = read(
        (1.0, event("a", total=1)),
        (2.0, event("", total=2)),  # a token whose text is not complete yet
        (3.0, event("bcd", total=5)),
        (4.0, event("", "stop", total=5)),
        (4.0, event(total=5, choices=False)),
    )
    assert reply.token_times() == (1.0, 2.0, 3.0, 3.0, 3.0)
    assert not reply.times_are_estimated
    assert (reply.prompt_tokens, reply.cached_tokens) == (40, 16)


def test_a_total_at_the_end_alone_is_shared_out_and_said():
    reply = read(
        (1.0, event("ab")),
        (2.0, event("cd")),
        (3.0, event("e", "length")),
        (3.0, event(total=6, choices=False)),
    )
    assert reply.token_times() == (1.0, 1.0, 2.0, 2.0, 3.0, 3.0)
    assert reply.times_are_estimated
    exact = read(
        (1.0, event("a")), (2.0, event("b", "length")), (2.0, event(total=2, choices=False))
    )
    assert exact.token_times() == (1.0, 2.0)
    assert not exact.times_are_estimated


def test_an_answer_without_any_text_still_has_its_tokens():
    reply = read((2.0, event("", "length")), (2.5, event(total=3, choices=False)))
    assert reply.token_times() == (2.5, 2.5, 2.5)


def test_events_may_be_cut_anywhere():
    data = event("a", total=1) + event("é", total=2) + event("", "length", total=2)
    reply = StreamedReply()
    for i in range(len(data)):
        reply.feed(data[i : i + 1], float(i))
    assert len(reply.token_times()) == 2
    windows = read((1.0, data.replace(b"\n", b"\r\n")))
    assert len(windows.token_times()) == 2
    comment = read((1.0, b": keep-alive\n\n" + data))
    assert len(comment.token_times()) == 2


def test_chat_deltas_and_reasoning_are_tokens_and_roles_are_not():
    def delta(**fields: str) -> bytes:
        return (
            b"data: "
            + json.dumps({"choices": [{"delta": fields, "finish_reason": None}]}).encode()
            + b"\n\n"
        )

    reply = read(
        (1.0, delta(role="assistant", content="")),
        (2.0, delta(reasoning="hm")),
        (3.0, delta(content="yes")),
    )
    assert reply.token_times() == (2.0, 3.0)


def test_an_error_event_is_kept():
    reply = read(
        (1.0, event("a")),
        (2.0, b'data: {"error": {"message": "the engine died", "code": null}}\n\n'),
    )
    assert "the engine died" in reply.error


# ---------------------------------------------------------------- what is sent


def test_made_prompts_go_as_token_ids():
    query = Query(3, 0.0, 20, 5, (1,), 16)
    body = json.loads(HttpTarget("http://x/v1/", "m").body(query, TokenRange(10, 20), seed=4))
    assert body["prompt"] == list(prompt_ids(query, TokenRange(10, 20), 4))
    assert (body["max_tokens"], body["stream"], body["ignore_eos"], body["temperature"]) == (
        5,
        True,
        True,
        0.0,
    )
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    plain = json.loads(HttpTarget("http://x", "m", extensions=False).body(query, TokenRange(), 0))
    assert "ignore_eos" not in plain
    assert plain["stream_options"] == {"include_usage": True}


def test_targets_are_told_to_servers_that_know_them():
    query = Query(3, 0.0, 20, 5, slo=Slo(ttft_s=1.5, itl_s=0.2))
    assert json.loads(HttpTarget("http://x", "m").body(query, TokenRange(), 0))["slo"] == {
        "ttft_s": 1.5,
        "itl_s": 0.2,
    }
    assert "slo" not in json.loads(
        HttpTarget("http://x", "m", extensions=False).body(query, TokenRange(), 0)
    )
    assert "slo" not in json.loads(
        HttpTarget("http://x", "m").body(Query(3, 0.0, 20, 5), TokenRange(), 0)
    )


def test_texts_and_messages_go_where_they_can():
    text, chat, ids = (
        Query(0, 0.0, 2, 2, prompt=p) for p in ("hello", (("user", "hello"),), (1, 2))
    )
    completions, chats = (
        HttpTarget("http://x", "m"),
        HttpTarget("http://x/v1", "m", endpoint="chat"),
    )
    assert json.loads(completions.body(text, TokenRange(), 0))["prompt"] == "hello"
    assert json.loads(completions.body(ids, TokenRange(), 0))["prompt"] == [1, 2]
    for query in (text, chat):
        assert json.loads(chats.body(query, TokenRange(), 0))["messages"] == [
            {"role": "user", "content": "hello"}
        ]
    with pytest.raises(ValueError, match="--endpoint chat"):
        completions.body(chat, TokenRange(), 0)
    for query in (ids, Query(0, 0.0, 2, 2)):
        with pytest.raises(ValueError, match="use completions"):
            chats.body(query, TokenRange(), 0)
    assert (completions.path, chats.path) == (
        "http://x/v1/completions",
        "http://x/v1/chat/completions",
    )


def test_our_servers_figures_are_read_from_its_own_page():
    metrics = Metrics("some-model")
    metrics.stats = Stats(
        waiting=1,
        running=2,
        pages_total=300,
        pages_free=40,
        pages_cached=50,
        page_tokens=16,
        prefix_queries_tokens=600,
        prefix_hits_tokens=70,
        preemptions=8,
        prompt_tokens=900,
        generated_tokens=1000,
        steps=11,
        split_s=((0, 2, 1.5), (1, 1, 2.25)),
        lane_s=(("decode", "busy", 1.25), ("prefill", "memory", 0.5)),
        step_s=(("decode", 2, 1, 0.75), ("mixed", 2, 2, 0.5)),
        active_unit_s=2.5,
        resplits=12,
        overtakes=3,
        units_total=2,
        policy=PolicyReport(
            errors=(("decode", 0.1, 0.25, 40),),
            cells=(("decode on 2 beside", 1.5, 1.25),),
            decisions={"split": 7},
            fallbacks={"fused gains more": 6},
        ),
    )
    assert read_stats(metrics.render().decode()) == metrics.stats


def test_another_engines_metrics_are_not_ours():
    assert (
        read_stats("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3\n") is None
    )
    assert read_stats("") is None
