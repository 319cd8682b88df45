"""A prefill and a decode worker, stepped by hand. Tests play engines, transports and network."""

from __future__ import annotations

from counterpoint.disagg import handoff_events
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.handoff_events import (
    Command,
    HandoffConfig,
    KvGeometry,
    TransferGranularity,
    engine_id,
)
from counterpoint.disagg.messages import HandoffId
from counterpoint.types import AddRequest, Admitted, Computed, DisaggRole, OutputDelta, Sampling

ID = HandoffId("r", 1)
P_NAME, D_NAME = engine_id(ID, DisaggRole.PREFILL), engine_id(ID, DisaggRole.DECODE)
LAYERS = 4


def make_request(tokens: int = 10, max_tokens: int = 5) -> AddRequest:
    return AddRequest(id="r", prompt=tuple(range(tokens)), sampling=Sampling(max_tokens=max_tokens))


class Side:
    def __init__(self, handoffs: Handoffs) -> None:
        self.handoffs = handoffs
        self.log: list[Command] = []
        self.outbox: list = []  # said, and not yet carried

    def all(self, kind: type) -> list:
        return [command for command in self.log if isinstance(command, kind)]

    def last(self, kind: type):
        return self.all(kind)[-1]

    def events_for_engine(self, kind: type) -> list:
        """Events of `kind` for the engine."""
        return [
            command.event
            for command in self.all(handoff_events.ToEngine)
            if isinstance(command.event, kind)
        ]


class Pair:
    """Pages of 4 tokens. The link is number 1 at the prefill worker's end and 2 at the other."""

    def __init__(
        self, granularity: TransferGranularity = TransferGranularity.LAYER, **rules
    ) -> None:
        self.now = 100.0
        self.granularity = granularity
        self.p = Side(Handoffs(HandoffConfig(**rules), KvGeometry(LAYERS, 4)))
        self.d = Side(Handoffs(HandoffConfig(**rules), KvGeometry(LAYERS, 4)))
        self.link(1, 2)

    def link(self, here: int, there: int) -> None:
        self.send(self.p, handoff_events.LinkUp(here, there, "decode worker", DisaggRole.PREFILL))
        self.send(self.d, handoff_events.LinkUp(there, here, "prefill worker", DisaggRole.DECODE))

    def send(self, side: Side, event) -> None:
        side.handoffs.on_event(self.now, event)
        self._collect(side)

    def _collect(self, side: Side) -> None:
        for command in side.handoffs.take_commands():
            side.log.append(command)
            if isinstance(command, handoff_events.SendMessage):
                side.outbox.append(command.message)

    def deliver_all(self) -> None:
        """Every message arrives, and the answers to it."""
        while self.p.outbox or self.d.outbox:
            for side, other in ((self.p, self.d), (self.d, self.p)):
                letters, side.outbox = side.outbox, []
                for letter in letters:
                    self.send(other, letter)

    def drop_messages(self) -> list:
        """Every message on its way is lost; what they were."""
        lost = [*self.p.outbox, *self.d.outbox]
        self.p.outbox, self.d.outbox = [], []
        return lost

    def wait(self, seconds: float, carry: bool = True) -> None:
        """Time passes in steps of 0.1 s."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for side in (self.p, self.d):
                side.handoffs.tick(self.now)
                self._collect(side)
            if carry:
                self.deliver_all()

    # ------------------------------------------------------------ a handoff's usual steps

    def start(
        self, tokens: int = 10, deadline_s: float = 60.0, pages=(5, 6, 7), cached: int = 0
    ) -> None:
        """It starts and has its pages on the prefill worker; the offer is on its way."""
        self.send(
            self.p,
            handoff_events.StartHandoff(ID, make_request(tokens), 1, deadline_s, self.granularity),
        )
        self.send(self.p, Admitted(P_NAME, tuple(pages), cached))

    def reserve(self, pages=(1, 2, 3), cached: int = 0) -> None:
        """The decode worker has pages, and the prefill worker knows."""
        self.deliver_all()
        self.send(self.d, Admitted(D_NAME, tuple(pages), cached))
        self.deliver_all()

    def prefill(self, tokens: int = 10, token: int = 77, finish=None) -> None:
        """The whole prompt and the first token."""
        self.send(self.p, Computed(P_NAME, tokens, tokens, 0))
        self.send(self.p, OutputDelta(P_NAME, (token,), finish_reason=finish))

    def complete_writes(self, error: str = "") -> None:
        """All writes posted so far end."""
        for write in self.p.all(handoff_events.WriteKv):
            self.send(self.p, handoff_events.WriteDone(write.op, error))

    def is_empty(self) -> bool:
        """Nothing is left on either side."""
        return all(
            side.handoffs.idle and side.handoffs.ledger.is_empty for side in (self.p, self.d)
        )
