"""Courier: the thread that carries a worker's handoffs out: control connections, movers, the clock.

Owns: the event loop and every control connection. Promises: the engine's thread never waits for it, and it never waits for the
engine; a completed transfer wakes it at once, and what follows reaches the engine without a forward pass between; a link whose
connection ends is dead at both ends.
Must not: decide (disagg/handoff.py does).

    engine thread   --tell-->  Courier  --outside.engine-->  engine's inbox
    front           --order->  Courier  --outside.report-->  front
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

import counterpoint.disagg.messages as wire
from counterpoint.disagg import handoff_events, peer_connection
from counterpoint.disagg.compatibility import CompatibilityDigest, find_mismatch
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.link_choice import NoTransport, TransportEndpoint, choose_transport
from counterpoint.disagg.messages import HandoffId
from counterpoint.disagg.peer_connection import (
    Address,
    ControlError,
    FramedConnection,
    Introduction,
    LinkReady,
    Refusal,
)
from counterpoint.kv_transfer.memory import PagedMemory
from counterpoint.kv_transfer.transport import Completed, Notice, Transport, TransportError
from counterpoint.types import Admitted, Computed, DisaggRole, OutputDelta

TICK_S = 0.05
MAX_UNSENT_BYTES = 64 << 20  # a peer that lets so much of control traffic pile up is lost

log = logging.getLogger(__name__)


class WorkerHooks(Protocol):
    """Both are called on the courier's thread and must return at once."""

    def to_engine(self, event: handoff_events.EngineEvent) -> None: ...

    def report(self, command: handoff_events.HandoffEnded | handoff_events.Reroute) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What this worker says of itself. `movers` by kind, each registered; `blobs` are what they gave. `allow_staged`: KV in
    GPU memory may go through host memory."""

    worker: str
    digest: CompatibilityDigest
    endpoint: TransportEndpoint
    memory: PagedMemory
    transports: dict[str, Transport]
    transport_metadata: dict[str, bytes]
    token: str = ""
    allow_staged: bool = False


class SentKv(NamedTuple):
    """KV that went to another worker, on the machine's monotonic clock. `ended_s`: the last byte was in place, or never will be."""

    worker: str
    kind: str
    started_s: float
    ended_s: float
    bytes: int
    layers: tuple[int, int]
    error: str


@dataclass(slots=True, eq=False)
class PeerConnection:
    """A link's control connection and its mover."""

    wire: FramedConnection
    mover: Transport
    peer: str


