r"""Every answer of a pool against those of one engine, with a real model:

    python tests/support/pool_equality.py --model smollm2 --requests 200 --prefill 2 --decode 2 \
        --transports shm tcp nixl
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from pool_process import Pool, answers, mixed_requests, others

# In place of what a tiny model needs.
REAL = {
    "load-format": "auto",
    "dtype": "auto",
    "page-tokens": "16",
    "kv-pages": "160",
    "max-context-tokens": "512",
    "chunk-tokens": "64",
}


def run(
    log: Path, model: str, bodies: list, **flags: object
) -> tuple[list[Any], float, dict[str, float]]:
    """The answers, the seconds they took, and what happened meanwhile."""
    server = Pool(log, model, **REAL | flags)
    try:
        server.wait_ready()
        begun_s = time.monotonic()
        found = answers(server, bodies, at_once=32)
        took_s = time.monotonic() - begun_s
        names = ("preemptions_total", "prefix_hits_tokens_total")
        counts = {name: server.metric(f"counterpoint_{name}") for name in names}
        if flags:
            counts["handed over"] = server.metric(
                "counterpoint_handoffs_ended_total", outcome="adopted"
            )
            counts["forked"] = server.metric("counterpoint_routes_total", reason="fork")
        return found, took_s, counts
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp", "nixl"])
    asked = parser.parse_args()
    bodies = mixed_requests(asked.requests)
    with tempfile.TemporaryDirectory(prefix="pool-equality-") as folder:
        truth, took_s, counts = run(Path(folder, "one"), asked.model, bodies)
        print(f"one engine: {took_s:.1f} s, {counts}", flush=True)
        for transport in asked.transports:
            flags = {"prefill": asked.prefill, "decode": asked.decode, "transport": transport}
            found, took_s, counts = run(Path(folder, transport), asked.model, bodies, **flags)
            equal = len(truth) - len(others(found, truth))
            print(
                f"{transport}: {equal} of {len(truth)} equal, {took_s:.1f} s, {counts}", flush=True
            )


if __name__ == "__main__":
    main()
