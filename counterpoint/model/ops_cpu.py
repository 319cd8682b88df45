"""Ops of a CPU.

Owns: the choice of the fastest arithmetic of this CPU and torch build. Results equal the reference
up to the rounding of the weights. float16 and bfloat16 with the C kernels are batch invariant
(FBGEMM and oneDNN sum every row in one order too), so all policies give the same tokens.
Must not: set threads or affinity (the executor does).

Matrix products take most of the time. Those of one layer of SmolLM2-135M in microseconds, on 2
cores of an AMD Zen 4 (avx512_bf16), by rows of the pass, with weights read from memory:

    rows                                                        1       8      32     512
    float32   MKL, weights in float32                        1113    1289    2168   19360
    float16   FBGEMM, float16 weights, float32 maths          267     390    1223   17716
    bfloat16  oneDNN, weights and inputs in bfloat16          437     418     806    8811

float16 keeps 11 bits of a weight and all of the inputs: it generates the text of float32. bfloat16
keeps 8 bits of both. Without bfloat16 instructions (avx512_bf16, amx) it is five times slower. So
`auto` is bfloat16 for a bfloat16 checkpoint on a CPU that has them, else float16, else (without
FBGEMM, as on ARM) float32. With the C kernels, float16 and bfloat16 store K and V as float16: half
the memory and half the reads of a decode step.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.config import ConfigError
from counterpoint.model.native import HEAD_DIM_STEP, Kernels, load_kernels, plan_tiles
from counterpoint.model.ops import Ops, reference_ops, rope_and_append
from counterpoint.model.paged_sdpa import gathered_attention, plan_gather
from counterpoint.spec.source import DEFAULT_CACHE

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class CpuOptions:
    """`cache` and `invariant` of `cpu_ops`, for callers that let `load_decoder` choose the ops."""

    cache: str | Path | None = DEFAULT_CACHE
    invariant: bool = False


def cpu_ops(
    dtype: str = "auto",
    head_dim: int = 64,
    checkpoint_dtype: torch.dtype | None = None,
    cache: str | Path | None = DEFAULT_CACHE,
    invariant: bool = False,
) -> Ops:
    """The fastest record for `dtype` (a value of ModelConfig.dtype).

    `cache` is the folder of the compiled kernels. They are not used if it is None, or with a
    `head_dim` that they don't support. Raises ConfigError for a dtype that this CPU or torch build
    lacks, and if `invariant` (batch invariance) is asked for but not possible.
    """
    arithmetic = choose_dtype(dtype, checkpoint_dtype)
    kernels = (
        load_kernels(Path(cache))
        if cache is not None and head_dim % HEAD_DIM_STEP == 0
        else "not asked for"
    )
    if invariant:
        require_invariant(arithmetic, kernels if isinstance(kernels, str) else "")
    between = (
        with_torch(reference_ops())
        if isinstance(kernels, str)
        else with_kernels(reference_ops(), kernels)
    )
    if isinstance(kernels, str) and cache is not None:
        log.warning("slower attention by torch, because the C kernels are not in use: %s", kernels)
    name = f"cpu {arithmetic}{'' if isinstance(kernels, str) else ' with C kernels'}"
    if not isinstance(kernels, str) and arithmetic != "float32":
        between = dataclasses.replace(between, kv_dtype=kernels.kv_dtype)
    if arithmetic == "float16":
        return dataclasses.replace(
            between,
            name=name,
            pack_linear=pack_fp16,
            linear=linear_fp16,
            pack_embedding=Tensor.half,
        )
    if arithmetic == "bfloat16":
        return dataclasses.replace(
            between,
            name=name,
            pack_linear=pack_bf16,
            linear=linear_bf16,
            pack_embedding=Tensor.bfloat16,
        )
    return dataclasses.replace(between, name=name)


def require_invariant(arithmetic: str, without_kernels: str) -> None:
    """Raises ConfigError if a row would depend on its pass: MKL's float32 products and torch's
    attention choose the order of a sum by the number of rows."""
    if arithmetic == "float32":
        raise ConfigError(
            "batch_invariant needs dtype float16 or bfloat16 on a CPU, and this would be float32"
        )
    if without_kernels:
        raise ConfigError(
            f"batch_invariant needs the C kernels on a CPU, which are not in use: {without_kernels}"
        )


def choose_dtype(dtype: str, checkpoint_dtype: torch.dtype | None) -> str:
    fast_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if dtype == "auto":
        if fast_bf16 and checkpoint_dtype is torch.bfloat16:
            return "bfloat16"
        return "float16" if has_fbgemm() else "float32"
    if dtype == "bfloat16" and not fast_bf16:
        raise ConfigError(
            "dtype is 'bfloat16': this CPU has neither avx512_bf16 nor amx and would be slow; "
            "set it to 'auto'"
        )
    if dtype == "float16" and not has_fbgemm():
        raise ConfigError(
            "dtype is 'float16': this torch build has no FBGEMM for it; set it to 'auto'"
        )
    return dtype


def has_fbgemm() -> bool:
    try:
        linear_fp16(torch.zeros(1, 16), pack_fp16(torch.zeros(16, 16), None))
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return True


# ---------------------------------------------------------------- matrix products


def pack_fp16(weight: Tensor, bias: Tensor | None) -> torch.ScriptObject:
    return torch.ops.quantized.linear_prepack_fp16.default(weight, bias)


def linear_fp16(x: Tensor, packed: torch.ScriptObject) -> Tensor:
    return torch.ops.quantized.linear_dynamic_fp16.default(x, packed)


def pack_bf16(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.to(torch.bfloat16), None)
    return packed, None if bias is None else bias.to(torch.bfloat16)


def linear_bf16(x: Tensor, packed: tuple[Tensor, Tensor | None]) -> Tensor:
    """Computes one row as two: a single row would take another kernel with another order of
    sums."""
    x16 = x.to(torch.bfloat16)
    if x.shape[0] == 1:
        x16 = x16.expand(2, -1)
    out = torch.ops.mkldnn._linear_pointwise.default(x16, *packed, "none", [], "")
    return out[: x.shape[0]].to(torch.float32)


# ---------------------------------------------------------------- the other operators


def with_kernels(ops: Ops, kernels: Kernels) -> Ops:
    return dataclasses.replace(
        ops,
        embed=embed,
        rms_norm=kernels.rms_norm,
        add_rms_norm=kernels.add_rms_norm,
        add=Tensor.add_,
        silu_mul=kernels.silu_mul,
        rope_and_append=kernels.rope_and_append,
        plan_attention=plan_tiles,
        attention=kernels.attention,
    )


def with_torch(ops: Ops) -> Ops:
    return dataclasses.replace(
        ops,
        embed=embed,
        add=Tensor.add_,
        rope_and_append=append_finite,
        plan_attention=plan_gather,
        attention=gathered_attention,
    )


def embed(tokens_T: Tensor, table_VD: Tensor) -> Tensor:
    return F.embedding(tokens_T, table_VD).to(torch.float32)


def append_finite(
    x_TE: Tensor,
    angles: tuple[Tensor, Tensor],
    query_norm_A: Tensor | None,
    key_norm_A: Tensor | None,
    eps: float,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_rows_T: Tensor,
) -> Tensor:
    """As the reference, but writes 0 to the pool for a number that is not finite. Gathered
    attention reads whole pages: NaN of a failed request would reach the page's next owner despite
    the mask."""
    kv_features = k_pages.shape[2] * k_pages.shape[3]
    x_TE[:, -2 * kv_features :].nan_to_num_(0.0, 0.0, 0.0)
    return rope_and_append(x_TE, angles, query_norm_A, key_norm_A, eps, k_pages, v_pages, kv_rows_T)