class HandoffRunner:
    """`start` binds `host`:`port` (0: a free one; see `address`) and returns when peers may dial. `fault` is called on this thread
    when something here is wrong: handoffs would hang, so the worker should end. None: it is logged."""

    def __init__(
        self,
        identity: WorkerIdentity,
        handoffs: Handoffs,
        hooks: WorkerHooks,
        host: str = "127.0.0.1",
        port: int = 0,
        on_fault: Callable[[str], None] | None = None,
    ) -> None:
        peer_connection.check_exposure(host, identity.token)
        self.identity = identity
        self.handoffs = handoffs
        self.hooks = hooks
        self.address = Address(host, port)
        self.bytes_sent = 0  # of KV that was posted
        self.on_kv_sent: Callable[[SentKv], None] | None = (
            None  # is told of each write, on the courier's thread
        )
        self._posted: dict[int, SentKv] = {}  # writes in flight, if they are told of
        self._connections: dict[int, PeerConnection] = {}
        self._dials: dict[Address, asyncio.Task[int]] = {}
        self._starting: dict[HandoffId, bool] = {}  # dialling for it -> still wanted
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        if on_fault is not None:
            self._loop.set_exception_handler(lambda _, context: on_fault(describe_failure(context)))
        self._closing = asyncio.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-courier", daemon=True)

    # ------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Raises OSError if the address can't be bound."""
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            raise self._start_error

    def on_engine_outputs(self, *outputs: Admitted | Computed | OutputDelta) -> None:
        """What the engine says, in its order."""
        self._call_soon(lambda: self._take_outputs(outputs))

    def on_order(self, order: handoff_events.Order, decode_address: Address | None = None) -> None:
        """What the front wants; `to`: the decode worker of a Start or Redirect, which is dialled if need be."""
        self._call_soon(lambda: self._on_order(order, decode_address))

    def on_notices(self) -> None:
        """A mover has notices."""
        self._call_soon(self._take_notices)

    def inspect(self, look: Callable[[HandoffRunner], None]) -> None:
        """Call `look` on the courier's thread: for metrics, which must not read what is being changed."""
        self._call_soon(lambda: look(self))

    def close(self) -> None:
        """Hang up, stop. The movers are closed by whoever made them."""
        if self._thread.is_alive():
            self._call_soon(self._closing.set)
            self._thread.join()

    def _call_soon(self, call: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def links_by_transport(self) -> dict[str, int]:
        """How many links use which mover; to be called through `inspect`."""
        return dict(Counter(line.mover.kind for line in self._connections.values()))

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except OSError as error:
            self._start_error = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._on_connection, *self.address)
        self.address = Address(*server.sockets[0].getsockname()[:2])
        self._ready.set()
        async with server:
            while not self._closing.is_set():
                self.handoffs.tick(time.monotonic())
                self._run_commands()
                self._take_notices()
                try:
                    await asyncio.wait_for(self._closing.wait(), TICK_S)
                except TimeoutError:
                    continue
        for task in (*self._tasks, *self._dials.values()):
            task.cancel()
        for line in self._connections.values():
            line.wire.close()
        await asyncio.gather(*self._tasks, *self._dials.values(), return_exceptions=True)

    def _handle(self, event: handoff_events.Event) -> None:
        self.handoffs.on_event(time.monotonic(), event)
        self._run_commands()

    def _take_outputs(self, outputs: Sequence[Admitted | Computed | OutputDelta]) -> None:
        for output in outputs:
            self.handoffs.on_event(time.monotonic(), output)
        self._run_commands()

    def _take_notices(self) -> None:
        for mover in self.identity.transports.values():
            for notice in mover.poll():
                self.handoffs.on_event(time.monotonic(), self._event(notice))
        self._run_commands()

    def _event(self, notice: Notice) -> handoff_events.Event:
        if isinstance(notice, Completed):
            posted = self._posted.pop(notice.op, None)
            if posted is not None and self.on_kv_sent is not None:
                self.on_kv_sent(posted._replace(ended_s=time.monotonic(), error=notice.error))
        return handoff_events.event_of_notice(notice)

    # ------------------------------------------------------------ commands

    def _run_commands(self) -> None:
        for command in self.handoffs.take_commands():
            if isinstance(command, handoff_events.ToEngine):
                self.hooks.to_engine(command.event)
            elif isinstance(command, handoff_events.HandoffEnded | handoff_events.Reroute):
                self.hooks.report(command)
            elif isinstance(command, handoff_events.CancelWrite):
                for mover in self.identity.transports.values():
                    mover.cancel(command.op)
            elif isinstance(command, handoff_events.VerifyPages):
                self._verify(command)
            else:
                self._on_line(command)

    def _on_line(
        self,
        command: handoff_events.SendMessage
        | handoff_events.WriteKv
        | handoff_events.GrantPages
        | handoff_events.RevokePages
        | handoff_events.FenceLink,
    ) -> None:
        line = self._connections.get(command.link)
        if line is None:
            return
        if isinstance(command, handoff_events.SendMessage):
            line.wire.write_frame(wire.encode(command.message))
            if line.wire.unsent_bytes > MAX_UNSENT_BYTES:
                self._call_soon(lambda: self._handle(handoff_events.LinkDown(command.link)))
        elif isinstance(command, handoff_events.WriteKv):
            memory = self.identity.memory
            spans = memory.spans(
                command.first_layer, command.last_layer, command.sources, command.destinations
            )
            size = int(spans[:, 3].sum())
            self.bytes_sent += size
            if self.on_kv_sent is not None:
                layers = (command.first_layer, command.last_layer)
                self._posted[command.op] = SentKv(
                    line.peer, line.mover.kind, time.monotonic(), 0.0, size, layers, ""
                )
            line.mover.write(command.link, command.generation, spans, command.op)
        elif isinstance(command, handoff_events.GrantPages):
            line.mover.grant(command.link, command.generation, command.pages)
        elif isinstance(command, handoff_events.RevokePages):
            line.mover.revoke(command.generation)
        else:
            line.wire.close()
            line.mover.disconnect(command.link)
            del self._connections[command.link]

    def _verify(self, command: handoff_events.VerifyPages) -> None:
        memory = self.identity.memory

        async def verify() -> None:
            spans = memory.spans(0, memory.layers, command.pages, command.pages)
            total = await asyncio.to_thread(memory.checksum, spans)
            self._handle(
                handoff_events.PagesVerified(command.generation, total == command.checksum)
            )

        self._spawn(verify())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ orders

    def _on_order(self, order: handoff_events.Order, to: Address | None) -> None:
        if isinstance(order, handoff_events.StartHandoff | handoff_events.Redirect):
            assert to is not None, "a Start or a Redirect needs the decode worker's address"
            self._starting[order.handoff] = True
            self._spawn(self._start_handoff(order, to))
            return
        if isinstance(order, handoff_events.WithdrawRequest) and order.handoff in self._starting:
            self._starting[order.handoff] = False
        self._handle(order)

    async def _start_handoff(
        self, order: handoff_events.StartHandoff | handoff_events.Redirect, to: Address
    ) -> None:
        link = await self._connect(to)
        if not self._starting.pop(order.handoff) and isinstance(order, handoff_events.StartHandoff):
            self.hooks.report(
                handoff_events.HandoffEnded(
                    order.handoff,
                    DisaggRole.PREFILL,
                    handoff_events.HandoffOutcome.ABORTED,
                    "withdrawn",
                )
            )
            return
        self._handle(msgspec.structs.replace(order, link=link))

    async def _connect(self, to: Address) -> int:
        """The number of a living link to the worker at `to`; 0 if there can be none."""
        dial = self._dials.get(to)
        if dial is not None and dial.done() and dial.result() not in self._connections:
            dial = None
        if dial is None:
            dial = self._dials[to] = self._loop.create_task(self._dial(to))
        return await asyncio.shield(dial)

    # ------------------------------------------------------------ links

    async def _dial(self, to: Address) -> int:
        """Make a link to `to`, trying one mover after another."""
        kinds = self.identity.endpoint.transports
        while kinds:
            try:
                return await asyncio.wait_for(
                    self._dial_with(to, kinds), peer_connection.HANDSHAKE_S
                )
            except TransportError as error:
                failed = str(error).partition(":")[0]
                log.warning("%s: no link to %s:%d: %s", self.identity.worker, *to, error)
                kinds = tuple(kind for kind in kinds if kind != failed)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                log.warning(
                    "%s: no link to %s:%d: %s",
                    self.identity.worker,
                    *to,
                    str(error) or type(error).__name__,
                )
                return 0
        return 0

    async def _dial_with(self, to: Address, kinds: tuple[str, ...]) -> int:
        """Raises TransportError, its message beginning with the mover's kind, if the movers do not meet."""
        line = FramedConnection(*await asyncio.open_connection(*to))
        done = False
        try:
            proof = await peer_connection.dial_handshake(line, self.identity.token)
            link = peer_connection.new_incarnation()
            line.send(self._introduction(link, kinds, proof=proof))
            peer = await line.receive(Introduction)
            if peer.transport not in kinds:
                raise ControlError(
                    f"{peer.worker} chose the mover {peer.transport!r}, which was not offered"
                )
            mover = self.identity.transports[peer.transport]
            try:
                mover.connect(link, peer.link, peer.transport_metadata[peer.transport], True)
            except TransportError as error:
                line.send(Refusal(str(error)))
                raise TransportError(f"{peer.transport}: {error}") from None
            line.send(LinkReady())
            self._add_link(line, mover, link, peer, DisaggRole.PREFILL)
            done = True
            return link
        finally:
            if not done:
                line.close()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody dials."""
        line = FramedConnection(reader, writer)
        try:
            await asyncio.wait_for(self._accept(line), peer_connection.HANDSHAKE_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.warning(
                "%s: a caller was refused: %s",
                self.identity.worker,
                str(error) or type(error).__name__,
            )
            line.close()

    async def _accept(self, line: FramedConnection) -> None:
        try:
            peer = await peer_connection.accept_handshake(line, self.identity.token, Introduction)
            problem = find_mismatch(self.identity.digest, peer.digest)
            if problem:
                raise ControlError(problem)
            kind, why = choose_transport(
                self.identity.endpoint,
                TransportEndpoint(*peer.endpoint),
                self.identity.allow_staged,
            )
        except (ControlError, NoTransport) as error:
            line.send(Refusal(str(error)))
            raise ControlError(str(error)) from None
        link, mover = peer_connection.new_incarnation(), self.identity.transports[kind]
        try:
            mover.connect(link, peer.link, peer.transport_metadata[kind], False)
        except TransportError as error:
            line.send(Refusal(f"{kind}: {error}"))
            raise ControlError(str(error)) from None
        line.send(self._introduction(link, self.identity.endpoint.transports, kind=kind))
        try:
            await line.receive(LinkReady)
        except (
            OSError,
            asyncio.IncompleteReadError,
            asyncio.CancelledError,
        ):  # cancelled: out of time
            mover.disconnect(link)
            raise
        log.info(
            "%s: %s prefills for this worker over %s (%s)",
            self.identity.worker,
            peer.worker,
            kind,
            why,
        )
        self._add_link(line, mover, link, peer, DisaggRole.DECODE)

    def _introduction(
        self, link: int, kinds: tuple[str, ...], kind: str = "", proof: bytes = b""
    ) -> Introduction:
        me = self.identity
        blobs = {name: me.transport_metadata[name] for name in kinds}
        reach = me.endpoint._replace(transports=kinds)
        return Introduction(
            worker=me.worker,
            link=link,
            digest=me.digest,
            endpoint=reach,
            transport_metadata=blobs,
            transport=kind,
            proof=proof,
        )

    def _add_link(
        self,
        line: FramedConnection,
        mover: Transport,
        link: int,
        peer: Introduction,
        part: DisaggRole,
    ) -> None:
        self._connections[link] = PeerConnection(line, mover, peer.worker)
        self._handle(handoff_events.LinkUp(link, peer.link, peer.worker, part))
        self._spawn(self._read_messages(line, link, peer.link))

    async def _read_messages(self, line: FramedConnection, link: int, remote: int) -> None:
        """Messages of a link, until it ends."""
        try:
            while True:
                message = wire.decode(await line.read_frame())
                if (message.source, message.destination) != (remote, link):
                    raise ControlError("a message of another link")
                self._handle(message)
        except (OSError, asyncio.IncompleteReadError, wire.WireError) as error:
            if not isinstance(error, asyncio.IncompleteReadError):
                log.warning("%s: a link ends: %s", self.identity.worker, error)
        self._handle(handoff_events.LinkDown(link))


def describe_failure(context: dict[str, Any]) -> str:
    """An event loop's words about an exception that nobody caught, with where it came from."""
    error = context.get("exception")
    return context["message"] if error is None else "".join(traceback.format_exception(error))
