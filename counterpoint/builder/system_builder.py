"""The composition root: from a Config to one running engine.

Owns: which concrete classes implement the interfaces, and what the environment says (cache folder,
OMP and CUDA variables). A configuration that can't work is refused before weights are read; the
error names the setting. Must not: schedule or compute.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.builder.system import (
    CalibrationTarget,
    System,
    WorkerPlacement,
    element_types,
    make_compatibility_digest,
    make_limits,
    tokenizer_vocab,
)
from counterpoint.config import Config, ConfigError
from counterpoint.core.engine import Engine
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy import Auto, make_policy
from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.active_units import ActiveUnits
from counterpoint.cost_model.calibration import CalibrationKey, shape_key
from counterpoint.cost_model.roofline import Roofline
from counterpoint.interfaces import Policy
from counterpoint.spec import ModelSpec
from counterpoint.spec.device import PRESETS, DeviceSpec, cpu_device, unknown_gpu
from counterpoint.spec.source import ModelSource, load_spec, resolve_model

if TYPE_CHECKING:
    from counterpoint.device.cuda.device_setup import CudaDevice
    from counterpoint.device.event_queue import WallClockEventQueue
    from counterpoint.model.decoder import Decoder
    from counterpoint.model.kv import KVPool

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a system is built from. `placement` None: it is not a worker of a pool."""

    config: Config
    source: ModelSource
    inbox: WallClockEventQueue
    progress: OnProgress
    placement: WorkerPlacement | None = None
    auto: type[Auto] = Auto


def build_system(
    config: Config,
    inbox: WallClockEventQueue,
    progress: OnProgress = print,
    placement: WorkerPlacement | None = None,
) -> System:
    """Load the configured model on the configured device and put an engine over it.

    `progress` is told each stage in words; `placement` is given for a worker of a pool. Raises
    ConfigError, or ModelError if the model can't be found or isn't supported.
    """
    inputs = _Inputs(config, find_model(config), inbox, progress, placement)
    if (choose_device(config) if placement is None else placement.device) == "cuda":
        return cuda_system(inputs)
    return cpu_system(inputs)


# ---------------------------------------------------------------- environment and device


