"""One trace on one GPU in several modes: co-located, and prefill and decode workers over CUDA IPC.

    python benchmarks/pools_on_one_gpu.py --trace FILE [--rates 6 12] [--requests 80]
        [--slo ttft=0.5,tpot=20ms] [--out FOLDER]

Takes some minutes on one H200.

Every server is `counterpoint serve`, every load `counterpoint bench --url`, from this machine. The
co-located servers start together and are measured one after another; an idle one does not use the
GPU. Then come the pools. All have the same random weights, the same KV memory per engine, and no
prefix cache.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PORT = 8100
KV_BYTES = 10 << 30
COLOCATED = {
    "chunked 1024": ["--policy", "chunked", "--chunk-tokens", "1024"],
    "multiplex 32": ["--policy", "multiplex", "--split", "32"],
    "auto": ["--policy", "auto"],
}
PAIR = ["--prefill", "1", "--decode", "1", "--local-tokens", "0", "--policy", "serial"]
POOLS = {
    "1+1, whole prompts": [*PAIR, "--kv-grain", "prompt"],
    "1+1, 4 layers at a time": [*PAIR, "--layer-group", "4", "--kv-grain", "layer"],
}
COLUMNS = (
    "p50_ttft_ms",
    "p90_ttft_ms",
    "p50_tpot_ms",
    "p90_tpot_ms",
    "p99_itl_ms",
    "request_goodput",
    "slo_attainment",
)
METRICS = (
    "handoffs_ended_total",
    "handoff_visible_seconds_sum",
    "handoff_visible_seconds_count",
    "handoff_behind_seconds_sum",
)


class Server:
    def __init__(self, name: str, flags: list[str], number: int, model: str, out: Path) -> None:
        self.name, self.number = name, number
        self.url = f"http://127.0.0.1:{PORT + number}"
        self.log = out / f"server{number}.log"
        common = [
            "--load-format",
            "dummy",
            "--device",
            "cuda",
            "--kv-memory-bytes",
            str(KV_BYTES),
            "--max-running",
            "64",
        ]
        common += [
            "--max-context-tokens",
            "16384",
            "--no-prefix-cache",
            "--port",
            str(PORT + number),
        ]
        command = [sys.executable, "-m", "counterpoint", "serve", model, *common, *flags]
        with self.log.open("wb") as log_file:
            self.process = subprocess.Popen(command, stdout=log_file, stderr=subprocess.STDOUT)

    def wait(self, seconds: float = 150) -> None:
        end = time.monotonic() + seconds
        while not re.search(r"^ready: ", self.log.read_text(errors="replace"), re.MULTILINE):
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(
                    f"{self.name} does not start:\n{self.log.read_text(errors='replace')[-4000:]}"
                )
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def run_load(server: Server, rate: float, args: argparse.Namespace) -> dict[str, Any]:
    """Run one load. Returns `bench`'s report and the server's handoff metrics."""
    path = args.out / f"{server.number}_{rate:g}.json"
    command = [
        sys.executable,
        "-m",
        "counterpoint",
        "bench",
        "--url",
        server.url,
        "--trace",
        str(args.trace),
    ]
    command += [
        "--requests",
        str(args.requests),
        "--arrivals",
        "poisson",
        "--rate",
        str(rate),
        "--seed",
        "1",
    ]
    command += ["--slo", args.slo, "--warmup", "3", "--json", str(path)]
    subprocess.run(
        command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120
    )
    report = json.loads(path.read_text()) if path.exists() else {}
    report["handoffs"] = read_handoff_metrics(server)
    return report


def read_handoff_metrics(server: Server) -> dict[str, float]:
    from urllib.request import urlopen

    text = urlopen(f"{server.url}/metrics", timeout=10).read().decode()
    sums: dict[str, float] = {}
    for name, value in re.findall(r"^counterpoint_(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        if name in METRICS:
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def format_row(name: str, rate: float, report: dict[str, Any]) -> str:
    cells = [
        f"{report.get(figure):.3g}" if isinstance(report.get(figure), int | float) else "-"
        for figure in COLUMNS
    ]
    done, count = (
        report.get("completed", "-"),
        report["handoffs"].get("handoff_visible_seconds_count", 0),
    )
    visible = (
        f"{1e3 * report['handoffs']['handoff_visible_seconds_sum'] / count:.2f}" if count else "-"
    )
    return f"| {name} | {rate:g} | {done} | " + " | ".join(cells) + f" | {visible} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--rates", type=float, nargs="+", default=[6, 12])
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--slo", default="ttft=0.5,tpot=20ms")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--only", nargs="+", help="modes to play; unset: all")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NO_COLOR", "1")
    results: dict[str, Any] = {}
    lines = [
        "| mode | requests/s | answered | " + " | ".join(COLUMNS) + " | visible ms |",
        "|---" * (len(COLUMNS) + 4) + "|",
    ]
    print("\n".join(lines), flush=True)
    number = 0
    for group in (COLOCATED, POOLS):
        servers = []
        for name, flags in group.items():
            if not args.only or name in args.only:
                servers.append(Server(name, flags, number, args.model, args.out))
                number += 1
        try:
            for server in servers:
                server.wait()
                for rate in args.rates:
                    report = results[f"{server.name} at {rate:g}"] = run_load(server, rate, args)
                    print(format_row(server.name, rate, report), flush=True)
                    (args.out / "pools.json").write_text(json.dumps(results, indent=1))
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    main()
