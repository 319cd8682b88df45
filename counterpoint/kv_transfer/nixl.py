"""NixlTransport: KV over NVIDIA's NIXL (extra `nixl`).

NIXL picks RDMA, NVLink, shared memory or TCP through UCX.

Owns: one agent, named anew in every process, and one thread that makes every call to it. NIXL's own
progress thread is off: on few cores it costs more than it gives. Ours also drives what peers write
over TCP.
Promises: Completed when NIXL says that a write has ended, never before. Releasing a transfer in
flight does not stop it (bytes landed after a release that had returned OK), so `cancel` only waits.
A link on which the peer writes is severed when the peer says that its last write has ended, or when
its process on this host has ended; there is no other proof.
Must not: be used with a peer that is not trusted. The reader can't refuse a write: the writer keeps
to the grants that the handoff protocol gave it.
"""

from __future__ import annotations

import importlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from counterpoint.kv_transfer.host import has_ended, host_name, open_process
from counterpoint.kv_transfer.memory import KvMemory, Spans
from counterpoint.kv_transfer.transport import (
    Completed,
    LinkLost,
    LinkSevered,
    Notice,
    TransportError,
    Wake,
)

BUSY_POLL_S, IDLE_POLL_S = 0.0002, 0.002  # pauses of the thread with writes in flight, and without
MODULES = ("nixl_cu13", "nixl_cu12", "nixl")


class NixlPeerInfo(msgspec.Struct, frozen=True):
    agent: bytes
    addresses: tuple[int, ...]
    page_bytes: int
    pid: int
    host: str


@dataclass(slots=True, eq=False)
class NixlPeer:
    """`name` is "" until the agent knows it. `writes`: this end does. Where the peer writes,
    `process` tells when it has ended (host.py)."""

    name: str
    remote: int
    addresses: np.ndarray
    writes: bool
    process: int
    leaving: bool = False


def load_nixl() -> Any:
    """NIXL's module. Raises TransportError with the command that installs it."""
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise TransportError("NIXL is not installed: pip install --no-deps nixl-cu13")


