"""Which machine a simulation has, and how its result is reported: options of the commands.

Owns: the flags that `simulate`, `plan` and `compare` share. Promises: every wrong value is named
with its flag. Must not: run anything.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from counterpoint.bench.load import flag, json_flag
from counterpoint.builder.system_builder import find_model
from counterpoint.config import Config, ModelConfig
from counterpoint.core.policy.ablations import ABLATIONS
from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.calibration import shape_key
from counterpoint.simulator.machine import Machine, dtypes
from counterpoint.spec.device import device_spec
from counterpoint.spec.source import load_spec

MODEL = "llama-3.1-8b"
MACHINE = Group("Simulated machine", sort_key=0)
POOL = Group("Several of them", sort_key=0.5)
OUTPUT = Group("Output", sort_key=4)
JSON = json_flag(OUTPUT)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimOptions:
    """Which machine."""

    model: Annotated[
        str | None,
        flag(
            "a known shape, a config.json, a Hugging Face folder or a GGUF file "
            f"[default: {MODEL}]",
            MACHINE,
        ),
    ] = None
    gpu: Annotated[
        str,
        flag(
            "h200 (measured); h100, a100, a800, h20, b200 (by datasheet); 8xh100: of 8 in tensor "
            "parallelism; cpu-N, of N cores",
            MACHINE,
        ),
    ] = "h200"
    dtype: Annotated[
        str | None,
        flag("of weights and maths: bfloat16, float16, float32; unset: the device's", MACHINE),
    ] = None
    quantization: Annotated[str | None, flag("of the weights: none, fp8", MACHINE)] = None
    kv_cache_dtype: Annotated[str | None, flag("of the KV cache: auto, fp8", MACHINE)] = None
    kv_pages: Annotated[
        int | None,
        flag("pages of the KV cache; unset: what the memory holds beside the weights", MACHINE),
    ] = None
    max_context_tokens: Annotated[
        int | None, flag("prompt and answer together; unset: what the model allows", MACHINE)
    ] = None
    prefill: Annotated[
        int | None, flag("such machines that prefill, for others to decode", POOL)
    ] = None
    decode: Annotated[
        int | None, flag("such machines that decode what others have prefilled", POOL)
    ] = None
    replicas: Annotated[int | None, flag("such machines that do both", POOL)] = None
    local_tokens: Annotated[
        int | None,
        flag(
            "a prompt of which no more must be computed is prefilled where it is decoded; "
            "0: never; unset: 512",
            POOL,
        ),
    ] = None
    link_bytes_per_s: Annotated[
        float | None, flag("what a link between two carries; unset: 1e11 a GPU, CPUs 1e9", POOL)
    ] = None
    host_overhead: Annotated[
        float | None,
        flag(
            "seconds from launching a step to its earliest start; unset: as calibrated, "
            "else 0.0003",
            MACHINE,
        ),
    ] = None
    depth: Annotated[
        int, flag("steps in flight per lane: 2 hides the host's overhead", MACHINE)
    ] = 2
    calibration: Annotated[
        str,
        flag(
            "what steps take: a file of `counterpoint calibrate`, none (the roofline), auto "
            "(one that came along, if any)",
            MACHINE,
        ),
    ] = "auto"
    without: Annotated[
        str | None, flag(f"take a part out of auto: {', '.join(ABLATIONS)}", MACHINE)
    ] = None
    belief_error: Annotated[
        float, flag("how far the policy's prices are off, as a share: 0.2 is up to 20 %", MACHINE)
    ] = 0.0
    hiccups: Annotated[
        float, flag("share of steps that take 1.3 to 4 times as long as they should", MACHINE)
    ] = 0.0

    def apply_to(self, config: Config) -> Config:
        """`config` with the options that are set."""
        names = ("dtype", "quantization", "kv_cache_dtype", "kv_pages", "max_context_tokens")
        names += ("prefill", "decode", "replicas", "local_tokens", "link_bytes_per_s")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        named = config.model.model if config.model.model != ModelConfig().model else MODEL
        return config.replace(model=self.model or named, **given)

    def make_machine(self, config: Config) -> Machine:
        if self.depth < 1:
            raise ValueError(f"--depth is {self.depth}: it must be 1 or more")
        if not 0 <= (self.host_overhead or 0.0) < math.inf:
            raise ValueError(
                f"--host-overhead is {self.host_overhead}: it must be 0 or more seconds"
            )
        if not 0 <= self.belief_error < 1:
            raise ValueError(
                f"--belief-error is {self.belief_error}: it must be at least 0 and less than 1"
            )
        spec = load_spec(find_model(config), config.model.max_context_tokens)
        if not 0 <= self.hiccups <= 1:
            raise ValueError(f"--hiccups is {self.hiccups}: it must be between 0 and 1")
        if self.without is not None and self.without not in ABLATIONS:
            raise ValueError(
                f"--without is {self.without!r}: it must be one of {', '.join(ABLATIONS)}"
            )
        device = device_spec(self.gpu)
        table = None
        if self.calibration == "auto":
            table = calibration_store.shipped_calibration(device, spec, *dtypes(config, device))
        elif self.calibration != "none":
            table = calibration_store.load(Path(self.calibration))
            if (table.key.units, table.key.model) != (device.units, shape_key(spec)):
                raise ValueError(
                    f"--calibration {self.calibration}: measured on {table.key.device} "
                    f"with {table.key.model}"
                )
        return Machine(
            spec,
            device,
            self.host_overhead,
            depth=self.depth,
            belief_error=self.belief_error,
            hiccups=self.hiccups,
            calibration=table,
            without=self.without,
        )


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimReportOptions:
    """How it is judged, and where it goes."""

    slo: Annotated[
        str | None,
        flag(
            "targets, e.g. ttft=1.0,tpot=50ms,itl=0.2: for the policy, goodput and attainment",
            OUTPUT,
        ),
    ] = None
    json: Annotated[str | None, JSON] = None
    save_detailed: Annotated[bool, flag("with lists of every request's figures", OUTPUT)] = False
    timeline: Annotated[
        str | None, flag("write a Chrome/Perfetto trace of the lanes to this file", OUTPUT)
    ] = None
    event_log: Annotated[
        str | None, flag("record every event that enters the engine to this file", OUTPUT)
    ] = None
    watch: Annotated[
        bool, flag("hold every command against the executor's contract (slower)", OUTPUT)
    ] = False
