"""The demo: a model answers questions, then one mixed load runs under each policy, shown as a table
and a picture.

Owns: the questions and the load. It shows what was just measured, whichever policy is best, and
takes under three minutes on two cores. Must not: know how a policy works.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
from cyclopts import Parameter
from rich.console import Console

from counterpoint.bench import tables
from counterpoint.bench.picture import draw_lanes
from counterpoint.bench.replay import ReplayOptions, replay_engine
from counterpoint.bench.report import summarise
from counterpoint.bench.workload import Query, TokenRange
from counterpoint.builder import system_builder
from counterpoint.config import Config
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.timeline import Timeline

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
)
POLICIES = ("serial", "chunked", "multiplex", "auto")
START_S = 120.0


def demo(
    *,
    model: Annotated[str, Parameter(help="the model to run")] = "smollm2",
    out: Annotated[
        Path, Parameter(help="folder for the picture, the table and the timelines")
    ] = Path("out/demo"),
    seconds: Annotated[float, Parameter(help="length of the load that each policy plays")] = 20.0,
) -> int:
    """Answer three questions through the server, then play chats and documents under every
    policy."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds is {seconds}: it must be more than 0")
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    with start_server(model, console) as url:
        for question in QUESTIONS:
            ask_question(url, question, console)
    queries = mixed_load(seconds)
    long = sum(q.prompt_tokens > 1000 for q in queries)
    console.print(
        f"\n[bold]The same load under each policy:[/bold] {len(queries) - long} short chats over "
        f"{seconds:.0f} s, and {long} documents of {max(q.prompt_tokens for q in queries)} tokens "
        "arriving among them.",
        highlight=False,
    )
    results: dict[str, dict[str, Any]] = {}
    spans: dict[str, Timeline] = {}
    for policy in POLICIES:
        with console.status(f"{policy} …"):
            results[policy], spans[policy] = run_load(model, policy, queries)
        spans[policy].write(out / f"timeline-{policy}.json")
    tables.show_comparison(console, results, "Latency of all requests, and output speed")
    (out / "results.json").write_text(json.dumps(results, indent=2))
    picture = draw_lanes(spans, out / "lanes.png")
    console.print(describe_winner(results), highlight=False)
    shown = (
        f"picture: {picture}"
        if picture
        else "no picture: pip install 'counterpoint[plots]' draws one"
    )
    console.print(
        f"{shown}\ntimelines: {out}/timeline-*.json (open in ui.perfetto.dev)",
        style="dim",
        highlight=False,
    )
    return 0


@contextlib.contextmanager
def start_server(model: str, console: Console) -> Iterator[str]:
    """Runs `counterpoint serve MODEL` on a free port while the context lasts. Yields its
    address."""
    command = [sys.executable, "-m", "counterpoint", "serve", model, "--port", "0"]
    console.print(f"[bold]$ counterpoint serve {model}[/bold]", highlight=False)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            found = re.search(r"ready: .*?(http://\S+?)/v1", line)
            if found:
                console.print(line.strip(), style="dim", highlight=False)
                yield found[1]
                break
        else:
            raise ConnectionError(
                "the server ended before it was ready: run `counterpoint serve` to see why"
            )
    finally:
        server.terminate()
        server.wait(timeout=START_S)


def ask_question(url: str, question: str, console: Console) -> None:
    console.print(f"\n[bold cyan]{question}[/bold cyan]", highlight=False)
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 40,
        "temperature": 0,
        "stream": True,
    }
    begun_s, first_s, tokens = time.monotonic(), None, 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=START_S) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            text = json.loads(line[6:])["choices"][0]["delta"].get("content")
            if text:
                first_s = first_s or time.monotonic() - begun_s
                tokens += 1
                console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"\n[dim]first token after {1000 * (first_s or 0):.0f} ms, "
        f"whole answer {time.monotonic() - begun_s:.2f} s[/dim]"
    )


def mixed_load(seconds: float) -> list[Query]:
    """Short chats at an even pace, and three long documents among them. Not random, so that every
    policy gets the same coincidences."""
    chats = int(seconds / 0.8)
    queries = [Query(i, i * 0.8, 40 + 7 * (i % 5), 40) for i in range(chats)]
    queries += [Query(chats + i, seconds * (0.15 + 0.25 * i), 2000, 16) for i in range(3)]
    return sorted(queries, key=lambda q: q.arrival_s)


def run_load(model: str, policy: str, queries: list[Query]) -> tuple[dict[str, Any], Timeline]:
    inbox = WallClockEventQueue()
    system = system_builder.build_system(
        Config().replace(model=model, policy=policy, device="cpu"), inbox, lambda _: None
    )
    timeline = Timeline(system.executor, inbox, system.engine.policy.lanes)
    options = ReplayOptions(
        warmup=[Query(10_000 + i, 0.0, 60, 8) for i in range(4)],
        tokens=TokenRange.within(system.spec.vocab),
        timeline=timeline,
    )
    try:
        outcome = replay_engine(system.engine, inbox, system.executor, queries, options)
    finally:
        system.executor.close()
    return {**summarise(outcome), "policy": policy, "lanes": system.lanes}, timeline


def describe_winner(results: dict[str, dict[str, Any]]) -> str:
    """The table in a sentence, by the longest gap between two tokens: users notice that most."""
    gaps = {policy: result["max_longest_gap_ms"] for policy, result in results.items()}
    best = min(gaps, key=lambda policy: gaps[policy])
    times = gaps["serial"] / gaps[best]
    listed = ", ".join(f"{policy} {gap:.0f} ms" for policy, gap in gaps.items())
    return (
        f"Longest gap inside an answer: {listed}. "
        f"[bold]{best}[/bold] is {times:.1f}x shorter than serial here."
    )
