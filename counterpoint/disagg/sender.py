"""One attempt to hand a prefilled request to a decode worker, as a pure state machine.

    NEW --pages: offer--> RUNNING --reserved--> STREAMING --all written, first token--> SENT
                            | prefilled           ^                                      | ack
                            v                     |                                      v
                          PARKED ---reserved------+                                   RELEASED
    any state but RELEASED --> ABORTING --no write in flight--> RELEASED

A handoff is offered only when it has pages here, so a decode worker's pages never wait for pages of
a prefill worker.

Owns: which page layers are posted. Promises: nothing is posted after ABORTING. Must not: wait until
the decode worker knows of an end. A sender is forgotten as soon as none of its writes is in flight;
whoever asks about a forgotten handoff gets HandoffDrained, which is true then.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import counterpoint.disagg.messages as wire
from counterpoint.disagg.handoff_context import HandoffContext, LinkEnd
from counterpoint.disagg.handoff_events import (
    CancelWrite,
    HandoffOutcome,
    HandoffTimes,
    SendMessage,
    TransferGranularity,
    WriteKv,
)
from counterpoint.disagg.messages import HandoffId
from counterpoint.disagg.prefill_source import PrefillSource


class SendState(enum.Enum):
    NEW = "new"
    RUNNING = "running"
    PARKED = "parked"
    STREAMING = "streaming"
    SENT = "sent"
    ABORTING = "aborting"
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class HandoffSender:
    """One attempt. Of the pages that the decode worker lacks, [cached, posted_pages) are posted in
    every layer, and [posted_pages, partial_pages) in the first `partial_layers`. `writes`: page
    layers of each write in flight. `acknowledged`: the decode worker has answered the offer."""

    context: HandoffContext
    id: HandoffId
    link: LinkEnd
    source: PrefillSource
    on_done: Callable[[HandoffSender], None]
    state: SendState = SendState.NEW
    acknowledged: bool = False
    repeat_s: float = 0.0
    lease_end_s: float = 0.0
    park_end_s: float = 0.0
    aborted_s: float = 0.0
    reserved_s: float = 0.0
    written_s: float = 0.0
    reservation: wire.PagesReserved | None = None
    posted_pages: int = 0
    partial_pages: int = 0
    partial_layers: int = 0
    writes: dict[int, int] = field(default_factory=dict)
    written_page_layers: int = 0
    sending_since_s: float = 0.0
    sending_s: float = 0.0  # before sending_since_s
    checksum: int | None = 0
    reason: str = ""

    @property
    def parked(self) -> bool:
        return self.state is SendState.PARKED

    # ------------------------------------------------------------ progress

    def advance(self, now: float) -> None:
        """The prefill has progressed, a write has ended, or pages were reserved."""
        if self.state is SendState.NEW and self.source.pages:
            self.state = SendState.RUNNING
            self.lease_end_s = now + self.context.config.lease_s
            self._send_pending(now)
        if self.state is SendState.RUNNING and self.source.complete:
            self.state = SendState.PARKED
            self.park_end_s = now + self.context.config.park_timeout_s
        elif self.state is SendState.STREAMING:
            self._post_writes(now)
            all_posted = self.posted_pages == len(self.source.pages)
            if self.source.complete and not self.writes and all_posted:
                self.state, self.written_s = SendState.SENT, now
                self._send_pending(now)

    def renew_lease(self, now: float) -> None:
        self.acknowledged = True
        self.lease_end_s = now + self.context.config.lease_s

    def on_reserved(self, now: float, message: wire.PagesReserved) -> None:
        self.renew_lease(now)
        if self.state in (SendState.RUNNING, SendState.PARKED):
            pages = self.context.num_pages(self.source.total_tokens)
            cached, reserved = message.cached, len(message.pages)
            if cached + reserved != pages:
                reason = f"{cached} + {reserved} pages were reserved, the request has {pages}"
                self.fail(now, reason)
                return
            self.reservation, self.reserved_s = message, now
            self.posted_pages = self.partial_pages = cached
            self.state = SendState.STREAMING
            self.source.update_hold()
        if self.reservation is not None and message.generation == self.reservation.generation:
            self._send(wire.TransferStarted(*self._header))
            self.advance(now)

    def on_write_done(self, now: float, op: int, error: str, checksum: int | None) -> None:
        self.written_page_layers += self._complete_write(op)
        if not self.writes:
            self.sending_s += now - self.sending_since_s
        if self.checksum is None or checksum is None:
            self.checksum = None
        else:
            self.checksum = (self.checksum + checksum) & (1 << 63) - 1
        if self.state is SendState.ABORTING:
            if not self.writes:
                self._release()
        elif error:
            self.fail(now, f"link to {self.link.worker}: {error}")
        else:
            self.advance(now)
        self.source.release_if_unread()

    def on_ack(self, now: float) -> None:
        if self.state is SendState.SENT:
            self.state = SendState.RELEASED
            self.on_done(self)
            self.source.sender = None
            self.source.end(
                now, HandoffOutcome.SENT, times=self._times(now), decode_worker=self.link.worker
            )

    def _times(self, now: float) -> HandoffTimes:
        source, started_s = self.source, self.source.started_s
        return HandoffTimes(
            admitted_s=source.admitted_s - started_s,
            reserved_s=self.reserved_s - started_s,
            prefilled_s=source.prefilled_s - started_s,
            written_s=self.written_s - started_s,
            adopted_s=now - started_s,
            page_layers=self.written_page_layers,
            sending_s=self.sending_s,
        )

    def tick(self, now: float) -> None:
        config, peer = self.context.config, self.link.worker
        if self.state is SendState.ABORTING:
            if now >= self.aborted_s + config.drain_timeout_s:
                self.context.condemned_links.append(self.link)
        elif self.state in (SendState.RUNNING, SendState.PARKED) and now >= self.lease_end_s:
            self.fail(now, f"{peer} has not named the handoff for {config.lease_s} s")
        elif self.state is SendState.PARKED and now >= self.park_end_s:
            self.fail(now, f"{peer} had no room for {config.park_timeout_s} s")
        elif self.state is SendState.NEW:
            return
        elif now >= self.repeat_s and (not self.acknowledged or self.state is SendState.SENT):
            self._send_pending(now)

    # ------------------------------------------------------------ ends

    def fail(self, now: float, reason: str) -> None:
        """The decode side or the link failed: another attempt may follow."""
        if self.state not in (SendState.ABORTING, SendState.RELEASED):
            self.abort(now, reason)
            self.source.on_attempt_failed(self.id, reason)

    def abort(self, now: float, reason: str) -> None:
        """Post nothing more; release when no write is in flight."""
        self.reason = reason[:500]
        self.state = SendState.ABORTING
        self.aborted_s = now
        for op in self.writes:
            self.context.emit(CancelWrite(op))
        if self.writes:
            self._send(wire.AbortHandoff(*self._header, self.reason))
        else:
            self._release()

    def on_link_fenced(self, now: float) -> None:
        """The link is gone, and every write with it."""
        for op in tuple(self.writes):
            self._complete_write(op)
        if self.state is SendState.ABORTING:
            self._release()
        self.source.release_if_unread()

    def _release(self) -> None:
        self.state = SendState.RELEASED
        self._send(wire.HandoffDrained(*self._header, self.reason))
        self.on_done(self)

    # ------------------------------------------------------------ writes

    def _post_writes(self, now: float) -> None:
        """Post what is computed and not posted yet, as far as the granularity allows."""
        source, layers = self.source, self.context.geometry.layers
        by_prompt = source.granularity is TransferGranularity.PROMPT
        if not source.pages or (by_prompt and not source.complete):
            return
        if not self.writes:
            self.sending_since_s = now
        full = source.complete_pages(source.tokens)
        if self.posted_pages < full and self.partial_pages > self.posted_pages:
            end = min(self.partial_pages, full)
            self._write((self.partial_layers, layers), self.posted_pages, end)
            self.posted_pages = end
        if self.posted_pages < full:
            self._write((0, layers), self.posted_pages, full)
            self.posted_pages = full
        if self.partial_pages <= self.posted_pages:
            self.partial_pages, self.partial_layers = self.posted_pages, 0
        by_layer = source.granularity is TransferGranularity.LAYER
        ahead = source.complete_pages(source.ahead)
        if by_layer and ahead > self.posted_pages and source.layers > self.partial_layers:
            if not self.partial_layers:
                self.partial_pages = ahead
            computed = (self.partial_layers, source.layers)
            self._write(computed, self.posted_pages, self.partial_pages)
            self.partial_layers = source.layers

    def _write(self, layers: tuple[int, int], first_page: int, last_page: int) -> None:
        """Post layers [layers[0], layers[1]) of the request's pages [first_page, last_page)."""
        reservation = self.reservation
        assert self.state is SendState.STREAMING and reservation is not None, (
            "a write is posted outside STREAMING"
        )
        first, last = layers
        if first == last:
            return
        step, cached = self.context.config.max_write_pages, reservation.cached
        for start in range(first_page, last_page, step):
            end = min(start + step, last_page)
            op = self.context.new_op(self.id)
            self.writes[op] = (end - start) * (last - first)
            self.source.in_flight += 1
            sources = self.source.pages[start:end]
            targets = reservation.pages[start - cached : end - cached]
            generation, link = reservation.generation, self.link.local
            self.context.emit(WriteKv(op, link, generation, first, last, sources, targets))

    def _complete_write(self, op: int) -> int:
        self.source.in_flight -= 1
        self.context.writes.pop(op, None)
        return self.writes.pop(op)

    # ------------------------------------------------------------ messages

    @property
    def _header(self) -> tuple[HandoffId, int, int, int]:
        generation = 0 if self.reservation is None else self.reservation.generation
        return self.id, self.link.local, self.link.remote, generation

    def _send_pending(self, now: float) -> None:
        """Send (again) what the decode worker has not answered yet."""
        self.repeat_s = now + self.context.config.resend_interval_s
        if self.state is SendState.SENT:
            first, written = self.source.first_token, self.written_page_layers
            assert first is not None
            self._send(wire.TransferDone(*self._header, first, written, self.checksum))
        else:
            left_s = self.source.deadline_s - now
            self._send(wire.HandoffOffer(*self._header, self.source.request, left_s))

    def _send(self, message: wire.Message) -> None:
        if not self.link.dead:
            self.context.emit(SendMessage(self.link.local, message))
