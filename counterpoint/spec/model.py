"""ModelSpec: a decoder as numbers.

Owns: the shape of a model and what follows from it (parameters, bytes, FLOPs). Promises: no torch; every field that a
checkpoint sets and this engine does not support is refused by name.
Must not: read weights.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. `kind` is default, linear, llama3 or yarn; the other fields are those of the kind."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_tokens: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: from `factor`


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder of the Llama line. `family` is llama, mistral, qwen2 or qwen3.

    Head h of `heads` query heads reads KV head h // (heads // kv_heads). Biases exist on Q, K, V alone (`qkv_bias`);
    `qk_norm` is an RMS norm over each head of Q and K before RoPE (Qwen3).
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_context_tokens: int
    norm_eps: float = 1e-5
    rope: RopeSpec = RopeSpec()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    experts: int = 0  # 0: dense FFN
    experts_per_token: int = 0

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of K and V that one token leaves in the cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes
