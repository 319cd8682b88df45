"""From a Config to an executor on a GPU.

Owns: what happens at start: the weights, the split of the device, the division of its memory, the graphs that are captured at once.
Promises: what this device can't do is refused before weights are read; the realised SM sets are checked and told; each stage is
told in words, with its seconds and bytes.
Must not: decide how requests are scheduled.

In two steps, because the policy must know the device before the executor can know the policy's lanes:

    device = open_cuda(config, source, progress);  policy = …(device.units, device.levels);  device.executor(policy.lanes, inbox)
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.config import Config, ConfigError
from counterpoint.device.cuda import memory
from counterpoint.device.cuda.attention import (
    AttentionPlanner,
    DecodeKernel,
    choose_decode_kernel,
    choose_planner,
)
from counterpoint.device.cuda.decode_graphs import DecodeGraphs
from counterpoint.device.cuda.device_tables import DeviceTables, buckets_for
from counterpoint.device.cuda.driver import CudaDriver
from counterpoint.device.cuda.executor import CompletionQueue, CudaExecutor
from counterpoint.device.cuda.gemm_autotune import (
    PREFILL_PROBES,
    GemmAutotuner,
    Matrix,
    build_tiles,
    decode_probes_up_to,
)
from counterpoint.device.cuda.green_contexts import Partitions, granularity
from counterpoint.device.cuda.kernels.attention import FP8_CAPABILITY
from counterpoint.device.cuda.kernels.floor import FilterFloor
from counterpoint.device.cuda.kernels.nvcc import KernelError
from counterpoint.device.cuda.logits_processors import BYTES_PER_TOKEN as ADJUSTMENT_BYTES
from counterpoint.device.cuda.ops import cuda_dtype, cuda_ops, make_decode_ops, layer_kernels
from counterpoint.device.cuda.piecewise_graphs import PiecewiseGraphs, pad_rows, graph_sizes_for
from counterpoint.device.cuda.sampling import SamplingMode
from counterpoint.device.cuda.stream_partitions import (
    StreamPartition,
    StreamPartitions,
    make_stream_partitions,
)
from counterpoint.device.cuda.warmup import long_context_segments, prompt_segments, warm_up
from counterpoint.device.slot_tables import make_pass_rows
from counterpoint.model.decoder import Decoder
from counterpoint.model.fp8 import FP8
from counterpoint.model.invariance import require_invariant_gemms
from counterpoint.model.kv import KVPool, page_bytes
from counterpoint.model.ops import Ops
from counterpoint.model.weights import build_decoder, load_decoder
from counterpoint.spec import ModelSpec
from counterpoint.spec.source import ModelSource, load_spec
from counterpoint.types import Lane, Role

log = logging.getLogger(__name__)

ReportProgress = Callable[[str], None]
LEVELS = (16, 24, 32, 48, 64, 80)  # decode SMs of the splits, where none is named


@dataclass(frozen=True, slots=True, eq=False)
class CudaDevice:
    """A GPU with a model on it. `levels`: decode units of the splits there are. `isolated`: whether the two sides of a split have
    SMs of their own. `notes`: what the user should know."""

    decoder: Decoder
    kv: KVPool
    tables: DeviceTables
    decode_graphs: DecodeGraphs
    piecewise_graphs: PiecewiseGraphs
    stream_partitions: StreamPartitions
    driver: CudaDriver
    partitions: Partitions
    pages: int
    units: int
    levels: tuple[int, ...]
    isolated: bool
    max_context_tokens: int
    notes: tuple[str, ...]

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @property
    def name(self) -> str:
        """The GPU's, as the driver has it."""
        return torch.cuda.get_device_name(self.driver.device)

    def capture_graphs(self, config: Config) -> None:
        """Have the graphs that `config` wants from the first request on."""
        self.decode_graphs.capture(
            partitions_to_capture(config, self.stream_partitions), (SamplingMode.GREEDY,)
        )

    def executor(self, lanes: Sequence[Lane], inbox: CompletionQueue) -> CudaExecutor:
        return CudaExecutor(
            self.decoder,
            self.kv,
            self.tables,
            self.decode_graphs,
            self.piecewise_graphs,
            self.stream_partitions,
            lanes,
            self.driver,
            inbox,
        )


