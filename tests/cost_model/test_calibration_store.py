"""Which calibration is found: own, shipped or none."""

from __future__ import annotations

import msgspec
import pytest
from calibration_tables import (
    KEY,
    LLAMA,
    OTHER,
    PRIOR,
    measured,
    off,
    table,
)

from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.calibration import (
    file_name,
    shape_key,
)
from counterpoint.cost_model.fitted import Fitted
from counterpoint.cost_model.roofline import Roofline
from counterpoint.spec.device import H200
from counterpoint.spec.presets import PRESETS


@pytest.fixture
def none_shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_store, "SHIPPED", tmp_path / "shipped")


def test_own_before_shipped_before_roofline(tmp_path, none_shipped):
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    assert calibration_store.find_calibration(KEY, PRIOR, own).estimator is PRIOR
    assert "calibrate" in calibration_store.find_calibration(KEY, PRIOR, own).note
    calibration_store.save(table(measured(OTHER)), shipped / file_name(KEY))
    assert "shipped calibration" in calibration_store.find_calibration(KEY, PRIOR, own).note
    calibration_store.save(table(measured(OTHER)[:20]), own / file_name(KEY))
    found = calibration_store.find_calibration(KEY, PRIOR, own)
    assert "own calibration of today, 20 points" in found.note
    assert isinstance(found.estimator, Fitted)
    (own / file_name(KEY)).write_text("{")
    assert "shipped" in calibration_store.find_calibration(KEY, PRIOR, own).note
    assert "passed over" in calibration_store.find_calibration(KEY, PRIOR, own).note


def test_other_kernels_are_noted_and_another_model_is_not_taken(tmp_path, none_shipped):
    calibration_store.save(table(measured(OTHER)), tmp_path / file_name(KEY))
    other = msgspec.structs.replace(KEY, kernels="k2")
    assert "other kernels (k1)" in calibration_store.find_calibration(other, PRIOR, tmp_path).note
    another = msgspec.structs.replace(KEY, model=shape_key(PRESETS["qwen3-8b"]))
    assert calibration_store.find_calibration(another, PRIOR, tmp_path).estimator is PRIOR


def test_a_table_with_few_points_is_not_used(tmp_path, none_shipped):
    calibration_store.save(table(measured(OTHER)[:3]), tmp_path / file_name(KEY))
    assert calibration_store.find_calibration(KEY, PRIOR, tmp_path).estimator is PRIOR


def test_the_shipped_tables_are_whole_and_better_than_the_roofline():
    found = sorted(calibration_store.SHIPPED.glob("*.json"))
    assert found
    for path in found:
        kept = calibration_store.load(path)
        assert path.name == file_name(kept.key)
        judges = [p for p in kept.points if p.held_out]
        assert len(judges) >= 50
        model = next(spec for spec in PRESETS.values() if shape_key(spec) == kept.key.model)
        prior = Roofline(model, H200, kept.key.dtype, kept.key.kv_dtype)
        errors = off(Fitted(kept, prior), judges)
        assert errors[len(errors) // 2] < 0.05 < off(prior, judges)[len(judges) // 2]


def test_the_simulator_finds_the_shipped_table():
    assert calibration_store.shipped_calibration(H200, LLAMA, "bfloat16", "bfloat16") is not None
    assert calibration_store.shipped_calibration(H200, LLAMA, "fp8", "bfloat16") is None
    assert (
        calibration_store.shipped_calibration(H200, PRESETS["qwen3-8b"], "bfloat16", "bfloat16")
        is None
    )
