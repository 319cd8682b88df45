"""`compare`: one file of loads, the same queries in both places, one file of results."""

from __future__ import annotations

import json

import pytest

from counterpoint.cli import run_command
from counterpoint.simulator.compare import read_cases, truncate_timing
from counterpoint.simulator.machine import Machine
from counterpoint.spec.device import H200
from counterpoint.spec.presets import PRESETS
from counterpoint.types import FinishReason, RequestTiming

MACHINE = Machine(PRESETS["llama-3.1-8b"], H200)
LOADS = """
chat:
  requests: 12
  prompt_tokens: 200
  output_tokens: 10
  arrivals: poisson
  slo: ttft=1,tpot=50ms
  modes: {"chunked:512": 20, auto: [10, 20]}
burst:
  requests: 3
  arrivals: once
  modes: ["multiplex:32", serial]
"""


@pytest.fixture
def loads(tmp_path):
    path = tmp_path / "loads.yaml"
    path.write_text(LOADS)
    return path


def test_cells_have_the_same_requests_on_other_clocks(loads):
    cells = read_cases(loads, MACHINE)
    assert [(c.load, c.mode.name, c.rate) for c in cells] == [
        ("chat", "chunked:512", 20), ("chat", "auto", 10), ("chat", "auto", 20),
        ("burst", "multiplex:32", None), ("burst", "serial", None),
    ]  # fmt: skip
    chat = cells[:3]
    assert (
        len({tuple((q.id, q.prompt_tokens, q.output_tokens) for q in c.queries) for c in chat}) == 1
    )
    assert chat[1].queries[-1].arrival_s == pytest.approx(11 / 10)
    assert chat[0].queries[-1].arrival_s == chat[2].queries[-1].arrival_s == pytest.approx(11 / 20)
    assert all(q.slo.tpot_s == 0.05 for q in chat[0].queries)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "loads by name"),
        ("a: {requests: 3}", "modes"),
        ("a: {requests: many, modes: [auto]}", "requests"),
        ("a: {request: 3, modes: [auto]}", "request"),
        ("a: {modes: [fast]}", "fast"),
        ("a: {modes: [auto], slo: 'ttft'}", "ttft"),
        ("a: {modes: {auto: soon}}", "a.*soon"),
        ("a: {modes: {auto: 0}}", "rate is 0"),
        ("a: [", "not YAML"),
        ("a: {trace: nowhere.csv, modes: [auto]}", "nowhere.csv"),
    ],
)
def test_a_wrong_file_is_told(tmp_path, text, said):
    path = tmp_path / "loads.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_cases(path, MACHINE)


def test_results_are_kept_and_not_run_again(loads, tmp_path, capsys):
    results = tmp_path / "results.json"
    line = [
        "compare",
        str(loads),
        "--model",
        "llama-3.1-8b",
        "--on",
        "simulator",
        "--json",
        str(results),
    ]
    assert run_command([*line, "--only", "chat"]) == 0
    first = json.loads(results.read_text())["rows"]
    assert [(row["load"], row["mode"], row["rate"], row["place"]) for row in first] == [
        ("chat", "chunked:512", 20, "simulator"),
        ("chat", "auto", 10, "simulator"),
        ("chat", "auto", 20, "simulator"),
    ]  # fmt: skip
    assert all(row["completed"] == 12 and row["slo_attainment"] == 1.0 for row in first)
    assert "chunked:512" in capsys.readouterr().out
    assert run_command(line) == 0
    second = json.loads(results.read_text())["rows"]
    assert second[:3] == first
    assert [row["mode"] for row in second[3:]] == ["multiplex:32", "serial"]


def test_what_is_unanswered_at_the_end_has_failed(loads, tmp_path):
    results = tmp_path / "results.json"
    line = [
        "compare",
        str(loads),
        "--model",
        "llama-3.1-8b",
        "--on",
        "simulator",
        "--json",
        str(results),
        "--drain",
        "0.001",
    ]
    assert run_command(line) == 0
    rows = json.loads(results.read_text())["rows"]
    assert all(row["failed"] > 0 for row in rows)
    assert rows[0]["slo_attainment"] < 1


