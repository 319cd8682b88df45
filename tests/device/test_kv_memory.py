"""How many pages the KV pool of a CPU gets."""

from __future__ import annotations

import pytest

from counterpoint.config import ConfigError, DeviceConfig
from counterpoint.device.kv_memory import available_bytes, choose_pages

PAGE_BYTES = 1 << 20
GIB = 1 << 30


def pages(
    device: DeviceConfig, available: int = 8 * GIB, max_running: int = 256, context: int = 8192
) -> int:
    return choose_pages(device, PAGE_BYTES, max_running, context, available)


def test_by_default_a_pool_takes_a_quarter_of_the_free_memory():
    assert pages(DeviceConfig()) == 2048


def test_by_default_a_pool_takes_no_more_than_requests_can_fill():
    assert pages(DeviceConfig(), max_running=4, context=100) == 4 * 7


def test_settings_go_before_the_default():
    assert pages(DeviceConfig(kv_pages=77)) == 77
    assert pages(DeviceConfig(kv_memory_bytes=5 * PAGE_BYTES + 1)) == 5
    assert pages(DeviceConfig(kv_memory_bytes=6 * GIB)) == 6 * 1024


@pytest.mark.parametrize(
    ("device", "available", "name"),
    [
        (DeviceConfig(kv_memory_bytes=1000), GIB, "kv_memory_bytes"),
        (DeviceConfig(), 1000, "kv_memory_bytes"),
        (DeviceConfig(kv_pages=9999), GIB, "kv_pages"),
    ],
)
def test_an_impossible_size_is_refused_by_name(device, available, name):
    with pytest.raises(ConfigError, match=name):
        pages(device, available)


def test_available_memory_is_below_the_containers_limit(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_bytes(tmp_path) == 4000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert available_bytes(tmp_path) == 4000 * 1024
    (group / "memory.max").write_text("5000\n")
    assert available_bytes(tmp_path) == 4000


def test_available_memory_of_this_machine_is_plausible():
    assert 1 << 26 < available_bytes() < 1 << 46
