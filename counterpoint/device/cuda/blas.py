"""cuBLAS told how many SMs it has.

Owns: the one call that torch has no name for. Promises: where the call is not there, nothing changes.
Must not: choose a number of SMs.

cuBLAS divides a product for all SMs of the device, also on the stream of a green context. Source: cublasSetSmCountTarget, cuBLAS
documentation ("the number of SMs available to the library during kernels execution").
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch


@functools.cache
def _setter() -> Callable[[int, int], int] | None:
    """cublasSetSmCountTarget of the library that torch has loaded."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        found = ctypes.CDLL(f"libcublas.so.{major}").cublasSetSmCountTarget
    except (OSError, AttributeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return found


def set_sm_count(units: int) -> bool:
    """Products that this thread launches from now on are divided for so many SMs (0: all there are). False: cuBLAS can't be
    told."""
    tell = _setter()
    return tell is not None and tell(torch.cuda.current_blas_handle(), units) == 0
