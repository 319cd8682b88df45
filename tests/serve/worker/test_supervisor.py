"""The supervisor: cores of workers, and a worker that cannot be started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from counterpoint.config import Config
from counterpoint.disagg.peer_connection import Address
from counterpoint.serve.worker.supervisor import (
    ProcessLauncher,
    Supervisor,
    WorkerPlan,
    divide_cores,
    pool_slots,
)


def test_cores_are_dealt_out_among_workers():
    assert divide_cores((0, 1, 2, 3), 2) == [(0, 1), (2, 3)]
    assert divide_cores((0, 1, 2), 2) == [(0,), (1, 2)]
    assert divide_cores((4, 6), 4) == [(4,), (6,), (4,), (6,)]
    assert divide_cores((0, 1), 0) == []


def test_a_worker_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    """The machine has no process, file or memory left for a moment."""

    async def full(*command: str, **settings: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def work() -> list[str]:
        ended: asyncio.Queue[str] = asyncio.Queue()
        config = Config().replace(replicas=1)
        plan = WorkerPlan(config, "", pool_slots(config.cluster), ProcessLauncher((0,)))
        crew = Supervisor(plan, lambda name, how: ended.put_nowait(how))
        await crew.open()
        crew.start(Address("127.0.0.1", 1), "token")
        hows = [await asyncio.wait_for(ended.get(), 10) for _ in range(2)]
        await crew.close()
        return hows

    monkeypatch.setattr("counterpoint.serve.worker.supervisor.RESTART_PAUSE_S", (0.01, 0.01))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    assert all("Resource temporarily unavailable" in how for how in asyncio.run(work()))
