"""The wire between the HTTP process and the engine's process.

Owns: the messages and their encoding. Promises: each message is one frame of msgpack; the first that an engine sends after loading
is a Hello, whose `version` must be ours; the receiver of each direction binds, so a sender never blocks.
Must not: open sockets.
"""

from __future__ import annotations

import msgspec

from counterpoint.config import Config
from counterpoint.stats import Stats
from counterpoint.types import Abort, AddRequest, OutputDelta, RequestTiming, Role

WIRE_VERSION = 2
HEARTBEAT_S = 0.5  # how often an engine's process says that it lives


class StartEngine(msgspec.Struct, frozen=True, kw_only=True):
    """What a new engine process is told, as one line of JSON on its standard input (which it then watches: its end is the end of
    its parent). `system` names the function that builds the engine, "module:function"."""

    config: Config
    system: str
    to_engine: str
    from_engine: str


# ---------------------------------------------------------------- to the engine


class Quit(msgspec.Struct, frozen=True, tag=True):
    """Stop now; what runs is lost."""


ToEngine = AddRequest | Abort | Quit


# ---------------------------------------------------------------- from the engine


class EngineInfo(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine is ready. `kv_tokens`: what the KV cache holds. `lanes`: them in words; `roles`: of lane 0, 1 and so on.
    `notes`: what the user should know."""

    version: int = WIRE_VERSION
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


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """A stage of loading, in words."""

    stage: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The process lives (whatever its device does). `turn_s`: how long ago its loop last came back for events, of which it is
    always given some."""

    turn_s: float = 0.0


class EngineFailure(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or has died. `blame`: "user" if a setting is the cause, which `error` names."""

    error: str
    blame: str = "engine"


class EngineOutputs(msgspec.Struct, frozen=True, tag=True):
    """What one or more turns of the engine gave, at `now_s` on the machine's monotonic clock."""

    items: list[OutputDelta | RequestTiming]
    now_s: float
    stats: Stats | None = None


FromEngine = EngineInfo | LoadProgress | Heartbeat | EngineFailure | EngineOutputs

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(list[ToEngine]).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
