"""Decode attention over a paged KV cache, for a partition of few SMs (kernel: attention.cu).

Owns: the kernel's workspace and calling convention.
Promises: a call is one kernel launch on the current stream. It does not synchronise, and does not
allocate if `out` is given, so it can be captured. The device divides the work, so a graph stays
valid when `lengths` and `tables` change.
Must not: be shared by streams that run at once; the workspace serves one.

Shapes: S sequences, H query heads, K KV heads, G = H / K query heads per KV head (1 to 8), D head
size (64 or 128), P pages in a table row, N pages in the pool, T tokens in a page (a multiple of
16).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from counterpoint.device.cuda.kernels.nvcc import (
    architecture,
    check_launch,
    load_library,
    struct_fields,
)
from counterpoint.model.fp8 import FP8, KV_SCALE

Layout = Literal["HND", "NHD"]
TILE_TOKENS = 16
MAX_SEQS = 4096
FP8_CAPABILITY = (8, 9)  # the first that converts e4m3
ENTRY_EXTRA = 16  # floats of a partial result besides its G * D accumulators


class _AttentionArgs(ctypes.Structure):  # struct Args of attention.cu
    _fields_ = [
        *struct_fields("void_p", "q out k v table lengths partial arrived rows_arrived"),
        *struct_fields("int64", "q_stride out_stride page_stride head_stride token_stride"),
        *struct_fields("int", "table_stride seqs kv_heads group page_tokens pages"),
        *struct_fields("float", "scale_log2 per_v_scale"),
        *struct_fields("int", "head_dim is_bf16 kv_fp8 sms chained"),
    ]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`kv_dtype`: of the pool: the queries' (None), or e4m3, whose elements times KV_SCALE
    (model/fp8.py) are K and V. `layout`: the order of the pool's inner axes: "HND" is [N, K, T, D],
    one head's page is contiguous (4 KiB at T = 16, D = 128); "NHD" is [N, T, K, D]. Both are as
    fast. `scale`: of the softmax (None: D ** -0.5)."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    layout: Layout = "HND"
    scale: float | None = None


class DecodeAttention:
    """Attention of one query token per sequence, on `sms` SMs, for at most `max_seqs` sequences.

    `chained`: a launch may start before the previous kernel of the stream has ended, and waits for
    it on the device (programmatic dependent launch, Hopper and newer). A graph captured with this
    object uses its workspace, so keep it alive. Raises ValueError for an unsupported shape,
    KernelError if the kernel can't be built.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        sms: int,
        max_seqs: int,
        device: int = 0,
        chained: bool = False,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.dtype, self.layout = shape.dtype, shape.layout
        self.kv_dtype = shape.dtype if shape.kv_dtype is None else shape.kv_dtype
        check_shape(self.heads, self.kv_heads, self.head_dim, self.dtype, self.kv_dtype)
        if max_seqs > MAX_SEQS:
            raise ValueError(f"max_seqs is {max_seqs}: this kernel takes {MAX_SEQS} at most")
        self.sms, self.max_seqs = sms, max_seqs
        capability = torch.cuda.get_device_capability(device)
        fp8 = self.kv_dtype == FP8
        if fp8 and capability < FP8_CAPABILITY:
            raise ValueError(
                f"a KV cache of e4m3 takes compute capability 8.9, and the device has {capability}"
            )
        large = capability[0] in (9, 10)  # 227 KiB of shared memory per SM, not about 100
        warps = 12 if large else 6
        flags = [f"-DWARPS={warps}", f"-DWITH_FP8={int(capability >= FP8_CAPABILITY)}"]
        library = load_library("attention", architecture(device), flags=flags)
        self._launch = library.counterpoint_decode_attention
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._allocate(warps * sms + max_seqs * self.kv_heads, torch.device("cuda", device))
        scale = self.head_dim**-0.5 if shape.scale is None else shape.scale
        self._args = _AttentionArgs(
            partial=self._partial.data_ptr(),
            arrived=self._arrived.data_ptr(),
            rows_arrived=self._rows_arrived.data_ptr(),
            kv_heads=self.kv_heads,
            group=self.heads // self.kv_heads,
            scale_log2=scale * math.log2(math.e) * (KV_SCALE if fp8 else 1.0),
            per_v_scale=1 / KV_SCALE if fp8 else 1.0,
            head_dim=self.head_dim,
            is_bf16=int(self.dtype == torch.bfloat16),
            kv_fp8=int(fp8),
            sms=sms,
            chained=int(chained),
        )

    def _allocate(self, entries: int, device: torch.device) -> None:
        """The workspace: `entries` partial results, and counters (see attention.cu)."""
        size = self.heads // self.kv_heads * self.head_dim + ENTRY_EXTRA
        self._partial = torch.empty(entries, size, dtype=torch.float32, device=device)
        # The kernel leaves all counters zero.
        self._arrived = torch.zeros(entries, dtype=torch.int32, device=device)
        self._rows_arrived = torch.zeros(
            self.max_seqs, self.kv_heads, dtype=torch.int32, device=device
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
        """softmax(scale q K^T) V of each sequence over its first `lengths_S[s]` tokens (int32; 0
        gives zeros).

        They lie in pages `tables_SP[s]` (int32; entries past the length are not read) of the pools
        (in `layout`, any page, head and token strides, equal for K and V). q and out: [S, H, D]
        with contiguous heads. Raises ValueError for a tensor that doesn't fit.
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
        """The same for the pools of one layer after another, all of equal shape, on the current
        stream.

        Checking and filling in arguments costs the host more than the launch, so it happens once
        here. Raises ValueError as `__call__`.
        """
        self._check_tensors(q_SHD, out_SHD, tables_SP, lengths_S)
        self._check_pools(k_pool, v_pool)
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
        self, q: torch.Tensor, out: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
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
                    f"{name} must be {self.dtype} [S, {self.heads}, {self.head_dim}] "
                    f"with contiguous heads: {describe_tensor(x)}"
                )
        if out.shape != q.shape or q.shape[0] > self.max_seqs:
            raise ValueError(
                f"q_SHD {tuple(q.shape)} and out_SHD {tuple(out.shape)} must be equal, "
                f"and S at most max_seqs = {self.max_seqs}"
            )
        if (
            tables.dtype != torch.int32
            or tables.dim() != 2
            or tables.shape[0] != q.shape[0]
            or tables.stride(1) != 1
        ):
            raise ValueError(
                f"tables_SP must be int32 [{q.shape[0]}, P] with contiguous rows: "
                f"{describe_tensor(tables)}"
            )
        if (
            lengths.dtype != torch.int32
            or lengths.shape != q.shape[:1]
            or not lengths.is_contiguous()
        ):
            raise ValueError(
                f"lengths_S must be contiguous int32 [{q.shape[0]}]: {describe_tensor(lengths)}"
            )

    def _check_pools(self, k: torch.Tensor, v: torch.Tensor) -> None:
        heads_axis, tokens_axis = (1, 2) if self.layout == "HND" else (2, 1)
        for name, x in (("k_pool", k), ("v_pool", v)):
            fits = x.dim() == 4 and x.dtype == self.kv_dtype and x.stride(3) == 1
            fits = fits and not any(s * x.itemsize % 16 for s in x.stride()[:3])
            fits = fits and x.shape[heads_axis] == self.kv_heads and x.shape[3] == self.head_dim
            fits = fits and not x.shape[tokens_axis] % TILE_TOKENS and x.data_ptr() % 16 == 0
            if not fits or x.shape[0] * x.stride(0) * x.itemsize >= 2**36:
                raise ValueError(
                    f"{name} must be {self.kv_dtype} {self.layout} with {self.kv_heads} heads of "
                    f"{self.head_dim}, a multiple of {TILE_TOKENS} tokens to a page, "
                    f"16-byte aligned rows, under 64 GiB: {describe_tensor(x)}"
                )
        if k.shape != v.shape or k.stride() != v.stride():
            raise ValueError(
                "k_pool and v_pool must have one shape and strides: "
                f"{describe_tensor(k)} and {describe_tensor(v)}"
            )


def check_shape(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Raise ValueError unless the kernel supports this model's attention shape."""
    if heads % kv_heads or not 1 <= heads // kv_heads <= 8:
        raise ValueError(
            f"{heads} query heads on {kv_heads} KV heads: "
            "this kernel takes 1 to 8 per KV head, a whole number"
        )
    if head_dim not in (64, 128):
        raise ValueError(f"head_dim is {head_dim}: this kernel takes 64 or 128")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype}: this kernel takes bfloat16 or float16")
    if kv_dtype not in (dtype, FP8) or (kv_dtype == FP8 and head_dim != 128):
        raise ValueError(
            f"the KV cache is {kv_dtype}: "
            "this kernel takes the queries' dtype, or e4m3 with heads of 128"
        )


def describe_tensor(x: torch.Tensor) -> str:
    return f"got {x.dtype} {tuple(x.shape)} of strides {x.stride()}"
