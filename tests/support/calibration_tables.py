"""Calibrations of a made-up device, whose constants differ from those of the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as put

from counterpoint.cost_model.calibration import (
    Calibration,
    CalibrationKey,
    CalibrationPoint,
    shape_key,
)
from counterpoint.cost_model.roofline import Roofline
from counterpoint.interfaces import Estimator
from counterpoint.spec.device import H200, Curve
from counterpoint.spec.presets import PRESETS
from counterpoint.types import BatchShape

LLAMA = PRESETS["llama-3.1-8b"]


PRIOR = Roofline(LLAMA, H200)


LAYERS = LLAMA.layers


LEVELS = (24, 48)


KEY = CalibrationKey(
    device="NVIDIA H200",
    units=132,
    model=shape_key(LLAMA),
    dtype="bfloat16",
    kv_dtype="bfloat16",
    kernels="k1",
)


# Unlike the device of the roofline: other efficiencies, another attention kernel, more contention.
OTHER = Roofline(
    LLAMA,
    replace(
        H200,
        gemm=replace(H200.gemm, efficiency=Curve(((24, 0.7), (132, 0.5))), read_fraction=0.7),
        attention=replace(H200.attention, efficiency=0.4, read_bandwidth=H200.read_bandwidth),
        contention=replace(H200.contention, bandwidth=1.0, compute=0.6),
        kernel_s=6e-6,
        layer_launch_s=0.0,
    ),
)


def fuse(prefill: BatchShape, decode: BatchShape) -> BatchShape:
    """A piece of a prompt, which is not sampled, and decodes in one pass."""
    return put(prefill, samples=0) + decode


def works() -> list[tuple[BatchShape, int]]:
    prefills = [
        BatchShape.prefill(n, r, LAYERS) for n in (64, 256, 1024, 4096, 8192) for r in (0, 4096)
    ]
    decodes = [BatchShape.decode(b, b * c, LAYERS) for b in (1, 16, 64, 128) for c in (512, 4096)]
    fused = [fuse(p, d) for p in prefills[::3] for d in decodes[1::3]]
    found = [(w, units) for w in prefills for units in (132, *(132 - level for level in LEVELS))]
    found += [(w, units) for w in decodes for units in (132, *LEVELS)]
    return found + [(w, 132) for w in fused]


def pairs() -> list[tuple[BatchShape, int, tuple[BatchShape, int]]]:
    found = []
    for level in LEVELS:
        for n in (512, 4096):
            for b, c in ((8, 1024), (64, 4096)):
                p, d = BatchShape.prefill(n, 0, LAYERS), BatchShape.decode(b, b * c, LAYERS)
                found += [(d, level, (p, 132 - level)), (p, 132 - level, (d, level))]
    return found


def measured(device: Estimator) -> list[CalibrationPoint]:
    alone = [CalibrationPoint(w, units, device.seconds(w, units)) for w, units in works()]
    return alone + [
        CalibrationPoint(w, units, device.seconds(w, units, beside), beside)
        for w, units, beside in pairs()
    ]


def table(points: Sequence[CalibrationPoint], buckets: tuple[int, ...] = ()) -> Calibration:
    return Calibration(key=KEY, about={"date": "today"}, buckets=buckets, points=list(points))


def off(estimator: Estimator, points: Sequence[CalibrationPoint]) -> list[float]:
    return sorted(
        abs(estimator.seconds(p.work, p.units, p.co_running) / p.seconds - 1) for p in points
    )
