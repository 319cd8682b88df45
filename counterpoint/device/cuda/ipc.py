"""CudaCopier: copies between KV pools on one GPU, also of other processes (kv_transfer/gpu.py).

Owns: a low-priority stream and the staging memory of copies.
Promises: copies and steps never wait for each other; they only share the GPU. `prepare` allocates
everything, so no copy interferes with a graph capture.
Must not: know who may write which page.

A copy gathers rows into staging memory and scatters them from there: two kernels, whatever the
order of the pages. One copy command per run of pages would cost the host more than the GPU: a
prompt of 4,096 tokens can be 16,384 runs.

Another process's pool is opened by its CUDA IPC handle (CUDA driver API, cuIpcOpenMemHandle).
Memory of torch's expandable segments has no handle, so they must be off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterpoint.kv_transfer.gpu import ROW, GpuKvMemory
from counterpoint.kv_transfer.transport import TransportError

STAGING_BYTES = 64 << 20
HANDLE_BYTES = 64


class ExportedMemory(msgspec.Struct, frozen=True):
    """`offset`: of the pool within the allocation that `handle` names."""

    handle: bytes
    offset: int


class RawPointer:
    """Memory at an address, wrapped for torch (CUDA array interface, version 3)."""

    def __init__(self, address: int, rows: int, words: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (rows, words),
            "typestr": "<i8",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class CudaCopier:
    """`staged`: pages go through host memory (`read`, `write`). Raises TransportError without
    cuda-bindings."""

    def __init__(self, device: int = 0, staged: bool = False) -> None:
        try:
            from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise TransportError(
                "CUDA IPC needs the package cuda-bindings: pip install 'counterpoint[cuda]'"
            ) from None
        self._driver: Any = driver
        self.device = torch.device("cuda", device)
        self.max_rows = 0
        self._staged = staged
        self._stream = torch.cuda.Stream(self.device, priority=0)
        self._context: Any = None
        self._opened: dict[int, int] = {}  # address of rows -> address of the allocation

    def prepare(self, memory: GpuKvMemory) -> None:
        if self.max_rows:
            return
        words = memory.rows_RW.shape[1]
        self.max_rows = max(1, STAGING_BYTES // memory.page_bytes)
        self._staging_NW = torch.empty(self.max_rows, words, dtype=ROW, device=self.device)
        self._rows_2N = torch.empty(2, self.max_rows, dtype=torch.int64, device=self.device)
        self._host_2N = torch.empty(2, self.max_rows, dtype=torch.int64, pin_memory=True)
        self._host_NW = torch.empty(
            self.max_rows if self._staged else 0, words, dtype=ROW, pin_memory=True
        )
        one = np.zeros(1, np.int64)
        # Load the kernels now, not during a capture.
        self.wait(self.start_copy(memory.rows_RW, one, memory.rows_RW, one))

    # ------------------------------------------------------------ pools of other processes

    def export_pool(self, memory: GpuKvMemory) -> bytes:
        address = memory.rows_RW.data_ptr()
        self._context = self._call(self._driver.cuCtxGetCurrent)
        base = int(self._call(self._driver.cuMemGetAddressRange, address)[0])
        handle = self._call(self._driver.cuIpcGetMemHandle, address)
        return msgspec.msgpack.encode(ExportedMemory(bytes(handle.reserved), address - base))

    def map_pool(self, exported: bytes, rows: int, words: int) -> Tensor:
        theirs = msgspec.msgpack.decode(exported, type=ExportedMemory)
        if len(theirs.handle) != HANDLE_BYTES:
            raise TransportError(
                f"a CUDA IPC handle has {HANDLE_BYTES} bytes, not {len(theirs.handle)}"
            )
        handle = self._driver.CUipcMemHandle()
        handle.reserved = theirs.handle
        flags = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        self._call(self._driver.cuCtxSetCurrent, self._context)  # any thread may open
        base = int(self._call(self._driver.cuIpcOpenMemHandle, handle, flags))
        address = base + theirs.offset
        rows_RW = torch.as_tensor(RawPointer(address, rows, words))
        if (
            rows_RW.data_ptr() != address
        ):  # torch copied it, and the other process would not see writes
            raise TransportError("torch does not take another process's memory as its own")
        self._opened[address] = base
        return rows_RW

    def unmap_pool(self, rows_RW: Tensor) -> None:
        base = self._opened[rows_RW.data_ptr()]
        self._call(self._driver.cuCtxSetCurrent, self._context)
        self._call(self._driver.cuIpcCloseMemHandle, base)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The values of a driver call. Raises TransportError if it failed."""
        result = function(*arguments)
        if int(result[0]):
            raise TransportError(
                f"{function.__name__}: {result[0]!s}: these two GPUs can't reach each other's "
                "memory, or the other process has ended"
            )
        return result[1] if len(result) == 2 else result[1:]

    # ------------------------------------------------------------ copies

    @torch.inference_mode()
    def start_copy(
        self,
        source_RW: Tensor,
        sources: NDArray[np.int64],
        target_RW: Tensor,
        targets: NDArray[np.int64],
    ) -> Any:
        count = len(sources)
        self._host_2N[0, :count] = torch.from_numpy(np.ascontiguousarray(sources))
        self._host_2N[1, :count] = torch.from_numpy(np.ascontiguousarray(targets))
        with torch.cuda.stream(self._stream):
            started = self._record_event()
            self._rows_2N.copy_(self._host_2N, non_blocking=True)
            piece_NW = self._staging_NW[:count]
            torch.index_select(source_RW, 0, self._rows_2N[0, :count], out=piece_NW)
            target_RW.index_copy_(0, self._rows_2N[1, :count], piece_NW)
            return started, self._record_event()

    def wait(self, ticket: tuple[torch.cuda.Event, torch.cuda.Event]) -> None:
        ticket[1].synchronize()

    def read_rows(self, source_RW: Tensor, sources: NDArray[np.int64]) -> NDArray[np.int64]:
        host_NW = self._host_NW[: len(sources)]
        with torch.cuda.stream(self._stream), torch.inference_mode():
            self._host_2N[0, : len(sources)] = torch.from_numpy(np.ascontiguousarray(sources))
            self._rows_2N.copy_(self._host_2N, non_blocking=True)
            torch.index_select(
                source_RW, 0, self._rows_2N[0, : len(sources)], out=self._staging_NW[: len(sources)]
            )
            host_NW.copy_(self._staging_NW[: len(sources)], non_blocking=True)
            self._record_event().synchronize()
        return host_NW.numpy()

    def write_rows(
        self, content_NW: NDArray[np.int64], target_RW: Tensor, targets: NDArray[np.int64]
    ) -> None:
        count = len(targets)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            self._host_NW[:count] = torch.from_numpy(content_NW)
            self._host_2N[1, :count] = torch.from_numpy(np.ascontiguousarray(targets))
            self._rows_2N.copy_(self._host_2N, non_blocking=True)
            self._staging_NW[:count].copy_(self._host_NW[:count], non_blocking=True)
            target_RW.index_copy_(0, self._rows_2N[1, :count], self._staging_NW[:count])
            self._record_event().synchronize()

    def _record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._stream)
        return event
