"""RoPE's frequencies, from the spec, in float32. Must not: rotate anything (ops does).

Sources: RoPE arXiv:2104.09864 section 3.2; linear position interpolation arXiv:2306.15595; YaRN
arXiv:2309.00071 section 3 (NTK-by-parts, and the attention temperature of section 3.4); llama3, the
frequency rule published with Llama 3.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from counterpoint.spec import ModelSpec, RopeSpec


def rope_frequencies(spec: ModelSpec) -> tuple[Tensor, float]:
    """(angle per position of each pair of dimensions, float32 [head_dim / 2]; factor on cos and
    sin)."""
    rope = spec.rope
    plain = 1.0 / rope.theta ** (
        torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    )
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return scale_llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        temperature = rope.attention_factor
        if temperature is None:
            temperature = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        return scale_yarn(plain, rope, spec.head_dim), temperature
    return plain, 1.0


def scale_llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Keeps high frequencies and divides low ones by `factor`. Between the two wavelengths the
    change is linear in the number of turns over the original context."""
    turns = (rope.original_max_tokens or 0) * plain / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / rope.factor


def scale_yarn(plain: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Keeps dimensions that turn more than `beta_fast` times over the original context and divides
    those below `beta_slow` turns by `factor`, with a linear ramp between."""

    def dimension(turns: float) -> float:
        return (
            head_dim
            * math.log((rope.original_max_tokens or 0) / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    divided = ramp.clamp(0.0, 1.0)
    return divided * plain / rope.factor + (1 - divided) * plain
