"""The papers' settings: what can be done by hand, and that a setting runs to its table."""

from __future__ import annotations

import dataclasses

import pytest
from sim_builders import Constant

from benchmarks import papers
from counterpoint.bench.workload import Query
from counterpoint.config import Config
from counterpoint.cost_model.roofline import MatrixProduct
from counterpoint.simulator.machine import Machine
from counterpoint.simulator.rate_search import PlanTask
from counterpoint.spec.device import device_spec
from counterpoint.spec.presets import PRESETS


def test_waves_by_hand():
    """192 tiles on 108 SMs: two waves, of which 24 places stay empty."""
    work, room = papers.one_tile(MatrixProduct(6144, 4096), 1024, 108)
    assert 1 - work / room == pytest.approx(24 / 216)


def test_waves_fall_with_length_and_start_where_the_paper_does():
    rows = {row["tokens"]: row for row in papers.wave_rows()}
    idle = [rows[n]["one tile"] for n in (1024, 2048, 4096, 16384)]
    assert idle == sorted(idle, reverse=True)
    assert rows[1024]["one tile"] == pytest.approx(0.23, abs=0.01)
    assert rows[2048]["one tile"] == pytest.approx(0.107, abs=0.005)
    assert all(row["chosen tiles"] <= row["one tile"] + 0.01 for row in rows.values())


def test_a_setting_runs_to_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(papers, "CHUNKS", (512, 1024))
    monkeypatch.setattr(papers, "PRECISION", 0.2)
    load = {
        "prompt_tokens": 2000,
        "output_tokens": 8,
        "prompt_lengths": "constant",
        "output_lengths": "constant",
    }
    setting = dataclasses.replace(papers.SETTINGS[1], load=load, slo="ttft=0.4,tpot=100ms")
    told: list[str] = []
    result = papers.run(setting, tmp_path, 10, told.append)
    assert len(told) == len(result["rates"]) == 2 + 4 + 1
    assert all(rate > 0 for rate in result["rates"].values())
    text = papers.show([result], list(papers.wave_rows()))
    assert "| MuxWise | llama-3.1-8b, a100, ShareGPT-like |" in text
    assert "19.4%" in text


def test_idle_by_hand():
    """Prompts of a second's work each, every four seconds, and answers of two tokens: while a
    request is there, the prefill worker works for the first half of the time and the decode worker
    for the second; of two replicas, one works."""
    machine = Machine(
        PRESETS["llama-3.1-8b"], device_spec("a100"), host_s=0.0, depth=1, physics=Constant(1.0)
    )
    config = Config().replace(ttft_s=1.5, tpot_s=1.5, prefix_cache=False)
    queries = tuple(Query(i, 4.0 * i, 600, 2) for i in range(41))
    task = PlanTask(machine, config, queries, precision=0.1)
    pools = papers.Fleet(
        "strict", machine, 1, {"policy": "serial", "prefill": 1, "decode": 1}, strict=True
    )
    found = papers.work(pools, task, 0.25)
    assert found is not None and found["idle by worker"] == pytest.approx(
        {"prefill-0": 0.5, "decode-0": 0.5}, abs=0.02
    )
    replicas = papers.Fleet("replicas", machine, 1, {"policy": "serial", "replicas": 2})
    assert papers.work(replicas, task, 0.25)["idle"] == pytest.approx(0.5, abs=0.02)
    assert papers.work(replicas, task, 50.0) is None, "too many would be late"


def test_fleets_have_equal_numbers_of_gpus():
    one, eight = papers.fleets(papers.SETTINGS[1], 20, 4), papers.fleets(papers.SETTINGS[4], 20, 4)
    for fleet in (*one, *eight):
        workers = Config().replace(**fleet.settings).cluster.workers
        assert workers * fleet.machine.device.degree == fleet.gpus, fleet.name
    assert {fleet.gpus for fleet in one} == {4} and {fleet.gpus for fleet in eight} == {8}
    assert [fleet.name for fleet in eight if fleet.strict] == ["strict pools 4:4"]


def test_traces_that_are_not_there_are_named_before_anything_is_simulated(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["papers", "--traces", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        papers.main()
    assert "azure_2023_code.csv" in capsys.readouterr().err
