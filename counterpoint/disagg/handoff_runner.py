"""Runs a worker's handoffs on a thread of their own: message connections, transports, the clock.

Owns: the event loop and every connection to a peer. Promises: the engine's thread and this one
never wait for each other; a completed transfer wakes this thread at once; a link whose connection
ends is dead at both ends. Must not: decide (disagg/handoff.py does).

    engine thread  --on_engine_outputs-->  HandoffRunner  --hooks.to_engine-->  engine's event queue
    frontend       --on_order----------->  HandoffRunner  --hooks.report----->  frontend
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
from counterpoint.disagg.command_interpreter import CommandInterpreter
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.messages import HandoffId
from counterpoint.disagg.peer_connection import (
    Address,
    ControlError,
    FramedConnection,
    Introduction,
    LinkReady,
    NoTransport,
    Refusal,
    TransportEndpoint,
    WorkerIdentity,
    choose_transport,
    find_mismatch,
)
from counterpoint.kv_transfer.transport import Completed, Notice, Transport, TransportError
from counterpoint.types import Admitted, Computed, DisaggRole, OutputDelta

TICK_S = 0.05
MAX_UNSENT_BYTES = 64 << 20  # a peer with more unsent messages counts as lost
LOOPBACK = Address("127.0.0.1", 0)

log = logging.getLogger(__name__)


class WorkerHooks(Protocol):
    """Both are called on the runner's thread and must return at once."""

    def to_engine(self, event: handoff_events.EngineEvent) -> None: ...

    def report(self, command: handoff_events.HandoffEnded | handoff_events.Reroute) -> None: ...


class SentKv(NamedTuple):
    """A write to another worker, on the monotonic clock. `ended_s`: it is over, in place or not."""

    worker: str
    kind: str
    started_s: float
    ended_s: float
    bytes: int
    layers: tuple[int, int]
    error: str


@dataclass(slots=True, eq=False)
class PeerLink:
    """A link's message connection and transport. `number` is this end's, `remote` the peer's."""

    number: int
    remote: int
    peer: str
    connection: FramedConnection
    transport: Transport


