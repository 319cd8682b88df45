"""What it costs to run an engine behind a pool's front: a server of one engine, and a pool of one.

    python benchmarks/engine_paths.py [--starts 8] [--lives 3] [--requests 10] [--beside CHECKOUT]

Owns: the measurement. Promises: all servers run with default settings over the same model. Starts,
from the spawn to the `ready:` line, are taken in turn, one server at a time. For streams all
servers are alive, and each request goes to one after the other, so that what else the machine does
falls on all: a difference is the median of the differences within a turn. How much of the machine
other processes had meanwhile is told. A stream's client notes when bytes come and looks at them
afterwards. CPU time is as the kernel counts it: of the server's process, and of its children.
Must not: know how a server works. It uses the command line and HTTP alone, so it measures other
checkouts too (--beside: before and after a change). Linux only.

Engines: `smollm2` as it is embedded, and `tiny`, random weights that cost next to nothing, so that
what remains is the way of a token; each also with many streams at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATHS = {"one engine": (), "pool of one": ("--replicas", "1")}
TINY = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "eos_token_id": 257,
}
START_S = 120.0
REQUEST_S = 120.0
IDLE_S = 3.0
OTHERS = "others, %"
RUNNING = "running, s"  # CPU time of servers that have not ended
SETTLE_S = 0.5  # after a start: what is still under way then is not of any request
READY = re.compile(rb"^ready: .* at http://([^/]+):(\d+)/v1", re.MULTILINE)
WORDS = ("lighthouse", "keeper", "ship", "names", "book", "night", "sea", "counts", "writes")


class Workload(NamedTuple):
    """`words` of a prompt, `tokens` of an answer, for each of `streams` clients at a time."""

    words: int
    tokens: int
    streams: int = 1


WORKLOADS = {
    "smollm2": {"one stream": Workload(28, 128), "8 streams": Workload(28, 64, 8)},
    "tiny": {"one stream": Workload(6, 1000), "32 streams": Workload(6, 128, 32)},
}


class Variant(NamedTuple):
    """A way to run an engine, of the checkout at `root`."""

    name: str
    root: Path
    flags: tuple[str, ...]


class Reply(NamedTuple):
    """A stream as its client saw it, in seconds from the request."""

    ttft_s: float
    tpot_s: float
    total_s: float
    tokens: int


# ---------------------------------------------------------------- a server


class Server:
    """`counterpoint serve` as a process. `start_s`: from its spawn to its `ready:` line."""

    def __init__(self, variant: Variant, model: Sequence[str], log: Path) -> None:
        command = [sys.executable, "-m", "counterpoint", "serve", *model, "--port", "0"]
        env = os.environ | {"PYTHONPATH": str(variant.root)}
        self.log = log
        began_s = time.monotonic()
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, *variant.flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                cwd=variant.root,
            )
        self.address = self._address()
        self.start_s = time.monotonic() - began_s

    def _address(self) -> tuple[str, int]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = READY.match(line)
            if found:
                return found[1].decode(), int(found[2])
        raise RuntimeError(f"no ready line: {self.log.read_text(errors='replace')[-2000:]}")

    def cpu_s(self) -> tuple[float, float]:
        """CPU time so far: of the server's own process, and of its children."""
        pid = self.process.pid
        return cpu_of(pid), sum(cpu_of(child) for child in children_of(pid))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


def cpu_of(pid: int) -> float:
    """By the CPU-time clock of another process (<linux/posix-timers.h>: MAKE_PROCESS_CPUCLOCK)."""
    return time.clock_gettime((~pid << 3) | 2)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


# ---------------------------------------------------------------- a client


