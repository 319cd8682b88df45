"""FrameSender: frames written to a socket by any thread.

Owns: the writing end of a connection. Promises: frames leave whole, in the order of `send`, which
never blocks: what the socket does not take at once, the event loop sends. So the engine's thread
wakes no other for its outputs, which would contend with it for the interpreter.
Must not: read, or know what a frame holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading

from counterpoint.disagg.peer_connection import FramedConnection


class FrameSender:
    """Takes over the writing end of `connection`, whose own writer is not used any more. Made in
    the event loop."""

    def __init__(self, connection: FramedConnection) -> None:
        fd = connection.writer.get_extra_info("socket").fileno()
        self._socket = socket.socket(fileno=os.dup(fd))
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # of all below
        self._backlog = bytearray()
        self._flushing: asyncio.Task[None] | None = None
        self._closed = False

    def send(self, data: bytes) -> None:
        frame = len(data).to_bytes(4, "big") + data
        with self._lock:
            if self._closed:
                return
            waiting = bool(self._backlog)
            if not waiting:
                frame = frame[self._try_send(frame) :]
            if not frame:
                return
            self._backlog += frame
        if not waiting:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._start_flush)

    def _try_send(self, data: bytes | bytearray) -> int:
        """How many bytes the socket took. After an error, all: the reading end reports it."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)

    # ------------------------------------------------------------ the event loop

    def _start_flush(self) -> None:
        if self._flushing is None or self._flushing.done():
            self._flushing = self._loop.create_task(self._flush())

    async def _flush(self) -> None:
        while True:
            with self._lock:
                data = bytes(self._backlog)
            if not data:
                return
            try:
                await self._loop.sock_sendall(self._socket, data)
            except OSError:
                self._closed = True
            with self._lock:
                del self._backlog[: len(data)]
                if not self._backlog or self._closed:
                    self._backlog.clear()
                    return

    async def close(self, timeout_s: float) -> None:
        """Send what waits, for at most `timeout_s`."""
        self._start_flush()
        if self._flushing is not None:
            await asyncio.wait([self._flushing], timeout=timeout_s)
            self._flushing.cancel()
        with self._lock:
            self._closed = True
        self._socket.close()
