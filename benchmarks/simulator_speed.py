"""Tokens per second of CPU time that the simulator handles: one line per policy.

    python benchmarks/simulator_speed.py TRACE [--requests 1000] [--rate 18] [--runs 3]

Prompt and output tokens of the load over the CPU seconds of `simulate`, per run. Reading the trace
and starting Python are not counted; making the prompts is.
"""

from __future__ import annotations

import argparse
import time

from counterpoint.bench.load import LoadOptions
from counterpoint.config import Config
from counterpoint.simulator.options import SimOptions
from counterpoint.simulator.simulate import simulate


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("trace")
    asked.add_argument("--requests", type=int, default=1000)
    asked.add_argument("--rate", type=float, default=18.0)
    asked.add_argument("--runs", type=int, default=3)
    asked.add_argument("--calibration", default="auto", help="as of `counterpoint simulate`")
    args = asked.parse_args()
    queries = (
        LoadOptions(trace=args.trace, requests=args.requests, arrivals="poisson", rate=args.rate)
        .build_trace()
        .queries
    )
    tokens = sum(q.prompt_tokens + q.output_tokens for q in queries)
    print(f"{len(queries)} requests, {tokens} tokens; M tokens a CPU second:")
    what = SimOptions(calibration=args.calibration)
    for policy in ("serial", "chunked", "multiplex", "auto"):
        config = what.apply_to(Config().replace(policy=policy, ttft_s=0.5, tpot_s=0.025))
        machine = what.make_machine(config)
        rates: list[float] = []
        for _ in range(args.runs):
            began_s = time.process_time()
            simulate(machine, queries, config)
            rates.append(tokens / (time.process_time() - began_s) / 1e6)
        print(f"{policy:10} {'  '.join(f'{rate:.2f}' for rate in rates)}")


if __name__ == "__main__":
    main()
