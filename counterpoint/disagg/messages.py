"""What two workers say to each other about handoffs: the wire.

Owns: the messages, their version, their bounds, their encoding (msgpack; nothing on the wire can run code).
Promises: `decode` gives a whole message of a known type or raises WireError; every message names its handoff, both ends of the
link (`source`, `destination`: incarnations) and, once pages are reserved, the `generation` of the reservation.
Must not: carry KV (device/link does), timestamps (durations only: clocks differ), or decide anything.

A *link* joins a worker that prefills to one that decodes, in this direction. Each end draws a random *incarnation* when the link is
made, so messages of a dead process, or of a link that was torn down, match no living end and are dropped.

    prefill -> decode                         decode -> prefill
    Offer      a request will be handed on    Queued     no pages yet; the handoff is in the decode worker's queue
    Streaming  the reservation is in use      Reserve    these pages may be written under this generation
    Done       all is written; first token    Ack        adopted: the source pages may go
    Abort      I have stopped posting         Abort      stop posting
    Drained    nothing of mine is in flight   Drained    I hold nothing (an answer to Drained needs none)
                                              Heartbeat  in both directions; `leases` are handoffs not to be forgotten
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
    """`request`: unique among all that live in the cluster. `attempt`: 1, 2, … as the request is tried again."""

    request: str
    attempt: int


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of the answer. `cached_tokens`, with the first: prompt tokens that the prefill worker had in its cache."""

    token: int
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0


class HandoffMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`source` and `destination` are the incarnations of the link's ends; `generation` is 0 while nothing is reserved."""

    handoff: HandoffId
    source: int
    destination: int
    generation: int


class HandoffOffer(HandoffMessage, frozen=True, tag="offer"):
    """`deadline_s`: the handoff is given up after so many seconds from now."""

    request: AddRequest
    deadline_s: float


class OfferQueued(HandoffMessage, frozen=True, tag="queued"):
    pass


class PagesReserved(HandoffMessage, frozen=True, tag="reserve"):
    """`pages` for all but the first `cached` pages of the request, whose content the decode worker has."""

    pages: Pages
    cached: int


class TransferStarted(HandoffMessage, frozen=True, tag="streaming"):
    pass


class TransferDone(HandoffMessage, frozen=True, tag="done"):
    """`page_layers`: how many (page, layer) pairs were written; `checksum` of them (kv_transfer/memory.py), if both ends sum."""

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
        raise WireError(f"message of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} are taken")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a handoff message: {error}") from None
