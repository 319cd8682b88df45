"""Ops of a CUDA GPU.

Owns: the choice of arithmetic between the attention kernels. Promises: results equal the reference up to the rounding of `dtype`;
no operation waits for the device, so that all can be captured in a graph; importable without a GPU.
Must not: hold state between calls.

Passes launched one operation after another take their matrix products from cuBLAS, through torch. Decode places have a record each
(`decode_ops`), whose products were chosen by measurement on their SMs. What stands between the products is in kernels/layer.py, or
for shapes and dtypes that it lacks in triton_kernels.py.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.config import ConfigError
from counterpoint.device.cuda.attention import (
    Attention,
    AttentionPlan,
    AttentionPlanner,
    PromptRows,
    choose_planner,
    reference_decode,
)
from counterpoint.device.cuda.gemm_autotune import (
    GemmAutotuner,
    Packed,
    Quantise,
    ensure_quantised,
    scaled_matmul,
)
from counterpoint.device.cuda.kernels.layer import MAX_QUANTISED_FEATURES, LayerKernels
from counterpoint.device.cuda.kernels.nvcc import KernelError
from counterpoint.model.fp8 import SIZE_MULTIPLE, ScaledWeight, quantise_rows
from counterpoint.model.ops import Ops, pack_linear, reference_ops
from counterpoint.spec import ModelSpec

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def cuda_dtype(dtype: str) -> torch.dtype:
    """What `config.ModelConfig.dtype` means on a GPU."""
    return DTYPES["bfloat16" if dtype == "auto" else dtype]


def cuda_ops(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
    quantise: bool = False,
    invariant: bool = False,
) -> tuple[Ops, AttentionPlanner]:
    """The record of passes launched one operation after another, and the planner of their prefill attention. `kv_dtype`: of the
    pool (None: `dtype`). `quantise`: the layers' matrices are e4m3, and what is multiplied with them. `fixed`: no sum's order
    depends on what shares the pass (batch_invariant.py). Raises ConfigError if Triton is missing."""
    try:
        from counterpoint.device.cuda import batch_invariant, triton_kernels
    except ImportError as error:
        raise ConfigError(
            f"device cuda needs Triton, which comes with torch's CUDA builds on Linux: {error}"
        ) from None
    if quantise:
        check_quantisable(spec, dtype)
    planner = (
        batch_invariant.InvariantPlanner(spec, device)
        if invariant
        else choose_planner(spec, dtype, device)
    )
    layer = None if invariant else layer_kernels(spec, dtype, device, units=0, chained=False)
    gather = (
        functools.partial(triton_kernels.gather_context, dtype=dtype)
        if layer is None
        else layer.gather_context
    )

    def plan_attention(
        start_S: Tensor, tokens_S: Tensor, block_table_SP: Tensor, page_tokens: int
    ) -> AttentionPlan:
        """For callers outside the executor: every segment is a prefill. Tensors are on the CPU."""
        ends_S = start_S + tokens_S
        rows = [
            pages[torch.arange(end) // page_tokens] * page_tokens + torch.arange(end) % page_tokens
            for end, pages in zip(ends_S.tolist(), block_table_SP, strict=True)
        ]
        none = torch.zeros(0, 1, dtype=torch.int32, device=device)
        prefill = planner.plan(tokens_S.tolist(), ends_S.tolist())
        context_L = torch.cat(rows).to(device, torch.int32)
        return AttentionPlan(
            none,
            none[:, 0],
            reference_decode,
            (PromptRows(0, int(tokens_S.sum()), prefill, context_L),),
        )

    record = dataclasses.replace(
        reference_ops(),
        name=f"cuda {str(dtype).removeprefix('torch.')}{' and fp8' * quantise}"
        + (", batch-invariant" if invariant else f", prefill attention by {planner.name}"),
        weight_dtype=dtype,
        kv_dtype=dtype if kv_dtype is None else kv_dtype,
        pack_linear=pack_quantised if quantise else pack_linear,
        pack_head=pack_head,
        linear=batch_invariant.linear
        if invariant
        else make_linear(quantise_rows if layer is None else layer.quantise),
        embed=embed,
        rms_norm=triton_kernels.rms_norm,
        add_rms_norm=triton_kernels.add_rms_norm,
        add=add,
        silu_mul=triton_kernels.silu_mul,
        rope_angles=rope_angles,
        rope_and_append=triton_kernels.rope_and_append,
        plan_attention=plan_attention,
        attention=Attention(gather),
    )
    return with_layer_kernels(record, layer), planner


def make_decode_ops(record: Ops, layer: LayerKernels | None, products: GemmAutotuner) -> Ops:
    """The record of a decode place: `record` with the place's own kernels."""
    return dataclasses.replace(with_layer_kernels(record, layer), linear=products.linear)


def pack_quantised(weight: Tensor, bias: Tensor | None) -> Packed:
    return quantise_rows(weight), bias


def pack_head(weight: Tensor) -> Packed:
    """The LM head is never quantised: it is read for sampled rows alone, and its errors are the logits'."""
    return pack_linear(weight, None)


def layer_kernels(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, units: int, chained: bool
) -> LayerKernels | None:
    """The kernels between matrix products for `units` SMs, where they have the shape and can be built; None: Triton's do it."""
    try:
        return LayerKernels(dtype, spec.hidden, spec.head_dim, units, device.index or 0, chained)
    except (ValueError, KernelError) as error:
        log.warning("operations between matrix products by Triton: %s", error)
        return None


def check_quantisable(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Raise ConfigError unless this model's matrices can be multiplied in e4m3."""
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"quantization is fp8, dtype {str(dtype).removeprefix('torch.')}: set dtype to bfloat16 or auto"
        )
    for name, size in (
        ("hidden", spec.hidden),
        ("ffn", spec.ffn),
        ("qkv_features", spec.qkv_features),
    ):
        if size % SIZE_MULTIPLE or size > MAX_QUANTISED_FEATURES:
            raise ConfigError(
                f"quantization is fp8, and {name} of {spec.name} is {size}: it takes multiples of {SIZE_MULTIPLE} up to "
                f"{MAX_QUANTISED_FEATURES}; leave it out"
            )


def with_layer_kernels(record: Ops, layer: LayerKernels | None) -> Ops:
    if layer is None:
        return record
    quantising = record.pack_linear is pack_quantised
    return dataclasses.replace(
        record,
        rms_norm=layer.rms_norm,
        add_rms_norm=layer.add_rms_norm_quantised if quantising else layer.add_rms_norm,
        silu_mul=layer.silu_mul_quantised if quantising else layer.silu_mul,
        rope_and_append=layer.rope_and_append,
    )


def make_linear(quantise: Quantise) -> Callable[[Any, Packed], Tensor]:
    def linear(x: Any, packed: Packed) -> Tensor:
        weight, bias = packed
        if isinstance(weight, ScaledWeight):
            out = scaled_matmul(ensure_quantised(x, quantise), weight)
            return out if bias is None else out.add_(bias)
        return F.linear(x, weight, bias)

    return linear


def embed(tokens_T: Tensor, table_VD: Tensor) -> Tensor:
    return F.embedding(tokens_T, table_VD)


def add(x: Tensor, delta: Tensor) -> Tensor:
    return x.add_(delta)


def rope_angles(
    positions_T: Tensor, inverse_frequencies: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, A / 2], times `scale`, float32."""
    angles = positions_T.to(torch.float32)[:, None] * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)
