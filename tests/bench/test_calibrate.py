"""Calibration from end to end, on a simulated device whose steps are not what the roofline says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from counterpoint.bench import calibrate as c
from counterpoint.device.probe import PROMPTS, Probe, Prompt, StepError
from counterpoint.device.sim import SimExecutor, VirtualInbox
from counterpoint.perf.fitted import Fitted
from counterpoint.perf.roofline import Roofline
from counterpoint.perf.table import Key, Table, decode_work, shape_of
from counterpoint.ports import Estimator
from counterpoint.spec.device import H200, Curve
from counterpoint.spec.presets import PRESETS
from counterpoint.types import Command, Lane, Open, Role, Step, StepDone

LLAMA = PRESETS["llama-3.1-8b"]
PRIOR = Roofline(LLAMA, H200)
REAL = Roofline(
    LLAMA,
    replace(
        H200,
        gemm=replace(H200.gemm, efficiency=Curve(((24, 0.7), (132, 0.5))), read_fraction=0.7),
        attention=replace(H200.attention, efficiency=0.4, read_bandwidth=H200.read_bandwidth),
        contention=replace(H200.contention, bandwidth=1.0, compute=0.6),
        kernel_s=6e-6,
    ),
)
KEY = Key(device="NVIDIA H200", units=132, model=shape_of(LLAMA), dtype="bfloat16", kv_dtype="bfloat16", kernels="k")
LEVELS = (16, 32, 64)
ROOM = c.Room(context=32768, tokens=900_000, batch=248, rows=8192)


@dataclass
class Bench:
    inbox: VirtualInbox
    probe: Probe
    table: Table
    calibration: c.Calibration
    kept: list[int]


def bench(physics: Estimator = REAL, table: Table | None = None) -> Bench:
    inbox = VirtualInbox()
    probe = Probe(SimExecutor(physics, inbox, LLAMA.layers), inbox, 57_000, 16, H200.units, LLAMA.layers, 2, LLAMA.vocab)
    table, kept = table or Table(key=KEY), []
    return Bench(inbox, probe, table, c.Calibration(probe, table, PRIOR, lambda table: kept.append(len(table.points))), kept)


def run(b: Bench, levels: tuple[int, ...] = LEVELS, budget_s: float = 1e9) -> int:
    judges = c.held_out(H200.units, levels, ROOM, 8192)
    return c.calibrate(b.calibration, c.plan(H200.units, levels, ROOM), judges, budget_s, lambda done, of: None)


def test_a_calibrated_device_is_predicted():
    b = bench()
    assert run(b) == 0
    judges = [p for p in b.table.points if p.held_out]
    found = c.errors(Fitted(b.table, PRIOR), judges)
    assert found["all, alone"]["p50"] < 0.05
    assert found["all, alone"]["p95"] < 0.10
    assert found["all, beside the other"]["p95"] < 0.15
    bare = c.errors(PRIOR, judges)
    assert bare["all, alone"]["p50"] > 0.1
    assert b.kept == sorted(set(b.kept))  # written after every job
    assert b.inbox.now < 300  # of the device's time


def test_steps_are_timed_as_they_are():
    b = bench()
    b.calibration.measure(c.Job((), (700, 900, 1100), 32))
    b.calibration.measure(c.Job((Prompt(512, 256), Prompt(100)), (), 132))
    for point in b.table.points:
        assert point.seconds == pytest.approx(REAL.seconds(point.work, point.units))
    b.calibration.measure(c.Job((Prompt(4096),), (2048,) * 64, 32))
    decode, prefill = b.table.points[-2:]
    assert decode.seconds == pytest.approx(REAL.seconds(decode.work, 32, decode.beside), rel=0.02)
    assert prefill.seconds == pytest.approx(REAL.seconds(prefill.work, 100, prefill.beside), rel=0.05)


def test_it_goes_on_where_it_was():
    first = bench()
    jobs = c.plan(H200.units, LEVELS, ROOM)[:10]
    c.calibrate(first.calibration, jobs[:6], [], 1e9, lambda done, of: None)
    points = list(first.table.points)
    second = bench(table=Table(key=KEY, points=points))
    c.calibrate(second.calibration, jobs, [], 1e9, lambda done, of: None)
    assert second.table.points[: len(points)] == points
    assert len(second.kept) == 4


def test_what_the_time_does_not_allow_is_left_out(monkeypatch):
    b = bench()
    monkeypatch.setattr(c.time, "monotonic", lambda: b.inbox.now)
    jobs = c.plan(H200.units, LEVELS, ROOM)
    judges = c.held_out(H200.units, LEVELS, ROOM, 8192)
    left_out = c.calibrate(b.calibration, jobs, judges, 40.0, lambda done, of: None)
    assert left_out == len(jobs) + len(judges) - len(b.kept)
    kinds = {p.held_out for p in b.table.points}
    assert kinds == {True, False}  # some time was kept for the judges
    assert b.inbox.now < 45


def test_the_plan_keeps_within_the_room():
    small = c.Room(context=1000, tokens=20_000, batch=24, rows=600)
    for job in [*c.plan(2, (1,), small), *c.held_out(2, (1,), small, 512)]:
        assert small.holds(job)
        assert len(job.contexts) <= 24
    assert any(job.prompts and job.contexts and not job.fused for job in c.plan(2, (1,), small))


def test_the_judges_are_others_than_the_plan():
    plan = set(c.plan(132, LEVELS, ROOM))
    judges = c.held_out(132, LEVELS, ROOM, 8192)
    assert len(judges) == c.HELD_OUT_SOLO + c.HELD_OUT_PAIRS
    assert not {job._replace(held_out=False) for job in judges} & plan
    assert judges == c.held_out(132, LEVELS, ROOM, 8192)


class Failing(SimExecutor):
    def submit(self, command: Command) -> None:
        if isinstance(command, Step):
            self.inbox.post(self.inbox.now, StepDone(command.id, command.lane, error="out of memory"))
        else:
            super().submit(command)


def test_a_guess_that_is_far_off_does_no_harm():
    """Decode is thought to take no time beside prefill, or a hundred times as long: the same is measured."""
    b = bench()
    prefill, decode = c.Job((Prompt(512),), (1000,) * 32, 32).works(LLAMA.layers)
    assert prefill is not None and decode is not None
    b.probe.decoding((1000,) * 32)
    right = (REAL.seconds(decode, 32), REAL.seconds(prefill, 100))
    wanted = b.probe.together_s(decode, 32, prefill, [Prompt(512)], right)
    for guess in ((1e-4, right[1]), (right[0], 100 * right[1])):
        assert b.probe.together_s(decode, 32, prefill, [Prompt(512)], guess) == pytest.approx(wanted, rel=0.05)


def test_a_failed_step_ends_it():
    inbox = VirtualInbox()
    probe = Probe(Failing(REAL, inbox, LLAMA.layers), inbox, 100, 16, 132, LLAMA.layers, 2, LLAMA.vocab)
    probe.decoding((10, 10))
    with pytest.raises(StepError, match="out of memory"):
        probe.decode_s(decode_work([10, 10], LLAMA.layers), 132)


def test_more_than_the_pool_holds_is_refused():
    inbox = VirtualInbox()
    probe = Probe(SimExecutor(REAL, inbox, LLAMA.layers), inbox, 8, 16, 132, LLAMA.layers, 2, LLAMA.vocab)
    with pytest.raises(ValueError, match="do not fit 8 pages"):
        probe.decoding((100, 100))


def test_tokens_are_of_the_vocabulary():
    inbox = VirtualInbox()
    probe = Probe(SimExecutor(REAL, inbox, LLAMA.layers), inbox, 100, 16, 132, LLAMA.layers, 2, vocab=7)
    assert set(probe.tokens) <= set(range(7))


def test_slots_of_prompts_and_decodes_differ():
    seen: list[Command] = []

    class Spy(SimExecutor):
        def submit(self, command: Command) -> None:
            seen.append(command)
            super().submit(command)

    inbox = VirtualInbox()
    probe = Probe(Spy(REAL, inbox, LLAMA.layers), inbox, 1000, 16, 132, LLAMA.layers, 2, LLAMA.vocab)
    calibration = c.Calibration(probe, Table(key=KEY), PRIOR, lambda table: None)
    calibration.measure(c.Job((Prompt(64),) * 4, (50,) * 3, 32))
    slots = {command.slot for command in seen if isinstance(command, Open)}
    assert slots == {0, 1, 2, 3, PROMPTS, PROMPTS + 1, PROMPTS + 2}
    lanes = {Lane(0, Role.DECODE, 2).id, Lane(1, Role.PREFILL, 2).id}
    assert {command.lane for command in seen if isinstance(command, Step)} == lanes
