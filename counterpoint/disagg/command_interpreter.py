"""Carries out the commands of a worker's handoffs, on a real worker and in the simulator alike.

Owns: which transport serves which link. Promises: commands run in the order in which they were
given; a command for a link that is gone does nothing. Must not: read a clock, wait, or decide.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.handoff_events import (
    CancelWrite,
    EngineEvent,
    Event,
    FenceLink,
    GrantPages,
    HandoffEnded,
    Reroute,
    RevokePages,
    SendMessage,
    ToEngine,
    VerifyPages,
    WriteKv,
)
from counterpoint.disagg.messages import Message
from counterpoint.kv_transfer.memory import PagedMemory
from counterpoint.kv_transfer.transport import Transport


class WorkerPort(Protocol):
    """What a worker does for its handoffs. No method waits."""

    def to_engine(self, event: EngineEvent) -> None: ...

    def report(self, command: HandoffEnded | Reroute) -> None:
        """Tell the frontend."""
        ...

    def send_message(self, link: int, message: Message) -> None:
        """To the peer at the other end of `link`."""
        ...

    def close_link(self, link: int) -> None:
        """End the message connection of `link`; its transport is disconnected next."""
        ...

    def verify_pages(self, command: VerifyPages) -> None:
        """Checksum the pages; PagesVerified follows as an event."""
        ...

    def before_write(self, command: WriteKv, num_bytes: int) -> None:
        """`command` is posted next."""
        ...


class CommandInterpreter:
    """`transports` are all of the worker's; each link uses one of them."""

    def __init__(
        self,
        handoffs: Handoffs,
        memory: PagedMemory,
        transports: Collection[Transport],
        port: WorkerPort,
    ) -> None:
        self.handoffs = handoffs
        self.memory = memory
        self.transports = transports
        self.port = port
        self.links: dict[int, Transport] = {}

    def on_event(self, now: float, event: Event) -> None:
        self.handoffs.on_event(now, event)
        self.run_commands()

    def tick(self, now: float) -> None:
        self.handoffs.tick(now)
        self.run_commands()

    def run_commands(self) -> None:
        for command in self.handoffs.take_commands():
            if isinstance(command, ToEngine):
                self.port.to_engine(command.event)
            elif isinstance(command, HandoffEnded | Reroute):
                self.port.report(command)
            elif isinstance(command, CancelWrite):
                for transport in self.transports:
                    transport.cancel(command.op)
            elif isinstance(command, VerifyPages):
                self.port.verify_pages(command)
            elif (transport := self.links.get(command.link)) is not None:
                self._run_link_command(command, transport)

    def _run_link_command(
        self,
        command: SendMessage | WriteKv | GrantPages | RevokePages | FenceLink,
        transport: Transport,
    ) -> None:
        if isinstance(command, SendMessage):
            self.port.send_message(command.link, command.message)
        elif isinstance(command, WriteKv):
            layers = command.first_layer, command.last_layer
            spans = self.memory.spans(*layers, command.sources, command.destinations)
            self.port.before_write(command, int(spans[:, 3].sum()))
            transport.write(command.link, command.generation, spans, command.op)
        elif isinstance(command, GrantPages):
            transport.grant(command.link, command.generation, command.pages)
        elif isinstance(command, RevokePages):
            transport.revoke(command.generation)
        else:
            self.port.close_link(command.link)
            transport.disconnect(command.link)
            del self.links[command.link]
