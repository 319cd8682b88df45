"""The trace of the lanes."""

from __future__ import annotations

import itertools
import json

import pytest
from sim_builders import Constant, init_slot, make_step

from counterpoint.bench.workload import Query
from counterpoint.config import Config
from counterpoint.device.sim import SimExecutor, VirtualEventQueue
from counterpoint.device.timeline import Timeline
from counterpoint.simulator.machine import Machine
from counterpoint.simulator.simulate import SimRun, simulate
from counterpoint.spec.device import device_spec
from counterpoint.spec.presets import PRESETS
from counterpoint.types import Segment

MACHINE = Machine(PRESETS["llama-3.1-8b"], device_spec("h200"))
QUERIES = [Query(i, 0.05 * i, 3000, 40) for i in range(12)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("timeline") / "trace.json"
    simulate(
        MACHINE,
        QUERIES,
        Config().replace(policy="multiplex", split=48),
        run=SimRun(timeline=str(path)),
    )
    return json.loads(path.read_text())


def spans(trace: dict, lane: int) -> list[dict]:
    return sorted(
        (e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == lane),
        key=lambda e: e["ts"],
    )


def test_every_lane_has_a_named_track(trace):
    names = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert names == {0: "decode", 1: "prefill"}


def test_a_lane_does_one_step_at_a_time_and_all_work_is_there(trace):
    for lane in (0, 1):
        for one, next_one in itertools.pairwise(spans(trace, lane)):
            assert one["ts"] + one["dur"] <= next_one["ts"] + 0.01
    layers = [e["args"]["layers"] for e in spans(trace, 1)]
    assert (
        sum(text.endswith(", 32)") for text in layers)
        == sum(text.startswith("[0, ") for text in layers)
        > 0
    )
    done = sum(
        e["args"]["prefill_tokens"]
        for e in spans(trace, 1)
        if e["args"]["layers"].endswith(", 32)")
    )
    assert done == 12 * 3000
    assert sum(e["args"]["decode_batch"] for e in spans(trace, 0)) == 12 * 39


def test_counters_say_the_split_the_queue_and_the_cache(trace):
    counters = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    units = [e["args"] for e in counters if e["name"] == "units"]
    assert {"decode": 48, "prefill": 84} in units
    assert units[-1] == {"decode": 0, "prefill": 0}
    assert max(e["args"]["running"] for e in counters if e["name"] == "requests") > 1
    assert max(e["args"]["in use"] for e in counters if e["name"] == "KV pages") > 3000 // 16


def test_times_begin_at_zero_and_are_those_of_the_device():
    inbox = VirtualEventQueue()
    timeline = Timeline(SimExecutor(Constant(2.0), inbox, layers=4), inbox)
    inbox.call_at(5.0, lambda: timeline.submit(make_step(1, Segment(0, 0, 8, True, (0, 1)))))
    timeline.submit(init_slot(0))
    while timeline.get() is not None:
        pass
    (event,) = [e for e in timeline.chrome_trace()["traceEvents"] if e["ph"] == "X"]
    assert (event["ts"], event["dur"], event["name"]) == (0.0, 2e6, "prefill: 8 tokens")
    assert timeline.spans[0].started_s == 5.0 and timeline.spans[0].ended_s == 7.0


def test_recording_changes_nothing(tmp_path):
    config = Config().replace(policy="multiplex", split=48)
    plain = simulate(MACHINE, QUERIES, config)
    assert (
        simulate(MACHINE, QUERIES, config, run=SimRun(timeline=str(tmp_path / "t.json"))) == plain
    )
