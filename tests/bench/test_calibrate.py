"""The table that `calibrate` resumes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from calibration_bench import (
    BATCHES,
    KEY,
    LEVELS,
    PRIOR,
    calibration_bench,
)

from counterpoint.bench.calibrate import open_table
from counterpoint.bench.calibration_plan import (
    CalibrationJob,
)
from counterpoint.builder.system import CalibrationTarget
from counterpoint.cost_model import calibration_store
from counterpoint.device.step_probe import ProbePrompt


def test_a_table_resumes_only_for_the_same_target_and_seed(tmp_path):
    """Another seed draws other held_out; other sizes of graphs are other passes."""
    path = tmp_path / "t.json"
    pricing = CalibrationTarget(KEY, PRIOR, LEVELS, BATCHES, (64, 128))
    table = open_table(path, pricing, 1, fresh=False)
    assert (table.buckets, table.pass_buckets, table.points) == (BATCHES, (64, 128), [])
    b = calibration_bench(table=table)
    b.run.measure(CalibrationJob((ProbePrompt(64),), (), 132))
    calibration_store.save(table, path)
    assert open_table(path, pricing, 1, fresh=False).points == table.points
    assert not open_table(path, pricing, 1, fresh=True).points
    assert not open_table(path, pricing, 2, fresh=False).points
    assert not open_table(path, replace(pricing, pass_buckets=(64,)), 1, fresh=False).points
    assert not open_table(
        path, replace(pricing, key=msgspec.structs.replace(KEY, kernels="k2")), 1, fresh=False
    ).points
