"""Matrix products of a decode step, for a partition of few SMs (kernel: gemm.cu).

Owns: the choice of the weight tile and the generated wgmma wrappers.
Promises: a call is one kernel launch on the current stream. It does not synchronise, and does not
allocate if `out` is given, so it can be captured.
Must not: be called with more than 128 rows.

Shapes: x [M, K] @ w [N, K]^T = out [M, N], bfloat16, accumulated in float32; M at most 128, K a
multiple of 64, N of 8; on Hopper. Or x and w are ScaledWeight (model/fp8.py) and K a multiple of
128: e4m3 times e4m3, times both scales.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from counterpoint.device.cuda.kernels.nvcc import (
    architecture,
    check_launch,
    load_library,
    struct_fields,
)
from counterpoint.model.fp8 import FP8, ScaledWeight

MAX_ROWS = 128
STAGE_BYTES = 128  # of K


Rows = torch.Tensor | ScaledWeight


class Tile(NamedTuple):
    """`height` weight rows for each of `groups` warpgroups (M > 64: the groups share the weight
    rows)."""

    height: int
    groups: int

    def rows(self, wide: bool) -> int:
        return self.height if wide else self.height * self.groups


class _GemmArgs(ctypes.Structure):  # struct Args of gemm.cu
    _fields_ = [
        *struct_fields("void_p", "x w out x_scale w_scale"),
        *struct_fields("int64", "x_stride w_stride out_stride"),
        *struct_fields("int", "m n k sms height groups chained"),
    ]


def fit_tile(n: int, sms: int, m: int) -> Tile:
    """The tile with which the busiest of `sms` SMs loads the fewest rows, for a weight of n rows.

    For each of its tiles, an SM loads the tile's weight rows and the m rows of x: cost = tiles per
    SM x (rows + m).
    """
    wide = m > 64

    def cost(tile: Tile) -> tuple[int, int]:
        rows = tile.rows(wide)
        tiles = -(-n // rows)
        return -(-tiles // sms) * (rows + m), -rows

    groups = (2,) if wide else (1,)
    return min((Tile(height, g) for g in groups for height in range(32, 257, 8)), key=cost)


def wgmma_header(height: int, fp8: bool = False) -> str:
    """C++ of one wgmma shape: m64 n`height` and 32 bytes of K, both operands in shared memory (PTX
    ISA, wgmma.mma_async)."""
    count = height // 2
    kind, layout = ("k32.f32.e4m3.e4m3", "") if fp8 else ("k16.f32.bf16.bf16", ", 0, 0")
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""#pragma once
#include <stdint.h>
template <int N> struct Wgmma;
template <> struct Wgmma<{height}> {{
  static __device__ __forceinline__ void run(float (&d)[{count}], uint64_t a, \
uint64_t b, int add) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{height}{kind} \
{{{registers}}}, %{count}, %{count + 1}, p, 1, 1{layout};\\n}}\\n"
      : {outputs} : "l"(a), "l"(b), "r"(add));
  }}
  static __device__ __forceinline__ void settle(float (&d)[{count}]) {{  \
// no use of d moves above this
    asm volatile("" : {outputs} :: "memory");
  }}
}};
#define HEIGHT_HERE {height}
#define FP8_HERE {int(fp8)}
"""


class SkinnyGemm:
    """x [M, K] @ w [N, K]^T on `sms` SMs. Compiles a tile's kernel on first use (seconds, then
    cached)."""

    def __init__(self, sms: int, device: int = 0, chained: bool = False) -> None:
        self.sms, self.chained = sms, chained
        self._arch = architecture(device)
        self._launches: dict[tuple[int, bool], Callable[[Any, Any], int]] = {}
        self._tiles: dict[tuple[int, int], Tile] = {}
        if self._arch != "90a":
            raise ValueError(
                f"this kernel is for Hopper (sm_90a), and the device is sm_{self._arch}"
            )

    def tile(self, n: int, m: int) -> Tile:
        """The tile for a weight of n rows and m rows of x."""
        if (n, m) not in self._tiles:
            self._tiles[n, m] = fit_tile(n, self.sms, m)
        return self._tiles[n, m]

    def __call__(self, x_MK: Rows, w_NK: Rows, out_MN: torch.Tensor | None = None) -> torch.Tensor:
        """x_MK @ w_NK^T. Rows may be strided, columns must be contiguous. Raises ValueError for a
        tensor that doesn't fit."""
        fp8 = isinstance(w_NK, ScaledWeight)
        x, x_scale = values_and_scales(x_MK)
        w, w_scale = values_and_scales(w_NK)
        (m, k), n = x.shape, w.shape[0]
        out = x.new_empty(m, n, dtype=torch.bfloat16) if out_MN is None else out_MN
        dtype = FP8 if fp8 else torch.bfloat16
        expected = (
            ("x_MK", x, (m, k), dtype),
            ("w_NK", w, (n, k), dtype),
            ("out_MN", out, (m, n), torch.bfloat16),
        )
        for name, of, shape, wanted in expected:
            aligned = of.stride(0) * of.itemsize % 16 == 0 and of.data_ptr() % 16 == 0
            if of.shape != shape or of.dtype != wanted or of.stride(1) != 1 or not aligned:
                got = f"{of.dtype} {tuple(of.shape)} {of.stride()}"
                raise ValueError(
                    f"{name} must be {wanted} {shape} with 16-byte aligned rows: got {got}"
                )
        if not 1 <= m <= MAX_ROWS or k * w.itemsize % STAGE_BYTES or n % 8:
            multiple = STAGE_BYTES // w.itemsize
            raise ValueError(
                f"M = {m}, N = {n}, K = {k}: M must be 1 to {MAX_ROWS}, "
                f"N a multiple of 8, K of {multiple}"
            )
        tile = self.tile(n, m)
        args = _GemmArgs(
            x=x.data_ptr(),
            w=w.data_ptr(),
            out=out.data_ptr(),
            x_scale=x_scale,
            w_scale=w_scale,
            x_stride=x.stride(0),
            w_stride=w.stride(0),
            out_stride=out.stride(0),
            m=m,
            n=n,
            k=k,
            sms=self.sms,
            height=tile.height,
            groups=tile.groups,
            chained=int(self.chained),
        )
        stream = torch.cuda.current_stream(x.device).cuda_stream
        check_launch(self._kernel(tile.height, fp8)(ctypes.byref(args), stream), "skinny GEMM")
        return out

    def _kernel(self, height: int, fp8: bool) -> Callable[[Any, Any], int]:
        if (height, fp8) not in self._launches:
            library = load_library(
                "gemm", self._arch, headers={"wgmma.cuh": wgmma_header(height, fp8)}
            )
            launch = library.counterpoint_skinny_gemm
            launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
            self._launches[height, fp8] = launch
        return self._launches[height, fp8]


def values_and_scales(rows: Rows) -> tuple[torch.Tensor, int | None]:
    """The matrix, and the address of its row scales if it is quantised."""
    if isinstance(rows, ScaledWeight):
        return rows.values_RK, rows.scale_R.data_ptr()
    return rows, None
