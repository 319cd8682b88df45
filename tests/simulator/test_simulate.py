"""The engine on the simulated device: every policy, the same again, and what theory says."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import cyclopts
import numpy as np
import pytest
from sim_builders import Constant

from counterpoint.bench.trace import read_trace
from counterpoint.bench.workload import Lengths, PrefixGroups, Query, SyntheticLoad
from counterpoint.config import Config, ConfigError
from counterpoint.core.loop import read_log, replay
from counterpoint.device.sim import SimExecutor
from counterpoint.simulator.machine import Machine, kv_pages, make_engine
from counterpoint.simulator.simulate import SimFiles, command, simulate
from counterpoint.spec.device import device_spec
from counterpoint.spec.presets import PRESETS
from counterpoint.types import BatchShape, FinishReason, Step

LLAMA = PRESETS["llama-3.1-8b"]
H200 = Machine(LLAMA, device_spec("h200"))
CPU = Machine(PRESETS["smollm2-135m"], device_spec("cpu-2"))
POLICIES = ["serial", "chunked", "multiplex", "auto"]
TRACES = Path(__file__).parents[3] / "shared" / "traces"


def load(
    count: int, rate: float, prompt: int = 400, output: int = 40, groups: bool = True, seed: int = 0
) -> list[Query]:
    return SyntheticLoad(
        count,
        Lengths(prompt, "lognormal", 0.8),
        Lengths(output, "lognormal", 0.8),
        rate=rate,
        groups=PrefixGroups(5, 0.5) if groups else None,
        seed=seed,
    ).queries()


def check_whole(queries: list[Query], came) -> None:
    assert not came.errors
    for query, record in zip(queries, came.records, strict=True):
        assert record.id == query.id and record.finish_reason is FinishReason.LENGTH
        assert (
            record.prompt_tokens == query.prompt_tokens
            and len(record.token_s) == query.output_tokens
        )
        assert record.arrival_s == query.arrival_s < record.token_s[0] and list(
            record.token_s
        ) == sorted(record.token_s)
    stats = came.stats
    assert stats.waiting == stats.running == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total, "a page leaked"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_its_contract_with_a_large_device(policy, depth):
    queries = load(150, rate=30)
    machine = Machine(H200.model, H200.device, depth=depth)
    check_whole(queries, simulate(machine, queries, Config().replace(policy=policy), watched=True))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_its_contract_when_pages_are_short(policy, depth):
    queries = load(80, rate=50, prompt=200, output=60)
    longest = max(q.prompt_tokens + q.output_tokens for q in queries)
    config = Config().replace(policy=policy, kv_pages=longest // 16 + 20, max_running=24)
    came = simulate(Machine(CPU.model, CPU.device, depth=depth), queries, config, watched=True)
    check_whole(queries, came)
    assert came.stats.preemptions > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_thousand_requests(policy):
    queries = load(1000, rate=20, prompt=1000, output=100)
    check_whole(queries, simulate(H200, queries, Config().replace(policy=policy)))


@pytest.mark.parametrize("name", ["azure_2023_conv.csv", "mooncake_conversation_trace.jsonl"])
def test_a_public_trace(name):
    if not (TRACES / name).exists():
        pytest.skip(f"the public trace {name} is not here")
    queries = list(read_trace(str(TRACES / name)).queries[:100])
    came = simulate(H200, queries, Config().replace(policy="chunked", chunk_tokens=2048))
    check_whole(queries, came)
    assert (came.stats.prefix_hits_tokens > 0) == (name.startswith("mooncake"))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_load_gives_the_same_records(policy):
    queries = load(120, rate=25)
    config = Config().replace(policy=policy)
    one, two = simulate(H200, queries, config, seed=3), simulate(H200, queries, config, seed=3)
    assert one == two


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_log_gives_the_same_commands_again(policy, tmp_path, monkeypatch):
    commands: list = []
    submit = SimExecutor.submit

    def record(self, command):
        commands.append(command)
        submit(self, command)

    monkeypatch.setattr(SimExecutor, "submit", record)
    queries, config = load(60, rate=40, prompt=300), Config().replace(policy=policy, kv_pages=400)
    simulate(H200, queries, config, files=SimFiles(event_log=str(tmp_path / "events")))
    fresh = make_engine(H200, config, H200.estimators(config)[1])
    again = list(itertools.chain.from_iterable(replay(fresh, read_log(tmp_path / "events"))))
    assert sum(isinstance(c, Step) for c in commands) > 100
    assert again == commands


# ---------------------------------------------------------------- theory


def test_waiting_is_that_of_a_queue_with_constant_service():
    """One server, Poisson arrivals at load p, constant service D: mean wait p D / (2 (1 - p)) (Pollaczek, Khinchine)."""
    service_s, share = 0.1, 0.7
    queries = SyntheticLoad(6000, Lengths(16), Lengths(1), rate=share / service_s, seed=5).queries()
    config = Config().replace(policy="serial", max_pass_tokens=16, prefix_cache=False)
    machine = Machine(LLAMA, H200.device, host_s=0.0, depth=1, physics=Constant(service_s))
    came = simulate(machine, queries, config)
    waits = [record.token_s[0] - record.arrival_s - service_s for record in came.records]
    assert np.mean(waits) == pytest.approx(share * service_s / (2 * (1 - share)), rel=0.1)


def test_prefill_first_makes_gaps_that_chunks_and_splits_avoid():
    """A short chat is being answered when a long document arrives."""
    queries = [Query(0, 0.0, 100, 400), Query(1, 0.5, 16000, 4)]
    longest = {}
    for policy in ("serial", "chunked", "multiplex"):
        came = simulate(H200, queries, Config().replace(policy=policy, max_pass_tokens=16384))
        longest[policy] = np.diff(came.records[0].token_s).max()
    assert longest["serial"] > 0.4, "it stands still for the whole prompt"
    assert (
        longest["chunked"] < longest["serial"] / 5 and longest["multiplex"] < longest["serial"] / 5
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_go_on_beside_documents_where_lanes_share_no_units(depth):
    """Two cores, chats with documents of some seconds among them: layer groups queued one behind another may not take both."""
    queries = [Query(i, i * 0.8, 40, 40) for i in range(25)] + [
        Query(25 + i, 3.0 + 5 * i, 2000, 16) for i in range(3)
    ]
    came = simulate(
        Machine(CPU.model, CPU.device, depth=depth), queries, Config().replace(policy="auto")
    )
    documents = [record for record in came.records if record.prompt_tokens == 2000]
    assert (
        max(itertools.chain.from_iterable(np.diff(record.token_s) for record in came.records)) < 2.0
    )
    assert [record.id for record in sorted(documents, key=lambda r: r.token_s[0])] == [
        record.id for record in documents
    ]
    chats = [record for record in came.records if record.prompt_tokens < 2000]
    assert max(record.token_s[0] - record.arrival_s for record in chats) < 2.0, (
        "none waits for the pass of a document"
    )


def test_a_faster_device_answers_sooner():
    queries = load(100, rate=5)
    ends = [
        max(
            r.finished_s
            for r in simulate(
                Machine(LLAMA, device_spec(name)), queries, Config().replace(policy="chunked")
            ).records
        )
        for name in ("b200", "h200", "a100")
    ]
    assert ends == sorted(ends) and ends[0] < ends[-1]


def test_a_policy_that_prices_wrongly_still_serves_and_decides_otherwise():
    queries = load(200, rate=25, prompt=1500, output=80)
    config = Config().replace(policy="auto", tpot_s=0.02, ttft_s=1.0)
    right = simulate(H200, queries, config, watched=True)
    wrong = simulate(dataclasses.replace(H200, belief_error=0.3), queries, config, watched=True)
    check_whole(queries, wrong)
    assert wrong.records != right.records
    assert any("off by up to 30%" in note for note in wrong.notes)


def test_some_steps_may_take_longer_for_once():
    queries = load(100, rate=10)
    config = Config().replace(policy="auto", tpot_s=0.02, ttft_s=1.0)
    smooth, rough, again = (
        simulate(dataclasses.replace(H200, hiccups=share), queries, config, watched=True)
        for share in (0.0, 0.1, 0.1)
    )
    check_whole(queries, rough)
    assert rough.records == again.records
    longest = [
        max(b - a for r in one.records for a, b in itertools.pairwise(r.token_s))
        for one in (smooth, rough)
    ]
    assert longest[1] > 1.3 * longest[0]
    assert any("10.0% of the steps" in note for note in rough.notes)


# ---------------------------------------------------------------- memory


def test_pages_are_what_the_weights_leave():
    pages = kv_pages(LLAMA, device_spec("h200"), Config())
    used = LLAMA.weight_bytes(2) + pages * 16 * LLAMA.kv_bytes_per_token()
    assert 0.89 * 141e9 < used <= 0.9 * 141e9
    half = kv_pages(LLAMA, device_spec("h200"), Config().replace(kv_cache_dtype="fp8"))
    assert half == pytest.approx(2 * pages, abs=1)
    assert kv_pages(LLAMA, device_spec("h200"), Config().replace(kv_pages=77)) == 77


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(
        ConfigError, match=r"llama-3.1-70b has 141.1 GB of bfloat16 weights.* 80 GB of h100"
    ):
        simulate(Machine(PRESETS["llama-3.1-70b"], device_spec("h100")), load(1, 1.0))


def test_a_request_beyond_the_context_fails_alone():
    queries = [Query(0, 0.0, 50, 5), Query(1, 0.0, 9000, 5)]
    came = simulate(CPU, queries, Config().replace(policy="chunked"))
    assert [record.finish_reason for record in came.records] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
    ]
    assert "context of 8192 tokens" in came.errors["q1"]


# ---------------------------------------------------------------- the command


def invoke(*words: str) -> None:
    app = cyclopts.App(result_action="return_value")
    app.command(command, name="simulate")
    assert app(["simulate", *words], exit_on_error=False, print_error=False) == 0


SMALL = ("--requests", "20", "--prompt-tokens", "300", "--output-tokens", "20", "--rate", "10")


def test_json_on_standard_output_is_json_alone(capsys):
    invoke(
        *SMALL, "--policy", "multiplex", "--split", "48", "--slo", "ttft=1,tpot=50ms", "--json", "-"
    )
    result = json.loads(capsys.readouterr().out)
    assert result["completed"] == 20 and result["failed"] == 0 and result["policy"] == "multiplex"
    assert (
        result["mean_ttft_ms"] > 0
        and result["slo_attainment"] == 1.0
        and result["request_goodput"] > 0
    )
    assert {(s["prefill_units"], s["decode_units"]) for s in result["split_share"]} >= {
        (84, 48),
        (0, 132),
    }


def test_the_table_says_what_was_simulated(capsys):
    invoke(*SMALL, "--gpu", "a100", "--policy", "chunked")
    text = capsys.readouterr().out
    assert (
        "llama-3.1-8b on a100, chunked" in text
        and "20 of 20 requests answered" in text
        and "not measured" in text
    )


def test_a_config_json_is_a_model(tmp_path, capsys):
    config = {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config))
    invoke(*SMALL, "--model", str(path), "--policy", "serial", "--json", str(tmp_path / "out.json"))
    assert "tiny on h200" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["model_id"] == "tiny"


def test_the_same_flags_write_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        invoke(*SMALL, "--policy", "multiplex", "--save-detailed", "--json", str(tmp_path / name))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_settings_file_is_heard_and_flags_beat_it(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(
        "model: {model: qwen3-8b}\nscheduler: {policy: serial, max_running: 7}\n"
    )
    invoke(*SMALL, "--config", str(tmp_path / "run.yaml"), "--max-running", "5", "--json", "-")
    result = json.loads(capsys.readouterr().out)
    assert (result["model_id"], result["policy"], result["config"]["scheduler"]["max_running"]) == (
        "qwen3-8b",
        "serial",
        5,
    )


def test_a_device_of_one_unit_is_never_split(capsys):
    one = ("--gpu", "cpu-1", "--model", "smollm2-135m")
    invoke(*SMALL, *one, "--policy", "auto", "--json", "-")
    result = json.loads(capsys.readouterr().out)
    assert result["completed"] == 20 and "policy auto runs as chunked here" in result["notes"]
    with pytest.raises(ConfigError, match="cpu-1: can't be split"):
        invoke(*SMALL, *one, "--without", "lending")


def test_wrong_flags_are_named():
    with pytest.raises(ValueError, match="unknown device 'h300'"):
        invoke(*SMALL, "--gpu", "h300")
    with pytest.raises(ConfigError, match="split is 200"):
        invoke(*SMALL, "--policy", "multiplex", "--split", "200")
    with pytest.raises(ValueError, match=r"llama-3\.1-8c"):
        invoke(*SMALL, "--model", "llama-3.1-8c")


# ---------------------------------------------------------------- walls


def test_no_torch():
    modules = "counterpoint.simulator.simulate, counterpoint.device.sim, counterpoint.device.contract_checker, benchmarks.roofline_check"
    code = f"import sys, {modules}, counterpoint.device.timeline; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_request_waits_from_when_it_is_sent_also_if_the_host_is_busy():
    """The second comes while the first one's launch keeps the host: the engine hears of it when that is over."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Busy(Machine):
        def host(self, physics):
            return Launches()

    class Launches:
        def seconds(self, work: BatchShape) -> float:
            return 1.0

        def start_s(self, work: BatchShape) -> float:
            return 0.0

    machine = Busy(LLAMA, H200.device, depth=1, physics=Constant(0.5))
    came = simulate(
        machine, [Query(0, 0.0, 16, 2), Query(1, 0.2, 16, 2)], Config().replace(policy="serial")
    )
    assert [record.arrival_s for record in came.records] == [0.0, 0.2]
    assert came.records[1].token_s[0] > 1.0
