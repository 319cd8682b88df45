"""The nouns of the handoff code: what its state machines are told, and what they ask for.

Owns: events, commands, rules. Promises: plain frozen data, as in types.py; together with the messages and the engine's own events
and outputs these are the whole seam of disagg/handoff.py. Must not: act.

A link is named here by this end's incarnation (`link`).
"""

from __future__ import annotations

import enum

import msgspec

from counterpoint.disagg.messages import HandoffId, Message, SampledToken
from counterpoint.kv_transfer.transport import Completed, LinkSevered, Notice, Quiesced
from counterpoint.types import Abort as EngineAbort
from counterpoint.types import (
    AddRequest,
    Admitted,
    Computed,
    DisaggRole,
    OutputDelta,
    Release,
    ResumeDecode,
)


class TransferGranularity(enum.Enum):
    """When pages are sent (disagg/link_choice.py chooses)."""

    PROMPT = "prompt"  # all at once, when the prompt is computed
    CHUNK = "chunk"  # whole pages of every layer, as chunks of the prompt are computed
    LAYER = "layer"  # also the layers of a pass that is under way


class HandoffOutcome(enum.Enum):
    SENT = "sent"  # prefill: the decode worker has adopted it
    DECODED_IN_PLACE = "stayed"  # prefill: no decode worker took it, so it decodes here
    FINISHED = "finished"  # prefill: the first token was the last
    ADOPTED = "adopted"  # decode: it runs here now
    ABORTED = "aborted"  # the client, or whoever speaks for it, no longer wants it
    FAILED = "failed"


class HandoffConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds.

    `heartbeat_s`           pause between heartbeats of a link
    `dead_s`                silence after which the peer counts as dead
    `lease_s`               an offer counts as forgotten when the decode worker has not named it for so long
    `park_s`                a prefilled request waits so long for a decode worker's pages before it is rerouted. This also ends
                            circular waits: two workers that both prefill and decode, each full of requests for the other
    `resend_s`              an unanswered message is repeated after so long
    `drain_s`               writes that were given up and are still in flight after so long condemn their link
    `write_pages`           most pages in one posted write
    `max_quarantine_pages`  with more, offers are refused
    `remembered`            ended handoffs of a link that are recognised when a late message names them
    """

    heartbeat_interval_s: float = 1.0
    peer_timeout_s: float = 3.0
    lease_s: float = 10.0
    park_timeout_s: float = 5.0
    resend_interval_s: float = 0.5
    drain_timeout_s: float = 5.0
    max_write_pages: int = 256
    max_quarantine_pages: int = 1 << 30
    max_remembered: int = 4096


class KvGeometry(msgspec.Struct, frozen=True):
    layers: int
    page_tokens: int


# ---------------------------------------------------------------- events (beside messages, Admitted, Computed and Delta)


class LinkUp(msgspec.Struct, frozen=True, gc=False):
    """A link is up: `link` is this end's incarnation, `peer` the other's. `part`: what this worker does on it."""

    link: int
    remote: int
    worker: str
    disagg_role: DisaggRole


class LinkDown(msgspec.Struct, frozen=True, gc=False):
    """The peer is known to be gone (connection refused, process ended): no need to wait for silence."""

    link: int


class LinkFenced(msgspec.Struct, frozen=True, gc=False):
    """Proven: no write of this link, in either direction, moves a byte any more."""

    link: int


class WriteDone(msgspec.Struct, frozen=True, gc=False):
    """Write `op` has come to its end and moves no byte any more; `error` is empty if all of it is in place."""

    op: int
    error: str = ""
    checksum: int | None = None


class PagesRevoked(msgspec.Struct, frozen=True, gc=False):
    """Proven: no write under `generation` changes a byte here any more."""

    generation: int


class PagesVerified(msgspec.Struct, frozen=True, gc=False):
    generation: int
    ok: bool


class StartHandoff(msgspec.Struct, frozen=True, tag=True):
    """Prefill `arrive` here and hand it on over `link`. `deadline_s`: seconds from now until the handoff is given up."""

    handoff: HandoffId
    request: AddRequest
    link: int
    deadline_s: float
    granularity: TransferGranularity = TransferGranularity.LAYER


class RunWithoutHandoff(msgspec.Struct, frozen=True, tag=True):
    """Do all of `arrive` here: nothing is handed on."""

    handoff: HandoffId
    request: AddRequest


class Redirect(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answer to Reroute: try again as `handoff` over `link`."""

    source: HandoffId
    handoff: HandoffId
    link: int


