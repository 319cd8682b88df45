"""GEMM autotuning: which kernel multiplies by a weight in each partition, by measurement.

Owns: the choice between kernels. For decode: cuBLAS, the kernel for few rows (kernels/layer.py) and
the one for few SMs (kernels/gemm.py). For quantised weights: torch's scaled product and the one for
few SMs. For prefill in a partition: cuBLAS as it is (it tiles for all SMs of the device) and cuBLAS
limited to fewer SMs.
Promises: the choice was the fastest measured on this device for that shape, row count and SMs.
cuBLAS computes everything else: more rows than measured, biases, other dtypes.
Must not: tune during a capture; a shape that was not measured takes cuBLAS.

cuBLAS tiles a product for all SMs of the device, also on a green context's stream. `set_sm_count`
changes that. Source: cublasSetSmCountTarget, cuBLAS documentation.

Shapes: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.device.cuda.kernels.gemm import MAX_ROWS, SkinnyGemm, wgmma_header
from counterpoint.device.cuda.kernels.layer import FEW_BYTES, FEW_ROWS, LayerKernels
from counterpoint.device.cuda.kernels.nvcc import KernelError, architecture, load_library
from counterpoint.model.fp8 import FP8, ScaledWeight, quantise_rows

log = logging.getLogger(__name__)

Matrix = Tensor | ScaledWeight
Packed = tuple[Matrix, Tensor | None]
Matmul = Callable[[Any, Any], Tensor]  # rows and weight, both plain or both quantised
Quantise = Callable[[Tensor], ScaledWeight]
DECODE_PROBES = (1, 2, 4, 16, 64, 128)  # rows; numbers between take the next one's choice
PREFILL_PROBES = (256, 384, 512, 768, 1024, 1536, 2048)  # likewise, for prefill in a partition
ALL_PROBES = DECODE_PROBES + PREFILL_PROBES
MAX_DECODE_ROWS = DECODE_PROBES[-1]
REPEATS = 3
# SM counts for cuBLAS besides the partition's: other tiles may divide the product better.
SM_TARGETS = (64, 96)
MAX_TIME_RATIO = 0.97  # of cuBLAS's time: many rows take another kernel only below this


@functools.cache
def _sm_count_setter() -> Callable[[int, int], int] | None:
    """cublasSetSmCountTarget of the library that torch has loaded; torch has no binding for it."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        found = ctypes.CDLL(f"libcublas.so.{major}").cublasSetSmCountTarget
    except (OSError, AttributeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return found


def set_sm_count(units: int) -> bool:
    """cuBLAS tiles products that this thread launches from now on for so many SMs (0: all). False
    if the library lacks the call; then nothing changes."""
    setter = _sm_count_setter()
    return setter is not None and setter(torch.cuda.current_blas_handle(), units) == 0


def by_cublas(x_RK: Tensor, weight_NK: Tensor) -> Tensor:
    return F.linear(x_RK, weight_NK)


def by_cublas_limited(units: int) -> Matmul:
    def product(x_RK: Tensor, weight_NK: Tensor) -> Tensor:
        set_sm_count(units)
        out_RN = F.linear(x_RK, weight_NK)
        set_sm_count(0)
        return out_RN

    return product


def scaled_matmul(x_RK: ScaledWeight, weight_NK: ScaledWeight) -> Tensor:
    """Quantised rows times a quantised weight, bfloat16. The tensor cores accumulate e4m3 at their
    own precision."""
    scales = x_RK.scale_R[:, None], weight_NK.scale_R[None]
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x_RK.values_RK,
        weight_NK.values_RK.T,
        *scales,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def ensure_quantised(x: Matrix, quantise: Quantise) -> ScaledWeight:
    return x if isinstance(x, ScaledWeight) else quantise(x)


class GemmAutotuner:
    """`linear` of one stream partition with `units` SMs."""

    def __init__(
        self, units: int, layer: LayerKernels | None, device: torch.device, chained: bool
    ) -> None:
        self.units = units
        self.layer = layer
        # By dtype of the weight, N, K, rows probed.
        self.chosen: dict[tuple[torch.dtype, int, int, int], Matmul] = {}
        self.names: dict[tuple[torch.dtype, int, int, int], str] = {}
        self.quantise: Quantise = quantise_rows if layer is None else layer.quantise
        self._sm_targets = tuple(sorted({units, *SM_TARGETS}))
        self._few_sms: SkinnyGemm | None = None
        try:
            self._few_sms = SkinnyGemm(units, device.index or 0, chained)
        except (ValueError, KernelError) as error:
            log.info("no products for few SMs: %s", error)

    def linear(self, x: Matrix, packed: Packed) -> Tensor:
        weight, bias = packed
        if isinstance(weight, ScaledWeight):
            out = self._lookup(weight, x.shape[0], scaled_matmul)(
                ensure_quantised(x, self.quantise), weight
            )
            return out if bias is None else out.add_(bias)
        assert not isinstance(x, ScaledWeight)
        if bias is not None:
            return F.linear(x, weight, bias)
        return self._lookup(weight, x.shape[0], by_cublas)(x, weight)

    def _lookup(self, weight: Matrix, rows: int, otherwise: Matmul) -> Matmul:
        if rows > ALL_PROBES[-1]:
            return otherwise
        probe = ALL_PROBES[bisect.bisect_left(ALL_PROBES, rows)]
        outputs, inputs = weight.shape
        chosen = self.chosen.get((weight.dtype, outputs, inputs, probe), otherwise)
        return otherwise if chosen == self._few_rows and rows != probe else chosen

    def candidates(self, weight: Matrix, rows: int) -> dict[str, Matmul]:
        if isinstance(weight, ScaledWeight):
            found: dict[str, Matmul] = {"scaled product": scaled_matmul}
            if self._few_sms is not None and rows <= MAX_ROWS and not weight.shape[1] % 128:
                found["few SMs"] = self._few_sms
            return found
        found = {"cuBLAS": by_cublas}
        outputs, inputs = weight.shape
        if rows > MAX_DECODE_ROWS:
            return found | {
                f"cuBLAS for {units} SMs": by_cublas_limited(units)
                for units in self._sm_targets
                if units <= self.units
            }
        if weight.dtype not in (torch.bfloat16, torch.float16) or inputs % 8:
            return found
        if self.layer is not None and rows in FEW_ROWS and rows * inputs * 2 <= FEW_BYTES:
            found["few rows"] = self._few_rows
        if (
            self._few_sms is not None
            and weight.dtype == torch.bfloat16
            and rows <= MAX_ROWS
            and not inputs % 64
            and not outputs % 8
        ):
            found["few SMs"] = self._few_sms
        return found

    def tiles_to_build(
        self, weights: Sequence[Sequence[Matrix]], max_rows: int
    ) -> set[tuple[int, bool]]:
        """Weight tiles that the kernel for few SMs may need, and whether of e4m3: each is compiled
        separately."""
        if self._few_sms is None:
            return set()
        rows = range(1, min(max_rows, MAX_ROWS) + 1)
        return {
            (self._few_sms.tile(same[0].shape[0], m).height, same[0].dtype == FP8)
            for same in weights
            for m in rows
        }

    def tune(self, weights: Sequence[Sequence[Matrix]], stream: Any, probes: Sequence[int]) -> None:
        """Choose for each shape and probe. `weights`: for each shape several matrices, so that none
        stays in the L2 cache. Synchronises."""
        for same in weights:
            outputs, inputs = same[0].shape
            for rows in probes:
                candidates = self.candidates(same[0], rows)
                if rows > MAX_DECODE_ROWS and len(candidates) == 1:
                    continue
                x_RK = torch.randn(rows, inputs, device=same[0].device)
                x_RK = (
                    quantise_rows(x_RK)
                    if isinstance(same[0], ScaledWeight)
                    else x_RK.to(same[0].dtype)
                )
                timed = {}
                for name, product in candidates.items():
                    try:
                        timed[name] = (time_in_graph_ms(product, x_RK, same, stream), product)
                    except (KernelError, ValueError) as error:
                        log.warning(
                            "product %s for %d rows, weight %s: %s",
                            name,
                            rows,
                            tuple(same[0].shape),
                            error,
                        )
                best = min(timed, key=lambda name: timed[name][0])
                if rows > MAX_DECODE_ROWS and timed[best][0] > MAX_TIME_RATIO * timed["cuBLAS"][0]:
                    best = "cuBLAS"
                self.chosen[same[0].dtype, outputs, inputs, rows] = timed[best][1]
                self.names[same[0].dtype, outputs, inputs, rows] = best

    def _few_rows(self, x_RK: Tensor, weight_NK: Tensor) -> Tensor:
        assert self.layer is not None
        return self.layer.few_rows(x_RK, weight_NK)


def decode_probes_up_to(max_rows: int) -> tuple[int, ...]:
    """The DECODE_PROBES that steps of up to `max_rows` rows need."""
    return DECODE_PROBES[: bisect.bisect_left(DECODE_PROBES, max_rows) + 1]


def time_in_graph_ms(
    product: Matmul, x_RK: Matrix, weights: Sequence[Matrix], stream: Any
) -> float:
    """Shortest time of a graph with one product per weight."""
    with torch.cuda.stream(stream), torch.inference_mode():
        product(x_RK, weights[0])
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for weight in weights:
                product(x_RK, weight)
        finally:
            graph.capture_end()
        times = []
        for _ in range(REPEATS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return min(times)


def build_tiles(tiles: set[tuple[int, bool]], device: torch.device) -> None:
    """Compile these tiles' kernels, several at a time. Kernels in the build cache cost nothing."""
    arch = architecture(device.index or 0)

    def build(tile: tuple[int, bool]) -> None:
        load_library("gemm", arch, headers={"wgmma.cuh": wgmma_header(*tile)})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        try:
            list(pool.map(build, sorted(tiles)))
        except KernelError as error:
            log.warning("products for few SMs can't be built: %s", str(error).split("\n")[0])
