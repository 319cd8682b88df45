"""From a checkpoint to a Decoder.

Owns: which tensor goes where. Beside packed weights, only one layer's tensors are in memory at a
time. A tensor that is missing, unused or of the wrong shape is an error that names it.
Must not: know a file format (checkpoint does) or a kernel's layout (ops does).
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoint.config import ConfigError, ModelConfig
from counterpoint.model.checkpoint import Checkpoint, GgufFile, RandomCheckpoint, SafetensorsFolder
from counterpoint.model.decoder import Decoder, Layer, Weights
from counterpoint.model.ops import Ops
from counterpoint.model.ops_cpu import CpuOptions, cpu_ops
from counterpoint.model.rope import rope_frequencies
from counterpoint.spec import ModelSpec
from counterpoint.spec.model import FAMILIES, SHAPES_ONLY, ModelError
from counterpoint.spec.source import ModelSource, load_spec


def load_decoder(
    source: ModelSource,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
    cpu: CpuOptions = CpuOptions(),
) -> Decoder:
    """Read the model `source` as `config` says.

    `ops` None: the fastest for a CPU, given `config.dtype`, the checkpoint's dtype and `cpu`.
    Raises ModelError with the field or tensor, ConfigError if `config` asks for something that is
    not available.
    """
    spec = load_spec(source, config.max_context_tokens)
    checkpoint = open_checkpoint(source, config, spec)
    ops = ops or cpu_ops(config.dtype, spec.head_dim, checkpoint.dtype, cpu.cache, cpu.invariant)
    decoder = build_decoder(spec, checkpoint, ops, device)
    checkpoint.finish()
    return decoder


def open_checkpoint(source: ModelSource, config: ModelConfig, spec: ModelSpec) -> Checkpoint:
    if config.load_format == "dummy":
        return RandomCheckpoint(config.weights_seed)
    if source.kind == "hf":
        return SafetensorsFolder(source.path, spec)
    if source.kind == "gguf":
        return GgufFile(source.path, spec)
    raise ConfigError(
        f"model {source.name!r} is a shape without weights: set load_format to dummy, or give a "
        "folder or file"
    )


def build_decoder(
    spec: ModelSpec, checkpoint: Checkpoint, ops: Ops, device: torch.device | str = "cpu"
) -> Decoder:
    """Take every tensor of `spec` from `checkpoint`, layer by layer, and pack it for `ops`. Raises
    ModelError for a family that can only be simulated."""
    if spec.family in SHAPES_ONLY:
        raise ModelError(
            f"{spec.name} is known as a shape only, to be simulated: this engine runs "
            f"{', '.join(FAMILIES)}"
        )

    def take(name: str, *shape: int) -> Tensor:
        return checkpoint.take(name, shape).to(device, ops.weight_dtype)

    embedding_VD = take("model.embed_tokens.weight", spec.vocab, spec.hidden)
    head = embedding_VD if spec.tied_embeddings else take("lm_head.weight", spec.vocab, spec.hidden)
    packed_head = ops.pack_linear(head, None) if ops.pack_head is None else ops.pack_head(head)
    embedding = ops.pack_embedding(embedding_VD)
    del head, embedding_VD
    frequencies, scale = rope_frequencies(spec)
    if checkpoint.has("rope_freqs.weight"):
        frequencies = frequencies / checkpoint.take("rope_freqs.weight", (spec.head_dim // 2,))
    return Decoder(
        spec,
        ops,
        Weights(
            embedding_VD=embedding,
            layers=tuple(
                build_layer(spec, checkpoint, ops, index, device) for index in range(spec.layers)
            ),
            final_norm_D=take("model.norm.weight", spec.hidden),
            head=packed_head,
            inverse_frequencies=frequencies.to(device),
            rope_scale=scale,
        ),
    )


def build_layer(
    spec: ModelSpec, checkpoint: Checkpoint, ops: Ops, index: int, device: torch.device | str
) -> Layer:
    def take(name: str, *shape: int) -> Tensor:
        return checkpoint.take(f"model.layers.{index}.{name}", shape).to(device, ops.weight_dtype)

    def matrix(outputs: dict[str, int], inputs: int, bias: bool = False) -> object:
        """The projections of one input, concatenated along the outputs and packed."""
        weight = torch.cat([take(f"{name}.weight", size, inputs) for name, size in outputs.items()])
        biases = (
            torch.cat([take(f"{name}.bias", size) for name, size in outputs.items()])
            if bias
            else None
        )
        return ops.pack_linear(weight, biases)

    q_features, kv_features = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv = {
        "self_attn.q_proj": q_features,
        "self_attn.k_proj": kv_features,
        "self_attn.v_proj": kv_features,
    }
    return Layer(
        attention_norm_D=take("input_layernorm.weight", spec.hidden),
        qkv=matrix(qkv, spec.hidden, spec.qkv_bias),
        query_norm=take("self_attn.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
        key_norm=take("self_attn.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        output=matrix({"self_attn.o_proj": spec.hidden}, q_features),
        ffn_norm_D=take("post_attention_layernorm.weight", spec.hidden),
        gate_up=matrix({"mlp.gate_proj": spec.ffn, "mlp.up_proj": spec.ffn}, spec.hidden),
        down=matrix({"mlp.down_proj": spec.hidden}, spec.ffn),
    )