def ask(address: tuple[str, int], prompt: str, tokens: int) -> Reply:
    """One streamed completion of exactly `tokens` tokens."""
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address[0]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    received: list[tuple[float, bytes]] = []
    with socket.create_connection(address, timeout=REQUEST_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began_s = time.monotonic()
        connection.sendall(head.encode() + body)
        while data := connection.recv(1 << 16):
            received.append((time.monotonic() - began_s, data))
    return reply_of(received, tokens)


def reply_of(received: Sequence[tuple[float, bytes]], tokens: int) -> Reply:
    whole = b"".join(data for _, data in received)
    if not whole.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in whole:
        raise RuntimeError(f"not a whole stream: {whole[:500]!r}")
    if f'"completion_tokens":{tokens}'.encode() not in whole:
        raise RuntimeError(f"not {tokens} tokens: {whole[-500:]!r}")
    # The last of its tokens is the last event with a choice; what follows tells the usage.
    times = [at_s for at_s, data in received if b'"choices":[{' in data]
    return Reply(times[0], (times[-1] - times[0]) / (tokens - 1), received[-1][0], tokens)


def prompt_of(name: str, words: int) -> str:
    """Text that no other request begins with."""
    chance = random.Random(name)
    return f"{name}: " + " ".join(chance.choice(WORDS) for _ in range(words))


# ---------------------------------------------------------------- what is measured

Figures = dict[str, float]
Turn = dict[str, Figures]  # by variant: one figure of each, taken one right after the other
Take = Callable[[Variant, int], Figures]


def turns(variants: Sequence[Variant], count: int, take: Take) -> list[Turn]:
    """Each variant once a turn, every other turn in the reverse order. `take` gets its number."""
    found: list[Turn] = []
    for number in range(count):
        order = variants[:: -1 if number % 2 else 1]
        taken = {variant.name: watched(take, variant, number) for variant in order}
        found.append({variant.name: taken[variant.name] for variant in variants})
    return found


def watched(take: Take, variant: Variant, number: int) -> Figures:
    """Also how much of the machine other processes had meanwhile."""
    used_s, began_s = machine_s(), time.monotonic()
    ours_s = time.process_time() + ended_s()
    figures = take(variant, number)
    seconds = (time.monotonic() - began_s) * (os.cpu_count() or 1)
    ours_s = time.process_time() + ended_s() - ours_s + figures.pop(RUNNING, 0.0)
    return figures | {OTHERS: 100 * max(0.0, machine_s() - used_s - ours_s) / seconds}


def machine_s() -> float:
    """CPU time of all processes so far."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def ended_s() -> float:
    """CPU time of the servers that have ended, with their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(variant: Variant, engine: str, folder: Path) -> Figures:
    server = Server(variant, model_of(engine, folder), folder / "log")
    try:
        http_s, engine_s = server.cpu_s()
        return {
            "ready, s": server.start_s,
            "CPU s, server": http_s,
            "CPU s, engine": engine_s,
        }
    finally:
        server.stop()


def streams(server: Server, load: Workload, number: int) -> Figures:
    """What `load.streams` clients see that ask at once, with prompts of this `number` alone."""
    names = [f"{load.streams}.{number}.{client}" for client in range(load.streams)]
    prompts = [prompt_of(name, load.words) for name in names]
    before, began_s = server.cpu_s(), time.monotonic()
    with ThreadPoolExecutor(load.streams) as clients:
        replies = list(clients.map(lambda each: ask(server.address, each, load.tokens), prompts))
    seconds, after = time.monotonic() - began_s, server.cpu_s()
    tokens = sum(reply.tokens for reply in replies)
    http_s, engine_s = (late - early for early, late in zip(before, after, strict=True))
    return {
        "TTFT, ms": 1e3 * statistics.fmean(reply.ttft_s for reply in replies),
        "TPOT, us": 1e6 * statistics.fmean(reply.tpot_s for reply in replies),
        "total, ms": 1e3 * statistics.fmean(reply.total_s for reply in replies),
        "tokens/s": tokens / seconds,
        "CPU us/token, server": 1e6 * http_s / tokens,
        "CPU us/token, engine": 1e6 * engine_s / tokens,
        RUNNING: http_s + engine_s,
    }


def idle(server: Server) -> Figures:
    """Of each second in which nothing is asked."""
    before = server.cpu_s()
    time.sleep(IDLE_S)
    after = server.cpu_s()
    http_s, engine_s = (late - early for early, late in zip(before, after, strict=True))
    return {
        "CPU ms/s, server": 1e3 * http_s / IDLE_S,
        "CPU ms/s, engine": 1e3 * engine_s / IDLE_S,
        RUNNING: http_s + engine_s,
    }


def life(
    variants: Sequence[Variant], engine: str, folder: Path, requests: int, number: int
) -> dict[str, list[Turn]]:
    """All servers alive; turns by what was done. The first request of each is not counted."""
    servers: dict[str, Server] = {}
    found: dict[str, list[Turn]] = {}
    try:
        for variant in variants[:: -1 if number % 2 else 1]:
            log = folder / f"log{len(servers)}"
            servers[variant.name] = Server(variant, model_of(engine, folder), log)
        time.sleep(SETTLE_S)
        found["idle"] = turns(variants, 2, lambda variant, _: idle(servers[variant.name]))
        for what, load in WORKLOADS[engine].items():

            def take(variant: Variant, number: int, load: Workload = load) -> Figures:
                return streams(servers[variant.name], load, number)

            turns(variants, 1, lambda variant, _, take=take: take(variant, -1))
            found[what] = turns(variants, requests, take)
        return found
    finally:
        for server in servers.values():
            server.stop()


def model_of(engine: str, folder: Path) -> list[str]:
    if engine == "smollm2":
        return ["smollm2"]
    (folder / "config.json").write_text(json.dumps(TINY))
    return [str(folder / "config.json"), "--load-format", "dummy", "--dtype", "float32"]


# ---------------------------------------------------------------- the table


def table(engine: str, found: dict[str, list[Turn]]) -> Iterator[str]:
    """Of each figure the median and the least; of all variants but the first, also the median of
    their differences to it, with the quartiles of these."""
    names = list(next(iter(found.values()))[0])
    yield f"| {engine} | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for what, taken in found.items():
        for figure in taken[0][names[0]]:
            first = [turn[names[0]][figure] for turn in taken]
            cells = []
            for name in names:
                values = [turn[name][figure] for turn in taken]
                cell = f"{statistics.median(values):.5g} (least {min(values):.5g})"
                if name != names[0]:
                    cell += ", " + apart(first, values)
                cells.append(cell)
            yield f"| {what}: {figure} ({len(taken)} turns) | " + " | ".join(cells) + " |"


def apart(first: Sequence[float], second: Sequence[float]) -> str:
    differences = [b - a for a, b in zip(first, second, strict=True)]
    low, middle, high = statistics.quantiles(differences, method="inclusive")
    base = statistics.median(first)
    if not base:
        return f"{middle:+.4g}"
    ends = f"{100 * low / base:+.1f} to {100 * high / base:+.1f}"
    return f"{middle:+.4g} = {100 * middle / base:+.1f} % ({ends})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--starts", type=int, default=8, help="of each server, alone")
    parser.add_argument("--lives", type=int, default=3, help="of all servers, side by side")
    parser.add_argument("--requests", type=int, default=10, help="of each kind to each, in a life")
    parser.add_argument("--engine", choices=list(WORKLOADS), action="append", help="unset: all")
    parser.add_argument("--path", choices=list(PATHS), action="append", help="unset: all")
    parser.add_argument("--beside", type=Path, action="append", default=[], help="a checkout")
    parser.add_argument("--json", type=Path, help="file for the figures of each turn")
    given = parser.parse_args()
    roots = [ROOT, *(root.resolve() for root in given.beside)]
    variants = [
        Variant(path if root == ROOT else f"{path}, {root.name}", root, PATHS[path])
        for path in given.path or PATHS
        for root in roots
    ]
    every: dict[str, dict[str, list[Turn]]] = {}
    for engine in given.engine or WORKLOADS:
        found: dict[str, list[Turn]] = {}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)

            def alone(
                variant: Variant, _: int, engine: str = engine, folder: Path = folder
            ) -> Figures:
                return start(variant, engine, folder)

            if given.starts:
                turns(variants, 1, alone)  # files into the page cache, modules into theirs
                found["start"] = turns(variants, given.starts, alone)
            for number in range(given.lives):
                for what, taken in life(variants, engine, folder, given.requests, number).items():
                    found.setdefault(what, []).extend(taken)
        every[engine] = found
        print("\n".join(table(engine, found)), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
