"""The message connection between two workers: who is there, whether KV may pass, and framing.

Owns: the handshake, the choice of transport, and frames (4-byte length, then msgpack). Promises:
both ends prove that they know the cluster's token without sending it; a peer that does not fit
(version, model, no common transport) is refused with a reason that both sides log; nothing larger
than its bound is read. Must not: interpret handoff messages.

    dialer    Challenge(version, nonce)
    acceptor  Challenge(version, nonce, proof)
    dialer    Introduction(proof, worker, digest, endpoint, link number)
    acceptor  Introduction(…) or Refusal         its receiving end is connected now
    dialer    LinkReady or Refusal               and so is the sending end
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import ipaddress
import secrets
from typing import NamedTuple, TypeVar

import msgspec

from counterpoint.disagg.messages import MAX_MESSAGE_BYTES, VERSION
from counterpoint.kv_transfer.memory import PagedMemory
from counterpoint.kv_transfer.transport import Transport
from counterpoint.spec import ModelSpec

HANDSHAKE_BYTES = 1 << 18
HANDSHAKE_S = 5.0
NONCE_BYTES = 32
STAGED = "staged through host memory, slowly, as asked for"
PREFERENCE = ("local", "cuda-ipc", "shm", "nixl", "tcp")  # of transports, the fastest first


class ControlError(ConnectionError):
    """The peer failed the handshake, does not fit, or sent what the protocol does not know."""


class Address(NamedTuple):
    host: str
    port: int


# ---------------------------------------------------------------- whether KV may pass


class CompatibilityDigest(msgspec.Struct, frozen=True, kw_only=True):
    """What two workers must have in common. Tensor parallelism, pool size and policy may differ.

    `weights` identifies the checkpoint (a hash of its files, or a seed for dummy weights): KV of
    other weights has the right shape and is garbage. `layout` is the order of a page's axes.
    `rope` and `model` are hashes of the fields that K depends on.
    """

    protocol: int = VERSION
    model: str
    weights: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    page_tokens: int
    layout: str
    rope: str
    eos_token_ids: tuple[int, ...]


def make_digest(
    spec: ModelSpec, weights: str, kv_dtype: str, page_tokens: int, layout: str = "token, head, dim"
) -> CompatibilityDigest:
    names = [field.name for field in dataclasses.fields(spec)]
    shape = {n: getattr(spec, n) for n in names if n not in ("name", "max_context_tokens")}
    return CompatibilityDigest(
        model=_hash(shape),
        weights=weights,
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=kv_dtype,
        page_tokens=page_tokens,
        layout=layout,
        rope=_hash(dataclasses.asdict(spec.rope)),
        eos_token_ids=spec.eos_token_ids,
    )


def find_mismatch(ours: CompatibilityDigest, theirs: CompatibilityDigest) -> str:
    """The first field that differs, with both values; "" if KV may pass."""
    mine, other = msgspec.structs.asdict(ours), msgspec.structs.asdict(theirs)
    for field in sorted(mine, key="model".__eq__):  # the hash of all fields last: it says least
        if mine[field] != other[field]:
            return f"{field} differs: {mine[field]!r} here, {other[field]!r} there"
    return ""


def _hash(fields: dict[str, object]) -> str:
    text = repr(sorted(fields.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------- which transport carries it


class TransportEndpoint(NamedTuple):
    """Where a worker's KV pool is. Two workers share a `process` or `host` if theirs are equal.
    `device`: cpu or cuda. `transports`: the kinds that the worker has."""

    process: str
    host: str
    device: str
    transports: tuple[str, ...]


class NoTransport(ValueError):
    """The workers have no common transport that may be used; the message says what to change."""


def choose_transport(
    ours: TransportEndpoint, theirs: TransportEndpoint, allow_staged: bool = False
) -> tuple[str, str]:
    """(kind, reason): the first of PREFERENCE that both ends have and that fits where they are.

    `allow_staged`: KV in GPU memory may go through host memory. Raises NoTransport.
    """
    both = [kind for kind in PREFERENCE if kind in ours.transports and kind in theirs.transports]
    same_host = ours.host == theirs.host
    on_gpu = "cuda" in (ours.device, theirs.device)
    for kind in both:
        if kind == "local" and ours.process == theirs.process:
            return kind, "the same process"
        if kind == "cuda-ipc" and same_host and ours.device == theirs.device == "cuda":
            return kind, "GPUs of one host"
        if kind == "shm" and same_host and (allow_staged or not on_gpu):
            return kind, STAGED if on_gpu else "the same host"
        if kind == "nixl":
            return kind, "both have NIXL"
        if kind == "tcp" and (allow_staged or not on_gpu):
            return kind, STAGED if on_gpu else "another host or no shared memory"
    if both and on_gpu:
        raise NoTransport(
            "no common transport between these GPUs: CUDA IPC works within one host only. "
            "Set --transport tcp on all workers to send KV through host memory, slowly"
        )
    here, there = ", ".join(ours.transports), ", ".join(theirs.transports)
    raise NoTransport(f"no common transport: {here} here, {there} there")


# ---------------------------------------------------------------- handshake messages


class Challenge(msgspec.Struct, frozen=True, tag="greeting"):
    version: int
    nonce: bytes
    proof: bytes = b""


class WithProof(msgspec.Struct, frozen=True, kw_only=True):
    """A dialer's introduction, with the proof that it knows the token."""

    proof: bytes = b""


