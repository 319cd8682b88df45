"""From a Config to an executor on a GPU.

Owns: the start: model loading, the split of the device, its memory budget, graph capture, warmup.
Promises: a config that this device cannot serve raises ConfigError before weights are read. Each
stage reports its seconds and bytes.
Must not: decide how requests are scheduled.

There are two steps, because the policy needs the device, and the executor needs the policy's lanes:

    device = open_cuda(config, source, progress)
    policy = ...(device.units, device.levels)
    executor = device.executor(policy.lanes, inbox)
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.config import Config, ConfigError
from counterpoint.device.cuda import memory
from counterpoint.device.cuda.attention import AttentionPlanner, choose_planner
from counterpoint.device.cuda.decode_graphs import DecodeGraphs
from counterpoint.device.cuda.device_tables import DeviceTables, TableShape
from counterpoint.device.cuda.driver import CudaDriver
from counterpoint.device.cuda.executor import CudaRuntime
from counterpoint.device.cuda.green_contexts import Partitions
from counterpoint.device.cuda.kernels.attention import FP8_CAPABILITY
from counterpoint.device.cuda.kernels.floor import FilterFloor
from counterpoint.device.cuda.kernels.nvcc import KernelError
from counterpoint.device.cuda.memory_profile import max_pass_tokens, measure_budget
from counterpoint.device.cuda.ops import Precision, cuda_dtype, cuda_ops
from counterpoint.device.cuda.partition_setup import (
    ReportProgress,
    invariant_partitions,
    partitions_to_capture,
    prefill_partitions,
    split_device,
    tune_partitions,
)
from counterpoint.device.cuda.piecewise_graphs import PiecewiseGraphs, graph_sizes_for
from counterpoint.device.cuda.sampling import SamplingMode
from counterpoint.device.cuda.warmup import warm_up
from counterpoint.model.decoder import Decoder
from counterpoint.model.fp8 import FP8
from counterpoint.model.invariance import require_invariant_gemms
from counterpoint.model.kv import KVPool, page_bytes
from counterpoint.model.weights import build_decoder, load_decoder
from counterpoint.spec import ModelSpec
from counterpoint.spec.source import ModelSource, load_spec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class CudaDevice(CudaRuntime):
    """A GPU with a model. `levels`: decode SMs of each split. `isolated`: the two sides of a split
    run on disjoint SMs. `notes`: messages for the user."""

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
        """The driver's name of the GPU."""
        return torch.cuda.get_device_name(self.driver.device)

    def capture_graphs(self, config: Config) -> None:
        """Capture the decode graphs that `config` needs from the first request on."""
        self.decode_graphs.capture(
            partitions_to_capture(config, self.stream_partitions), (SamplingMode.GREEDY,)
        )


def open_cuda(
    config: Config,
    source: ModelSource,
    progress: ReportProgress = print,
    vocab: int | None = None,
    engines: int = 1,
) -> CudaDevice:
    """Load the model and prepare the first GPU to serve it.

    `vocab`: ids from there on are never sampled (None: the model's size). `engines`: processes that
    share the GPU's memory equally. Raises ConfigError naming the setting, ModelError for files.
    """
    check_supported(config)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)
    if engines > 1:
        free = total = total // engines
    spec, dtype = load_spec(source, config.model.max_context_tokens), cuda_dtype(config.model.dtype)
    quantise, invariant = config.device.quantization == "fp8", config.device.batch_invariant
    kv_dtype = FP8 if config.device.kv_cache_dtype == "fp8" else dtype
    memory.check_weights_fit(memory.weight_bytes(spec, dtype.itemsize, quantise), total, free)
    partitions, notes = split_device(config)
    precision = Precision(dtype, kv_dtype, quantise, invariant)
    decoder, planner = load_model(config, source, spec, precision, progress)
    if invariant:
        require_invariant_gemms(decoder, device)
        stream_partitions = invariant_partitions(decoder, partitions, planner)
    else:
        planners = (planner, choose_planner(spec, dtype, device))
        stream_partitions = tune_partitions(config, decoder, partitions, planners, progress)
    driver = CudaDriver()
    budget = measure_budget(config, decoder, stream_partitions, driver, engines)
    size = config.device.page_tokens
    each = page_bytes(spec, size, decoder.kv_dtype)
    pages = memory.choose_pages(config.device, each, budget, max_pages=1 << 24)
    wanted = config.model.max_context_tokens or spec.max_context_tokens
    context = min(wanted, pages * size)
    kv = KVPool(spec, pages + 1, size, decoder.kv_dtype, device)
    known = spec.vocab if vocab is None else vocab
    shape = TableShape(config.scheduler.max_running, context, size, known, padding_page=pages)
    tables = DeviceTables(shape, spec.eos_token_ids, driver, load_filter_floor(device))
    torch.cuda.synchronize(device)  # the other streams may now use what this one allocated
    decode_graphs = DecodeGraphs(decoder, kv, tables, driver)
    sizes = graph_sizes_for(config.scheduler.max_pass_tokens, spec)
    piecewise_graphs = PiecewiseGraphs(decoder, kv, tables, driver, sizes)
    opened = CudaDevice(
        decoder, kv, tables, decode_graphs, piecewise_graphs, stream_partitions, driver,
        partitions, pages, partitions.total_sms, partitions.levels,
        partitions.isolated and bool(partitions.levels), context, notes,
    )  # fmt: skip
    capture_all(config, opened, progress)
    progress(f"KV cache of {pages} pages ({memory.format_gib(pages * each)}): {budget}")
    max_tokens = min(max_pass_tokens(config), pages * size)
    note = warm_up(opened.executor, prefill_partitions(config, stream_partitions), max_tokens)
    torch.cuda.synchronize(device)
    free = torch.cuda.mem_get_info(device)[0]
    progress(f"{note}; {memory.format_gib(free)} of the device are free")
    return opened