class StayInPlace(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answer to Reroute: decode it on the worker that has prefilled it."""

    source: HandoffId


class SettleSource(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answer to Reroute: let it go."""

    source: HandoffId
    reason: str


class WithdrawRequest(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The client is gone, or another attempt has taken over: end `handoff` here, wherever it stands."""

    handoff: HandoffId


class Drain(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Refuse new offers (`on`), as a worker does that changes its role or stops; or take them again."""

    on: bool


Order = (
    StartHandoff
    | RunWithoutHandoff
    | Redirect
    | StayInPlace
    | SettleSource
    | WithdrawRequest
    | Drain
)  # from the front

Event = (
    Message | LinkUp | LinkDown | LinkFenced | WriteDone | PagesRevoked | PagesVerified | Order | Admitted | Computed | OutputDelta
)  # fmt: skip


# ---------------------------------------------------------------- commands


class SendMessage(msgspec.Struct, frozen=True):
    link: int
    message: Message


EngineEvent = AddRequest | ResumeDecode | Release | EngineAbort


class ToEngine(msgspec.Struct, frozen=True):
    """To this worker's engine."""

    event: EngineEvent


class WriteKv(msgspec.Struct, frozen=True):
    """Copy layers [first_layer, last_layer) of pages `sources` here to pages `destinations` there; Wrote comes back."""

    op: int
    link: int
    generation: int
    first_layer: int
    last_layer: int
    sources: tuple[int, ...]
    destinations: tuple[int, ...]


class CancelWrite(msgspec.Struct, frozen=True, gc=False):
    """Stop write `op` if that can be done. Wrote comes back either way, when it is at its end and not before."""

    op: int


class GrantPages(msgspec.Struct, frozen=True):
    """The peer of `link` may write `pages` under `generation`."""

    link: int
    generation: int
    pages: tuple[int, ...]


class RevokePages(msgspec.Struct, frozen=True, gc=False):
    """It may no longer. Revoked comes back if and when that is proven."""

    link: int
    generation: int


class VerifyPages(msgspec.Struct, frozen=True):
    """Sum what was written and compare; Verified comes back."""

    generation: int
    pages: tuple[int, ...]
    checksum: int


class FenceLink(msgspec.Struct, frozen=True, gc=False):
    """Tear the link down and make sure that nothing of it is in flight; Fenced comes back when that is proven."""

    link: int


class Reroute(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The decode side of `handoff` failed, as far as can be seen from here; the prefill (`source`) is whole. Answer with Redirect,
    Stay or Settle. (The decode worker may have adopted it all the same: whoever answers must no longer listen to that attempt.)"""

    source: HandoffId
    handoff: HandoffId
    reason: str


class HandoffTimes(msgspec.Struct, frozen=True, gc=False):
    """When things were done, in seconds after Start. `admitted_s`: the prompt had its pages and the handoff was offered;
    `reserved_s`: the decode worker had its own; `prefilled_s`: the first token was sampled; `written_s`: the last byte was in
    place; `adopted_s`: the decode worker had said so. `page_layers`: how much was sent; `sending_s`: how long writes of it were
    under way."""

    admitted_s: float
    reserved_s: float
    prefilled_s: float
    written_s: float
    adopted_s: float
    page_layers: int
    sending_s: float = 0.0

    @property
    def visible_s(self) -> float:
        """What the transfer cost behind the prefill (disagg/link_choice.py predicts it)."""
        return max(0.0, self.written_s - max(self.prefilled_s, self.reserved_s))


class HandoffEnded(msgspec.Struct, frozen=True, tag=True):
    """This worker's `part` is decided; said once. `handoff`: with Part.PREFILL that of the source. `first`: with ADOPTED, the
    token that prefill sampled. `times`, and `to`, the decode worker: with SENT."""

    handoff: HandoffId
    disagg_role: DisaggRole
    outcome: HandoffOutcome
    reason: str = ""
    first_token: SampledToken | None = None
    times: HandoffTimes | None = None
    decode_worker: str = ""


Command = (
    SendMessage
    | ToEngine
    | WriteKv
    | CancelWrite
    | GrantPages
    | RevokePages
    | VerifyPages
    | FenceLink
    | Reroute
    | HandoffEnded
)


def engine_id(handoff: HandoffId, part: DisaggRole) -> str:
    """The engine's name for its part of a handoff: several attempts may live in one engine."""
    return f"{handoff.request}\x1f{handoff.attempt}\x1f{part.value}"


def handoff_of(id: str) -> tuple[HandoffId, DisaggRole] | None:
    """The inverse of `engine_id`; None for a plain request."""
    request, _, rest = id.partition("\x1f")
    attempt, _, part = rest.partition("\x1f")
    return (HandoffId(request, int(attempt)), DisaggRole(part)) if part else None


def event_of_notice(notice: Notice) -> WriteDone | PagesRevoked | LinkFenced | LinkDown:
    """What a mover has to say, for the handoffs."""
    if isinstance(notice, Completed):
        return WriteDone(notice.op, notice.error, notice.checksum)
    if isinstance(notice, Quiesced):
        return PagesRevoked(notice.generation)
    return LinkFenced(notice.link) if isinstance(notice, LinkSevered) else LinkDown(notice.link)
