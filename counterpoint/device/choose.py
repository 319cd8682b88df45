"""Which device there is.

Owns: the look. Promises: `gpus` initialises no device. Must not: decide what to use (build does).
"""

from __future__ import annotations


def has_gpu() -> bool:
    """Whether torch finds a CUDA GPU that it can use."""
    import torch

    return torch.cuda.is_available()


def gpu_count() -> int:
    """How many GPUs this process would see."""
    import torch

    return torch.cuda.device_count()
