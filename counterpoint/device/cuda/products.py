"""Products: which kernel multiplies by a weight, in each partition, by measurement.

Owns: the choice between cuBLAS, the kernel for few rows (kernels/layer.py) and the one for few SMs (kernels/gemm.py). Promises:
what is chosen was the fastest for that shape, that number of rows and those SMs, timed on this device; more rows than MOST_ROWS,
biases and dtypes that only cuBLAS has are cuBLAS's.
Must not: be asked during a capture for a shape that was not measured (it then takes cuBLAS).

Shapes: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.device.cuda.kernels.gemm import MAX_ROWS, SkinnyGemm, wgmma_header
from counterpoint.device.cuda.kernels.layer import FEW_BYTES, FEW_ROWS, LayerKernels
from counterpoint.device.cuda.kernels.nvcc import KernelError, architecture, load

log = logging.getLogger(__name__)

Packed = tuple[Tensor, Tensor | None]
Product = Callable[[Tensor, Tensor], Tensor]
PROBES = (1, 2, 4, 16, 64, 128)  # rows; what lies between takes the choice of the next
MOST_ROWS = PROBES[-1]
REPEATS = 3


def by_cublas(x_RK: Tensor, weight_NK: Tensor) -> Tensor:
    return F.linear(x_RK, weight_NK)


class Products:
    """`linear` of one place of `units` SMs."""

    def __init__(self, units: int, layer: LayerKernels | None, device: torch.device, chained: bool) -> None:
        self.units = units
        self.layer = layer
        self.choice: dict[tuple[int, int, int], Product] = {}  # N, K, rows probed
        self.names: dict[tuple[int, int, int], str] = {}
        self._skinny: SkinnyGemm | None = None
        try:
            self._skinny = SkinnyGemm(units, device.index or 0, chained)
        except (ValueError, KernelError) as error:
            log.info("no products for few SMs: %s", error)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        weight, bias = packed
        rows = x.shape[0]
        if bias is not None or rows > MOST_ROWS:
            return F.linear(x, weight, bias)
        probe = PROBES[bisect.bisect_left(PROBES, rows)]
        outputs, inputs = weight.shape
        chosen = self.choice.get((outputs, inputs, probe), by_cublas)
        return by_cublas(x, weight) if chosen == self._few and rows != probe else chosen(x, weight)

    def candidates(self, weight: Tensor, rows: int) -> dict[str, Product]:
        found: dict[str, Product] = {"cuBLAS": by_cublas}
        outputs, inputs = weight.shape
        if weight.dtype not in (torch.bfloat16, torch.float16) or inputs % 8:
            return found
        if self.layer is not None and rows in FEW_ROWS and rows * inputs * 2 <= FEW_BYTES:
            found["few rows"] = self._few
        if self._skinny is not None and weight.dtype == torch.bfloat16 and rows <= MAX_ROWS and not inputs % 64 and not outputs % 8:
            found["few SMs"] = self._skinny
        return found

    def heights(self, weights: Sequence[Sequence[Tensor]], most_rows: int) -> set[int]:
        """Weight tiles that the kernel for few SMs may be asked for: each is compiled on its own."""
        if self._skinny is None:
            return set()
        rows = range(1, min(most_rows, MAX_ROWS) + 1)
        return {self._skinny.tile(same[0].shape[0], m).height for same in weights for m in rows}

    def measure(self, weights: Sequence[Sequence[Tensor]], stream: Any, most_rows: int) -> None:
        """Choose for each shape and probe up to `most_rows`. `weights`: for each shape, several of it, so that none is found in a
        cache. Synchronises."""
        for same in weights:
            outputs, inputs = same[0].shape
            for rows in PROBES[: bisect.bisect_left(PROBES, most_rows) + 1]:
                x_RK = torch.randn(rows, inputs, device=same[0].device, dtype=same[0].dtype)
                timed = {}
                for name, product in self.candidates(same[0], rows).items():
                    try:
                        timed[name] = (captured_ms(product, x_RK, same, stream), product)
                    except (KernelError, ValueError) as error:
                        log.warning("product %s for %d rows, weight %s: %s", name, rows, tuple(same[0].shape), error)
                best = min(timed, key=lambda name: timed[name][0])
                self.choice[outputs, inputs, rows] = timed[best][1]
                self.names[outputs, inputs, rows] = best

    def _few(self, x_RK: Tensor, weight_NK: Tensor) -> Tensor:
        assert self.layer is not None
        return self.layer.few_rows(x_RK, weight_NK)


def captured_ms(product: Product, x_RK: Tensor, weights: Sequence[Tensor], stream: Any) -> float:
    """Shortest time of a graph of one product with each weight."""
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


def build_tiles(heights: set[int], device: torch.device) -> None:
    """Compile these tiles' kernels, several at a time; those that were built before cost nothing."""
    arch = architecture(device.index or 0)

    def build(height: int) -> None:
        load("gemm", arch, headers={"wgmma.cuh": wgmma_header(height)})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        try:
            list(pool.map(build, sorted(heights)))
        except KernelError as error:
            log.warning("products for few SMs can't be built: %s", str(error).split("\n")[0])
