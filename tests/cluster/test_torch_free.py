"""The cluster room and the movers load no tensor library."""

from __future__ import annotations

import subprocess
import sys


def test_no_torch_is_loaded():
    code = (
        "import sys, counterpoint.cluster.courier, counterpoint.cluster.router, counterpoint.cluster.elastic, "
        "counterpoint.cluster.front, counterpoint.device.link.shm, counterpoint.device.link.nixl; "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