def open_cuda(
    config: Config,
    source: ModelSource,
    progress: ReportProgress = print,
    vocab: int | None = None,
    engines: int = 1,
) -> CudaDevice:
    """Load the model and make everything ready on the first GPU. `vocab`: ids from there on are never sampled (None: all the
    model has are). `engines`: so many processes divide the GPU's memory, in equal shares. Raises ConfigError naming the setting,
    ModelError for files."""
    check_supported(config)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)
    if engines > 1:
        free = total = total // engines
    spec, dtype = load_spec(source, config.model.max_context_tokens), cuda_dtype(config.model.dtype)
    quantise, kv_dtype = (
        config.device.quantization == "fp8",
        FP8 if config.device.kv_cache_dtype == "fp8" else dtype,
    )
    memory.check_weights_fit(memory.weight_bytes(spec, dtype.itemsize, quantise), total, free)
    partitions, notes = split_device(config)
    invariant = config.device.batch_invariant
    ops, planner = cuda_ops(spec, dtype, device, kv_dtype, quantise, invariant=invariant)
    began_s = time.perf_counter()
    if config.model.load_format == "dummy":
        decoder = build_decoder(
            spec, RandomGpuWeights(config.model.weights_seed, dtype, device), ops, device
        )
    else:
        decoder = load_decoder(source, config.model, device, ops)
    torch.cuda.synchronize(device)
    weights = torch.cuda.memory_allocated(device)
    progress(
        f"{spec.name}: {memory.format_gib(weights)} of weights in {time.perf_counter() - began_s:.1f} s; {ops.name}"
    )

    if invariant:
        require_invariant_gemms(decoder, device)
        places = invariant_partitions(decoder, partitions, planner)
    else:
        planners = (planner, choose_planner(spec, dtype, device))
        places = tune_partitions(config, decoder, partitions, planners, progress)
    driver = CudaDriver()
    budget = measure_budget(config, decoder, places, driver, total, shared=engines > 1)
    size, slots = config.device.page_tokens, config.scheduler.max_running
    each = page_bytes(spec, size, decoder.kv_dtype)
    wanted = config.model.max_context_tokens or spec.max_context_tokens
    pages = memory.choose_pages(config.device, each, budget, max_pages=1 << 24)
    context = min(wanted, pages * size)
    kv = KVPool(spec, pages + 1, size, decoder.kv_dtype, device)
    known = spec.vocab if vocab is None else vocab
    tables = DeviceTables(
        slots, context, size, known, spec.eos_token_ids, pages, driver, load_filter_floor(device)
    )
    torch.cuda.synchronize(device)  # what was made on this stream is there for those of the places
    graphs = DecodeGraphs(decoder, kv, tables, driver)
    graphs.capture(partitions_to_capture(config, places), (SamplingMode.GREEDY,))
    passes = PiecewiseGraphs(
        decoder, kv, tables, driver, graph_sizes_for(config.scheduler.max_pass_tokens, spec)
    )
    progress(f"{graphs.num_graphs} decode graphs captured in {graphs.capture_s:.1f} s")
    free = torch.cuda.mem_get_info(device)[0]
    passes.capture([place for _, place in prefill_partitions(config, places)])
    torch.cuda.synchronize(device)
    took = f"in {passes.capture_s:.1f} s, {memory.format_gib(free - torch.cuda.mem_get_info(device)[0])}"
    progress(f"{passes.num_graphs} graphs of passes with prompt tokens captured {took}")
    progress(f"KV cache of {pages} pages ({memory.format_gib(pages * each)}): {budget}")
    opened = CudaDevice(
        decoder, kv, tables, graphs, passes, places, driver, partitions, pages, partitions.total_sms,
        partitions.levels, partitions.isolated and bool(partitions.levels), context, notes,
    )  # fmt: skip
    played = warm_up(
        opened.executor, prefill_partitions(config, places), min(max_pass_tokens(config), pages * size)
    )
    torch.cuda.synchronize(device)
    progress(f"{played}; {memory.format_gib(torch.cuda.mem_get_info(device)[0])} of the device are free")
    return opened


