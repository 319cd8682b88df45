"""How a worker and the front of its pool talk: the words, and who may say them.

Owns: the messages and the handshake. Promises: both ends prove that they know the cluster's token; versions are compared before
anything else is; every message is one frame of msgpack of a known type (nothing on the wire can run code), and bounded.
Must not: decide, or hold a connection.

    worker   Greeting, then Join (who it is)                  cluster/peer_connection.py: nonces and proofs
    front    Welcome or Refusal
    worker   Progress …, then Ready or Failed; then Said … and, before it goes, Leaving; a Beat all the while
    front    Orders …, Farewell
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
from counterpoint.serve.worker.wire import EngineFailure, EngineInfo, Heartbeat, LoadProgress
from counterpoint.types import OutputDelta, RequestTiming, Role, Stats

MAX_FRAME_BYTES = 64 << 20
T = TypeVar("T")


class Register(WithProof, frozen=True, tag="join", kw_only=True):
    """`worker`: its name, unique in the cluster."""

    worker: str
    role: Role
    version: str = counterpoint.__version__


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    pass


# ---------------------------------------------------------------- from the front


class WorkerOrder(msgspec.Struct, frozen=True):
    """`to`: the decode worker that a Start or Redirect is to be linked to."""

    order: handoff_events.Order
    decode_address: Address | None = None


class Orders(msgspec.Struct, frozen=True, tag=True):
    items: list[WorkerOrder]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop. `reason` is empty if nothing is wrong with the worker."""

    reason: str = ""


FromFrontend = Orders | Shutdown


# ---------------------------------------------------------------- from the worker


class WorkerReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine runs. `address`: where other workers dial it. `kinds`: its movers of KV. `gpu`: its GPU's name, if it
    has one. `kv_bytes_per_token`: in all layers."""

    engine_info: EngineInfo
    address: Address
    digest: CompatibilityDigest
    transports: tuple[str, ...]
    units: int
    kv_bytes_per_token: int
    gpu: str = ""


class HandoffStats(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's handoffs now: how many are in which state, and the pages they hold by kind (disagg/page_ledger.py). `links`: by mover.
    `strays`: messages that nothing here expected, so far. `bytes_sent`: of KV, so far."""

    states: dict[str, int] = {}
    pages: dict[str, int] = {}
    links: dict[str, int] = {}
    unexpected: int = 0
    bytes_sent: int = 0

    @property
    def is_empty(self) -> bool:
        return not any(self.states.values()) and not any(self.pages.values())


class WorkerReport(msgspec.Struct, frozen=True, tag=True):
    """What a turn of the engine gave, or the courier reports."""

    items: Sequence[
        OutputDelta | RequestTiming | handoff_events.HandoffEnded | handoff_events.Reroute
    ] = ()
    stats: Stats | None = None
    handoff_stats: HandoffStats | None = None


class WorkerLeaving(msgspec.Struct, frozen=True, tag=True):
    """It takes nothing new, and goes when it has finished what it has."""


FromWorker = LoadProgress | EngineFailure | WorkerReady | WorkerReport | WorkerLeaving | Heartbeat

encode = msgspec.msgpack.Encoder().encode
_from_front = msgspec.msgpack.Decoder(FromFrontend)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


async def read_from_frontend(wire: FramedConnection) -> FromFrontend:
    """Raises OSError, IncompleteReadError or WireError when the connection has ended or is not to be trusted."""
    return _decoded(_from_front, await wire.read_frame(MAX_FRAME_BYTES))


async def read_from_worker(wire: FramedConnection) -> FromWorker:
    """As hear_front."""
    return _decoded(_from_worker, await wire.read_frame(MAX_FRAME_BYTES))


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a word of this protocol: {error}") from None


# ---------------------------------------------------------------- the handshake


async def register(front: Address, token: str, me: Register) -> FramedConnection:
    """A connection on which the front has said Welcome. Raises ControlError with its reason, or OSError."""
    wire = FramedConnection(*await asyncio.open_connection(*front))
    try:
        async with asyncio.timeout(peer_connection.HANDSHAKE_S):
            proof = await peer_connection.dial_handshake(wire, token)
            wire.send(msgspec.structs.replace(me, proof=proof))
            await wire.receive(Welcome)
    except BaseException:
        wire.close()
        raise
    return wire


async def accept_worker(
    wire: FramedConnection, token: str, objection: Callable[[Register], str]
) -> Register:
    """The front's side: who joins, after the proof, the version and `objection` (why not, or ""). Raises ControlError."""
    async with asyncio.timeout(peer_connection.HANDSHAKE_S):
        joined = await peer_connection.accept_handshake(wire, token, Register)
    problem = objection(joined)
    if joined.version != counterpoint.__version__:
        problem = (
            f"versions differ: counterpoint {counterpoint.__version__} here, {joined.version} there"
        )
    if problem:
        wire.send(Refusal(problem))
        raise ControlError(f"{joined.worker}: {problem}")
    wire.send(Welcome())
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
