"""aiperf and `counterpoint bench` against one server, in turn.

    python tests/support/aiperf_check.py

The server has the first core, the clients the second, so that they do not measure each other. Both
send the same load: requests at even distances, prompts and answers of fixed lengths, greedy, no
prefix cache (aiperf's prompts share beginnings). The means of TTFT, ITL and tokens per second must
agree within 5 % (medians of the turns). aiperf gets an environment of its own, in `out/clients`,
unless `--aiperf` names its command. For a quiet machine; takes some minutes and 1 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from lm_eval_check import write_model
from serve_process import ROOT, Running

OUT = ROOT / "out" / "clients"
REQUIREMENTS = ["aiperf==0.13.0"]
AGREE = 0.05
COUNTERPOINT = str(Path(sys.executable).with_name("counterpoint"))
SERVER_CORE, CLIENT_CORE = ("taskset", "-c", "0"), ("taskset", "-c", "1")
Figures = dict[str, float]  # milliseconds, and tokens per second


def environment(folder: Path) -> str:
    """The command of an environment that has aiperf."""
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *REQUIREMENTS],
            check=True,
        )
        (folder / ".installed").touch()
    return str(folder / "bin" / "aiperf")


def theirs(aiperf: str, url: str, asked: argparse.Namespace, turn: int) -> Figures:
    into = OUT / f"aiperf-{turn}"
    command = [
        *CLIENT_CORE,
        aiperf,
        "profile",
        "--model",
        "m",
        "--url",
        url,
        "--endpoint-type",
        "completions",
        "--streaming",
        "--ui",
        "none",
    ]
    command += [
        "--tokenizer",
        str(OUT / "model"),
        "--use-server-token-count",
        "--random-seed",
        str(turn),
    ]
    command += [
        "--synthetic-input-tokens-mean",
        str(asked.prompt_tokens),
        "--synthetic-input-tokens-stddev",
        "0",
    ]
    command += ["--output-tokens-mean", str(asked.output_tokens), "--output-tokens-stddev", "0"]
    command += [
        "--extra-inputs",
        "ignore_eos:true",
        "--extra-inputs",
        "temperature:0",
        "--extra-inputs",
        f"min_tokens:{asked.output_tokens}",
    ]
    command += [
        "--request-rate",
        str(asked.rate),
        "--request-rate-mode",
        "constant",
        "--request-count",
        str(asked.requests),
        "--warmup-request-count",
        "2",
    ]
    command += ["--output-artifact-dir", str(into)]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    found = json.loads(next(into.rglob("profile_export_aiperf.json")).read_text())
    return {
        "TTFT": found["time_to_first_token"]["avg"],
        "ITL": found["inter_token_latency"]["avg"],
        "tokens/s": found["output_token_throughput"]["avg"],
    }


def ours(url: str, asked: argparse.Namespace, turn: int) -> Figures:
    command = [
        COUNTERPOINT,
        "bench",
        "--url",
        url,
        "--rate",
        str(asked.rate),
        "--arrivals",
        "constant",
        "--requests",
        str(asked.requests),
    ]
    command += [
        "--prompt-tokens",
        str(asked.prompt_tokens),
        "--prompt-lengths",
        "constant",
        "--seed",
        str(100 + turn),
    ]
    command += [
        "--output-tokens",
        str(asked.output_tokens),
        "--output-lengths",
        "constant",
        "--warmup",
        "2",
        "--json",
        "-",
    ]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {
        "TTFT": found["mean_ttft_ms"],
        "ITL": found["mean_tpot_ms"],
        "tokens/s": found["output_throughput"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--aiperf", help="its command")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=0.33)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=96)
    asked = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    write_model(OUT / "model")
    aiperf = asked.aiperf or environment(OUT / "aiperf")
    command = [
        *SERVER_CORE,
        COUNTERPOINT,
        "serve",
        "--port",
        "0",
        "--served-name",
        "m",
        "--no-prefix-cache",
    ]
    server = Running(OUT / "aiperf-server.log", command=command).wait_ready()
    turns: list[tuple[Figures, Figures]] = []
    try:
        for turn in range(asked.turns):
            turns.append((theirs(aiperf, server.url, asked, turn), ours(server.url, asked, turn)))
            print(
                f"turn {turn + 1}: aiperf {turns[-1][0]}, counterpoint bench {turns[-1][1]}",
                flush=True,
            )
    finally:
        server.stop()
    agree = True
    print(f"{'median of the means':20} {'aiperf':>10} {'bench':>10} {'ratio':>7}")
    for name in turns[0][0]:
        left, right = (statistics.median(turn[side][name] for turn in turns) for side in (0, 1))
        agree &= abs(right / left - 1) <= AGREE
        print(f"{name:20} {left:10.2f} {right:10.2f} {right / left:7.3f}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
