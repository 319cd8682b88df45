"""Driver: everything the executor asks of CUDA itself.

Owns: streams' order, events, graphs, and copies between host and device. Promises: nothing here waits for the device but `wait`;
a pinned buffer is not used again before the copy that reads or writes it is over (torch's pinned allocator keeps count).
Must not: know a model or a request.

It is a seam, so that the executor can be tested without a GPU: a driver that runs everything at once, in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Driver(Protocol):
    """`stream` and `event` are opaque to the caller."""

    device: torch.device

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """What is launched inside goes to `stream`."""
        ...

    def mark(self, stream: Any) -> Any:
        """An event at the present end of `stream`."""
        ...

    def follow(self, stream: Any, event: Any) -> None:
        """What is launched on `stream` from now on runs after `event`."""
        ...

    def wait(self, event: Any) -> None:
        """Block this thread until `event` has happened, without holding up other threads."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """The device's time between two events that have happened."""
        ...

    def upload(self, array: np.ndarray, to: Tensor | None = None) -> Tensor:
        """A copy of `array` on the device (in `to`, if given), in order with the current stream."""
        ...

    def download(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the host, there when the current stream has come so far."""
        ...

    def capture(self, stream: Any, body: Callable[[], None]) -> Callable[[], None]:
        """Run `body` once on `stream`, then record it; the result replays it on the stream that is then current."""
        ...


class CudaDriver:
    def __init__(self, device: int = 0) -> None:
        self.device = torch.device("cuda", device)
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event

    def follow(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) * 1e-3

    def upload(self, array: np.ndarray, to: Tensor | None = None) -> Tensor:
        source = torch.from_numpy(array)
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        pinned.copy_(source)
        return pinned.to(self.device, non_blocking=True) if to is None else to.copy_(pinned, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

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
