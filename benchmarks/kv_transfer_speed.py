"""Speed of the transports between two processes of this machine.

python benchmarks/kv_transfer_speed.py [--kinds shm tcp nixl]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from multiprocessing.connection import Connection

import numpy as np

from counterpoint.kv_transfer.memory import KvMemory, Spans
from counterpoint.kv_transfer.nixl import NixlTransport
from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.kv_transfer.staged import allocate_host_memory
from counterpoint.kv_transfer.tcp import TcpTransport
from counterpoint.kv_transfer.transport import Completed, Transport, TransportError

PAGES, PAGE_BYTES, REGIONS = 256, 16 << 10, 16
KINDS = {"shm": ShmTransport, "tcp": TcpTransport, "nixl": NixlTransport}


def make(kind: str, wake) -> tuple[Transport, KvMemory, bytes]:
    transport: Transport = KINDS[kind](wake)
    shared = isinstance(transport, ShmTransport)
    allocate = transport.allocate if shared else allocate_host_memory
    memory = allocate(PAGES, PAGE_BYTES, REGIONS)
    return transport, memory, transport.register(memory)


def read(pipe: Connection, kind: str) -> None:
    """The reading process."""
    transport, memory, metadata = make(kind, lambda: None)
    pipe.send(metadata)
    transport.connect(2, 1, pipe.recv(), False)
    transport.grant(2, 1, range(PAGES))
    pipe.send("granted")
    pipe.recv()
    pipe.send(all((region == number + 1).all() for number, region in enumerate(memory.regions)))
    transport.close()


def write_s(transport: Transport, woken: threading.Event, spans: Spans, op: int) -> float:
    began_s = time.perf_counter()
    transport.write(1, 1, spans, op)
    while not (notices := transport.poll()):
        woken.wait(1)
        woken.clear()
    took_s = time.perf_counter() - began_s
    assert isinstance(notices[0], Completed) and not notices[0].error, notices
    return took_s


def measure(kind: str, rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    reader = context.Process(target=read, args=(theirs, kind))
    reader.start()
    woken = threading.Event()
    transport, memory, metadata = make(kind, woken.set)
    for number, region in enumerate(memory.regions):
        region[:] = number + 1
    peer_metadata = pipe.recv()
    pipe.send(metadata)
    pipe.recv()
    transport.connect(1, 2, peer_metadata, True)
    shuffled = np.random.default_rng(0).permutation(PAGES)
    cases = {
        "one page of one layer (32 KiB)": (0, 1, [0], [0]),
        "64 MiB, pages in a row": (0, REGIONS // 2, range(PAGES), range(PAGES)),
        "64 MiB, pages scattered": (0, REGIONS // 2, range(PAGES), shuffled.tolist()),
    }
    op = 0
    for name, (first, last, here, there) in cases.items():
        spans = memory.spans(first, last, here, there)
        took_s = [write_s(transport, woken, spans, op + number) for number in range(1, rounds + 1)]
        op += rounds
        best_s, middle_s = min(took_s), statistics.median(took_s)
        speed = int(spans[:, 3].sum()) / best_s / 1e9
        print(
            f"{kind:5} {name:32} {len(spans):5} spans  "
            f"median {middle_s * 1e3:8.2f} ms  best {speed:6.2f} GB/s",
            flush=True,
        )
    pipe.send("done")
    assert pipe.recv(), "the bytes are not there"
    transport.close()
    reader.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
