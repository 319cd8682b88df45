"""The engine's process: `python -m counterpoint.serve.worker.engine_process`, started by EngineClient and by nothing else.

Owns: the life of this process. Promises: it ends when its parent ends, however that happens; a failure to start is told in words;
it says that it lives from a thread that waits for no step. Must not: speak HTTP, decide anything.

Threads: the main one runs the engine's loop and alone touches the engine; `mail` takes in events and sends heartbeats; `parent`
waits for the end of standard input.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from counterpoint.config import Config, ConfigError, require_writable
from counterpoint.core.engine import Engine
from counterpoint.core.loop import EventLog
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.grammar import GrammarGate
from counterpoint.device.timeline import Timeline, run
from counterpoint.serve.observability.logs import start_logging
from counterpoint.serve.structured_output.grammar import make_vocabulary
from counterpoint.serve.text.tokenizer_loader import load_tokenizer
from counterpoint.serve.worker.wire import (
    HEARTBEAT_S,
    EngineFailure,
    EngineInfo,
    EngineOutputs,
    Heartbeat,
    LoadProgress,
    Quit,
    StartEngine,
    decode_to_engine,
    encode,
)
from counterpoint.spec.model import ModelError
from counterpoint.types import Output

if TYPE_CHECKING:
    from counterpoint.build import System

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
STATS_S = 0.1
Context = zmq.Context[zmq.Socket[bytes]]
log = logging.getLogger(__name__)


def main() -> int:
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group; the parent decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=StartEngine)
    level = start.config.server.log_level
    start_logging(
        "warning" if level == "info" else level, start.config.server.log_format
    )  # what goes well, the parent tells
    threading.Thread(target=exit_with_parent, name="parent", daemon=True).start()
    context = zmq.Context()
    out = Mailbox(context, start.from_engine)
    try:
        return serve(start, context, out)
    finally:
        out.close()
        context.term()


def die_with_parent() -> None:
    """Linux: the kernel kills this process with its parent, even if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_with_parent() -> None:
    """Everywhere: standard input is a pipe whose other end the parent holds, and never writes to again."""
    while os.read(0, 1024):
        pass
    os._exit(1)


def freeze_gc() -> None:
    """All objects that there are now stay: spare the collector to walk over them again and again (150 to 200 ms each time for the
    370,000 objects of an engine on an H200, in which no step is launched)."""
    gc.collect()
    gc.freeze()


