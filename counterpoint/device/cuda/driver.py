"""Driver: everything the executor asks of CUDA itself.

Owns: streams' order, events, graphs, and copies between host and device. Promises: nothing here waits for the device but `wait`.
Pinned memory is borrowed for each copy and must be given back when the copy is over: the executor does, with a step's event.
Must not: know a model or a request.

It is a seam, so that the executor can be tested without a GPU: a driver that runs everything at once, in place.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Driver(Protocol):
    """`stream` and `event` are opaque to the caller."""

    device: torch.device

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """What is launched inside goes to `stream`."""
        ...

    def set_stream(self, stream: Any) -> None:
        """What this thread launches from now on goes to `stream`: for who launches much, and always says where."""
        ...

    def record_event(self, stream: Any) -> Any:
        """An event at the present end of `stream`."""
        ...

    def wait_event(self, stream: Any, event: Any) -> None:
        """What is launched on `stream` from now on runs after `event`."""
        ...

    def synchronize(self, event: Any) -> None:
        """Block this thread until `event` has happened, without holding up other threads."""
        ...

    def elapsed_s(self, first: Any, second: Any) -> float:
        """The device's time between two events that have happened."""
        ...

    def upload(self, array: np.ndarray, to: Tensor | None = None) -> Tensor:
        """A copy of `array` on the device (in `to`, if given), in order with the current stream."""
        ...

    def download(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the host, in borrowed memory: there when the current stream has come so far."""
        ...

    def alloc_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory for copies, the caller's own for good."""
        ...

    def copy(self, source: Tensor, to: Tensor) -> None:
        """Between the device and memory of `keep`, in order with the current stream."""
        ...

    def take_staging(self) -> list[Tensor]:
        """The memory borrowed since the last call."""
        ...

    def free_staging(self, staging: list[Tensor]) -> None:
        """These copies are over, and read. From any thread."""
        ...

    def capture(self, stream: Any, body: Callable[[], None]) -> Callable[[], None]:
        """Run `body` once on `stream`, then record it; the result replays it on the stream that is then current."""
        ...


class PinnedSlabs:
    """Pinned memory that is cut from large pieces and never freed. CUDA, when asked for more, waits until the device has nothing to
    do (CUDA C++ Programming Guide, Implicit Synchronization); torch, when it frees some, records an event on the stream that used
    it, which would spoil a capture that another thread is making there. `get`: so many bytes, uint8. `give_back` may be called from
    any thread, all else from one."""

    SLAB_BYTES = 32 << 20
    ALIGNMENT_BYTES = 256

    def __init__(self, get: Callable[[int], Tensor]) -> None:
        self._allocate_slab = get
        self._slab = get(self.SLAB_BYTES)
        self._idle: dict[int, list[Tensor]] = {}  # by size, a power of two

    def alloc_permanent(self, size: int) -> Tensor:
        """At least so many bytes, for good."""
        size = -(-size // self.ALIGNMENT_BYTES) * self.ALIGNMENT_BYTES
        if size > len(self._slab):
            with torch.inference_mode(False):  # else nobody could write to it but in that mode
                self._slab = self._allocate_slab(max(size, self.SLAB_BYTES))
        block, self._slab = self._slab[:size], self._slab[size:]
        return block

    def alloc(self, size: int) -> Tensor:
        """At least so many bytes, until they are given back."""
        size = max(self.ALIGNMENT_BYTES, 1 << (max(1, size) - 1).bit_length())
        idle = self._idle.setdefault(size, [])
        return idle.pop() if idle else self.alloc_permanent(size)

    def free(self, block: Tensor) -> None:
        self._idle[len(block)].append(block)


class CudaDriver:
    """The driver of a GPU."""

    def __init__(self, device: int = 0) -> None:
        self.device = torch.device("cuda", device)
        self._pinned = PinnedSlabs(
            lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True)
        )
        self._staging: list[Tensor] = []
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def on_stream(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def set_stream(self, stream: torch.cuda.Stream) -> None:
        # Mostly it is the current one already, and setting and restoring it each time is dear.
        if torch._C._cuda_getCurrentRawStream(self.device.index) != stream.cuda_stream:
            torch.cuda.set_stream(stream)

    def record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def elapsed_s(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) * 1e-3

    def upload(self, array: np.ndarray, to: Tensor | None = None) -> Tensor:
        source = torch.from_numpy(array)
        pinned = self._alloc_staging(source)
        pinned.copy_(source)
        return (
            pinned.to(self.device, non_blocking=True)
            if to is None
            else to.copy_(pinned, non_blocking=True)
        )

    def download(self, tensor: Tensor) -> Tensor:
        return self._alloc_staging(tensor).copy_(tensor, non_blocking=True)

    def alloc_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self._pinned.alloc_permanent(size)[:size].view(dtype).view(shape)

    def copy(self, source: Tensor, to: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def take_staging(self) -> list[Tensor]:
        borrowed, self._staging = self._staging, []
        return borrowed

    def free_staging(self, staging: list[Tensor]) -> None:
        for block in staging:
            self._pinned.free(block)

    def _alloc_staging(self, like: Tensor) -> Tensor:
        """Pinned memory of the shape and dtype of `like`."""
        block = self._pinned.alloc(like.nbytes)
        self._staging.append(block)
        return block[: like.nbytes].view(like.dtype).view(like.shape)

    def capture(self, stream: torch.cuda.Stream, body: Callable[[], None]) -> Callable[[], None]:
        """The graph's own memory is shared with the driver's other graphs of the same stream: they must not run at once, which
        one stream sees to. Its SMs are those of `stream`, wherever it is replayed."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            body()  # what is built or loaded on first use is so now; that can't be captured
            # Only this thread must keep to what a capture allows: others wait for events meanwhile.
            graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        self._graphs.append(graph)
        return graph.replay
