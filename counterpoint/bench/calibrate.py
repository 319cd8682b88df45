"""The `calibrate` command: measure what steps take on this device, and report how well that
predicts other steps.

It ends in about the given time. A second run continues from the saved table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Group, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from counterpoint import __version__
from counterpoint.bench.calibration_plan import (
    SUSTAINED,
    DeviceCapacity,
    held_out_jobs,
    plan_jobs,
)
from counterpoint.bench.calibration_report import report, show
from counterpoint.bench.calibration_run import SUSTAINED_SHARE, CalibrationRun, run_jobs
from counterpoint.bench.load import flag
from counterpoint.builder import system_builder
from counterpoint.builder.system import CalibrationTarget, System
from counterpoint.config import Config, require_writable
from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.calibration import Calibration, file_name
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.step_probe import PROMPT_SLOTS, StepProbe
from counterpoint.flags import config_flags

CPU_POOL_BYTES = 1 << 30  # every page is written before anything is measured
CALIBRATION = Group("Calibration", sort_key=0)
JSON = Parameter(
    help="write the held-out points and errors to this file",
    group=CALIBRATION,
    allow_leading_hyphen=True,
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateOptions:
    budget: Annotated[float, flag("seconds to measure, beside loading", CALIBRATION)] = 240.0
    out: Annotated[
        Path | None,
        flag("file of the table; unset: in the cache folder, where it is found", CALIBRATION),
    ] = None
    json: Annotated[Path | None, JSON] = None
    fresh: Annotated[bool, flag("discard earlier measurements", CALIBRATION)] = False
    seed: Annotated[
        int, flag("of the held-out steps, which judge the fit and are not fitted", CALIBRATION)
    ] = 1

    def check(self) -> None:
        if not 0 < self.budget < math.inf:
            raise ValueError(f"--budget is {self.budget}: it must be more than 0 seconds")
        if self.seed < 0:
            raise ValueError(f"--seed is {self.seed}: it must be 0 or more")
        if self.out is not None and self.out.is_dir():
            raise ValueError(f"--out is {self.out}: that is a folder; name a file in it")
        require_writable("--json", self.json)


@config_flags("model", "device")
def command(*, options: CalibrateOptions = CalibrateOptions(), config: Config) -> int:
    """Measure what steps take here, for `--policy auto`. Run it again to resume after an
    interruption.

    counterpoint calibrate smollm2

    counterpoint calibrate llama-3.1-8b --device cuda
    """
    options.check()
    console = Console(stderr=True, highlight=False)
    inbox = WallClockEventQueue()
    with console.status("starting") as status:
        system = system_builder.build_system(calibration_config(config), inbox, status.update)
    try:
        target = system.calibration_target
        assert target is not None
        if not target.levels:
            raise ValueError(
                f"{target.key.device} can't be split here, so no policy needs its step times"
            )
        path = options.out or system_builder.calibration_folder() / file_name(target.key)
        table = open_table(path, target, options.seed, options.fresh)
        run = open_run(system, inbox, table, target, path)
        num_skipped = _measure(run, system, target, options, console)
    finally:
        system.executor.close()
    result = report(table, run.prior) | {"left_out": num_skipped, "table": str(path)}
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    show(Console(), result)
    console.print(
        f"{len(table.points)} points in {path}; {num_skipped} left out for want of time",
        soft_wrap=True,
    )
    return 0


def calibration_config(config: Config) -> Config:
    """`config` with two lanes, random weights where there are none (times do not depend on them),
    and a KV pool of CPU_POOL_BYTES on a CPU."""
    config = config.replace(policy="multiplex")
    if system_builder.find_model(config).kind == "spec":
        config = config.replace(load_format="dummy")
    unset = config.device.kv_memory_bytes is None and config.device.kv_pages is None
    if unset and system_builder.choose_device(config) == "cpu":
        config = config.replace(kv_memory_bytes=CPU_POOL_BYTES)
    return config


def open_table(path: Path, target: CalibrationTarget, seed: int, fresh: bool) -> Calibration:
    """The table at `path`, if it has the same device, model, kernels, padded sizes and seed of the
    held-out steps; else a new one."""
    about = {"date": date.today().isoformat(), "counterpoint": __version__, "seed": str(seed)}
    new = Calibration(
        key=target.key, about=about, buckets=target.buckets, pass_buckets=target.pass_buckets
    )
    if path.is_file() and not fresh:
        old = calibration_store.load(path)
        same = (old.key, old.buckets, old.pass_buckets) == (new.key, new.buckets, new.pass_buckets)
        if same and old.about.get("seed") == about["seed"]:
            return old
    return new


def open_run(
    system: System,
    inbox: WallClockEventQueue,
    table: Calibration,
    target: CalibrationTarget,
    path: Path,
) -> CalibrationRun:
    limits = system.limits
    probe = StepProbe(
        system.executor,
        inbox,
        limits.pages,
        limits.page_tokens,
        limits.units,
        limits.layers,
        system.engine.policy.lanes[0].depth,
        system.spec.vocab,
    )
    return CalibrationRun(
        probe, table, target.prior, lambda table: calibration_store.save(table, path)
    )


def _measure(
    run: CalibrationRun,
    system: System,
    target: CalibrationTarget,
    options: CalibrateOptions,
    console: Console,
) -> int:
    """Measure all jobs with a progress bar; returns how many were skipped for lack of time."""
    limits, budget_s = system.limits, options.budget
    capacity = DeviceCapacity(
        limits.max_context_tokens,
        limits.pages * limits.page_tokens,
        limits.max_running - PROMPT_SLOTS,
        limits.max_pass_tokens,
    )
    max_tokens = run.max_measurable_tokens(capacity, budget_s)
    held_out = held_out_jobs(limits.units, target.levels, capacity, max_tokens, options.seed)
    jobs = plan_jobs(limits.units, target.levels, capacity, target.pass_buckets)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=2) as bar:
        task = bar.add_task(f"{system.spec.name} on {target.key.device}", total=None)
        num_skipped = run_jobs(
            run,
            jobs,
            held_out,
            budget_s * (1 - SUSTAINED_SHARE * len(SUSTAINED)),
            lambda done, total: bar.update(task, completed=done, total=total),
        )
        run.measure_sustained(capacity, target.levels, budget_s)
    return num_skipped
