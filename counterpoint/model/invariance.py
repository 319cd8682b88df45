"""Tests whether a device's matrix products give a row the same bits in every batch.

A GEMM library may sum in another order for another number of rows. This check runs the shapes of
the model on the device before serving. Our own kernels (norms, attention) are batch invariant by
construction and covered by tests.

Shapes: R rows, K inputs of a matrix.
"""

from __future__ import annotations

import torch

from counterpoint.config import ConfigError
from counterpoint.model.decoder import Decoder

ROWS = (1, 2, 3, 4, 7, 8, 16, 17, 33, 64, 100, 129, 256)
MAX_ROWS = 300


@torch.inference_mode()
def require_invariant_gemms(decoder: Decoder, device: torch.device | str = "cpu") -> None:
    """Raises ConfigError if a row's product with a matrix of the first layer or of the LM head
    depends on the other rows."""
    spec, ops, layer = decoder.spec, decoder.ops, decoder.weights.layers[0]
    attended = spec.heads * spec.head_dim
    matrices = {
        "qkv": (layer.qkv, spec.hidden),
        "output": (layer.output, attended),
        "gate_up": (layer.gate_up, spec.hidden),
        "down": (layer.down, spec.ffn),
        "head": (decoder.weights.head, spec.hidden),
    }
    chance = torch.Generator().manual_seed(0)
    for name, (packed, inputs) in matrices.items():
        x_RK = torch.randn(MAX_ROWS, inputs, generator=chance).to(device, activation_dtype(decoder))
        expected = ops.linear(x_RK.clone(), packed)
        for rows in ROWS:
            first = MAX_ROWS // 2 if rows <= MAX_ROWS // 2 else 0
            part = slice(first, first + rows)
            if not torch.equal(ops.linear(x_RK[part].clone(), packed), expected[part]):
                raise ConfigError(
                    f"batch_invariant: on this device ({ops.name}) the product {name} of "
                    f"{spec.name} gives a row other bits among {rows} rows than among {MAX_ROWS}: "
                    "set another dtype, or leave out batch_invariant"
                )


def activation_dtype(decoder: Decoder) -> torch.dtype:
    """The dtype of hidden states: that of embedded tokens."""
    table = decoder.weights.embedding_VD
    return decoder.ops.embed(torch.zeros(1, dtype=torch.int64, device=table.device), table).dtype
