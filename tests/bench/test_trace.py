"""Trace files: each format, what its times mean, and errors with the place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from counterpoint.bench.trace import read_trace
from counterpoint.bench.trace_formats import TraceError, write_queries
from counterpoint.bench.workload import describe_load, prompt_ids
from counterpoint.types import Slo


def rows(trace):
    return [(q.prompt_tokens, q.output_tokens) for q in trace.queries]


def test_azure(data):
    trace = read_trace(str(data / "azure.csv"))
    assert trace.timed
    assert rows(trace) == [(4808, 10), (3180, 8), (110, 27), (7433, 14)]
    assert [q.arrival_s for q in trace.queries] == pytest.approx(
        [0.0, 0.052, 1.0, 5 * 3600 + 42 * 60 + 56.02004]
    )
    assert trace.notes == ()


def test_burstgpt_leaves_out_empty_answers_and_notes_it(data):
    trace = read_trace(str(data / "burstgpt.csv"))
    assert rows(trace) == [(472, 18), (1087, 230)]
    assert trace.queries[1].arrival_s == 40
    assert any("1 of 3 rows" in note for note in trace.notes)


def test_lengths_have_no_times(data):
    trace = read_trace(str(data / "lengths.csv"))
    assert not trace.timed
    assert rows(trace) == [(3772, 54), (2015, 156)]


def test_mooncake_blocks_become_shared_prefixes(data):
    first, second, third, fourth, fifth = read_trace(str(data / "mooncake.jsonl")).queries
    assert first.block_tokens == 512
    ids = {q.number: prompt_ids(q) for q in (first, second, third, fourth, fifth)}
    assert ids[0][:1024] == ids[1][:1024]
    assert ids[0][1024] != ids[1][1024]
    assert ids[0] == ids[3][:1200]
    assert ids[0][:512] == ids[2][:512]
    assert ids[0][0] != ids[4][0]
    assert [len(ids[i]) for i in range(5)] == [1200, 1500, 600, 2000, 400]


def test_a_coarse_clock_is_jittered_within_its_tick_and_noted(data):
    trace = read_trace(str(data / "mooncake.jsonl"))
    assert [q.number for q in trace.queries] == [0, 1, 2, 3, 4]
    times = [q.arrival_s for q in trace.queries]
    assert times[0] == 0
    assert 0 < times[1] < 3
    assert len(set(times)) == 5
    assert any("spread at random over 3 s" in note for note in trace.notes)
    again = read_trace(str(data / "mooncake.jsonl"), seed=1)
    assert [q.arrival_s for q in again.queries] != times
    assert read_trace(str(data / "mooncake.jsonl")) == trace


def test_no_jitter_keeps_the_bursts_and_notes_it(data):
    trace = read_trace(str(data / "mooncake.jsonl"), jitter_s=0)
    assert [q.arrival_s for q in trace.queries] == pytest.approx([0, 0, 2.999, 6, 6])
    assert any("burst" in note for note in trace.notes)


def test_a_fine_clock_is_left_alone(data):
    trace = read_trace(str(data / "mooncake_fine_clock.jsonl"))
    assert [q.arrival_s for q in trace.queries] == [0, 0.04, 0.277, 0.471]
    assert trace.notes == ()


def test_sharegpt_takes_the_first_question_and_answer(data):
    trace = read_trace(str(data / "sharegpt.json"))
    assert [q.prompt for q in trace.queries] == ["Which river runs through Basel?", "Name a fruit."]
    assert rows(trace) == [(8, 18), (3, 2)]
    assert [q.session for q in trace.queries] == ["a", "c"]
    assert any("estimated" in note for note in trace.notes)
    assert any("1 of 3 conversations" in note for note in trace.notes)


def test_sharegpt_with_a_tokenizer_is_exact(data):
    trace = read_trace(
        str(data / "sharegpt.json"), tokenize=lambda text: [len(word) for word in text.split()]
    )
    assert trace.queries[0].prompt == (5, 5, 4, 7, 6)
    assert rows(trace)[0] == (5, 13)
    assert not any("estimated" in note for note in trace.notes)


def test_our_own_format(data):
    blocks, ids, text, chat = read_trace(str(data / "queries.jsonl")).queries
    assert (blocks.prefix_ids, blocks.block_tokens, blocks.session, blocks.slo) == (
        (1, 2),
        16,
        "s1",
        Slo(ttft_s=0.5),
    )
    assert (ids.prompt, ids.prompt_tokens) == ((5, 6, 7), 3)
    assert (text.prompt, text.prompt_tokens) == ("The capital of France is", 6)
    assert chat.messages == (("system", "Be brief."), ("user", "Hello."))
    assert [q.arrival_s for q in (blocks, ids, text, chat)] == [0, 0.25, 0.5, 1.5]


@pytest.mark.parametrize("name", ["queries.jsonl", "mooncake.jsonl", "azure.csv", "sharegpt.json"])
def test_a_written_load_is_read_back(data, tmp_path, name):
    before = read_trace(str(data / name), jitter_s=0).queries
    path = str(tmp_path / "load.jsonl")
    write_queries(path, before)
    after = read_trace(path, jitter_s=0).queries
    assert after == tuple(dataclasses.replace(q, number=i) for i, q in enumerate(before))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,12,3\nyesterday,1,2\n",
            ":3: field TIMESTAMP",
        ),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,12,x\n",
            ":2: field GeneratedTokens is 'x'",
        ),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,12\n",
            ":2: field GeneratedTokens is missing",
        ),
        (
            "a.csv",
            "num_prefill_tokens,num_decode_tokens\n-4,3\n",
            ":2: field num_prefill_tokens is -4",
        ),
        (
            "a.csv",
            "Timestamp,Request tokens,Response tokens\nnan,12,3\n",
            ":2: field Timestamp is 'nan'",
        ),
        ("a.csv", "when,who\n1,2\n", ":1: neither JSON nor a CSV header known"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n", "no requests"),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 1}\n'
            '{"timestamp": 0, "input_length": "5"}\n',
            ":2: field input_length",
        ),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5}\n', "output_length"),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [3, -1]}\n',
            ":1: field hash_ids",
        ),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 1, '
            '"hash_ids": [99999999999999999999]}\n',
            "hash_ids",
        ),
        (
            "a.jsonl",
            '{"prompt_tokens": 5, "output_tokens": 1, "prefix_ids": [-1], "block_tokens": 16}\n',
            ":1: field prefix_ids",
        ),
        (
            "a.jsonl",
            '{"prompt_tokens": 5, "output_tokens": 1, "prefix_ids": [1], '
            '"block_tokens": 99999999999}\n',
            "block_tokens is",
        ),
        ("a.jsonl", '{"ids": [-1], "output_tokens": 1}\n', ":1: field ids"),
        ("a.jsonl", '{"prompt_tokens": 5, "output_tokens": 1, "ttft_s": -1}\n', ":1: field ttft_s"),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 1}\nnonsense\n',
            ":2: not JSON",
        ),
        (
            "a.jsonl",
            '{"prompt_tokens": 5, "output_tokens": 1}\n{"prompt_tokens": 5, "output_token": 1}\n',
            ":2: ",
        ),
        (
            "a.jsonl",
            '{"prompt_tokens": 5, "output_tokens": 0}\n',
            ":1: query 0: output_tokens is 0",
        ),
        ("a.jsonl", '{"output_tokens": 2}\n', ":1: give one of the fields"),
        (
            "a.jsonl",
            '{"ids": [1], "text": "a", "output_tokens": 2}\n',
            ":1: give one of the fields",
        ),
        (
            "a.jsonl",
            '{"ids": [1], "output_tokens": 2}\n{"ids": [1], "arrival_s": 1, "output_tokens": 2}\n',
            "arrival_s",
        ),
        ("a.json", '[{"conversations": [{"from": "human", "value": 3}]}]', "value"),
        ("a.json", "[{]", "not JSON"),
    ],
)
def test_a_bad_row_names_its_place(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        read_trace(str(path))
    assert str(error.value).startswith(str(path))
    assert said in str(error.value)


def test_a_missing_file_and_no_text(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(str(tmp_path / "none.csv"))
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(TraceError, match="UTF-8"):
        read_trace(str(binary))


def test_a_given_format_must_fit(data):
    with pytest.raises(TraceError, match="no column 'TIMESTAMP'"):
        read_trace(str(data / "lengths.csv"), "azure")


# ---------------------------------------------------------------- the public traces


@pytest.mark.parametrize(
    ("name", "count", "prompt", "output", "rate", "cv", "reusable"),
    [
        ("azure_2023_code.csv", 8_819, (2048, 1469, 7437), (28, 13, 1899), 2.57, 13.2, 0.0),
        ("azure_2023_conv.csv", 19_366, (1155, 1020, 14050), (211, 129, 1000), 5.53, 1.09, 0.0),
        (
            "mooncake_conversation_trace.jsonl",
            12_031,
            (12035, 6909, 126195),
            (343, 350, 2000),
            3.40,
            3.03,
            0.374,
        ),
        (
            "mooncake_synthetic_trace.jsonl",
            3_993,
            (15325, 11587, 191378),
            (149, 69, 893),
            3.91,
            1.01,
            0.651,
        ),
        (
            "arxiv_summarization_lengths.csv",
            28_257,
            (2588, 2730, 4054),
            (291, 167, 4056),
            "inf",
            None,
            0.0,
        ),
    ],
)
def test_public_traces_have_their_known_statistics(
    public_trace, name, count, prompt, output, rate, cv, reusable
):
    about = describe_load(read_trace(public_trace(name), jitter_s=0).queries)
    assert about["requests"] == count
    for lengths, (mean, p50, most) in (
        (about["prompt_tokens"], prompt),
        (about["output_tokens"], output),
    ):
        assert (round(lengths["mean"]), round(lengths["p50"]), lengths["max"]) == (mean, p50, most)
    assert (
        about["rate"] == rate if rate == "inf" else about["rate"] == pytest.approx(rate, abs=0.01)
    )
    assert about["gap_cv"] == (cv and pytest.approx(cv, rel=0.01))
    assert about["reusable_share"] == pytest.approx(reusable, abs=0.001)


def test_jitter_makes_the_conversation_trace_smooth(public_trace):
    about = describe_load(read_trace(public_trace("mooncake_conversation_trace.jsonl")).queries)
    assert about["gap_cv"] == pytest.approx(1.0, abs=0.05)
    assert about["reusable_share"] == pytest.approx(0.374, abs=0.001)


def test_the_tests_need_no_file_outside():
    assert (Path(__file__).parent / "data").is_dir()
