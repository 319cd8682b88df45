"""IoLoop: one thread that serves the sockets of a transport.

Owns: the thread, the selector, the sockets given to it.
Promises: handlers run one at a time, under the lock given at construction. When `remove` has
returned under that lock, no handler of that socket runs any more.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable

Handler = Callable[[int], None]  # gets the selector's events


class IoLoop:
    """`add`, `wants_write` and `remove` are called under the lock, or before `start`."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[socket.socket, Handler] = {}
        self._stop_receiver, self._stop_sender = socket.socketpair()  # ends the thread
        self._selector.register(self._stop_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kv-tcp", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, sock: socket.socket, events: int, handler: Handler) -> None:
        self._handlers[sock] = handler
        self._selector.register(sock, events)

    def wants_write(self, sock: socket.socket, yes: bool = True) -> None:
        """Whether to call the socket's handler when it can take bytes. Unknown sockets are
        ignored."""
        if sock not in self._handlers:
            return
        events = self._selector.get_key(sock).events
        wanted = events | selectors.EVENT_WRITE if yes else events & ~selectors.EVENT_WRITE
        if wanted != events:
            self._selector.modify(sock, wanted)

    def remove(self, sock: socket.socket) -> None:
        """Close a socket and forget it; again does no harm."""
        if self._handlers.pop(sock, None) is not None:
            self._selector.unregister(sock)
        sock.close()

    def close(self) -> None:
        """End the thread and close every socket."""
        self._stop_sender.close()
        if self._thread.is_alive():
            self._thread.join()
        for sock in tuple(self._handlers):
            self.remove(sock)
        self._stop_receiver.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._stop_receiver:
                    return
                with self._lock:
                    handler = self._handlers.get(key.fileobj)  # type: ignore[arg-type]
                    if handler is not None:
                        handler(events)
