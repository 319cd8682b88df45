"""A worker's process: `python -m counterpoint.serve.worker.worker_process`, `counterpoint worker`.

Owns: the life of this process. Promises: it ends when its parent ends, however that happens; a
failure to start is reported in words; exit status 0, 1 (broken) or 2 (a setting is wrong, or the
server refuses this worker). Must not: know requests.

Started by supervisor.py, the thread `parent` waits for the end of standard input.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback

import msgspec

from counterpoint.config import Config, ConfigError, parse_host_port
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.disagg.peer_connection import Address, ControlError, check_exposure
from counterpoint.serve.observability.logs import start_logging
from counterpoint.serve.worker.engine_runner import BUILDER
from counterpoint.serve.worker.engine_worker import EngineWorker
from counterpoint.serve.worker.frontend_client import FrontendClient
from counterpoint.serve.worker.pool_worker import PoolWorker
from counterpoint.serve.worker.wire import (
    EngineFailure,
    StartWorker,
    read_cluster_token,
)
from counterpoint.spec.model import ModelError
from counterpoint.types import Role

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> int:
    """Started by supervisor.py, which writes a StartWorker to standard input and keeps it open."""
    # Ctrl-C in a terminal and SIGTERM of a service manager reach the whole process group: the
    # parent decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=StartWorker)
    threading.Thread(target=exit_with_parent, name="parent", daemon=True).start()
    return run_worker(start)


def die_with_parent() -> None:
    """Linux: the kernel kills this process with its parent, even if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_with_parent() -> None:
    """Everywhere: standard input is a pipe that ends with the parent."""
    while os.read(0, 1024):
        pass
    os._exit(1)


def join(config: Config, frontend: str, role: Role, name: str | None) -> int:
    """`counterpoint worker`: a worker of a server elsewhere, until a signal. Raises ConfigError."""
    host, port = parse_host_port("join", frontend)
    token = read_cluster_token(config)
    try:
        check_exposure(host, token)
    except ControlError as error:
        raise ConfigError(str(error)) from None
    return run_worker(
        StartWorker(
            config=config.replace(cluster_token=None),
            system=BUILDER,
            name=name or f"{role.value}-{socket.gethostname()}",
            role=role,
            frontend=Address(host, port),
            token=token,
            reconnects=True,
        )
    )


def run_worker(start: StartWorker) -> int:
    """Join the server, build the engine, run it until the server says Shutdown."""
    server = start.config.server
    # The parent of a single engine reports its progress: only what goes wrong is logged here.
    quiet = not start.in_pool and server.log_level == "info"
    start_logging("warning" if quiet else server.log_level, server.log_format)
    inbox = WallClockEventQueue()
    frontend = FrontendClient(start)
    try:
        frontend.open(inbox.stop)
    except (ControlError, OSError) as error:
        address = start.frontend
        print(f"no place at {address.host}:{address.port}: {error}", file=sys.stderr)
        return 2
    try:
        return build_and_run(start, inbox, frontend)
    except (ConfigError, ModelError) as error:
        if start.in_pool:
            print(error, file=sys.stderr)
        frontend.post(EngineFailure(str(error), blame="user"))
        return 2
    except Exception as error:  # it could not be built, or its device is lost: nothing can go on
        traceback.print_exc()
        frontend.post(EngineFailure(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        frontend.close()


def build_and_run(start: StartWorker, inbox: WallClockEventQueue, frontend: FrontendClient) -> int:
    worker = (PoolWorker if start.in_pool else EngineWorker)(start, inbox, frontend)
    if start.reconnects:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: worker.leave())
    worker.run()
    if frontend.reason:
        print(f"the front does not want this worker: {frontend.reason}", file=sys.stderr)
    return 2 if frontend.reason else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # not sys.exit: threads of a lost device may never end
