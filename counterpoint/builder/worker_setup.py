"""What an engine needs to be a worker of a pool: a GPU of its own, KV transports, an identity.

Owns: which transports a worker can have, and what the router predicts with before measurements.
Must not: build the engine (build.py does).
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping

from counterpoint.builder.system import System, element_types
from counterpoint.builder.system_builder import choose_device, gpu_count, set_hardware_queues
from counterpoint.config import Config, ConfigError
from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.roofline import Roofline
from counterpoint.disagg.handoff_runner import WorkerIdentity
from counterpoint.disagg.link_choice import TransportEndpoint
from counterpoint.interfaces import Estimator
from counterpoint.kv_transfer.host import host_name
from counterpoint.kv_transfer.nixl import NixlTransport
from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.kv_transfer.tcp import TcpTransport
from counterpoint.kv_transfer.transport import Transport, TransportError, Wake
from counterpoint.spec.device import PRESETS, cpu_device, unknown_gpu
from counterpoint.spec.source import ModelSource, load_spec

log = logging.getLogger(__name__)

TransportFactories = Mapping[str, Callable[[], Transport]]


def claim_gpu(config: Config, rank: int | None, workers: int) -> tuple[str, int]:
    """(device, number of workers that share it) of worker `rank` of the `workers` of this machine.

    GPUs are dealt out round robin; the process then sees its own alone. Call it before the GPU is
    used in any way. `rank` None: a launcher has already chosen the GPU. Raises ConfigError.
    """
    set_hardware_queues()
    if rank is None or config.device.device == "cpu":
        return choose_device(config), 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name for name in visible.split(",") if name]
    else:
        names = [str(number) for number in range(gpu_count())]
    if len(names) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[rank % len(names)]
    return choose_device(config), workers_on_gpu(rank, workers, max(1, len(names)))


def workers_on_gpu(rank: int, workers: int, gpus: int) -> int:
    """How many of `workers` share the GPU of worker `rank`."""
    return len(range(rank % gpus, workers, gpus))


def make_transports(config: Config, wake: Wake, device: str = "cpu") -> dict[str, Transport]:
    """The transports that carry KV to and from a worker on `device`, by kind. Raises ConfigError
    if the configured one can't."""
    wanted, made = config.cluster.transport, dict[str, Transport]()
    factories = (
        _gpu_transports(config, wake) if device == "cuda" else _host_transports(config, wake)
    )
    if wanted not in ("auto", *factories):
        raise ConfigError(
            f"transport is {wanted}, which does not carry KV of device {device}: set "
            f"{', '.join(factories)} or auto"
        )
    automatic = ("cuda-ipc",) if device == "cuda" else tuple(factories)
    for kind in automatic if wanted == "auto" else (wanted,):
        try:
            made[kind] = factories[kind]()
        except TransportError as error:
            if wanted != "auto":
                raise ConfigError(f"transport is {wanted}: {error}") from None
            log.warning("transport %s is not available: %s", kind, error)
    return made


def _host_transports(config: Config, wake: Wake) -> TransportFactories:
    return {
        "shm": lambda: ShmTransport(wake),
        "tcp": lambda: TcpTransport(wake, config.cluster.cluster_host or "127.0.0.1"),
        "nixl": lambda: NixlTransport(wake),
    }


def _gpu_transports(config: Config, wake: Wake) -> TransportFactories:
    from counterpoint.device.cuda.ipc import CudaCopier
    from counterpoint.kv_transfer.cuda_ipc import CudaIpcTransport
    from counterpoint.kv_transfer.staged import StagedTransport

    def staged_shm() -> Transport:
        inner = ShmTransport(wake)
        return StagedTransport(inner, CudaCopier(staged=True), inner.allocate)

    return {
        "cuda-ipc": lambda: CudaIpcTransport(wake, CudaCopier()),
        "shm": staged_shm,
        "tcp": lambda: StagedTransport(
            _host_transports(config, wake)["tcp"](), CudaCopier(staged=True)
        ),
    }


def make_identity(
    name: str, transports: dict[str, Transport], system: System, token: str, device: str = "cpu"
) -> WorkerIdentity:
    """What worker `name` tells other workers about itself.

    Registers its KV pool with each transport and drops those that can't take it. Raises
    ConfigError if none can.
    """
    if system.memory is None or system.digest is None:
        raise ConfigError("other workers can't reach the KV of this engine")
    registrations, problems = {}, []
    for kind, transport in transports.items():
        try:
            registrations[kind] = transport.register(system.memory)
        except TransportError as error:
            problems.append(f"{kind}: {error}")
    on_gpu = device == "cuda"
    if not registrations:
        fix = "; --transport shm or tcp sends it through host memory, slowly" if on_gpu else ""
        raise ConfigError(f"no transport can carry this worker's KV: {'; '.join(problems)}{fix}")
    staged = on_gpu and "cuda-ipc" not in registrations
    if staged:
        log.warning("%s: KV goes through host memory (%s): slowly", name, ", ".join(registrations))
    return WorkerIdentity(
        name,
        system.digest,
        TransportEndpoint(secrets.token_hex(8), host_name(), device, tuple(registrations)),
        system.memory,
        {kind: transports[kind] for kind in registrations},
        registrations,
        token,
        allow_staged=staged,
    )


def make_estimator(config: Config, source: ModelSource, units: int, gpu: str = "") -> Estimator:
    """The router's estimator for a worker of `units` cores, or of `units` SMs of the GPU named
    `gpu`."""
    spec = load_spec(source, config.model.max_context_tokens)
    if not gpu:
        return Roofline(spec, cpu_device(units), "float16", "float32")
    device = calibration_store.match_device(gpu, tuple(PRESETS.values())) or unknown_gpu(units)
    dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
    return Roofline(spec, device, *element_types(config, dtype))


def link_bytes_per_s(config: Config, gpu: str) -> float:
    """Expected bandwidth between two workers: as configured, or by the transport they will use."""
    by_ipc = gpu and config.cluster.transport in ("auto", "cuda-ipc")
    return config.cluster.link_bytes_per_s or (1e11 if by_ipc else 1e9)
