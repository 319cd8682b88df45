"""Handoffs: all handoffs of one worker, in both roles. Pure: events with their time in, commands out.

Owns: the links, the sources and senders (prefill side, sender.py), the receivers (decode side, receiver.py), the page ledger.
Promises: the same events at the same times give the same commands; messages may be lost, repeated, late and out of order, and
links and workers may die or stand still at any moment: every handoff still ends, and its pages come back as soon as that is safe.
Must not: read a clock, send, copy, wait.

Reconciliation, in one sentence: whoever waits repeats itself (`resend_s`); the decode side names its living handoffs in heartbeats,
and the prefill side answers Drained for one that it does not know; a link that is silent for `dead_s` is dead for ever.
"""

from __future__ import annotations

import msgspec

import counterpoint.disagg.messages as wire
from counterpoint.disagg import handoff_events
from counterpoint.disagg.handoff_context import HandoffContext, LinkEnd
from counterpoint.disagg.handoff_events import (
    Command,
    Event,
    FenceLink,
    HandoffConfig,
    HandoffEnded,
    HandoffOutcome,
    KvGeometry,
    SendMessage,
    ToEngine,
    engine_id,
)
from counterpoint.disagg.messages import HandoffId
from counterpoint.disagg.page_ledger import PageHold, PageLedger
from counterpoint.disagg.receiver import HandoffReceiver
from counterpoint.disagg.sender import HandoffSender, PrefillSource
from counterpoint.types import Abort as EngineAbort
from counterpoint.types import Admitted, Computed, DisaggRole, OutputDelta