class Introduction(WithProof, frozen=True, tag="introduction", kw_only=True):
    """`link`: the sender's number. `transport`: the kind to use, set by the acceptor.
    `transport_metadata`: by kind, how to reach the sender's pool."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What this worker tells its peers. `transports` are registered, by kind, and gave
    `transport_metadata`. `allow_staged`: KV in GPU memory may go through host memory."""

    worker: str
    digest: CompatibilityDigest
    endpoint: TransportEndpoint
    memory: PagedMemory
    transports: dict[str, Transport]
    transport_metadata: dict[str, bytes]
    token: str = ""
    allow_staged: bool = False

    def introduce(
        self, link: int, offered: tuple[str, ...], chosen: str = "", proof: bytes = b""
    ) -> Introduction:
        """`offered`: kinds of transport."""
        return Introduction(
            worker=self.worker,
            link=link,
            digest=self.digest,
            endpoint=self.endpoint._replace(transports=offered),
            transport_metadata={kind: self.transport_metadata[kind] for kind in offered},
            transport=chosen,
            proof=proof,
        )


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
    """Raises ControlError if other machines could reach a worker without a token."""
    if not is_local(host) and not token:
        raise ControlError(
            f"the control port on {host} needs a token that all workers share: "
            "set --cluster-token-file"
        )


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def new_incarnation() -> int:
    return secrets.randbits(62) + 1


def make_proof(token: str, role: str, first: bytes, second: bytes) -> bytes:
    """HMAC over the role and both nonces; only a holder of `token` can compute it."""
    return hmac.new(token.encode(), role.encode() + first + second, hashlib.sha256).digest()


class FramedConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read_frame(self, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
        """Raises ControlError if the frame is larger, IncompleteReadError at the end."""
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        if size > max_bytes:
            raise ControlError(f"a frame of {size} bytes: at most {max_bytes} are accepted here")
        return await self.reader.readexactly(size)

    def write_frame(self, data: bytes) -> None:
        self.writer.write(len(data).to_bytes(4, "big") + data)

    def close(self) -> None:
        self.writer.close()

    @property
    def unsent_bytes(self) -> int:
        return self.writer.transport.get_write_buffer_size()

    # ------------------------------------------------------------ handshakes

    def send(self, message: msgspec.Struct) -> None:
        self.write_frame(_encode(message))

    async def receive(self, kind: type[T]) -> T:
        """The next handshake message. Raises ControlError if it is a Refusal or no `kind`."""
        try:
            frame = await self.read_frame(HANDSHAKE_BYTES)
            message = msgspec.msgpack.decode(frame, type=kind | Refusal)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ControlError(f"not a worker's handshake: {error}") from None
        except asyncio.IncompleteReadError:
            raise ControlError("the peer closed the connection during the handshake") from None
        if isinstance(message, Refusal):
            raise ControlError(message.reason)
        return message


async def dial_handshake(connection: FramedConnection, token: str) -> bytes:
    """The dialer's first half: check the acceptor's proof. Returns the dialer's own."""
    nonce = new_nonce()
    connection.send(Challenge(VERSION, nonce))
    answer = await connection.receive(Challenge)
    check_version(answer)
    if not hmac.compare_digest(answer.proof, make_proof(token, "accept", nonce, answer.nonce)):
        raise ControlError("the worker that answers does not have this cluster's token")
    return make_proof(token, "dial", answer.nonce, nonce)


async def accept_handshake(connection: FramedConnection, token: str, kind: type[P]) -> P:
    """The acceptor's first half. Returns the dialer's introduction, its proof checked."""
    challenge = await connection.receive(Challenge)
    check_version(challenge)
    nonce = new_nonce()
    proof = make_proof(token, "accept", challenge.nonce, nonce)
    connection.send(Challenge(VERSION, nonce, proof))
    introduction = await connection.receive(kind)
    expected = make_proof(token, "dial", nonce, challenge.nonce)
    if not hmac.compare_digest(introduction.proof, expected):
        raise ControlError("the dialer does not have this cluster's token")
    return introduction


def check_version(challenge: Challenge) -> None:
    if challenge.version != VERSION or len(challenge.nonce) != NONCE_BYTES:
        raise ControlError(f"protocol differs: {VERSION} here, {challenge.version} there")
