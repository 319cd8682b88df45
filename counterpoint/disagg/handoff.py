"""All handoffs of one worker, in both roles. Pure: events with their time in, commands out.

Owns: the links; sources and senders (prefill side), receivers (decode side); the page ledger.
Promises: the same events at the same times give the same commands. Messages may be lost, repeated,
late or out of order, and links and workers may die or freeze at any moment: every handoff still
ends, and its pages come back as soon as that is safe. Must not: read a clock, send, copy, wait.

Reconciliation: an unanswered message is repeated. The decode side names its active handoffs in
heartbeats, and the prefill side answers HandoffDrained for one that it does not know. A link that
is silent for `peer_timeout_s` is dead for good.
"""

from __future__ import annotations

import msgspec

import counterpoint.disagg.messages as wire
from counterpoint.disagg import handoff_events
from counterpoint.disagg.handoff_context import HandoffContext, LinkEnd, PageHold, PageLedger
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
from counterpoint.disagg.prefill_source import PrefillSource
from counterpoint.disagg.receiver import HandoffReceiver
from counterpoint.disagg.sender import HandoffSender
from counterpoint.types import Abort as EngineAbort
from counterpoint.types import Admitted, Computed, DisaggRole, OutputDelta

NO_LINK = "there is no link to the decode worker"
UNKNOWN = "unknown here"