def test_a_timeline_of_each_run_is_written(loads, tmp_path):
    line = ["compare", str(loads), "--model", "llama-3.1-8b", "--on", "simulator", "--only", "chat"]
    assert run_command([*line, "--timelines", str(tmp_path / "new" / "traces")]) == 0
    traces = {
        path.name: json.loads(path.read_text())["traceEvents"]
        for path in (tmp_path / "new" / "traces").iterdir()
    }
    assert sorted(traces) == [
        f"chat_{mode}-simulator.json" for mode in ("auto_10", "auto_20", "chunked_512_20")
    ]
    assert all(any(event["ph"] == "X" for event in events) for events in traces.values())


def test_runs_under_other_settings_are_not_taken_for_these(loads, tmp_path, capsys):
    results = tmp_path / "results.json"
    line = [
        "compare",
        str(loads),
        "--model",
        "llama-3.1-8b",
        "--on",
        "simulator",
        "--json",
        str(results),
        "--only",
        "chat",
    ]
    assert run_command([*line, "--drain", "5"]) == 0
    kept = results.read_text()
    capsys.readouterr()
    assert run_command([*line, "--drain", "15", "--kv-pages", "3000"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "drain 5.0 (now 15.0)" in said
        and "kv_pages None (now 3000)" in said
        and str(results.name) in said
    )
    assert results.read_text() == kept


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_a_file_of_other_results_is_named_and_kept(loads, tmp_path, capsys, text):
    (tmp_path / "other.json").write_text(text)
    line = [
        "compare",
        str(loads),
        "--model",
        "llama-3.1-8b",
        "--on",
        "simulator",
        "--json",
        str(tmp_path / "other.json"),
    ]
    assert run_command(line) == 2
    assert "other.json" in capsys.readouterr().err and (tmp_path / "other.json").read_text() == text


def test_wrong_flags_are_named(loads, capsys):
    for flags in (["--only", "nothing"], ["--drain", "nan"]):
        assert (
            run_command(
                ["compare", str(loads), "--model", "llama-3.1-8b", "--on", "simulator", *flags]
            )
            == 2
        )
        assert flags[0] in capsys.readouterr().err


def test_places_are_checked(loads, capsys):
    assert run_command(["compare", str(loads), "--model", "llama-3.1-8b", "--on", "gpu"]) == 2
    assert "engine,simulator" in capsys.readouterr().err


def test_cut():
    record = RequestTiming(
        id="a", arrival_s=0.0, admitted_s=0.1, finished_s=3.0, prompt_tokens=1, cached_tokens=0,
        token_s=(1.0, 2.0, 3.0),
        finish_reason=FinishReason.LENGTH, preemptions=0,
    )  # fmt: skip
    assert truncate_timing(record, 3.0) == record
    short = truncate_timing(record, 2.5)
    assert (short.token_s, short.finish_reason, short.finished_s) == (
        (1.0, 2.0),
        FinishReason.ABORT,
        2.5,
    )


def test_a_part_of_auto_may_be_left_out(tmp_path):
    path, results = tmp_path / "loads.yaml", tmp_path / "results.json"
    load = (
        "{requests: 60, prompt_tokens: 1500, output_tokens: 60, arrivals: poisson, "
        "slo: 'ttft=1,tpot=30ms'"
    )
    path.write_text(f"chat: {load}, modes: {{auto: 20, auto without fusion: 20}}}}")
    assert (
        run_command(
            [
                "compare",
                str(path),
                "--model",
                "llama-3.1-8b",
                "--on",
                "simulator",
                "--json",
                str(results),
            ]
        )
        == 0
    )
    rows = json.loads(results.read_text())["rows"]
    mixed = [any(part["kind"] == "mixed" for part in row["unit_seconds"]) for row in rows]
    assert [row["mode"] for row in rows] == ["auto", "auto without fusion"]
    assert mixed == [True, False]
