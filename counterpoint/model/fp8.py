"""FP8 quantisation with one scale per row, in plain torch.

Owns: the row format, quantising and dequantising. The scale maps a row's largest number to the
largest of e4m3, so nothing saturates and rows are independent. A row with a number that is not
finite stays not finite. Must not: multiply (the devices' ops do), choose what is quantised.

W8A8, dynamic: weights are quantised once, a scale per output; activations at each product, a scale
per token. Then x w^T is the product of the e4m3 numbers times the two scales. The KV cache holds
e4m3 under one fixed scale (KV_SCALE): its range of 2^-9 to 448 holds keys and values of the models
served, and larger ones saturate.

Shapes: R rows, K numbers per row. Format: OCP 8-bit floating point specification 1.0, E4M3 (no
infinity).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_ROW_MAX = 1e-12  # so that a row of zeros has a scale
KV_SCALE = 1.0
SIZE_MULTIPLE = 16  # tensor cores need both sizes of a matrix to be one
ROWS_PER_BLOCK = 4096  # bounds the float32 copy of a large matrix


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """`values_RK` e4m3, `scale_R` float32: row r is `values_RK[r] * scale_R[r]`."""

    values_RK: Tensor
    scale_R: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values_RK.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values_RK.dtype

    @property
    def device(self) -> torch.device:
        return self.values_RK.device

    def dequantise(self) -> Tensor:
        return self.values_RK.float() * self.scale_R[:, None]


def quantise_rows(x_RK: Tensor) -> ScaledWeight:
    values_RK = torch.empty_like(x_RK, dtype=FP8, memory_format=torch.contiguous_format)
    scale_R = torch.empty(x_RK.shape[0], dtype=torch.float32, device=x_RK.device)
    for first in range(0, x_RK.shape[0], ROWS_PER_BLOCK):
        rows = slice(first, first + ROWS_PER_BLOCK)
        x = x_RK[rows].float()
        scale = x.abs().amax(1).clamp(min=MIN_ROW_MAX) / FP8_MAX
        values_RK[rows] = to_fp8(x / scale[:, None])
        scale_R[rows] = scale
    return ScaledWeight(values_RK, scale_R)


def to_fp8(x: Tensor) -> Tensor:
    """Rounded to the nearest e4m3 number; saturates at FP8_MAX."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
