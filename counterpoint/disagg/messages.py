"""Messages between two workers about handoffs: the wire format.

Owns: the messages, their version, bounds and encoding (msgpack; nothing on the wire can run code).
Promises: `decode` returns a whole message of a known type or raises WireError. Every message names
its handoff, both ends of the link (`source`, `destination`) and, once pages are reserved, the
`generation` of the reservation. Must not: carry KV (kv_transfer does), or
timestamps (clocks differ).

A *link* joins a prefill worker to a decode worker. Each end draws a random *incarnation* when the
link is made, so messages of a dead process or a closed link match no live end and are dropped.

    prefill -> decode                                 decode -> prefill
    HandoffOffer     a request will be handed over    OfferQueued     no pages yet
    TransferStarted  the reservation is in use        PagesReserved   pages that may be written
    TransferDone     all is written; first token      TransferAck     adopted: release the source
    AbortHandoff     I post no more writes            AbortHandoff    post no more writes
    HandoffDrained   nothing of mine is in flight     HandoffDrained  I hold nothing
    LinkHeartbeat, in both directions; `leases`: handoffs that are still queued or running
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from counterpoint.types import AddRequest, TokenLogprobs

VERSION = 1
MAX_MESSAGE_BYTES = 16 << 20
MAX_LEASES = 1024

Reason = Annotated[str, msgspec.Meta(max_length=500)]
Pages = Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 20)]
Leases = Annotated[tuple["HandoffId", ...], msgspec.Meta(max_length=MAX_LEASES)]


class WireError(ValueError):
    """Bytes that are no message of this version, or a message that is too large."""


class HandoffId(NamedTuple):
    """`request`: unique in the cluster. `attempt`: 1, 2, … as the request is retried."""

    request: str
    attempt: int


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """`cached_tokens`, with the first: prompt tokens that the prefill worker had cached."""

    token: int
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0


class HandoffMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`source`, `destination`: incarnations of the link's ends. `generation`: 0 before pages are
    reserved."""

    handoff: HandoffId
    source: int
    destination: int
    generation: int


class HandoffOffer(HandoffMessage, frozen=True, tag="offer"):
    """`deadline_s`: from now until the handoff fails."""

    request: AddRequest
    deadline_s: float


class OfferQueued(HandoffMessage, frozen=True, tag="queued"):
    pass


class PagesReserved(HandoffMessage, frozen=True, tag="reserve"):
    """`pages` for all but the request's first `cached` pages, which the decode worker has."""

    pages: Pages
    cached: int


class TransferStarted(HandoffMessage, frozen=True, tag="streaming"):
    pass


class TransferDone(HandoffMessage, frozen=True, tag="done"):
    """`page_layers`: how many (page, layer) pairs were written. `checksum` of them, if both ends
    compute it (kv_transfer/memory.py)."""

    first_token: SampledToken
    page_layers: int
    checksum: int | None = None


class TransferAck(HandoffMessage, frozen=True, tag="ack"):
    pass


class AbortHandoff(HandoffMessage, frozen=True, tag="abort"):
    reason: Reason


class HandoffDrained(HandoffMessage, frozen=True, tag="drained"):
    reason: Reason


class LinkHeartbeat(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="beat"):
    source: int
    destination: int
    leases: Leases = ()


Message = (
    HandoffOffer
    | OfferQueued
    | PagesReserved
    | TransferStarted
    | TransferDone
    | TransferAck
    | AbortHandoff
    | HandoffDrained
    | LinkHeartbeat
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Raises WireError if the message is larger than MAX_MESSAGE_BYTES."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"{type(message).__name__} of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} are sent"
        )
    return data


def decode(data: bytes | memoryview) -> Message:
    """Raises WireError for anything but one whole message within the bounds."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a handoff message: {error}") from None
