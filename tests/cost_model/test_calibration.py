"""The file of a calibration."""

from __future__ import annotations

import pytest
from calibration_tables import (
    KEY,
    OTHER,
    measured,
    table,
)

from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.calibration import (
    Calibration,
    CalibrationPoint,
    decode,
    encode,
)
from counterpoint.types import BatchShape


def test_a_table_survives_the_file(tmp_path):
    kept = table(measured(OTHER), (1, 2, 4))
    assert decode(encode(kept)) == kept
    calibration_store.save(kept, tmp_path / "sub" / "t.json")
    assert calibration_store.load(tmp_path / "sub" / "t.json") == kept
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b'{"key": 3}',
        encode(Calibration(key=KEY, points=[CalibrationPoint(BatchShape(), 1, 0.0)])),
    ],
)
def test_a_broken_table_is_refused(text: bytes):
    with pytest.raises(ValueError, match="not a calibration"):
        decode(text)
