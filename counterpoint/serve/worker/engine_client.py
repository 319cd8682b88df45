"""EngineClient: a server's end of the wire, whatever runs behind it.

Owns: the start, and the streams' interface. SingleEngine (single_engine.py) and Pool (pool.py)
implement it over the same registry, supervisor and messages. Promises: every stream ends, as
streams.py says; `close` may be called at any time, and again. Must not: know HTTP or text.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from counterpoint.serve.worker.registry import RegisteredWorker, WorkerRegistry
from counterpoint.serve.worker.streams import (
    EngineLost,
    EngineStatus,
    OutputListener,
    OutputQueue,
    OutputStream,
)
from counterpoint.serve.worker.supervisor import EngineFailed
from counterpoint.serve.worker.wire import EngineFailure, EngineInfo, EngineOutputs, WorkerReady
from counterpoint.stats import Stats
from counterpoint.types import AddRequest, RequestTiming

SHUTTING_DOWN = "the server is shutting down"
OnTiming = Callable[[RequestTiming], None]


class EngineClient(ABC):
    """`on_timing` is called with the RequestTiming of each finished request. Also the
    RegistryListener of its registry."""

    registry: WorkerRegistry
    reasons: dict[EngineStatus, str]  # why no request is taken, by state

    def __init__(self, on_timing: OnTiming | None, listener: OutputListener | None) -> None:
        self.on_timing = on_timing
        self.listener = listener
        self.engine_info: EngineInfo | None = None
        self.error = ""
        self._stopped = False
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------ life

    async def start(self) -> EngineInfo:
        """Start the workers and wait until they are ready. Raises EngineFailed if they can't be."""
        await self.registry.start()
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        """End every stream, and the workers that this server started."""
        self.fail_streams(SHUTTING_DOWN)
        self._stopped = True
        self._fail_start(SHUTTING_DOWN, "engine")
        await self.registry.close()

    def _start_succeeded(self, info: EngineInfo) -> None:
        if not self._ready.done():
            self.engine_info = info
            self._ready.set_result(info)

    def _fail_start(self, error: str, blame: str) -> None:
        """The first start must succeed; later ones are the supervisor's business."""
        if not self._ready.done():
            self._ready.set_exception(EngineFailed(error, blame))
            self._ready.exception()  # whoever waits gets it; nobody may wait any more

    # ------------------------------------------------------------ state

    @property
    @abstractmethod
    def state(self) -> EngineStatus: ...

    @property
    @abstractmethod
    def stats(self) -> Stats: ...

    def health(self) -> dict[str, Any]:
        """What /health says while the state is ready."""
        return {"status": "ok"}

    def check(self) -> None:
        """Raises EngineLost unless requests are taken."""
        state = self.state
        if state != "ready":
            raise EngineLost(self.error or self.reasons[state])

    # ------------------------------------------------------------ streams

    def open(self, arrives: Iterable[AddRequest], timeout_s: float | None = None) -> OutputStream:
        return OutputStream(self, arrives, timeout_s)

    @abstractmethod
    def add_requests(self, arrives: Sequence[AddRequest], queue: OutputQueue) -> None:
        """Start them; their outputs go into `queue`. Raises EngineLost."""

    @abstractmethod
    def abort(self, id: str) -> bool:
        """No more of `id` is wanted. False if it had ended already."""

    @abstractmethod
    def fail_streams(self, reason: str) -> None:
        """End every open stream with EngineLost, and abort its requests."""

    # ------------------------------------------------------------ registry.RegistryListener

    @abstractmethod
    def on_progress(self, member: RegisteredWorker, stage: str) -> None: ...

    @abstractmethod
    def on_ready(self, member: RegisteredWorker, ready: WorkerReady) -> None: ...

    @abstractmethod
    def on_report(
        self, member: RegisteredWorker, outputs: EngineOutputs, before: Stats
    ) -> None: ...

    @abstractmethod
    def on_state_change(self, member: RegisteredWorker) -> None: ...

    @abstractmethod
    def on_silent(self, member: RegisteredWorker) -> None: ...

    @abstractmethod
    def on_lost(self, member: RegisteredWorker, reason: str) -> None: ...

    @abstractmethod
    def on_failure(self, member: RegisteredWorker, failure: EngineFailure) -> None: ...

    @abstractmethod
    def on_exit(self, name: str, how: str) -> None: ...
