"""The command as it is called: flags in, table or JSON out."""

from __future__ import annotations

import json
import re

import cyclopts
import pytest
from fake_server import Fake, running

from counterpoint.bench.command import bench
from counterpoint.bench.trace import read_trace


@pytest.fixture
def fake():
    return Fake()


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


SMALL = ("--requests", "6", "--rate", "200", "--prompt-tokens", "20", "--output-tokens", "4", "--token-ids", "0:1")

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
    *(f"{point}_{name}_ms" for point in ("mean", "median", "std", "p50", "p90", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}


def test_json_alone_on_standard_output(url, call):
    status, out, err = call("--url", url, *SMALL, "--json", "-", "--slo", "ttft=30,tpot=30", "--label", "try")
    result = json.loads(out)
    assert status == 0
    assert result.keys() >= VLLM_KEYS
    assert (result["completed"], result["failed"], result["model_id"], result["label"]) == (6, 0, "fake", "try")
    assert result["slo_attainment"] == 1.0
    assert result["slo"] == {"ttft_s": 30.0, "tpot_s": 30.0}
    assert result["workload"]["requests"] == 6
    assert result["request_rate"] == pytest.approx(200)
    assert "degraded" in result
    assert "6/6" in err  # the bar


def test_a_table_and_a_file(url, call, tmp_path):
    path = tmp_path / "result.json"
    status, out, _ = call("--url", f"{url}/v1", *SMALL, "--json", str(path), "--save-detailed", "--warmup", "0")
    assert status == 0
    assert "first token" in out
    assert "6 of 6 requests answered" in out
    result = json.loads(path.read_text())
    assert len(result["ttfts"]) == len(result["itls"]) == len(result["errors"]) == 6
    assert result["request_goodput"] is None


def test_failures_are_shown_with_their_reasons(url, call):
    status, out, _ = call("--url", url, *SMALL[:-1], "4:5", "--warmup", "0")  # prompts that begin with 4: one token too few
    assert status == 1
    assert "6 requests failed and count as misses" in out
    assert re.search(r"\d x asked for", out)


def test_a_trace_against_a_server_and_the_load_saved(fake, url, call, data, tmp_path):
    saved = tmp_path / "load.jsonl"
    words = ("--trace", str(data / "azure.csv"), "--length-scale", "0.01", "--requests", "3", "--time-scale", "0.01")
    status, out, _ = call("--url", url, *words, "--token-ids", "0:1", "--warmup", "2", "--save-load", str(saved), "--json", "-")
    assert status == 0
    assert [len(body["prompt"]) for body in fake.seen] == [48, 32, 48, 32, 1]
    assert json.loads(out)["workload"]["trace"].endswith("azure.csv")
    assert [(q.prompt_tokens, q.output_tokens) for q in read_trace(str(saved)).queries] == [(48, 1), (32, 1), (1, 1)]


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
