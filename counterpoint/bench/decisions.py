"""How long deciding takes: `python -m counterpoint.bench.decisions` prints what a prediction and a decision cost on this machine.

Owns: the measurement. Promises: the engine and auto that serve, on a simulated H200, with 64 and 200 requests decoding while
prompts of 1,000 tokens arrive; every call of the policy that decides something is timed, at first sight of a state as later. Times
are this thread's CPU time. Must not: be a test.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from counterpoint.config import SchedulerConfig
from counterpoint.core.engine import Engine
from counterpoint.core.limits import Limits
from counterpoint.core.loop import run
from counterpoint.core.policy import make_policy
from counterpoint.device.sim import Latency, SimExecutor, VirtualInbox
from counterpoint.perf.roofline import Roofline
from counterpoint.spec.device import H200
from counterpoint.spec.presets import PRESETS
from counterpoint.types import Arrive, Sampling, Slo, Work

MODEL = PRESETS["llama-3.1-8b"]
PROMPT, ANSWER, CONTEXT = 1000, 400, 1500
LEVELS = H200.partitions()
DECISIONS = ("order", "fill", "advance", "preempts")


def predictions(count: int = 4000) -> dict[str, list[float]]:
    """Microseconds of pricing a step: one never seen before (alone, beside another), and one that is remembered."""
    dice, roofline = random.Random(0), Roofline(MODEL, H200)
    spent: dict[str, list[float]] = {"alone, new": [], "beside, new": [], "beside, again": []}
    for _ in range(count):
        tokens, batch = dice.randint(64, 8192), dice.randint(1, 256)
        level = dice.choice(LEVELS)
        prefill = Work(tokens, tokens * tokens, 0, 1, samples=1, last_layer=8, layers=MODEL.layers)
        decode = Work(0, 0, 0, 0, batch, batch * dice.randint(100, 8000), batch, 0, MODEL.layers, MODEL.layers)
        spent["alone, new"].append(timed(lambda p=prefill, u=level: roofline.seconds(p, H200.units - u)))
        spent["beside, new"].append(timed(lambda d=decode, p=prefill, u=level: roofline.seconds(d, u, (p, H200.units - u))))
        spent["beside, again"].append(timed(lambda d=decode, p=prefill, u=level: roofline.seconds(d, u, (p, H200.units - u))))
    return spent


def decisions(decoding: int, prompts: int = 150) -> dict[str, list[float]]:
    """Microseconds of every call of the policy, by the question asked."""
    belief = Roofline(MODEL, H200)
    policy = make_policy(SchedulerConfig(ttft_s=1.0, tpot_s=0.05), H200.units, MODEL.layers, 2, levels=LEVELS, belief=belief)
    spent: dict[str, list[float]] = {}
    for name in DECISIONS:
        setattr(policy, name, watched(getattr(policy, name), spent.setdefault(name, [])))
    limits = Limits(40_000, 16, 256, 8192, 8192, (), H200.units, MODEL.layers, overlap=True, prefix_cache=False)
    inbox = VirtualInbox()
    for number in range(decoding + prompts):
        early = number < decoding
        at_s = 0.0 if early else 5.0 + 0.05 * (number - decoding)
        sampling = Sampling(max_tokens=2 * ANSWER if early else ANSWER // 10, ignore_eos=True)
        prompt = (7,) * (CONTEXT if early else PROMPT)
        inbox.post(at_s, Arrive(id=str(number), prompt=prompt, sampling=sampling, slo=Slo(ttft_s=1.0, tpot_s=0.05)))
    executor = SimExecutor(Roofline(MODEL, H200), inbox, MODEL.layers, Latency(0.0003))
    run(Engine(limits, policy), inbox, executor, lambda outputs, engine: None)
    return spent


def watched(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
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
    print(f"{title:34} {'calls':>7} {'p50':>8} {'p99':>8} {'max':>8}  us")
    for name, values in spent.items():
        ordered = sorted(values)
        if ordered:
            p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
            print(f"  {name:32} {len(ordered):7} {p50:8.1f} {p99:8.1f} {ordered[-1]:8.1f}")


def main() -> None:
    show("a prediction (goal: 50 us)", predictions())
    for decoding in (64, 200):
        show(f"a decision, {decoding} decoding (goal: 1 ms)", decisions(decoding))


if __name__ == "__main__":
    main()
