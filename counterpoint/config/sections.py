"""The five sections of the configuration, a frozen dataclass each.

Owns: the name, default and help text of every setting, and the checks within a section. A bad value
raises ConfigError when the section is made. Must not: read files or the environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from counterpoint.config.checks import ConfigError, check_bounds, parse_host_port, setting
from counterpoint.types import Slo


@dataclass(frozen=True, slots=True)
class ModelConfig:
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
        None, "prompt and answer together; unset: what model and memory allow", above=0
    )
    served_name: str | None = setting(None, "the model's name in the API; unset: its own")

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.model:
            raise ConfigError("model is empty: give a folder, a file or a name, or leave it out")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "auto: cuda if there is a usable GPU, else cpu"
    )
    cores: int | None = setting(
        None, "CPU cores to use; unset: all that this process may use", above=0
    )
    kv_memory_bytes: int | None = setting(
        None, "memory of the KV cache, in bytes; unset: chosen from what is free", above=0
    )
    kv_pages: int | None = setting(
        None, "pages of the KV cache, instead of --kv-memory-bytes", above=0
    )
    kv_cache_dtype: Literal["auto", "fp8"] = setting("auto", "element type of the KV cache")
    quantization: Literal["none", "fp8"] = setting("none", "weight quantisation")
    page_tokens: int = setting(16, "tokens in a page of the KV cache", above=0)
    batch_invariant: bool = setting(
        False,
        "an answer is the same to the bit whatever shares its batch and however its prompt is "
        "chunked; see docs/determinism.md",
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.kv_pages is not None and self.kv_memory_bytes is not None:
            raise ConfigError(
                "kv_pages and kv_memory_bytes both set the same pool: give one of them"
            )
        if self.batch_invariant and (self.quantization, self.kv_cache_dtype) != ("none", "auto"):
            raise ConfigError(
                "batch_invariant and fp8 exclude each other: leave out batch_invariant, or "
                "quantization and kv_cache_dtype"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    policy: Literal["serial", "chunked", "multiplex", "auto"] = setting(
        "auto",
        "serial: whole prompts first; chunked: mixed batches; multiplex: two lanes; "
        "auto: what is best for the load",
    )
    chunk_tokens: int | None = setting(
        None, "token budget of a mixed batch (chunked); unset: 512, on a CPU 128", above=0
    )
    split: int | None = setting(
        None, "units (SMs, cores) of the decode lane (multiplex); unset: half on a CPU", above=0
    )
    layer_group: int | None = setting(
        None,
        "layers of a prefill launched at a time (multiplex, serial); unset: the policy chooses, "
        "serial all",
        above=0,
    )
    max_running: int = setting(256, "requests that hold pages at once", above=0)
    max_pass_tokens: int = setting(8192, "prompt tokens in one forward pass", above=0)
    max_preemptions: int = setting(
        3, "after so many, a request gets all its pages before it runs again", at_least=0
    )
    max_bypass_s: float = setting(
        5.0,
        "seconds for which others may overtake a request that does not fit; then pages are kept "
        "for it",
        at_least=0,
    )
    prefix_cache: bool = setting(True, "reuse pages of equal prompt beginnings")
    ttft_weight: float = setting(
        1.0,
        "auto: weight of a late first token when both targets can't be met",
        at_least=0,
    )
    tbt_weight: float = setting(
        10.0,
        "auto: weight of a late next token when both targets can't be met",
        at_least=0,
    )
    ttft_s: float | None = setting(None, "default target: arrival to first token, seconds", above=0)
    ttft_per_token_s: float | None = setting(
        None, "default target: the same per prompt token; the larger of both counts", above=0
    )
    tpot_s: float | None = setting(
        None, "default target: mean time per output token, seconds", above=0
    )
    itl_s: float | None = setting(
        None, "default target: longest gap between two tokens, seconds", above=0
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        # With 1, a decode that waits for a page would block the prompt that waits for the decode.
        if self.chunk_tokens == 1:
            raise ConfigError(
                "chunk_tokens is 1: it must be 2 or more, for a decode and a prompt token beside it"
            )

    def slo(self, prompt_tokens: int) -> Slo:
        """The default targets of a request whose prompt has `prompt_tokens`."""
        ttft_s = self.ttft_s
        if self.ttft_per_token_s is not None:
            ttft_s = max(ttft_s or 0.0, self.ttft_per_token_s * prompt_tokens)
        return Slo(ttft_s, self.tpot_s, self.itl_s)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: a free one, printed")
    drain_s: float = setting(30.0, "on SIGTERM, how long running requests may go on", at_least=0)
    max_body_bytes: int = setting(16 * 2**20, "longest request body, in bytes", above=0)
    api_key: str | None = setting(
        None,
        "clients must send this as a Bearer token (/health and /metrics stay open); "
        "better COUNTERPOINT_API_KEY",
        secret=True,
    )
    max_queued_requests: int | None = setting(
        None,
        "answers that may wait for their first token; beyond, 503; unset: no limit",
        above=0,
    )
    max_queued_tokens: int | None = setting(
        None,
        "prompt tokens that may wait for a first token; beyond, 503; unset: no limit",
        above=0,
    )
    request_timeout_s: float | None = setting(
        None, "an answer unfinished after so long is aborted; unset: never", above=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "what is logged; debug: every request too"
    )
    log_format: Literal["text", "json"] = setting(
        "text", "json: one JSON object per line, with numbers as fields"
    )
    otlp_endpoint: str | None = setting(
        None,
        "send a trace span of each request to this OpenTelemetry collector, as http://HOST:4318 "
        "(extra: otel)",
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
        check_bounds(self)
        key, url = self.api_key, self.otlp_endpoint
        if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
            raise ConfigError("api_key must be printable ASCII, and not empty")
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_endpoint is {url!r}: it must be a URL, as http://localhost:4318"
            )


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Several engines (workers) behind one server."""

    prefill: int = setting(
        0, "workers of this machine that prefill, for others to decode", at_least=0
    )
    decode: int = setting(
        0, "workers of this machine that decode what others have prefilled", at_least=0
    )
    replicas: int = setting(0, "workers of this machine that do both", at_least=0)
    transport: Literal["auto", "shm", "tcp", "nixl", "cuda-ipc"] = setting(
        "auto",
        "how KV goes from worker to worker; auto: the best both ends have; on GPUs, shm and tcp "
        "are slow: through host memory",
    )
    kv_grain: Literal["auto", "layer", "chunk", "prompt"] = setting(
        "auto",
        "how much KV is sent at a time, while the rest is computed; auto: layers where computing "
        "hides enough of the transfer",
    )
    link_bytes_per_s: float | None = setting(
        None,
        "expected bandwidth between workers, until enough transfers have been measured; "
        "unset: 1e9, by CUDA IPC 1e11",
        above=0,
    )
    cluster_listen: str | None = setting(
        None, "HOST:PORT at which `counterpoint worker --join` of other machines connects"
    )
    ray_address: str | None = setting(
        None,
        "start our workers in a Ray cluster: auto (the one of this machine), HOST:PORT, or local "
        "(a new one) (extra: cluster)",
    )
    cluster_host: str | None = setting(
        None,
        "this machine's address for workers of others; unset: the one from which it reaches the "
        "server",
    )
    cluster_token: str | None = setting(
        None,
        "secret that all workers share; better --cluster-token-file or COUNTERPOINT_CLUSTER_TOKEN",
        secret=True,
    )
    cluster_token_file: str | None = setting(None, "file with that secret")
    on_loss: Literal["fail", "recompute"] = setting(
        "fail", "what happens to an answer whose worker is lost after its first token"
    )
    handoff_deadline_s: float = setting(
        600.0, "longest time from the start of a prefill to the end of its handoff", above=0
    )
    worker_lost_s: float = setting(
        10.0,
        "a worker silent for so long counts as lost; one of this machine is started again",
        above=0,
    )
    local_tokens: int = setting(
        512,
        "a prompt with at most so many tokens to compute is prefilled on its decode worker; "
        "0: never",
        at_least=0,
    )
    spill_s: float = setting(
        2.0,
        "predicted time to first token above which the other pool helps, for requests without a "
        "target",
        above=0,
    )
    elastic: bool = setting(
        False,
        "let workers change between prefill and decode with the load (needs ttft_s and tpot_s)",
    )
    elastic_s: float = setting(
        5.0,
        "seconds between two looks at the load; three misses in a row change a role",
        above=0,
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        one_sided = not self.replicas and bool(self.prefill) != bool(self.decode)
        if self.cluster_listen is None and one_sided:
            present, missing = ("prefill", "decode") if self.prefill else ("decode", "prefill")
            raise ConfigError(
                f"{present} is {getattr(self, present)} and {missing} is 0: set both, or replicas "
                "for workers that do both"
            )
        if self.cluster_listen is not None:
            parse_host_port("cluster_listen", self.cluster_listen)
        self._check_ray_address()
        if self.cluster_token is not None and self.cluster_token_file is not None:
            raise ConfigError(
                "cluster_token and cluster_token_file both set the secret: give one of them"
            )

    def _check_ray_address(self) -> None:
        address = self.ray_address
        if address is None:
            return
        if address not in ("auto", "local"):
            if "/" in address:
                raise ConfigError(
                    f"ray_address is {address!r}: it must be auto, local or HOST:PORT, of a "
                    "cluster's head"
                )
            parse_host_port("ray_address", address)
        if not self.workers:
            raise ConfigError(
                "ray_address is set, and there are no workers to start: set prefill and decode, "
                "or replicas"
            )

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.replicas

    @property
    def has_pool(self) -> bool:
        return self.workers > 0 or self.cluster_listen is not None
