"""Ops of a CUDA GPU.

Owns: the choice of every operator except attention kernels and tuned products.
Promises: results equal the reference up to rounding to `dtype`. No operation waits for the device,
so all can be captured. Importable without a GPU.
Must not: hold state between calls.

Eager passes take their matrix products from cuBLAS, through torch. Each stream partition has its
own Ops for decode steps (`make_decode_ops`), whose products were tuned on its SMs. The operations
between products are in kernels/layer.py, or in triton_kernels.py for other shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
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
from counterpoint.device.cuda.kernels.layer import MAX_QUANTISED_FEATURES, LayerKernels, LayerShape
from counterpoint.device.cuda.kernels.nvcc import KernelError
from counterpoint.model.fp8 import SIZE_MULTIPLE, ScaledWeight, quantise_rows
from counterpoint.model.ops import Ops, pack_linear, reference_ops
from counterpoint.spec import ModelSpec

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def cuda_dtype(dtype: str) -> torch.dtype:
    """The GPU's torch dtype for `config.ModelConfig.dtype`."""
    return DTYPES["bfloat16" if dtype == "auto" else dtype]


@dataclass(frozen=True, slots=True)
class Precision:
    """`dtype`: of weights and activations. `kv_dtype`: of the KV pool (None: `dtype`). `quantise`:
    the layers' matrices, and the activations they multiply, are e4m3. `invariant`: the order of a
    sum does not depend on the batch (batch_invariant.py)."""

    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    quantise: bool = False
    invariant: bool = False

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{' and fp8' * self.quantise}"


def cuda_ops(
    spec: ModelSpec, precision: Precision, device: torch.device
) -> tuple[Ops, AttentionPlanner]:
    """Ops of eager passes, and their prefill planner. Raises ConfigError if Triton is missing."""
    try:
        from counterpoint.device.cuda import batch_invariant, triton_kernels
    except ImportError as error:
        raise ConfigError(
            f"device cuda needs Triton, which comes with torch's CUDA builds on Linux: {error}"
        ) from None
    dtype, kv_dtype, invariant = precision.dtype, precision.kv_dtype, precision.invariant
    if precision.quantise:
        check_quantisable(spec, dtype)
    if invariant:
        planner = batch_invariant.InvariantPlanner(spec, device)
        layer, linear = None, batch_invariant.linear
    else:
        planner = choose_planner(spec, dtype, device)
        layer = layer_kernels(spec, dtype, device, units=0, chained=False)
        linear = make_linear(quantise_rows if layer is None else layer.quantise)
    gather = (
        functools.partial(triton_kernels.gather_context, dtype=dtype)
        if layer is None
        else layer.gather_context
    )
    kind = ", batch-invariant" if invariant else f", prefill attention by {planner.name}"
    record = dataclasses.replace(
        reference_ops(),
        name=f"cuda {precision}{kind}",
        weight_dtype=dtype,
        kv_dtype=dtype if kv_dtype is None else kv_dtype,
        pack_linear=pack_quantised if precision.quantise else pack_linear,
        pack_head=pack_head,
        linear=linear,
        embed=embed,
        rms_norm=triton_kernels.rms_norm,
        add_rms_norm=triton_kernels.add_rms_norm,
        add=add,
        silu_mul=triton_kernels.silu_mul,
        rope_angles=rope_angles,
        rope_and_append=triton_kernels.rope_and_append,
        plan_attention=make_plan_attention(planner, device),
        attention=Attention(gather),
    )
    return with_layer_kernels(record, layer), planner


def make_plan_attention(
    planner: AttentionPlanner, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, int], AttentionPlan]:
    """Ops.plan_attention for callers outside the executor: every segment is a prefill."""

    def plan_attention(
        start_S: Tensor, tokens_S: Tensor, block_table_SP: Tensor, page_tokens: int
    ) -> AttentionPlan:
        """The tensors are on the CPU."""
        ends_S = start_S + tokens_S
        rows = [
            pages[torch.arange(end) // page_tokens] * page_tokens + torch.arange(end) % page_tokens
            for end, pages in zip(ends_S.tolist(), block_table_SP, strict=True)
        ]
        none = torch.zeros(0, 1, dtype=torch.int32, device=device)
        prefill = planner.plan(tokens_S.tolist(), ends_S.tolist())
        context_L = torch.cat(rows).to(device, torch.int32)
        prompts = (PromptRows(0, int(tokens_S.sum()), prefill, context_L),)
        return AttentionPlan(none, none[:, 0], reference_decode, prompts)

    return plan_attention


def make_decode_ops(record: Ops, layer: LayerKernels | None, products: GemmAutotuner) -> Ops:
    """The Ops of a stream partition's decode steps: `record` with the partition's own kernels."""
    return dataclasses.replace(with_layer_kernels(record, layer), linear=products.linear)


def pack_quantised(weight: Tensor, bias: Tensor | None) -> Packed:
    return quantise_rows(weight), bias


def pack_head(weight: Tensor) -> Packed:
    """The LM head is never quantised: only sampled rows read it, and its errors go straight to the
    logits."""
    return pack_linear(weight, None)


def layer_kernels(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, units: int, chained: bool
) -> LayerKernels | None:
    """The kernels between matrix products for `units` SMs. None, and Triton's are used, if they do
    not support the shape or cannot be built."""
    try:
        return LayerKernels(
            LayerShape(dtype, spec.hidden, spec.head_dim), units, device.index or 0, chained
        )
    except (ValueError, KernelError) as error:
        log.warning("operations between matrix products by Triton: %s", error)
        return None


def check_quantisable(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Raise ConfigError unless this model's matrices can be multiplied in e4m3."""
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"quantization is fp8, dtype {str(dtype).removeprefix('torch.')}: "
            "set dtype to bfloat16 or auto"
        )
    for name, size in (
        ("hidden", spec.hidden),
        ("ffn", spec.ffn),
        ("qkv_features", spec.qkv_features),
    ):
        if size % SIZE_MULTIPLE or size > MAX_QUANTISED_FEATURES:
            raise ConfigError(
                f"quantization is fp8, and {name} of {spec.name} is {size}: it takes multiples of "
                f"{SIZE_MULTIPLE} up to {MAX_QUANTISED_FEATURES}; leave it out"
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
