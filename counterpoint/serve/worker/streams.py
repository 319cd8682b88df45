"""Streams of outputs: what a server's clients wait for.

Owns: which requests are open, and the queue where the outputs of each go. Promises: every stream
ends, with an OutputDelta that has `finish_reason`, or with EngineLost or TimedOut; a stream that is
left early is aborted. Must not: know HTTP, text, or where an engine runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from counterpoint.serve.worker.wire import EngineOutputs
from counterpoint.types import Abort, AddRequest, OutputDelta

EngineStatus = Literal["loading", "ready", "frozen", "dead", "stopped"]


class EngineLost(ConnectionError):
    """The engine is not there (any more), and the message says why."""


class TimedOut(Exception):
    """Some requests took longer than they may, and have been aborted."""


class OutputQueue(Protocol):
    """asyncio.Queue in a server, queue.SimpleQueue without one."""

    def put_nowait(self, item: OutputDelta | EngineLost, /) -> None: ...


class OutputListener(Protocol):
    """Hears of all requests and outputs; must return at once."""

    def on_requests(self, arrives: Sequence[AddRequest]) -> None: ...

    def on_outputs(self, outputs: EngineOutputs) -> None: ...


class EngineStreams:
    """The open requests of one engine: a client of it, whatever the link between them.

    `send` takes events to the engine: as a message to its process, or straight into its queue. From
    any thread.
    """

    def __init__(self, send: Callable[[Sequence[AddRequest | Abort]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()  # of `_queues` and `_lost`
        self._queues: dict[str, OutputQueue] = {}
        self._lost: EngineLost | None = None

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, requests: Sequence[AddRequest], queue: OutputQueue) -> None:
        """Raises EngineLost once the engine is lost."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._queues.update((request.id, queue) for request in requests)
        self._send(requests)

    def abort(self, ids: Iterable[str]) -> bool:
        """False if all of them had ended."""
        with self._lock:
            open_ids = [id for id in ids if self._queues.pop(id, None) is not None]
            lost = self._lost is not None
        if open_ids and not lost:
            self._send([Abort(id) for id in open_ids])
        return bool(open_ids) and not lost

    def deliver(self, deltas: Iterable[OutputDelta]) -> None:
        with self._lock:
            for delta in deltas:
                queue = self._queues.get(delta.id)
                if queue is None:
                    continue
                queue.put_nowait(delta)
                if delta.finish_reason is not None:
                    del self._queues[delta.id]

    def fail(self, reason: str) -> None:
        """End every open stream with EngineLost, and abort its requests."""
        with self._lock:
            queues, self._queues = self._queues, {}
            lost = self._lost is not None
        for queue in set(queues.values()):
            queue.put_nowait(EngineLost(reason))
        if queues and not lost:
            self._send([Abort(id) for id in queues])

    def close(self, reason: str) -> None:
        """The engine is lost: no request is taken any more."""
        with self._lock:
            self._lost = EngineLost(reason)
        self.fail(reason)


class StreamBackend(Protocol):
    """What an OutputStream needs of whoever runs its requests."""

    def add_requests(self, arrives: Sequence[AddRequest], queue: OutputQueue) -> None:
        """Start them; their outputs go into `queue`. Raises EngineLost."""
        ...

    def abort(self, id: str) -> bool:
        """No more of `id` is wanted. False if it had ended already."""
        ...


class OutputStream:
    """The outputs of some requests, in the order in which they come.

        async with client.open(arrives) as deltas:
            async for delta in deltas: ...

    It ends when each request has finished; leaving the block aborts those that have not. After
    `timeout_s` from its opening, they are aborted and TimedOut is raised.
    """

    def __init__(
        self, client: StreamBackend, arrives: Iterable[AddRequest], timeout_s: float | None = None
    ) -> None:
        self._client = client
        self._arrives = tuple(arrives)
        self._unfinished = {arrive.id for arrive in self._arrives}
        self._queue: asyncio.Queue[OutputDelta | EngineLost | TimedOut] = asyncio.Queue()
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> OutputStream:
        self._client.add_requests(self._arrives, self._queue)
        if self._timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for id in tuple(self._unfinished):
            self.abort(id)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> OutputDelta:
        while self._unfinished:
            delta = await self._queue.get()
            if isinstance(delta, EngineLost | TimedOut):
                raise delta
            if delta.id not in self._unfinished:
                continue
            if delta.finish_reason is not None:
                self._unfinished.discard(delta.id)
            return delta
        raise StopAsyncIteration

    @property
    def empty(self) -> bool:
        """Every output that has come has been taken."""
        return self._queue.empty()

    def abort(self, id: str) -> bool:
        """No more of request `id` is wanted: none of its outputs follows. False if it had ended."""
        self._unfinished.discard(id)
        return self._client.abort(id)

    def _expire(self) -> None:
        """At once, even if the reader is held up."""
        for id in self._unfinished:
            self._client.abort(id)
        self._queue.put_nowait(
            TimedOut(f"the answer was not finished within {self._timeout_s:g} s")
        )
