"""What is simulated: a model on a device, and the engine that would serve it there.

Owns: how a model, a device and a configuration become an engine over a simulated device. Promises:
the engine and policies that serve; no torch. Must not: know loads, or run anything.
"""

from __future__ import annotations

import dataclasses

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
from counterpoint.interfaces import Estimator, Executor
from counterpoint.spec.device import DeviceSpec
from counterpoint.spec.model import ModelSpec

MEMORY_SHARE = 0.9  # for weights and KV cache; activations and the driver have the rest
MAX_SPLITS = 16  # for a policy to choose from: finer ones gain nothing (MuxWise: steps of 16 SMs)
HOST_OVERHEAD_S = 0.0003
# Events, decisions and outputs of auto, as measured on an H200 host: 0.11 to 0.32 ms
# (docs/results/simulator_against_h200_*).
LOOP_TURN_S = 0.00025


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """`host_s`: from submitting a step to its earliest start. None: what the calibration measured,
    with LOOP_TURN_S per turn of the loop beside it; HOST_OVERHEAD_S without a calibration.
    `depth`: steps in flight per lane. `belief_error`: how far the policy's estimates are off, as a
    share. `hiccups`: the share of steps that take longer (device/sim.py). `without`: the part that
    auto lacks (core/policy/ablations.py).

    Step durations: by `physics`, else as fitted to `calibration`, else by the roofline.
    """

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
        """Decode units of the splits that a policy may choose from; with a calibration, those
        measured, as on the device itself."""
        if self.calibration is not None:
            return self.calibration.splits
        levels = self.device.partitions()
        return levels[:: max(1, -(-len(levels) // MAX_SPLITS))]

    def host_model(self, physics: Estimator) -> HostModel:
        if (
            self.host_s is None
            and isinstance(physics, Fitted)
            and physics.launch_overhead.is_measured
        ):
            return physics.launch_overhead
        return FixedLatency(HOST_OVERHEAD_S if self.host_s is None else self.host_s)

    def estimators(self, config: Config) -> tuple[Estimator, Estimator]:
        """(physics, for the device; belief, for the policy)."""
        physics = self.physics
        if physics is None:
            prior = Roofline(self.model, self.device, *dtypes(config, self.device))
            physics = prior if self.calibration is None else Fitted(self.calibration, prior)
        return physics, Perturbed(physics, self.belief_error) if self.belief_error else physics


def dtypes(config: Config, device: DeviceSpec) -> tuple[str, str]:
    """(weights, KV cache). Raises ConfigError if `device` lacks a configured type."""
    for setting in ("quantization", "kv_cache_dtype"):
        if getattr(config.device, setting) == "fp8" and "fp8" not in dict(device.peak_flops):
            raise ConfigError(f"{setting} is fp8, which {device.name} lacks: leave it out")
    asked = None if config.model.dtype == "auto" else config.model.dtype
    weights = "fp8" if config.device.quantization == "fp8" else asked or device.dtype
    kv = "fp8" if config.device.kv_cache_dtype == "fp8" else asked or device.kv_dtype
    return weights, kv


def kv_pages(model: ModelSpec, device: DeviceSpec, config: Config) -> int:
    """As configured, or what MEMORY_SHARE of the memory holds beside the weights. Raises
    ConfigError if nothing is left."""
    if config.device.kv_pages is not None:
        return config.device.kv_pages
    weights, _ = dtypes(config, device)
    weight_bytes = model.weight_bytes(ELEMENT_BYTES[weights])
    left = config.device.kv_memory_bytes or int(device.memory_bytes * MEMORY_SHARE) - weight_bytes
    pages = int(left // (kv_token_bytes(model, device, config) * config.device.page_tokens))
    if pages < 1:
        raise ConfigError(
            f"{model.name} has {weight_bytes / 1e9:.1f} GB of {weights} weights, which leaves no "
            f"room for a KV cache in the {device.memory_bytes / 1e9:.0f} GB of {device.name}: "
            "choose a larger device or a smaller model"
        )
    return pages


def kv_token_bytes(model: ModelSpec, device: DeviceSpec, config: Config) -> float:
    """Of one token, summed over all devices that hold the model together."""
    copies = device.degree * model.sharded(device.degree).cached_features / model.cached_features
    return copies * model.kv_bytes_per_token(ELEMENT_BYTES[dtypes(config, device)[1]])


def make_engine(machine: Machine, config: Config, belief: Estimator) -> Engine:
    """Raises ConfigError if `config` does not suit `machine`."""
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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SimEngine:
    """An engine on a simulated device, with a virtual clock of its own."""

    engine: Engine
    executor: Executor
    events: VirtualEventQueue


def make_sim_engine(machine: Machine, config: Config) -> SimEngine:
    physics, belief = machine.estimators(config)
    engine = make_engine(machine, config, belief)
    host = machine.host_model(physics)
    events = VirtualEventQueue(LOOP_TURN_S if isinstance(host, LaunchOverhead) else 0.0)
    roofline = physics.prior if isinstance(physics, Fitted) else physics
    active = ActiveUnits(roofline) if isinstance(roofline, Roofline) else None
    executor = SimExecutor(
        physics,
        events,
        machine.model.layers,
        host,
        active_units=active,
        hiccup_share=machine.hiccups,
    )
    return SimEngine(engine, executor, events)
