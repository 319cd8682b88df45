"""ModelSpec: a decoder as numbers.

Owns: the shape of a model and what follows from it (parameters, bytes, FLOPs). A shape that the
engine does not run is refused with the name of the field. Must not: import torch or read a file.
"""

from __future__ import annotations

import dataclasses

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SHAPES_ONLY = ("qwen3_moe", "deepseek")  # can be simulated, not run
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class ModelError(ValueError):
    """A model's files are broken or ask for something that this engine does not run; the message
    names it."""


@dataclasses.dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. `kind` is one of ROPE_KINDS; the other fields belong to the kinds.
    Meaning: YaRN, arXiv:2309.00071 section 3; llama3, the model card of Llama 3.1."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_tokens: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: from `factor`
    truncate: bool = True  # yarn: the ramp's ends are whole dimensions

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ModelError(
                f"rope kind {self.kind!r} is not supported: one of {', '.join(ROPE_KINDS)}"
            )
        if self.kind in ("llama3", "yarn") and not self.original_max_tokens:
            raise ModelError(f"rope kind {self.kind!r} needs original_max_position_embeddings")
        if self.theta <= 1 or self.factor <= 0:
            raise ModelError(
                f"rope theta is {self.theta} and factor {self.factor}: theta must be more than 1, "
                "factor more than 0"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA): DeepSeek-V2, arXiv:2405.04434, section 2.1.

    K and V of all heads come from one vector of `kv_rank` per token. The cache holds it, beside
    `rope_dim` rotated features that the heads share. Queries come from a vector of `q_rank`. A head
    has `nope_dim` features without rotation, and values of `value_dim`.
    """

    q_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the Llama line.

    `family` is one of FAMILIES or SHAPES_ONLY. The latter have `experts` FFNs of width `ffn` each,
    of which a token uses `experts_per_token`, and maybe `latent` attention.

    Query head h of `heads` reads KV head h // (heads // kv_heads). Only Q, K and V have biases
    (`qkv_bias`). `qk_norm` is an RMS norm over each head of Q and K before RoPE (Qwen3).
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
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES + SHAPES_ONLY:
            raise ModelError(
                f"model family {self.family!r} is not supported: one of {', '.join(FAMILIES)}"
            )
        sizes = (
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "ffn",
            "vocab",
            "max_context_tokens",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"heads is {self.heads}, which is not a multiple of kv_heads, {self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}: rotary embedding needs an even one")

    @property
    def qkv_features(self) -> int:
        """Width of the fused Q, K and V projection; with MLA, of the projection to the latent
        vectors."""
        if self.latent is not None:
            return self.latent.q_rank + self.latent.kv_rank + self.latent.rope_dim
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the attention's matrices in a layer, in the order of use."""
        if self.latent is None:
            return (self.qkv_features, self.hidden), (self.hidden, self.heads * self.head_dim)
        latent, heads = self.latent, self.heads
        return (
            (self.qkv_features, self.hidden),
            (heads * (latent.nope_dim + latent.rope_dim), latent.q_rank),
            (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
            (self.hidden, heads * latent.value_dim),
        )

    @property
    def cached_features(self) -> int:
        """Numbers that one token adds to the cache of one layer."""
        return (
            self.latent.kv_rank + self.latent.rope_dim
            if self.latent is not None
            else 2 * self.kv_heads * self.head_dim
        )

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer's matrices that a token is multiplied with."""
        attention = sum(outputs * inputs for outputs, inputs in self.attention_matrices)
        return attention + 3 * self.hidden * self.ffn * (
            self.experts_per_token if self.experts else 1
        )

    @property
    def parameters(self) -> int:
        """Trained numbers in the checkpoint; tied embeddings count once."""
        vectors = (
            2 * self.hidden + self.qkv_bias * self.qkv_features + self.qk_norm * 2 * self.head_dim
        )
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        idle = self.hidden * self.experts + 3 * self.hidden * self.ffn * (
            self.experts - self.experts_per_token
        )
        # `idle`: the router, and the experts that a token does not use.
        each = self.layer_matrix_parameters + vectors + (idle if self.experts else 0)
        return self.layers * each + self.hidden + embeddings

    def weight_bytes(self, element_bytes: float = 2) -> int:
        return int(self.parameters * element_bytes)

    def flops_per_token(self, context_tokens: int = 0, sampled: bool = True) -> int:
        """FLOPs (multiplications and additions) of one token that attends to `context_tokens`
        positions, itself included. The LM head counts only if the token is `sampled`."""
        matrices = self.layers * self.layer_matrix_parameters + sampled * self.vocab * self.hidden
        return 2 * matrices + 4 * self.layers * self.heads * self.head_dim * context_tokens

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of K and V of one token over all layers."""
        return self.layers * self.cached_features * element_bytes

    def sharded(self, degree: int) -> ModelSpec:
        """The share of one of `degree` devices in tensor parallelism: of the heads, each FFN and
        the vocabulary. KV heads fewer than devices are replicated. Raises ModelError if heads or
        FFN can't be divided."""
        if degree == 1:
            return self
        if (
            self.heads % degree
            or self.ffn % degree
            or (self.kv_heads % degree and degree % self.kv_heads)
        ):
            raise ModelError(
                f"{self.name} can't be divided among {degree} devices: {self.heads} heads, "
                f"{self.kv_heads} KV heads"
            )
        return dataclasses.replace(
            self,
            heads=self.heads // degree,
            kv_heads=max(1, self.kv_heads // degree),
            ffn=self.ffn // degree,
            vocab=-(-self.vocab // degree),
        )
