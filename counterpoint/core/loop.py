"""The loop that joins an event queue, an engine and an executor; and the event log.

Each turn takes events, lets the engine schedule, submits its commands and delivers its outputs, in
this order. Its one blocking call is `inbox.get()`. A recorded log, replayed into a fresh engine,
gives the same commands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from counterpoint.core.engine import Engine
from counterpoint.interfaces import EventQueue, Executor
from counterpoint.types import Command, Event, Output

DeliverOutputs = Callable[[list[Output], Engine], None]


def run(
    engine: Engine,
    inbox: EventQueue,
    executor: Executor,
    deliver: DeliverOutputs,
    log: EventLog | None = None,
) -> None:
    """Run until the inbox ends.

    `deliver` gets the outputs of each turn (maybe none) and must not block. A turn without events
    does nothing else.
    """
    while (got := inbox.get()) is not None:
        now, events = got
        if events and log is not None:
            log.write(now, events)
        run_turn(engine, now, events, executor, deliver)


def run_turn(
    engine: Engine, now: float, events: Sequence[Event], executor: Executor, deliver: DeliverOutputs
) -> None:
    for event in events:
        engine.on_event(now, event)
    for command in engine.schedule(now) if events else ():
        executor.submit(command)
    deliver(engine.take_outputs(), engine)


class EventLog:
    """Writes each turn's (now, events) to `path`, as msgpack with a 4-byte length before each.

    When a write fails (a full disk), the log calls `on_error` once and writes nothing more, so that
    serving goes on. Without `on_error`, it raises the error.
    """

    def __init__(self, path: str | Path, on_error: Callable[[OSError], None] | None = None) -> None:
        self._file: BinaryIO = Path(path).open("wb")  # noqa: SIM115 (close closes it)
        self._encode = msgspec.msgpack.Encoder().encode
        self._on_error = on_error

    def write(self, now: float, events: Sequence[Event]) -> None:
        if self._file.closed:
            return
        data = self._encode((now, events))
        try:
            self._file.write(len(data).to_bytes(4, "little") + data)
        except OSError as error:
            with contextlib.suppress(OSError):  # from flushing what is left
                self._file.close()
            self._report_error(error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._report_error(error)

    def _report_error(self, error: OSError) -> None:
        if self._on_error is None:
            error.filename = self._file.name
            raise error
        self._on_error(error)


def read_log(path: str | Path) -> Iterator[tuple[float, list[Event]]]:
    """The turns of a log, in order, without a last turn that is cut off."""
    decode = msgspec.msgpack.Decoder(tuple[float, list[Event]]).decode
    data = Path(path).read_bytes()
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + size > len(data):
            return
        yield decode(data[at + 4 : at + 4 + size])
        at += 4 + size


def replay(engine: Engine, turns: Iterator[tuple[float, list[Event]]]) -> Iterator[list[Command]]:
    """The commands that a fresh engine gives for each recorded turn."""
    for now, events in turns:
        for event in events:
            engine.on_event(now, event)
        yield engine.schedule(now)
        engine.take_outputs()
