"""The composition root: from a Config to a running engine.

Owns: which concrete classes stand behind the seams; what the environment says (the cache folder, OMP settings).
Promises: everything that can be refused is refused here, before weights are read, with an error that names the setting.
Must not: decide, schedule or compute.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.config import Config, ConfigError
from counterpoint.core.engine import Engine
from counterpoint.core.limits import EngineLimits
from counterpoint.core.policy import Auto, make_policy
from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.active_units import ActiveUnits
from counterpoint.cost_model.calibration import CalibrationKey, shape_key
from counterpoint.cost_model.roofline import Roofline
from counterpoint.device.choose import has_gpu
from counterpoint.disagg.peer_connection import (
    CompatibilityDigest,
    TransportEndpoint,
    WorkerIdentity,
    make_digest,
)
from counterpoint.interfaces import Estimator, Executor, Policy
from counterpoint.kv_transfer.host import host_name
from counterpoint.kv_transfer.memory import Allocate, KvMemory
from counterpoint.kv_transfer.nixl import NixlTransport
from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.kv_transfer.tcp import TcpTransport
from counterpoint.kv_transfer.transport import Transport, TransportError, Wake
from counterpoint.spec import ModelSpec
from counterpoint.spec.device import PRESETS, cpu_device, unknown_gpu
from counterpoint.spec.source import ModelSource, load_spec, resolve_model, weights_fingerprint

if TYPE_CHECKING:
    from counterpoint.device.cuda.device_setup import CudaDevice
    from counterpoint.device.event_queue import WallClockEventQueue
    from counterpoint.device.grammar import Grammars
    from counterpoint.model.kv import KVPool

log = logging.getLogger(__name__)

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """Where an engine of a pool is built. `engines`: so many share the memory of this machine, or of this GPU. `allocate`: makes
    the KV pool's memory, where other processes must reach it; None: the pool has memory of its own."""

    device: str = "cpu"
    engines: int = 1
    allocate: Allocate | None = None


