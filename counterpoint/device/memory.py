"""How large the KV cache of a CPU is made.

Owns: the choice. Promises: never more than a quarter of what is free unless the user says so, never more than is of use.
Must not: import torch, allocate.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from counterpoint.config import ConfigError, DeviceConfig

SHARE = 0.25  # of the free memory


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could still take: what the system counts as available, and what is left below a container's
    limit (cgroup v2 memory.max, v1 memory.limit_in_bytes). Half of the physical memory where that cannot be read."""
    try:
        found = re.search(
            r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE
        )
    except OSError:
        found = None
    if found:
        available = int(found[1]) * 1024
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = root / "sys/fs/cgroup"
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(
                available, max(0, int((group / most).read_text()) - int((group / used).read_text()))
            )
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return available


def choose_pages(
    device: DeviceConfig, page_bytes: int, max_running: int, max_context_tokens: int, available: int
) -> int:
    """Pages of the KV pool: `kv_pages`, else what `kv_memory_bytes` holds, else a quarter of the `available` bytes and no more
    than `max_running` requests of `max_context_tokens` can fill. Raises ConfigError naming the setting."""
    if device.kv_pages is not None:
        name, pages = "kv_pages", device.kv_pages
    elif device.kv_memory_bytes is not None:
        name, pages = "kv_memory_bytes", device.kv_memory_bytes // page_bytes
    else:
        most = max_running * -(-max_context_tokens // device.page_tokens)
        name, pages = "kv_memory_bytes", min(int(available * SHARE) // page_bytes, most)
    if pages < 1:
        raise ConfigError(f"{name} leaves no room for a page of {page_bytes} bytes: set it to more")
    if pages * page_bytes > available:
        raise ConfigError(
            f"{name} asks for {pages * page_bytes >> 20} MiB, but {available >> 20} MiB are free: set it to less"
        )
    return pages
