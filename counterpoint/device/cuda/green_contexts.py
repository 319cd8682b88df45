"""SM partitions: pairs of disjoint SM sets of one GPU, each with its own stream.

Owns: the green contexts and their streams, created once, before any graph capture.
Promises: both sides of a pair come from one split, so they cannot overlap. `check()` reads the SM
sets back from the hardware, eager and in a graph, and raises if they overlap or have the wrong
size. Where SMs cannot be partitioned (no cuda-bindings, an old driver), both sides get plain
streams, `isolated` is False, and a warning says so.
Must not: need CUDA or cuda-bindings at import; create contexts per re-split.

Source: CUDA driver API, green contexts (cuDevSmResourceSplitByCount, cuGreenCtxStreamCreate). A
graph runs on the SMs of the stream it was captured on, not of the one it is launched on: keep one
set of graphs per side.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from counterpoint.device.cuda.kernels.nvcc import architecture, check_launch, load_library

DECODE_PRIORITY = -5  # CUDA's highest, clamped to the device's
PREFILL_PRIORITY = 0
# A probe block stays for about 10 microseconds, so that the next ones go to other SMs.
SPIN_CYCLES = 20_000


class PartitionError(RuntimeError):
    """The SM sets differ from what was asked for, or cannot be created."""


@dataclass(frozen=True, slots=True)
class SmPartition:
    """A set of `sms` SMs, and a stream whose kernels run only on it."""

    stream: torch.cuda.Stream
    sms: int


@dataclass(frozen=True, slots=True)
class PartitionPair:
    """One split of the device: `decode` has the SMs asked for, `prefill` the rest."""

    prefill: SmPartition
    decode: SmPartition


@dataclass(frozen=True, slots=True)
class MeasuredSms:
    """SM numbers (`%smid`) that the two sides of a pair ran on."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]


@dataclass(slots=True)
class _Handles:
    """Driver handles to destroy, streams first."""

    streams: list[Any] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)


def granularity(capability: tuple[int, int]) -> tuple[int, int]:
    """(minimum SMs of a side, step between sizes) for this compute capability.

    Source: CUDA programming guide, green contexts: 8 and multiples of 8 from compute capability
    9.0, 4 and multiples of 2 on 8.x, 2 and multiples of 2 on 7.x. Raises PartitionError below 7.0.
    """
    major, _ = capability
    if major >= 9:
        return 8, 8
    if major == 8:
        return 4, 2
    if major == 7:
        return 2, 2
    raise PartitionError(
        f"compute capability {capability[0]}.{capability[1]} can't be partitioned: "
        "7.0 or newer is needed"
    )


