"""Usable cores, lanes' cores, and pinning."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from counterpoint.device.cores import binding_warning, lane_cores, pin, usable_cores
from counterpoint.types import Role

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads are bound on Linux only")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@linux
def test_cores_are_those_of_the_affinity_mask(tmp_path):
    assert usable_cores(root=tmp_path) == tuple(sorted(os.sched_getaffinity(0)))
    assert len(usable_cores(1, tmp_path)) == 1


@linux
def test_second_hardware_threads_are_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 4, 5, 6})
    for cpu in range(8):
        write(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
            f"{cpu % 4},{cpu % 4 + 4}\n",
        )
    assert usable_cores(root=tmp_path) == (
        1,
        2,
        4,
    )  # core 1 is {1, 5}, core 2 {2, 6}, core 0 {0, 4}


@linux
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 6),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            6,
        ),
    ],
)
def test_a_quota_limits_the_cores(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for name, text in files.items():
        write(tmp_path / name, text)
    assert usable_cores(root=tmp_path) == tuple(range(expected))


def test_lanes_count_from_opposite_ends_and_nest():
    cores = (2, 3, 5, 7)
    for units in range(1, 4):
        prefill, decode = (
            lane_cores(Role.PREFILL, units, cores),
            lane_cores(Role.DECODE, 4 - units, cores),
        )
        assert sorted(prefill + decode) == list(cores)
        assert set(prefill) < set(lane_cores(Role.PREFILL, units + 1, cores))
        assert set(decode) < set(lane_cores(Role.DECODE, 5 - units, cores))
    assert lane_cores(Role.BOTH, 2, cores) == (2, 3)
    for units in (0, 5, -1):
        with pytest.raises(ValueError, match="units"):
            lane_cores(Role.DECODE, units, cores)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "2"}, None),
        ({"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"}, None),
        ({"OMP_PROC_BIND": "true"}, "OMP_PROC_BIND"),
        ({"GOMP_CPU_AFFINITY": "0-1"}, "GOMP_CPU_AFFINITY"),
    ],
)
def test_openmp_binding_is_warned_of(environ, named):
    warning = binding_warning(environ)
    assert (warning is None) if named is None else (named in (warning or ""))


@linux
def test_pin_reads_back_what_is_in_force():
    before = os.sched_getaffinity(0)
    try:
        core = min(before)
        assert pin([core]) == (core,)
        assert pin([core, 1_000_000 // 1000]) == (core,), (
            "a core that does not exist is not in force"
        )
    finally:
        os.sched_setaffinity(0, before)
