"""The control connection of a link: who is there, may it talk, and messages in frames.

Owns: the handshake and the framing (4-byte length, then msgpack). Promises: both ends prove that they know the cluster's token
without sending it; what does not fit (version, digest, no mover in common) is refused with a reason that both sides log; nothing
larger than its bound is read.
Must not: interpret handoff messages.

    dialer    Greeting(version, nonce)
    acceptor  Greeting(version, nonce, proof)
    dialer    Introduction(proof, who, digest, how to reach its pool, link number)
    acceptor  Introduction(…) or Refusal         its reading end is connected now
    dialer    Ready or Refusal                   and so is the writing end
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
from typing import NamedTuple, TypeVar

import msgspec

from counterpoint.disagg.compatibility import CompatibilityDigest
from counterpoint.disagg.link_choice import TransportEndpoint
from counterpoint.disagg.messages import MAX_MESSAGE_BYTES, VERSION

HANDSHAKE_BYTES = 1 << 18
HANDSHAKE_S = 5.0
NONCE_BYTES = 32


class ControlError(ConnectionError):
    """The other end is not who it should be, does not fit, or does not speak this language."""


class Address(NamedTuple):
    host: str
    port: int


class Challenge(msgspec.Struct, frozen=True, tag="greeting"):
    version: int
    nonce: bytes
    proof: bytes = b""


class WithProof(msgspec.Struct, frozen=True, kw_only=True):
    """How a dialer introduces itself, with the proof that it knows the token."""

    proof: bytes = b""


class Introduction(WithProof, frozen=True, tag="introduction", kw_only=True):
    """`link`: this end's incarnation. `kind`: the mover to use, from the acceptor. `blobs`: by mover."""

    worker: str
    link: int
    digest: CompatibilityDigest
    endpoint: TransportEndpoint
    transport_metadata: dict[str, bytes]
    transport: str = ""


class LinkReady(msgspec.Struct, frozen=True, tag="ready"):
    pass


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    reason: str


T = TypeVar("T", bound=msgspec.Struct)
P = TypeVar("P", bound=WithProof)
_encode = msgspec.msgpack.encode


def is_local(host: str) -> bool:
    """Only processes of this machine reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, token: str) -> None:
    """Raises ControlError if workers could be reached from elsewhere without a token."""
    if not is_local(host) and not token:
        raise ControlError(
            f"the control port on {host} needs a token that all workers share: set --cluster-token-file"
        )


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def new_incarnation() -> int:
    return secrets.randbits(62) + 1


def make_proof(token: str, role: str, first: bytes, second: bytes) -> bytes:
    """What only one who knows `token` can say: an HMAC over the role and both nonces."""
    return hmac.new(token.encode(), role.encode() + first + second, hashlib.sha256).digest()


class FramedConnection:
    """Frames over a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read_frame(self, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
        """The next frame. Raises ControlError if it is larger than `most`, IncompleteReadError at the end."""
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        if size > max_bytes:
            raise ControlError(f"a frame of {size} bytes: at most {max_bytes} are taken here")
        return await self.reader.readexactly(size)

    def write_frame(self, data: bytes) -> None:
        self.writer.write(len(data).to_bytes(4, "big") + data)

    def close(self) -> None:
        self.writer.close()

    @property
    def unsent_bytes(self) -> int:
        return self.writer.transport.get_write_buffer_size()

    # ------------------------------------------------------------ handshakes

    def send(self, word: msgspec.Struct) -> None:
        self.write_frame(_encode(word))

    async def receive(self, kind: type[T]) -> T:
        """The next word of the handshake, which must be a `kind`. Raises ControlError with the reason of a Refusal."""
        try:
            word = msgspec.msgpack.decode(
                await self.read_frame(HANDSHAKE_BYTES), type=kind | Refusal
            )
        except (msgspec.DecodeError, RecursionError) as error:
            raise ControlError(f"not a worker's handshake: {error}") from None
        except asyncio.IncompleteReadError:
            raise ControlError("the other end hung up in the handshake") from None
        if isinstance(word, Refusal):
            raise ControlError(word.reason)
        return word


async def dial_handshake(wire: FramedConnection, token: str) -> bytes:
    """The dialer's first half: checks the acceptor's proof and gives its own."""
    nonce = new_nonce()
    wire.send(Challenge(VERSION, nonce))
    answer = await wire.receive(Challenge)
    check_version(answer)
    if not hmac.compare_digest(answer.proof, make_proof(token, "accept", nonce, answer.nonce)):
        raise ControlError("the worker that answers does not have this cluster's token")
    return make_proof(token, "dial", answer.nonce, nonce)


async def accept_handshake(wire: FramedConnection, token: str, kind: type[P]) -> P:
    """The acceptor's first half: how the dialer introduces itself (a `kind`), once its proof is checked."""
    greeting = await wire.receive(Challenge)
    check_version(greeting)
    nonce = new_nonce()
    wire.send(Challenge(VERSION, nonce, make_proof(token, "accept", greeting.nonce, nonce)))
    introduction = await wire.receive(kind)
    if not hmac.compare_digest(
        introduction.proof, make_proof(token, "dial", nonce, greeting.nonce)
    ):
        raise ControlError("the dialer does not have this cluster's token")
    return introduction


def check_version(greeting: Challenge) -> None:
    if greeting.version != VERSION or len(greeting.nonce) != NONCE_BYTES:
        raise ControlError(f"protocol differs: {VERSION} here, {greeting.version} there")
