"""A calibration run on a simulated device whose steps differ from the roofline."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from counterpoint.bench.calibration_plan import (
    DeviceCapacity,
    held_out_jobs,
    plan_jobs,
)
from counterpoint.bench.calibration_run import CalibrationRun, run_jobs
from counterpoint.cost_model.calibration import (
    Calibration,
    CalibrationKey,
    pad_rows,
    shape_key,
)
from counterpoint.cost_model.roofline import Roofline
from counterpoint.device.sim import FixedLatency, HostModel, SimExecutor, VirtualEventQueue
from counterpoint.device.step_probe import StepProbe
from counterpoint.interfaces import Estimator
from counterpoint.spec.device import H200, Curve
from counterpoint.spec.presets import PRESETS
from counterpoint.types import BatchShape

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
CAPACITY = DeviceCapacity(context=32768, tokens=900_000, batch=248, rows=8192)


@dataclass
class CalibrationBench:
    inbox: VirtualEventQueue
    probe: StepProbe
    table: Calibration
    run: CalibrationRun
    saved: list[int]


@dataclass(frozen=True)
class SlowHost:
    """Launches decodes as one graph, passes of up to 512 rows as piecewise graphs, and larger ones
    operation by operation."""

    def seconds(self, work: BatchShape) -> float:
        if not work.prefill_tokens:
            return 3e-4 + 1e-6 * work.decode_batch
        layers_s = 2e-3 if work.prefill_tokens + work.decode_batch <= 512 else 12e-3
        layers_s *= (work.last_layer - work.first_layer) / work.layers
        return 6e-4 + layers_s + (0 if work.first_layer else 1e-4 * work.prefill_requests)

    def start_s(self, work: BatchShape) -> float:
        return self.seconds(work) / 2


@dataclass(frozen=True)
class PaddingDevice:
    """Pads decode batches and small passes to buckets, and waits for the host's launches."""

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


@dataclass(frozen=True)
class FixedTime:
    """Every step takes `alone_s`."""

    alone_s: float

    def seconds(
        self, work: BatchShape, units: int, co_running: tuple[BatchShape, int] | None = None
    ) -> float:
        return self.alone_s


def calibration_bench(
    physics: Estimator = REAL, table: Calibration | None = None, host: HostModel = FixedLatency()
) -> CalibrationBench:
    inbox = VirtualEventQueue()
    executor = SimExecutor(physics, inbox, LLAMA.layers, host)
    probe = StepProbe(executor, inbox, 57_000, 16, H200.units, LLAMA.layers, 2, LLAMA.vocab)
    probe.clock = lambda: max(inbox.now, inbox.host_free_s)
    table, saved = table or Calibration(key=KEY), []
    return CalibrationBench(
        inbox,
        probe,
        table,
        CalibrationRun(probe, table, PRIOR, lambda table: saved.append(len(table.points))),
        saved,
    )


def run_all(b: CalibrationBench, levels: tuple[int, ...] = LEVELS, budget_s: float = 1e9) -> int:
    held_out = held_out_jobs(H200.units, levels, CAPACITY, 8192)
    jobs = plan_jobs(H200.units, levels, CAPACITY, b.table.pass_buckets)
    return run_jobs(b.run, jobs, held_out, budget_s, lambda done, of: None)
