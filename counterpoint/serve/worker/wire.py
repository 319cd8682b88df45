"""Messages between a server and its workers, and the handshake that precedes them.

Owns: all messages of the one wire, for a server of one engine as for a pool. Promises: both ends
prove that they know the token; versions are compared before any other message; each message is one
msgpack frame of a known type, so nothing on the wire can run code.
Must not: decide anything, or hold a connection.

    worker   Challenge, then Register          disagg/peer_connection.py: nonces and proofs
    server   Welcome or Refusal
    worker   LoadProgress …, then WorkerReady or EngineFailure; then EngineOutputs …; Heartbeat
             all the while; WorkerLeaving before it goes
    server   EngineRequests … (one engine) or Orders … (a pool), then Shutdown
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

import counterpoint
from counterpoint.config import Config, ConfigError
from counterpoint.disagg import handoff_events, peer_connection
from counterpoint.disagg.messages import WireError
from counterpoint.disagg.peer_connection import (
    Address,
    CompatibilityDigest,
    ControlError,
    FramedConnection,
    Refusal,
    WithProof,
)
from counterpoint.stats import Stats
from counterpoint.types import Abort, AddRequest, OutputDelta, RequestTiming, Role

HEARTBEAT_S = 0.5  # between two heartbeats of a worker
MAX_FRAME_BYTES = 64 << 20  # from a worker
MAX_REQUEST_BYTES = (1 << 32) - 1  # from the server: what a frame's length can say
T = TypeVar("T")


class StartWorker(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker starts: one line of JSON on its standard input.

    `system` names the function that builds the engine, "module:function". `in_pool`: it exchanges
    KV with other workers. `cores`: those it may use (empty: all). `engines`: workers that share
    this machine's memory; `rank`: its number among them, by which GPUs are dealt out (None: it was
    given its GPU). `port`: where other workers dial it (0: any). `reconnects`: it looks for its
    server again when the connection is lost.
    """

    config: Config
    system: str
    name: str
    role: Role
    frontend: Address
    token: str
    in_pool: bool = True
    cores: tuple[int, ...] = ()
    engines: int = 1
    rank: int | None = None
    port: int = 0
    reconnects: bool = False


# ---------------------------------------------------------------- the handshake's messages


class Register(WithProof, frozen=True, tag="join", kw_only=True):
    """`worker`: its name, unique in the cluster."""

    worker: str
    role: Role
    version: str = counterpoint.__version__


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    pass


# ---------------------------------------------------------------- from the server


class EngineRequests(msgspec.Struct, frozen=True, tag=True):
    """Events for the engine itself, in this order. A server of one engine sends these."""

    items: Sequence[AddRequest | Abort]


class WorkerOrder(msgspec.Struct, frozen=True):
    """`decode_address`: the decode worker to link to, for StartHandoff and Redirect."""

    order: handoff_events.Order
    decode_address: Address | None = None


class Orders(msgspec.Struct, frozen=True, tag=True):
    """For a worker's handoffs. A pool sends these."""

    items: list[WorkerOrder]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop now; what runs is lost. `reason`: what is wrong with the worker, if anything."""

    reason: str = ""


FromFrontend = EngineRequests | Orders | Shutdown


# ---------------------------------------------------------------- from the worker


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_tokens`: capacity of the KV cache. `lanes`: a description; `roles`: of lane 0, 1 and so
    on. `notes`: for the user, a fallback say."""

    pid: int
    policy: str
    lanes: str
    roles: tuple[Role, ...]
    vocab: int
    max_context_tokens: int
    page_tokens: int
    kv_tokens: int
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


class KvEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How other workers reach this worker's KV. `address`: where they dial it.
    `bytes_per_token`: in all layers."""

    address: Address
    digest: CompatibilityDigest
    transports: tuple[str, ...]
    bytes_per_token: int


class WorkerReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine runs. `gpu`: its GPU's name, if it has one. `kv`: in a pool."""

    engine_info: EngineInfo
    units: int
    gpu: str = ""
    kv: KvEndpoint | None = None


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """`stage` of loading, in words."""

    stage: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The process runs. `turn_s`: seconds since its engine's loop last asked for events; the loop
    is woken with each heartbeat, so it grows only if the loop is stuck."""

    turn_s: float = 0.0


class EngineFailure(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or has died. `blame`: "user" if a setting that `error` names is
    the cause."""

    error: str
    blame: str = "engine"


class HandoffStats(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's handoffs now: counts by state, pages by kind of hold (disagg/page_ledger.py),
    links by transport. `unexpected`: messages that nothing here waited for, so far. `bytes_sent`:
    of KV, so far."""

    states: dict[str, int] = {}
    pages: dict[str, int] = {}
    links: dict[str, int] = {}
    unexpected: int = 0
    bytes_sent: int = 0

    @property
    def is_empty(self) -> bool:
        return not any(self.states.values()) and not any(self.pages.values())


class EngineOutputs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Outputs of one turn of the engine, at `now_s` on its machine's monotonic clock, or reports of
    a worker's handoffs."""

    items: Sequence[
        OutputDelta | RequestTiming | handoff_events.HandoffEnded | handoff_events.Reroute
    ] = ()
    now_s: float = 0.0
    stats: Stats | None = None
    handoff_stats: HandoffStats | None = None


class WorkerLeaving(msgspec.Struct, frozen=True, tag=True):
    """It takes nothing new, and goes when it has finished what it has."""


FromWorker = LoadProgress | EngineFailure | WorkerReady | EngineOutputs | WorkerLeaving | Heartbeat

encode = msgspec.msgpack.Encoder().encode
_from_frontend = msgspec.msgpack.Decoder(FromFrontend)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


async def read_from_frontend(connection: FramedConnection) -> FromFrontend:
    """Raises OSError, IncompleteReadError or WireError when the connection has ended or carries
    anything else."""
    return _decoded(_from_frontend, await connection.read_frame(MAX_REQUEST_BYTES))


async def read_from_worker(connection: FramedConnection) -> FromWorker:
    """Raises as `read_from_frontend`."""
    return _decoded(_from_worker, await connection.read_frame(MAX_FRAME_BYTES))


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error}") from None


# ---------------------------------------------------------------- the handshake


async def register(frontend: Address, token: str, me: Register) -> FramedConnection:
    """A connection on which the server has said Welcome. Raises ControlError with its reason, or
    OSError."""
    connection = FramedConnection(*await asyncio.open_connection(*frontend))
    try:
        async with asyncio.timeout(peer_connection.HANDSHAKE_S):
            proof = await peer_connection.dial_handshake(connection, token)
            connection.send(msgspec.structs.replace(me, proof=proof))
            await connection.receive(Welcome)
    except BaseException:
        connection.close()
        raise
    return connection


async def accept_worker(
    connection: FramedConnection, token: str, objection: Callable[[Register], str]
) -> Register:
    """The server's side: proof, version and `objection` (a reason, or "") are checked in this
    order. Raises ControlError."""
    async with asyncio.timeout(peer_connection.HANDSHAKE_S):
        joined = await peer_connection.accept_handshake(connection, token, Register)
    problem = objection(joined)
    if joined.version != counterpoint.__version__:
        problem = (
            f"versions differ: counterpoint {counterpoint.__version__} here, {joined.version} there"
        )
    if problem:
        connection.send(Refusal(problem))
        raise ControlError(f"{joined.worker}: {problem}")
    connection.send(Welcome())
    return joined


def read_cluster_token(config: Config) -> str:
    """The cluster's secret, "" if none is set. Raises ConfigError if its file can't be read."""
    cluster = config.cluster
    if cluster.cluster_token_file is None:
        return cluster.cluster_token or ""
    try:
        return Path(cluster.cluster_token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cluster_token_file {cluster.cluster_token_file!r} can't be read: {error}"
        ) from None
