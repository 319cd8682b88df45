"""The units of a CPU: its cores.

Owns: which cores this process may use, which of them a lane's units are, and how threads are
pinned.
Promises: PREFILL and BOTH count from the low end, DECODE from the high end, so splits nest. Two
lanes whose units fit together never share a core: two OpenMP teams on one core spin while they wait
for each other, and run 10 to 25 times slower.
Must not: import torch, or read the environment (the caller passes it).

A unit is a physical core. Of its hardware threads, the first that the process may use stands for
it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from counterpoint.types import Role


def usable_cores(limit: int | None = None, root: Path = Path("/")) -> tuple[int, ...]:
    """The cores that this process may use, ascending, at most `limit`: of the affinity mask,
    without second hardware threads, no more than the container's CPU quota. All CPUs where none of
    that can be read."""
    if sys.platform == "linux":
        allowed = sorted(os.sched_getaffinity(0))
    else:
        allowed = list(range(os.cpu_count() or 1))
    cores: dict[str, int] = {}
    for cpu in allowed:
        cores.setdefault(_hardware_threads(cpu, root), cpu)
    limits = [n for n in (limit, _quota_cores(root)) if n is not None]
    return tuple(cores.values())[: min(limits, default=None)]


def cpu_name() -> str:
    """The processor's name; "CPU" where the system does not give it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join(names[0].split()) if names else "CPU"


def lane_cores(role: Role, units: int, cores: Sequence[int]) -> tuple[int, ...]:
    """The cores of `units` units of a lane. Raises ValueError if the device has fewer."""
    if not 0 < units <= len(cores):
        raise ValueError(f"units is {units}: the device has {len(cores)} cores")
    return tuple(cores[len(cores) - units :] if role is Role.DECODE else cores[:units])


def pin(cores: Sequence[int]) -> tuple[int, ...] | None:
    """Bind the calling thread, and the threads that it will start, to `cores`. Returns the set in
    force, read back; None where threads can't be bound (macOS). Raises OSError if refused."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
        return tuple(sorted(os.sched_getaffinity(0)))
    return None


def binding_warning(environ: Mapping[str, str]) -> str | None:
    """A warning if the environment makes OpenMP bind its threads: it would override the pinning of
    the lanes and put every team on the same first cores."""
    found = [
        name
        for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
        if environ.get(name)
    ]
    if not found or environ.get("OMP_PROC_BIND", "").lower() == "false":
        return None
    return (
        f"{' and '.join(found)} set: OpenMP will move the lanes' threads onto the same cores. "
        "Unset it; lanes are pinned anyway"
    )


def _hardware_threads(cpu: int, root: Path) -> str:
    """The hardware threads of the physical core of `cpu`, as one string."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _quota_cores(root: Path) -> int | None:
    """Whole cores in the control group's CPU quota (cgroup v2 cpu.max, v1 cpu.cfs_*), at least 1.
    None: no quota."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = (
                (root / f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us").read_text().strip()
                for name in ("quota", "period")
            )
        except OSError:
            return None
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None  # "max", or -1
    return max(1, int(quota) // int(period))
