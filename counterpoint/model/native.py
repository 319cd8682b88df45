"""The C kernels (kernels.c) as functions on tensors.

Owns: compiling them for this CPU, once, into the cache folder, and calling them. Without a C
compiler `load_kernels` returns a reason, never an error. A half-written library is never loaded.
Must not: decide when to use them (ops_cpu does), or set threads. A call uses torch's number of
threads of the calling thread.

Shapes: as in ops; I tiles of a pass.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-w",
)
HEAD_DIM_STEP = 16  # head sizes the kernels take are multiples of the widest vector
TILE_TOKENS = 32  # consecutive tokens that share a packed block of keys
SINGLE_THREAD_NUMEL = 1 << 14  # elements; below, one thread is faster than two

P, LONG, FLOAT, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int


class TilePlan(NamedTuple):
    """`tiles_I4`: first row of Q, tokens (at most `max_tokens`), position of the first token, row
    of `block_table_SP`."""

    tiles_I4: Tensor
    block_table_SP: Tensor
    max_tokens: int
    page_tokens: int


class Kernels:
    """The library's functions with the signatures of Ops. Tensors are float32 with contiguous rows;
    the KV pool has `kv_dtype` or float32."""

    __slots__ = ("kv_dtype", "lib")

    def __init__(self, path: Path) -> None:
        """Raises OSError if the library can't be loaded."""
        self.lib = ctypes.CDLL(str(path))
        self.kv_dtype = torch.float16 if self.lib.cp_half() else torch.float32
        self.lib.cp_rms_norm.argtypes = (P, P, P, LONG, LONG, FLOAT, INT)
        self.lib.cp_add_rms_norm.argtypes = (P, P, P, P, LONG, LONG, FLOAT, INT)
        self.lib.cp_silu_mul.argtypes = (P, P, LONG, LONG, INT)
        self.lib.cp_rope_and_append.argtypes = (*[P] * 8, *[LONG] * 4, FLOAT, INT, INT)
        self.lib.cp_attention.argtypes = (*[P] * 6, *[LONG] * 8, INT, INT)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        self.lib.cp_rms_norm(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, width, eps, threads_for(x)
        )
        return out

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        rows, width = x.shape
        self.lib.cp_add_rms_norm(
            out.data_ptr(),
            x.data_ptr(),
            delta.data_ptr(),
            weight.data_ptr(),
            rows,
            width,
            eps,
            threads_for(x),
        )
        return x, out

    def silu_mul(self, x: Tensor) -> Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        out = torch.empty(rows, width)
        self.lib.cp_silu_mul(out.data_ptr(), x.data_ptr(), rows, width, threads_for(x))
        return out

    def rope_and_append(
        self,
        x_TE: Tensor,
        angles: tuple[Tensor, Tensor],
        query_norm_A: Tensor | None,
        key_norm_A: Tensor | None,
        eps: float,
        k_pages: Tensor,
        v_pages: Tensor,
        kv_rows_T: Tensor,
    ) -> Tensor:
        """Q is rotated in place: the result is a view of `x_TE`."""
        kv_heads, dim = k_pages.shape[2:]
        rows, features = x_TE.shape
        heads = features // dim - 2 * kv_heads
        cosine, sine = angles
        self.lib.cp_rope_and_append(
            x_TE.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            None if query_norm_A is None else query_norm_A.data_ptr(),
            None if key_norm_A is None else key_norm_A.data_ptr(),
            kv_rows_T.data_ptr(),
            rows,
            heads,
            kv_heads,
            dim,
            eps,
            k_pages.dtype is torch.float16,
            threads_for(x_TE),
        )
        return x_TE[:, : heads * dim].unflatten(1, (heads, dim))

    def attention(self, q_THA: Tensor, k_pages: Tensor, v_pages: Tensor, plan: TilePlan) -> Tensor:
        rows, heads, dim = q_THA.shape
        out = torch.empty(rows, heads * dim)
        failed = self.lib.cp_attention(
            out.data_ptr(),
            q_THA.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            plan.tiles_I4.data_ptr(),
            plan.block_table_SP.data_ptr(),
            plan.tiles_I4.shape[0],
            plan.max_tokens,
            q_THA.stride(0),
            plan.block_table_SP.shape[1],
            plan.page_tokens,
            heads,
            k_pages.shape[2],
            dim,
            k_pages.dtype is torch.float16,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("attention could not allocate its scratch memory")
        return out


def threads_for(x: Tensor) -> int:
    return 1 if x.numel() < SINGLE_THREAD_NUMEL else torch.get_num_threads()


def plan_tiles(
    start_S: Tensor, tokens_S: Tensor, block_table_SP: Tensor, page_tokens: int
) -> TilePlan:
    """Segments cut into tiles of TILE_TOKENS tokens; a decode segment is a tile of one."""
    tiles_S = (tokens_S + (TILE_TOKENS - 1)) // TILE_TOKENS
    segment_I = torch.repeat_interleave(tiles_S)
    first_tile_S = torch.cumsum(tiles_S, 0) - tiles_S
    offset_I = (torch.arange(segment_I.shape[0]) - first_tile_S[segment_I]) * TILE_TOKENS
    first_row_S = torch.cumsum(tokens_S, 0) - tokens_S
    count_I = (tokens_S[segment_I] - offset_I).clamp_(max=TILE_TOKENS)
    tiles_I4 = torch.stack(
        [first_row_S[segment_I] + offset_I, count_I, start_S[segment_I] + offset_I, segment_I], 1
    )
    return TilePlan(tiles_I4, block_table_SP.contiguous(), TILE_TOKENS, page_tokens)


def load_kernels(cache: Path) -> Kernels | str:
    """The kernels, compiled into `cache` unless it has them (about two seconds), or the reason why
    they are not available."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    name = f"kernels-{fingerprint(compiler or '')}.so"
    path = cache.expanduser() / name
    try:
        if not path.is_file():
            if compiler is None:
                return "there is no C compiler (cc, gcc or clang) on the path"
            path.parent.mkdir(parents=True, exist_ok=True)
            compile_kernels(compiler, path)
        return Kernels(path)
    except subprocess.CalledProcessError as error:
        message = error.stderr.decode(errors="replace").strip()[:500]
        return f"{compiler} could not compile {SOURCE.name}: {message}"
    except OSError as error:
        return f"{path} could not be made or loaded: {error}"


def compile_kernels(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kernels-", dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        subprocess.run(
            [compiler, *FLAGS, "-o", str(built), str(SOURCE), "-lm"],
            check=True,
            capture_output=True,
        )
        os.replace(built, path)


def fingerprint(compiler: str) -> str:
    """A hash of source, flags, compiler and CPU: a library is used only on the CPU it was made
    for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = sorted(
            {line for line in lines if line.startswith(("flags", "Features", "model name"))}
        )
    except OSError:
        cpu = [platform.machine(), platform.processor()]
    return hashlib.sha256(
        "\n".join([SOURCE.read_text(), *FLAGS, compiler, *cpu]).encode()
    ).hexdigest()[:16]
