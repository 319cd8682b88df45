"""Tiny random models in Hugging Face's own classes, and passes of our decoder over them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor
from transformers import AutoModelForCausalLM as AutoModel
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from counterpoint.config import ModelConfig
from counterpoint.model import Decoder, KVPool, PassSegments, load_decoder, make_batch
from counterpoint.model.checkpoint import gguf_name
from counterpoint.model.ops_cpu import CpuOptions
from counterpoint.spec.source import ModelSource

PAGE = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **fields}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
SHAPE_EVEN = {
    **SHAPE,
    "num_attention_heads": 4,
}  # LlamaConfig wants hidden_size to be a multiple of the heads

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE_EVEN, rope_parameters=rope("default")),
    "llama, llama3 rope, tied": LlamaConfig(
        **SHAPE_EVEN, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "llama, linear rope": LlamaConfig(**SHAPE_EVEN, rope_parameters=rope("linear", factor=4.0)),
    "llama, yarn": LlamaConfig(**SHAPE_EVEN, rope_parameters=YARN),
    "llama, no grouping, head 24": LlamaConfig(
        **{**SHAPE_EVEN, "num_key_value_heads": 4, "head_dim": 24}
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(
        **{**SHAPE, "hidden_size": 96}, rope_parameters=rope("default", rope_theta=1e6)
    ),
    "qwen2, tied": Qwen2Config(**{**SHAPE, "hidden_size": 96}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE),
    "qwen3, yarn with its own factors": Qwen3Config(
        **SHAPE,
        rope_parameters={**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    ),
}


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """In float32, with norms and biases that are not the identity."""
    torch.manual_seed(seed)
    model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save(model: PreTrainedModel, folder: Path) -> ModelSource:
    """In several shards."""
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return ModelSource("hf", str(folder), folder.name)


def load(source: ModelSource, dtype: str = "float32", **options: Any) -> Decoder:
    """`options` are those of CpuOptions."""
    return load_decoder(source, ModelConfig(dtype=dtype), cpu=CpuOptions(**options))


class Run:
    """A decoder, a KV pool whose pages are assigned in random order, and the tokens of requests."""

    def __init__(self, decoder: Decoder, requests: list[Tensor], pages: int = 256) -> None:
        self.decoder = decoder
        self.kv = KVPool(decoder.spec, pages, PAGE, decoder.kv_dtype)
        for pool in (*self.kv.k, *self.kv.v):
            pool.fill_(1e3)  # a row that was not written must not count
        scrambled = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        width = pages // max(len(requests), 1)
        self.table = scrambled[: len(requests) * width].view(len(requests), width).clone()
        self.requests = requests

    def step(self, *segments: tuple[int, int, int], groups: tuple[int, ...] = ()) -> Tensor:
        """Compute positions [start, stop) of each (request, start, stop); returns the logits of
        each last position. `groups`: the layers at which layer groups start."""
        index, start, stop = (torch.tensor(column) for column in zip(*segments, strict=True))
        tokens_T = torch.cat([self.requests[r][a:b] for r, a, b in segments])
        sample = torch.ones(len(segments), dtype=torch.bool)
        ops = self.decoder.ops
        batch = make_batch(
            tokens_T, PassSegments(start, stop - start, sample, self.table[index]), PAGE, ops
        )
        x_TD = self.decoder.embed(batch)
        edges = (0, *groups, self.decoder.spec.layers)
        for first, last in itertools.pairwise(edges):
            x_TD = self.decoder.run_layers(x_TD, batch, self.kv, first, last)
        return self.decoder.logits(x_TD, batch)


def prompts(vocab: int, *lengths: int, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator) for length in lengths]


def expected(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Transformers' logits of every position, [T, V]."""
    with torch.no_grad():
        return model(tokens[None]).logits[0]


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    quantise: GGMLQuantizationType = GGMLQuantizationType.F32,
    **extra: Tensor,
) -> ModelSource:
    """The model as a GGUF file as llama.cpp's converter writes it, with matrices in `quantise`, and
    the tensors `extra`."""
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if "head_dim" in config.to_dict():
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    }
    for name, tensor in {**state, **extra}.items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_key_value_heads if "k_proj" in name else config.num_attention_heads
            tensor = (
                tensor.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
            )
        data = tensor.contiguous().numpy()
        if tensor.dim() > 1 and quantise is not GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), quantize(data, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(gguf_name(name), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource("gguf", str(path), path.stem)
