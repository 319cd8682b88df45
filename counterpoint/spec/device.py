"""DeviceSpec: a GPU or CPU as numbers.

Owns: what a device can do, by number of units (SMs, cores), and the presets. A preset says whether
its numbers were `measured` on the device or come from its datasheet.
Must not: import torch, touch a device or know a model.
"""

from __future__ import annotations

import bisect
import difflib
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Curve:
    """A value by number of units: linear between `points` ((units, value), units ascending),
    constant outside them."""

    points: tuple[tuple[float, float], ...]

    def at(self, units: float) -> float:
        after = bisect.bisect_right(self.points, (units, float("inf")))
        if after == 0:
            return self.points[0][1]
        if after == len(self.points):
            return self.points[-1][1]
        (left, low), (right, high) = self.points[after - 1], self.points[after]
        return low + (high - low) * (units - left) / (right - left)

    def scaled(self, units: float, value: float) -> Curve:
        """The curve with both axes multiplied."""
        return Curve(tuple((u * units, v * value) for u, v in self.points))


@dataclass(frozen=True, slots=True)
class GemmSpec:
    """How matrix products run. `tiles`: (rows, columns, efficiency) of the kernels' output tiles,
    one tile per unit at a time. `efficiency`: reached fraction of the units' peak, by number of
    units (clocks fall with more). `read_fraction`: reached fraction of the read bandwidth.
    `splits`: split-K factors for products with few tiles; each part has at least `least_inner` of
    the inner dimension."""

    tiles: tuple[tuple[int, int, float], ...]
    efficiency: Curve
    read_fraction: float
    splits: tuple[int, ...] = (1, 2, 4, 8)
    least_inner: int = 512


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How attention runs. `efficiency`: fraction of peak FLOP/s in prefill; `tile_rows`: query rows
    of a tile; `read_bandwidth`: bytes/s that decode reads from the KV cache, by number of units."""

    efficiency: float
    tile_rows: int
    read_bandwidth: Curve


@dataclass(frozen=True, slots=True)
class ContentionSpec:
    """How much a step slows when another runs on the device's other units.

    With `pull` = a step's bytes/s over the device's read bandwidth and `burn` = its FLOP/s over its
    units' peak, both measured alone, A slows beside B by

        1 + bandwidth * pull_B + compute * burn_B * (1 - burn_A)

    and at least by pull_A + pull_B, since memory has no more bandwidth to give."""

    bandwidth: float
    compute: float


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device.

    A partition has at least `smallest_units` units (SMs, cores) and a multiple of `unit_step`; the
    other one gets the rest. `peak_flops`: dense FLOP/s of all units by dtype. `read_bandwidth`:
    bytes/s by units. `kernel_s`: fixed time of a kernel. `layer_launch_s`: least time of a layer
    whose kernels the host launches one by one (prefill; decode replays graphs). `overlap`: whether
    two steps may share units. `source`: where the numbers come from. `dtype`, `kv_dtype`: the
    default element types.

    `degree`: so many devices hold the model together (tensor parallelism). All figures are per
    device, except `memory_bytes`. `link_bandwidth`: bus bandwidth in bytes/s of an all-reduce among
    them (as NCCL reports it); `link_s`: its least time.
    """

    name: str
    units: int
    unit_step: int
    smallest_units: int
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: int
    read_bandwidth: Curve
    gemm: GemmSpec
    attention: AttentionSpec
    contention: ContentionSpec
    kernel_s: float
    layer_launch_s: float
    overlap: bool
    measured: bool
    source: str
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    degree: int = 1
    link_bandwidth: float = 370 * 10**9  # about what NVLink 4 gives
    link_s: float = 12e-6

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s of all units in `dtype`. Raises ValueError with the dtypes that the device
        has."""
        peaks = dict(self.peak_flops)
        if dtype not in peaks:
            raise ValueError(
                f"{self.name} has no {dtype} arithmetic in this model; choose one of "
                f"{', '.join(peaks)}"
            )
        return peaks[dtype]

    def partitions(self) -> tuple[int, ...]:
        """Unit counts that one side of a split may have, ascending."""
        return tuple(
            range(self.smallest_units, self.units - self.smallest_units + 1, self.unit_step)
        )


GB, TB, GIGA, TERA = 10**9, 10**12, 10**9, 10**12

# Tiles of warp-group matrix products (Hopper) and of the warp-level ones before it, with their
# efficiencies relative to the best tile.
TENSOR_TILES = ((64, 64, 0.62), (64, 128, 0.8), (64, 256, 0.97), (128, 128, 0.92), (128, 256, 1.0))

H200 = DeviceSpec(
    name="h200",
    units=132,
    unit_step=8,
    smallest_units=8,
    peak_flops=(
        ("bfloat16", 989.4 * TERA),
        ("float16", 989.4 * TERA),
        ("fp8", 1978.9 * TERA),
        ("float32", 66.9 * TERA),
    ),
    memory_bytes=141 * GB,
    read_bandwidth=Curve(
        (
            (0, 0),
            (8, 1039 * GB),
            (16, 1991 * GB),
            (24, 2765 * GB),
            (32, 3463 * GB),
            (48, 4116 * GB),
            (64, 4433 * GB),
            (132, 4447 * GB),
        )
    ),
    gemm=GemmSpec(
        TENSOR_TILES,
        Curve(((36, 0.86), (64, 0.82), (84, 0.77), (116, 0.67), (132, 0.67))),
        read_fraction=0.9,
    ),
    attention=AttentionSpec(
        0.63,
        128,
        Curve(((0, 0), (16, 1025 * GB), (32, 2000 * GB), (64, 3627 * GB), (132, 4304 * GB))),
    ),
    contention=ContentionSpec(bandwidth=0.5, compute=0.3),
    kernel_s=2.5e-6,
    layer_launch_s=300e-6,
    overlap=True,
    measured=True,
    source="one H200 SXM, driver 580.159, CUDA 13.0, torch 2.11.0, cuBLAS, FlashInfer tensor-core "
    "decode, 2026-11-29",
)


class Datasheet(NamedTuple):
    """`fp8_tflops` 0: the device has no fp8. The first three counts are as in DeviceSpec."""

    name: str
    units: int
    unit_step: int
    smallest_units: int
    bf16_tflops: float
    fp8_tflops: float
    memory_gb: int
    read_tbps: float


def gpu_from_datasheet(sheet: Datasheet) -> DeviceSpec:
    """A GPU with the vendor's peaks and sizes, and the measured H200's shape of every curve. (An
    A100 saturates its memory with about 30 of 108 SMs: Bullet, arXiv 2504.19516, section 3; the
    shape here gives 90 % there.)"""
    stretch, share = sheet.units / H200.units, sheet.read_tbps * TB / (4.8 * TB)
    peaks = [("bfloat16", sheet.bf16_tflops * TERA), ("float16", sheet.bf16_tflops * TERA)]
    if sheet.fp8_tflops:
        peaks.append(("fp8", sheet.fp8_tflops * TERA))
    return replace(
        H200,
        name=sheet.name,
        units=sheet.units,
        unit_step=sheet.unit_step,
        smallest_units=sheet.smallest_units,
        peak_flops=tuple(peaks),
        memory_bytes=sheet.memory_gb * GB,
        read_bandwidth=H200.read_bandwidth.scaled(stretch, share),
        gemm=replace(H200.gemm, efficiency=H200.gemm.efficiency.scaled(stretch, 1.0)),
        attention=replace(
            H200.attention, read_bandwidth=H200.attention.read_bandwidth.scaled(stretch, share)
        ),
        measured=False,
        source="peaks, memory and bandwidth by the vendor's datasheet; curves in the shape of the "
        "measured H200's",
    )


CPU_2 = DeviceSpec(
    name="cpu-2",
    units=2,
    unit_step=1,
    smallest_units=1,
    # Weights packed as float16, maths in float32 (FBGEMM). bfloat16 is emulated: no instructions.
    peak_flops=(("float16", 182 * GIGA), ("float32", 182 * GIGA), ("bfloat16", 27 * GIGA)),
    memory_bytes=16 * GB,
    read_bandwidth=Curve(((0, 0), (1, 17.4 * GB), (2, 35.5 * GB))),
    gemm=GemmSpec(
        ((2, 64, 0.8), (8, 64, 1.0)), Curve(((1, 0.92), (2, 0.76))), read_fraction=1.0, splits=(1,)
    ),
    attention=AttentionSpec(0.5, 16, Curve(((0, 0), (1, 5.0 * GB), (2, 6.5 * GB)))),
    contention=ContentionSpec(bandwidth=0.3, compute=0.1),
    kernel_s=55e-6,
    layer_launch_s=0.0,
    overlap=False,
    measured=True,
    source="two vCPUs of an AMD EPYC Milan (Zen 3: AVX2, no AVX-512, no bfloat16), torch 2.13, "
    "SmolLM2-135M",
    dtype="float16",
    kv_dtype="float32",
)


def cpu_device(cores: int) -> DeviceSpec:
    """A CPU of `cores` cores like CPU_2's: a first guess for any CPU, to be corrected by
    measurements."""
    times = cores / CPU_2.units
    return replace(
        CPU_2,
        name=f"cpu-{cores}",
        units=cores,
        peak_flops=tuple((dtype, flops * times) for dtype, flops in CPU_2.peak_flops),
        read_bandwidth=CPU_2.read_bandwidth.scaled(max(1.0, times), max(1.0, times)),
        attention=replace(
            CPU_2.attention,
            read_bandwidth=CPU_2.attention.read_bandwidth.scaled(max(1.0, times), max(1.0, times)),
        ),
        measured=cores == CPU_2.units,
        source=CPU_2.source if cores == CPU_2.units else f"scaled from {CPU_2.source}",
    )


NVLINK_3 = 230 * GB  # bus bandwidth of an all-reduce among A100s
A100 = Datasheet("a100", 108, 2, 4, 312.0, 0.0, 80, 2.039)
DATASHEETS = (
    Datasheet("h100", 132, 8, 8, 989.4, 1978.9, 80, 3.35),
    A100,
    A100._replace(name="a800"),
    Datasheet("h20", 78, 8, 8, 148.0, 296.0, 96, 4.0),
    Datasheet("b200", 148, 8, 8, 2250.0, 4500.0, 180, 8.0),
)
PRESETS: dict[str, DeviceSpec] = {
    spec.name: spec for spec in (H200, *map(gpu_from_datasheet, DATASHEETS), CPU_2)
}
for name, bandwidth in (("a100", NVLINK_3), ("a800", NVLINK_3 * 2 / 3)):
    PRESETS[name] = replace(PRESETS[name], link_bandwidth=bandwidth)


def unknown_gpu(units: int) -> DeviceSpec:
    """A GPU of which only the number of SMs is known, with the figures of as many A100 SMs. Only a
    guess: calibrate before relying on it."""
    tflops = A100.bf16_tflops * units / A100.units
    guess = gpu_from_datasheet(A100._replace(name="unknown", units=units, bf16_tflops=tflops))
    return replace(guess, source="guessed from an A100's SMs")


def device_spec(name: str) -> DeviceSpec:
    """The preset `name`; cpu-N: a CPU of N cores; NxNAME: N such devices in tensor parallelism.
    Raises ValueError with the known names."""
    key = name.lower()
    degree, times, one = key.partition("x")
    if times and degree.isdigit() and int(degree) > 1 and one in PRESETS:
        spec, count = PRESETS[one], int(degree)
        return replace(
            spec,
            name=key,
            degree=count,
            memory_bytes=count * spec.memory_bytes,
            measured=False,
            source=f"{count} times: {spec.source}; all-reduce of {spec.link_bandwidth / GB:.0f} "
            "GB/s bus bandwidth, not measured",
        )
    cores = key.removeprefix("cpu-")
    if cores != key and cores.isdigit() and int(cores) > 0:
        return cpu_device(int(cores))
    if key not in PRESETS:
        near = difflib.get_close_matches(key, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown device {name!r}{hint}; known: {', '.join(PRESETS)}, cpu-N of N cores, or "
            "8xh100 for 8 in tensor parallelism"
        )
    return PRESETS[key]
