"""The simulated network's clock."""

from __future__ import annotations

import numpy as np
import pytest

from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.kv_transfer.sim import SimNetwork, SimTransport
from counterpoint.kv_transfer.transport import Completed


def test_simulated_time_follows_the_formula():
    network = SimNetwork(bandwidth=1000.0, latency_s=0.5)
    names: dict[str, SimTransport] = {}
    a, b = (SimTransport(network, name, names) for name in "ab")
    for transport in (a, b):
        transport.register(KvMemory(tuple(np.zeros(8192, np.uint8) for _ in range(2)), 512))
    a.connect(1, 2, b"b", True)
    assert a.memory is not None
    a.write(1, 1, a.memory.spans(0, 1, (0,), (0,)), 1)  # 1024 bytes
    a.write(1, 1, a.memory.spans(0, 1, (1,), (1,)), 2)
    assert network.next_write_s == pytest.approx(0.5 + 1.024)
    network.advance(1.6)
    assert a.poll() == [Completed(1)]
    network.stalled.add(1)
    network.advance(100.0)
    assert a.poll() == [] and network.next_write_s is None
    network.stalled.clear()
    network.advance(100.0)
    assert a.poll() == [Completed(2)]
