"""How fast the movers are between two processes of this machine: `python benchmarks/kv_transfer_speed.py [--kinds shm tcp nixl]`."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from multiprocessing.connection import Connection

import numpy as np

from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.kv_transfer.nixl import NixlTransport
from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.kv_transfer.tcp import TcpTransport
from counterpoint.kv_transfer.transport import Completed, Transport, TransportError

PAGES, PAGE_BYTES, REGIONS = 256, 16 << 10, 16
KINDS = {"shm": ShmTransport, "tcp": TcpTransport, "nixl": NixlTransport}


def make(kind: str, wake) -> tuple[Transport, KvMemory, bytes]:
    link: Transport = KINDS[kind](wake)
    if isinstance(link, ShmTransport):
        memory = link.allocate(PAGES, PAGE_BYTES, REGIONS)
    else:
        memory = KvMemory(
            tuple(np.zeros(PAGES * PAGE_BYTES, np.uint8) for _ in range(REGIONS)), PAGE_BYTES
        )
    return link, memory, link.register(memory)


def read(pipe: Connection, kind: str) -> None:
    link, memory, blob = make(kind, lambda: None)
    pipe.send(blob)
    link.connect(2, 1, pipe.recv(), False)
    link.grant(2, 1, range(PAGES))
    pipe.send("granted")
    pipe.recv()
    pipe.send(all((region == number + 1).all() for number, region in enumerate(memory.regions)))
    link.close()


def measure(kind: str, rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    reader = context.Process(target=read, args=(theirs, kind))
    reader.start()
    bell = threading.Event()
    link, memory, blob = make(kind, bell.set)
    for number, region in enumerate(memory.regions):
        region[:] = number + 1
    theirs_blob = pipe.recv()
    pipe.send(blob)
    pipe.recv()
    link.connect(1, 2, theirs_blob, True)
    shuffled = np.random.default_rng(0).permutation(PAGES)
    cases = {
        "one page of one layer (32 KiB)": (0, 1, [0], [0]),
        "64 MiB, pages in a row": (0, REGIONS // 2, range(PAGES), range(PAGES)),
        "64 MiB, pages scattered": (0, REGIONS // 2, range(PAGES), shuffled.tolist()),
    }
    op = 0
    for name, (first, last, here, there) in cases.items():
        spans = memory.spans(first, last, here, there)
        took = []
        for _ in range(rounds):
            op += 1
            began = time.perf_counter()
            link.write(1, 1, spans, op)
            while not (notices := link.poll()):
                bell.wait(1)
                bell.clear()
            took.append(time.perf_counter() - began)
            assert notices == [Completed(op)] or (
                isinstance(notices[0], Completed) and not notices[0].error
            ), notices
        best, middle = min(took), statistics.median(took)
        size = int(spans[:, 3].sum())
        print(
            f"{kind:5} {name:32} {len(spans):5} spans  median {middle * 1e3:8.2f} ms  best {size / best / 1e9:6.2f} GB/s",
            flush=True,
        )
    pipe.send("done")
    assert pipe.recv(), "the bytes are not there"
    link.close()
    reader.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for kind in options.kinds:
        try:
            measure(kind, options.rounds)
        except TransportError as error:
            print(f"{kind:5} {error}")


if __name__ == "__main__":
    main()
