"""FrontendClient: a worker's connection to its front, on a thread of its own.

Owns: the connection, the beat. Promises: `post` never blocks; what was posted in some order leaves in that order; a front that has
gone is told once (`lost`), and looked for again if the worker stays. What is posted meanwhile is dropped: a new front knows
nothing of it. Must not: know what an order means.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

import msgspec

from counterpoint.disagg.messages import WireError
from counterpoint.disagg.peer_connection import Address, ControlError, FramedConnection
from counterpoint.serve.worker.wire import HEARTBEAT_S, Heartbeat
from counterpoint.serve.worker.worker_protocol import (
    FromWorker,
    Register,
    Shutdown,
    WorkerOrder,
    WorkerReady,
    encode,
    read_from_frontend,
    register,
)

RECONNECT_S = 1.0  # pause before the front is looked for again
FLUSH_S = 2.0

log = logging.getLogger("counterpoint")


class FrontendClient:
    """`reason`, at the end: why the front does not want this worker, "" if it said nothing."""

    def __init__(self, front: Address, token: str, me: Register, stays: bool) -> None:
        self.frontend = front
        self.token = token
        self.registration = me
        self.reconnects = stays
        self.reason = ""
        self._wire: FramedConnection | None = None
        self._ready: WorkerReady | None = None
        self._on_orders: Callable[[list[WorkerOrder]], None] = lambda orders: None
        self._on_lost: Callable[[], None] = lambda: None
        self._on_heartbeat: Callable[[], None] = lambda: None
        self._on_end: Callable[[], None] = lambda: None
        self._joined = threading.Event()
        self._failure: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)

    # ------------------------------------------------------------ from other threads

    def open(self, ended: Callable[[], None]) -> None:
        """Join the front. `ended` is called when the worker is to stop. Raises ControlError or OSError if it may not join; a worker
        that stays waits until there is a front."""
        self._on_end = ended
        self._thread.start()
        self._joined.wait()
        if self._failure is not None:
            raise self._failure

    def serve(
        self,
        ready: WorkerReady,
        obey: Callable[[list[WorkerOrder]], None],
        lost: Callable[[], None],
        beat: Callable[[], None],
    ) -> None:
        """Say `ready`, now and to every later front; all three are called on this thread and return at once."""

        def begin() -> None:
            self._ready, self._on_orders, self._on_lost, self._on_heartbeat = (
                ready,
                obey,
                lost,
                beat,
            )
            self._write(ready)

        self._call_soon(begin)

    def post(self, word: FromWorker) -> None:
        self._call_soon(lambda: self._write(word))

    @property
    def local_host(self) -> str:
        """This machine's address, as the front sees it. To be asked for when the front has been joined."""
        assert self._wire is not None
        return self._wire.writer.get_extra_info("sockname")[0]

    def disconnect(self) -> None:
        """Say what is still to be said, and end; `ended` follows."""
        self._call_soon(self._closing.set)

    def close(self) -> None:
        """Say what is still to be said, and hang up."""
        self._call_soon(self._closing.set)
        self._thread.join(2 * FLUSH_S)

    def _call_soon(self, call: Callable[[], None]) -> None:
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
        serving = asyncio.create_task(self._stay_connected())
        over = asyncio.create_task(self._closing.wait())
        beating = asyncio.create_task(self._send_heartbeats())
        await asyncio.wait((serving, over), return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, over, beating):
            task.cancel()
        await asyncio.gather(serving, over, beating, return_exceptions=True)
        if self._wire is not None:
            self._wire.close()
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._wire.writer.wait_closed(), FLUSH_S)

    async def _stay_connected(self) -> None:
        """One front after another, until one says farewell."""
        told = ""
        while True:
            try:
                self._wire = await register(self.frontend, self.token, self.registration)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                refused = isinstance(error, ControlError) and self._ready is None
                if refused or not self.reconnects:
                    self._failure = (
                        error
                        if isinstance(error, OSError)
                        else ConnectionError(str(error) or type(error).__name__)
                    )
                    return
                if (reason := str(error) or type(error).__name__) != told:  # it may be so for hours
                    log.info(
                        "no front at %s:%d yet, asking again each second: %s",
                        *self.frontend,
                        reason,
                    )
                    told = reason
                await asyncio.sleep(RECONNECT_S)
                continue
            told = ""
            self._joined.set()
            if self._ready is not None:
                self._write(self._ready)
            if await self._listen(self._wire) or not self.reconnects:
                return
            log.warning("the front at %s:%d is lost", *self.frontend)
            self._wire = None
            self._on_lost()

    async def _listen(self, wire: FramedConnection) -> bool:
        """Whether the front said farewell."""
        try:
            while True:
                word = await read_from_frontend(wire)
                if isinstance(word, Shutdown):
                    self.reason = word.reason
                    return True
                self._on_orders(word.items)
        except (OSError, asyncio.IncompleteReadError, WireError):
            return False

    async def _send_heartbeats(self) -> None:
        while True:
            self._write(Heartbeat())
            if self._wire is not None:
                self._on_heartbeat()
            await asyncio.sleep(HEARTBEAT_S)

    def _write(self, word: msgspec.Struct) -> None:
        if self._wire is not None:
            self._wire.write_frame(encode(word))
