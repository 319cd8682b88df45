"""Measuring jobs on a simulated device: times, budget, interruption."""

from __future__ import annotations

import math

import msgspec
import pytest
from calibration_bench import (
    CAPACITY,
    KEY,
    LEVELS,
    LLAMA,
    PRIOR,
    REAL,
    FixedTime,
    PaddingDevice,
    SlowHost,
    calibration_bench,
)

from counterpoint.bench import calibration_run
from counterpoint.bench.calibration_plan import (
    CalibrationJob,
    held_out_jobs,
    plan_jobs,
)
from counterpoint.bench.calibration_report import report
from counterpoint.bench.calibration_run import CalibrationRun, run_jobs
from counterpoint.cost_model.calibration import (
    Calibration,
    decode,
    encode,
)
from counterpoint.cost_model.fitted import Fitted
from counterpoint.device.sim import SimExecutor, VirtualEventQueue
from counterpoint.device.step_probe import PROMPT_SLOTS, CoRun, ProbePrompt, StepError, StepProbe
from counterpoint.spec.device import H200
from counterpoint.types import BatchShape, Command, InitSlot, Lane, Role, Step, StepDone


class TiringDevice:
    """REAL, but prefills take 1.2 times as long after 0.5 s, and co-running steps from
    `pairs_from_s` on."""

    def __init__(self) -> None:
        self.inbox: VirtualEventQueue | None = None
        self.pairs_from_s = math.inf

    def seconds(
        self, work: BatchShape, units: int, co_running: tuple[BatchShape, int] | None = None
    ) -> float:
        since_s = 0.0 if self.inbox is None else self.inbox.now
        tired = since_s > (self.pairs_from_s if co_running else 0.5) and (
            co_running or work.prefill_tokens
        )
        return REAL.seconds(work, units, co_running) * (1.2 if tired else 1.0)


def test_sustained_slowdown_is_measured_and_not_used_on_held_out_points():
    physics = TiringDevice()
    b = calibration_bench(physics)
    physics.inbox = b.inbox
    b.run.measure(CalibrationJob((ProbePrompt(2048),), (), 132, held_out=True))
    judged = report(b.table, PRIOR)["held_out"]["fitted"]
    b.run.measure_sustained(CAPACITY, LEVELS, 240.0)
    assert b.table.on_and_on["mixed"] == pytest.approx(1.2, rel=0.02)
    assert b.table.on_and_on["beside each other"] == pytest.approx(1.0, rel=0.02)
    del b.table.on_and_on["beside each other"]
    physics.pairs_from_s = b.inbox.now + 1.0
    b.run.measure_sustained(CAPACITY, LEVELS, 240.0)
    assert b.table.on_and_on["beside each other"] == pytest.approx(1.2, rel=0.02)
    decode_step = BatchShape.decode(64, 64 * 1024, 32)
    beside = (decode_step, 32, (BatchShape.prefill(2048, 0, 32), 100))
    rested = msgspec.structs.replace(b.table, on_and_on={})
    assert Fitted(b.table, PRIOR).seconds(*beside) == pytest.approx(
        1.2 * Fitted(rested, PRIOR).seconds(*beside), rel=0.03
    )
    prefill, fresh = BatchShape.prefill(2048, 0, 32), msgspec.structs.replace(b.table, on_and_on={})
    b.table.on_and_on["prefill"] = 1.1
    assert Fitted(b.table, PRIOR).seconds(prefill, 132) == pytest.approx(
        1.1 * Fitted(fresh, PRIOR).seconds(prefill, 132)
    )
    assert report(b.table, PRIOR)["held_out"]["fitted"] == judged
    assert decode(encode(b.table)) == b.table


def test_a_step_that_waits_for_the_host_takes_as_long_as_its_launch():
    host = SlowHost()
    b = calibration_bench(PaddingDevice(REAL, (), host), host=host)
    b.run.measure(CalibrationJob((ProbePrompt(600),), (), 132))
    (point,) = b.table.points
    assert REAL.seconds(point.work, 132) > host.seconds(point.work) > 0.012
    assert point.host_s == pytest.approx(host.seconds(point.work))
    assert point.seconds == pytest.approx(REAL.seconds(point.work, 132))
    small = calibration_bench(PaddingDevice(FixedTime(0.001), (), host), host=host)
    small.run.measure(CalibrationJob((ProbePrompt(600),), (), 132))
    assert small.table.points[0].seconds == pytest.approx(host.seconds(point.work), rel=0.01)


def test_measured_times_are_the_real_ones():
    b = calibration_bench()
    b.run.measure(CalibrationJob((), (700, 900, 1100), 32))
    b.run.measure(CalibrationJob((ProbePrompt(512, 256), ProbePrompt(100)), (), 132))
    for point in b.table.points:
        assert point.seconds == pytest.approx(REAL.seconds(point.work, point.units))
    b.run.measure(CalibrationJob((ProbePrompt(4096),), (2048,) * 64, 32))
    decode, prefill = b.table.points[-2:]
    assert decode.seconds == pytest.approx(
        REAL.seconds(decode.work, 32, decode.co_running), rel=0.02
    )
    assert prefill.seconds == pytest.approx(
        REAL.seconds(prefill.work, 100, prefill.co_running), rel=0.05
    )


