"""Checkpoints: named tensors, one at a time, from safetensors, GGUF or a random generator.

Owns: the files' names and layouts. Every tensor comes out under its Hugging Face name and layout
with the shape asked for, or an error names it. A tensor is not kept after `take`.
Must not: know what a tensor is for.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from counterpoint.spec import ModelError, ModelSpec
from counterpoint.spec.gguf import TensorEntry, read_gguf_header


class Checkpoint(Protocol):
    """Named tensors on the CPU. `dtype`: of most weights; float32 if quantised or random."""

    dtype: torch.dtype

    def has(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the file's own dtype (quantised ones in float32). Raises ModelError with
        its name if it is missing or has another shape."""
        ...

    def finish(self) -> None:
        """Raises ModelError if some tensors were never taken; it names the first."""
        ...


DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


class SafetensorsFolder:
    """A folder of `*.safetensors`, one or with `model.safetensors.index.json`."""

    def __init__(self, path: str, spec: ModelSpec) -> None:
        from safetensors import safe_open

        folder = Path(path)
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = sorted(file.name for file in folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{path}: no *.safetensors file (other weight formats are not read)")
        self.path = path
        self.unused: dict[str, Any] = {}
        for file in files:
            if not (folder / file).is_file():
                raise ModelError(f"{path}: shard {file} is missing")
            shard = safe_open(folder / file, framework="pt")
            self.unused.update(dict.fromkeys(shard.keys(), shard))
        ignored = [name for name in self.unused if name.endswith("rotary_emb.inv_freq")]
        if spec.tied_embeddings:
            ignored.append("lm_head.weight")
        for name in ignored:
            self.unused.pop(name, None)
        embedding = self.unused.get("model.embed_tokens.weight")
        self.dtype = (
            torch.float32
            if embedding is None
            else DTYPES.get(
                str(embedding.get_slice("model.embed_tokens.weight").get_dtype()), torch.float32
            )
        )

    def has(self, name: str) -> bool:
        return name in self.unused

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        shard = self.unused.pop(name, None)
        if shard is None:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return check_shape(shard.get_tensor(name), name, shape, self.path)

    def finish(self) -> None:
        refuse_unused(self.unused, self.path)


LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}


UNQUANTISED_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
DEQUANTISE_CHUNK = (
    1 << 18
)  # elements at a time: a multiple of every block, and fits the CPU's cache


class GgufFile:
    """A GGUF file, dequantised by the `gguf` package. The llama architecture stores the rows of Q
    and K with the two halves of each head interleaved; `take` restores their order."""

    def __init__(self, path: str, spec: ModelSpec) -> None:
        self.path = path
        self.spec = spec
        header = read_gguf_header(path)
        self.interleaved = header.metadata["general.architecture"] == "llama"
        self.unused: dict[str, TensorEntry] = dict(header.tensors)
        self.data = np.memmap(path, np.uint8, "r").view(np.ndarray)
        embedding = self.unused.get("token_embd.weight")
        self.dtype = (
            torch.float32
            if embedding is None
            else UNQUANTISED_DTYPES.get(GGMLQuantizationType(embedding.type), torch.float32)
        )

    def has(self, name: str) -> bool:
        return gguf_name(name) in self.unused

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        entry = self.unused.pop(gguf_name(name), None)
        if entry is None:
            raise ModelError(f"{self.path}: tensor {gguf_name(name)} ({name}) is missing")
        tensor = check_shape(self.dequantise(name, entry), name, shape, self.path)
        if self.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = shape[0] // self.spec.head_dim
            tensor = (
                tensor.view(heads, self.spec.head_dim // 2, 2, -1).transpose(1, 2).reshape(shape)
            )
        return tensor

    def dequantise(self, name: str, entry: TensorEntry) -> Tensor:
        try:
            kind = GGMLQuantizationType(entry.type)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if entry.shape[-1] % block:
                raise ValueError(
                    f"rows of {entry.shape[-1]} are not a multiple of {kind.name} blocks of {block}"
                )
            size = math.prod(entry.shape)
            raw = self.data[entry.offset : entry.offset + size // block * block_bytes]
            if raw.nbytes != size // block * block_bytes:
                raise ValueError("the file ends inside it")
            if kind in UNQUANTISED_DTYPES:
                return torch.from_numpy(raw.copy()).view(UNQUANTISED_DTYPES[kind]).view(entry.shape)
            whole = np.empty(size, np.float32)
            for first in range(0, size, DEQUANTISE_CHUNK):
                last = min(first + DEQUANTISE_CHUNK, size)
                piece = raw[first // block * block_bytes : last // block * block_bytes]
                whole[first:last] = dequantize(piece[None], kind)[0]
            return torch.from_numpy(whole).view(entry.shape)
        except (ValueError, NotImplementedError) as error:
            raise ModelError(f"{self.path}: tensor {gguf_name(name)}: {error}") from None

    def finish(self) -> None:
        refuse_unused(self.unused, self.path)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, index, rest = name.split(".", 3)
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{index}.{LAYER_NAMES[stem]}.{suffix}"


class RandomCheckpoint:
    """Random weights of any shape, a function of the seed. One block of normal numbers is drawn,
    and each tensor is a slice of it (repeated) from its own offset: as fast as a copy."""

    BLOCK = (1 << 22) + 57  # not a power of two: rows of a matrix must not repeat

    def __init__(self, seed: int, deviation: float = 0.02) -> None:
        self.dtype = torch.float32
        self.generator = torch.Generator().manual_seed(seed)
        self.block = torch.randn(self.BLOCK, generator=self.generator) * deviation

    def has(self, name: str) -> bool:
        return name != "rope_freqs.weight"

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        offset = int(torch.randint(self.BLOCK, (), generator=self.generator))
        size = int(np.prod(shape))
        head = self.block[offset : offset + size]
        whole, rest = divmod(size - len(head), self.BLOCK)
        stretch = torch.cat([head, *[self.block] * whole, self.block[:rest]]).view(shape)
        return stretch + 1.0 if len(shape) == 1 and name.endswith("norm.weight") else stretch

    def finish(self) -> None:
        pass


def check_shape(tensor: Tensor, name: str, shape: tuple[int, ...], path: str) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"{path}: tensor {name} has shape {list(tensor.shape)}, the config says {list(shape)}"
        )
    return tensor


def refuse_unused(unused: dict, path: str) -> None:
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise ModelError(
            f"{path}: tensor {min(unused)}{more} belongs to no part of this model and would be "
            "ignored"
        )