def tune_partitions(
    config: Config,
    decoder: Decoder,
    partitions: Partitions,
    planners: tuple[AttentionPlanner, AttentionPlanner],
    progress: ReportProgress,
) -> StreamPartitions:
    """The places, each with its kernels; those where decode steps run have measured which product is fastest."""
    spec, dtype, device = decoder.spec, decoder.ops.weight_dtype, torch.device("cuda", 0)
    most_rows = buckets_for(config.scheduler.max_running)[-1]
    all_products: dict[int, GemmAutotuner] = {}
    names: set[str] = set()

    def kernels(units: int) -> tuple[DecodeKernel, Ops]:
        layer = layer_kernels(spec, dtype, device, units, chained=True)
        name, kernel = choose_decode_kernel(
            spec, dtype, device, units, most_rows, chained=True, kv_dtype=decoder.kv_dtype
        )
        names.add(name)
        if units not in all_products:
            all_products[units] = GemmAutotuner(units, layer, device, chained=True)
        return kernel, make_decode_ops(decoder.ops, layer, all_products[units])

    full = (partitions.full.stream, partitions.full_high_priority.stream)
    places = make_stream_partitions(full, partitions.total_sms, partitions, kernels, planners)
    weights = weights_by_shape(decoder)
    used = partitions_to_capture(config, places)
    began_s = time.perf_counter()
    build_tiles(
        set().union(*(all_products[place.units].tiles_to_build(weights, most_rows) for place in used)),
        device,
    )
    for place in used:
        all_products[place.units].tune(weights, place.stream, decode_probes_up_to(most_rows))
    counts = Counter(name for place in used for name in all_products[place.units].names.values())
    sides = places.for_role(Role.PREFILL)[1:]
    for place in sides:
        all_products[place.units].tune([same[:2] for same in weights[:-1]], place.stream, PREFILL_PROBES)
    torch.cuda.synchronize(device)
    progress(
        f"decode attention: {', '.join(sorted(names))}; products: {format_counts(counts)}, in {time.perf_counter() - began_s:.1f} s"
    )
    if sides:
        counts = Counter(
            name for place in sides for name in all_products[place.units].names.values()
        )
        progress(f"products of prefill in a partition: {format_counts(counts)}")
    return places


def format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def invariant_partitions(
    decoder: Decoder, partitions: Partitions, planner: AttentionPlanner
) -> StreamPartitions:
    """The places, all with the same kernels, chosen by nothing."""
    from counterpoint.device.cuda import batch_invariant

    full = (partitions.full.stream, partitions.full_high_priority.stream)
    kernels = (batch_invariant.decode_attention, decoder.ops)
    return make_stream_partitions(
        full, partitions.total_sms, partitions, lambda units: kernels, (planner, planner)
    )


def load_filter_floor(device: torch.device) -> FilterFloor | None:
    """The kernel that spares a sort, if it can be built."""
    try:
        return FilterFloor(device.index or 0)
    except KernelError as error:
        log.warning("top-k and top-p by sorting: %s", error)
        return None


def weights_by_shape(decoder: Decoder) -> list[list[Matrix]]:
    """The matrices of a decode step without biases, those of one kind together."""
    kinds: list[list[Matrix]] = []
    packed = [
        [getattr(layer, name) for layer in decoder.weights.layers[:8]]
        for name in ("qkv", "output", "gate_up", "down")
    ]
    for same in (*packed, [decoder.weights.head]):
        if same[0][1] is None:
            kinds.append([weight for weight, _ in same])
    return kinds


