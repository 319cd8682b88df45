"""EngineClient: the HTTP process's end of the wire.

Owns: the engine's process and the streams that are open in it. Promises: every stream ends, with a Delta that has `finish` or
with EngineLost; a stream that is left early is aborted; a dead engine is noticed at once, a frozen process within FROZEN_S, a stuck
loop in it within FROZEN_S + TURN_S, and a busy engine is none of these. Must not: know HTTP, text, or what an answer is for.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

import msgspec
import zmq
import zmq.asyncio

from counterpoint.config import Config
from counterpoint.serve.worker import wire
from counterpoint.types import Abort, AddRequest, OutputDelta, RequestTiming, Stats

FROZEN_S = 4.0  # without a heartbeat for so long, the engine is not healthy
LOST_S = 10.0  # and after so long, what runs in it is given up
MAX_TURN_S = 6.0  # one turn of its loop may take so long before it counts as silence
SHUTDOWN_S = 5.0

OutputQueue = asyncio.Queue["OutputDelta | EngineLost | TimedOut"]
EngineStatus = Literal["loading", "ready", "frozen", "dead", "stopped"]
log = logging.getLogger("counterpoint")


class EngineLost(ConnectionError):
    """The engine is not there (any more), and the message says why."""


class EngineFailed(Exception):
    """The engine could not start. `blame` is "user" if a setting is the cause."""

    def __init__(self, error: str, blame: str) -> None:
        super().__init__(error)
        self.blame = blame


class TimedOut(Exception):
    """Some requests took longer than they may, and have been aborted."""


class OutputListener(Protocol):
    """Hears all that passes; it must be quick."""

    def on_requests(self, arrives: Sequence[AddRequest]) -> None: ...

    def on_outputs(self, outputs: wire.EngineOutputs) -> None: ...


class EngineBackend(Protocol):
    """What a Stream needs of whoever runs its requests (EngineClient, Pool)."""

    def add_requests(self, arrives: Sequence[AddRequest], mail: OutputQueue) -> None:
        """Start them; what comes goes into `mail`. Raises EngineLost."""
        ...

    def abort(self, id: str) -> bool:
        """No more of `id` is wanted. False if it had ended already."""
        ...


class OutputStream:
    """The Deltas of some requests, in the order in which they come: `async with client.open(arrives) as deltas: async for ...`.
    It ends when each request has had its finish; leaving the block aborts those that have not.
    After `timeout_s` from its opening, those that have not are aborted, and TimedOut is raised."""

    def __init__(
        self, client: EngineBackend, arrives: Iterable[AddRequest], timeout_s: float | None = None
    ) -> None:
        self._client = client
        self._arrives = tuple(arrives)
        self._unfinished = {arrive.id for arrive in self._arrives}
        self._queue: OutputQueue = asyncio.Queue()
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> OutputStream:
        self._client.add_requests(self._arrives, self._queue)
        if self._timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for id in tuple(self._unfinished):
            self.abort(id)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> OutputDelta:
        while self._unfinished:
            delta = await self._queue.get()
            if isinstance(delta, EngineLost | TimedOut):
                raise delta
            if delta.id not in self._unfinished:
                continue
            if delta.finish_reason is not None:
                self._unfinished.discard(delta.id)
            return delta
        raise StopAsyncIteration

    @property
    def empty(self) -> bool:
        """Nothing has come that has not been taken."""
        return self._queue.empty()

    def abort(self, id: str) -> bool:
        """No more of request `id` is wanted; none of its Deltas will be given any more. False if it had ended already."""
        self._unfinished.discard(id)
        return self._client.abort(id)

    def _expire(self) -> None:
        """At once, even if whoever reads is held up."""
        for id in self._unfinished:
            self._client.abort(id)
        self._queue.put_nowait(
            TimedOut(f"the answer was not finished within {self._timeout_s:g} s")
        )


class EngineClient:
    """`on_record` is called with the Record of each finished request. `system` names the function that builds the engine."""

    def __init__(
        self,
        config: Config,
        on_record: Callable[[RequestTiming], None] | None = None,
        system: str = "counterpoint.build:build_system",
        listener: OutputListener | None = None,
    ) -> None:
        self.config = config
        self.builder = system
        self.on_timing = on_record
        self.listener = listener
        self.state: EngineStatus = "loading"
        self.stats = Stats()
        self.engine_info: wire.EngineInfo | None = None
        self.error = ""
        self._process: asyncio.subprocess.Process | None = None
        self._queues: dict[str, OutputQueue] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._since_message_s = 0.0  # since its last message
        self._turn_s = 0.0  # of its loop's present turn, as it said last
        self._ready: asyncio.Future[wire.EngineInfo] = asyncio.get_running_loop().create_future()
        self._folder = tempfile.mkdtemp(prefix="counterpoint-")  # readable by this user alone
        self._context = zmq.asyncio.Context()
        self._receive_socket = self._context.socket(zmq.PULL)
        self._send_socket = zmq.Socket(self._context, zmq.PUSH)

    # ------------------------------------------------------------ life

    async def start(self) -> wire.EngineInfo:
        """Start the process and wait until the engine is ready. Raises EngineFailed if it can't be."""
        to_engine, from_engine = (f"ipc://{self._folder}/{name}" for name in ("to", "from"))
        for socket in (self._receive_socket, self._send_socket):
            socket.set_hwm(0)
            socket.linger = 0
        self._receive_socket.bind(from_engine)
        self._send_socket.connect(to_engine)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "counterpoint.serve.worker.engine_process",
            stdin=asyncio.subprocess.PIPE,
        )
        start = wire.StartEngine(
            config=self.config, system=self.builder, to_engine=to_engine, from_engine=from_engine
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")
        self._tasks = [
            asyncio.create_task(work())
            for work in (self._receive, self._watch_process, self._watch_heartbeats)
        ]
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        """End every stream and the process. May be called at any time, and again."""
        self._mark_lost("stopped", "the server is shutting down")
        process = self._process
        if process is not None and process.returncode is None:
            if self.engine_info is None:
                process.kill()
            else:
                self._send([wire.Quit()])
            try:
                await asyncio.wait_for(process.wait(), SHUTDOWN_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._receive_socket.close()
        self._send_socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    # ------------------------------------------------------------ streams

    def open(self, arrives: Iterable[AddRequest], timeout_s: float | None = None) -> OutputStream:
        return OutputStream(self, arrives, timeout_s)

    def check(self) -> None:
        """Raises EngineLost unless the engine is ready."""
        if self.state != "ready":
            reasons = {
                "loading": "the model is still being loaded",
                "frozen": "the engine does not respond",
            }
            raise EngineLost(self.error or reasons.get(self.state, "the engine is not running"))

    def health(self) -> dict[str, Any]:
        """What /health says of an engine that is ready."""
        return {"status": "ok"}

    def fail_streams(self, reason: str) -> None:
        """End every open stream with EngineLost, and abort its requests."""
        queues, self._queues = self._queues, {}
        for queue in set(queues.values()):
            queue.put_nowait(EngineLost(reason))
        if queues and self.state not in ("dead", "stopped"):
            self._send([Abort(id) for id in queues])

    def add_requests(self, arrives: Sequence[AddRequest], mail: OutputQueue) -> None:
        self.check()
        for arrive in arrives:
            self._queues[arrive.id] = mail
        if self.listener is not None:
            self.listener.on_requests(arrives)
        self._send(list(arrives))

    def abort(self, id: str) -> bool:
        living = self._queues.pop(id, None) is not None and self.state not in ("dead", "stopped")
        if living:
            self._send([Abort(id)])
        return living

    def _send(self, messages: list[wire.ToEngine]) -> None:
        self._send_socket.send(wire.encode(messages), zmq.NOBLOCK)

    # ------------------------------------------------------------ what comes back

    async def _receive(self) -> None:
        while True:
            message = wire.decode_from_engine(await self._receive_socket.recv())
            self._since_message_s = 0.0
            self._turn_s = message.turn_s if isinstance(message, wire.Heartbeat) else 0.0
            if self.state == "frozen" and self._silent_s < FROZEN_S:
                log.warning("the engine responds again")
                self.state = "ready"
            if isinstance(message, wire.EngineOutputs):
                self._on_outputs(message)
            elif isinstance(message, wire.LoadProgress):
                log.info("%s", message.stage)
            elif isinstance(message, wire.EngineFailure):
                self.error = message.error
                self._fail_start(message.error, message.blame)
            elif isinstance(message, wire.EngineInfo):
                self._on_ready(message)

    def _on_ready(self, hello: wire.EngineInfo) -> None:
        if hello.version != wire.WIRE_VERSION:
            self._fail_start(
                f"the engine speaks version {hello.version} of the wire, this process {wire.WIRE_VERSION}",
                "engine",
            )
            return
        self.engine_info, self.state = hello, "ready"
        if not self._ready.done():
            self._ready.set_result(hello)

    def _on_outputs(self, outputs: wire.EngineOutputs) -> None:
        self.stats = outputs.stats or self.stats
        if self.listener is not None:
            self.listener.on_outputs(outputs)
        for item in outputs.items:
            if isinstance(item, RequestTiming):
                if self.on_timing is not None:
                    self.on_timing(item)
                continue
            queue = self._queues.get(item.id)
            if queue is not None:
                queue.put_nowait(item)
                if item.finish_reason is not None:
                    del self._queues[item.id]

    async def _watch_process(self) -> None:
        assert self._process is not None
        status = await self._process.wait()
        if self.state != "stopped":
            await asyncio.sleep(0)  # let a last word of it be read
            self._mark_lost(
                "dead", self.error or f"the engine's process has ended ({describe_exit(status)})"
            )

    async def _watch_heartbeats(self) -> None:
        """Counts turns of this loop, not seconds: time in which we were stopped ourselves is not the engine's silence."""
        await asyncio.wait([self._ready])
        while True:
            await asyncio.sleep(wire.HEARTBEAT_S)
            self._since_message_s += wire.HEARTBEAT_S
            if self._silent_s >= FROZEN_S and self.state == "ready":
                log.error(
                    "the engine has not been heard of for %.1f s; its loop is in one turn since %.1f s",
                    self._since_message_s,
                    self._turn_s,
                )
                self.state = "frozen"
            if self._silent_s >= LOST_S and self._queues:
                self.fail_streams("the engine does not respond")

    @property
    def _silent_s(self) -> float:
        """How long nothing has come of it: no message, or only beats of a process whose loop does not turn."""
        return max(self._since_message_s, self._turn_s - MAX_TURN_S)

    def _mark_lost(self, state: EngineStatus, reason: str) -> None:
        if self.state in ("dead", "stopped"):
            return
        self.state, self.error = state, reason
        self.fail_streams(reason)
        self.stats = msgspec.structs.replace(self.stats, running=0, waiting=0)
        if state == "dead":
            log.error("%s", reason)
        self._fail_start(reason, "engine")

    def _fail_start(self, error: str, blame: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(EngineFailed(error, blame))
            self._ready.exception()  # whoever waits has it; nobody may wait any more


def describe_exit(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