class NixlTransport:
    """`memory_kind`: NIXL's name for where the pool is, DRAM or VRAM (device 0)."""

    kind = "nixl"

    def __init__(self, wake: Wake, memory_kind: str = "DRAM") -> None:
        self._nixl = load_nixl()
        self._wake = wake
        self._memory_kind = memory_kind
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._calls: list[Callable[[], None]] = []
        self._notices: list[Notice] = []
        self._closed = False
        self._agent: Any = None
        self._memory: KvMemory | None = None
        self._registered: Any = None
        self._addresses = np.empty(0, np.int64)
        self._peers: dict[int, NixlPeer] = {}
        # Names ever added. The thread goes on polling them: a peer may still have to get
        # "left".
        self._agents: set[str] = set()
        self._writes: dict[int, tuple[int, Any]] = {}  # op -> link, handle
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)

    # ------------------------------------------------------------ the interface (transport.py)

    def register(self, memory: KvMemory) -> bytes:
        config = self._nixl.nixl_agent_config(
            enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"]
        )
        try:
            self._agent = self._nixl.nixl_agent(f"counterpoint-{secrets.token_hex(8)}", config)
            regions = [(region.ctypes.data, region.nbytes, 0, "") for region in memory.regions]
            self._registered = self._agent.register_memory(regions, self._memory_kind)
        except Exception as error:  # its exceptions share no class of their own
            raise TransportError(f"NIXL can't register the pool: {error}") from error
        self._memory = memory
        self._addresses = np.array([address for address, *_ in regions], np.int64)
        self._thread.start()
        info = NixlPeerInfo(
            self._agent.get_agent_metadata(),
            tuple(self._addresses.tolist()),
            memory.page_bytes,
            os.getpid(),
            host_name(),
        )
        return msgspec.msgpack.encode(info)

    def connect(self, link: int, remote: int, metadata: bytes, writes: bool) -> None:
        info = msgspec.msgpack.decode(metadata, type=NixlPeerInfo)
        if len(info.addresses) != len(self._addresses):
            raise TransportError(
                f"the peer's pool has {len(info.addresses)} regions, "
                f"this one {len(self._addresses)}"
            )
        process = -1 if writes else open_process(info.pid, info.host)
        peer = NixlPeer("", remote, np.array(info.addresses, np.int64), writes, process)

        def call() -> None:
            self._peers[link] = peer
            name = self._agent.add_remote_agent(info.agent)
            peer.name = name.decode() if isinstance(name, bytes) else name
            self._agents.add(peer.name)

        self._enqueue(call, link)

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        """Nothing to do: the writer knows its grants from the handoff protocol."""

    def revoke(self, generation: int) -> None:
        """Can't be proven here, so no Quiesced follows."""

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        def call() -> None:
            peer = self._peers[link]
            here, there = np.zeros((len(spans), 3), np.int64), np.zeros((len(spans), 3), np.int64)
            here[:, 0] = self._addresses[spans[:, 0]] + spans[:, 1]
            there[:, 0] = peer.addresses[spans[:, 0]] + spans[:, 2]
            here[:, 1] = there[:, 1] = spans[:, 3]
            descriptors = [
                self._agent.get_xfer_descs(rows.astype(np.uint64), self._memory_kind)
                for rows in (here, there)
            ]
            handle = self._agent.initialize_xfer("WRITE", *descriptors, peer.name)
            self._writes[op] = (link, handle)
            self._agent.transfer(handle)

        self._enqueue(call, link)

    def cancel(self, op: int) -> None:
        """It can't be stopped: Completed comes at its end."""

    def disconnect(self, link: int) -> None:
        def call() -> None:
            if link in self._peers:
                self._peers[link].leaving = True

        self._enqueue(call, link)

    def poll(self) -> list[Notice]:
        with self._lock:
            notices, self._notices = self._notices, []
            return notices

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._work.notify()
        if self._thread.is_alive():
            self._thread.join()
        if self._agent is not None:
            for name in self._agents:
                self._agent.remove_remote_agent(name)
            self._agent.deregister_memory(self._registered)
            for peer in self._peers.values():
                if peer.process >= 0:
                    os.close(peer.process)
            self._peers.clear()
            self._agent = self._registered = None

    # ------------------------------------------------------------ the thread

    def _enqueue(self, call: Callable[[], None], link: int) -> None:
        """Have the thread make this call; the link is lost if it raises."""

        def guarded() -> None:
            try:
                call()
            except Exception as error:  # its exceptions share no class of their own
                self._notify(LinkLost(link, str(error)))

        with self._lock:
            self._calls.append(guarded)
            self._work.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls and not self._closed:
                    idle_s = IDLE_POLL_S if self._agents else None
                    self._work.wait(BUSY_POLL_S if self._writes else idle_s)
                calls, self._calls = self._calls, []
                if self._closed:
                    return
            for call in calls:
                call()
            self._poll_peers()
            for op, (_, handle) in tuple(self._writes.items()):
                self._poll_write(op, handle)
            for link, peer in tuple(self._peers.items()):
                if peer.leaving:
                    self._try_leave(link, peer)

    def _poll_write(self, op: int, handle: Any) -> None:
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            state, problem = "ERR", str(error)
        else:
            problem = "NIXL reports an error"
        if state == "PROC":
            return
        del self._writes[op]
        self._agent.release_xfer_handle(handle)
        self._notify(Completed(op, "" if state == "DONE" else problem))

    def _poll_peers(self) -> None:
        """Drive what peers write here; sever the links that they have left."""
        if not self._agents:
            return
        for messages in self._agent.get_new_notifs().values():
            for message in messages:
                kind, _, number = message.decode().partition(" ")
                if kind == "left" and int(number) in self._peers:
                    self._sever(int(number))

    def _try_leave(self, link: int, peer: NixlPeer) -> None:
        if not peer.writes:
            if peer.process >= 0 and has_ended(peer.process):
                self._sever(link)
        elif all(other != link for other, _ in self._writes.values()):
            self._leave(link, peer)

    def _leave(self, link: int, peer: NixlPeer) -> None:
        """None of this end's writes is in flight: notify the reading end."""
        try:
            self._agent.send_notif(peer.name, f"left {peer.remote}".encode())
        except Exception as error:
            self._notify(LinkLost(link, str(error)))
            with suppress(Exception):  # a dead peer: its name must not linger in the agent
                self._agent.remove_remote_agent(peer.name)
                self._agents.discard(peer.name)
        del self._peers[link]
        self._notify(LinkSevered(link))

    def _sever(self, link: int) -> None:
        """The peer writes here no more."""
        process = self._peers.pop(link).process
        if process >= 0:
            os.close(process)
        self._notify(LinkSevered(link))

    def _notify(self, notice: Notice) -> None:
        with self._lock:
            self._notices.append(notice)
        self._wake()
