"""Memory profiling at start: what a pass and this executor's buffers take.

Owns: the measurement of the largest passes, and the budget that follows from it (memory.py).
Must not: decide the size of the KV cache.
"""

from __future__ import annotations

import dataclasses

import torch

from counterpoint.config import Config
from counterpoint.device.cuda import memory
from counterpoint.device.cuda.device_tables import DeviceTables, TableShape, buckets_for
from counterpoint.device.cuda.driver import CudaDriver
from counterpoint.device.cuda.logits_processors import BYTES_PER_TOKEN
from counterpoint.device.cuda.piecewise_graphs import graph_sizes_for, pad_rows
from counterpoint.device.cuda.stream_partitions import StreamPartitions
from counterpoint.device.cuda.warmup import long_context_segments, prompt_segments
from counterpoint.device.slot_tables import make_pass_rows
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.types import Role


def max_pass_tokens(config: Config) -> int:
    """The most tokens of a pass."""
    scheduler = config.scheduler
    return max(scheduler.max_pass_tokens, scheduler.chunk_tokens or 0)


def measure_budget(
    config: Config,
    decoder: Decoder,
    stream_partitions: StreamPartitions,
    driver: CudaDriver,
    engines: int,
) -> memory.MemoryBudget:
    """The budget from a measured pass; every stream keeps its passes' memory. `engines` > 1: others
    load on this GPU meanwhile, so its free memory says nothing about this process."""
    device, spec, scheduler = driver.device, decoder.spec, config.scheduler
    weights = torch.cuda.memory_allocated(device)
    largest, contexts = measure_activations(config, decoder, stream_partitions, driver)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if engines > 1:
        total //= engines
        used = torch.cuda.memory_reserved(device) - weights + memory.CONTEXT_BYTES
    else:
        used = total - free - weights
    passes = len(stream_partitions.for_role(Role.PREFILL)) + 1
    tokens = max_pass_tokens(config)
    sizes = graph_sizes_for(scheduler.max_pass_tokens, spec)
    buffer_bytes = (
        sizes[-1]
        * (spec.hidden + 2 * spec.heads * spec.head_dim)
        * decoder.ops.weight_dtype.itemsize
    )
    pieces = passes * len(sizes) * spec.layers
    steps = len(stream_partitions.for_role(Role.DECODE)) * len(buckets_for(scheduler.max_running))
    wanted = config.model.max_context_tokens or spec.max_context_tokens
    return memory.MemoryBudget(
        total_bytes=total,
        used_bytes=used,
        weight_bytes=weights,
        activation_bytes=passes
        * (int(largest * (1 + sizes[-1] / tokens)) + contexts + buffer_bytes),
        graph_bytes=steps * memory.GRAPH_BYTES
        + pieces * memory.PIECE_BYTES
        + len(stream_partitions.for_role(Role.DECODE)) * scheduler.max_running * spec.vocab * 24,
        table_bytes=(scheduler.max_running + 1) * (wanted * 5 + spec.vocab * BYTES_PER_TOKEN),
    )


def measure_activations(
    config: Config, decoder: Decoder, stream_partitions: StreamPartitions, driver: CudaDriver
) -> tuple[int, int]:
    """Memory that a stream's passes keep, measured on one layer and the LM head: bytes of the
    largest pass, and how much more the longest contexts take."""
    spec, size, tokens = decoder.spec, config.device.page_tokens, max_pass_tokens(config)
    context = config.model.max_context_tokens or spec.max_context_tokens
    if config.device.kv_pages is not None:
        context = max(1, min(context, config.device.kv_pages * size))
    kv = KVPool(dataclasses.replace(spec, layers=1), 1, size, decoder.kv_dtype, driver.device)
    tables = DeviceTables(TableShape(1, context, size, spec.vocab, padding_page=0), (), driver)
    partition = stream_partitions.for_role(Role.PREFILL)[0]
    sizes = graph_sizes_for(config.scheduler.max_pass_tokens, spec)
    torch.cuda.synchronize(driver.device)  # the partition's stream may use the tables
    torch.cuda.empty_cache()
    reserved, allocated = (
        torch.cuda.memory_reserved(driver.device),
        torch.cuda.memory_allocated(driver.device),
    )
    torch.cuda.reset_peak_memory_stats(driver.device)
    kept_bytes = list[int]()
    for segments in (prompt_segments(tokens, context), long_context_segments(tokens, context)):
        with driver.on_stream(partition.stream), torch.inference_mode():
            batch = tables.make_batch(
                tables.make_inputs(
                    make_pass_rows(segments),
                    partition.prefill_planner,
                    partition.decode_kernel,
                    lambda rows: pad_rows(rows, sizes),
                )
            )
            x_TD = decoder.run_layers(decoder.embed(batch), batch, kv, 0, 1)
            decoder.head(x_TD[: config.scheduler.max_running])
        torch.cuda.synchronize(driver.device)
        batch.attention.close()
        peak = torch.cuda.max_memory_allocated(driver.device) - allocated
        kept_bytes.append(max(torch.cuda.memory_reserved(driver.device) - reserved, peak))
    return kept_bytes[0], kept_bytes[1] - kept_bytes[0]