def check_supported(config: Config) -> None:
    """Raise ConfigError for what this device does not do."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "device is cuda, but torch finds no usable GPU: install a CUDA build of torch and a driver, or set cpu"
        )
    if torch.cuda.get_device_capability(0)[0] < 8:
        raise ConfigError(
            f"{torch.cuda.get_device_name(0)} is older than what device cuda supports (Ampere, compute capability 8.0)"
        )
    check_fp8_supported(config, torch.cuda.get_device_capability(0), torch.cuda.get_device_name(0))


def check_fp8_supported(config: Config, capability: tuple[int, int], name: str) -> None:
    """Raise ConfigError if eight bits are asked for and this GPU does not have them."""
    for setting in ("quantization", "kv_cache_dtype"):
        if getattr(config.device, setting) == "fp8" and capability < FP8_CAPABILITY:
            raise ConfigError(
                f"{setting} is fp8, which {name} lacks (compute capability 8.9 and newer have it): leave it out"
            )


def split_device(config: Config) -> tuple[Partitions, tuple[str, ...]]:
    """The splits that the policy may use, checked against the hardware; and notes for the user."""
    properties = torch.cuda.get_device_properties(0)
    least, step = granularity(torch.cuda.get_device_capability(0))
    total, scheduler = properties.multi_processor_count, config.scheduler
    if scheduler.policy in ("serial", "chunked"):
        levels = ()
    elif scheduler.split is not None:
        levels = (scheduler.split,)
    else:
        levels = tuple(
            level
            for level in LEVELS
            if level >= least and not level % step and level <= total - 2 * least
        )
    try:
        partitions = Partitions(levels)
    except ValueError as error:
        raise ConfigError(f"split is {scheduler.split}: {error}") from None
    if not levels:
        return partitions, ()
    if not partitions.isolated:
        return partitions, (
            "no SM partitions here: prefill and decode share all SMs through plain streams",
        )
    try:
        realised = partitions.check()
    except KernelError as error:
        raise ConfigError(
            f"a split is used only if its SMs can be read back: {error}; or set policy to chunked"
        ) from None
    return partitions, tuple(
        f"split {level}: decode on SMs {format_ranges(sets.decode)}, prefill on {format_ranges(sets.prefill)}"
        for level, sets in realised.items()
    )


def format_ranges(numbers: Sequence[int]) -> str:
    """0-3, 8: ascending numbers, told shortly."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def partitions_to_capture(config: Config, places: StreamPartitions) -> list[StreamPartition]:
    """Where decode graphs are wanted from the first request on; elsewhere they are captured when first needed."""
    if config.scheduler.policy in ("serial", "chunked"):
        return places.for_role(Role.BOTH)[:1]
    return places.for_role(Role.DECODE)


def prefill_partitions(config: Config, places: StreamPartitions) -> list[tuple[Role, StreamPartition]]:
    """Where passes with prompt tokens run, and as what: wherever there is prefill, and where `auto` decodes and fuses. Everything
    is wanted there from the first request on: the 20 ms of a capture would be held against a step whose price is being learnt."""
    fusing = places.for_role(Role.DECODE)[:1] if config.scheduler.policy == "auto" else []
    return [
        *((Role.PREFILL, place) for place in places.for_role(Role.PREFILL)),
        *((Role.DECODE, place) for place in fusing),
    ]


