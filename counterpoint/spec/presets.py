"""Well-known models as specs, for random weights and for simulation.

Owns: a table of published shapes (each model's config.json). Promises: only public numbers, no weights.
Must not: read files.
"""

from __future__ import annotations

from counterpoint.spec.model import LatentAttention, ModelSpec, RopeSpec

LLAMA31_ROPE = RopeSpec(theta=500000.0, kind="llama3", factor=8.0, original_max_tokens=8192)
DEEPSEEK = LatentAttention(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
LLAMA32_ROPE = RopeSpec(theta=500000.0, kind="llama3", factor=32.0, original_max_tokens=8192)


def llama(
    name: str, sizes: tuple[int, ...], vocab: int, context: int, rope: RopeSpec, tied: bool = False
) -> ModelSpec:
    layers, hidden, heads, kv_heads, head_dim, ffn = sizes
    ends = (128001, 128008, 128009) if vocab == 128256 else (2,)
    return ModelSpec(
        name, "llama", layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context,
        rope=rope, tied_embeddings=tied, eos_token_ids=ends,
    )  # fmt: skip


def qwen(
    name: str, family: str, sizes: tuple[int, ...], vocab: int, context: int, tied: bool = False
) -> ModelSpec:
    layers, hidden, heads, kv_heads, head_dim, ffn = sizes
    return ModelSpec(
        name, family, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context,
        norm_eps=1e-6, rope=RopeSpec(theta=1e6), tied_embeddings=tied,
        qkv_bias=family == "qwen2", qk_norm=family == "qwen3", eos_token_ids=(151645, 151643),
    )  # fmt: skip


def mixture_of_experts(
    name: str,
    family: str,
    sizes: tuple[int, ...],
    vocab: int,
    context: int,
    taken: tuple[int, int],
    latent: LatentAttention | None = None,
) -> ModelSpec:
    """`taken`: (experts that a token takes, experts)."""
    layers, hidden, heads, kv_heads, head_dim, ffn = sizes
    return ModelSpec(
        name, family, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context,
        norm_eps=1e-6, rope=RopeSpec(theta=1e6), qk_norm=family == "qwen3_moe", experts_per_token=taken[0], experts=taken[1],
        latent=latent,
    )  # fmt: skip


# sizes: layers, hidden, heads, kv_heads, head_dim, ffn
PRESETS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        llama(
            "smollm2-135m", (30, 576, 9, 3, 64, 1536), 49152, 8192, RopeSpec(theta=1e5), tied=True
        ),
        llama("llama-2-7b", (32, 4096, 32, 32, 128, 11008), 32000, 4096, RopeSpec()),
        llama("llama-2-13b", (40, 5120, 40, 40, 128, 13824), 32000, 4096, RopeSpec()),
        llama("llama-2-70b", (80, 8192, 64, 8, 128, 28672), 32000, 4096, RopeSpec()),
        llama("llama-3.1-8b", (32, 4096, 32, 8, 128, 14336), 128256, 131072, LLAMA31_ROPE),
        llama("llama-3.1-70b", (80, 8192, 64, 8, 128, 28672), 128256, 131072, LLAMA31_ROPE),
        llama("llama-3.2-1b", (16, 2048, 32, 8, 64, 8192), 128256, 131072, LLAMA32_ROPE, tied=True),
        llama(
            "llama-3.2-3b", (28, 3072, 24, 8, 128, 8192), 128256, 131072, LLAMA32_ROPE, tied=True
        ),
        qwen("qwen2.5-0.5b", "qwen2", (24, 896, 14, 2, 64, 4864), 151936, 32768, tied=True),
        qwen("qwen2.5-7b", "qwen2", (28, 3584, 28, 4, 128, 18944), 152064, 32768),
        qwen("qwen2.5-14b", "qwen2", (48, 5120, 40, 8, 128, 13824), 152064, 32768),
        qwen("qwen3-0.6b", "qwen3", (28, 1024, 16, 8, 128, 3072), 151936, 40960, tied=True),
        qwen("qwen3-8b", "qwen3", (36, 4096, 32, 8, 128, 12288), 151936, 40960),
        qwen("qwen3-14b", "qwen3", (40, 5120, 40, 8, 128, 17408), 151936, 40960),
        qwen("qwen3-32b", "qwen3", (64, 5120, 64, 8, 128, 25600), 151936, 40960),
        mixture_of_experts(
            "qwen3-235b-a22b", "qwen3_moe", (94, 4096, 64, 4, 128, 1536), 151936, 40960, (8, 128)
        ),
        # Its first three layers, which are dense, and the expert that all tokens take are counted as experts like the others.
        mixture_of_experts(
            "deepseek-v3",
            "deepseek",
            (61, 7168, 128, 128, 128, 2048),
            129280,
            131072,
            (9, 257),
            DEEPSEEK,
        ),
        ModelSpec(
            "mistral-7b-v0.3",
            "mistral",
            32,
            4096,
            32,
            8,
            128,
            14336,
            32768,
            32768,
            rope=RopeSpec(theta=1e6),
            eos_token_ids=(2,),
        ),
    )
}
