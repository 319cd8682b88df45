"""Two ends of a link over each kind of transport, with their pools and notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from fake_gpu import FakeGpu
from local_transport import LocalTransport

from counterpoint.kv_transfer.cuda_ipc import CudaIpcTransport
from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.kv_transfer.nixl import NixlTransport, load_nixl
from counterpoint.kv_transfer.shm import ShmTransport
from counterpoint.kv_transfer.sim import SimNetwork, SimTransport
from counterpoint.kv_transfer.tcp import TcpTransport
from counterpoint.kv_transfer.transport import Completed, Notice, Transport, TransportError

PAGES, PAGE_BYTES, REGIONS = 16, 512, 4
WRITER, READER = 1001, 1002  # the link's number at each end


class End:
    """A transport, its pool, and its notices as they come."""

    def __init__(
        self, make: Callable[[Callable[[], None]], Transport], gpu: FakeGpu | None = None
    ) -> None:
        self.woken = threading.Event()
        self.transport = make(self.woken.set)
        self.gpu = gpu
        if gpu is not None:
            memory = gpu.allocate(PAGES, PAGE_BYTES, REGIONS)
            regions = tuple(np.asarray(region) for region in memory.regions)
            self.memory = KvMemory(regions, PAGE_BYTES)
        elif isinstance(self.transport, ShmTransport):
            memory = self.memory = self.transport.allocate(PAGES, PAGE_BYTES, REGIONS)
        else:
            regions = tuple(np.zeros(PAGES * PAGE_BYTES, np.uint8) for _ in range(REGIONS))
            memory = self.memory = KvMemory(regions, PAGE_BYTES)
        self.metadata = self.transport.register(memory)
        self.notices: list[Notice] = []

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for region in self.memory.regions:
            region[:] = rng.integers(1, 255, region.size, np.uint8)

    def poll(self) -> list[Notice]:
        """All notices until now."""
        self.notices += self.transport.poll()
        return self.notices

    def wait(self, matches: Callable[[Notice], bool], seconds: float = 10.0) -> Notice:
        """The first notice that matches, when it comes."""
        end = time.monotonic() + seconds
        while True:
            self.woken.clear()
            for notice in self.poll():
                if matches(notice):
                    return notice
            assert time.monotonic() < end, f"only {self.notices}"
            self.woken.wait(0.05)

    def completed(self, op: int) -> Completed:
        notice = self.wait(lambda n: isinstance(n, Completed) and n.op == op)
        assert isinstance(notice, Completed)
        return notice

    def bytes_of(self, page: int) -> list[bytes]:
        """Of each region."""
        part = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
        return [region[part].tobytes() for region in self.memory.regions]

    def is_zero(self, page: int) -> bool:
        return not any(any(part) for part in self.bytes_of(page))


class PolledSim(SimTransport):
    """A SimTransport whose network advances when it is polled."""

    def poll(self) -> list[Notice]:
        self.network.advance(self.network.now + 1)
        return super().poll()


def missing_nixl() -> str:
    """Why NIXL can't be used here, or ""."""
    try:
        load_nixl()
    except TransportError as error:
        return str(error)
    return ""


needs_nixl = pytest.mark.skipif(bool(missing_nixl()), reason=missing_nixl())
KINDS = ("local", "shm", "tcp", "sim", "cuda-ipc", pytest.param("nixl", marks=needs_nixl))


def make_ends(kind: str) -> tuple[End, End]:
    """A writer and a reader, not connected."""
    if kind == "local":
        peers: dict[str, LocalTransport] = {}
        return End(lambda wake: LocalTransport(wake, "a", peers)), End(
            lambda wake: LocalTransport(wake, "b", peers)
        )
    if kind == "sim":
        network, names = SimNetwork(checks_grants=True, checksums=True), {}
        return End(lambda _: PolledSim(network, "a", names)), End(
            lambda _: PolledSim(network, "b", names)
        )
    if kind == "nixl":
        return End(NixlTransport), End(NixlTransport)
    if kind == "cuda-ipc":
        gpus = FakeGpu(), FakeGpu()
        return End(lambda wake: CudaIpcTransport(wake, gpus[0]), gpus[0]), End(
            lambda wake: CudaIpcTransport(wake, gpus[1]), gpus[1]
        )
    cls = {"shm": ShmTransport, "tcp": TcpTransport}[kind]
    return End(lambda wake: cls(wake, checksums=True)), End(lambda wake: cls(wake, checksums=True))


def connect(writer: End, reader: End) -> None:
    """Fill the writer's pool and link the two."""
    writer.fill(1)
    reader.transport.connect(READER, WRITER, writer.metadata, False)
    writer.transport.connect(WRITER, READER, reader.metadata, True)


def close(*ends: End) -> None:
    for end in ends:
        end.transport.close()
