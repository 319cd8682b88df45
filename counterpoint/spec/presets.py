"""Well-known models as specs, for random weights and for simulation.

The numbers are those of each model's published config.json. Must not: read files.
"""

from __future__ import annotations

from typing import Any

from counterpoint.spec.model import LatentAttention, ModelSpec, RopeSpec

LLAMA31_ROPE = RopeSpec(theta=500000.0, kind="llama3", factor=8.0, original_max_tokens=8192)
LLAMA32_ROPE = RopeSpec(theta=500000.0, kind="llama3", factor=32.0, original_max_tokens=8192)
LLAMA3_ENDS = (128001, 128008, 128009)
DEEPSEEK = LatentAttention(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
QWEN: dict[str, Any] = {"norm_eps": 1e-6, "rope": RopeSpec(theta=1e6)}
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"eos_token_ids": (2,)},
    "mistral": {"rope": RopeSpec(theta=1e6), "eos_token_ids": (2,)},
    "qwen2": {**QWEN, "qkv_bias": True, "eos_token_ids": (151645, 151643)},
    "qwen3": {**QWEN, "qk_norm": True, "eos_token_ids": (151645, 151643)},
    "qwen3_moe": {**QWEN, "qk_norm": True},
    "deepseek": QWEN,
}


Sizes = tuple[int, int, int, int, int, int]  # layers, hidden, heads, kv_heads, head_dim, ffn


def model(
    name: str, family: str, sizes: Sizes, vocab: int, context: int, **fields: Any
) -> ModelSpec:
    """A spec with `fields` over the family's."""
    return ModelSpec(name, family, *sizes, vocab, context, **(FAMILY_FIELDS[family] | fields))


def llama3(name: str, sizes: Sizes, rope: RopeSpec, tied: bool = False) -> ModelSpec:
    return model(
        name, "llama", sizes, 128256, 131072,
        rope=rope, tied_embeddings=tied, eos_token_ids=LLAMA3_ENDS,
    )  # fmt: skip


PRESETS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        model(
            "smollm2-135m", "llama", (30, 576, 9, 3, 64, 1536), 49152, 8192,
            rope=RopeSpec(theta=1e5), tied_embeddings=True,
        ),
        model("llama-2-7b", "llama", (32, 4096, 32, 32, 128, 11008), 32000, 4096),
        model("llama-2-13b", "llama", (40, 5120, 40, 40, 128, 13824), 32000, 4096),
        model("llama-2-70b", "llama", (80, 8192, 64, 8, 128, 28672), 32000, 4096),
        llama3("llama-3.1-8b", (32, 4096, 32, 8, 128, 14336), LLAMA31_ROPE),
        llama3("llama-3.1-70b", (80, 8192, 64, 8, 128, 28672), LLAMA31_ROPE),
        llama3("llama-3.2-1b", (16, 2048, 32, 8, 64, 8192), LLAMA32_ROPE, tied=True),
        llama3("llama-3.2-3b", (28, 3072, 24, 8, 128, 8192), LLAMA32_ROPE, tied=True),
        model(
            "qwen2.5-0.5b", "qwen2", (24, 896, 14, 2, 64, 4864), 151936, 32768,
            tied_embeddings=True,
        ),
        model("qwen2.5-7b", "qwen2", (28, 3584, 28, 4, 128, 18944), 152064, 32768),
        model("qwen2.5-14b", "qwen2", (48, 5120, 40, 8, 128, 13824), 152064, 32768),
        model(
            "qwen3-0.6b", "qwen3", (28, 1024, 16, 8, 128, 3072), 151936, 40960,
            tied_embeddings=True,
        ),
        model("qwen3-8b", "qwen3", (36, 4096, 32, 8, 128, 12288), 151936, 40960),
        model("qwen3-14b", "qwen3", (40, 5120, 40, 8, 128, 17408), 151936, 40960),
        model("qwen3-32b", "qwen3", (64, 5120, 64, 8, 128, 25600), 151936, 40960),
        model(
            "qwen3-235b-a22b", "qwen3_moe", (94, 4096, 64, 4, 128, 1536), 151936, 40960,
            experts_per_token=8, experts=128,
        ),
        # Its first three layers, which are dense, count as experts; so does the shared expert.
        model(
            "deepseek-v3", "deepseek", (61, 7168, 128, 128, 128, 2048), 129280, 131072,
            experts_per_token=9, experts=257, latent=DEEPSEEK,
        ),
        model("mistral-7b-v0.3", "mistral", (32, 4096, 32, 8, 128, 14336), 32768, 32768),
    )
}  # fmt: skip
