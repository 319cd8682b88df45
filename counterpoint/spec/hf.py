"""From a Hugging Face config.json to a ModelSpec.

Owns: the spelling of config.json, old and new. Every field that changes the computation is in the
spec, or is refused with its name. Must not: import transformers or torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from counterpoint.spec.model import FAMILIES, ModelError, ModelSpec, RopeSpec

# Fields that change the computation, with the values that leave it unchanged.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "kv_lora_rank": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "mlp_bias": (False, None),
    "moe_intermediate_size": (None,),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "use_qk_norm": (None, False),
}
NUMBER_FIELDS = (
    "head_dim",
    "max_window_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "sliding_window",
)  # optional
ROPE_NUMBER_FIELDS = (
    *("attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"),
    *("original_max_position_embeddings", "rope_theta"),
)
WINDOW_OF_MISTRAL_TOKENS = 4096  # the default of a Mistral config that does not set its window


def from_hf(
    config: Mapping[str, Any], name: str = "model", max_context_tokens: int | None = None
) -> ModelSpec:
    """The spec of a parsed config.json.

    A `max_context_tokens` smaller than the model's own replaces it. A sliding window at least as
    long as the context has no effect and is accepted. Raises ModelError with the field.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"model_type is {family!r}: this engine runs {', '.join(FAMILIES)}")
    for key, harmless in UNSUPPORTED.items():
        if key in config and config[key] not in harmless:
            raise ModelError(f"{key} is {config[key]!r}: this engine does not support it")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act is {config['hidden_act']!r}: this engine supports silu")

    check_numbers(config, NUMBER_FIELDS)
    heads = positive_int(config, "num_attention_heads")
    hidden = positive_int(config, "hidden_size")
    layers = positive_int(config, "num_hidden_layers")
    own_max_tokens = positive_int(config, "max_position_embeddings", 2048)
    rope = rope_from_hf(config, own_max_tokens)
    if rope.kind == "yarn" and rope.original_max_tokens:
        own_max_tokens = max(own_max_tokens, int(rope.original_max_tokens * rope.factor))
    context_tokens = min(own_max_tokens, max_context_tokens or own_max_tokens)
    refuse_window(config, layers, context_tokens)
    eos = config.get("eos_token_id")
    return ModelSpec(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
        ffn=positive_int(config, "intermediate_size"),
        vocab=positive_int(config, "vocab_size"),
        max_context_tokens=context_tokens,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        bos_token_id=config.get("bos_token_id"),
    )


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if type(value) is not int or value < 1:
        raise ModelError(
            f"{key} is {value!r}: config.json must give it as a whole number, 1 or more"
        )
    return value


def check_numbers(config: Mapping[str, Any], keys: Iterable[str], within: str = "") -> None:
    for key in keys:
        value = config.get(key)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ModelError(f"{within}{key} is {value!r}: config.json must give it as a number")


def rope_from_hf(config: Mapping[str, Any], max_tokens: int) -> RopeSpec:
    """Reads both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`, which has
    all."""
    field, rope, kind = _checked_rope(config)
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    if kind == "default":
        return RopeSpec(theta=theta)
    original = (
        rope.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or max_tokens
    )
    factor = rope.get("factor")
    if factor is None and kind == "yarn":
        factor = max_tokens / original
    if not isinstance(factor, int | float):
        raise ModelError(f"{field}.factor is {factor!r}: rope type {kind!r} needs it as a number")
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            if not isinstance(rope.get(key), int | float):
                raise ModelError(
                    f"{field}.{key} is {rope.get(key)!r}: rope type 'llama3' needs it as a number"
                )
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_tokens=original,
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
        )
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_tokens=original,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        attention_factor=yarn_attention_factor(rope, factor),
        truncate=rope.get("truncate", True),
    )


def _checked_rope(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
    """(name of the field, its content, the rope type). Raises ModelError if it is unsupported."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(field) or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"{field} is {rope!r}: config.json must give it as an object")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(
            f"{field} differs between layer types ({', '.join(rope)}): this engine supports one "
            "for all"
        )
    check_numbers(rope, ROPE_NUMBER_FIELDS, f"{field}.")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(
            f"{field}.rope_type is {kind!r}: this engine supports default, linear, llama3 and yarn"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"{field}.partial_rotary_factor is {rope['partial_rotary_factor']}: this engine does "
            "not support it"
        )
    return field, rope, kind


def yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """The factor on cos and sin, if the config sets it directly or by `mscale` and
    `mscale_all_dim`."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if not (rope.get("mscale") and rope.get("mscale_all_dim")) or factor <= 1:
        return None
    return (0.1 * rope["mscale"] * math.log(factor) + 1.0) / (
        0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0
    )


def refuse_window(config: Mapping[str, Any], layers: int, context_tokens: int) -> None:
    """Raises ModelError if some layer would see less than the whole context."""
    family = config["model_type"]
    window = config.get("sliding_window", WINDOW_OF_MISTRAL_TOKENS if family == "mistral" else None)
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list):
            raise ModelError(f"layer_types is {types!r}: config.json must give it as a list")
        unknown = {str(each) for each in types} - {"full_attention", "sliding_attention"}
        if unknown:
            raise ModelError(
                f"layer_types has {', '.join(sorted(unknown))}: this engine supports full_attention"
            )
        windowed = "sliding_attention" in types
    elif family in ("qwen2", "qwen3"):
        full = config.get("max_window_layers")
        windowed = (28 if full is None else full) < layers
    else:
        windowed = True
    if windowed and window is not None and window < context_tokens:
        raise ModelError(
            f"sliding_window is {window} tokens and the context {context_tokens}: this engine has "
            f"no sliding window; set max_context_tokens to {window} or less"
        )
