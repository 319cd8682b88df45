"""The workload's flags: what they make, and which contradict each other."""

from __future__ import annotations

import itertools
import math

import pytest

from counterpoint.bench.load import LoadOptions, parse_slo
from counterpoint.bench.workload import describe_load, offered_rate, reusable_prefix_share
from counterpoint.types import Slo


def test_without_flags_there_is_a_small_made_load():
    trace = LoadOptions().build_trace()
    assert len(trace.queries) == 64
    assert offered_rate(trace.queries) == pytest.approx(1.0)
    assert trace == LoadOptions().build_trace()
    assert trace != LoadOptions(seed=1).build_trace()


def test_made_load_as_asked():
    load = LoadOptions(
        requests=200,
        rate=8.0,
        prompt_tokens=320,
        prompt_lengths="constant",
        prefix_groups=2,
        prefix_share=0.5,
    )
    about = describe_load(load.build_trace().queries)
    assert about["requests"] == 200
    assert about["rate"] == pytest.approx(8.0)
    assert about["prompt_tokens"]["max"] == 320
    assert about["reusable_share"] == pytest.approx(0.5 * 198 / 200)


@pytest.mark.parametrize("flags", [{"rate": float("inf")}, {"arrivals": "once"}])
def test_all_at_once(flags):
    assert {q.arrival_s for q in LoadOptions(requests=5, **flags).build_trace().queries} == {0.0}


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_is_more_than_nothing(rate, data):
    for flags in ({"requests": 5}, {"trace": str(data / "azure.csv")}):
        with pytest.raises(ValueError, match="rate is"):
            LoadOptions(rate=rate, **flags).build_trace()


def test_a_trace_keeps_its_own_arrivals(data):
    path = str(data / "azure.csv")
    assert LoadOptions(trace=path).build_trace().queries[1].arrival_s == pytest.approx(0.052)
    assert LoadOptions(trace=path, time_scale=0.5).build_trace().queries[
        1
    ].arrival_s == pytest.approx(0.026)
    fast = LoadOptions(trace=path, rate=3.0).build_trace().queries
    assert offered_rate(fast) == pytest.approx(3.0)
    assert fast[1].arrival_s / fast[-1].arrival_s == pytest.approx(0.052 / 20576.02004)


def test_a_trace_at_made_arrivals(data):
    own = LoadOptions(trace=str(data / "mooncake_fine_clock.jsonl")).build_trace().queries
    made = (
        LoadOptions(trace=str(data / "mooncake_fine_clock.jsonl"), arrivals="constant")
        .build_trace()
        .queries
    )
    assert offered_rate(made) == pytest.approx(
        offered_rate(own)
    )  # its own rate, unless another is given
    assert len({round(b.arrival_s - a.arrival_s, 9) for a, b in itertools.pairwise(made)}) == 1


def test_a_trace_without_times_gets_poisson_arrivals(data):
    queries = LoadOptions(trace=str(data / "lengths.csv"), rate=4.0).build_trace().queries
    assert [q.arrival_s for q in queries] == pytest.approx([0.0, 0.25])


def test_a_trace_is_cut_to_fit(data):
    load = LoadOptions(
        trace=str(data / "azure.csv"),
        length_scale=0.1,
        max_prompt_tokens=400,
        max_output_tokens=2,
        requests=3,
    )
    assert [(q.prompt_tokens, q.output_tokens) for q in load.build_trace().queries] == [
        (400, 1),
        (318, 1),
        (11, 2),
    ]


def test_thinning_a_trace(data):
    path = str(data / "mooncake.jsonl")
    assert len(LoadOptions(trace=path, thin=1.0).build_trace().queries) == 5
    few = LoadOptions(trace=path, thin=0.4, seed=3).build_trace().queries
    assert 1 <= len(few) <= 4
    assert few[0].arrival_s == 0


def test_scaling_keeps_the_reusable_share(data):
    path = str(data / "mooncake.jsonl")
    assert reusable_prefix_share(
        LoadOptions(trace=path, length_scale=0.125).build_trace().queries
    ) == pytest.approx(
        reusable_prefix_share(LoadOptions(trace=path).build_trace().queries), abs=0.01
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"thin": 0.5}, "--thin"),
        ({"time_scale": 0.5}, "--time-scale"),
        ({"length_scale": 0.5}, "--length-scale"),
        ({"jitter": 1.0}, "--jitter"),
        ({"tokenizer": "tokenizer.json"}, "--tokenizer"),
        ({"trace": "azure.csv", "prompt_tokens": 500}, "--prompt-tokens"),
        ({"trace": "azure.csv", "prefix_groups": 2}, "--prefix-groups"),
        ({"burstiness": 0.5}, "--arrivals gamma"),
        ({"arrivals": "once", "rate": 5.0}, "--rate"),
        ({"arrivals": "trace"}, "--arrivals trace"),
        ({"trace": "azure.csv", "rate": 2.0, "time_scale": 0.5}, "--rate and --time-scale"),
        ({"trace": "azure.csv", "arrivals": "poisson", "time_scale": 0.5}, "--time-scale"),
        ({"trace": "azure.csv", "requests": 0}, "requests"),
        ({"requests": -5}, "--requests"),
        ({"rate": -1.0}, "--rate"),
        ({"rate": 0.0}, "--rate"),
        ({"rate": math.nan}, "--rate"),
        ({"arrivals": "gamma", "burstiness": math.nan}, "burstiness"),
        ({"arrivals": "gamma", "burstiness": 1e-9}, "burstiness"),
        ({"prefix_groups": 2, "prefix_share": 1.5}, "share"),
        ({"prompt_tokens": 0}, "--prompt-tokens"),
        ({"prompt_tokens": 10**11}, "prompt_tokens is"),
        ({"output_tokens": 0}, "--output-tokens"),
        ({"prompt_spread": math.nan}, "spread"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**64}, "--seed"),
        ({"jitter": -1.0}, "--jitter"),
        ({"trace": "azure.csv", "jitter": math.nan}, "--jitter"),
        ({"trace": "azure.csv", "time_scale": math.nan}, "time scale"),
        ({"trace": "azure.csv", "length_scale": math.inf}, "length scale"),
        ({"trace": "sharegpt.json", "tokenizer": "/nowhere/tokenizer.json"}, "--tokenizer"),
        ({"trace": "sharegpt.json", "max_prompt_tokens": 2}, "no request is left"),
    ],
)
def test_contradictions_name_the_flag(data, flags, said):
    if "trace" in flags:
        flags = flags | {"trace": str(data / flags["trace"])}
    with pytest.raises(ValueError, match=said):
        LoadOptions(**flags).build_trace()


def test_a_tokenizer_makes_texts_exact(data, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({"[?]": 0, "Name": 1, "a": 2, "fruit": 3}, unk_token="[?]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    queries = LoadOptions(trace=str(data / "sharegpt.json"), tokenizer=path).build_trace().queries
    assert queries[1].prompt == (1, 2, 3, 0)
    assert queries[1].output_tokens == 3


def test_targets():
    assert parse_slo("ttft=1.0,tpot=50ms,itl=0.2s") == Slo(1.0, 0.05, 0.2)
    assert parse_slo(" tpot=0.05 ,") == Slo(tpot_s=0.05)
    assert parse_slo("") == Slo()
    for text, said in (
        ("ttfb=1", "ttfb=1"),
        ("ttft", "ttft=SECONDS"),
        ("ttft=fast", "'fast'"),
        ("itl=0", "more than 0"),
        ("itl=nan", "0"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_slo(text)
