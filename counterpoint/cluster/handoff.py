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

import counterpoint.cluster.messages as wire
from counterpoint.cluster import nouns
from counterpoint.cluster.desk import Desk, LinkEnd
from counterpoint.cluster.ledger import Hold, Ledger
from counterpoint.cluster.messages import HandoffId
from counterpoint.cluster.nouns import Command, Ended, Event, Fence, Geometry, Outcome, Rules, Send, Tell, engine_id
from counterpoint.cluster.receiver import Receiver
from counterpoint.cluster.sender import Sender, Source
from counterpoint.types import Abort as EngineAbort
from counterpoint.types import Admitted, Computed, Delta, Part


class Handoffs:
    """`strays`: messages that no living link end or handoff expects; they are dropped."""

    def __init__(self, rules: Rules, geometry: Geometry) -> None:
        self.desk = Desk(rules, geometry)
        self.links: dict[int, LinkEnd] = {}
        self.sources: dict[HandoffId, Source] = {}
        self.senders: dict[HandoffId, Sender] = {}
        self.receivers: dict[HandoffId, Receiver] = {}
        self.draining = False
        self.strays = 0
        self._parts: dict[str, Source | Receiver] = {}  # by the engine's name
        self._handlers = {
            nouns.Linked: self._linked,
            nouns.Unlinked: self._unlinked,
            nouns.Fenced: self._fenced,
            nouns.Wrote: self._wrote,
            nouns.Revoked: self._revoked,
            nouns.Verified: self._verified,
            nouns.Start: self._start,
            nouns.Plain: self._plain,
            nouns.Redirect: self._redirect,
            nouns.Stay: self._stay,
            nouns.Settle: self._settle,
            nouns.Withdraw: self._withdraw,
            nouns.Drain: self._drain,
            Admitted: self._admitted,
            Computed: self._computed,
            Delta: self._delta,
            wire.Heartbeat: self._heartbeat,
        }

    # ------------------------------------------------------------ in and out

    def handle(self, now: float, event: Event) -> None:
        """Take one event. Unknown ids and late messages do no harm."""
        if isinstance(event, wire.Letter):
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
        commands, self.desk.commands = self.desk.commands, []
        return commands

    @property
    def ledger(self) -> Ledger:
        return self.desk.ledger

    @property
    def idle(self) -> bool:
        return not (self.sources or self.senders or self.receivers)

    # ------------------------------------------------------------ links

    def _linked(self, now: float, event: nouns.Linked) -> None:
        self.links[event.link] = LinkEnd(event.link, event.peer, event.worker, event.part, now, now)

    def _unlinked(self, now: float, event: nouns.Unlinked) -> None:
        link = self.links.get(event.link)
        if link is not None:
            self._lose(now, link, "is gone")

    def _beat(self, now: float, link: LinkEnd) -> None:
        rules = self.desk.rules
        if now >= link.heard_s + rules.dead_s:
            self._lose(now, link, f"was silent for {rules.dead_s} s")
        elif now >= link.beat_s + rules.heartbeat_s:
            link.beat_s = now
            leases = [r.id for r in self.receivers.values() if r.link is link and r.alive]
            for start in range(0, len(leases) or 1, wire.MAX_LEASES):
                names = tuple(leases[start : start + wire.MAX_LEASES])
                self.desk.do(Send(link.local, wire.Heartbeat(link.local, link.remote, names)))

    def _heartbeat(self, now: float, message: wire.Heartbeat) -> None:
        link = self._link(now, message)
        if link is None or link.part is not Part.PREFILL:
            return
        for handoff in message.leases:
            sender = self.senders.get(handoff)
            if sender is not None and sender.link is link:
                sender.leased(now)
            else:
                self._answer(link, wire.Drained, handoff, 0, "unknown here")

    def _lose(self, now: float, link: LinkEnd, how: str) -> None:
        """The link is dead for ever; what hangs on it is given up, and pages wait for the fence."""
        if link.dead:
            return
        link.dead = True
        self.desk.do(Fence(link.local))
        reason = f"{link.worker} {how}"
        for sender in tuple(self.senders.values()):
            if sender.link is link:
                sender.fail(now, reason)
        for receiver in tuple(self.receivers.values()):
            if receiver.link is link and receiver.alive:
                receiver.stop(now, Outcome.FAILED, reason)
            elif receiver.link is link and not receiver.generation:
                receiver.fenced()

    def _fenced(self, now: float, event: nouns.Fenced) -> None:
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
        while self.desk.condemned:
            self._lose(now, self.desk.condemned.pop(), f"left writes in flight for {self.desk.rules.drain_s} s")

    def _link(self, now: float, message: wire.Letter | wire.Heartbeat) -> LinkEnd | None:
        """The living link end that a message is for."""
        link = self.links.get(message.destination)
        if link is None or link.remote != message.source or link.dead:
            self.strays += 1
            return None
        link.heard_s = now
        return link

    # ------------------------------------------------------------ the outside

    def _start(self, now: float, event: nouns.Start) -> None:
        if event.handoff in self.sources:
            return
        link = self.links.get(event.link)
        if link is None or link.dead:
            self.desk.do(Ended(event.handoff, Part.PREFILL, Outcome.FAILED, "there is no link to the decode worker"))
            return
        source = Source(self.desk, event.handoff, event.arrive, now + event.deadline_s, now, self._forget_source, event.grain)
        self.sources[source.id] = source
        self._parts[source.name] = source
        source.begin()
        self._attempt(now, source, event.handoff, link)

    def _plain(self, now: float, event: nouns.Plain) -> None:
        self.desk.do(Tell(msgspec.structs.replace(event.arrive, id=engine_id(event.handoff, Part.WHOLE))))

    def _redirect(self, now: float, event: nouns.Redirect) -> None:
        source = self.sources.get(event.source)
        if source is None or source.over is not None or source.sender is not None:
            return
        link = self.links.get(event.link)
        if link is None or link.dead:
            source.attempt_failed(event.handoff, "there is no link to the decode worker")
        else:
            self._attempt(now, source, event.handoff, link)

    def _attempt(self, now: float, source: Source, handoff: HandoffId, link: LinkEnd) -> None:
        sender = Sender(self.desk, handoff, link, source, self._forget_sender)
        self.senders[handoff] = source.sender = sender
        sender.advance(now)
        source.keep()

    def _stay(self, now: float, event: nouns.Stay) -> None:
        source = self.sources.get(event.source)
        if source is not None:
            source.stay()

    def _settle(self, now: float, event: nouns.Settle) -> None:
        source = self.sources.get(event.source)
        if source is not None and source.sender is None:
            source.end(now, Outcome.ABORTED, event.reason)

    def _withdraw(self, now: float, event: nouns.Withdraw) -> None:
        """End it if it is here; if the engine has it already (adopted, or it stayed), that is told."""
        source, receiver = self.sources.get(event.handoff), self.receivers.get(event.handoff)
        if source is not None:
            source.end(now, Outcome.ABORTED, "withdrawn")
        if receiver is not None:
            receiver.stop(now, Outcome.ABORTED, "withdrawn")
        if source is None and receiver is None:
            for part in Part:
                self.desk.do(Tell(EngineAbort(engine_id(event.handoff, part))))

    def _drain(self, now: float, event: nouns.Drain) -> None:
        self.draining = event.on

    # ------------------------------------------------------------ the engine and the mover

    def _admitted(self, now: float, event: Admitted) -> None:
        part = self._parts.get(event.id)
        if part is not None:
            part.admitted(now, event)

    def _computed(self, now: float, event: Computed) -> None:
        part = self._parts.get(event.id)
        if isinstance(part, Source):
            part.computed(now, event)

    def _delta(self, now: float, event: Delta) -> None:
        part = self._parts.get(event.id)
        if part is not None:
            part.delta(now, event)

    def _wrote(self, now: float, event: nouns.Wrote) -> None:
        handoff = self.desk.writes.pop(event.op, None)
        if handoff is not None and event.op in self.senders[handoff].ops:
            self.senders[handoff].wrote(now, event.op, event.error, event.checksum)

    def _revoked(self, now: float, event: nouns.Revoked) -> None:
        handoff = self.desk.grants.get(event.generation)
        if handoff is not None:
            self.receivers[handoff].revoked()

    def _verified(self, now: float, event: nouns.Verified) -> None:
        handoff = self.desk.grants.get(event.generation)
        if handoff is not None:
            self.receivers[handoff].verified(now, event.ok)

    # ------------------------------------------------------------ letters

    def _letter(self, now: float, letter: wire.Letter) -> None:
        link = self._link(now, letter)
        if link is not None and link.part is Part.PREFILL:
            self._to_sender(now, link, letter)
        elif link is not None:
            self._to_receiver(now, link, letter)

    def _to_sender(self, now: float, link: LinkEnd, letter: wire.Letter) -> None:
        sender = self.senders.get(letter.handoff)
        if sender is None or sender.link is not link:
            self.strays += 1
            if isinstance(letter, wire.Reserve | wire.Abort):
                self._answer(link, wire.Drained, letter.handoff, letter.generation, "unknown here")
        elif isinstance(letter, wire.Queued):
            sender.leased(now)
        elif isinstance(letter, wire.Reserve):
            sender.reserved(now, letter)
        elif isinstance(letter, wire.Ack):
            sender.acked(now)
        elif isinstance(letter, wire.Abort | wire.Drained):
            sender.fail(now, letter.reason)

    def _to_receiver(self, now: float, link: LinkEnd, letter: wire.Letter) -> None:
        receiver = self.receivers.get(letter.handoff)
        if receiver is None or receiver.link is not link:
            self._to_nobody(now, link, letter)
        elif isinstance(letter, wire.Offer):
            receiver.offered()
        elif isinstance(letter, wire.Streaming):
            receiver.streaming(letter)
        elif isinstance(letter, wire.Done):
            receiver.done(now, letter)
        elif isinstance(letter, wire.Abort):
            receiver.stop(now, Outcome.ABORTED, letter.reason)
        elif isinstance(letter, wire.Drained):
            receiver.drained(now, letter.reason)

    def _to_nobody(self, now: float, link: LinkEnd, letter: wire.Letter) -> None:
        """A new offer, or a late word about a handoff that has ended here."""
        adopted = link.ended.get(letter.handoff)
        if isinstance(letter, wire.Offer) and adopted is None and letter.handoff not in self.receivers:
            refusal = self._refusal()
            if refusal:
                link.remember(letter.handoff, False, self.desk.rules.remembered)
                self._answer(link, wire.Drained, letter.handoff, 0, refusal)
                return
            receiver = Receiver(
                self.desk, letter.handoff, link, letter.arrive, now + letter.deadline_s, self._forget_receiver, repeat_s=now
            )
            self.receivers[receiver.id] = self._parts[receiver.name] = receiver
            receiver.begin()
            return
        self.strays += 1
        if isinstance(letter, wire.Offer | wire.Done):
            self._answer(link, wire.Ack if adopted else wire.Drained, letter.handoff, letter.generation, "unknown here")

    def _refusal(self) -> str:
        if self.draining:
            return "the decode worker takes no new requests"
        if self.ledger.pages(Hold.QUARANTINE) > self.desk.rules.max_quarantine_pages:
            return "the decode worker has too many pages in quarantine"
        return ""

    def _answer(self, link: LinkEnd, kind: type[wire.Ack | wire.Drained], handoff: HandoffId, generation: int, reason: str) -> None:
        ends = (handoff, link.local, link.remote, generation)
        self.desk.do(Send(link.local, wire.Ack(*ends) if kind is wire.Ack else wire.Drained(*ends, reason)))

    # ------------------------------------------------------------ forgetting

    def _forget_source(self, source: Source) -> None:
        del self.sources[source.id]
        del self._parts[source.name]

    def _forget_sender(self, sender: Sender) -> None:
        del self.senders[sender.id]

    def _forget_receiver(self, receiver: Receiver, adopted: bool) -> None:
        del self.receivers[receiver.id]
        del self._parts[receiver.name]
        receiver.link.remember(receiver.id, adopted, self.desk.rules.remembered)
