"""Decode attention over a paged KV cache, for a partition of a few SMs (kernel: attention.cu).

Owns: the kernel's workspace and its calling convention.
Promises: one call is one kernel launch on the current stream, without synchronising or allocating when `out` is given, so it can be
captured; the work is divided on the device, so a replay may follow other `lengths` and `tables`.
Must not: be shared by two streams that run at once (one DecodeAttention per lane: the workspace is its own).

Shapes: S sequences, H query heads, K KV heads, G = H / K query heads per KV head (1 to 8), D head size (64 or 128), P pages in a
table row, N pages in the pool, T tokens in a page (a multiple of 16).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from counterpoint.device.cuda.kernels.nvcc import architecture, check_launch, load_library
from counterpoint.model.fp8 import FP8, KV_SCALE

Layout = Literal["HND", "NHD"]
TILE_TOKENS = 16
MAX_SEQS = 4096
FP8_CAPABILITY = (8, 9)  # the first that converts e4m3
ENTRY_EXTRA = 16  # floats of a partial result beside its G * D accumulators


class _AttentionArgs(ctypes.Structure):  # struct Args of attention.cu
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "q",
                "out",
                "k",
                "v",
                "table",
                "lengths",
                "partial",
                "arrived",
                "rows_arrived",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("q_stride", "out_stride", "page_stride", "head_stride", "token_stride")
        ),
        *(
            (name, ctypes.c_int)
            for name in ("table_stride", "seqs", "kv_heads", "group", "page_tokens", "pages")
        ),
        *((name, ctypes.c_float) for name in ("scale_log2", "per_v_scale")),
        *((name, ctypes.c_int) for name in ("head_dim", "is_bf16", "kv_fp8", "sms", "chained")),
    ]


class DecodeAttention:
    """Attention of one query token per sequence, on `sms` SMs.

    `max_seqs` bounds S. `scale` is the softmax scale (None: D ** -0.5). `layout` is the order of the pool's inner axes: "HND" is
    [N, K, T, D], a page of one head in one piece (4 KiB at T = 16, D = 128); "NHD" is [N, T, K, D]. Both are as fast.
    `kv_dtype`: of the pool, that of the queries (None) or e4m3, whose elements times KV_SCALE (model/fp8.py) are K and V.
    `chained`: a launch may begin before the kernel ahead of it in the stream has ended, and waits for it on the device
    (programmatic dependent launch, Hopper on). A graph that was captured with this object needs it alive: the workspace is its own.
    Raises ValueError for a shape that the kernel doesn't have, KernelError if it can't be built.
    """

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        sms: int,
        max_seqs: int,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        layout: Layout = "HND",
        scale: float | None = None,
        device: int = 0,
        chained: bool = False,
        cache: Path | None = None,
    ) -> None:
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        check_shape(heads, kv_heads, head_dim, dtype, kv_dtype)
        if max_seqs > MAX_SEQS:
            raise ValueError(f"max_seqs is {max_seqs}: this kernel takes {MAX_SEQS} at most")
        self.heads, self.kv_heads, self.head_dim, self.dtype, self.kv_dtype = (
            heads,
            kv_heads,
            head_dim,
            dtype,
            kv_dtype,
        )
        self.layout: Layout = layout
        self.sms, self.max_seqs = sms, max_seqs
        capability = torch.cuda.get_device_capability(device)
        if kv_dtype == FP8 and capability < FP8_CAPABILITY:
            raise ValueError(
                f"a KV cache of e4m3 takes compute capability 8.9, and the device has {capability}"
            )
        roomy = capability[0] in (9, 10)  # 227 KiB of shared memory to an SM, not about 100
        warps = 12 if roomy else 6
        flags = [f"-DWARPS={warps}", f"-DWITH_FP8={int(capability >= FP8_CAPABILITY)}"]
        library = load_library("attention", architecture(device), flags=flags, cache=cache)
        self._launch = library.counterpoint_decode_attention
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        group = heads // kv_heads
        where = torch.device("cuda", device)
        entries = warps * sms + max_seqs * kv_heads  # partial results: see attention.cu
        self._partial = torch.empty(
            entries, group * head_dim + ENTRY_EXTRA, dtype=torch.float32, device=where
        )
        self._arrived = torch.zeros(
            entries, dtype=torch.int32, device=where
        )  # the kernel leaves all counters zero
        self._rows_arrived = torch.zeros(max_seqs, kv_heads, dtype=torch.int32, device=where)
        self._args = _AttentionArgs(
            partial=self._partial.data_ptr(),
            arrived=self._arrived.data_ptr(),
            rows_arrived=self._rows_arrived.data_ptr(),
            kv_heads=kv_heads,
            group=group,
            scale_log2=(head_dim**-0.5 if scale is None else scale)
            * math.log2(math.e)
            * (KV_SCALE if kv_dtype == FP8 else 1.0),
            per_v_scale=1 / KV_SCALE if kv_dtype == FP8 else 1.0,
            head_dim=head_dim,
            is_bf16=int(dtype == torch.bfloat16),
            kv_fp8=int(kv_dtype == FP8),
            sms=sms,
            chained=int(chained),
        )

    def __call__(
        self,
        q_SHD: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        tables_SP: torch.Tensor,
        lengths_S: torch.Tensor,
        out_SHD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """softmax(scale q K^T) V of every sequence over its first `lengths_S[s]` tokens (int32; 0 gives zeros), which lie in pages
        `tables_SP[s]` (int32; entries past the length are not read) of the pools (in `layout`; any page, head and token strides,
        the same for both). q and out: [S, H, D] with contiguous heads. Raises ValueError for a tensor that doesn't fit.
        """
        out = torch.empty_like(q_SHD) if out_SHD is None else out_SHD
        self.prepare_layers(q_SHD, k_pool, v_pool, tables_SP, lengths_S, out)(k_pool, v_pool)
        return out

    def prepare_layers(
        self,
        q_SHD: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        tables_SP: torch.Tensor,
        lengths_S: torch.Tensor,
        out_SHD: torch.Tensor,
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """The same for the pools of one layer after another, which are all as these are, on the stream that is current now.
        Checking and filling in the arguments costs the host more than the launch, and is done once. Raises ValueError as above."""
        self._check_tensors(q_SHD, out_SHD, k_pool, v_pool, tables_SP, lengths_S)
        if not q_SHD.shape[0]:
            return lambda k_pool, v_pool: None
        args = _AttentionArgs.from_buffer_copy(self._args)
        page_stride, a, b, _ = k_pool.stride()
        args.head_stride, args.token_stride = (a, b) if self.layout == "HND" else (b, a)
        args.page_stride, args.pages = page_stride, k_pool.shape[0]
        args.page_tokens = k_pool.shape[2 if self.layout == "HND" else 1]
        args.q, args.out = q_SHD.data_ptr(), out_SHD.data_ptr()
        args.table, args.lengths, args.table_stride = (
            tables_SP.data_ptr(),
            lengths_S.data_ptr(),
            tables_SP.stride(0),
        )
        args.q_stride, args.out_stride, args.seqs = (
            q_SHD.stride(0),
            out_SHD.stride(0),
            q_SHD.shape[0],
        )
        stream, where, launch = (
            torch.cuda.current_stream(q_SHD.device).cuda_stream,
            ctypes.byref(args),
            self._launch,
        )

        def attend(k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
            args.k, args.v = k_pool.data_ptr(), v_pool.data_ptr()
            check_launch(launch(where, stream), "decode attention")

        return attend

    def _check_tensors(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        inner = (self.heads, self.head_dim)
        for name, x in (("q_SHD", q), ("out_SHD", out)):
            if (
                x.shape[1:] != inner
                or x.dtype != self.dtype
                or x.stride()[1:] != (self.head_dim, 1)
                or x.stride(0) % 2
            ):
                raise ValueError(
                    f"{name} must be {self.dtype} [S, {self.heads}, {self.head_dim}] with contiguous heads: {describe_tensor(x)}"
                )
        if out.shape != q.shape or q.shape[0] > self.max_seqs:
            raise ValueError(
                f"q_SHD {tuple(q.shape)}, out_SHD {tuple(out.shape)}: equal, and S at most max_seqs = {self.max_seqs}"
            )
        heads_axis, tokens_axis = (1, 2) if self.layout == "HND" else (2, 1)
        for name, x in (("k_pool", k), ("v_pool", v)):
            fits = x.dim() == 4 and x.dtype == self.kv_dtype and x.stride(3) == 1
            fits = fits and not any(s * x.itemsize % 16 for s in x.stride()[:3])
            fits = fits and x.shape[heads_axis] == self.kv_heads and x.shape[3] == self.head_dim
            fits = fits and not x.shape[tokens_axis] % TILE_TOKENS and x.data_ptr() % 16 == 0
            if not fits or x.shape[0] * x.stride(0) * x.itemsize >= 2**36:
                raise ValueError(
                    f"{name} must be {self.kv_dtype} {self.layout} with {self.kv_heads} heads of {self.head_dim}, a multiple of "
                    f"{TILE_TOKENS} tokens to a page, rows of 16-byte alignment, under 64 GiB: {describe_tensor(x)}"
                )
        if k.shape != v.shape or k.stride() != v.stride():
            raise ValueError(
                f"k_pool and v_pool must have one shape and strides: {describe_tensor(k)} and {describe_tensor(v)}"
            )
        if (
            tables.dtype != torch.int32
            or tables.dim() != 2
            or tables.shape[0] != q.shape[0]
            or tables.stride(1) != 1
        ):
            raise ValueError(
                f"tables_SP must be int32 [{q.shape[0]}, P] with contiguous rows: {describe_tensor(tables)}"
            )
        if (
            lengths.dtype != torch.int32
            or lengths.shape != q.shape[:1]
            or not lengths.is_contiguous()
        ):
            raise ValueError(f"lengths_S must be contiguous int32 [{q.shape[0]}]: {describe_tensor(lengths)}")


def check_shape(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Raise ValueError unless the kernel has this model's attention shape."""
    if heads % kv_heads or not 1 <= heads // kv_heads <= 8:
        raise ValueError(
            f"{heads} query heads on {kv_heads} KV heads: this kernel takes 1 to 8 per KV head, a whole number"
        )
    if head_dim not in (64, 128):
        raise ValueError(f"head_dim is {head_dim}: this kernel takes 64 or 128")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype}: this kernel takes bfloat16 or float16")
    if kv_dtype not in (dtype, FP8) or (kv_dtype == FP8 and head_dim != 128):
        raise ValueError(
            f"the KV cache is {kv_dtype}: this kernel takes that of the queries, or e4m3 with heads of 128"
        )


def describe_tensor(x: torch.Tensor) -> str:
    return f"got {x.dtype} {tuple(x.shape)} of strides {x.stride()}"
