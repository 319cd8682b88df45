"""Calibration from end to end, on a simulated device whose steps are not what the roofline says."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from counterpoint.bench import calibrate as c
from counterpoint.bench.calibration_report import errors, report
from counterpoint.build import CalibrationTarget
from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.calibration import (
    Calibration,
    CalibrationKey,
    decode,
    encode,
    pad_rows,
    shape_key,
)
from counterpoint.cost_model.fitted import Fitted
from counterpoint.cost_model.roofline import Roofline
from counterpoint.device.sim import FixedLatency, HostModel, SimExecutor, VirtualEventQueue
from counterpoint.device.step_probe import PROMPT_SLOTS, CoRun, ProbePrompt, StepError, StepProbe
from counterpoint.interfaces import Estimator
from counterpoint.spec.device import H200, Curve
from counterpoint.spec.presets import PRESETS
from counterpoint.types import BatchShape, Command, InitSlot, Lane, Role, Step, StepDone

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
KEY = CalibrationKey(
    device="NVIDIA H200",
    units=132,
    model=shape_key(LLAMA),
    dtype="bfloat16",
    kv_dtype="bfloat16",
    kernels="k",
)
LEVELS = (16, 32, 64)
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
ROOM = c.DeviceCapacity(context=32768, tokens=900_000, batch=248, rows=8192)


@dataclass
class Bench:
    inbox: VirtualEventQueue
    probe: StepProbe
    table: Calibration
    calibration: c.CalibrationRun
    kept: list[int]


@dataclass(frozen=True)
class Slow:
    """A host that launches decodes as one graph, passes of up to 512 rows in pieces, and larger ones operation by operation."""

    def seconds(self, work: BatchShape) -> float:
        if not work.prefill_tokens:
            return 3e-4 + 1e-6 * work.decode_batch
        layers_s = 2e-3 if work.prefill_tokens + work.decode_batch <= 512 else 12e-3
        layers_s *= (work.last_layer - work.first_layer) / work.layers
        return 6e-4 + layers_s + (0 if work.first_layer else 1e-4 * work.prefill_requests)

    def start_s(self, work: BatchShape) -> float:
        return self.seconds(work) / 2


@dataclass(frozen=True)
class Filled:
    """A device that fills decode batches up to a bucket, and small passes too, and that waits for what launches them."""

    inner: Estimator
    buckets: tuple[int, ...] = ()
    host: HostModel = field(default_factory=FixedLatency)

    def seconds(
        self, work: BatchShape, units: int, co_running: tuple[BatchShape, int] | None = None
    ) -> float:
        co_running = co_running and (self.padded(co_running[0]), co_running[1])
        return max(
            self.host.seconds(work), self.inner.seconds(self.padded(work), units, co_running)
        )

    def padded(self, work: BatchShape) -> BatchShape:
        if not work.prefill_tokens:
            return msgspec.structs.replace(work, decode_batch=pad_rows(work.decode_batch, BATCHES))
        rows = pad_rows(work.prefill_tokens + work.decode_batch, self.buckets)
        return msgspec.structs.replace(work, prefill_tokens=rows - work.decode_batch)


def bench(
    physics: Estimator = REAL, table: Calibration | None = None, host: HostModel = FixedLatency()
) -> Bench:
    inbox = VirtualEventQueue()
    executor = SimExecutor(physics, inbox, LLAMA.layers, host)
    probe = StepProbe(executor, inbox, 57_000, 16, H200.units, LLAMA.layers, 2, LLAMA.vocab)
    probe.clock = lambda: max(inbox.now, inbox.host_free_s)
    table, kept = table or Calibration(key=KEY), []
    return Bench(
        inbox,
        probe,
        table,
        c.CalibrationRun(probe, table, PRIOR, lambda table: kept.append(len(table.points))),
        kept,
    )


def run(b: Bench, levels: tuple[int, ...] = LEVELS, budget_s: float = 1e9) -> int:
    judges = c.held_out_jobs(H200.units, levels, ROOM, 8192)
    jobs = c.plan_jobs(H200.units, levels, ROOM, b.table.pass_buckets)
    return c.run_jobs(b.calibration, jobs, judges, budget_s, lambda done, of: None)


def test_a_calibrated_device_is_predicted():
    b = bench(Filled(REAL), Calibration(key=KEY, buckets=BATCHES))
    assert run(b) == 0
    judges = [p for p in b.table.points if p.held_out]
    found = errors(Fitted(b.table, PRIOR), judges)
    assert found["all, alone"]["p50"] < 0.05
    assert found["all, alone"]["p95"] < 0.10
    assert found["all, beside the other"]["p95"] < 0.15
    bare = errors(PRIOR, judges)
    assert bare["all, alone"]["p50"] > 0.1
    assert b.kept == sorted(set(b.kept))  # written after every job
    assert b.inbox.now < 300  # of the device's time


def test_a_device_that_fills_passes_up_and_a_slow_host_are_predicted():
    buckets, host = (64, 128, 256, 512), Slow()
    b = bench(
        Filled(REAL, buckets, host),
        Calibration(key=KEY, buckets=BATCHES, pass_buckets=buckets),
        host,
    )
    run(b)
    fitted, judges = Fitted(b.table, PRIOR), [p for p in b.table.points if p.held_out]
    found = errors(fitted, judges)
    assert found["all, alone"]["p50"] < 0.05
    assert found["all, alone"]["p95"] < 0.10
    assert found["all, beside the other"]["p95"] < 0.15
    for tokens, edges in itertools.product((100, 500, 4000), ((0, 32), (0, 8), (8, 16))):
        step = msgspec.structs.replace(
            BatchShape.prefill(tokens, 0, 32), first_layer=edges[0], last_layer=edges[1]
        )
        assert fitted.launch_overhead.seconds(step) == pytest.approx(host.seconds(step), rel=0.1)
    assert fitted.launch_overhead.seconds(BatchShape.decode(200, 200 * 100, 32)) == pytest.approx(
        5e-4, rel=0.1
    )
    unaware = errors(Fitted(msgspec.structs.replace(b.table, pass_buckets=()), PRIOR), judges)
    assert unaware["all, alone"]["p95"] > found["all, alone"]["p95"]


class Tiring:
    """REAL, but passes with prompt tokens take 1.2 times as long after half a second, and steps beside others again after two."""

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


def test_passes_that_run_on_and_on_are_known_to_take_longer_and_points_are_judged_without():
    physics = Tiring()
    b = bench(physics)
    physics.inbox = b.inbox
    b.calibration.measure(c.CalibrationJob((ProbePrompt(2048),), (), 132, held_out=True))
    judged = report(b.table, PRIOR)["held_out"]["fitted"]
    b.calibration.measure_sustained(ROOM, LEVELS, 240.0)
    assert b.table.on_and_on["mixed"] == pytest.approx(1.2, rel=0.02)
    assert b.table.on_and_on["beside each other"] == pytest.approx(1.0, rel=0.02)
    del b.table.on_and_on["beside each other"]
    physics.pairs_from_s = b.inbox.now + 1.0
    b.calibration.measure_sustained(ROOM, LEVELS, 240.0)
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
    host = Slow()
    b = bench(Filled(REAL, (), host), host=host)
    b.calibration.measure(c.CalibrationJob((ProbePrompt(600),), (), 132))
    (point,) = b.table.points
    assert REAL.seconds(point.work, 132) > host.seconds(point.work) > 0.012
    assert point.host_s == pytest.approx(host.seconds(point.work))
    assert point.seconds == pytest.approx(REAL.seconds(point.work, 132))
    small = bench(Filled(Latent(0.001), (), host), host=host)
    small.calibration.measure(c.CalibrationJob((ProbePrompt(600),), (), 132))
    assert small.table.points[0].seconds == pytest.approx(host.seconds(point.work), rel=0.01)


@dataclass(frozen=True)
class Latent:
    """Every step takes as long."""

    alone_s: float

    def seconds(
        self, work: BatchShape, units: int, co_running: tuple[BatchShape, int] | None = None
    ) -> float:
        return self.alone_s


def test_small_passes_are_measured_at_their_buckets():
    buckets = (48, 128, 640)
    alone = [
        job
        for job in c.plan_jobs(132, LEVELS, ROOM, buckets)
        if len(job.prompts) == 1 and not job.contexts and not sum(p.reused for p in job.prompts)
    ]
    small = {job.prompts[0].tokens for job in alone if job.prompts[0].tokens <= 640}
    assert small == set(buckets)
    assert max(job.prompts[0].tokens for job in alone) == 8192


def test_the_report_tells_every_held_out_step():
    b = bench(host=Slow())
    jobs, judges = (
        c.plan_jobs(H200.units, (32,), ROOM),
        c.held_out_jobs(H200.units, (32,), ROOM, 2048),
    )
    c.run_jobs(b.calibration, jobs[:12], judges[:9], 1e9, lambda done, of: None)
    told = msgspec.json.decode(msgspec.json.encode(report(b.table, PRIOR)))
    held = [p for p in b.table.points if p.held_out]
    assert told["points"] == {"fitted": len(b.table.points) - len(held), "held_out": len(held)}
    assert len(told["rows"]) == len(held)
    fitted = Fitted(b.table, PRIOR)
    for row, point in zip(told["rows"], held, strict=True):
        assert row["ms"] == 1e3 * point.seconds and row["host_ms"] == 1e3 * point.host_s > 0
        assert row["fitted_ms"] == pytest.approx(
            1e3 * fitted.seconds(point.work, point.units, point.co_running)
        )
        assert {"kind", "units", "work", "beside", "roofline_ms", "steps", "start_ms"} <= row.keys()
    assert (
        told["held_out"]["fitted"].keys()
        == told["held_out"]["roofline"].keys()
        >= {"all, alone", "all, beside the other"}
    )


def test_steps_are_timed_as_they_are():
    b = bench()
    b.calibration.measure(c.CalibrationJob((), (700, 900, 1100), 32))
    b.calibration.measure(c.CalibrationJob((ProbePrompt(512, 256), ProbePrompt(100)), (), 132))
    for point in b.table.points:
        assert point.seconds == pytest.approx(REAL.seconds(point.work, point.units))
    b.calibration.measure(c.CalibrationJob((ProbePrompt(4096),), (2048,) * 64, 32))
    decode, prefill = b.table.points[-2:]
    assert decode.seconds == pytest.approx(
        REAL.seconds(decode.work, 32, decode.co_running), rel=0.02
    )
    assert prefill.seconds == pytest.approx(
        REAL.seconds(prefill.work, 100, prefill.co_running), rel=0.05
    )


def test_it_goes_on_where_it_was():
    first = bench()
    jobs = c.plan_jobs(H200.units, LEVELS, ROOM)[:10]
    c.run_jobs(first.calibration, jobs[:6], [], 1e9, lambda done, of: None)
    points = list(first.table.points)
    second = bench(table=Calibration(key=KEY, points=points))
    c.run_jobs(second.calibration, jobs, [], 1e9, lambda done, of: None)
    assert second.table.points[: len(points)] == points
    assert len(second.kept) == 4


def test_what_the_time_does_not_allow_is_left_out(monkeypatch):
    b = bench()
    monkeypatch.setattr(c.time, "monotonic", lambda: b.inbox.now)
    jobs = c.plan_jobs(H200.units, LEVELS, ROOM)
    judges = c.held_out_jobs(H200.units, LEVELS, ROOM, 8192)
    left_out = c.run_jobs(b.calibration, jobs, judges, 40.0, lambda done, of: None)
    assert left_out == len(jobs) + len(judges) - len(b.kept)
    kinds = {p.held_out for p in b.table.points}
    assert kinds == {True, False}  # some time was kept for the judges
    assert b.inbox.now < 45


def test_the_plan_keeps_within_the_room():
    small = c.DeviceCapacity(context=1000, tokens=20_000, batch=24, rows=600)
    for job in [*c.plan_jobs(2, (1,), small), *c.held_out_jobs(2, (1,), small, 512)]:
        assert small.fits(job)
        assert len(job.contexts) <= 24
    assert any(
        job.prompts and job.contexts and not job.fused for job in c.plan_jobs(2, (1,), small)
    )


def test_a_run_that_ends_early_knows_something_of_everything():
    """Of pairs and of steps alone, about the same share of the plan is done at any time."""
    jobs = c.plan_jobs(132, LEVELS, ROOM, (64, 128, 256, 512))
    both = [bool(job.prompts and job.contexts and not job.fused) for job in jobs]
    for share in (0.25, 0.5, 0.75):
        done = int(share * len(jobs))
        assert sum(both[:done]) / sum(both) == pytest.approx(share, abs=0.15)


def test_the_judges_are_others_than_the_plan():
    plan = set(c.plan_jobs(132, LEVELS, ROOM))
    judges = c.held_out_jobs(132, LEVELS, ROOM, 8192)
    assert len(judges) == c.HELD_OUT_SOLO + c.HELD_OUT_PAIRS
    assert not {job._replace(held_out=False) for job in judges} & plan
    assert judges == c.held_out_jobs(132, LEVELS, ROOM, 8192)


class Failing(SimExecutor):
    def submit(self, command: Command) -> None:
        if isinstance(command, Step):
            self.inbox.post(
                self.inbox.now, StepDone(command.id, command.lane, error="out of memory")
            )
        else:
            super().submit(command)


def test_a_guess_that_is_far_off_does_no_harm():
    """Decode is thought to take no time beside prefill, or a hundred times as long: the same is measured."""
    b = bench()
    prefill, decode = c.CalibrationJob((ProbePrompt(512),), (1000,) * 32, 32).shapes(LLAMA.layers)
    assert prefill is not None and decode is not None
    b.probe.set_decode_batch((1000,) * 32)
    right = (REAL.seconds(decode, 32), REAL.seconds(prefill, 100))
    run = CoRun(decode, 32, prefill, [ProbePrompt(512)], right)
    wanted = [took.seconds for took in b.probe.time_co_running(run._replace(expected_s=right))]
    for guess in ((1e-4, right[1]), (right[0], 100 * right[1])):
        found = [took.seconds for took in b.probe.time_co_running(run._replace(expected_s=guess))]
        assert found == pytest.approx(wanted, rel=0.05)


def test_a_failed_step_ends_it():
    inbox = VirtualEventQueue()
    probe = StepProbe(
        Failing(REAL, inbox, LLAMA.layers), inbox, 100, 16, 132, LLAMA.layers, 2, LLAMA.vocab
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


def test_tokens_are_of_the_vocabulary():
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
    calibration = c.CalibrationRun(probe, Calibration(key=KEY), PRIOR, lambda table: None)
    calibration.measure(c.CalibrationJob((ProbePrompt(64),) * 4, (50,) * 3, 32))
    slots = {command.slot for command in seen if isinstance(command, InitSlot)}
    assert slots == {0, 1, 2, 3, PROMPT_SLOTS, PROMPT_SLOTS + 1, PROMPT_SLOTS + 2}
    lanes = {Lane(0, Role.DECODE, 2).id, Lane(1, Role.PREFILL, 2).id}
    assert {command.lane for command in seen if isinstance(command, Step)} == lanes


def test_a_table_goes_on_only_where_the_same_is_measured(tmp_path):
    """Another seed draws other judges; other sizes of graphs are other passes."""
    path = tmp_path / "t.json"
    pricing = CalibrationTarget(KEY, PRIOR, LEVELS, BATCHES, (64, 128))
    table = c.open_table(path, pricing, 1, fresh=False)
    assert (table.buckets, table.pass_buckets, table.points) == (BATCHES, (64, 128), [])
    b = bench(table=table)
    b.calibration.measure(c.CalibrationJob((ProbePrompt(64),), (), 132))
    calibration_store.save(table, path)
    assert c.open_table(path, pricing, 1, fresh=False).points == table.points
    assert not c.open_table(path, pricing, 1, fresh=True).points
    assert not c.open_table(path, pricing, 2, fresh=False).points
    assert not c.open_table(path, replace(pricing, pass_buckets=(64,)), 1, fresh=False).points
    assert not c.open_table(
        path, replace(pricing, key=msgspec.structs.replace(KEY, kernels="k2")), 1, fresh=False
    ).points
