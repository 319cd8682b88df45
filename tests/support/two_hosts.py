"""KV transfer over a rate-limited link: `python tests/support/two_hosts.py`, as root.

Two network namespaces are joined by a veth pair whose rate `tc` limits. One runs `counterpoint
serve` with a decode worker, the other `counterpoint worker --join` as its prefill worker. Prompts
go one at a time; KV is sent whole after the prefill, or layer group by layer group during it. The
rates have the ratio of transfer to prefill that links of 25, 100, 200 and 400 Gb/s have for a
prompt of 4,096 tokens of Llama-3.1-8B on an H200 (537 MB of KV, 0.1 s). Printed: KV transfer time
that the prefill did not hide (`counterpoint_handoff_visible_seconds`), and what
router.visible_transfer_s gives for the nominal rate.

Needs root, `ip`, `tc` and an otherwise idle machine. Takes some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from counterpoint.disagg.router import visible_transfer_s

sys.path.insert(0, str(Path(__file__).parent))
from serve_process import poll

HERE, THERE = "cp-decode", "cp-prefill"  # namespaces
ADDRESS = {HERE: "10.77.0.1", THERE: "10.77.0.2"}
PORT, JOIN = 8000, 7000
COUNTERPOINT = str(Path(sys.executable).with_name("counterpoint"))
H200_PREFILL_S, H200_KV_BYTES = 0.1, 4096 * 131_072
GBITS = (25, 100, 200, 400)
PROMPT_TOKENS, GROUP = 1024, 3
READY_S = 120


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """The namespaces and their link; gone afterwards, with all that runs in them."""
    try:
        for name in (HERE, THERE):
            run("ip", "netns", "add", name)
        run(
            "ip",
            "link",
            "add",
            "veth-d",
            "netns",
            HERE,
            "type",
            "veth",
            "peer",
            "name",
            "veth-p",
            "netns",
            THERE,
        )
        for name, device in ((HERE, "veth-d"), (THERE, "veth-p")):
            run("ip", "-n", name, "addr", "add", f"{ADDRESS[name]}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in (HERE, THERE):
            subprocess.run(["ip", "netns", "del", name], check=False)


def shape(bits_per_s: float) -> None:
    """Both directions, with a bucket of 10 ms."""
    burst = str(max(64_000, int(bits_per_s / 8 / 100)))
    for name, device in ((HERE, "veth-d"), (THERE, "veth-p")):
        rate = f"{int(bits_per_s)}bit"
        run(
            "tc",
            "-n",
            name,
            "qdisc",
            "replace",
            "dev",
            device,
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            burst,
            "latency",
            "100ms",
        )


@contextlib.contextmanager
def served(model: str, grain: str, folder: Path) -> Iterator[None]:
    """A server with a decode worker here, and a prefill worker there."""
    token = {"COUNTERPOINT_CLUSTER_TOKEN": "hosts"}
    common = [model, "--transport", "tcp", "--cores", "1", "--no-prefix-cache"]
    front = [
        "taskset",
        "-c",
        "0",
        COUNTERPOINT,
        "serve",
        *common,
        "--decode",
        "1",
        "--cluster-listen",
        f"{ADDRESS[HERE]}:{JOIN}",
    ]
    front += [
        "--cluster-host",
        ADDRESS[HERE],
        "--port",
        str(PORT),
        "--local-tokens",
        "0",
        "--kv-grain",
        grain,
        "--spill-s",
        "1000",
    ]
    worker = [
        "taskset",
        "-c",
        "1",
        COUNTERPOINT,
        "worker",
        *common,
        "--join",
        f"{ADDRESS[HERE]}:{JOIN}",
        "--role",
        "prefill",
    ]
    worker += ["--cluster-host", ADDRESS[THERE], "--policy", "serial", "--layer-group", str(GROUP)]
    processes = []
    try:
        for name, command in ((HERE, front), (THERE, worker)):
            log = (folder / f"{name}.log").open("wb")
            inside = ["ip", "netns", "exec", name, *command]
            processes.append(
                subprocess.Popen(
                    inside, stdout=log, stderr=subprocess.STDOUT, env=os.environ | token
                )
            )
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def ask(requests: int, seed: int) -> dict[str, Any]:
    """Run inside the server's namespace: one prompt after another; what the metrics say of their
    handoffs."""
    http = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=300)
    poll(lambda: ready(http), READY_S, "the two workers are ready")
    before, first_s = summed(http), []
    for number in range(requests + 1):
        prompt = [
            1000 + (seed * 7919 + number * 104_729 + i * 31) % 20_000 for i in range(PROMPT_TOKENS)
        ]
        started_s = time.monotonic()
        with http.stream(
            "POST", "/v1/completions", json={"prompt": prompt, "max_tokens": 4, "stream": True}
        ) as answer:
            answer.raise_for_status()
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            first_s.append(time.monotonic() - started_s)
            assert '"error"' not in "".join(lines)
        if not number:  # the first one opens the link
            before, first_s = summed(http), []
    after = summed(http)
    count = after["count"] - before["count"]
    return {
        "count": count,
        "visible_s": (after["sum"] - before["sum"]) / max(1, count),
        "ttft_s": statistics.median(first_s),
    }


def ready(http: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (
            len(
                re.findall(
                    r"^counterpoint_worker_up\{.*\} 1", http.get("/metrics").text, re.MULTILINE
                )
            )
            == 2
        )
    return False


def summed(http: httpx.Client) -> dict[str, float]:
    text = http.get("/metrics").text
    found = {}
    for part in ("sum", "count"):
        line = re.search(rf"^counterpoint_handoff_visible_seconds_{part} (\S+)", text, re.MULTILINE)
        found[part] = float(line[1]) if line else 0.0
    return found


def measured(requests: int, seed: int) -> dict[str, Any]:
    command = [
        "ip",
        "netns",
        "exec",
        HERE,
        sys.executable,
        __file__,
        "--ask",
        str(requests),
        "--seed",
        str(seed),
    ]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument(
        "--kv-bytes-per-token",
        type=int,
        default=23_040,
        help="of the model: 30 layers x 2 x 3 heads x 64 x 2 bytes",
    )
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    if asked.ask is not None:
        print(json.dumps(ask(asked.ask, asked.seed)))
        return 0
    total = asked.kv_bytes_per_token * PROMPT_TOKENS
    rows = []
    with hosts(), tempfile.TemporaryDirectory() as folder:
        for grain, groups in (("prompt", 1), ("layer", asked.layers // GROUP)):
            with served(asked.model, grain, Path(folder)):
                shape(20e9)
                prefill_s = measured(asked.requests, 0)["ttft_s"]
                for turn, gbits in enumerate(GBITS):
                    ratio = H200_KV_BYTES / (gbits * 1e9 / 8) / H200_PREFILL_S
                    bytes_per_s = total / (ratio * prefill_s)
                    shape(8 * bytes_per_s)
                    found = measured(asked.requests, 1 + turn)
                    formula = visible_transfer_s(total, prefill_s, bytes_per_s, groups)
                    rows.append(
                        (grain, gbits, ratio, 8 * bytes_per_s / 1e6, prefill_s, found, formula)
                    )
                    print(
                        f"{grain} {gbits}: {found} formula {formula:.3f} s",
                        file=sys.stderr,
                        flush=True,
                    )
    print(
        "| KV sent | link like | transfer / prefill | link here, Mb/s | prefill, s | handoffs "
        "| visible, s | formula, s | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for grain, gbits, ratio, mbits, prefill_s, found, formula in rows:
        seen, count = found["visible_s"], found["count"]
        print(
            f"| by {grain} | {gbits} Gb/s | {ratio:.2f} | {mbits:.0f} | {prefill_s:.2f} "
            f"| {count:.0f} | {seen:.3f} | {formula:.3f} | {seen / formula:.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
