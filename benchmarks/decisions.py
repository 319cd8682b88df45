"""What a prediction and a decision cost on this machine: `python -m benchmarks.decisions`.

Runs the engine and policy auto on a simulated H200, once with the shipped calibration and its
measured splits, once with the roofline and all splits. 64 or 200 requests decode while prompts of
1,000 tokens arrive. Every call of the policy that decides something is timed, the first of a state
too. Times are this thread's CPU time; each call counts with its fastest of several identical runs,
which leaves out other processes and the garbage collector.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from counterpoint.config import SchedulerConfig
from counterpoint.core.engine import Engine
from counterpoint.core.limits import DeviceShape, EngineLimits
from counterpoint.core.loop import run
from counterpoint.core.policy import make_policy
from counterpoint.cost_model import calibration_store
from counterpoint.cost_model.fitted import Fitted
from counterpoint.cost_model.roofline import Roofline
from counterpoint.device.sim import FixedLatency, SimExecutor, VirtualEventQueue
from counterpoint.interfaces import Estimator
from counterpoint.spec.device import H200
from counterpoint.spec.presets import PRESETS
from counterpoint.types import AddRequest, BatchShape, Sampling, Slo

MODEL = PRESETS["llama-3.1-8b"]
PROMPT, ANSWER, CONTEXT = 1000, 400, 1500
PROMPTS = 150  # arrive while others decode
STEPS = 4000  # predictions
RUNS = 3
DECISIONS = ("order", "fill", "advance", "preempts")


class EstimatorCase(NamedTuple):
    """`make` returns an estimator with empty caches. `levels`: decode units of the splits."""

    name: str
    make: Callable[[], Estimator]
    levels: tuple[int, ...]


def estimator_cases() -> Iterator[EstimatorCase]:
    table = calibration_store.shipped_calibration(H200, MODEL, "bfloat16", "bfloat16")
    if table is not None:
        yield EstimatorCase(
            "calibrated", lambda: Fitted(table, Roofline(MODEL, H200)), table.splits
        )
    yield EstimatorCase("roofline", lambda: Roofline(MODEL, H200), H200.partitions())


def predictions(case: EstimatorCase) -> dict[str, list[float]]:
    """Microseconds of one prediction: of a new step (alone, beside another), and of a cached
    one."""
    return fastest([predict(case.make(), case.levels) for _ in range(RUNS)])


def predict(estimator: Estimator, levels: tuple[int, ...]) -> dict[str, list[float]]:
    dice = random.Random(0)
    spent: dict[str, list[float]] = {"alone, new": [], "beside, new": [], "beside, again": []}
    for _ in range(STEPS):
        tokens, batch = dice.randint(64, 8192), dice.randint(1, 256)
        level = dice.choice(levels)
        rest = H200.units - level
        prefill = BatchShape(
            tokens, tokens * tokens, 0, 1, samples=1, last_layer=8, layers=MODEL.layers
        )
        decode = BatchShape(
            0, 0, 0, 0, batch, batch * dice.randint(100, 8000), batch, 0, MODEL.layers, MODEL.layers
        )
        spent["alone, new"].append(timed(lambda p=prefill, r=rest: estimator.seconds(p, r)))
        spent["beside, new"].append(
            timed(lambda d=decode, p=prefill, u=level, r=rest: estimator.seconds(d, u, (p, r)))
        )
        spent["beside, again"].append(
            timed(lambda d=decode, p=prefill, u=level, r=rest: estimator.seconds(d, u, (p, r)))
        )
    return spent


def decisions(case: EstimatorCase, decoding: int) -> dict[str, list[float]]:
    """Microseconds of every call of the policy, by method."""
    return fastest([decide(case, decoding) for _ in range(RUNS)])


def decide(case: EstimatorCase, decoding: int) -> dict[str, list[float]]:
    scheduler = SchedulerConfig(ttft_s=1.0, tpot_s=0.05)
    policy = make_policy(
        scheduler, DeviceShape(H200.units, MODEL.layers, 2, case.levels), case.make()
    )
    spent: dict[str, list[float]] = {}
    for name in DECISIONS:
        setattr(policy, name, record_times(getattr(policy, name), spent.setdefault(name, [])))
    limits = EngineLimits(
        40_000, 16, 256, 8192, 8192, (), H200.units, MODEL.layers, overlap=True, prefix_cache=False
    )
    inbox = VirtualEventQueue()
    for number in range(decoding + PROMPTS):
        early = number < decoding
        at_s = 0.0 if early else 5.0 + 0.05 * (number - decoding)
        sampling = Sampling(max_tokens=2 * ANSWER if early else ANSWER // 10, ignore_eos=True)
        prompt = (7,) * (CONTEXT if early else PROMPT)
        inbox.post(
            at_s,
            AddRequest(
                id=str(number), prompt=prompt, sampling=sampling, slo=Slo(ttft_s=1.0, tpot_s=0.05)
            ),
        )
    device = SimExecutor(case.make(), inbox, MODEL.layers, FixedLatency(0.0003))
    run(Engine(limits, policy), inbox, device, lambda outputs, engine: None)
    return spent


def fastest(runs: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The fastest time of each call, over runs with the same calls."""
    return {
        name: [min(same) for same in zip(*(spent[name] for spent in runs), strict=True)]
        for name in runs[0]
    }


def record_times(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timing(*args: Any) -> Any:
        start_ns = time.thread_time_ns()
        answer = call(*args)
        if answer is not None:  # there was something to decide
            spent.append((time.thread_time_ns() - start_ns) / 1e3)
        return answer

    return timing


def timed(call: Callable[[], float]) -> float:
    start_ns = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start_ns) / 1e3


def show(title: str, spent: dict[str, list[float]]) -> None:
    print(f"{title:48} {'calls':>7} {'p50':>8} {'p99':>8} {'max':>8}  us")
    for name, values in spent.items():
        ordered = sorted(values)
        if ordered:
            p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
            print(f"  {name:46} {len(ordered):7} {p50:8.1f} {p99:8.1f} {ordered[-1]:8.1f}")


def main() -> None:
    for case in estimator_cases():
        show(f"{case.name}: a prediction (goal: 50 us)", predictions(case))
        for decoding in (64, 200):
            show(
                f"{case.name}: a decision, {decoding} decoding (goal: 1 ms)",
                decisions(case, decoding),
            )


if __name__ == "__main__":
    main()
