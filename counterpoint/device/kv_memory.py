"""A KVPool as the bytes that movers see.

Owns: nothing; the arrays are views of the pool's tensors. Promises: region 2l is the keys of layer l and 2l + 1 its values,
whatever the order of a page's axes (both ends must have the same: disagg/compatibility.py compares `layout`).
Must not: copy.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from counterpoint.kv_transfer.gpu import GpuKvMemory
from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.model.kv import KVPool


def pool_memory(pool: KVPool) -> KvMemory:
    """Raises ValueError if the pool's layers are not each in one piece, or, on a GPU, are not one allocation together."""
    if pool.k[0].device.type != "cpu":
        if pool.buffer is None:
            raise ValueError(f"a pool on {pool.k[0].device} must be one allocation")
        return GpuKvMemory.from_tensor(
            pool.buffer.view(torch.uint8).view(2 * len(pool.k), -1), pool.pages
        )
    regions = [_bytes(side[layer]) for layer in range(len(pool.k)) for side in (pool.k, pool.v)]
    return KvMemory(tuple(regions), regions[0].nbytes // pool.pages)


def page_layout(pool: KVPool) -> str:
    """The order of a page's axes in memory, for the digest."""
    return "token, head, dim" if pool.k[0].is_contiguous() else "head, token, dim"


def _bytes(layer: torch.Tensor) -> NDArray[np.uint8]:
    straight = layer if layer.is_contiguous() else layer.transpose(1, 2)
    if straight.device.type != "cpu" or not straight.is_contiguous():
        raise ValueError(
            f"a pool on {layer.device} with strides {layer.stride()} can't be seen as bytes"
        )
    return straight.reshape(-1).view(torch.uint8).numpy()