class Partitions:
    """The splits of one GPU that a run may use.

    `levels`: decode SMs of each split, e.g. (16, 24, 32). `full` and `full_high_priority`: streams
    over the whole device. `isolate` False: plain streams without a warning, as an experiment's
    control. Raises ValueError for a level off the device's granularity, RuntimeError without a GPU.
    """

    def __init__(self, levels: Iterable[int], device: int = 0, isolate: bool = True) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "SM partitions need a CUDA GPU, and torch sees none "
                "(torch.cuda.is_available() is False)"
            )
        self.device = device
        self.levels = tuple(sorted(set(levels)))
        self.total_sms = torch.cuda.get_device_properties(device).multi_processor_count
        check_levels(self.levels, self.total_sms, torch.cuda.get_device_capability(device))
        self._handles = _Handles()
        self.full = SmPartition(
            torch.cuda.Stream(device, priority=PREFILL_PRIORITY), self.total_sms
        )
        self.full_high_priority = SmPartition(
            torch.cuda.Stream(device, priority=DECODE_PRIORITY), self.total_sms
        )
        why_not = "" if isolate else "not asked for"
        self._pairs: dict[int, PartitionPair] = {}
        if isolate:
            try:
                for level in self.levels:
                    self._pairs[level] = self._split(level)
            except (ImportError, AttributeError, PartitionError) as error:
                why_not = f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"NO SM PARTITIONS on cuda:{device} ({why_not}). Prefill and decode share all "
                    f"{self.total_sms} SMs through plain streams: expect no isolation. Needed: a "
                    "driver of CUDA 12.5 or newer and the package cuda-bindings.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self.isolated = not why_not
        if not self.isolated:
            self.close()
            self._pairs = {
                level: PartitionPair(prefill=self.full, decode=self.full_high_priority)
                for level in self.levels
            }

    def pair(self, decode_sms: int) -> PartitionPair:
        """The split with `decode_sms` decode SMs. Raises ValueError if there is none."""
        if decode_sms not in self._pairs:
            levels = ", ".join(map(str, self.levels))
            raise ValueError(f"no split with {decode_sms} decode SMs: there are {levels}")
        return self._pairs[decode_sms]

    def check(self) -> dict[int, MeasuredSms]:
        """Run the probe on every stream, eager and in a graph, and return the SM sets by level.

        Synchronises the device. Raises PartitionError if a side has the wrong number of SMs, if
        eager and graph differ, or if the sides overlap. Without isolation nothing is checked.
        """
        probe = SmidProbe(self.device)
        report = {}
        for level, pair in self._pairs.items():
            sets = {}
            for side, part in (("prefill", pair.prefill), ("decode", pair.decode)):
                eager, graph = probe.measure_eager(part.stream), probe.measure_graph(part.stream)
                if self.isolated and eager != graph:
                    raise PartitionError(
                        f"split {level}: {side} runs on SMs {sorted(eager)} eagerly, "
                        f"but on {sorted(graph)} from a captured graph"
                    )
                if self.isolated and len(eager) != part.sms:
                    raise PartitionError(
                        f"split {level}: {side} should run on {part.sms} SMs, "
                        f"but ran on {len(eager)}: {sorted(eager)}"
                    )
                sets[side] = eager
            shared = sets["prefill"] & sets["decode"]
            if self.isolated and shared:
                raise PartitionError(
                    f"split {level}: prefill and decode both run on SMs {sorted(shared)}"
                )
            report[level] = MeasuredSms(
                tuple(sorted(sets["prefill"])), tuple(sorted(sets["decode"]))
            )
        return report

    def close(self) -> None:
        """Destroy the contexts. Call it when nothing runs on their streams and their graphs are
        gone."""
        if not (self._handles.streams or self._handles.contexts):
            return
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

        for stream in self._handles.streams:
            driver.cuStreamDestroy(stream)
        for context in self._handles.contexts:
            driver.cuGreenCtxDestroy(context)
        self._handles = _Handles()

    def _split(self, level: int) -> PartitionPair:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

        torch.empty(1, device=torch.device("cuda", self.device))  # creates the primary context
        device = check_driver_call(driver.cuDeviceGet(self.device), "cuDeviceGet")
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = check_driver_call(
            driver.cuDeviceGetDevResource(device, kind), "cuDeviceGetDevResource"
        )
        groups, _, rest = check_driver_call(
            driver.cuDevSmResourceSplitByCount(1, whole, 0, level), "cuDevSmResourceSplitByCount"
        )
        decode = self._make_partition(driver, device, groups[0], DECODE_PRIORITY)
        prefill = self._make_partition(driver, device, rest, PREFILL_PRIORITY)
        if decode.sms != level or prefill.sms + decode.sms != self.total_sms:
            raise PartitionError(
                f"asked for {level} of {self.total_sms} SMs, "
                f"the driver gave {decode.sms} and {prefill.sms}"
            )
        return PartitionPair(prefill=prefill, decode=decode)

    def _make_partition(
        self, driver: Any, device: Any, resource: Any, priority: int
    ) -> SmPartition:
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        description = check_driver_call(
            driver.cuDevResourceGenerateDesc([resource], 1), "cuDevResourceGenerateDesc"
        )
        context = check_driver_call(
            driver.cuGreenCtxCreate(description, device, flags), "cuGreenCtxCreate"
        )
        self._handles.contexts.append(context)
        kind = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = check_driver_call(
            driver.cuGreenCtxStreamCreate(context, kind, priority), "cuGreenCtxStreamCreate"
        )
        self._handles.streams.append(stream)
        wrapped = torch.cuda.ExternalStream(int(stream), device=torch.device("cuda", self.device))
        return SmPartition(wrapped, int(resource.sm.smCount))


def check_levels(levels: Iterable[int], total_sms: int, capability: tuple[int, int]) -> None:
    """Raise ValueError unless every level leaves both sides a size that the device supports."""
    least, step = granularity(capability)
    for level in levels:
        if level < least or level % step or level > total_sms - least:
            raise ValueError(
                f"{level} decode SMs: on this device a side has {least} SMs or more, in steps of "
                f"{step}, and leaves {least} to the other: "
                f"{least} to {(total_sms - least) // step * step}"
            )


def check_driver_call(result: tuple[Any, ...], what: str) -> Any:
    """The values of a cuda-bindings call. Raises PartitionError if it failed."""
    if int(result[0]):
        raise PartitionError(f"{what} failed: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


class SmidProbe:
    """Reads the SM sets of a device's streams. Raises KernelError if it can't be built."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.launch = load_library("smid", architecture(device)).counterpoint_smid
        self.launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p]
        self.num_blocks = 8 * torch.cuda.get_device_properties(device).multi_processor_count
        self.sm_ids = torch.empty(
            self.num_blocks, dtype=torch.int32, device=torch.device("cuda", device)
        )

    def measure_eager(self, stream: torch.cuda.Stream) -> frozenset[int]:
        """SM numbers that a plain launch on `stream` uses. Synchronises it."""
        self.sm_ids.fill_(-1)
        torch.cuda.synchronize(self.device)
        self._launch(stream)
        stream.synchronize()
        return frozenset(self.sm_ids.tolist())

    def measure_graph(self, stream: torch.cuda.Stream) -> frozenset[int]:
        """SM numbers that a graph of `stream` uses when launched there. Synchronises it."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, stream=stream):
            self._launch(torch.cuda.current_stream(self.device))
        self.sm_ids.fill_(-1)
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        return frozenset(self.sm_ids.tolist())

    def _launch(self, stream: torch.cuda.Stream) -> None:
        check_launch(
            self.launch(self.sm_ids.data_ptr(), self.num_blocks, SPIN_CYCLES, stream.cuda_stream),
            "SM probe",
        )
