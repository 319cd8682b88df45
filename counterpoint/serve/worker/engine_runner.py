"""EngineRunner: builds an engine and runs its loop, in a worker's process or on a thread.

Owns: the order of build and teardown; the event log and the timeline; when figures are sent.
Promises: what was recorded is written even if the engine fails; `deliver` gets Stats at most every
STATS_S, and whenever the engine becomes idle or busy. Must not: know who sends requests.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.config import Config, ConfigError, require_writable
from counterpoint.core.engine import Engine
from counterpoint.core.loop import EventLog
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.grammar import GrammarGate
from counterpoint.device.timeline import Timeline, run
from counterpoint.serve.structured_output.grammar import make_vocabulary
from counterpoint.serve.text.tokenizer_loader import load_tokenizer
from counterpoint.serve.worker.wire import EngineInfo
from counterpoint.stats import Stats
from counterpoint.types import Output

if TYPE_CHECKING:
    from counterpoint.builder.system import System, WorkerPlacement

STATS_S = 0.1
BUILDER = (
    "counterpoint.builder.system_builder:build_system"  # builds the engine of a configured model
)
DeliverOutputs = Callable[[Sequence[Output], Stats | None, Engine], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """`builder` names the function that builds the engine, "module:function". `worker`: of a pool;
    its name goes into the names of the files that it writes."""

    config: Config
    builder: str = BUILDER
    worker: str = ""
    placement: WorkerPlacement | None = None

    def path(self, path: str | None) -> str | None:
        return path_for_worker(path, self.worker) if self.worker else path


class EngineRunner:
    """Builds the engine at once. Raises ConfigError or ModelError."""

    def __init__(
        self, setup: EngineSetup, inbox: WallClockEventQueue, progress: Callable[[str], None]
    ) -> None:
        server = setup.config.server
        timeline_path = setup.path(server.timeline)
        require_writable("timeline", timeline_path)
        self._log = open_event_log(setup.path(server.event_log))
        self.config = setup.config
        self.inbox = inbox
        build = find_builder(setup.builder)
        placement = () if setup.placement is None else (setup.placement,)
        self.system: System = build(setup.config, inbox, progress, *placement)
        self.gate = open_grammar_gate(self.system, inbox)
        self._timeline_path = timeline_path
        self.timeline = (
            Timeline(self.system.executor, inbox, self.system.engine.policy.lanes)
            if timeline_path is not None
            else None
        )
        self._stats_due_s = 0.0
        self._idle = True

    @property
    def info(self) -> EngineInfo:
        system, limits = self.system, self.system.limits
        return EngineInfo(
            pid=os.getpid(),
            policy=self.config.scheduler.policy,
            lanes=system.lanes,
            roles=tuple(lane.role for lane in system.engine.policy.lanes),
            vocab=system.spec.vocab,
            max_context_tokens=limits.max_context_tokens,
            page_tokens=limits.page_tokens,
            kv_tokens=limits.pages * limits.page_tokens,
            eos_token_ids=limits.eos_token_ids,
            notes=system.notes,
        )

    def run(self, deliver: DeliverOutputs) -> None:
        """The engine's loop, until the inbox is stopped; `close` is still to be called then."""

        def take(outputs: list[Output], engine: Engine) -> None:
            deliver(outputs, self._due_stats(engine), engine)

        system = self.system
        try:
            run(system.engine, (self.inbox, system.executor), take, self._log, self.timeline)
        finally:
            self.gate.close()
            if self._log is not None:
                self._log.close()
            if self.timeline is not None and self._timeline_path is not None:
                write_timeline(self.timeline, self._timeline_path)

    def close(self) -> None:
        """After a `run` that did not fail: free the device."""
        self.system.executor.close()

    def _due_stats(self, engine: Engine) -> Stats | None:
        """At most every STATS_S, and whenever the engine is idle or no longer is."""
        now_s, was_idle = time.monotonic(), self._idle
        self._idle = engine.idle
        if now_s < self._stats_due_s and not self._idle and not was_idle:
            return None
        self._stats_due_s = now_s + STATS_S
        return engine.stats()


def find_builder(name: str) -> Callable[..., System]:
    module, _, function = name.partition(":")
    return vars(importlib.import_module(module))[function]


def open_grammar_gate(system: System, inbox: WallClockEventQueue) -> GrammarGate:
    """Requests enter here, so that their grammars are compiled before the engine has them."""
    if system.grammars is not None:
        system.grammars.set_vocabulary_loader(
            lambda: make_vocabulary(load_tokenizer(system.source))
        )
    return GrammarGate(system.grammars, inbox)


def open_event_log(path: str | None) -> EventLog | None:
    """Raises ConfigError. A log that fails later is reported once, and fails nothing."""

    def on_error(error: OSError) -> None:
        log.error("event_log %s: %s; no more is recorded", path, error.strerror)

    try:
        return None if path is None else EventLog(path, on_error)
    except OSError as error:
        raise ConfigError(f"event_log {path!r} cannot be written: {error.strerror}") from None


def write_timeline(timeline: Timeline, path: str) -> None:
    """A file that can't be written is reported, and fails nothing."""
    try:
        timeline.write(path)
    except OSError as error:
        log.error("timeline %s: %s", path, error.strerror)


def path_for_worker(path: str | None, worker: str) -> str | None:
    """Each worker of a pool writes its own file: out.json becomes out.decode-0.json."""
    return None if path is None else str(Path(path).with_suffix(f".{worker}{Path(path).suffix}"))


def freeze_gc() -> None:
    """Exempt all present objects from garbage collection: a pass over an engine's 370,000 objects
    takes 150 to 200 ms on an H200's host, in which no step is launched."""
    gc.collect()
    gc.freeze()
