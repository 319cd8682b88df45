"""disagg/ and kv_transfer/ load no tensor library."""

from __future__ import annotations

import subprocess
import sys


def test_no_torch_is_loaded():
    code = (
        "import sys, counterpoint.disagg.handoff_runner, counterpoint.disagg.router, "
        "counterpoint.disagg.role_rebalancer, counterpoint.disagg.pool_frontend, "
        "counterpoint.kv_transfer.shm, counterpoint.kv_transfer.nixl; "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
