"""Calibration from end to end, on a simulated device: how well the fit predicts."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from calibration_bench import (
    BATCHES,
    CAPACITY,
    KEY,
    PRIOR,
    REAL,
    PaddingDevice,
    SlowHost,
    calibration_bench,
    run_all,
)

from counterpoint.bench.calibration_plan import (
    held_out_jobs,
    plan_jobs,
)
from counterpoint.bench.calibration_report import errors, report
from counterpoint.bench.calibration_run import run_jobs
from counterpoint.cost_model.calibration import (
    Calibration,
)
from counterpoint.cost_model.fitted import Fitted
from counterpoint.spec.device import H200
from counterpoint.types import BatchShape


def test_the_fit_predicts_held_out_steps():
    b = calibration_bench(PaddingDevice(REAL), Calibration(key=KEY, buckets=BATCHES))
    assert run_all(b) == 0
    held_out = [p for p in b.table.points if p.held_out]
    found = errors(Fitted(b.table, PRIOR), held_out)
    assert found["all, alone"]["p50"] < 0.05
    assert found["all, alone"]["p95"] < 0.10
    assert found["all, beside the other"]["p95"] < 0.15
    bare = errors(PRIOR, held_out)
    assert bare["all, alone"]["p50"] > 0.1
    assert b.saved == sorted(set(b.saved))  # written after every job
    assert b.inbox.now < 300  # of the device's time


def test_the_fit_predicts_padding_and_a_slow_host():
    buckets, host = (64, 128, 256, 512), SlowHost()
    b = calibration_bench(
        PaddingDevice(REAL, buckets, host),
        Calibration(key=KEY, buckets=BATCHES, pass_buckets=buckets),
        host,
    )
    run_all(b)
    fitted, held_out = Fitted(b.table, PRIOR), [p for p in b.table.points if p.held_out]
    found = errors(fitted, held_out)
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
    unaware = errors(Fitted(msgspec.structs.replace(b.table, pass_buckets=()), PRIOR), held_out)
    assert unaware["all, alone"]["p95"] > found["all, alone"]["p95"]


def test_the_report_lists_every_held_out_step():
    b = calibration_bench(host=SlowHost())
    jobs, held_out = (
        plan_jobs(H200.units, (32,), CAPACITY),
        held_out_jobs(H200.units, (32,), CAPACITY, 2048),
    )
    run_jobs(b.run, jobs[:12], held_out[:9], 1e9, lambda done, of: None)
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
