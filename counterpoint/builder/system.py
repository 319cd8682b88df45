"""One engine on one device, as a value, and what follows from a Config for any device.

Must not: know a concrete executor (build.py does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.config import Config, ConfigError
from counterpoint.core.engine import Engine
from counterpoint.core.limits import EngineLimits
from counterpoint.core.policy import Auto
from counterpoint.cost_model.calibration import CalibrationKey
from counterpoint.cost_model.roofline import Roofline
from counterpoint.disagg.compatibility import CompatibilityDigest, make_digest
from counterpoint.interfaces import Executor
from counterpoint.kv_transfer.memory import Allocate, KvMemory
from counterpoint.spec import ModelSpec
from counterpoint.spec.source import ModelSource, weights_fingerprint

if TYPE_CHECKING:
    from counterpoint.device.event_queue import WallClockEventQueue
    from counterpoint.device.grammar import Grammars
    from counterpoint.model.kv import KVPool


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """Where an engine of a pool is built. `engines`: how many share the memory of this machine, or
    of this GPU. `allocate` makes the KV pool's memory where other processes must reach it; None:
    the pool allocates its own."""

    device: str = "cpu"
    engines: int = 1
    allocate: Allocate | None = None


@dataclass(frozen=True, slots=True)
class CalibrationTarget:
    """What a calibration of this engine measures. `key`: what the measurements are valid for;
    `prior`: the estimator without measurements; `levels`: decode units of each possible split;
    `buckets`: padded sizes of decode batches; `pass_buckets`: padded rows of passes with prompt
    tokens."""

    key: CalibrationKey
    prior: Roofline
    levels: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    pass_buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class System:
    """One engine on one device. `lanes` describes them in words; `notes` are for the user (a
    fallback, say). `grammars` compiles grammars before their requests arrive; None: the device
    supports none. `rebuild(config, inbox, auto)` makes another engine on the same device, after
    this one is closed; `auto` is as in make_policy. `memory` and `digest` describe the KV pool to
    other workers; None where they can't reach it."""

    engine: Engine
    executor: Executor
    spec: ModelSpec
    source: ModelSource
    limits: EngineLimits
    lanes: str
    notes: tuple[str, ...] = ()
    grammars: Grammars | None = None
    calibration_target: CalibrationTarget | None = None
    rebuild: Callable[[Config, WallClockEventQueue, type[Auto]], System] | None = None
    memory: KvMemory | None = None
    digest: CompatibilityDigest | None = None


def make_limits(
    config: Config, spec: ModelSpec, pages: int, units: int, overlap: bool = False
) -> EngineLimits:
    """The engine's limits for a pool of `pages` on a device of `units`. Raises ConfigError if no
    request could run."""
    scheduler, page_tokens = config.scheduler, config.device.page_tokens
    wanted = config.model.max_context_tokens or spec.max_context_tokens
    if wanted > spec.max_context_tokens:
        raise ConfigError(
            f"max_context_tokens is {wanted}: {spec.name} was made for at most "
            f"{spec.max_context_tokens}"
        )
    context = min(wanted, pages * page_tokens)
    if config.model.max_context_tokens and context < wanted:
        raise ConfigError(
            f"max_context_tokens is {wanted}, but the KV cache holds {context} tokens: set "
            f"kv_memory_bytes or kv_pages (at least {-(-wanted // page_tokens)}) higher"
        )
    return EngineLimits(
        pages=pages,
        page_tokens=page_tokens,
        max_running=scheduler.max_running,
        max_context_tokens=context,
        max_pass_tokens=scheduler.max_pass_tokens,
        eos_token_ids=spec.eos_token_ids,
        units=units,
        layers=spec.layers,
        overlap=overlap,
        max_preemptions=scheduler.max_preemptions,
        max_bypass_s=scheduler.max_bypass_s,
        prefix_cache=scheduler.prefix_cache,
    )


def make_compatibility_digest(
    config: Config, source: ModelSource, spec: ModelSpec, kv: KVPool
) -> CompatibilityDigest:
    """Digest of what two workers must have in common for one to read the other's KV."""
    from counterpoint.device.kv_memory import page_layout

    seed = config.model.weights_seed if config.model.load_format == "dummy" else None
    return make_digest(
        spec, weights_fingerprint(source, seed), str(kv.k[0].dtype), kv.page_tokens, page_layout(kv)
    )


def tokenizer_vocab(source: ModelSource, spec: ModelSpec) -> int:
    """Number of ids that the tokenizer has. A checkpoint may pad its vocabulary beyond them; the
    padding is never sampled."""
    file = Path(source.path) / "tokenizer.json"
    if source.kind != "hf" or not file.is_file():
        return spec.vocab
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values()
    return min(spec.vocab, max(ids) + 1)


def element_types(config: Config, dtype: object) -> tuple[str, str]:
    """Element types of weights and KV cache as the roofline names them; `dtype` unless fp8."""
    plain = str(dtype).removeprefix("torch.")
    weights = "fp8" if config.device.quantization == "fp8" else plain
    return weights, "fp8" if config.device.kv_cache_dtype == "fp8" else plain