def cache_folder() -> Path:
    """Folder of pulled models, compiled kernels and calibrations: COUNTERPOINT_CACHE, or
    `counterpoint` in the user's cache folder."""
    named = os.environ.get("COUNTERPOINT_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / "counterpoint"


def calibration_folder() -> Path:
    return cache_folder() / calibration_store.FOLDER


def find_model(config: Config) -> ModelSource:
    """Where the configured model is. Raises ModelError if it is nowhere."""
    return resolve_model(config.model.model, cache_folder())


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def gpu_count() -> int:
    """How many GPUs this process would see. Initialises none of them."""
    import torch

    return torch.cuda.device_count()


def choose_device(config: Config) -> str:
    """cpu or cuda: `device`, or for auto cuda if torch sees a GPU. Raises ConfigError if cuda is
    asked for and there is none."""
    wanted = config.device.device
    if wanted == "cpu":
        return "cpu"
    if has_gpu():
        return "cuda"
    if wanted == "cuda":
        raise ConfigError(
            "device is cuda, but torch finds no usable GPU: install a CUDA build of torch and a "
            "driver, or set cpu"
        )
    return "cpu"


def set_hardware_queues() -> None:
    """Gives each CUDA stream a hardware queue of its own: streams that share one wait for each
    other. Call it before the GPU is first used."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


# ---------------------------------------------------------------- CPU


def cpu_system(inputs: _Inputs) -> System:
    from counterpoint.device.cores import binding_warning, cpu_name, lane_cores, usable_cores
    from counterpoint.device.cpu import CpuExecutor
    from counterpoint.device.kv_memory import pool_memory
    from counterpoint.device.slot_tables import SlotTables

    config, source = inputs.config, inputs.source
    if config.device.quantization != "none" or config.device.kv_cache_dtype != "auto":
        raise ConfigError("quantization and kv_cache_dtype fp8 need device cuda: leave them out")
    cores = usable_cores(config.device.cores)
    if config.device.cores and config.device.cores > len(cores):
        raise ConfigError(f"cores is {config.device.cores}: this process may use {len(cores)}")
    inputs.progress(f"loading {source.name}")
    decoder = _load_cpu_decoder(config, source)
    spec = decoder.spec
    kv = _cpu_kv_pool(config, decoder, inputs.placement or WorkerPlacement())
    limits = make_limits(config, spec, kv.pages, len(cores))
    key = CalibrationKey(
        device=cpu_name(),
        units=len(cores),
        model=shape_key(spec),
        dtype="float16",
        kv_dtype=str(decoder.kv_dtype).removeprefix("torch."),
        kernels=decoder.ops.name,
    )
    prior = Roofline(spec, cpu_device(len(cores)), key.dtype, key.kv_dtype)
    policy, notes = cpu_policy(config, spec, key, prior, inputs.auto)
    tables = SlotTables(
        limits.max_running,
        limits.max_context_tokens,
        kv.page_tokens,
        tokenizer_vocab(source, spec),
        spec.eos_token_ids,
    )
    executor = CpuExecutor(decoder, kv, tables, policy.lanes, cores, inputs.inbox)
    lanes = ", ".join(
        f"{lane.role.value} on cores {'+'.join(map(str, lane_cores(lane.role, units, cores)))}"
        for lane, units in zip(policy.lanes, policy.lane_units, strict=True)
    )
    inputs.progress(
        f"ready: {decoder.ops.name}, KV cache of {kv.pages} pages ({kv.bytes >> 20} MiB)"
    )
    warning = binding_warning(os.environ)
    return System(
        Engine(limits, policy),
        executor,
        spec,
        source,
        limits,
        lanes,
        (*notes, warning) if warning else tuple(notes),
        grammars=tables.sampling.grammars,
        calibration_target=CalibrationTarget(key, prior, levels=tuple(range(1, len(cores)))),
        rebuild=lambda config, inbox, auto: cpu_system(
            dataclasses.replace(inputs, config=config, inbox=inbox, auto=auto)
        ),
        memory=pool_memory(kv),
        digest=make_compatibility_digest(config, source, spec, kv),
    )


def _load_cpu_decoder(config: Config, source: ModelSource) -> Decoder:
    from counterpoint.model.invariance import require_invariant_gemms
    from counterpoint.model.ops_cpu import CpuOptions
    from counterpoint.model.weights import load_decoder

    options = CpuOptions(cache=cache_folder(), invariant=config.device.batch_invariant)
    decoder = load_decoder(source, config.model, cpu=options)
    if options.invariant:
        require_invariant_gemms(decoder)
    return decoder


def _cpu_kv_pool(config: Config, decoder: Decoder, placement: WorkerPlacement) -> KVPool:
    from counterpoint.device.kv_memory import available_bytes, choose_pages
    from counterpoint.model.kv import KVPool, page_bytes

    spec, page_tokens = decoder.spec, config.device.page_tokens
    bytes_per_page = page_bytes(spec, page_tokens, decoder.kv_dtype)
    pages = choose_pages(
        config.device,
        bytes_per_page,
        config.scheduler.max_running,
        config.model.max_context_tokens or spec.max_context_tokens,
        available_bytes() // placement.engines,
    )
    make_limits(config, spec, pages, 1)  # refuse before the pool is allocated
    if placement.allocate is None:
        return KVPool(spec, pages, page_tokens, decoder.kv_dtype)
    tensors = 2 * spec.layers
    storage = placement.allocate(pages, bytes_per_page // tensors, tensors).regions
    return KVPool.in_storage(spec, pages, page_tokens, decoder.kv_dtype, storage)


def cpu_policy(
    config: Config, spec: ModelSpec, key: CalibrationKey, prior: Roofline, auto: type[Auto] = Auto
) -> tuple[Policy, list[str]]:
    cores, notes = key.units, []
    wanted = config.scheduler.policy
    if cores == 1 and wanted in ("multiplex", "auto"):
        notes.append(
            f"{wanted} needs two cores, and this process may use one: it runs chunked instead"
        )
    found = calibration_store.find_calibration(key, prior, calibration_folder())
    if cores > 1 and wanted == "auto":
        notes.append(found.note)
    policy = make_policy(
        config.scheduler,
        DeviceShape(cores, spec.layers, levels=tuple(range(1, cores)), chunk_tokens=128),
        found.estimator,
        auto,
    )
    return policy, notes


# ---------------------------------------------------------------- GPU


def cuda_system(inputs: _Inputs) -> System:
    set_hardware_queues()
    from counterpoint.device.cuda.device_setup import open_cuda

    config, source, placement = inputs.config, inputs.source, inputs.placement
    vocab = tokenizer_vocab(source, load_spec(source, config.model.max_context_tokens))
    engines = placement.engines if placement is not None else 1
    cuda = open_cuda(config, source, inputs.progress, vocab, engines=engines)
    built = cuda_engine(config, source, inputs.inbox, cuda)
    if placement is None:
        return built
    from counterpoint.device.kv_memory import pool_memory

    return dataclasses.replace(
        built,
        memory=pool_memory(cuda.kv),
        digest=make_compatibility_digest(config, source, cuda.spec, cuda.kv),
    )


def cuda_engine(
    config: Config,
    source: ModelSource,
    inbox: WallClockEventQueue,
    cuda: CudaDevice,
    auto: type[Auto] = Auto,
) -> System:
    """An engine on an open GPU; `auto` is as in make_policy. Raises ConfigError if `config` needs
    what the GPU was not opened for."""
    cuda.capture_graphs(config)
    spec, units = cuda.spec, cuda.units
    limits = make_limits(config, spec, cuda.pages, units, overlap=cuda.isolated)
    dtype, kv_dtype = element_types(config, cuda.decoder.ops.weight_dtype)
    key = CalibrationKey(
        device=cuda.name,
        units=units,
        model=shape_key(spec),
        dtype=dtype,
        kv_dtype=kv_dtype,
        kernels=cuda.decoder.ops.name,
    )
    device = calibration_store.match_device(cuda.name, tuple(PRESETS.values()))
    target = CalibrationTarget(
        key,
        Roofline(spec, device or unknown_gpu(units), dtype, kv_dtype),
        cuda.levels if cuda.isolated else (),
        cuda.decode_graphs.buckets,
        cuda.piecewise_graphs.sizes,
    )
    policy, notes = _cuda_policy(config, cuda, target, device, auto)
    active_units = (
        ActiveUnits(target.prior) if device is not None and units <= device.units else None
    )
    return System(
        Engine(limits, policy, active_units),
        cuda.executor(policy.lanes, inbox),
        spec,
        source,
        limits,
        ", ".join(
            f"{lane.role.value} on {n} SMs"
            for lane, n in zip(policy.lanes, policy.lane_units, strict=True)
        ),
        (*cuda.notes, *notes),
        grammars=cuda.tables.sampling.grammars,
        calibration_target=target,
        rebuild=lambda config, inbox, auto: cuda_engine(config, source, inbox, cuda, auto),
    )


def _cuda_policy(
    config: Config,
    cuda: CudaDevice,
    target: CalibrationTarget,
    device: DeviceSpec | None,
    auto: type[Auto],
) -> tuple[Policy, list[str]]:
    """The policy, and notes for the user. `device` None: no preset matches the GPU, so only a
    calibration gives an estimator."""
    found = calibration_store.find_calibration(target.key, target.prior, calibration_folder())
    estimator = None if device is None and found.estimator is target.prior else found.estimator
    notes = []
    if config.scheduler.policy == "auto":
        if not cuda.isolated:
            notes.append("auto runs chunked: the GPU can't be split")
        elif estimator:
            notes.append(found.note)
        else:
            notes.append(
                f"auto runs chunked: nothing is known of {cuda.name}; "
                "`counterpoint calibrate` measures it"
            )
    policy = make_policy(
        config.scheduler,
        DeviceShape(cuda.units, cuda.spec.layers, depth=2, levels=target.levels),
        estimator,
        auto,
    )
    return policy, notes
