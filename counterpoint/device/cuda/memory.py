"""GPU memory budget: weights, activations, graphs, tables; the rest goes to the KV cache.

Owns: the sums, as plain arithmetic.
Promises: an error states every term of the budget and which flag to change.
Must not: allocate or touch a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.config import ConfigError, DeviceConfig
from counterpoint.spec import ModelSpec

MARGIN_BYTES = 1 << 30  # libraries' workspaces, and fragmentation in torch's allocator
CONTEXT_BYTES = 1 << 30  # of a process, where others on the GPU prevent measuring it
GRAPH_BYTES = 6 << 20  # of one captured step, beside the pool that all graphs share
PIECE_BYTES = 384 << 10  # of one piece of a captured pass, likewise: 896 took 0.30 GiB


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """`total_bytes`: the whole device, or this process's share of it. `used_bytes`: other processes
    and libraries of this one (of a share, only this process). `activation_bytes`: all streams that
    run passes. `graph_bytes`, `table_bytes`: of this executor."""

    total_bytes: int
    used_bytes: int
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    table_bytes: int

    @property
    def free_bytes(self) -> int:
        """Bytes left for the KV cache."""
        return (
            self.total_bytes
            - self.used_bytes
            - self.weight_bytes
            - self.activation_bytes
            - self.graph_bytes
            - self.table_bytes
            - MARGIN_BYTES
        )

    def __str__(self) -> str:
        return (
            f"of {format_gib(self.total_bytes)}, {format_gib(self.used_bytes)} were taken, "
            f"weights need {format_gib(self.weight_bytes)}, "
            f"activations {format_gib(self.activation_bytes)}, "
            f"graphs {format_gib(self.graph_bytes)}, tables {format_gib(self.table_bytes)}, "
            f"margin {format_gib(MARGIN_BYTES)}; "
            f"{format_gib(max(0, self.free_bytes))} are free for KV"
        )


def format_gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def weight_bytes(spec: ModelSpec, element_bytes: int, quantised: bool) -> int:
    """Bytes of all weights. `quantised`: the layers' matrices take one byte per element; their
    scales are negligible."""
    spared = spec.layers * spec.layer_matrix_parameters * (element_bytes - 1) if quantised else 0
    return spec.weight_bytes(element_bytes) - spared


def check_weights_fit(weights: int, total: int, free: int) -> None:
    """Raise ConfigError if `weights` bytes do not fit in `free` of `total` bytes."""
    if weights + MARGIN_BYTES > free:
        raise ConfigError(
            f"the weights need {format_gib(weights)}, but {format_gib(free)} of the GPU's "
            f"{format_gib(total)} are free: choose a smaller model, "
            "quantization fp8, dtype bfloat16 if it is float32, or end what else runs on the GPU"
        )


def choose_pages(
    device: DeviceConfig, page_bytes: int, budget: MemoryBudget, max_pages: int
) -> int:
    """Pages of the KV pool: `kv_pages`, else what `kv_memory_bytes` holds, else all free memory up
    to `max_pages`. Raises ConfigError with the budget if they do not fit or none fits."""
    room = budget.free_bytes // page_bytes
    if device.kv_pages is not None:
        flag, pages = "kv_pages", device.kv_pages
    elif device.kv_memory_bytes is not None:
        flag, pages = "kv_memory_bytes", device.kv_memory_bytes // page_bytes
    else:
        flag, pages = "max_pass_tokens", min(room, max_pages)
    if pages < 1 and flag != "max_pass_tokens":
        raise ConfigError(f"{flag} leaves no room for a page of {page_bytes} bytes: set it to more")
    if pages < 1 or pages > room:
        wanted = (
            f"{format_gib(pages * page_bytes)} of KV were asked for"
            if pages
            else "no page of KV fits"
        )
        fix = {
            "kv_pages": f"set kv_pages to at most {max(0, room)}",
            "kv_memory_bytes": f"set kv_memory_bytes to at most {max(0, room * page_bytes)}",
            "max_pass_tokens": (
                "lower max_pass_tokens, max_context_tokens or max_running, "
                "choose fp8 or a smaller model"
            ),
        }[flag]
        raise ConfigError(f"{wanted}: {budget}. To fit, {fix}")
    return pages
