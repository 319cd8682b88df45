"""The KV pool's memory: how many pages a CPU's pool gets, and the pool as the bytes transports see.

Promises: unless the user says so, a pool takes at most a quarter of the free memory, and never more
than requests can fill. Region 2l of the bytes is the keys of layer l, 2l + 1 its values, whatever
the order of a page's axes. Both ends of a transfer must have the same order:
disagg/compatibility.py compares `page_layout`.
Must not: copy.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from counterpoint.config import ConfigError, DeviceConfig
from counterpoint.kv_transfer.gpu import GpuKvMemory
from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.model.kv import KVPool

FREE_MEMORY_SHARE = 0.25

# ---------------------------------------------------------------- how many pages


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could still take: what the system calls available, and no more than
    is left below a container's limit (cgroup v2 memory.max, v1 memory.limit_in_bytes). Half of the
    physical memory where that can't be read."""
    try:
        meminfo = (root / "proc/meminfo").read_text()
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    except OSError:
        found = None
    if found:
        available = int(found[1]) * 1024
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            left = int((group / limit).read_text()) - int((group / used).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        available = min(available, max(0, left))
    return available


def choose_pages(
    device: DeviceConfig, page_bytes: int, max_running: int, max_context_tokens: int, available: int
) -> int:
    """Pages of the pool: `kv_pages`, else what fits `kv_memory_bytes`, else a quarter of
    `available` bytes, but no more than `max_running` requests of `max_context_tokens` fill. Raises
    ConfigError naming the setting."""
    if device.kv_pages is not None:
        name, pages = "kv_pages", device.kv_pages
    elif device.kv_memory_bytes is not None:
        name, pages = "kv_memory_bytes", device.kv_memory_bytes // page_bytes
    else:
        useful = max_running * -(-max_context_tokens // device.page_tokens)
        pages = min(int(available * FREE_MEMORY_SHARE) // page_bytes, useful)
        name = "kv_memory_bytes"
    if pages < 1:
        raise ConfigError(f"{name} leaves no room for a page of {page_bytes} bytes: set it to more")
    if pages * page_bytes > available:
        raise ConfigError(
            f"{name} asks for {pages * page_bytes >> 20} MiB, but {available >> 20} MiB are free: "
            "set it to less"
        )
    return pages


# ---------------------------------------------------------------- as bytes


def pool_memory(pool: KVPool) -> KvMemory:
    """Views of the pool's tensors. Raises ValueError if a layer is not contiguous, or, on a GPU, if
    the pool is not one allocation."""
    if pool.k[0].device.type != "cpu":
        if pool.buffer is None:
            raise ValueError(f"a pool on {pool.k[0].device} must be one allocation")
        return GpuKvMemory.from_tensor(
            pool.buffer.view(torch.uint8).view(2 * len(pool.k), -1), pool.pages
        )
    regions = [_bytes(side[layer]) for layer in range(len(pool.k)) for side in (pool.k, pool.v)]
    return KvMemory(tuple(regions), regions[0].nbytes // pool.pages)


def page_layout(pool: KVPool) -> str:
    """The order of a page's axes in memory, for the compatibility digest."""
    return "token, head, dim" if pool.k[0].is_contiguous() else "head, token, dim"


def _bytes(layer: torch.Tensor) -> NDArray[np.uint8]:
    ordered = layer if layer.is_contiguous() else layer.transpose(1, 2)
    if ordered.device.type != "cpu" or not ordered.is_contiguous():
        raise ValueError(
            f"a pool on {layer.device} with strides {layer.stride()} can't be seen as bytes"
        )
    return ordered.reshape(-1).view(torch.uint8).numpy()