class Handoffs:
    """`unexpected`: how many messages matched no live link or handoff; they are dropped."""

    def __init__(self, config: HandoffConfig, geometry: KvGeometry) -> None:
        self.context = HandoffContext(config, geometry)
        self.links: dict[int, LinkEnd] = {}
        self.sources: dict[HandoffId, PrefillSource] = {}
        self.senders: dict[HandoffId, HandoffSender] = {}
        self.receivers: dict[HandoffId, HandoffReceiver] = {}
        self.draining = False
        self.unexpected = 0
        self._by_engine_id: dict[str, PrefillSource | HandoffReceiver] = {}
        self._handlers = {
            handoff_events.LinkUp: self._on_link_up,
            handoff_events.LinkDown: self._on_link_down,
            handoff_events.LinkFenced: self._on_link_fenced,
            handoff_events.WriteDone: self._on_write_done,
            handoff_events.PagesRevoked: self._on_pages_revoked,
            handoff_events.PagesVerified: self._on_pages_verified,
            handoff_events.StartHandoff: self._on_start,
            handoff_events.RunWithoutHandoff: self._on_run_without_handoff,
            handoff_events.Redirect: self._on_redirect,
            handoff_events.StayInPlace: self._on_stay_in_place,
            handoff_events.SettleSource: self._on_settle_source,
            handoff_events.WithdrawRequest: self._on_withdraw,
            handoff_events.Drain: self._on_drain,
            Admitted: self._on_admitted,
            Computed: self._on_computed,
            OutputDelta: self._on_output,
            wire.LinkHeartbeat: self._on_heartbeat,
        }

    # ------------------------------------------------------------ in and out

    def on_event(self, now: float, event: Event) -> None:
        """Unknown ids and late messages do no harm."""
        if isinstance(event, wire.HandoffMessage):
            self._on_message(now, event)
        else:
            self._handlers[type(event)](now, event)
        self._close_condemned_links(now)

    def tick(self, now: float) -> None:
        """To be called a few times per `resend_interval_s`."""
        for source in tuple(self.sources.values()):
            source.tick(now)
        for sender in tuple(self.senders.values()):
            sender.tick(now)
        for receiver in tuple(self.receivers.values()):
            receiver.tick(now)
        for link in tuple(self.links.values()):
            if not link.dead:
                self._send_heartbeat(now, link)
        self._close_condemned_links(now)

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

    def _on_link_up(self, now: float, event: handoff_events.LinkUp) -> None:
        self.links[event.link] = LinkEnd(
            event.link, event.remote, event.worker, event.disagg_role, now, now
        )

    def _on_link_down(self, now: float, event: handoff_events.LinkDown) -> None:
        link = self.links.get(event.link)
        if link is not None:
            self._lose_link(now, link, "is gone")

    def _send_heartbeat(self, now: float, link: LinkEnd) -> None:
        config = self.context.config
        if now >= link.last_heard_s + config.peer_timeout_s:
            self._lose_link(now, link, f"was silent for {config.peer_timeout_s} s")
        elif now >= link.last_heartbeat_s + config.heartbeat_interval_s:
            link.last_heartbeat_s = now
            leases = [r.id for r in self.receivers.values() if r.link is link and r.is_active]
            for start in range(0, len(leases) or 1, wire.MAX_LEASES):
                names = tuple(leases[start : start + wire.MAX_LEASES])
                heartbeat = wire.LinkHeartbeat(link.local, link.remote, names)
                self.context.emit(SendMessage(link.local, heartbeat))

    def _on_heartbeat(self, now: float, message: wire.LinkHeartbeat) -> None:
        link = self._link_for(now, message)
        if link is None or link.disagg_role is not DisaggRole.PREFILL:
            return
        for handoff in message.leases:
            sender = self.senders.get(handoff)
            if sender is not None and sender.link is link:
                sender.renew_lease(now)
            else:
                self._reply(link, wire.HandoffDrained, handoff, 0, UNKNOWN)

    def _lose_link(self, now: float, link: LinkEnd, how: str) -> None:
        """The link is dead for good: abort its handoffs. Their pages wait for LinkFenced."""
        if link.dead:
            return
        link.dead = True
        self.context.emit(FenceLink(link.local))
        reason = f"{link.worker} {how}"
        for sender in tuple(self.senders.values()):
            if sender.link is link:
                sender.fail(now, reason)
        for receiver in tuple(self.receivers.values()):
            if receiver.link is link and receiver.is_active:
                receiver.abort(now, HandoffOutcome.FAILED, reason)
            elif receiver.link is link and not receiver.generation:
                receiver.on_link_fenced()

    def _on_link_fenced(self, now: float, event: handoff_events.LinkFenced) -> None:
        link = self.links.pop(event.link, None)
        if link is None:
            return
        self._lose_link(now, link, "is gone")
        for sender in tuple(self.senders.values()):
            if sender.link is link:
                sender.on_link_fenced(now)
        for receiver in tuple(self.receivers.values()):
            if receiver.link is link:
                receiver.on_link_fenced()

    def _close_condemned_links(self, now: float) -> None:
        """Of which writes did not end in time."""
        reason = f"left writes in flight for {self.context.config.drain_timeout_s} s"
        while self.context.condemned_links:
            self._lose_link(now, self.context.condemned_links.pop(), reason)

    def _link_for(
        self, now: float, message: wire.HandoffMessage | wire.LinkHeartbeat
    ) -> LinkEnd | None:
        """The live link that a message is for."""
        link = self.links.get(message.destination)
        if link is None or link.remote != message.source or link.dead:
            self.unexpected += 1
            return None
        link.last_heard_s = now
        return link

    # ------------------------------------------------------------ orders

    def _on_start(self, now: float, event: handoff_events.StartHandoff) -> None:
        if event.handoff in self.sources:
            return
        link = self.links.get(event.link)
        if link is None or link.dead:
            failed = HandoffOutcome.FAILED
            self.context.emit(HandoffEnded(event.handoff, DisaggRole.PREFILL, failed, NO_LINK))
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
        self._by_engine_id[source.engine_request_id] = source
        source.start()
        self._start_attempt(now, source, event.handoff, link)

    def _on_run_without_handoff(self, now: float, event: handoff_events.RunWithoutHandoff) -> None:
        id = engine_id(event.handoff, DisaggRole.WHOLE)
        self.context.emit(ToEngine(msgspec.structs.replace(event.request, id=id)))

    def _on_redirect(self, now: float, event: handoff_events.Redirect) -> None:
        source = self.sources.get(event.source)
        if source is None or source.outcome is not None or source.sender is not None:
            return
        link = self.links.get(event.link)
        if link is None or link.dead:
            source.on_attempt_failed(event.handoff, NO_LINK)
        else:
            self._start_attempt(now, source, event.handoff, link)

    def _start_attempt(
        self, now: float, source: PrefillSource, handoff: HandoffId, link: LinkEnd
    ) -> None:
        sender = HandoffSender(self.context, handoff, link, source, self._forget_sender)
        self.senders[handoff] = source.sender = sender
        sender.advance(now)
        source.update_hold()

    def _on_stay_in_place(self, now: float, event: handoff_events.StayInPlace) -> None:
        source = self.sources.get(event.source)
        if source is not None:
            source.keep_in_place()

    def _on_settle_source(self, now: float, event: handoff_events.SettleSource) -> None:
        source = self.sources.get(event.source)
        if source is not None and source.sender is None:
            source.end(now, HandoffOutcome.ABORTED, event.reason)

    def _on_withdraw(self, now: float, event: handoff_events.WithdrawRequest) -> None:
        """If the handoff is over and the engine decodes it, abort it there."""
        source, receiver = self.sources.get(event.handoff), self.receivers.get(event.handoff)
        if source is not None:
            source.end(now, HandoffOutcome.ABORTED, "withdrawn")
        if receiver is not None:
            receiver.abort(now, HandoffOutcome.ABORTED, "withdrawn")
        if source is None and receiver is None:
            for part in DisaggRole:
                self.context.emit(ToEngine(EngineAbort(engine_id(event.handoff, part))))

    def _on_drain(self, now: float, event: handoff_events.Drain) -> None:
        self.draining = event.on

    # ------------------------------------------------------------ engine and transport

    def _on_admitted(self, now: float, event: Admitted) -> None:
        part = self._by_engine_id.get(event.id)
        if part is not None:
            part.on_admitted(now, event)

    def _on_computed(self, now: float, event: Computed) -> None:
        part = self._by_engine_id.get(event.id)
        if isinstance(part, PrefillSource):
            part.on_computed(now, event)

    def _on_output(self, now: float, event: OutputDelta) -> None:
        part = self._by_engine_id.get(event.id)
        if part is not None:
            part.on_output(now, event)

    def _on_write_done(self, now: float, event: handoff_events.WriteDone) -> None:
        handoff = self.context.writes.pop(event.op, None)
        if handoff is not None and event.op in self.senders[handoff].writes:
            self.senders[handoff].on_write_done(now, event.op, event.error, event.checksum)

    def _on_pages_revoked(self, now: float, event: handoff_events.PagesRevoked) -> None:
        handoff = self.context.grants.get(event.generation)
        if handoff is not None:
            self.receivers[handoff].on_revoked()

    def _on_pages_verified(self, now: float, event: handoff_events.PagesVerified) -> None:
        handoff = self.context.grants.get(event.generation)
        if handoff is not None:
            self.receivers[handoff].on_verified(now, event.ok)

    # ------------------------------------------------------------ messages

    def _on_message(self, now: float, message: wire.HandoffMessage) -> None:
        link = self._link_for(now, message)
        if link is not None and link.disagg_role is DisaggRole.PREFILL:
            self._to_sender(now, link, message)
        elif link is not None:
            self._to_receiver(now, link, message)

    def _to_sender(self, now: float, link: LinkEnd, message: wire.HandoffMessage) -> None:
        sender = self.senders.get(message.handoff)
        if sender is None or sender.link is not link:
            self.unexpected += 1
            if isinstance(message, wire.PagesReserved | wire.AbortHandoff):
                self._reply(link, wire.HandoffDrained, message.handoff, message.generation, UNKNOWN)
        elif isinstance(message, wire.OfferQueued):
            sender.renew_lease(now)
        elif isinstance(message, wire.PagesReserved):
            sender.on_reserved(now, message)
        elif isinstance(message, wire.TransferAck):
            sender.on_ack(now)
        elif isinstance(message, wire.AbortHandoff | wire.HandoffDrained):
            sender.fail(now, message.reason)

    def _to_receiver(self, now: float, link: LinkEnd, message: wire.HandoffMessage) -> None:
        receiver = self.receivers.get(message.handoff)
        if receiver is None or receiver.link is not link:
            self._on_unknown_handoff(now, link, message)
        elif isinstance(message, wire.HandoffOffer):
            receiver.on_offer()
        elif isinstance(message, wire.TransferStarted):
            receiver.on_transfer_started(message)
        elif isinstance(message, wire.TransferDone):
            receiver.on_transfer_done(now, message)
        elif isinstance(message, wire.AbortHandoff):
            receiver.abort(now, HandoffOutcome.ABORTED, message.reason)
        elif isinstance(message, wire.HandoffDrained):
            receiver.on_drained(now, message.reason)

    def _on_unknown_handoff(self, now: float, link: LinkEnd, message: wire.HandoffMessage) -> None:
        """A new offer, or a late message about a handoff that has ended here."""
        adopted = link.ended.get(message.handoff)
        if (
            isinstance(message, wire.HandoffOffer)
            and adopted is None
            and message.handoff not in self.receivers
        ):
            refusal = self._refusal_reason()
            if refusal:
                link.remember(message.handoff, False, self.context.config.max_remembered)
                self._reply(link, wire.HandoffDrained, message.handoff, 0, refusal)
                return
            receiver = HandoffReceiver(
                self.context,
                message.handoff,
                link,
                message.request,
                now + message.deadline_s,
                self._forget_receiver,
                repeat_s=now,
            )
            self.receivers[receiver.id] = self._by_engine_id[receiver.engine_request_id] = receiver
            receiver.start()
            return
        self.unexpected += 1
        if isinstance(message, wire.HandoffOffer | wire.TransferDone):
            self._reply(
                link,
                wire.TransferAck if adopted else wire.HandoffDrained,
                message.handoff,
                message.generation,
                UNKNOWN,
            )

    def _refusal_reason(self) -> str:
        if self.draining:
            return "the decode worker accepts no new requests"
        if self.ledger.pages(PageHold.QUARANTINE) > self.context.config.max_quarantine_pages:
            return "the decode worker has too many pages in quarantine"
        return ""

    def _reply(
        self,
        link: LinkEnd,
        kind: type[wire.TransferAck | wire.HandoffDrained],
        handoff: HandoffId,
        generation: int,
        reason: str,
    ) -> None:
        header = (handoff, link.local, link.remote, generation)
        if kind is wire.TransferAck:
            message = wire.TransferAck(*header)
        else:
            message = wire.HandoffDrained(*header, reason)
        self.context.emit(SendMessage(link.local, message))

    # ------------------------------------------------------------ forgetting

    def _forget_source(self, source: PrefillSource) -> None:
        del self.sources[source.id]
        del self._by_engine_id[source.engine_request_id]

    def _forget_sender(self, sender: HandoffSender) -> None:
        del self.senders[sender.id]

    def _forget_receiver(self, receiver: HandoffReceiver, adopted: bool) -> None:
        del self.receivers[receiver.id]
        del self._by_engine_id[receiver.engine_request_id]
        receiver.link.remember(receiver.id, adopted, self.context.config.max_remembered)
