"""Where calibrations are kept, and which one holds for a device and a model.

The user's own calibration goes before a shipped one. One measured with other kernels is used, and
the note says so. A broken file is skipped, and the note says so too. The caller knows the user's
folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from counterpoint.cost_model.calibration import (
    Calibration,
    CalibrationKey,
    decode,
    encode,
    file_name,
    shape_key,
)
from counterpoint.cost_model.fitted import Fitted
from counterpoint.cost_model.roofline import Roofline
from counterpoint.interfaces import Estimator
from counterpoint.spec.device import DeviceSpec
from counterpoint.spec.model import ModelSpec

SHIPPED = Path(__file__).parent / "tables"
FOLDER = "calibrations"  # in the user's cache folder
MIN_POINTS = 8  # with fewer, the run that measured them had hardly begun


class StoredCalibration(NamedTuple):
    """An estimator, and a note on where its prices come from."""

    estimator: Estimator
    note: str


def load(path: Path) -> Calibration:
    """Raises ValueError if the file can't be read or is no calibration."""
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def save(table: Calibration, path: Path) -> None:
    """Write `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(encode(table))
    part.replace(path)


def find_calibration(key: CalibrationKey, prior: Roofline, own_folder: Path) -> StoredCalibration:
    """The best for `key`: the calibration in `own_folder`, the shipped one, or `prior` itself."""
    broken = ""
    for folder, whose in ((own_folder, "own"), (SHIPPED, "shipped")):
        path = folder / file_name(key)
        if not path.is_file():
            continue
        try:
            table = load(path)
        except ValueError as error:
            broken = f"; passed over: {error}"
            continue
        if table.key.matches(key) and len(table.points) >= MIN_POINTS:
            other = (
                ""
                if table.key.kernels == key.kernels
                else f", measured with other kernels ({table.key.kernels})"
            )
            date = table.about.get("date", "unknown date")
            note = f"prices: {whose} calibration of {date}, {len(table.points)} points{other}"
            return StoredCalibration(Fitted(table, prior), note + broken)
    note = f"prices: roofline of {prior.device.name}; `counterpoint calibrate` measures this device"
    return StoredCalibration(prior, note + broken)


def shipped_calibration(
    device: DeviceSpec, model: ModelSpec, dtype: str, kv_dtype: str
) -> Calibration | None:
    """The shipped calibration of a device that is known as numbers only."""
    for path in sorted(SHIPPED.glob("*.json")):
        table = load(path)
        key = table.key
        same = (key.units, key.model, key.dtype, key.kv_dtype) == (
            device.units,
            shape_key(model),
            dtype,
            kv_dtype,
        )
        if same and device.name in key.device.lower().split():
            return table
    return None


def match_device(name: str, devices: Sequence[DeviceSpec]) -> DeviceSpec | None:
    """Which of `devices` its driver calls `name` ("NVIDIA H200")."""
    words = name.lower().replace("-", " ").split()
    return next((device for device in devices if device.name in words), None)
