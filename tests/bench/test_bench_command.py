"""The `bench` command: flags in, table or JSON out."""

from __future__ import annotations

import json
import re

import cyclopts
import pytest
from bench_server import FakeServer, running

from counterpoint.bench.command import bench
from counterpoint.bench.trace import read_trace


@pytest.fixture
def fake():
    return FakeServer()


@pytest.fixture
def url(fake):
    with running(fake) as url:
        yield url


@pytest.fixture
def call(capsys):
    """Runs `bench` with command-line words: exit status, standard output, standard error."""
    app = cyclopts.App()
    app.default(bench)

    def run(*words: str) -> tuple[int, str, str]:
        status = app(words, exit_on_error=False, result_action="return_value")
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


SMALL = (
    "--requests",
    "6",
    "--rate",
    "200",
    "--prompt-tokens",
    "20",
    "--output-tokens",
    "4",
    "--token-ids",
    "0:1",
)

# what `vllm bench serve` writes: scripts that read its files read ours
VLLM_KEYS = {
    "date",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(
        f"{point}_{name}_ms"
        for point in ("mean", "median", "std", "p50", "p90", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
}


def test_json_alone_on_standard_output(url, call):
    status, out, err = call(
        "--url", url, *SMALL, "--json", "-", "--slo", "ttft=30,tpot=30", "--label", "try"
    )
    result = json.loads(out)
    assert status == 0
    assert result.keys() >= VLLM_KEYS
    assert (result["completed"], result["failed"], result["model_id"], result["label"]) == (
        6,
        0,
        "fake",
        "try",
    )
    assert result["slo_attainment"] == 1.0
    assert result["slo"] == {"ttft_s": 30.0, "tpot_s": 30.0}
    assert result["workload"]["requests"] == 6
    assert result["request_rate"] == pytest.approx(200)
    assert "degraded" in result
    assert "6/6" in err  # the bar


def test_a_table_and_a_file(url, call, tmp_path):
    path = tmp_path / "result.json"
    status, out, _ = call(
        "--url", f"{url}/v1", *SMALL, "--json", str(path), "--save-detailed", "--warmup", "0"
    )
    assert status == 0
    assert "first token" in out
    assert "6 of 6 requests answered" in out
    result = json.loads(path.read_text())
    assert len(result["ttfts"]) == len(result["itls"]) == len(result["errors"]) == 6
    assert result["request_goodput"] is None


def test_failures_are_shown_with_their_reasons(url, call):
    status, out, _ = call(
        "--url", url, *SMALL[:-1], "4:5", "--warmup", "0"
    )  # prompts that begin with 4: one token too few
    assert status == 1
    assert "6 requests failed and count as misses" in out
    assert re.search(r"\d x asked for", out)


def test_a_trace_against_a_server_and_the_load_saved(fake, url, call, data, tmp_path):
    saved = tmp_path / "load.jsonl"
    words = (
        "--trace",
        str(data / "azure.csv"),
        "--length-scale",
        "0.01",
        "--requests",
        "3",
        "--time-scale",
        "0.2",
    )
    status, out, _ = call(
        "--url",
        url,
        *words,
        "--token-ids",
        "0:1",
        "--warmup",
        "2",
        "--save-load",
        str(saved),
        "--json",
        "-",
    )
    assert status == 0
    assert [len(body["prompt"]) for body in fake.seen] == [48, 32, 48, 32, 1]
    assert json.loads(out)["workload"]["trace"].endswith("azure.csv")
    assert [(q.prompt_tokens, q.output_tokens) for q in read_trace(str(saved)).queries] == [
        (48, 1),
        (32, 1),
        (1, 1),
    ]


@pytest.fixture
def tiny(tmp_path) -> tuple[str, ...]:
    """The words for a tiny model of random weights."""
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return (
        "--model",
        str(tmp_path / "config.json"),
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--kv-pages",
        "64",
    )


def test_policies_compared_on_one_load_in_this_process(call, tiny, tmp_path):
    words = (
        "--compare",
        "serial,chunked",
        "--requests",
        "5",
        "--rate",
        "100",
        "--prompt-tokens",
        "40",
        "--output-tokens",
        "6",
    )
    path = tmp_path / "result.json"
    status, out, _ = call(
        *words,
        *tiny,
        "--json",
        str(path),
        "--timeline",
        str(tmp_path / "lanes.json"),
        "--slo",
        "ttft=60",
    )
    runs = json.loads(path.read_text())["runs"]
    assert status == 0
    assert [run["policy"] for run in runs] == ["serial", "chunked"]
    assert [(run["completed"], run["pages_leaked"], run["slo_attainment"]) for run in runs] == [
        (5, 0, 1.0)
    ] * 2
    assert runs[0]["total_output_tokens"] == runs[1]["total_output_tokens"] > 0
    assert runs[0]["workload"] == runs[1]["workload"]
    assert all(
        sum(split["share"] for split in run["split_share"]) == pytest.approx(1) for run in runs
    )
    assert "serial" in out and "chunked" in out
    for policy in ("serial", "chunked"):
        assert json.loads((tmp_path / f"lanes-{policy}.json").read_text())["traceEvents"]


def test_texts_in_this_process_are_said_to_be_made_tokens(call, tiny, data):
    words = ("--trace", str(data / "sharegpt.json"), "--arrivals", "once", "--json", "-")
    status, out, _ = call("--in-process", "--policy", "serial", *words, *tiny)
    result = json.loads(out)
    assert (status, result["completed"], result["total_output_tokens"]) == (0, 2, 20)
    assert any("made tokens of their estimated length" in note for note in result["notes"])


def test_one_policy_in_this_process(call, tiny):
    status, out, _ = call("--in-process", "--policy", "chunked", *SMALL[:-2], *tiny, "--json", "-")
    result = json.loads(out)
    assert status == 0
    assert (result["policy"], result["completed"]) == ("chunked", 6)
    assert result["config"]["scheduler"]["policy"] == "chunked"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--url http://HOST:PORT or --in-process"),
        (("--url", "http://127.0.0.1:9", "--in-process"), "either"),
        (("--url", "http://127.0.0.1:9"), "is the server up"),
        (("--url", "http://127.0.0.1:9", "--api-model", "m"), "warm-up"),
        (("--url", "http://127.0.0.1:9", "--api-model", "m", "--token-ids", "5"), "--token-ids"),
        (("--compare", "serial,fastest"), "fastest"),
        (("--in-process", "--slo", "speed=1"), "speed=1"),
        (("--in-process", "--trace", "/nowhere.csv"), "/nowhere.csv"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_done(call, words, said):
    with pytest.raises((ValueError, ConnectionError), match=said):
        call(*words)
