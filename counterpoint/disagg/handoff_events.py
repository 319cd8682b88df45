"""Events, orders, commands and settings of the handoff state machines.

Promises: plain frozen data, as in types.py. With the messages and the engine's own events and
outputs, these are the whole interface of disagg/handoff.py.

`link` is always this end's number of a link (its incarnation).
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
    """When pages are sent (router.choose_granularity)."""

    PROMPT = "prompt"  # all at once, when the prompt is computed
    CHUNK = "chunk"  # whole pages of every layer, as chunks of the prompt are computed
    LAYER = "layer"  # also layers of a pass that still runs


class HandoffOutcome(enum.Enum):
    SENT = "sent"  # prefill: the decode worker has adopted it
    DECODED_IN_PLACE = "stayed"  # prefill: no decode worker took it, so it decodes here
    FINISHED = "finished"  # prefill: the first token was the last
    ADOPTED = "adopted"  # decode: it runs here now
    ABORTED = "aborted"  # the client is gone, or another attempt took over
    FAILED = "failed"


class HandoffConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`heartbeat_interval_s`  between heartbeats of a link
    `peer_timeout_s`        silence after which the peer counts as dead
    `lease_s`               an offer that the decode worker has not named for so long is rerouted
    `park_timeout_s`        a prefilled request waits so long for a decode worker's pages before it
                            is rerouted. This also ends circular waits between two full workers
                            that both prefill and decode
    `resend_interval_s`     an unanswered message is repeated after so long
    `drain_timeout_s`       a link whose given-up writes have not ended by then is torn down
    `max_write_pages`       in one posted write
    `max_quarantine_pages`  with more, offers are refused
    `max_remembered`        finished handoffs of a link that late messages still match
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


# ---------------------------------------------------------------- events


class LinkUp(msgspec.Struct, frozen=True, gc=False):
    """`remote`: the other end's number. `disagg_role`: this worker's on the link."""

    link: int
    remote: int
    worker: str
    disagg_role: DisaggRole


class LinkDown(msgspec.Struct, frozen=True, gc=False):
    """The peer is gone (connection refused, process ended): do not wait for its timeout."""

    link: int


class LinkFenced(msgspec.Struct, frozen=True, gc=False):
    """Proven: no write of this link, in either direction, can move a byte any more."""

    link: int


class WriteDone(msgspec.Struct, frozen=True, gc=False):
    """Write `op` can move no byte any more. Empty `error`: all of it is in place."""

    op: int
    error: str = ""
    checksum: int | None = None


class PagesRevoked(msgspec.Struct, frozen=True, gc=False):
    """Proven: no write under `generation` can change a byte here any more."""

    generation: int


class PagesVerified(msgspec.Struct, frozen=True, gc=False):
    generation: int
    ok: bool


class StartHandoff(msgspec.Struct, frozen=True, tag=True):
    """Prefill here, then hand over on `link`. `deadline_s`: from now until the handoff fails."""

    handoff: HandoffId
    request: AddRequest
    link: int
    deadline_s: float
    granularity: TransferGranularity = TransferGranularity.LAYER


class RunWithoutHandoff(msgspec.Struct, frozen=True, tag=True):
    """Run all of the request here."""

    handoff: HandoffId
    request: AddRequest


class Redirect(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answer to Reroute: try again as `handoff` on `link`."""

    source: HandoffId
    handoff: HandoffId
    link: int