def cache_folder() -> Path:
    """Where pulled models and what is derived from them are kept: COUNTERPOINT_CACHE, or the user's cache folder."""
    named = os.environ.get("COUNTERPOINT_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / "counterpoint"


def calibration_folder() -> Path:
    """Where this user's calibrations are kept."""
    return cache_folder() / calibration_store.FOLDER


def find_model(config: Config) -> ModelSource:
    """Where the configured model is. Raises ConfigError if it is nowhere."""
    return resolve_model(config.model.model, cache_folder())


@dataclass(frozen=True, slots=True)
class CalibrationTarget:
    """What is known of the prices of a device's steps. `key`: what they hold for; `prior`: what they are where none was measured;
    `levels`: decode units of the splits there are; `buckets`: sizes to which decode batches are filled up, `pass_buckets`: and
    passes with prompt tokens."""

    key: CalibrationKey
    prior: Roofline
    levels: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    pass_buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class System:
    """One engine on one device. `lanes` describes them in words; `notes` are things the user should know (a fallback, say).
    `grammars`: where requests have their grammars compiled before they arrive (None: nobody heeds them).
    `again(config, inbox, auto)` puts another engine over the same device, once this one is closed (`auto`: as make_policy has it).
    `memory` and `digest`: its KV pool for other workers; None where they can't reach it."""

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
    """The engine's limits for a pool of `pages` on a device of `units`. Raises ConfigError if no request could run."""
    scheduler, page_tokens = config.scheduler, config.device.page_tokens
    wanted = config.model.max_context_tokens or spec.max_context_tokens
    if wanted > spec.max_context_tokens:
        raise ConfigError(
            f"max_context_tokens is {wanted}: {spec.name} was made for at most {spec.max_context_tokens}"
        )
    context = min(wanted, pages * page_tokens)
    if config.model.max_context_tokens and context < wanted:
        raise ConfigError(
            f"max_context_tokens is {wanted}, but the KV cache holds {context} tokens: set kv_memory_bytes or kv_pages "
            f"(at least {-(-wanted // page_tokens)}) higher"
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


def build_system(
    config: Config,
    inbox: WallClockEventQueue,
    progress: OnProgress = print,
    placement: WorkerPlacement | None = None,
) -> System:
    """Load the configured model on the configured device and put an engine over it. `progress` is told each stage in words.
    `place`: if it is one of a pool. Raises ConfigError, or spec.model.ModelError if the model can't be had or isn't supported."""
    source = find_model(config)
    if (choose_device(config) if placement is None else placement.device) == "cuda":
        return cuda_system(config, source, inbox, progress, placement)
    return cpu_system(config, source, inbox, progress, placement or WorkerPlacement())


def choose_device(config: Config) -> str:
    """cpu or cuda: what `device` says, or, for auto, cuda if torch sees a GPU. Raises ConfigError if cuda is asked for in vain."""
    wanted = config.device.device
    if wanted == "cpu":
        return "cpu"
    if has_gpu():
        return "cuda"
    if wanted == "cuda":
        raise ConfigError(
            "device is cuda, but torch finds no usable GPU: install a CUDA build of torch and a driver, or set cpu"
        )
    return "cpu"


def cpu_system(
    config: Config,
    source: ModelSource,
    inbox: WallClockEventQueue,
    progress: OnProgress,
    placement: WorkerPlacement,
    auto: type[Auto] = Auto,
) -> System:
    from counterpoint.device.cores import binding_warning, cpu_name, lane_cores, usable_cores
    from counterpoint.device.cpu import CpuExecutor
    from counterpoint.device.kv_memory import pool_memory
    from counterpoint.device.memory import available_bytes, choose_pages
    from counterpoint.device.slot_tables import SlotTables
    from counterpoint.model.invariance import require_invariant_gemms
    from counterpoint.model.kv import KVPool, page_bytes
    from counterpoint.model.weights import load_decoder

    if config.device.quantization != "none" or config.device.kv_cache_dtype != "auto":
        raise ConfigError("quantization and kv_cache_dtype fp8 need device cuda: leave them out")
    cores = usable_cores(config.device.cores)
    if config.device.cores and config.device.cores > len(cores):
        raise ConfigError(f"cores is {config.device.cores}: this process may use {len(cores)}")
    progress(f"loading {source.name}")
    invariant = config.device.batch_invariant
    decoder = load_decoder(source, config.model, "cpu", cache=cache_folder(), invariant=invariant)
    if invariant:
        require_invariant_gemms(decoder)
    spec, size = decoder.spec, config.device.page_tokens
    each = page_bytes(spec, size, decoder.kv_dtype)
    context = config.model.max_context_tokens or spec.max_context_tokens
    pages = choose_pages(
        config.device,
        each,
        config.scheduler.max_running,
        context,
        available_bytes() // placement.engines,
    )
    limits = make_limits(config, spec, pages, len(cores))
    kv_dtype = str(decoder.kv_dtype).removeprefix("torch.")
    model, kernels = shape_key(spec), decoder.ops.name
    key = CalibrationKey(
        device=cpu_name(),
        units=len(cores),
        model=model,
        dtype="float16",
        kv_dtype=kv_dtype,
        kernels=kernels,
    )
    prior = Roofline(spec, cpu_device(len(cores)), key.dtype, kv_dtype)
    policy, notes = cpu_policy(config, spec, key, prior, auto)
    storage = (
        placement.allocate(pages, each // (2 * spec.layers), 2 * spec.layers).regions
        if placement.allocate is not None
        else None
    )
    kv = KVPool(spec, pages, size, decoder.kv_dtype, storage=storage)
    vocab = tokenizer_vocab(source, spec)
    tables = SlotTables(
        limits.max_running, limits.max_context_tokens, size, vocab, spec.eos_token_ids
    )
    executor = CpuExecutor(decoder, kv, tables, policy.lanes, cores, inbox)
    warning = binding_warning(os.environ)
    lanes = ", ".join(
        f"{lane.role.value} on cores {'+'.join(map(str, lane_cores(lane.role, units, cores)))}"
        for lane, units in zip(policy.lanes, policy.lane_units, strict=True)
    )
    progress(f"ready: {decoder.ops.name}, KV cache of {pages} pages ({pages * each >> 20} MiB)")
    notes += [warning] if warning else []
    return System(
        Engine(limits, policy),
        executor,
        spec,
        source,
        limits,
        lanes,
        tuple(notes),
        grammars=tables.sampling.grammars,
        calibration_target=CalibrationTarget(key, prior, levels=tuple(range(1, len(cores)))),
        rebuild=lambda config, inbox, auto: cpu_system(
            config, source, inbox, progress, placement, auto
        ),
        memory=pool_memory(kv),
        digest=make_compatibility_digest(config, source, spec, kv),
    )


def make_compatibility_digest(
    config: Config, source: ModelSource, spec: ModelSpec, kv: KVPool
) -> CompatibilityDigest:
    """Of what this worker and another must have in common for the one's KV to be the other's."""
    from counterpoint.device.kv_memory import page_layout

    seed = config.model.weights_seed if config.model.load_format == "dummy" else None
    return make_digest(
        spec, weights_fingerprint(source, seed), str(kv.k[0].dtype), kv.page_tokens, page_layout(kv)
    )


def cuda_system(
    config: Config,
    source: ModelSource,
    inbox: WallClockEventQueue,
    progress: OnProgress,
    placement: WorkerPlacement | None = None,
) -> System:
    set_hardware_queues()
    from counterpoint.device.cuda.device_setup import open_cuda

    vocab = tokenizer_vocab(source, load_spec(source, config.model.max_context_tokens))
    cuda = open_cuda(
        config, source, progress, vocab, engines=placement.engines if placement is not None else 1
    )
    built = cuda_engine(config, source, inbox, cuda)
    if placement is None:
        return built
    from counterpoint.device.kv_memory import pool_memory

    return dataclasses.replace(
        built,
        memory=pool_memory(cuda.kv),
        digest=make_compatibility_digest(config, source, cuda.spec, cuda.kv),
    )


def set_hardware_queues() -> None:
    """Each stream its own queue to the GPU: two that share one wait for each other. Read when the GPU is first used."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def cuda_engine(
    config: Config,
    source: ModelSource,
    inbox: WallClockEventQueue,
    cuda: CudaDevice,
    auto: type[Auto] = Auto,
) -> System:
    """An engine over an open GPU. `auto`: as make_policy has it. Raises ConfigError if `config` wants what the GPU was not opened
    for."""
    cuda.capture_graphs(config)
    spec, units, notes = cuda.spec, cuda.units, list(cuda.notes)
    limits = make_limits(config, spec, cuda.pages, units, overlap=cuda.isolated)
    dtype, kv_dtype = element_types(config, cuda.decoder.ops.weight_dtype)
    kernels = cuda.decoder.ops.name
    key = CalibrationKey(
        device=cuda.name,
        units=units,
        model=shape_key(spec),
        dtype=dtype,
        kv_dtype=kv_dtype,
        kernels=kernels,
    )
    device = calibration_store.match_device(cuda.name, tuple(PRESETS.values()))
    prior = Roofline(spec, device or unknown_gpu(units), dtype, kv_dtype)
    prices = calibration_store.find_calibration(key, prior, calibration_folder())
    belief = None if device is None and prices.estimator is prior else prices.estimator
    if config.scheduler.policy == "auto":
        unknown = f"auto runs chunked: nothing is known of {cuda.name}; `counterpoint calibrate` measures it"
        notes.append(
            "auto runs chunked: the GPU can't be split"
            if not cuda.isolated
            else prices.note
            if belief
            else unknown
        )
    levels = cuda.levels if cuda.isolated else ()
    policy = make_policy(
        config.scheduler,
        units,
        spec.layers,
        depth=2,
        levels=levels,
        estimator=belief,
        auto_class=auto,
    )
    lanes = ", ".join(
        f"{lane.role.value} on {n} SMs"
        for lane, n in zip(policy.lanes, policy.lane_units, strict=True)
    )
    return System(
        Engine(
            limits,
            policy,
            ActiveUnits(prior) if device is not None and units <= device.units else None,
        ),
        cuda.executor(policy.lanes, inbox),
        spec,
        source,
        limits,
        lanes,
        tuple(notes),
        grammars=cuda.tables.sampling.grammars,
        calibration_target=CalibrationTarget(
            key, prior, levels, cuda.decode_graphs.buckets, cuda.piecewise_graphs.sizes
        ),
        rebuild=lambda config, inbox, auto: cuda_engine(config, source, inbox, cuda, auto),
    )


def element_types(config: Config, dtype: object) -> tuple[str, str]:
    """What the roofline calls the types of weights and KV cache, computed with `dtype`."""
    plain = str(dtype).removeprefix("torch.")
    return ("fp8" if config.device.quantization == "fp8" else plain), (
        "fp8" if config.device.kv_cache_dtype == "fp8" else plain
    )


def cpu_policy(
    config: Config, spec: ModelSpec, key: CalibrationKey, prior: Roofline, auto: type[Auto] = Auto
) -> tuple[Policy, list[str]]:
    """The policy for the cores of `key`, and what the user should know of it."""
    cores, notes = key.units, []
    if cores == 1 and config.scheduler.policy in ("multiplex", "auto"):
        notes.append(
            f"{config.scheduler.policy} needs two cores, and this process may use one: it runs chunked instead"
        )
    belief = calibration_store.find_calibration(key, prior, calibration_folder())
    if cores > 1 and config.scheduler.policy == "auto":
        notes.append(belief.note)
    levels = tuple(range(1, cores))
    return make_policy(
        config.scheduler,
        cores,
        spec.layers,
        levels=levels,
        estimator=belief.estimator,
        chunk_tokens=128,
        auto_class=auto,
    ), notes


# ---------------------------------------------------------------- workers of a pool


def claim_gpu(config: Config, rank: int | None, workers: int) -> tuple[str, int]:
    """(device, how many workers share it) of worker `rank` among `workers` of this machine: GPUs in turn, each process seeing its
    own alone. Before the GPU is used in any way. `rank` None: it has been given its GPU by others. Raises ConfigError."""
    set_hardware_queues()
    if rank is None or config.device.device == "cpu":
        return choose_device(config), 1
    from counterpoint.device.choose import gpu_count

    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [name for name in seen.split(",") if name]
        if seen is not None
        else [str(n) for n in range(gpu_count())]
    )
    if len(names) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[rank % len(names)]
    return choose_device(config), workers_on_gpu(rank, workers, max(1, len(names)))


def workers_on_gpu(rank: int, workers: int, gpus: int) -> int:
    """How many of `workers` have the GPU of worker `rank`."""
    return len(range(rank % gpus, workers, gpus))


def make_transports(config: Config, wake: Wake, device: str = "cpu") -> dict[str, Transport]:
    """What can carry KV to and from a worker on `device`, by kind. Raises ConfigError if the wanted transport is not there."""
    wanted, found = config.cluster.transport, dict[str, Transport]()
    makers = gpu_transports(config, wake) if device == "cuda" else host_transports(config, wake)
    unasked = ("cuda-ipc",) if device == "cuda" else tuple(makers)
    if wanted not in ("auto", *makers):
        raise ConfigError(
            f"transport is {wanted}, which does not carry KV of device {device}: set {', '.join(makers)} or auto"
        )
    for kind in unasked if wanted == "auto" else (wanted,):
        try:
            found[kind] = makers[kind]()
        except TransportError as error:
            if wanted != "auto":
                raise ConfigError(f"transport is {wanted}: {error}") from None
            log.warning("transport %s is not there: %s", kind, error)
    return found


def host_transports(config: Config, wake: Wake) -> dict[str, Callable[[], Transport]]:
    return {
        "shm": lambda: ShmTransport(wake),
        "tcp": lambda: TcpTransport(wake, config.cluster.cluster_host or "127.0.0.1"),
        "nixl": lambda: NixlTransport(wake),
    }


def gpu_transports(config: Config, wake: Wake) -> dict[str, Callable[[], Transport]]:
    from counterpoint.device.cuda.ipc import CudaCopier
    from counterpoint.kv_transfer.cuda_ipc import CudaIpcTransport
    from counterpoint.kv_transfer.staged import StagedTransport

    def through_shm() -> Transport:
        inner = ShmTransport(wake)
        return StagedTransport(inner, CudaCopier(staged=True), inner.allocate)

    return {
        "cuda-ipc": lambda: CudaIpcTransport(wake, CudaCopier()),
        "shm": through_shm,
        "tcp": lambda: StagedTransport(
            host_transports(config, wake)["tcp"](), CudaCopier(staged=True)
        ),
    }


def make_identity(
    name: str, links: dict[str, Transport], built: System, token: str, device: str = "cpu"
) -> WorkerIdentity:
    """What worker `name` says of itself to others. Registers its pool with its movers; one that can't take it is left out.
    Raises ConfigError if none can."""
    if built.memory is None or built.digest is None:
        raise ConfigError("the KV of this engine can't be reached by other workers")
    blobs, problems = {}, []
    for kind, link in links.items():
        try:
            blobs[kind] = link.register(built.memory)
        except TransportError as error:
            problems.append(f"{kind}: {error}")
    if not blobs:
        fix = (
            "; --transport shm or tcp sends it through host memory, slowly"
            if device == "cuda"
            else ""
        )
        raise ConfigError(f"no transport can carry this worker's KV: {'; '.join(problems)}{fix}")
    staged = device == "cuda" and "cuda-ipc" not in blobs
    if staged:
        log.warning("%s: KV goes through host memory (%s): slowly", name, ", ".join(blobs))
    reach = TransportEndpoint(secrets.token_hex(8), host_name(), device, tuple(blobs))
    mine = {kind: links[kind] for kind in blobs}
    return WorkerIdentity(
        name, built.digest, reach, built.memory, mine, blobs, token, allow_staged=staged
    )


def make_estimator(config: Config, source: ModelSource, units: int, gpu: str = "") -> Estimator:
    """Prices of steps on a worker of `units` cores, or SMs of the GPU that is called so, for the router."""
    spec = load_spec(source, config.model.max_context_tokens)
    if not gpu:
        return Roofline(spec, cpu_device(units), "float16", "float32")
    dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
    return Roofline(
        spec,
        calibration_store.match_device(gpu, tuple(PRESETS.values())) or unknown_gpu(units),
        *element_types(config, dtype),
    )


def link_bytes_per_s(config: Config, gpu: str) -> float:
    """What a link between two workers carries, for predicting: as set, or by the transport there will be."""
    by_ipc = gpu and config.cluster.transport in ("auto", "cuda-ipc")
    return config.cluster.link_bytes_per_s or (1e11 if by_ipc else 1e9)


def tokenizer_vocab(source: ModelSource, spec: ModelSpec) -> int:
    """Ids that the tokenizer can write: a checkpoint's vocabulary may be padded beyond them, and padding is never sampled."""
    file = Path(source.path) / "tokenizer.json"
    if source.kind != "hf" or not file.is_file():
        return spec.vocab
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values()
    return min(spec.vocab, max(ids) + 1)
