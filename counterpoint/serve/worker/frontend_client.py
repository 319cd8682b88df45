"""FrontendClient: a worker's connection to its server, on a thread of its own.

Owns: the connection and the heartbeat. Promises: `post` never blocks; messages leave in the order
in which they were posted; the end of the connection is reported once (`on_frontend_lost`), and a
worker that `reconnects` looks for its server again. What is posted meanwhile is dropped: a new
server knows nothing of it. Must not: know what a message means.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from counterpoint.disagg.messages import WireError
from counterpoint.disagg.peer_connection import ControlError, FramedConnection
from counterpoint.serve.worker.frame_sender import FrameSender
from counterpoint.serve.worker.wire import (
    HEARTBEAT_S,
    EngineRequests,
    FromWorker,
    Heartbeat,
    Register,
    Shutdown,
    StartWorker,
    WorkerOrder,
    WorkerReady,
    encode,
    read_from_frontend,
    register,
)
from counterpoint.types import Abort, AddRequest

RECONNECT_S = 1.0  # between two attempts to reach the server
FLUSH_S = 2.0

log = logging.getLogger("counterpoint")


class WorkerHandler(Protocol):
    """Called on the connection's thread once the worker is ready; each returns at once."""

    def on_requests(self, events: Sequence[AddRequest | Abort]) -> None: ...

    def on_orders(self, orders: Sequence[WorkerOrder]) -> None: ...

    def on_heartbeat(self) -> Heartbeat: ...

    def on_frontend_lost(self) -> None: ...


class FrontendClient:
    """`reason`, at the end: why the server refuses this worker, "" if it does not."""

    def __init__(self, start: StartWorker) -> None:
        self.frontend = start.frontend
        self.token = start.token
        self.registration = Register(worker=start.name, role=start.role)
        self.reconnects = start.reconnects
        self.reason = ""
        self._sender: FrameSender | None = None  # of the present connection
        self._local_host = ""
        self._ready: WorkerReady | None = None
        self._handler: WorkerHandler | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._joined = threading.Event()
        self._failure: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)

    # ------------------------------------------------------------ from other threads

    def open(self, on_end: Callable[[], None]) -> None:
        """Join the server. `on_end` is called when the worker is to stop. Raises ControlError or
        OSError if it may not join; a worker that reconnects waits until there is a server."""
        self._on_end = on_end
        self._thread.start()
        self._joined.wait()
        if self._failure is not None:
            raise self._failure

    def serve(self, ready: WorkerReady, handler: WorkerHandler) -> None:
        """Send `ready`, now and to every later server."""

        sent = threading.Event()

        def begin() -> None:
            self._ready, self._handler = ready, handler
            self.post(ready)
            sent.set()

        self._call_soon(begin)
        sent.wait(FLUSH_S)  # before any output

    def post(self, message: FromWorker) -> None:
        sender = self._sender
        if sender is not None:
            sender.send(encode(message))

    @property
    def local_host(self) -> str:
        """This machine's address, as the server sees it. Valid once the server has been joined."""
        return self._local_host

    def disconnect(self) -> None:
        """Send what was posted, and end; `on_end` follows."""
        self._call_soon(self._closing.set)

    def close(self) -> None:
        """Send what was posted, and wait for the end."""
        self.disconnect()
        self._thread.join(2 * FLUSH_S)

    def _call_soon(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(call)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._joined.set()
            self._loop.close()
            self._on_end()

    async def _serve(self) -> None:
        tasks = [
            asyncio.create_task(self._stay_connected()),
            asyncio.create_task(self._closing.wait()),
        ]
        heartbeats = asyncio.create_task(self._send_heartbeats())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, heartbeats):
            task.cancel()
        await asyncio.gather(*tasks, heartbeats, return_exceptions=True)
        if self._sender is not None:
            await self._sender.close(FLUSH_S)

    async def _stay_connected(self) -> None:
        """One connection after another, until a server says Shutdown."""
        logged = ""
        while True:
            try:
                connection = await register(self.frontend, self.token, self.registration)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                reason = str(error) or type(error).__name__
                refused = isinstance(error, ControlError) and self._ready is None
                if refused or not self.reconnects:
                    self._failure = error if isinstance(error, OSError) else ConnectionError(reason)
                    return
                if reason != logged:  # the same may hold for hours
                    log.info(
                        "no front at %s:%d yet, asking again each second: %s",
                        *self.frontend,
                        reason,
                    )
                    logged = reason
                await asyncio.sleep(RECONNECT_S)
                continue
            logged = ""
            self._local_host = connection.writer.get_extra_info("sockname")[0]
            self._sender = FrameSender(connection)
            self._joined.set()
            if self._ready is not None:
                self.post(self._ready)
            try:
                if await self._listen(connection) or not self.reconnects:
                    return
            finally:
                connection.close()
            log.warning("the front at %s:%d is lost", *self.frontend)
            await self._sender.close(0)
            self._sender = None
            if self._handler is not None:
                self._handler.on_frontend_lost()

    async def _listen(self, connection: FramedConnection) -> bool:
        """Whether the server said Shutdown."""
        try:
            while True:
                message = await read_from_frontend(connection)
                if isinstance(message, Shutdown):
                    self.reason = message.reason
                    return True
                if self._handler is None:
                    continue  # work comes to ready workers only
                if isinstance(message, EngineRequests):
                    self._handler.on_requests(message.items)
                else:
                    self._handler.on_orders(message.items)
        except (OSError, asyncio.IncompleteReadError, WireError):
            return False

    async def _send_heartbeats(self) -> None:
        while True:
            if self._sender is not None:
                handler = self._handler
                self.post(handler.on_heartbeat() if handler is not None else Heartbeat())
            await asyncio.sleep(HEARTBEAT_S)
