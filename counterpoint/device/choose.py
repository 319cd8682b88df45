"""Which device there is.

Owns: the look. Promises: no device is initialised. Must not: decide what to use (build does).
"""

from __future__ import annotations


def gpu_found() -> bool:
    """Whether torch finds a CUDA GPU that it can use."""
    import torch

    return torch.cuda.is_available()