class Mailbox:
    """One thread's way out. `post` never blocks."""

    def __init__(self, context: Context, endpoint: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.linger = 1000
        self._socket.connect(endpoint)

    def post(self, message: msgspec.Struct) -> None:
        self._socket.send(encode(message))

    def close(self) -> None:
        self._socket.close()


def serve(start: StartEngine, context: Context, out: Mailbox) -> int:
    """Build the engine, run it until Quit. The exit status: 0, 1 (broken) or 2 (a setting is wrong)."""
    inbox = WallClockEventQueue()
    try:
        require_writable("timeline", start.config.server.timeline)
        events = open_log(start.config.server.event_log)
        build = find_builder(start.system)
        system = build(start.config, inbox, lambda stage: out.post(LoadProgress(stage)))
        run_engine(start, system, inbox, context, out, events)
        return 0
    except (ConfigError, ModelError) as error:
        out.post(EngineFailure(str(error), blame="user"))
        return 2
    except Exception as error:  # it could not be built, or its device is lost: nothing can go on
        traceback.print_exc()
        out.post(EngineFailure(f"{type(error).__name__}: {error}"))
        return 1


def open_log(path: str | None) -> EventLog | None:
    def lost(error: OSError) -> None:
        log.error("event_log %s: %s; no more is recorded", path, error.strerror)

    try:
        return None if path is None else EventLog(path, lost)
    except OSError as error:
        raise ConfigError(f"event_log {path!r} cannot be written: {error.strerror}") from None


def write_timeline(timeline: Timeline, path: str) -> None:
    """At the end. A file that can't be written is told, and fails nothing."""
    try:
        timeline.write(path)
    except OSError as error:
        log.error("timeline %s: %s", path, error.strerror)


def run_engine(
    start: StartEngine,
    system: System,
    inbox: WallClockEventQueue,
    context: Context,
    out: Mailbox,
    events: EventLog | None,
) -> None:
    """From Hello to Quit. What was recorded is written even if the engine fails."""
    over = threading.Event()
    gate = open_grammar_gate(system, inbox)
    mail = threading.Thread(
        target=receive_requests, args=(start, context, inbox, gate, over), name="mail", daemon=True
    )
    mail.start()
    freeze_gc()
    out.post(make_engine_info(start.config, system))
    path, deliver = start.config.server.timeline, OutputSender(out)
    timeline = (
        Timeline(system.executor, inbox, system.engine.policy.lanes) if path is not None else None
    )
    try:
        run(system.engine, (inbox, system.executor), deliver, events, timeline)
        system.executor.close()
    finally:
        over.set()
        mail.join()
        gate.close()
        if events is not None:
            events.close()
        if timeline is not None and path is not None:
            write_timeline(timeline, path)


def find_builder(name: str) -> Callable[..., System]:
    module, _, function = name.partition(":")
    return vars(importlib.import_module(module))[function]


def open_grammar_gate(system: System, inbox: WallClockEventQueue) -> GrammarGate:
    """Where requests go in, so that their grammars are ready when the engine has them."""
    if system.grammars is not None:
        system.grammars.set_vocabulary_loader(
            lambda: make_vocabulary(load_tokenizer(system.source))
        )
    return GrammarGate(system.grammars, inbox)


def make_engine_info(config: Config, system: System) -> EngineInfo:
    limits = system.limits
    return EngineInfo(
        pid=os.getpid(),
        policy=config.scheduler.policy,
        lanes=system.lanes,
        roles=tuple(lane.role for lane in system.engine.policy.lanes),
        vocab=system.spec.vocab,
        max_context_tokens=limits.max_context_tokens,
        page_tokens=limits.page_tokens,
        kv_tokens=limits.pages * limits.page_tokens,
        eos_token_ids=limits.eos_token_ids,
        notes=system.notes,
    )


def receive_requests(
    start: StartEngine,
    context: Context,
    inbox: WallClockEventQueue,
    gate: GrammarGate,
    over: threading.Event,
) -> None:
    """Events in, heartbeats out, until the engine's loop is over. With each beat the loop is nudged: however long a step takes, the
    loop itself comes back at once, unless it is stuck."""
    beats = Mailbox(context, start.from_engine)
    mail = context.socket(zmq.PULL)
    mail.set_hwm(0)
    mail.linger = 0
    mail.bind(start.to_engine)
    due_s = turned_s = 0.0
    turns = -1
    try:
        while not over.is_set():
            now_s = time.monotonic()
            if now_s >= due_s:
                if inbox.num_gets != turns:
                    turns, turned_s = inbox.num_gets, now_s
                    inbox.wake()
                beats.post(Heartbeat(now_s - turned_s))
                due_s = now_s + HEARTBEAT_S
            if not mail.poll(max(0, round(1000 * (due_s - time.monotonic())))):
                continue
            for message in decode_to_engine(mail.recv()):
                if isinstance(message, Quit):
                    inbox.stop()
                else:
                    gate.put(message)
    finally:
        mail.close()
        beats.close()


class OutputSender:
    """Sends each turn's outputs, and the engine's figures at most every STATS_S (and whenever it falls idle)."""

    def __init__(self, out: Mailbox) -> None:
        self.mailbox = out
        self._due_s = 0.0

    def __call__(self, outputs: list[Output], engine: Engine) -> None:
        now = time.monotonic()
        stats = None
        if now >= self._due_s or engine.idle:
            stats = engine.stats()
            self._due_s = now + STATS_S
        if outputs or stats is not None:
            self.mailbox.post(EngineOutputs(outputs, now, stats))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # not sys.exit: threads of a lost device may never end
