"""The search for the rate that a mode holds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys

import cyclopts
import psutil
import pytest
from sim_builders import Constant

from counterpoint.bench.workload import Lengths, Query, SyntheticLoad
from counterpoint.config import Config, ConfigError, SchedulerConfig
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy import make_policy
from counterpoint.core.policy.ablations import ablated_auto
from counterpoint.simulator import plan
from counterpoint.simulator.machine import Machine
from counterpoint.simulator.plan import Mode, PlanTask, find_rate, highest, parse_modes, search
from counterpoint.spec.device import device_spec
from counterpoint.spec.presets import PRESETS

H200 = Machine(PRESETS["llama-3.1-8b"], device_spec("h200"))
SERIAL = Mode("serial", {"policy": "serial", "max_pass_tokens": 16, "prefix_cache": False})


@pytest.mark.parametrize("limit", [-100, -17, -16, -1, 0, 1, 15, 16, 17, 200])
@pytest.mark.parametrize("start", [-50, 0, 7])
def test_the_highest_step_that_holds_is_found_from_anywhere(limit, start):
    tried = []
    assert highest(lambda step: tried.append(step) or step <= limit, start) == limit
    assert len(tried) < 30


@pytest.mark.parametrize("precision", [0.001, 0.02, 0.5])
def test_how_far_is_looked_does_not_depend_on_the_precision(precision):
    task = dataclasses.replace(one_server(0.1, 0.9, 0.6), precision=precision)
    assert task.at(task.stride) == pytest.approx(1.02**16, rel=0.1)
    found = find_rate(task, SERIAL, start=round(math.log(1000) / math.log1p(precision)))
    assert 10 / (1 + precision) < found.rate < 10.3, "a hundredth of where the search began"


def test_a_load_that_is_never_served_in_time_has_no_rate():
    assert highest(lambda step: False, 0) is None


def one_server(service_s: float, wanted: float, ttft_s: float) -> PlanTask:
    """Constant arrivals at a server that takes `service_s` for each."""
    machine = Machine(H200.model, H200.device, host_s=0.0, depth=1, physics=Constant(service_s))
    queries = SyntheticLoad(200, Lengths(16), Lengths(1), arrivals="constant", rate=1.0).queries()
    return PlanTask(machine, Config().replace(ttft_s=ttft_s), tuple(queries), wanted)


def test_a_server_holds_the_rate_at_which_its_queue_is_just_short_enough():
    """At rate r > 1/s request i waits i (s - 1/r): nine in ten of 200 wait at most w if 179 (s - 1/r) <= w."""
    service_s, wait_s = 0.1, 0.5
    found = find_rate(one_server(service_s, 0.9, service_s + wait_s), SERIAL)
    exact = 1 / (service_s - wait_s / 179)
    assert exact / 1.02 <= found.rate <= exact
    assert found.attainment is not None and found.attainment >= 0.9
    assert any(attainment is None for rate, attainment in found.tried if rate > exact), (
        "what can't succeed is given up"
    )


def test_a_target_below_the_service_time_is_never_met():
    assert find_rate(one_server(0.1, 0.9, 0.05), SERIAL).rate == 0.0


def test_a_load_that_is_in_time_at_any_rate_is_refused():
    with pytest.raises(ValueError, match="200 requests are too few: serial"):
        find_rate(one_server(0.1, 0.9, 25.0), SERIAL)


def test_the_same_is_found_by_any_number_of_processes_and_from_any_start():
    queries = tuple(
        SyntheticLoad(40, Lengths(800, "lognormal"), Lengths(30, "lognormal"), rate=1.0).queries()
    )
    task = PlanTask(H200, Config().replace(ttft_s=0.3, tpot_s=0.02), queries, precision=0.1)
    modes = parse_modes("serial,chunked:512", H200)
    one = {found.mode: found.rate for found in search(task, modes, jobs=1, start=0)}
    two = {found.mode: found.rate for found in search(task, modes, jobs=2, start=9)}
    assert one == two and all(rate > 1 for rate in one.values())


PLAN = """
import multiprocessing, os, signal, sys
from counterpoint.simulator import plan
from counterpoint.cli import run_command
multiprocessing.set_start_method("fork")  # so that its processes have this too:
play = plan.play
plan.play = lambda task, rate: (print(os.getpid(), flush=True), play(task, rate))[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
sys.exit(run_command(["plan", "--requests", "20000", "--jobs", "2", "--modes", "serial,auto,multiplex"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_plan_that_is_ended(number):
    """Ctrl-C reaches the whole group; a kill the command alone."""
    command = psutil.Popen(
        [sys.executable, "-c", PLAN],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        searching: set[int] = set()
        while len(searching) < 2:
            searching.add(int(command.stdout.readline()))
        children = [psutil.Process(each) for each in searching]
        assert all(child.ppid() == command.pid for child in children)
        os.killpg(command.pid, number) if number == signal.SIGINT else command.kill()
        assert command.wait(30) == (130 if number == signal.SIGINT else -number)
        assert not psutil.wait_procs(children, timeout=30)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)


def test_modes_are_read_and_wrong_ones_named():
    modes = {
        mode.name: mode.settings
        for mode in parse_modes("serial, chunked:256,multiplex:48,auto", H200)
    }
    assert modes["chunked:256"] == {"policy": "chunked", "chunk_tokens": 256}
    assert modes["multiplex:48"] == {"policy": "multiplex", "split": 48} and set(modes) >= {
        "serial",
        "auto",
    }
    several = parse_modes("multiplex", H200)
    assert len(several) > 2 and all(8 <= mode.settings["split"] <= 66 for mode in several)
    for wrong in (
        "fast",
        "chunked:many",
        "auto:3",
        "pools",
        "pools:1",
        "pools:0:1",
        "pools:1:1,pools:1:2",
        "",
    ):
        with pytest.raises(ValueError, match="--modes"):
            parse_modes(wrong, H200)


def test_a_device_of_one_unit_has_no_splits():
    one = Machine(PRESETS["smollm2-135m"], device_spec("cpu-1"))
    assert [mode.name for mode in parse_modes("serial,multiplex,auto", one)] == ["serial", "auto"]


def test_beside_pools_the_others_have_as_many_machines():
    modes = parse_modes("chunked:512,pools:1:2,pools:2:1", H200)
    assert [Config().replace(**mode.settings).cluster.workers for mode in modes] == [3, 3, 3]
    queries = tuple(
        SyntheticLoad(60, Lengths(800, "lognormal"), Lengths(30, "lognormal"), rate=1.0).queries()
    )
    task = PlanTask(H200, Config().replace(ttft_s=0.3, tpot_s=0.02), queries, precision=0.1)
    alone, three = (
        find_rate(task, parse_modes("chunked:512", H200)[0]).rate,
        find_rate(task, modes[0]).rate,
    )
    assert three > 2 * alone


def test_the_command_writes_what_it_found(tmp_path, capsys):
    app = cyclopts.App()
    app.default(plan.command)
    path = tmp_path / "plan.json"
    load = [
        "--requests",
        "60",
        "--prompt-tokens",
        "500",
        "--output-tokens",
        "10",
        "--precision",
        "0.2",
        "--jobs",
        "1",
    ]
    app(
        [
            *load,
            "--modes",
            "serial,chunked:512",
            "--slo",
            "ttft=0.2,tpot=20ms",
            "--json",
            str(path),
        ],
        exit_on_error=False,
        result_action="return_value",
    )
    result = json.loads(path.read_text())
    assert [row["mode"] for row in result["modes"]] == ["serial", "chunked:512"]
    assert max(row["of_best"] for row in result["modes"]) == 1.0 and result["best"] in (
        "serial",
        "chunked:512",
    )
    text = capsys.readouterr().out
    assert "90.0 % within ttft=0.2,tpot=20ms" in text and "chunked:512" in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "ttft=1.0,tpot=50ms"),
        (["--ttft-s", "0.4", "--itl-s", "0.1"], "ttft=0.4,itl=0.1"),
        (["--ttft-s", "0.4", "--slo", "tpot=20ms"], "tpot=20ms"),
    ],
)
def test_targets_are_the_flag_s_else_the_settings_else_the_usual(flags, said, capsys):
    app = cyclopts.App()
    app.default(plan.command)
    load = [
        "--requests",
        "60",
        "--prompt-tokens",
        "500",
        "--output-tokens",
        "10",
        "--precision",
        "0.5",
        "--jobs",
        "1",
    ]
    app(
        [*load, "--modes", "serial", "--json", "-", *flags],
        exit_on_error=False,
        result_action="return_value",
    )
    assert json.loads(capsys.readouterr().out)["slo"] == said


def test_a_load_that_is_over_before_its_answers_need_be_is_told():
    task = one_server(0.1, 0.9, 5.0)  # 200 requests
    fast, slow = (
        plan.FoundRate(name, rate, 0.9, {}, ()) for name, rate in (("fast", 50.0), ("slow", 30.0))
    )
    assert [note.partition(":")[0] for note in plan.brevity(task, [fast, slow])] == ["fast"]
    assert (
        plan.brevity(task, [slow])
        == plan.brevity(task, [plan.FoundRate("none", 0.0, None, {}, ())])
        == []
    )


def test_the_clock_is_stretched_and_nothing_else():
    queries = (Query(0, 0.0, 100, 5), Query(1, 3.0, 200, 5), Query(2, 4.0, 300, 5))
    result = plan.play(
        PlanTask(H200, Config().replace(policy="serial", ttft_s=10.0), queries, wanted=1.0), 0.5
    )
    assert (
        result
        and result["total_input_tokens"] == 600
        and result["duration"] == pytest.approx(4.0, rel=0.1)
    )


@pytest.mark.parametrize("part", ["fusion", "lending"])
def test_auto_without_a_part_is_a_mode_of_its_own(part: str):
    machine = H200
    modes = parse_modes(f"auto,auto without {part}", machine)
    assert [mode.name for mode in modes] == ["auto", f"auto without {part}"]
    assert [mode.on(machine).without for mode in modes] == [None, part]


def test_a_part_that_auto_does_not_have_is_refused():
    with pytest.raises(ValueError, match="auto can be without one of fusion, partition"):
        parse_modes("auto without luck", H200)


def test_auto_without_a_part_is_refused_where_auto_is_chunked():
    with pytest.raises(ConfigError, match="no part of it can be left out"):
        make_policy(
            SchedulerConfig(policy="auto"),
            DeviceShape(1, 4),
            Constant(1.0),
            ablated_auto("fusion"),
        )
    make_policy(
        SchedulerConfig(policy="chunked"),
        DeviceShape(1, 4),
        Constant(1.0),
        ablated_auto("fusion"),
    )
