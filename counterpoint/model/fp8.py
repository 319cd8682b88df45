"""FP8: numbers of eight bits, with one scale to each row.

Owns: what a quantised row is, and the plain-torch way there and back. Promises: the scale puts a row's largest number on the
largest that e4m3 has, so nothing saturates and no row disturbs another; a row with a number that is not finite stays such a row.
Must not: multiply (the devices' ops do), choose what is quantised.

W8A8, dynamic: weights are quantised once, a row per output; activations at each product, a row per token. Then x w^T is the product
of the e4m3 numbers times the two scales. The KV cache holds e4m3 too, under one fixed scale (KV_SCALE): its range of 2^-9 to 448
holds keys and values of the models served, and what lies beyond saturates.

Shapes: R rows, K numbers of each. Format: OCP 8-bit floating point specification 1.0, E4M3 (no infinity).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_ROW_MAX = 1e-12  # of a row's largest number: a row of zeros has a scale too
KV_SCALE = 1.0
SIZE_MULTIPLE = 16  # what the sizes of a matrix must be, for the tensor cores to take it
ROWS_PER_BLOCK = 4096  # rows at a time: a large matrix is never widened whole


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
        """The numbers themselves, in float32."""
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
    """Rounded to the nearest e4m3; beyond the largest, the largest."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
