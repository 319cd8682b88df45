"""Decoder: one config-driven transformer for every dense family.

Owns: the order of operations in a layer. Layers [a, b) then [b, c) give the same bits as [a, c).
The LM head sees sampled rows alone, so no [T, V] tensor exists.
Must not: name a family, a device or a kernel. What differs is in the spec, the weights and the ops.

Shapes: T tokens of the pass, D hidden, E the fused Q, K and V features, H query heads, A head size,
B sampled rows, V vocabulary.
Architecture: Llama (arXiv:2302.13971 section 2.2); grouped-query attention (arXiv:2305.13245);
Q and K norm as in Qwen3.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from counterpoint.model.batch import PassTensors
from counterpoint.model.kv import KVPool
from counterpoint.model.ops import Ops
from counterpoint.spec import ModelSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. `qkv`, `output`, `gate_up` and `down` come from `Ops.pack_linear`."""

    attention_norm_D: Tensor
    qkv: Any
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Any
    ffn_norm_D: Tensor
    gate_up: Any
    down: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a decoder, prepared by its ops. `inverse_frequencies` [head_dim / 2] and
    `rope_scale`, a factor on cos and sin, follow from the spec's RoPE."""

    embedding_VD: Tensor
    layers: tuple[Layer, ...]
    final_norm_D: Tensor
    head: Any
    inverse_frequencies: Tensor
    rope_scale: float


class Decoder:
    """Call `embed`, then `run_layers` once or in consecutive layer groups, then `logits`."""

    __slots__ = ("kv_dtype", "ops", "spec", "weights")

    def __init__(self, spec: ModelSpec, ops: Ops, weights: Weights) -> None:
        self.spec = spec
        self.ops = ops
        self.weights = weights
        self.kv_dtype = ops.kv_dtype

    def embed(self, batch: PassTensors) -> Tensor:
        """Token embeddings, [T, D]."""
        return self.ops.embed(batch.tokens_T, self.weights.embedding_VD)

    def angles(self, batch: PassTensors) -> Any:
        """Rotations of the pass's positions, from `Ops.rope_angles`."""
        return self.ops.rope_angles(
            batch.positions_T, self.weights.inverse_frequencies, self.weights.rope_scale
        )

    def run_layers(
        self,
        x_TD: Tensor,
        batch: PassTensors,
        kv: KVPool,
        first_layer: int,
        last_layer: int,
    ) -> Tensor:
        """Hidden states after layers [first_layer, last_layer), [T, D]; overwrites `x_TD`.

        Writes K and V of the pass's tokens to `kv` in each of these layers. After the model's last
        layer the result has `batch.output_rows_B` alone, [B, D]: after its attention the other
        rows are not computed.
        """
        spec, ops = self.spec, self.ops
        angles = self.angles(batch) if batch.angles is None else batch.angles
        layers = self.weights.layers
        normed_TD = ops.rms_norm(x_TD, layers[first_layer].attention_norm_D, spec.norm_eps)
        for index in range(first_layer, last_layer):
            q_THA = self.before_attention(normed_TD, kv, index, angles, batch.kv_rows_T)
            rows_B = batch.output_rows_B if index + 1 == spec.layers else None
            if rows_B is not None and not len(rows_B):
                return x_TD[:0]
            attended_TE = ops.attention(q_THA, kv.k[index], kv.v[index], batch.attention)
            if rows_B is not None:
                x_TD, attended_TE = x_TD[rows_B], attended_TE[rows_B]
            x_TD, ffn_TD = self.after_attention(x_TD, attended_TE, index)
            # At a group's end: `add` here and `rms_norm` in the next call, the same bits.
            if index + 1 < last_layer:
                x_TD, normed_TD = ops.add_rms_norm(
                    x_TD, ffn_TD, layers[index + 1].attention_norm_D, spec.norm_eps
                )
            else:
                x_TD = ops.add(x_TD, ffn_TD)
        return x_TD

    def before_attention(
        self, normed_TD: Tensor, kv: KVPool, index: int, angles: Any, kv_rows_T: Tensor
    ) -> Tensor:
        """A layer up to its attention: writes K and V of the rows to the pool, returns Q [T, H,
        A]."""
        spec, ops, layer = self.spec, self.ops, self.weights.layers[index]
        norms = layer.query_norm, layer.key_norm
        qkv_TE = ops.linear(normed_TD, layer.qkv)
        return ops.rope_and_append(
            qkv_TE, angles, *norms, spec.norm_eps, kv.k[index], kv.v[index], kv_rows_T
        )

    def after_attention(
        self, x_TD: Tensor, attended_TE: Tensor, index: int
    ) -> tuple[Tensor, Tensor]:
        """A layer from its attention on: the hidden states after attention, and the output of the
        feed-forward network, which the caller adds to them."""
        ops, layer = self.ops, self.weights.layers[index]
        attended_TD = ops.linear(attended_TE, layer.output)
        x_TD, normed_TD = ops.add_rms_norm(x_TD, attended_TD, layer.ffn_norm_D, self.spec.norm_eps)
        return x_TD, ops.linear(ops.silu_mul(ops.linear(normed_TD, layer.gate_up)), layer.down)

    def logits(self, x_TD: Tensor, batch: PassTensors, rows_B: Tensor | None = None) -> Tensor:
        """Logits of `batch.sample_rows_B`, or of the given rows of the pass, float32 [B, V]."""
        rows_B = batch.sample_rows_B if rows_B is None else rows_B
        return self.head(x_TD[rows_B])

    def head(self, x_BD: Tensor) -> Tensor:
        """Logits of hidden states after the last layer, float32 [B, V]."""
        x_BD = self.ops.rms_norm(x_BD, self.weights.final_norm_D, self.spec.norm_eps)
        return self.ops.linear(x_BD, self.weights.head).to(torch.float32)
