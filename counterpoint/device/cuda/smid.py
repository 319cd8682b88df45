"""Which SMs a stream's work really runs on.

Owns: the probe.
Promises: the set that the hardware reports (`%smid`), seen by an eager launch and by a graph captured on the stream.
Must not: judge it (green.py does).
"""

from __future__ import annotations

import ctypes

import torch

from counterpoint.device.cuda.kernels.nvcc import architecture, check_launch, load_library

SPIN_CYCLES = (
    20_000  # a block stays for about 10 microseconds, so that the next ones go to other SMs
)


class SmidProbe:
    """Reads the SM sets of streams of one device. Raises KernelError if the probe can't be built."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.launch = load_library("smid", architecture(device)).counterpoint_smid
        self.launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p]
        self.num_blocks = 8 * torch.cuda.get_device_properties(device).multi_processor_count
        self.sm_ids = torch.empty(self.num_blocks, dtype=torch.int32, device=torch.device("cuda", device))

    def measure_eager(self, stream: torch.cuda.Stream) -> frozenset[int]:
        """SM numbers that a plain launch on `stream` uses. Synchronises the stream."""
        self.sm_ids.fill_(-1)
        torch.cuda.synchronize(self.device)
        self._launch(stream)
        stream.synchronize()
        return frozenset(self.sm_ids.tolist())

    def measure_graph(self, stream: torch.cuda.Stream) -> frozenset[int]:
        """SM numbers that a graph captured on `stream` uses when it is launched there. Synchronises the stream."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, stream=stream):
            self._launch(torch.cuda.current_stream(self.device))
        self.sm_ids.fill_(-1)
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        return frozenset(self.sm_ids.tolist())

    def _launch(self, stream: torch.cuda.Stream) -> None:
        check_launch(
            self.launch(self.sm_ids.data_ptr(), self.num_blocks, SPIN_CYCLES, stream.cuda_stream),
            "SM probe",
        )