def load_model(
    config: Config,
    source: ModelSource,
    spec: ModelSpec,
    precision: Precision,
    progress: ReportProgress,
) -> tuple[Decoder, AttentionPlanner]:
    """The decoder with its weights, and the prefill planner of eager passes."""
    device = torch.device("cuda", 0)
    ops, planner = cuda_ops(spec, precision, device)
    began_s = time.perf_counter()
    if config.model.load_format == "dummy":
        weights = RandomGpuWeights(config.model.weights_seed, precision.dtype, device)
        decoder = build_decoder(spec, weights, ops, device)
    else:
        decoder = load_decoder(source, config.model, device, ops)
    torch.cuda.synchronize(device)
    loaded = memory.format_gib(torch.cuda.memory_allocated(device))
    took_s = time.perf_counter() - began_s
    progress(f"{spec.name}: {loaded} of weights in {took_s:.1f} s; {ops.name}")
    return decoder, planner


def capture_all(config: Config, device: CudaDevice, progress: ReportProgress) -> None:
    """Capture the graphs that serving needs from the first request on."""
    where = device.driver.device
    device.capture_graphs(config)
    graphs = device.decode_graphs
    progress(f"{graphs.num_graphs} decode graphs captured in {graphs.capture_s:.1f} s")
    free = torch.cuda.mem_get_info(where)[0]
    prefill = prefill_partitions(config, device.stream_partitions)
    pieces = device.piecewise_graphs
    pieces.capture([partition for _, partition in prefill])
    torch.cuda.synchronize(where)
    size = memory.format_gib(free - torch.cuda.mem_get_info(where)[0])
    progress(
        f"{pieces.num_graphs} graphs of passes with prompt tokens captured in "
        f"{pieces.capture_s:.1f} s, {size}"
    )


def load_filter_floor(device: torch.device) -> FilterFloor | None:
    """The kernel that replaces sorting in top-k and top-p, if it can be built."""
    try:
        return FilterFloor(device.index or 0)
    except KernelError as error:
        log.warning("top-k and top-p by sorting: %s", error)
        return None


def check_supported(config: Config) -> None:
    """Raise ConfigError for a config that this device cannot serve."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "device is cuda, but torch finds no usable GPU: "
            "install a CUDA build of torch and a driver, or set device to cpu"
        )
    if torch.cuda.get_device_capability(0)[0] < 8:
        raise ConfigError(
            f"{torch.cuda.get_device_name(0)} is older than what device cuda supports "
            "(Ampere, compute capability 8.0)"
        )
    check_fp8_supported(config, torch.cuda.get_device_capability(0), torch.cuda.get_device_name(0))


def check_fp8_supported(config: Config, capability: tuple[int, int], name: str) -> None:
    """Raise ConfigError if the config asks for fp8 and this GPU lacks it."""
    for setting in ("quantization", "kv_cache_dtype"):
        if getattr(config.device, setting) == "fp8" and capability < FP8_CAPABILITY:
            raise ConfigError(
                f"{setting} is fp8, which {name} lacks "
                "(compute capability 8.9 and newer have it): leave it out"
            )


class RandomGpuWeights:
    """A checkpoint of random weights drawn on the GPU (RandomCheckpoint draws on the CPU)."""

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
