"""The composition root: from a Config to a running engine.

Owns: which concrete classes stand behind the seams; what the environment says (the cache folder, OMP settings).
Promises: everything that can be refused is refused here, before weights are read, with an error that names the setting.
Must not: decide, schedule or compute.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from counterpoint.config import Config, ConfigError
from counterpoint.core.engine import Engine, Limits
from counterpoint.core.policy import make_policy
from counterpoint.ports import Executor
from counterpoint.spec import ModelSpec
from counterpoint.spec.source import Source, resolve

Progress = Callable[[str], None]


def cache_folder() -> Path:
    """Where pulled models and what is derived from them are kept: COUNTERPOINT_CACHE, or the user's cache folder."""
    named = os.environ.get("COUNTERPOINT_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / "counterpoint"


def find_model(config: Config) -> Source:
    """Where the configured model is. Raises ConfigError if it is nowhere."""
    return resolve(config.model.model, cache_folder())


@dataclass(frozen=True, slots=True)
class System:
    """One engine on one device. `lanes` describes them in words; `notes` are things the user should know (a fallback, say)."""

    engine: Engine
    executor: Executor
    spec: ModelSpec
    source: Source
    limits: Limits
    lanes: str
    notes: tuple[str, ...] = ()


def make_limits(config: Config, spec: ModelSpec, pages: int, units: int, overlap: bool = False) -> Limits:
    """The engine's limits for a pool of `pages` on a device of `units`. Raises ConfigError if no request could run."""
    scheduler, page_tokens = config.scheduler, config.device.page_tokens
    wanted = config.model.max_context_tokens or spec.max_context_tokens
    if wanted > spec.max_context_tokens:
        raise ConfigError(f"max_context_tokens is {wanted}: {spec.name} was made for at most {spec.max_context_tokens}")
    context = min(wanted, pages * page_tokens)
    if config.model.max_context_tokens and context < wanted:
        raise ConfigError(
            f"max_context_tokens is {wanted}, but the KV cache holds {context} tokens: set kv_memory_bytes or kv_pages "
            f"(at least {-(-wanted // page_tokens)}) higher"
        )
    return Limits(
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
