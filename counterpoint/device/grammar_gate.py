"""Gate: where requests wait until their grammars are compiled.

Owns: a thread for that. Promises: the events of one request keep their order; a request without a grammar, or with one that is
ready, passes at once; a grammar that cannot be compiled delays its request, and fails it later, where it is used.
Must not: check a grammar (whoever lets it in has).
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable

from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.grammar import Grammars
from counterpoint.types import Abort, AddRequest, Release, ResumeDecode

log = logging.getLogger(__name__)
STACK_BYTES = 64 << 20  # a grammar may nest deeply
NICENESS = 10

FromOutside = AddRequest | Abort | ResumeDecode | Release


class GrammarGate:
    """In front of `inbox`; with no `grammars`, everything passes. `put` from any thread; `close` waits for the thread's end."""

    def __init__(self, grammars: Grammars | None, inbox: WallClockEventQueue) -> None:
        self._grammars = grammars
        self._inbox = inbox
        self._lock = threading.Lock()  # of `_held`
        self._held: dict[
            str, list[FromOutside]
        ] = {}  # by request: its arrival, and what came after
        self._waiting: queue.SimpleQueue[AddRequest | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, event: FromOutside) -> None:
        with self._lock:
            behind = self._held.get(event.id)
            if behind is not None:
                behind.append(event)
                return
            grammars = self._grammars
            if (
                grammars is None
                or not isinstance(event, AddRequest)
                or grammars.is_compiled(event.sampling.grammar)
            ):
                self._inbox.put(event)
                return
            self._held[event.id] = [event]
            if self._thread is None:
                self._thread = big_thread(functools.partial(self._work, grammars))
        self._waiting.put(event)

    def close(self) -> None:
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work(self, grammars: Grammars) -> None:
        if (
            sys.platform == "linux"
        ):  # where a thread has a niceness of its own: it gives way to the lanes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (arrive := self._waiting.get()) is not None:
            try:
                grammars.compile(arrive.sampling.grammar)
            except Exception:  # the vocabulary can't be read, say
                log.exception("the grammar of request %s cannot be compiled", arrive.id)
            with self._lock:
                for event in self._held.pop(arrive.id):
                    self._inbox.put(event)


def big_thread(work: Callable[[], None]) -> threading.Thread:
    """A running thread with a deep stack."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="grammars", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