class StayInPlace(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answer to Reroute: decode on the worker that prefilled."""

    source: HandoffId


class SettleSource(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Answer to Reroute: release the request."""

    source: HandoffId
    reason: str


class WithdrawRequest(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The client is gone, or another attempt took over: end `handoff` in any state."""

    handoff: HandoffId


class Drain(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Refuse new offers (`on`), before a change of role or a stop; or accept them again."""

    on: bool


Order = (
    StartHandoff
    | RunWithoutHandoff
    | Redirect
    | StayInPlace
    | SettleSource
    | WithdrawRequest
    | Drain
)  # of the frontend

Event = (
    Message
    | LinkUp
    | LinkDown
    | LinkFenced
    | WriteDone
    | PagesRevoked
    | PagesVerified
    | Order
    | Admitted
    | Computed
    | OutputDelta
)


# ---------------------------------------------------------------- commands


class SendMessage(msgspec.Struct, frozen=True):
    link: int
    message: Message


EngineEvent = AddRequest | ResumeDecode | Release | EngineAbort


class ToEngine(msgspec.Struct, frozen=True):
    """For this worker's engine."""

    event: EngineEvent


class WriteKv(msgspec.Struct, frozen=True):
    """Copy layers [first_layer, last_layer) of `sources` here to `destinations` there; WriteDone
    follows."""

    op: int
    link: int
    generation: int
    first_layer: int
    last_layer: int
    sources: tuple[int, ...]
    destinations: tuple[int, ...]


class CancelWrite(msgspec.Struct, frozen=True, gc=False):
    """Stop write `op` if possible. WriteDone follows at its end and not before."""

    op: int


class GrantPages(msgspec.Struct, frozen=True):
    """The peer of `link` may write `pages` under `generation`."""

    link: int
    generation: int
    pages: tuple[int, ...]


class RevokePages(msgspec.Struct, frozen=True, gc=False):
    """End the grant. PagesRevoked follows if and when that is proven."""

    link: int
    generation: int


class VerifyPages(msgspec.Struct, frozen=True):
    """Compare the checksum of what was written; PagesVerified follows."""

    generation: int
    pages: tuple[int, ...]
    checksum: int


class FenceLink(msgspec.Struct, frozen=True, gc=False):
    """Tear the link down. LinkFenced follows when nothing of it is in flight any more."""

    link: int


class Reroute(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The decode side of `handoff` failed, as far as this worker sees; the prefill is intact.

    To be answered with Redirect, StayInPlace or SettleSource. The decode worker may have adopted
    the request all the same, so the frontend must ignore that attempt from now on.
    """

    source: HandoffId
    handoff: HandoffId
    reason: str


class HandoffTimes(msgspec.Struct, frozen=True, gc=False):
    """Seconds after StartHandoff. `admitted_s`: the prompt had pages and the handoff was offered;
    `reserved_s`: the decode worker had pages; `prefilled_s`: the first token was sampled;
    `written_s`: the last byte was in place; `adopted_s`: the decode worker confirmed it.
    `page_layers`: how much was sent; `sending_s`: how long writes of it were in flight."""

    admitted_s: float
    reserved_s: float
    prefilled_s: float
    written_s: float
    adopted_s: float
    page_layers: int
    sending_s: float = 0.0

    @property
    def visible_s(self) -> float:
        """Transfer time that the prefill did not hide (router.visible_transfer_s predicts it)."""
        return max(0.0, self.written_s - max(self.prefilled_s, self.reserved_s))


class HandoffEnded(msgspec.Struct, frozen=True, tag=True):
    """This worker's part is decided; emitted once. On the prefill side `handoff` is the first
    attempt. `first_token`, which prefill sampled: with ADOPTED. `times` and `decode_worker`: with
    SENT."""

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
    """The engine's id of its part of a handoff; one engine may have several attempts."""
    return f"{handoff.request}\x1f{handoff.attempt}\x1f{part.value}"


def handoff_of(id: str) -> tuple[HandoffId, DisaggRole] | None:
    """The inverse of `engine_id`; None for a plain request."""
    request, _, rest = id.partition("\x1f")
    attempt, _, part = rest.partition("\x1f")
    return (HandoffId(request, int(attempt)), DisaggRole(part)) if part else None


def event_of_notice(notice: Notice) -> WriteDone | PagesRevoked | LinkFenced | LinkDown:
    """A transport's notice, for the handoffs."""
    if isinstance(notice, Completed):
        return WriteDone(notice.op, notice.error, notice.checksum)
    if isinstance(notice, Quiesced):
        return PagesRevoked(notice.generation)
    return LinkFenced(notice.link) if isinstance(notice, LinkSevered) else LinkDown(notice.link)