class Handoffs:
    """`strays`: messages that no living link end or handoff expects; they are dropped."""

    def __init__(self, rules: HandoffConfig, geometry: KvGeometry) -> None:
        self.context = HandoffContext(rules, geometry)
        self.links: dict[int, LinkEnd] = {}
        self.sources: dict[HandoffId, PrefillSource] = {}
        self.senders: dict[HandoffId, HandoffSender] = {}
        self.receivers: dict[HandoffId, HandoffReceiver] = {}
        self.draining = False
        self.unexpected = 0
        self._parts: dict[str, PrefillSource | HandoffReceiver] = {}  # by the engine's name
        self._handlers = {
            handoff_events.LinkUp: self._linked,
            handoff_events.LinkDown: self._unlinked,
            handoff_events.LinkFenced: self._fenced,
            handoff_events.WriteDone: self._wrote,
            handoff_events.PagesRevoked: self._revoked,
            handoff_events.PagesVerified: self._verified,
            handoff_events.StartHandoff: self._start,
            handoff_events.RunWithoutHandoff: self._plain,
            handoff_events.Redirect: self._redirect,
            handoff_events.StayInPlace: self._stay,
            handoff_events.SettleSource: self._settle,
            handoff_events.WithdrawRequest: self._withdraw,
            handoff_events.Drain: self._drain,
            Admitted: self._admitted,
            Computed: self._computed,
            OutputDelta: self._delta,
            wire.LinkHeartbeat: self._heartbeat,
        }

    # ------------------------------------------------------------ in and out

    def on_event(self, now: float, event: Event) -> None:
        """Take one event. Unknown ids and late messages do no harm."""
        if isinstance(event, wire.HandoffMessage):
            self._letter(now, event)
        else:
            self._handlers[type(event)](now, event)
        self._bury(now)

    def tick(self, now: float) -> None:
        """Let time pass: to be called a few times per `resend_s`."""
        for source in tuple(self.sources.values()):
            source.tick(now)
        for sender in tuple(self.senders.values()):
            sender.tick(now)
        for receiver in tuple(self.receivers.values()):
            receiver.tick(now)
        for link in tuple(self.links.values()):
            if not link.dead:
                self._beat(now, link)
        self._bury(now)

    def take_commands(self) -> list[Command]:
        commands, self.context.commands = self.context.commands, []
        return commands

    @property
    def ledger(self) -> PageLedger:
        return self.context.ledger

    @property
    def idle(self) -> bool:
        return not (self.sources or self.senders or self.receivers)

    # ------------------------------------------------------------ links

    def _linked(self, now: float, event: handoff_events.LinkUp) -> None:
        self.links[event.link] = LinkEnd(event.link, event.peer, event.worker, event.part, now, now)

    def _unlinked(self, now: float, event: handoff_events.LinkDown) -> None:
        link = self.links.get(event.link)
        if link is not None:
            self._lose(now, link, "is gone")

    def _beat(self, now: float, link: LinkEnd) -> None:
        rules = self.context.rules
        if now >= link.heard_s + rules.dead_s:
            self._lose(now, link, f"was silent for {rules.dead_s} s")
        elif now >= link.beat_s + rules.heartbeat_s:
            link.beat_s = now
            leases = [r.id for r in self.receivers.values() if r.link is link and r.alive]
            for start in range(0, len(leases) or 1, wire.MAX_LEASES):
                names = tuple(leases[start : start + wire.MAX_LEASES])
                self.context.do(
                    SendMessage(link.local, wire.LinkHeartbeat(link.local, link.remote, names))
                )

    def _heartbeat(self, now: float, message: wire.LinkHeartbeat) -> None:
        link = self._link(now, message)
        if link is None or link.part is not DisaggRole.PREFILL:
            return
        for handoff in message.leases:
            sender = self.senders.get(handoff)
            if sender is not None and sender.link is link:
                sender.leased(now)
            else:
                self._answer(link, wire.HandoffDrained, handoff, 0, "unknown here")

    def _lose(self, now: float, link: LinkEnd, how: str) -> None:
        """The link is dead for ever; what hangs on it is given up, and pages wait for the fence."""
        if link.dead:
            return
        link.dead = True
        self.context.do(FenceLink(link.local))
        reason = f"{link.worker} {how}"
        for sender in tuple(self.senders.values()):
            if sender.link is link:
                sender.fail(now, reason)
        for receiver in tuple(self.receivers.values()):
            if receiver.link is link and receiver.alive:
                receiver.stop(now, HandoffOutcome.FAILED, reason)
            elif receiver.link is link and not receiver.generation:
                receiver.fenced()

    def _fenced(self, now: float, event: handoff_events.LinkFenced) -> None:
        link = self.links.pop(event.link, None)
        if link is None:
            return
        self._lose(now, link, "is gone")
        for sender in tuple(self.senders.values()):
            if sender.link is link:
                sender.fenced(now)
        for receiver in tuple(self.receivers.values()):
            if receiver.link is link:
                receiver.fenced()

    def _bury(self, now: float) -> None:
        """Give up the links whose writes did not end in time."""
        while self.context.condemned:
            self._lose(
                now,
                self.context.condemned.pop(),
                f"left writes in flight for {self.context.rules.drain_s} s",
            )

    def _link(
        self, now: float, message: wire.HandoffMessage | wire.LinkHeartbeat
    ) -> LinkEnd | None:
        """The living link end that a message is for."""
        link = self.links.get(message.destination)
        if link is None or link.remote != message.source or link.dead:
            self.unexpected += 1
            return None
        link.heard_s = now
        return link

    # ------------------------------------------------------------ the outside

    def _start(self, now: float, event: handoff_events.StartHandoff) -> None:
        if event.handoff in self.sources:
            return
        link = self.links.get(event.link)
        if link is None or link.dead:
            self.context.do(
                HandoffEnded(
                    event.handoff,
                    DisaggRole.PREFILL,
                    HandoffOutcome.FAILED,
                    "there is no link to the decode worker",
                )
            )
            return
        source = PrefillSource(
            self.context,
            event.handoff,
            event.request,
            now + event.deadline_s,
            now,
            self._forget_source,
            event.granularity,
        )
        self.sources[source.id] = source
        self._parts[source.name] = source
        source.begin()
        self._attempt(now, source, event.handoff, link)

    def _plain(self, now: float, event: handoff_events.RunWithoutHandoff) -> None:
        self.context.do(
            ToEngine(
                msgspec.structs.replace(
                    event.request, id=engine_id(event.handoff, DisaggRole.WHOLE)
                )
            )
        )

    def _redirect(self, now: float, event: handoff_events.Redirect) -> None:
        source = self.sources.get(event.source)
        if source is None or source.over is not None or source.sender is not None:
            return
        link = self.links.get(event.link)
        if link is None or link.dead:
            source.attempt_failed(event.handoff, "there is no link to the decode worker")
        else:
            self._attempt(now, source, event.handoff, link)

    def _attempt(
        self, now: float, source: PrefillSource, handoff: HandoffId, link: LinkEnd
    ) -> None:
        sender = HandoffSender(self.context, handoff, link, source, self._forget_sender)
        self.senders[handoff] = source.sender = sender
        sender.advance(now)
        source.keep()

    def _stay(self, now: float, event: handoff_events.StayInPlace) -> None:
        source = self.sources.get(event.source)
        if source is not None:
            source.stay()

    def _settle(self, now: float, event: handoff_events.SettleSource) -> None:
        source = self.sources.get(event.source)
        if source is not None and source.sender is None:
            source.end(now, HandoffOutcome.ABORTED, event.reason)

    def _withdraw(self, now: float, event: handoff_events.WithdrawRequest) -> None:
        """End it if it is here; if the engine has it already (adopted, or it stayed), that is told."""
        source, receiver = self.sources.get(event.handoff), self.receivers.get(event.handoff)
        if source is not None:
            source.end(now, HandoffOutcome.ABORTED, "withdrawn")
        if receiver is not None:
            receiver.stop(now, HandoffOutcome.ABORTED, "withdrawn")
        if source is None and receiver is None:
            for part in DisaggRole:
                self.context.do(ToEngine(EngineAbort(engine_id(event.handoff, part))))

    def _drain(self, now: float, event: handoff_events.Drain) -> None:
        self.draining = event.on

    # ------------------------------------------------------------ the engine and the mover

    def _admitted(self, now: float, event: Admitted) -> None:
        part = self._parts.get(event.id)
        if part is not None:
            part.admitted(now, event)

    def _computed(self, now: float, event: Computed) -> None:
        part = self._parts.get(event.id)
        if isinstance(part, PrefillSource):
            part.computed(now, event)

    def _delta(self, now: float, event: OutputDelta) -> None:
        part = self._parts.get(event.id)
        if part is not None:
            part.delta(now, event)

    def _wrote(self, now: float, event: handoff_events.WriteDone) -> None:
        handoff = self.context.writes.pop(event.op, None)
        if handoff is not None and event.op in self.senders[handoff].ops:
            self.senders[handoff].wrote(now, event.op, event.error, event.checksum)

    def _revoked(self, now: float, event: handoff_events.PagesRevoked) -> None:
        handoff = self.context.grants.get(event.generation)
        if handoff is not None:
            self.receivers[handoff].revoked()

    def _verified(self, now: float, event: handoff_events.PagesVerified) -> None:
        handoff = self.context.grants.get(event.generation)
        if handoff is not None:
            self.receivers[handoff].verified(now, event.ok)

    # ------------------------------------------------------------ letters

    def _letter(self, now: float, letter: wire.HandoffMessage) -> None:
        link = self._link(now, letter)
        if link is not None and link.part is DisaggRole.PREFILL:
            self._to_sender(now, link, letter)
        elif link is not None:
            self._to_receiver(now, link, letter)

    def _to_sender(self, now: float, link: LinkEnd, letter: wire.HandoffMessage) -> None:
        sender = self.senders.get(letter.handoff)
        if sender is None or sender.link is not link:
            self.unexpected += 1
            if isinstance(letter, wire.PagesReserved | wire.AbortHandoff):
                self._answer(
                    link, wire.HandoffDrained, letter.handoff, letter.generation, "unknown here"
                )
        elif isinstance(letter, wire.OfferQueued):
            sender.leased(now)
        elif isinstance(letter, wire.PagesReserved):
            sender.reserved(now, letter)
        elif isinstance(letter, wire.TransferAck):
            sender.acked(now)
        elif isinstance(letter, wire.AbortHandoff | wire.HandoffDrained):
            sender.fail(now, letter.reason)

    def _to_receiver(self, now: float, link: LinkEnd, letter: wire.HandoffMessage) -> None:
        receiver = self.receivers.get(letter.handoff)
        if receiver is None or receiver.link is not link:
            self._to_nobody(now, link, letter)
        elif isinstance(letter, wire.HandoffOffer):
            receiver.offered()
        elif isinstance(letter, wire.TransferStarted):
            receiver.streaming(letter)
        elif isinstance(letter, wire.TransferDone):
            receiver.done(now, letter)
        elif isinstance(letter, wire.AbortHandoff):
            receiver.stop(now, HandoffOutcome.ABORTED, letter.reason)
        elif isinstance(letter, wire.HandoffDrained):
            receiver.drained(now, letter.reason)

    def _to_nobody(self, now: float, link: LinkEnd, letter: wire.HandoffMessage) -> None:
        """A new offer, or a late word about a handoff that has ended here."""
        adopted = link.ended.get(letter.handoff)
        if (
            isinstance(letter, wire.HandoffOffer)
            and adopted is None
            and letter.handoff not in self.receivers
        ):
            refusal = self._refusal()
            if refusal:
                link.remember(letter.handoff, False, self.context.rules.remembered)
                self._answer(link, wire.HandoffDrained, letter.handoff, 0, refusal)
                return
            receiver = HandoffReceiver(
                self.context,
                letter.handoff,
                link,
                letter.arrive,
                now + letter.deadline_s,
                self._forget_receiver,
                repeat_s=now,
            )
            self.receivers[receiver.id] = self._parts[receiver.name] = receiver
            receiver.begin()
            return
        self.unexpected += 1
        if isinstance(letter, wire.HandoffOffer | wire.TransferDone):
            self._answer(
                link,
                wire.TransferAck if adopted else wire.HandoffDrained,
                letter.handoff,
                letter.generation,
                "unknown here",
            )

    def _refusal(self) -> str:
        if self.draining:
            return "the decode worker takes no new requests"
        if self.ledger.pages(PageHold.QUARANTINE) > self.context.rules.max_quarantine_pages:
            return "the decode worker has too many pages in quarantine"
        return ""

    def _answer(
        self,
        link: LinkEnd,
        kind: type[wire.TransferAck | wire.HandoffDrained],
        handoff: HandoffId,
        generation: int,
        reason: str,
    ) -> None:
        ends = (handoff, link.local, link.remote, generation)
        self.context.do(
            SendMessage(
                link.local,
                wire.TransferAck(*ends)
                if kind is wire.TransferAck
                else wire.HandoffDrained(*ends, reason),
            )
        )

    # ------------------------------------------------------------ forgetting

    def _forget_source(self, source: PrefillSource) -> None:
        del self.sources[source.id]
        del self._parts[source.name]

    def _forget_sender(self, sender: HandoffSender) -> None:
        del self.senders[sender.id]

    def _forget_receiver(self, receiver: HandoffReceiver, adopted: bool) -> None:
        del self.receivers[receiver.id]
        del self._parts[receiver.name]
        receiver.link.remember(receiver.id, adopted, self.context.rules.remembered)
