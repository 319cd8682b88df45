"""Devices: they run steps. Real ones keep wall-clock time, the simulated one its own.

Torch-free, and imported without the rest: event_queue, sim, contract_checker, timeline, cores.
"""

from __future__ import annotations


def has_gpu() -> bool:
    """Whether torch finds a CUDA GPU that it can use."""
    import torch

    return torch.cuda.is_available()


def gpu_count() -> int:
    """GPUs that this process would see. Initialises none of them."""
    import torch

    return torch.cuda.device_count()