class HandoffRunner:
    """`listen`: where peers dial (port 0: a free one; see `address`).

    `on_fault` is called on this thread with an error that nobody handled. Handoffs would hang then,
    so the worker should end. Without it the error is logged.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        handoffs: Handoffs,
        hooks: WorkerHooks,
        listen: Address = LOOPBACK,
        on_fault: Callable[[str], None] | None = None,
    ) -> None:
        peer_connection.check_exposure(listen.host, identity.token)
        self.identity = identity
        self.handoffs = handoffs
        self.hooks = hooks
        self.address = listen
        self.bytes_sent = 0  # of KV, posted so far
        self.on_kv_sent: Callable[[SentKv], None] | None = None  # called on this thread
        self._interpreter = CommandInterpreter(
            handoffs, identity.memory, identity.transports.values(), self
        )
        self._posted: dict[int, SentKv] = {}  # writes in flight, for on_kv_sent
        self._links: dict[int, PeerLink] = {}
        self._dials: dict[Address, asyncio.Task[int]] = {}
        self._starting: dict[HandoffId, bool] = {}  # dialling for it -> still wanted
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        if on_fault is not None:
            self._loop.set_exception_handler(lambda _, context: on_fault(describe_failure(context)))
        self._closing = asyncio.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="handoff-runner", daemon=True)

    # ------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Returns when peers may dial. Raises OSError if the address can't be bound."""
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            raise self._start_error

    def on_engine_outputs(self, *outputs: Admitted | Computed | OutputDelta) -> None:
        """To be called in the engine's order."""
        self._call_soon(lambda: self._take_outputs(outputs))

    def on_order(self, order: handoff_events.Order, decode_address: Address | None = None) -> None:
        """StartHandoff and Redirect need `decode_address`, which is dialled if there is no link."""
        self._call_soon(lambda: self._take_order(order, decode_address))

    def on_notices(self) -> None:
        """A transport has notices."""
        self._call_soon(self._take_notices)

    def inspect(self, look: Callable[[HandoffRunner], None]) -> None:
        """Call `look` on this thread, so that metrics do not read what is being changed."""
        self._call_soon(lambda: look(self))

    def close(self) -> None:
        """Close all connections. Whoever made the transports closes them."""
        if self._thread.is_alive():
            self._call_soon(self._closing.set)
            self._thread.join()

    def _call_soon(self, call: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def links_by_transport(self) -> dict[str, int]:
        """Links by kind of transport; to be called through `inspect`."""
        return dict(Counter(link.transport.kind for link in self._links.values()))

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
                self._interpreter.tick(time.monotonic())
                self._take_notices()
                try:
                    await asyncio.wait_for(self._closing.wait(), TICK_S)
                except TimeoutError:
                    continue
        for task in (*self._tasks, *self._dials.values()):
            task.cancel()
        for link in self._links.values():
            link.connection.close()
        await asyncio.gather(*self._tasks, *self._dials.values(), return_exceptions=True)

    def _on_event(self, event: handoff_events.Event) -> None:
        self._interpreter.on_event(time.monotonic(), event)

    def _take_outputs(self, outputs: Sequence[Admitted | Computed | OutputDelta]) -> None:
        for output in outputs:
            self.handoffs.on_event(time.monotonic(), output)
        self._interpreter.run_commands()

    def _take_notices(self) -> None:
        for transport in self.identity.transports.values():
            for notice in transport.poll():
                self._note_completed(notice)
                event = handoff_events.event_of_notice(notice)
                self.handoffs.on_event(time.monotonic(), event)
        self._interpreter.run_commands()

    def _note_completed(self, notice: Notice) -> None:
        posted = self._posted.pop(notice.op, None) if isinstance(notice, Completed) else None
        if posted is not None and self.on_kv_sent is not None:
            error = notice.error if isinstance(notice, Completed) else ""
            self.on_kv_sent(posted._replace(ended_s=time.monotonic(), error=error))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ commands (WorkerPort)

    def to_engine(self, event: handoff_events.EngineEvent) -> None:
        self.hooks.to_engine(event)

    def report(self, command: handoff_events.HandoffEnded | handoff_events.Reroute) -> None:
        self.hooks.report(command)

    def send_message(self, link: int, message: wire.Message) -> None:
        connection = self._links[link].connection
        connection.write_frame(wire.encode(message))
        if connection.unsent_bytes > MAX_UNSENT_BYTES:
            self._call_soon(lambda: self._on_event(handoff_events.LinkDown(link)))

    def close_link(self, link: int) -> None:
        self._links.pop(link).connection.close()

    def verify_pages(self, command: handoff_events.VerifyPages) -> None:
        memory = self.identity.memory

        async def verify() -> None:
            spans = memory.spans(0, memory.layers, command.pages, command.pages)
            total = await asyncio.to_thread(memory.checksum, spans)
            matches = total == command.checksum
            self._on_event(handoff_events.PagesVerified(command.generation, matches))

        self._spawn(verify())

    def before_write(self, command: handoff_events.WriteKv, num_bytes: int) -> None:
        self.bytes_sent += num_bytes
        if self.on_kv_sent is not None:
            link, layers = self._links[command.link], (command.first_layer, command.last_layer)
            self._posted[command.op] = SentKv(
                link.peer, link.transport.kind, time.monotonic(), 0.0, num_bytes, layers, ""
            )

    # ------------------------------------------------------------ orders

    def _take_order(self, order: handoff_events.Order, decode_address: Address | None) -> None:
        if isinstance(order, handoff_events.StartHandoff | handoff_events.Redirect):
            assert decode_address is not None, "the order needs the decode worker's address"
            self._starting[order.handoff] = True
            self._spawn(self._start_handoff(order, decode_address))
            return
        if isinstance(order, handoff_events.WithdrawRequest) and order.handoff in self._starting:
            self._starting[order.handoff] = False
        self._on_event(order)

    async def _start_handoff(
        self, order: handoff_events.StartHandoff | handoff_events.Redirect, decode: Address
    ) -> None:
        link = await self._connect(decode)
        if not self._starting.pop(order.handoff) and isinstance(order, handoff_events.StartHandoff):
            aborted = handoff_events.HandoffOutcome.ABORTED
            self.hooks.report(
                handoff_events.HandoffEnded(order.handoff, DisaggRole.PREFILL, aborted, "withdrawn")
            )
            return
        self._on_event(msgspec.structs.replace(order, link=link))

    async def _connect(self, address: Address) -> int:
        """The number of a live link to the worker at `address`; 0 if none can be made."""
        dial = self._dials.get(address)
        if dial is not None and dial.done() and dial.result() not in self._links:
            dial = None
        if dial is None:
            dial = self._dials[address] = self._loop.create_task(self._dial(address))
        return await asyncio.shield(dial)

    # ------------------------------------------------------------ links

    async def _dial(self, address: Address) -> int:
        """Make a link, trying one transport after another; 0 if none works."""
        kinds, worker = self.identity.endpoint.transports, self.identity.worker
        while kinds:
            try:
                return await asyncio.wait_for(
                    self._dial_with(address, kinds), peer_connection.HANDSHAKE_S
                )
            except TransportError as error:
                failed = str(error).partition(":")[0]
                log.warning("%s: no link to %s:%d: %s", worker, *address, error)
                kinds = tuple(kind for kind in kinds if kind != failed)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                reason = str(error) or type(error).__name__
                log.warning("%s: no link to %s:%d: %s", worker, *address, reason)
                return 0
        return 0

    async def _dial_with(self, address: Address, kinds: tuple[str, ...]) -> int:
        """Raises TransportError if the transports do not meet; the message begins with the kind."""
        connection = FramedConnection(*await asyncio.open_connection(*address))
        added = False
        try:
            proof = await peer_connection.dial_handshake(connection, self.identity.token)
            number = peer_connection.new_incarnation()
            connection.send(self.identity.introduce(number, kinds, proof=proof))
            peer = await connection.receive(Introduction)
            kind = peer.transport
            if kind not in kinds:
                raise ControlError(f"{peer.worker} chose transport {kind!r}, which was not offered")
            transport = self.identity.transports[kind]
            try:
                transport.connect(number, peer.link, peer.transport_metadata[kind], True)
            except TransportError as error:
                connection.send(Refusal(str(error)))
                raise TransportError(f"{kind}: {error}") from None
            connection.send(LinkReady())
            link = PeerLink(number, peer.link, peer.worker, connection, transport)
            self._add_link(link, DisaggRole.PREFILL)
            added = True
            return number
        finally:
            if not added:
                connection.close()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection = FramedConnection(reader, writer)
        try:
            await asyncio.wait_for(self._accept(connection), peer_connection.HANDSHAKE_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            reason = str(error) or type(error).__name__
            log.warning("%s: refused a connection: %s", self.identity.worker, reason)
            connection.close()

    async def _accept(self, connection: FramedConnection) -> None:
        me = self.identity
        try:
            peer = await peer_connection.accept_handshake(connection, me.token, Introduction)
            problem = find_mismatch(me.digest, peer.digest)
            if problem:
                raise ControlError(problem)
            endpoint = TransportEndpoint(*peer.endpoint)
            kind, reason = choose_transport(me.endpoint, endpoint, me.allow_staged)
        except (ControlError, NoTransport) as error:
            connection.send(Refusal(str(error)))
            raise ControlError(str(error)) from None
        number, transport = peer_connection.new_incarnation(), me.transports[kind]
        try:
            transport.connect(number, peer.link, peer.transport_metadata[kind], False)
        except TransportError as error:
            connection.send(Refusal(f"{kind}: {error}"))
            raise ControlError(str(error)) from None
        connection.send(me.introduce(number, me.endpoint.transports, kind))
        try:
            await connection.receive(LinkReady)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            transport.disconnect(number)  # cancelled: the handshake's time is over
            raise
        log.info(
            "%s: %s prefills for this worker over %s (%s)", me.worker, peer.worker, kind, reason
        )
        link = PeerLink(number, peer.link, peer.worker, connection, transport)
        self._add_link(link, DisaggRole.DECODE)

    def _add_link(self, link: PeerLink, role: DisaggRole) -> None:
        """`role`: this worker's on the link."""
        self._links[link.number] = link
        self._interpreter.links[link.number] = link.transport
        self._on_event(handoff_events.LinkUp(link.number, link.remote, link.peer, role))
        self._spawn(self._read_messages(link))

    async def _read_messages(self, link: PeerLink) -> None:
        """Until the connection ends."""
        try:
            while True:
                message = wire.decode(await link.connection.read_frame())
                if (message.source, message.destination) != (link.remote, link.number):
                    raise ControlError("a message of another link")
                self._on_event(message)
        except (OSError, asyncio.IncompleteReadError, wire.WireError) as error:
            if not isinstance(error, asyncio.IncompleteReadError):
                log.warning("%s: a link ends: %s", self.identity.worker, error)
        self._on_event(handoff_events.LinkDown(link.number))


def describe_failure(context: dict[str, Any]) -> str:
    """The event loop's message about an unhandled exception, with its traceback."""
    error = context.get("exception")
    return context["message"] if error is None else "".join(traceback.format_exception(error))
