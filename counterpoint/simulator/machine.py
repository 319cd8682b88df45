"""Machine: what is simulated, and the engine or the pool of engines that would serve it.

Owns: how a model, a device and a configuration become an engine over a simulated device. Promises: the very engine, policies and
front that serve; no torch. Must not: know loads, or run anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from counterpoint.builder.system import make_limits
from counterpoint.config import Config, ConfigError
from counterpoint.core.engine import Engine
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy import make_policy
from counterpoint.core.policy.ablations import ablated_auto
from counterpoint.cost_model.active_units import ActiveUnits
from counterpoint.cost_model.calibration import Calibration
from counterpoint.cost_model.fitted import Fitted
from counterpoint.cost_model.host_overhead import LaunchOverhead
from counterpoint.cost_model.perturbed import Perturbed
from counterpoint.cost_model.roofline import ELEMENT_BYTES, Roofline
from counterpoint.device.sim import FixedLatency, HostModel, SimExecutor, VirtualEventQueue
from counterpoint.disagg.link_bandwidth import LinkBandwidth
from counterpoint.disagg.load_tracker import LoadTracker
from counterpoint.disagg.router import Router, RoutingRule
from counterpoint.interfaces import Estimator, Executor
from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.kv_transfer.sim import SimNetwork, SimTransport
from counterpoint.simulator.pool import SimPool, SimWorker
from counterpoint.spec.device import DeviceSpec
from counterpoint.spec.model import ModelSpec
from counterpoint.types import RequestTiming, Role

MEMORY_SHARE = 0.9  # of the device's memory for weights and KV cache; the rest is for activations and the driver
SPLITS = 16  # at most so many splits for a policy to choose from: finer ones gain nothing (MuxWise uses steps of 16 SMs)
HOST_S = 0.0003
LINK_BYTES_PER_S = 1e11  # between two GPUs of one host, as serving takes it to be until it has measured (worker_setup.link_bytes_per_s)
TURN_S = 0.00025  # events, decisions and answers of auto on the loads of docs/results/simulator_against_h200_*: 0.11 to 0.32 ms


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated: a model on a device. `host_s`: from submitting a step to the device being able to start it (None: what the
    calibration says of the host and its launches, and then a turn of the loop takes TURN_S beside them; else HOST_S). `depth`:
    steps in flight per lane. `belief_error`: how far the policy's prices are off from what steps take, as a share. What steps take:
    as `physics` says, else as fitted to `calibration`, else as the roofline of model and device has it; and `hiccups`: the share of
    them that take longer for once (device/sim.py). `without`: the part that auto lacks (core/policy/ablations.py)."""

    model: ModelSpec
    device: DeviceSpec
    host_s: float | None = None
    depth: int = 2
    belief_error: float = 0.0
    hiccups: float = 0.0
    physics: Estimator | None = None
    calibration: Calibration | None = None
    without: str | None = None

    @property
    def levels(self) -> tuple[int, ...]:
        """Decode units of the splits that a policy may choose from: where there is a calibration, those measured, as on the device
        itself."""
        if self.calibration is not None:
            return self.calibration.splits
        levels = self.device.partitions()
        return levels[:: max(1, -(-len(levels) // SPLITS))]

    def host(self, physics: Estimator) -> HostModel:
        if (
            self.host_s is None
            and isinstance(physics, Fitted)
            and physics.launch_overhead.is_measured
        ):
            return physics.launch_overhead
        return FixedLatency(HOST_S if self.host_s is None else self.host_s)

    def estimators(self, config: Config) -> tuple[Estimator, Estimator]:
        """Physics, for the device, and belief, for the policy."""
        physics = self.physics
        if physics is None:
            prior = Roofline(self.model, self.device, *dtypes(config, self.device))
            physics = prior if self.calibration is None else Fitted(self.calibration, prior)
        return physics, Perturbed(physics, self.belief_error) if self.belief_error else physics


def dtypes(config: Config, device: DeviceSpec) -> tuple[str, str]:
    """Element types of weights and of the KV cache that `config` means on `device`. Raises ConfigError if it has none such."""
    for setting in ("quantization", "kv_cache_dtype"):
        if getattr(config.device, setting) == "fp8" and "fp8" not in dict(device.peak_flops):
            raise ConfigError(f"{setting} is fp8, which {device.name} lacks: leave it out")
    asked = None if config.model.dtype == "auto" else config.model.dtype
    weights = "fp8" if config.device.quantization == "fp8" else asked or device.dtype
    kv = "fp8" if config.device.kv_cache_dtype == "fp8" else asked or device.kv_dtype
    return weights, kv


def kv_pages(model: ModelSpec, device: DeviceSpec, config: Config) -> int:
    """Pages of the KV cache: as configured, or what nine tenths of the memory hold beside the weights.
    Raises ConfigError if nothing is left."""
    if config.device.kv_pages is not None:
        return config.device.kv_pages
    weights, _ = dtypes(config, device)
    weight_bytes = model.weight_bytes(ELEMENT_BYTES[weights])
    left = config.device.kv_memory_bytes or int(device.memory_bytes * MEMORY_SHARE) - weight_bytes
    pages = int(left // (kv_token_bytes(model, device, config) * config.device.page_tokens))
    if pages < 1:
        raise ConfigError(
            f"{model.name} has {weight_bytes / 1e9:.1f} GB of {weights} weights, which leaves no room for a KV cache in the "
            f"{device.memory_bytes / 1e9:.0f} GB of {device.name}: choose a larger device or a smaller model"
        )
    return pages


def kv_token_bytes(model: ModelSpec, device: DeviceSpec, config: Config) -> float:
    """Of one token's keys and values, over all devices that hold the model together."""
    copies = device.degree * model.sharded(device.degree).cached_features / model.cached_features
    return copies * model.kv_bytes_per_token(ELEMENT_BYTES[dtypes(config, device)[1]])


def make_engine(machine: Machine, config: Config, belief: Estimator) -> Engine:
    """The engine that would serve `machine`. Raises ConfigError if `config` does not suit it."""
    model, device = machine.model, machine.device
    limits = make_limits(
        config, model, kv_pages(model, device, config), device.units, device.overlap
    )
    scheduler, levels, auto = config.scheduler, machine.levels, ablated_auto(machine.without)
    try:
        shape = DeviceShape(device.units, model.layers, machine.depth, levels)
        policy = make_policy(scheduler, shape, belief, auto)
    except ValueError as error:
        raise ConfigError(f"{device.name}: {error}") from None
    return Engine(limits, policy)


def make_sim_engine(machine: Machine, config: Config) -> tuple[Engine, Executor, VirtualEventQueue]:
    """An engine on a simulated device, with a clock of their own."""
    physics, belief = machine.estimators(config)
    engine = make_engine(machine, config, belief)
    host = machine.host(physics)
    inbox = VirtualEventQueue(TURN_S if isinstance(host, LaunchOverhead) else 0.0)
    roofline = physics.prior if isinstance(physics, Fitted) else physics
    active = ActiveUnits(roofline) if isinstance(roofline, Roofline) else None
    device = SimExecutor(
        physics,
        inbox,
        machine.model.layers,
        host,
        active_units=active,
        hiccup_share=machine.hiccups,
    )
    return engine, device, inbox


def make_pool(
    machine: Machine, config: Config, deliver: Callable[[RequestTiming, str], None]
) -> SimPool:
    """Workers as `config` wants them, with the front that would serve them (serve/pool)."""
    cluster, model, device = config.cluster, machine.model, machine.device
    token_bytes = round(kv_token_bytes(model, device, config))
    bandwidth = cluster.link_bytes_per_s or (
        1e9 if device.name.startswith("cpu") else LINK_BYTES_PER_S * device.degree
    )
    wires = LinkBandwidth(bandwidth, token_bytes)
    # In the movers' memory a byte stands for one page of one layer's keys or values.
    page_bytes = token_bytes * config.device.page_tokens / (2 * model.layers)
    network = SimNetwork(bandwidth / page_bytes, checks_grants=True)
    movers: dict[str, SimTransport] = {}
    workers: list[SimWorker] = []
    for kind, count, role in (
        ("prefill", cluster.prefill, Role.PREFILL),
        ("decode", cluster.decode, Role.DECODE),
        ("replica", cluster.replicas, Role.BOTH),
    ):
        for number in range(count):
            name = f"{kind}-{number}"
            engine, executor, inbox = make_sim_engine(machine, config)
            mover = SimTransport(network, name, movers)
            mover.register(
                KvMemory(
                    tuple(np.zeros(engine.limits.pages, np.uint8) for _ in range(2 * model.layers)),
                    1,
                )
            )
            workers.append(SimWorker(name, role, engine, executor, inbox, mover))
    return SimPool(
        workers,
        network,
        LoadTracker(
            Router(machine.estimators(config)[1], wires, RoutingRule.from_config(cluster)),
            config.scheduler.prefix_cache,
        ),
        deliver,
        message_s=wires.control_s,  # after the last byte one word is said
        deadline_s=cluster.handoff_deadline_s,
        chunk_tokens=config.scheduler.chunk_tokens or 512,
    )
