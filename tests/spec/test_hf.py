"""config.json to ModelSpec: what is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from counterpoint.spec import ModelError, RopeSpec
from counterpoint.spec.hf import from_hf

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def test_the_fields():
    spec = from_hf(
        {**LLAMA, "eos_token_id": [2, 5], "bos_token_id": 1, "tie_word_embeddings": True}, "mine"
    )
    assert (spec.name, spec.family, spec.layers, spec.hidden, spec.ffn, spec.vocab) == (
        "mine",
        "llama",
        2,
        64,
        128,
        100,
    )
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.norm_eps) == (4, 2, 16, 1e-5)
    assert (spec.eos_token_ids, spec.bos_token_id, spec.tied_embeddings) == ((2, 5), 1, True)
    assert spec.rope == RopeSpec(theta=10000.0)


def test_what_families_differ_in():
    qwen2, qwen3 = (from_hf({**LLAMA, "model_type": family}) for family in ("qwen2", "qwen3"))
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 16)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert from_hf({**LLAMA, "num_key_value_heads": None}).kv_heads == 4


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 16,
        },
    ],
    ids=["linear", "llama3", "yarn"],
)
def test_both_spellings_of_rope(scaling: dict[str, Any]):
    old = from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    new = from_hf({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert old == new
    assert old.rope.theta == 5e5 and old.rope.factor == scaling["factor"]
    assert old.rope.original_max_tokens == scaling.get("original_max_position_embeddings")


def test_yarn_lengthens_the_context_and_takes_its_temperature_from_mscale():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert (
        from_hf(
            {**LLAMA, "max_position_embeddings": 40960, "rope_scaling": yarn}
        ).max_context_tokens
        == 131072
    )
    assert (
        from_hf(
            {**LLAMA, "rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}}
        ).rope.attention_factor
        == 1.0
    )
    assert from_hf({**LLAMA, "rope_scaling": yarn}).rope.attention_factor is None


REFUSED = {
    "model_type": "gemma3",
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "num_local_experts": 8,
    "num_experts": 64,
    "kv_lora_rank": 512,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"quant_method": "gptq"},
    "final_logit_softcapping": 30.0,
    "hidden_size": None,
    "num_attention_heads": 0,
    "num_hidden_layers": True,
    "max_position_embeddings": "long",
    "num_key_value_heads": 3,
    "head_dim": 15,
    "rope_scaling": {"rope_type": "longrope", "factor": 2.0},
    "rope_parameters": {"full_attention": {"rope_type": "default"}},
    "layer_types": ["full_attention", "linear_attention"],
}
NAMED_OTHERWISE = {"num_key_value_heads": "kv_heads"}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_supported_is_refused_by_name(field: str):
    with pytest.raises(ModelError, match=NAMED_OTHERWISE.get(field, field)):
        from_hf({**LLAMA, field: REFUSED[field]})


@pytest.mark.parametrize(
    "scaling",
    [{"type": "linear"}, {"type": "llama3", "factor": 8.0}, {"type": "dynamic", "factor": 2.0}],
)
def test_half_a_rope_scaling(scaling: dict[str, Any]):
    with pytest.raises(ModelError, match="rope_scaling"):
        from_hf({**LLAMA, "rope_scaling": scaling})


@pytest.mark.parametrize(
    "field",
    [
        "head_dim",
        "num_key_value_heads",
        "rope_theta",
        "sliding_window",
        "layer_types",
        "rope_scaling",
    ],
)
@pytest.mark.parametrize("value", ["x", [7], True, 1.5e999])
def test_a_field_of_another_kind_is_refused_by_name(field: str, value: Any):
    with pytest.raises(ModelError, match=field):
        from_hf({**LLAMA, field: value})
    with pytest.raises(ModelError, match=r"rope_scaling\.factor"):
        from_hf({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": value}})


MISTRAL = {**LLAMA, "model_type": "mistral", "max_position_embeddings": 32768}
QWEN = {**LLAMA, "model_type": "qwen2", "max_position_embeddings": 32768, "sliding_window": 4096}


@pytest.mark.parametrize(
    ("config", "fits"),
    [
        ({**MISTRAL, "sliding_window": None}, True),
        ({**MISTRAL, "sliding_window": 32768}, True),
        ({**MISTRAL, "sliding_window": 4096}, False),
        (MISTRAL, False),  # a Mistral config that does not name it means 4096
        (QWEN, True),  # written down, but not in use
        (
            {**QWEN, "use_sliding_window": True, "max_window_layers": 28},
            True,
        ),  # begins above the last layer
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 1}, False),
        ({**QWEN, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, True),
        (
            {
                **QWEN,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            False,
        ),
    ],
)
def test_a_sliding_window_is_refused_only_where_it_would_be_in_force(
    config: dict[str, Any], fits: bool
):
    if fits:
        assert from_hf(config).max_context_tokens == 32768
        return
    with pytest.raises(ModelError, match="sliding_window is 4096"):
        from_hf(config)
    assert from_hf(config, max_context_tokens=4096).max_context_tokens == 4096


def test_a_longer_context_than_the_model_has_is_not_given():
    assert from_hf(LLAMA, max_context_tokens=10**6).max_context_tokens == 4096
    assert from_hf(LLAMA, max_context_tokens=100).max_context_tokens == 100