def test_a_second_run_resumes():
    first = calibration_bench()
    jobs = plan_jobs(H200.units, LEVELS, CAPACITY)[:10]
    run_jobs(first.run, jobs[:6], [], 1e9, lambda done, of: None)
    points = list(first.table.points)
    second = calibration_bench(table=Calibration(key=KEY, points=points))
    run_jobs(second.run, jobs, [], 1e9, lambda done, of: None)
    assert second.table.points[: len(points)] == points
    assert len(second.saved) == 4


def test_jobs_beyond_the_budget_are_skipped(monkeypatch):
    b = calibration_bench()
    monkeypatch.setattr(calibration_run.time, "monotonic", lambda: b.inbox.now)
    jobs = plan_jobs(H200.units, LEVELS, CAPACITY)
    held_out = held_out_jobs(H200.units, LEVELS, CAPACITY, 8192)
    left_out = run_jobs(b.run, jobs, held_out, 40.0, lambda done, of: None)
    assert left_out == len(jobs) + len(held_out) - len(b.saved)
    kinds = {p.held_out for p in b.table.points}
    assert kinds == {True, False}  # some time was kept for the held_out
    assert b.inbox.now < 45


class FailingExecutor(SimExecutor):
    def submit(self, command: Command) -> None:
        if isinstance(command, Step):
            self.inbox.post(
                self.inbox.now, StepDone(command.id, command.lane, error="out of memory")
            )
        else:
            super().submit(command)


def test_a_wrong_guess_does_not_change_the_measurement():
    """With a guess of almost no time, and of a hundred times the real one."""
    b = calibration_bench()
    prefill, decode = CalibrationJob((ProbePrompt(512),), (1000,) * 32, 32).shapes(LLAMA.layers)
    assert prefill is not None and decode is not None
    b.probe.set_decode_batch((1000,) * 32)
    right = (REAL.seconds(decode, 32), REAL.seconds(prefill, 100))
    wanted = [
        took.seconds
        for took in b.probe.time_co_running(CoRun(decode, 32, prefill, [ProbePrompt(512)], right))
    ]
    for guess in ((1e-4, right[1]), (right[0], 100 * right[1])):
        found = [
            took.seconds
            for took in b.probe.time_co_running(
                CoRun(decode, 32, prefill, [ProbePrompt(512)], guess)
            )
        ]
        assert found == pytest.approx(wanted, rel=0.05)


def test_a_failed_step_raises():
    inbox = VirtualEventQueue()
    probe = StepProbe(
        FailingExecutor(REAL, inbox, LLAMA.layers),
        inbox,
        100,
        16,
        132,
        LLAMA.layers,
        2,
        LLAMA.vocab,
    )
    probe.set_decode_batch((10, 10))
    with pytest.raises(StepError, match="out of memory"):
        probe.time_decode(BatchShape.decode(2, 20, LLAMA.layers), 132)


def test_more_than_the_pool_holds_is_refused():
    inbox = VirtualEventQueue()
    probe = StepProbe(
        SimExecutor(REAL, inbox, LLAMA.layers), inbox, 8, 16, 132, LLAMA.layers, 2, LLAMA.vocab
    )
    with pytest.raises(ValueError, match="do not fit 8 pages"):
        probe.set_decode_batch((100, 100))


def test_probe_tokens_are_in_the_vocabulary():
    inbox = VirtualEventQueue()
    probe = StepProbe(
        SimExecutor(REAL, inbox, LLAMA.layers), inbox, 100, 16, 132, LLAMA.layers, 2, vocab=7
    )
    assert set(probe.tokens) <= set(range(7))


def test_slots_of_prompts_and_decodes_differ():
    seen: list[Command] = []

    class Spy(SimExecutor):
        def submit(self, command: Command) -> None:
            seen.append(command)
            super().submit(command)

    inbox = VirtualEventQueue()
    probe = StepProbe(
        Spy(REAL, inbox, LLAMA.layers), inbox, 1000, 16, 132, LLAMA.layers, 2, LLAMA.vocab
    )
    calibration = CalibrationRun(probe, Calibration(key=KEY), PRIOR, lambda table: None)
    calibration.measure(CalibrationJob((ProbePrompt(64),) * 4, (50,) * 3, 32))
    slots = {command.slot for command in seen if isinstance(command, InitSlot)}
    assert slots == {0, 1, 2, 3, PROMPT_SLOTS, PROMPT_SLOTS + 1, PROMPT_SLOTS + 2}
    lanes = {Lane(0, Role.DECODE, 2).id, Lane(1, Role.PREFILL, 2).id}
    assert {command.lane for command in seen if isinstance(command, Step)} == lanes
