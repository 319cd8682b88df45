"""Driver: the CUDA calls that the executor makes.

Owns: stream order, events, graph capture, and host-device copies.
Promises: only `synchronize` waits for the device. Each copy uses staging memory, which the caller
frees once the copy has finished.
Must not: know a model or a request.

It is an interface so that tests can run the executor without a GPU, with a driver that runs
everything in place.
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
    """Streams and events are opaque to the caller."""

    device: torch.device

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Work launched inside the context goes to `stream`."""
        ...

    def set_stream(self, stream: Any) -> None:
        """Make `stream` the current stream of this thread. Cheaper than `on_stream`: nothing is
        restored."""
        ...

    def record_event(self, stream: Any) -> Any:
        """An event recorded at the current end of `stream`."""
        ...

    def wait_event(self, stream: Any, event: Any) -> None:
        """Work launched on `stream` from now on starts after `event`."""
        ...

    def synchronize(self, event: Any) -> None:
        """Block this thread until `event` has completed, without holding the GIL."""
        ...

    def elapsed_s(self, first: Any, second: Any) -> float:
        """Device time between two completed events."""
        ...

    def upload(self, array: np.ndarray, to: Tensor | None = None) -> Tensor:
        """Copy `array` to the device (into `to`, if given), in order with the current stream."""
        ...

    def download(self, tensor: Tensor) -> Tensor:
        """Copy `tensor` to staging memory, in order with the current stream."""
        ...

    def alloc_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory for copies. The caller keeps it; it is never freed."""
        ...

    def copy(self, source: Tensor, to: Tensor) -> None:
        """Copy between the device and `alloc_pinned` memory, in order with the current stream."""
        ...

    def take_staging(self) -> list[Tensor]:
        """Staging memory allocated since the last call."""
        ...

    def free_staging(self, staging: list[Tensor]) -> None:
        """Free staging memory whose copies were read. Callable from any thread."""
        ...

    def capture(self, stream: Any, body: Callable[[], None]) -> Callable[[], None]:
        """Run `body` once on `stream`, then capture it. The result replays the graph on the current
        stream."""
        ...


class PinnedSlabs:
    """Pinned memory cut from large slabs, which are never freed.

    Allocating pinned memory waits until the device is idle (CUDA C++ Programming Guide, Implicit
    Synchronization). Freeing it makes torch record an event on the stream that used it, which would
    break a capture in progress there. `allocate_slab` returns that many bytes as uint8. `free` may
    be called from any thread, everything else from one.
    """

    SLAB_BYTES = 32 << 20
    ALIGNMENT_BYTES = 256

    def __init__(self, get: Callable[[int], Tensor]) -> None:
        self._allocate_slab = get
        self._slab = get(self.SLAB_BYTES)
        self._idle: dict[int, list[Tensor]] = {}  # by size, a power of two

    def alloc_permanent(self, size: int) -> Tensor:
        """At least `size` bytes, never freed."""
        size = -(-size // self.ALIGNMENT_BYTES) * self.ALIGNMENT_BYTES
        if size > len(self._slab):
            with torch.inference_mode(False):  # so that it is writable in any mode
                self._slab = self._allocate_slab(max(size, self.SLAB_BYTES))
        block, self._slab = self._slab[:size], self._slab[size:]
        return block

    def alloc(self, size: int) -> Tensor:
        """At least `size` bytes, until `free`."""
        size = max(self.ALIGNMENT_BYTES, 1 << (max(1, size) - 1).bit_length())
        idle = self._idle.setdefault(size, [])
        return idle.pop() if idle else self.alloc_permanent(size)

    def free(self, block: Tensor) -> None:
        self._idle[len(block)].append(block)


class CudaDriver:
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
        # It is mostly current already, and setting and restoring it each time is expensive.
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
        """Pinned memory with the shape and dtype of `like`."""
        block = self._pinned.alloc(like.nbytes)
        self._staging.append(block)
        return block[: like.nbytes].view(like.dtype).view(like.shape)

    def capture(self, stream: torch.cuda.Stream, body: Callable[[], None]) -> Callable[[], None]:
        """All graphs share one memory pool. So two graphs must not run at once, unless they were
        captured on different streams. A graph runs on the SMs of the stream it was captured on,
        wherever it is replayed."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            body()  # kernels compile and load on first use, which cannot be captured
            # Only this thread is restricted to what a capture allows: others wait for events.
            graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        self._graphs.append(graph)
        return graph.replay
