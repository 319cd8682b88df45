"""The configuration: one frozen tree, resolved once.

Owns: every setting, its default, its help text and its check. Promises: an unknown key or a bad value raises ConfigError, which
names the key and the fix, before any work is done; flags beat the file, the file beats the defaults.
Must not: read the environment, touch a device, load a model.

A flag is a field's name with dashes (`--chunk-tokens 512`); the YAML file has the same names under their section:

    model: {model: smollm2}
    scheduler: {policy: multiplex, split: 1}
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from counterpoint.types import Slo

MAX_INT = 2**63  # of whole numbers, and excluded
TYPE_NAMES: dict[Any, str] = {
    int: "a whole number below 2**63",
    float: "a number",
    bool: "true or false",
    str: "a text",
}


class ConfigError(ValueError):
    """A setting is unknown or wrong; the message names it and says what to write instead."""


def require_positive(name: str, value: float | None) -> None:
    if value is not None and not value > 0:  # NaN is not
        raise ConfigError(f"{name} is {value}: it must be more than 0")


def require_writable(name: str, path: str | Path | None) -> None:
    """Raises ConfigError if no file can be written at `path` (None, or - for standard output: nothing is). To be asked before the
    work of which the file is to tell."""
    if path is None or str(path) == "-":
        return
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"{name} is {path}: that is a folder; name a file in it")
    if not file.parent.is_dir():
        raise ConfigError(f"{name} is {path}: there is no folder {file.parent}; make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{name} is {path}: it may not be written there")


@contextlib.contextmanager
def name_file_in_errors(path: str | Path) -> Iterator[None]:
    """What goes wrong while a file is written (a full disk) names it, as what goes wrong at its opening does by itself."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def setting(default: Any, help: str, secret: bool = False) -> Any:
    """`secret`: its value is never shown."""
    return field(default=default, repr=not secret, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str = setting(
        "smollm2", "a Hugging Face folder, a GGUF file, or a name from `counterpoint models`"
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto", "dummy: random weights from --weights-seed, for measuring speed"
    )
    weights_seed: int = setting(0, "seed of dummy weights")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = setting(
        "auto", "weights and maths; auto: the fastest the device has"
    )
    max_context_tokens: int | None = setting(
        None, "prompt and answer together; unset: what model and memory allow"
    )
    served_name: str | None = setting(None, "the model's name in the API; unset: its own")

    def __post_init__(self) -> None:
        require_positive("max_context_tokens", self.max_context_tokens)
        if not self.model:
            raise ConfigError("model is empty: give a folder, a file or a name, or leave it out")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where it runs."""

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "auto: cuda if there is a usable GPU, else cpu"
    )
    cores: int | None = setting(None, "CPU cores to use; unset: all that this process may use")
    kv_memory_bytes: int | None = setting(
        None, "memory of the KV cache, in bytes; unset: chosen from what is free"
    )
    kv_pages: int | None = setting(None, "pages of the KV cache, instead of --kv-memory-bytes")
    kv_cache_dtype: Literal["auto", "fp8"] = setting("auto", "element type of the KV cache")
    quantization: Literal["none", "fp8"] = setting("none", "weight quantisation")
    page_tokens: int = setting(16, "tokens in a page of the KV cache")
    batch_invariant: bool = setting(
        False,
        "an answer does not depend, in any bit, on what shares its batch or how its prompt is cut; see docs/determinism.md",
    )

    def __post_init__(self) -> None:
        for name in ("cores", "kv_memory_bytes", "kv_pages", "page_tokens"):
            require_positive(name, getattr(self, name))
        if self.kv_pages is not None and self.kv_memory_bytes is not None:
            raise ConfigError(
                "kv_pages and kv_memory_bytes both set the same pool: give one of them"
            )
        if self.batch_invariant and (self.quantization, self.kv_cache_dtype) != ("none", "auto"):
            raise ConfigError(
                "batch_invariant and fp8 exclude each other: leave out quantization and kv_cache_dtype, or it"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs when, and where."""

    policy: Literal["serial", "chunked", "multiplex", "auto"] = setting(
        "auto",
        "serial: whole prompts first; chunked: mixed batches; multiplex: two lanes; auto: what is best for the load",
    )
    chunk_tokens: int | None = setting(
        None, "token budget of a mixed batch (chunked); unset: 512, on a CPU 128"
    )
    split: int | None = setting(
        None, "units (SMs, cores) of the decode lane (multiplex); unset: half on a CPU"
    )
    layer_group: int | None = setting(
        None,
        "layers of a prefill launched at a time (multiplex, serial); unset: chosen by the policy, with serial all",
    )
    max_running: int = setting(256, "requests that hold pages at once")
    max_pass_tokens: int = setting(8192, "prompt tokens in one forward pass")
    max_preemptions: int = setting(
        3, "after so many, a request is given all its pages before it runs again"
    )
    max_bypass_s: float = setting(
        5.0, "a request that does not fit is overtaken for so long, then pages are kept for it"
    )
    prefix_cache: bool = setting(True, "reuse pages of equal prompt beginnings")
    ttft_weight: float = setting(
        1.0, "auto: how much a late first token weighs when both targets can't be met"
    )
    tbt_weight: float = setting(
        10.0, "auto: how much a late next token weighs when both targets can't be met"
    )
    ttft_s: float | None = setting(None, "default target: arrival to first token, seconds")
    ttft_per_token_s: float | None = setting(
        None, "default target: the same per prompt token; the larger of both counts"
    )
    tpot_s: float | None = setting(None, "default target: mean time per output token, seconds")
    itl_s: float | None = setting(None, "default target: longest gap between two tokens, seconds")

    def __post_init__(self) -> None:
        counts = ("chunk_tokens", "split", "layer_group", "max_running", "max_pass_tokens")
        for name in (*counts, "ttft_s", "ttft_per_token_s", "tpot_s", "itl_s"):
            require_positive(name, getattr(self, name))
        for name in ("max_preemptions", "max_bypass_s", "ttft_weight", "tbt_weight"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be 0 or more")
        if (
            self.chunk_tokens == 1
        ):  # a decode that waits for a page would wait for a prompt that waits for the decode
            raise ConfigError(
                "chunk_tokens is 1: it must be 2 or more, for a decode and a token of a prompt beside it"
            )

    def slo(self, prompt_tokens: int) -> Slo:
        """The default targets of a request with such a prompt."""
        ttft_s = self.ttft_s
        if self.ttft_per_token_s is not None:
            ttft_s = max(ttft_s or 0.0, self.ttft_per_token_s * prompt_tokens)
        return Slo(ttft_s, self.tpot_s, self.itl_s)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: a free one, printed")
    drain_s: float = setting(30.0, "on SIGTERM, how long running requests may go on")
    max_body_bytes: int = setting(16 * 2**20, "longest request body, in bytes")
    api_key: str | None = setting(
        None,
        "clients must send this as a Bearer token (/health and /metrics stay open); better COUNTERPOINT_API_KEY",
        secret=True,
    )
    max_queued_requests: int | None = setting(
        None, "answers that may wait for their first token; beyond, 503; unset: no limit"
    )
    max_queued_tokens: int | None = setting(
        None, "prompt tokens that may wait for a first token; beyond, 503; unset: no limit"
    )
    request_timeout_s: float | None = setting(
        None, "after so long an unfinished answer is given up; unset: never"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "what is logged; debug: every request too"
    )
    log_format: Literal["text", "json"] = setting(
        "text", "json: a JSON object a line, with figures as fields"
    )
    otlp_endpoint: str | None = setting(
        None,
        "send a trace span of each request to this OpenTelemetry collector, as http://HOST:4318 (extra: otel)",
    )
    event_log: str | None = setting(
        None, "record every event that enters the engine to this file, for replay"
    )
    timeline: str | None = setting(
        None, "write a Chrome/Perfetto trace of the lanes to this file at exit"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: it must be 0 to 65535")
        for name in (
            "max_body_bytes",
            "max_queued_requests",
            "max_queued_tokens",
            "request_timeout_s",
        ):
            require_positive(name, getattr(self, name))
        if self.api_key is not None and not (
            self.api_key.isascii() and self.api_key.isprintable() and self.api_key.strip()
        ):
            raise ConfigError("api_key must be printable ASCII, and not empty")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(
            ("http://", "https://")
        ):
            raise ConfigError(
                f"otlp_endpoint is {self.otlp_endpoint!r}: it must be a URL, as http://localhost:4318"
            )
        if self.drain_s < 0:
            raise ConfigError(f"drain_s is {self.drain_s}: it must be 0 or more")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Workers: several engines behind one server."""

    prefill: int = setting(0, "workers of this machine that prefill, for others to decode")
    decode: int = setting(0, "workers of this machine that decode what others have prefilled")
    replicas: int = setting(0, "workers of this machine that do both")
    transport: Literal["auto", "shm", "tcp", "nixl", "cuda-ipc"] = setting(
        "auto",
        "how KV goes from worker to worker; auto: the best both ends have; on GPUs, shm and tcp are slow: through host memory",
    )
    kv_grain: Literal["auto", "layer", "chunk", "prompt"] = setting(
        "auto",
        "how much KV is sent at a time, while the rest is computed; auto: layers where that hides enough",
    )
    link_bytes_per_s: float | None = setting(
        None,
        "what links between workers carry, until enough transfers have been measured; unset: 1e9, by CUDA IPC 1e11",
    )
    cluster_listen: str | None = setting(
        None, "HOST:PORT at which `counterpoint worker --join` of other machines is let in"
    )
    ray_address: str | None = setting(
        None,
        "start our workers in a Ray cluster: auto (the one of this machine), HOST:PORT, or local (a new one) (extra: cluster)",
    )
    cluster_host: str | None = setting(
        None, "this machine's address for workers of others; unset: by which it reaches the front"
    )
    cluster_token: str | None = setting(
        None,
        "secret that all workers share; better --cluster-token-file or COUNTERPOINT_CLUSTER_TOKEN",
        secret=True,
    )
    cluster_token_file: str | None = setting(None, "file with that secret")
    on_loss: Literal["fail", "recompute"] = setting(
        "fail", "what becomes of an answer whose worker is lost after its first token"
    )
    handoff_deadline_s: float = setting(
        600.0, "from the start of a prefill to the end of its handoff, at most"
    )
    worker_lost_s: float = setting(
        10.0,
        "a worker that is silent for so long is given up, and started again if it is of this machine",
    )
    local_tokens: int = setting(
        512, "a prompt of which no more must be computed is prefilled where it is decoded; 0: never"
    )
    spill_s: float = setting(
        2.0,
        "predicted time to first token above which the other pool helps, for requests without a target",
    )
    elastic: bool = setting(
        False,
        "let workers change between prefill and decode as the load moves (needs ttft_s and tpot_s)",
    )
    elastic_s: float = setting(
        5.0, "seconds between two looks at the load; three misses in a row change a role"
    )

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "replicas", "local_tokens"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be 0 or more")
        for name in (
            "handoff_deadline_s",
            "worker_lost_s",
            "spill_s",
            "elastic_s",
            "link_bytes_per_s",
        ):
            require_positive(name, getattr(self, name))
        if (
            self.cluster_listen is None
            and not self.replicas
            and bool(self.prefill) != bool(self.decode)
        ):
            here, there = ("prefill", "decode") if self.prefill else ("decode", "prefill")
            raise ConfigError(
                f"{here} is {getattr(self, here)} and {there} is 0: set both, or replicas for workers that do both"
            )
        if self.cluster_listen is not None:
            parse_host_port("cluster_listen", self.cluster_listen)
        if self.ray_address is not None and self.ray_address not in ("auto", "local"):
            if "/" in self.ray_address:
                raise ConfigError(
                    f"ray_address is {self.ray_address!r}: it must be auto, local or HOST:PORT, of a cluster's head"
                )
            parse_host_port("ray_address", self.ray_address)
        if self.ray_address is not None and not self.workers:
            raise ConfigError(
                "ray_address is set, and there are no workers to start: set prefill and decode, or replicas"
            )
        if self.cluster_token is not None and self.cluster_token_file is not None:
            raise ConfigError(
                "cluster_token and cluster_token_file both set the secret: give one of them"
            )

    @property
    def workers(self) -> int:
        """Of this machine."""
        return self.prefill + self.decode + self.replicas

    @property
    def has_pool(self) -> bool:
        return self.workers > 0 or self.cluster_listen is not None


def parse_host_port(name: str, value: str) -> tuple[str, int]:
    """HOST:PORT or [HOST]:PORT, taken apart. Raises ConfigError."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{name} is {value!r}: it must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig = ModelConfig()
    device: DeviceConfig = DeviceConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()

    def replace(self, **flags: Any) -> Config:
        """A copy with flat settings (`chunk_tokens=256`) put in their sections. Raises ConfigError for an unknown name."""
        sections = {name: {} for name in SECTIONS}
        for key, value in flags.items():
            sections[section_of(key)][key] = checked_value(key, value)
        return Config(
            **{
                name: dataclasses.replace(getattr(self, name), **part)
                for name, part in sections.items()
            }
        )


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "device": DeviceConfig,
    "scheduler": SchedulerConfig,
    "server": ServerConfig,
    "cluster": ClusterConfig,
}


def from_mapping(tree: Mapping[str, Any], where: str = "config") -> Config:
    """A Config from a nested mapping (a parsed YAML file). Raises ConfigError naming the first key that is unknown or wrong."""
    flags: dict[str, Any] = {}
    for section, part in tree.items():
        if section not in SECTIONS:
            raise ConfigError(f"{where}: unknown section {section!r}{_hint(section, SECTIONS)}")
        if part is None:  # nothing stands below its name, or all of it is a comment
            continue
        if not isinstance(part, Mapping):
            raise ConfigError(
                f"{where}: section {section!r} must be a mapping of settings, not {type(part).__name__}"
            )
        known = [f.name for f in dataclasses.fields(SECTIONS[section])]
        for key, value in part.items():
            if key not in known:
                raise ConfigError(f"{where}: unknown key {section}.{key}{_hint(key, known)}")
            flags[key] = value
    try:
        return Config().replace(**flags)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def from_file(path: str) -> Config:
    """Read a YAML file. Raises ConfigError if it can't be read, isn't YAML or has an unknown key."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: the file must hold sections ({', '.join(SECTIONS)})")
    return from_mapping(tree, path)


def section_of(key: str) -> str:
    """The section that holds setting `key`."""
    for name, cls in SECTIONS.items():
        if key in {f.name for f in dataclasses.fields(cls)}:
            return name
    every = [f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls)]
    raise ConfigError(f"unknown setting {key!r}{_hint(key, every)}")


def checked_value(key: str, value: Any) -> Any:
    """`value` if it has the type of setting `key`; an int stands for a float. Raises ConfigError."""
    section = SECTIONS[section_of(key)]
    want = typing.get_type_hints(section)[key]
    options = typing.get_args(want) if isinstance(want, types.UnionType) else (want,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif option in (int, float):
            if is_number(value, option):
                return option(value)
        elif type(value) is option or (option is types.NoneType and value is None):
            return value
    names = [
        "one of " + ", ".join(map(str, typing.get_args(o)))
        if typing.get_origin(o) is Literal
        else TYPE_NAMES[o]
        for o in options
        if o is not types.NoneType
    ]
    shown = repr(value) if section.__dataclass_fields__[key].repr else "wrong"
    raise ConfigError(f"{key} is {shown}: it must be {' or '.join(names)}")


def is_number(value: Any, kind: type) -> bool:
    if type(value) is int:
        return abs(value) < MAX_INT
    return kind is float and type(value) is float and not math.isnan(value)


def _hint(key: str, known: Any) -> str:
    near = difflib.get_close_matches(str(key), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
