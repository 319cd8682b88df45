"""Random handoff runs: `python tests/support/soak_handoffs.py --steps N [--weather storm]`.

Prints one line of JSON: steps, seconds, seeds and what happened. Stops at the first broken
invariant and names the seed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

from handoff_world import World

MIX = ("quiet", "lossy", "storm", "storm", "storm", "storm", "storm", "storm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first day; each day has the next one"
    )
    parser.add_argument("--day", type=int, default=1500, help="steps before a day's faults end")
    parser.add_argument("--weather", choices=(*sorted(set(MIX)), "mix"), default="mix")
    options = parser.parse_args()
    seen, ended, steps, seed = Counter(), Counter(), 0, options.seed
    began = time.monotonic()
    while steps < options.steps:
        world = World(
            seed,
            MIX[seed % len(MIX)] if options.weather == "mix" else options.weather,
            workers=2 + seed % 3,
        )
        try:
            while world.steps < options.day:
                world.step()
            world.run_to_rest()
        except BaseException:
            print(f"seed {seed}, {world.faults}, step {world.steps}", flush=True)
            raise
        seen += world.seen
        ended += world.ended
        steps += world.steps
        seed += 1
    seconds = time.monotonic() - began
    print(
        json.dumps(
            {
                "steps": steps,
                "seconds": round(seconds, 1),
                "seeds": [options.seed, seed],
                "requests": dict(ended),
                "seen": dict(sorted(seen.items())),
            }
        )
    )


if __name__ == "__main__":
    main()
