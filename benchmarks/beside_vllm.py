"""Counterpoint and vLLM on one GPU, taking turns: decode steps and prefill of one model shape.

    python benchmarks/beside_vllm.py MODEL --vllm-env FILE [--rounds 3] [--json FILE]

Takes some minutes on one H200, most of it loading both engines.

MODEL is a folder with a config.json and a tokenizer.json; weights are random in both. FILE is a
shell file after which `python3` imports vLLM. Both engines stay loaded, one of them idle. Both are
measured alike: all prompts are submitted at once, as token ids, without detokenising. A decode step
is what each token after the first adds: (t(prompts, many tokens) - t(prompts, 1 token)) / (many -
1). Prompts are fresh each time and prefix caches are off. Both compute at most 8192 prompt tokens
in a pass, their default; ours runs the policy serial.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CASES = {
    "decode 1 x 2048": (1, 2048, 129),
    "decode 64 x 2048": (64, 2048, 129),
    "prefill 16 x 4096": (16, 4096, 1),
}


def random_prompts(count: int, length: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(1000, 100000) for _ in range(length)] for _ in range(count)]


class CounterpointEngine:
    """Engine and loop in this process, without HTTP."""

    def __init__(self, model: str) -> None:
        from counterpoint.builder import system_builder
        from counterpoint.config import Config
        from counterpoint.device.event_queue import WallClockEventQueue

        flags = {
            "load_format": "dummy",
            "device": "cuda",
            "policy": "serial",
            "prefix_cache": False,
        }
        flags |= {"max_running": 64, "max_context_tokens": 8192, "kv_memory_bytes": 40 << 30}
        self.inbox = WallClockEventQueue()
        self.system = system_builder.build_system(
            Config().replace(model=model, **flags), self.inbox, print
        )
        self.remaining = 0
        self.all_finished = threading.Event()
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self) -> None:
        from counterpoint.core.loop import run

        run(self.system.engine, self.inbox, self.system.executor, self._deliver)

    def _deliver(self, outputs: list[Any], engine: Any) -> None:
        from counterpoint.types import OutputDelta

        for output in outputs:
            if isinstance(output, OutputDelta):
                assert not output.error, output.error
                self.remaining -= output.finish_reason is not None
        if not self.remaining:
            self.all_finished.set()

    def run_s(self, given: list[list[int]], tokens: int) -> float:
        from counterpoint.types import AddRequest, Sampling

        self.remaining = len(given)
        self.all_finished.clear()
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        began_s = time.perf_counter()
        for n, prompt in enumerate(given):
            self.inbox.put(AddRequest(id=str(n), prompt=tuple(prompt), sampling=sampling))
        self.all_finished.wait()
        return time.perf_counter() - began_s


class VllmProcess:
    """vLLM in its own process, driven by lines on its standard input."""

    def __init__(self, model: str, env: str) -> None:
        command = f". {env} && exec python3 {Path(__file__).resolve()} {model} --serve-as-peer"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            ["bash", "-c", command], env=outside, start_new_session=True, **pipes
        )

    def read_reply(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("=> "):
                return line[3:].strip()
        raise RuntimeError("vLLM ended")

    def run_s(self, given: list[list[int]], tokens: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([given, tokens]) + "\n")
        self.process.stdin.flush()
        return float(self.read_reply())


def run_vllm(model: str) -> None:
    import vllm  # pyright: ignore[reportMissingImports]

    llm = vllm.LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=8192,
        gpu_memory_utilization=0.42,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    print(f"=> vLLM {vllm.__version__}", flush=True)
    for line in sys.stdin:
        given, tokens = json.loads(line)
        prompts = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in given]
        began_s = time.perf_counter()
        llm.generate(
            prompts,
            vllm.SamplingParams(
                max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False
            ),
            use_tqdm=False,
        )
        print(f"=> {time.perf_counter() - began_s}", flush=True)


def measure(engine: CounterpointEngine | VllmProcess, name: str, rng: random.Random) -> float:
    """Milliseconds of a decode step, or prompt tokens per second."""
    count, length, tokens = CASES[name]
    first_s = engine.run_s(random_prompts(count, length, rng), 1)
    if tokens == 1:
        return count * length / first_s
    return (engine.run_s(random_prompts(count, length, rng), tokens) - first_s) / (tokens - 1) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--vllm-env", default="")
    parser.add_argument("--serve-as-peer", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.serve_as_peer:
        run_vllm(args.model)
        return
    began_s = time.perf_counter()
    vllm_process = VllmProcess(args.model, args.vllm_env)
    version = vllm_process.read_reply()
    print(f"{version} is ready after {time.perf_counter() - began_s:.0f} s", flush=True)
    engines: dict[str, CounterpointEngine | VllmProcess] = {
        "ours": CounterpointEngine(args.model),
        "vLLM": vllm_process,
    }
    print(f"both are ready after {time.perf_counter() - began_s:.0f} s", flush=True)
    rng = random.Random(1)
    for engine in engines.values():
        for name in CASES:
            measure(engine, name, rng)  # warm
    got: dict[str, dict[str, list[float]]] = {name: {who: [] for who in engines} for name in CASES}
    for turn in range(args.rounds):
        for name in CASES:
            for who in list(engines) if turn % 2 == 0 else reversed(engines):
                got[name][who].append(measure(engines[who], name, rng))
    result: dict[str, Any] = {"vLLM": version, "runs": got}
    for name, runs in got.items():
        ours, theirs = (statistics.median(runs[who]) for who in ("ours", "vLLM"))
        unit, better = (
            ("ms", theirs / ours) if name.startswith("decode") else ("tokens/s", ours / theirs)
        )
        result[name] = {"ours": ours, "vLLM": theirs, "unit": unit, "ours faster by": better}
        spread = {who: f"{min(runs[who]):.2f} to {max(runs[who]):.2f}" for who in runs}
        print(
            f"{name:20s} ours {ours:10.2f} {unit:8s} ({spread['ours']})  "
            f"vLLM {theirs:10.2f} ({spread['vLLM']})  x {better:.3f}"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    os.killpg(vllm_process.process.pid, signal.SIGKILL)  # its engine is a process of its own
    os._exit(0)  # the loop's thread is a daemon in the middle of a wait


if __name__ == "__main__":
    main()