def measure_budget(
    config: Config,
    decoder: Decoder,
    places: StreamPartitions,
    driver: CudaDriver,
    total: int,
    shared: bool = False,
) -> memory.MemoryBudget:
    """Measure what a pass takes, and add up. Every stream keeps what its passes took. `shared`: others start and load on this GPU
    meanwhile, so that what is free says nothing of this process."""
    device, spec, scheduler = driver.device, decoder.spec, config.scheduler
    weights = torch.cuda.memory_allocated(device)
    largest, contexts = measure_activations(config, decoder, places, driver)
    torch.cuda.empty_cache()
    if shared:
        taken = torch.cuda.memory_reserved(device) - weights + memory.CONTEXT_BYTES
    else:
        taken = total - torch.cuda.mem_get_info(device)[0] - weights
    passes = len(places.for_role(Role.PREFILL)) + 1
    tokens = max_pass_tokens(config)
    sizes = graph_sizes_for(scheduler.max_pass_tokens, spec)
    seat = (
        sizes[-1]
        * (spec.hidden + 2 * spec.heads * spec.head_dim)
        * decoder.ops.weight_dtype.itemsize
    )
    pieces = passes * len(sizes) * spec.layers
    steps = len(places.for_role(Role.DECODE)) * len(buckets_for(scheduler.max_running))
    wanted = config.model.max_context_tokens or spec.max_context_tokens
    return memory.MemoryBudget(
        total_bytes=total,
        used_bytes=taken,
        weight_bytes=weights,
        activation_bytes=passes * (int(largest * (1 + sizes[-1] / tokens)) + contexts + seat),
        graph_bytes=steps * memory.GRAPH_BYTES
        + pieces * memory.PIECE_BYTES
        + len(places.for_role(Role.DECODE)) * scheduler.max_running * spec.vocab * 24,
        table_bytes=(scheduler.max_running + 1) * (wanted * 5 + spec.vocab * ADJUSTMENT_BYTES),
    )


def max_pass_tokens(config: Config) -> int:
    """Tokens that a pass may have."""
    scheduler = config.scheduler
    return max(scheduler.max_pass_tokens, scheduler.chunk_tokens or 0)


def measure_activations(
    config: Config, decoder: Decoder, places: StreamPartitions, driver: CudaDriver
) -> tuple[int, int]:
    """What a stream's passes keep of memory, measured on one layer and the LM head: the largest pass, and how much more one with
    the longest contexts."""
    spec, size, tokens = decoder.spec, config.device.page_tokens, max_pass_tokens(config)
    context = config.model.max_context_tokens or spec.max_context_tokens
    if config.device.kv_pages is not None:
        context = max(1, min(context, config.device.kv_pages * size))
    kv = KVPool(dataclasses.replace(spec, layers=1), 1, size, decoder.kv_dtype, driver.device)
    tables = DeviceTables(1, context, size, spec.vocab, (), 0, driver)
    place = places.for_role(Role.PREFILL)[0]
    sizes = graph_sizes_for(config.scheduler.max_pass_tokens, spec)
    torch.cuda.synchronize(driver.device)  # the tables are there, also for the place's stream
    torch.cuda.empty_cache()
    reserved, allocated = (
        torch.cuda.memory_reserved(driver.device),
        torch.cuda.memory_allocated(driver.device),
    )
    torch.cuda.reset_peak_memory_stats(driver.device)
    kept = list[int]()
    for segments in (prompt_segments(tokens, context), long_context_segments(tokens, context)):
        with driver.on_stream(place.stream), torch.inference_mode():
            batch = tables.make_batch(
                tables.make_inputs(
                    make_pass_rows(segments),
                    place.prefill_planner,
                    place.decode_kernel,
                    lambda rows: pad_rows(rows, sizes),
                )
            )
            x_TD = decoder.run_layers(decoder.embed(batch), batch, kv, 0, 1)
            decoder.head(x_TD[: config.scheduler.max_running])
        torch.cuda.synchronize(driver.device)
        batch.attention.close()
        peak = torch.cuda.max_memory_allocated(driver.device) - allocated
        kept.append(max(torch.cuda.memory_reserved(driver.device) - reserved, peak))
    return kept[0], kept[1] - kept[0]


class RandomGpuWeights:
    """Random weights of any shape, drawn on the GPU: for measuring speed (model/checkpoint.py's Dummy is for the same on a CPU)."""

    def __init__(
        self, seed: int, dtype: torch.dtype, device: torch.device, deviation: float = 0.02
    ) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.dtype = dtype
        self.device = device
        self.std = deviation

    def has(self, name: str) -> bool:
        return name != "rope_freqs.weight"

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        drawn = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(
            0, self.std, generator=self.generator
        )
        return drawn.add_(1.0) if len(shape) == 1 and name.endswith("norm.weight") else drawn

    def finish(self) -> None:
        pass
