"""The operations between a decoder layer's matrix products, and products of few rows (layer.cu).

Owns: the kernels' calling convention.
Promises: model/ops.py's operations, up to rounding, each one launch on the current stream without
synchronising, so they can be captured. A call costs the host a few microseconds.
Must not: hold state between calls.

Shapes: T tokens, L context tokens, D features, F ffn, H query heads, K KV heads, A head size, E =
(H + 2 * K) * A, N outputs, R rows. A pool is [pages, page tokens, K, A] with any strides of the
first three axes, the same for K and V; its elements are the activations' dtype or e4m3. A quantised
result is the plain result as a ScaledWeight (model/fp8.py), bit for bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from counterpoint.device.cuda.kernels.nvcc import (
    architecture,
    check_launch,
    load_library,
    struct_fields,
)
from counterpoint.model.fp8 import FP8, KV_SCALE, ScaledWeight

HEAD_DIMS = (64, 128, 256)
MAX_FEATURES = 16384  # of a norm's row
MAX_QUANTISED_FEATURES = 32768  # features of a row that is quantised
FEW_ROWS = (1, 2, 4)
FEW_BYTES = 200 * 1024  # of the rows together


class _LayerArgs(ctypes.Structure):  # struct Args of layer.cu
    _fields_ = [
        *struct_fields("void_p", "x weight weight2 cos sin y k v rows y8 scales"),
        *struct_fields("int64", "page_stride token_stride head_stride"),
        *struct_fields("int", "count size heads kv_heads head_dim page_tokens n units"),
        *struct_fields("float", "eps k_scale v_scale"),
        *struct_fields("int", "is_bf16 chained kv_fp8"),
    ]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """`dtype`: bfloat16 or float16. `hidden`: features of a row. `head_dim`: of a head."""

    dtype: torch.dtype
    hidden: int
    head_dim: int


class LayerKernels:
    """`units`: SMs that products of few rows fill. `chained`: a launch may start before the
    stream's previous kernel has ended, and waits for it on the device. Raises ValueError for an
    unsupported shape, KernelError if the kernels can't be built."""

    def __init__(
        self, shape: LayerShape, units: int, device: int = 0, chained: bool = False
    ) -> None:
        dtype, hidden, head_dim = shape.dtype, shape.hidden, shape.head_dim
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype is {dtype}: these kernels take bfloat16 or float16")
        if head_dim not in HEAD_DIMS or hidden % 8 or hidden > MAX_FEATURES:
            raise ValueError(
                f"head_dim is {head_dim}, hidden {hidden}: "
                f"these kernels take {HEAD_DIMS}, and multiples of 8 up to {MAX_FEATURES}"
            )
        self._device = device
        self._dtype = dtype
        self._common: dict[str, Any] = {
            "is_bf16": int(dtype == torch.bfloat16),
            "chained": int(chained),
            "units": units,
        }
        self._common |= {"k_scale": KV_SCALE, "v_scale": KV_SCALE}
        library = load_library("layer", architecture(device))
        names = ("rms_norm", "add_rms_norm", "silu_mul", "rope_and_append", "gather", "few_rows")
        names += ("add_rms_norm_quantised", "quantise", "silu_mul_quantised")
        self._launches = {name: getattr(library, f"counterpoint_{name}") for name in names}
        for launch in self._launches.values():
            launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_TD = x_TD.contiguous()
        y_TD = torch.empty_like(x_TD)
        rows, size = x_TD.shape
        self._run(
            "rms_norm",
            rows,
            x=x_TD.data_ptr(),
            weight=weight_D.data_ptr(),
            y=y_TD.data_ptr(),
            size=size,
            eps=eps,
        )
        return y_TD

    def add_rms_norm(
        self, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x + delta in place of x, and its norm in place of delta. Both are contiguous."""
        rows, size = x_TD.shape
        self._run(
            "add_rms_norm",
            rows,
            x=x_TD.data_ptr(),
            weight=weight_D.data_ptr(),
            y=delta_TD.data_ptr(),
            size=size,
            eps=eps,
        )
        return x_TD, delta_TD

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        rows, size = x_T2F.shape[0], x_T2F.shape[1] // 2
        y_TF = x_T2F.new_empty(rows, size)
        self._run("silu_mul", rows, x=x_T2F.data_ptr(), y=y_TF.data_ptr(), size=size)
        return y_TF

    def quantise(self, x_RK: Tensor) -> ScaledWeight:
        """At most MAX_QUANTISED_FEATURES features, a multiple of 8."""
        x_RK = x_RK.contiguous()
        rows = self._scaled(x_RK, *x_RK.shape)
        self._run(
            "quantise",
            x_RK.shape[0],
            x=x_RK.data_ptr(),
            size=x_RK.shape[1],
            **output_pointers(rows),
        )
        return rows

    def add_rms_norm_quantised(
        self, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, ScaledWeight]:
        """x + delta in place of x, and its norm, quantised."""
        rows, size = x_TD.shape
        normed = self._scaled(x_TD, rows, size)
        inputs = {"x": x_TD.data_ptr(), "weight": weight_D.data_ptr(), "y": delta_TD.data_ptr()}
        self._run(
            "add_rms_norm_quantised", rows, **inputs, size=size, eps=eps, **output_pointers(normed)
        )
        return x_TD, normed

    def silu_mul_quantised(self, x_T2F: Tensor) -> ScaledWeight:
        rows, size = x_T2F.shape[0], x_T2F.shape[1] // 2
        gated = self._scaled(x_T2F, rows, size)
        self._run(
            "silu_mul_quantised", rows, x=x_T2F.data_ptr(), size=size, **output_pointers(gated)
        )
        return gated

    @staticmethod
    def _scaled(like: Tensor, rows: int, size: int) -> ScaledWeight:
        return ScaledWeight(
            like.new_empty(rows, size, dtype=FP8), like.new_empty(rows, dtype=torch.float32)
        )

    def rope_and_append(
        self,
        x_TE: Tensor,
        angles: tuple[Tensor, Tensor],
        query_norm_A: Tensor | None,
        key_norm_A: Tensor | None,
        eps: float,
        k_pages: Tensor,
        v_pages: Tensor,
        kv_rows_T: Tensor,
    ) -> Tensor:
        """`angles`: cosines and sines, float32 [T, A / 2], contiguous; `kv_rows_T` int64."""
        _, page_tokens, kv_heads, head_dim = k_pages.shape
        page_stride, token_stride, head_stride, _ = k_pages.stride()
        rows = x_TE.shape[0]
        heads = x_TE.shape[1] // head_dim - 2 * kv_heads
        q_THA = x_TE.new_empty(rows, heads, head_dim)
        cos, sin = angles
        self._run(
            "rope_and_append",
            rows,
            x=x_TE.data_ptr(),
            weight=None if query_norm_A is None else query_norm_A.data_ptr(),
            weight2=None if key_norm_A is None else key_norm_A.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            y=q_THA.data_ptr(),
            k=k_pages.data_ptr(),
            v=v_pages.data_ptr(),
            rows=kv_rows_T.data_ptr(),
            page_stride=page_stride,
            token_stride=token_stride,
            head_stride=head_stride,
            page_tokens=page_tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            kv_fp8=int(k_pages.dtype == FP8),
            eps=eps,
        )
        return q_THA

    def gather_context(
        self, k_pages: Tensor, v_pages: Tensor, rows_L: Tensor
    ) -> tuple[Tensor, Tensor]:
        """These pool rows (page * page tokens + offset, int32), contiguous: [L, K, A] of K and of
        V."""
        _, page_tokens, kv_heads, head_dim = k_pages.shape
        page_stride, token_stride, head_stride, _ = k_pages.stride()
        count = rows_L.shape[0]
        k_LKA, v_LKA = k_pages.new_empty(2, count, kv_heads, head_dim, dtype=self._dtype).unbind(0)
        self._run(
            "gather",
            count,
            x=k_pages.data_ptr(),
            weight=v_pages.data_ptr(),
            k=k_LKA.data_ptr(),
            v=v_LKA.data_ptr(),
            rows=rows_L.data_ptr(),
            page_stride=page_stride,
            token_stride=token_stride,
            head_stride=head_stride,
            page_tokens=page_tokens,
            kv_heads=kv_heads,
            head_dim=head_dim,
            kv_fp8=int(k_pages.dtype == FP8),
        )
        return k_LKA, v_LKA

    def few_rows(self, x_RD: Tensor, weight_ND: Tensor) -> Tensor:
        """x weight^T for FEW_ROWS rows of at most FEW_BYTES in all. Both are contiguous."""
        (rows, size), outputs = x_RD.shape, weight_ND.shape[0]
        y_RN = x_RD.new_empty(rows, outputs)
        pointers = {"x": x_RD.data_ptr(), "weight": weight_ND.data_ptr(), "y": y_RN.data_ptr()}
        self._run("few_rows", rows, **pointers, size=size, n=outputs)
        return y_RN

    def _run(self, name: str, count: int, **fields: Any) -> None:
        if count:
            args = _LayerArgs(count=count, **fields, **self._common)
            # As torch's generated code does it: torch.cuda.current_stream takes ten times as long.
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            check_launch(self._launches[name](ctypes.byref(args), stream), name)


def output_pointers(rows: ScaledWeight) -> dict[str, int]:
    return {"y8": rows.values_RK.data_ptr(), "scales": rows.scale_R.data_ptr()}
