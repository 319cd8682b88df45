"""A small model on two cores is calibrated, and `auto` uses the resulting table."""

from __future__ import annotations

import json
import shutil

import pytest

from counterpoint.bench.replay import ReplayOptions, replay_engine
from counterpoint.bench.workload import Query, TokenRange
from counterpoint.builder import system_builder
from counterpoint.cli import run_command
from counterpoint.config import Config
from counterpoint.core.policy import Auto
from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.calibration import file_name
from counterpoint.device.cores import usable_cores
from counterpoint.device.event_queue import WallClockEventQueue

pytestmark = pytest.mark.skipif(len(usable_cores()) < 2, reason="a split needs two cores")

TOKENS = TokenRange.within(512)
SHAPE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache, so that kernels are compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def shape(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(cache))
    shutil.rmtree(system_builder.calibration_folder(), ignore_errors=True)
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(SHAPE))
    return str(path)


def open_system(shape: str, policy: str = "auto") -> system_builder.System:
    config = Config().replace(
        model=shape, device="cpu", load_format="dummy", policy=policy, kv_pages=200, cores=2
    )
    return system_builder.build_system(config, WallClockEventQueue(), lambda _: None)


def calibrate(shape: str, tmp_path, *more: str) -> int:
    line = [
        "calibrate",
        shape,
        "--device",
        "cpu",
        "--cores",
        "2",
        "--kv-pages",
        "400",
        "--json",
        str(tmp_path / "report.json"),
    ]
    return run_command([*line, *more])


def test_auto_uses_the_calibration_and_says_so(shape, tmp_path, capsys):
    system = open_system(shape)
    system.executor.close()
    assert system.calibration_target is not None
    assert any("roofline" in note and "calibrate" in note for note in system.notes)
    assert calibrate(shape, tmp_path, "--budget", "6") == 0
    assert "held-out" in capsys.readouterr().out
    table = calibration_store.load(
        system_builder.calibration_folder() / file_name(system.calibration_target.key)
    )
    assert table.key == system.calibration_target.key
    assert {p.held_out for p in table.points} == {True, False}
    assert any(p.co_running for p in table.points)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["points"]["held_out"] == len(report["rows"]) > 0
    again = open_system(shape)
    again.executor.close()
    assert any(f"own calibration of {table.about['date']}" in note for note in again.notes)
    assert not any(note.startswith("prices") for note in notes_of(shape, "chunked"))


def notes_of(shape: str, policy: str) -> tuple[str, ...]:
    system = open_system(shape, policy)
    system.executor.close()
    return system.notes


def test_a_second_run_adds_points_and_a_fresh_one_starts_over(shape, tmp_path):
    assert calibrate(shape, tmp_path, "--budget", "3") == 0
    (path,) = system_builder.calibration_folder().glob("*.json")
    first = calibration_store.load(path).points
    assert calibrate(shape, tmp_path, "--budget", "3") == 0
    assert calibration_store.load(path).points[: len(first)] == first
    assert calibrate(shape, tmp_path, "--budget", "2", "--fresh") == 0
    assert calibration_store.load(path).points[0] != first[0]


def test_bad_arguments_are_named(shape, tmp_path, capsys):
    assert calibrate(shape, tmp_path, "--budget", "0") == 2
    assert "--budget" in capsys.readouterr().err
    line = ["calibrate", shape, "--device", "cpu", "--cores", "1", "--kv-pages", "400"]
    assert run_command(line) == 2
    assert "can't be split" in capsys.readouterr().err


def test_another_engine_over_the_same_device(shape):
    system = open_system(shape, "serial")
    for policy in ("serial", "multiplex", "chunked"):
        system.executor.close()
        inbox = WallClockEventQueue()
        config = Config().replace(
            model=shape, device="cpu", load_format="dummy", policy=policy, kv_pages=200, cores=2
        )
        assert system.rebuild is not None
        system = system.rebuild(config, inbox, Auto)
        queries = [Query(i, 0.0, 20, 4) for i in range(4)]
        came = replay_engine(
            system.engine, inbox, system.executor, queries, ReplayOptions(tokens=TOKENS)
        )
        assert [len(record.token_s) for record in came.records] == [4] * 4
        assert came.pages_leaked == 0
    system.executor.close()


def test_requests_unfinished_at_the_time_limit_are_aborted(shape):
    inbox = WallClockEventQueue()
    config = Config().replace(
        model=shape, device="cpu", load_format="dummy", policy="chunked", kv_pages=200, cores=2
    )
    system = system_builder.build_system(config, inbox, lambda _: None)
    queries = [Query(0, 0.0, 20, 4), Query(1, 0.0, 20, 480)]
    options = ReplayOptions(tokens=TOKENS, limit_s=0.0)
    came = replay_engine(system.engine, inbox, system.executor, queries, options)
    system.executor.close()
    assert {str(record.finish_reason) for record in came.records} <= {"length", "abort"}
    assert str(came.records[1].finish_reason) == "abort"
    assert came.pages_leaked == 0
