"""Unauthenticated peers can neither end a worker nor hold its resources."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from counterpoint.disagg import peer_connection
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.handoff_events import HandoffConfig, KvGeometry
from counterpoint.disagg.handoff_runner import HandoffRunner
from counterpoint.disagg.peer_connection import (
    CompatibilityDigest,
    FramedConnection,
    Introduction,
    TransportEndpoint,
    WorkerIdentity,
    make_digest,
)
from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.kv_transfer.tcp import TcpTransport
from counterpoint.spec.presets import PRESETS

TOKEN = "a token"
DIGEST: CompatibilityDigest = make_digest(PRESETS["smollm2-135m"], "dummy 0", "float16", 16)
REACH = TransportEndpoint("another process", "this host", "cpu", ("tcp",))


class Mover(TcpTransport):
    """`parted`: a link was torn down."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.parted = threading.Event()

    def disconnect(self, link: int) -> None:
        super().disconnect(link)
        self.parted.set()


class Worker:
    def __init__(self) -> None:
        memory = KvMemory(tuple(np.zeros(64, np.uint8) for _ in range(2)), 16)
        self.mover = Mover()
        blobs = {"tcp": self.mover.register(memory)}
        identity = WorkerIdentity("w", DIGEST, REACH, memory, {"tcp": self.mover}, blobs, TOKEN)
        self.faults: list[str] = []
        self.courier = HandoffRunner(
            identity,
            Handoffs(HandoffConfig(), KvGeometry(1, 16)),
            self,
            on_fault=self.faults.append,
        )
        self.courier.start()

    def to_engine(self, event) -> None: ...

    def report(self, command) -> None: ...

    def close(self) -> None:
        self.courier.close()
        self.mover.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def test_a_word_that_nests_too_deeply_is_refused(worker):
    """It comes from somebody who has proven nothing."""
    greeting = b"\x82\xa4type\xa8greeting\xa1x" + b"\x91" * 200_000
    with socket.create_connection(worker.courier.address, timeout=5) as sock:
        sock.sendall(len(greeting).to_bytes(4, "big") + greeting)
        while sock.recv(4096):  # the reason; then the connection ends
            pass
    assert not worker.faults


def test_a_dialer_that_stands_still_before_its_last_word_takes_no_place(worker, monkeypatch):
    monkeypatch.setattr(peer_connection, "HANDSHAKE_S", 0.3)

    async def dial() -> None:
        line = FramedConnection(*await asyncio.open_connection(*worker.courier.address))
        proof = await peer_connection.dial_handshake(line, TOKEN)
        line.send(
            Introduction(
                worker="p",
                link=7,
                digest=DIGEST,
                endpoint=REACH,
                transport_metadata=worker.courier.identity.transport_metadata,
                proof=proof,
            )
        )
        await line.receive(Introduction)
        assert await line.reader.read() == b"", "the connection should end"
        line.close()

    asyncio.run(asyncio.wait_for(dial(), 10))
    assert worker.mover.parted.wait(5), "the reading end is still there"
