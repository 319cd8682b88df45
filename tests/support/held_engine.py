"""An engine that can be held at named points, to send a signal to a worker of a real pool there.

A point is a file in the folder COUNTERPOINT_TEST_HOLDS: its lock holds every engine that comes
there. `python held_engine.py MODEL '{"prefill": 1, …}' system` serves the model over such engines,
with flat settings.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from counterpoint.builder import system_builder
from counterpoint.config import Config, ConfigError
from counterpoint.core.engine import Engine
from counterpoint.core.request import Phase
from counterpoint.disagg.quarantine_recovery import QuarantineRecovery
from counterpoint.kv_transfer import nixl
from counterpoint.types import AddRequest, DisaggRole, Event, StepDone

FOLDER = "COUNTERPOINT_TEST_HOLDS"
POINTS = ("reserving", "prefilling", "decoding")


class HeldEngine(Engine):
    """`reserving`: before an answer's pages are reserved; `prefilling`: some of a prompt has been
    computed; `decoding`: an adopted answer has more tokens."""

    def on_event(self, now: float, event: Event) -> None:
        point = self.point(event)
        if point:
            with (Path(os.environ[FOLDER]) / point).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)
        super().on_event(now, event)

    def point(self, event: Event) -> str:
        if isinstance(event, AddRequest):
            return "reserving" if event.disagg_role is DisaggRole.DECODE else ""
        if not isinstance(event, StepDone):
            return ""
        parts = [
            request
            for request in self.requests.values()
            if request.input.disagg_role is not DisaggRole.WHOLE
        ]
        if any(request.phase is Phase.PREFILL and request.computed_tokens for request in parts):
            return "prefilling"
        return "decoding" if any(request.phase is Phase.DECODE for request in parts) else ""


def far_system(*args: Any) -> system_builder.System:
    """Each worker takes the others to be on other hosts: that a dead one writes no more can't be
    proved."""
    nixl.host_name = lambda: str(os.getpid())
    return system(*args)


def system(*args: Any) -> system_builder.System:
    built = system_builder.build_system(*args)
    return dataclasses.replace(built, engine=HeldEngine(built.limits, built.engine.policy))


if __name__ == "__main__":
    from counterpoint.serve.server import run
    from counterpoint.serve.worker import pool

    config = Config().replace(model=sys.argv[1], **json.loads(sys.argv[2]))
    try:
        pool.QuarantineRecovery = functools.partial(QuarantineRecovery, share=0.1, patience_s=0.5)
        sys.exit(run(config, system_builder.find_model(config), f"held_engine:{sys.argv[3]}"))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
