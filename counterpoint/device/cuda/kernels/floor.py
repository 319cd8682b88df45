"""The smallest logit that top-k and top-p keep, without a sort (kernel: floor.cu).

Owns: the kernel's calling convention.
Promises: the result of model/sample.py's `filter_floor`, up to rounding of the mass; one launch
without synchronising, so it can be captured.
Must not: hold state between calls.

Shapes: F rows, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from counterpoint.device.cuda.kernels.nvcc import architecture, check_launch, load_library


class FilterFloor:
    """Raises KernelError if the kernel can't be built."""

    def __init__(self, device: int = 0) -> None:
        self._launch = load_library("floor", architecture(device)).counterpoint_filter_floor
        pointer, size = ctypes.c_void_p, ctypes.c_int
        self._launch.argtypes = [pointer, ctypes.c_longlong, size, size, *[pointer] * 4]

    def __call__(
        self, x_FV: Tensor, top_k_F: Tensor, top_p_F: Tensor | None, width: int = 0
    ) -> Tensor:
        """`x_FV` float32, 0 at each row's maximum; top_k int64, 0: off; top_p float32, 1: off.
        `width` is unused: only sorts need it."""
        floor_F = x_FV.new_empty(x_FV.shape[0])
        if x_FV.shape[0]:
            x_FV, top_k_F = x_FV.contiguous(), top_k_F.contiguous()
            top_p = None if top_p_F is None else top_p_F.contiguous()
            stream = torch.cuda.current_stream(x_FV.device).cuda_stream
            pointers = (
                top_k_F.data_ptr(),
                None if top_p is None else top_p.data_ptr(),
                floor_F.data_ptr(),
                stream,
            )
            check_launch(
                self._launch(x_FV.data_ptr(), x_FV.stride(0), *x_FV.shape, *pointers),
                "filter floor",
            )
        return floor_F
