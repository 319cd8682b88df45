"""GGUF files: their header, and the ModelSpec in it.

Owns: reading a GGUF file's metadata and tensor table, and the spelling of its keys. It reads no
tensor data, so a header takes milliseconds (`gguf.GGUFReader` makes an object per token and takes
seconds). Must not: import torch or dequantise (model/checkpoint.py does).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import struct
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from counterpoint.spec.model import ModelError, ModelSpec, RopeSpec

MAGIC = b"GGUF"
SCALARS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?")))
SCALARS |= {10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # each is the family of that name


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's shape, outermost dimension first; its ggml type number; its byte offset in the
    file."""

    shape: tuple[int, ...]
    type: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata`: scalars, strings and lists as Python values. `tensors`: by name, in file
    order."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


class Cursor:
    __slots__ = ("at", "data")

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        size = self.scalar("<Q")
        if self.at + size > len(self.data):
            raise struct.error("a string ends outside the file")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            item, count = self.scalar("<I"), self.scalar("<Q")
            if item in SCALARS:
                form = f"<{count}{SCALARS[item][1]}"
                values = list(struct.unpack_from(form, self.data, self.at))
                self.at += struct.calcsize(form)
                return values
            return [self.value(item) for _ in range(count)]
        return self.scalar(SCALARS[kind])


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Raises ModelError if the file can't be read or its header is broken."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse_header(Cursor(data), str(path))
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: cannot be read: {error}") from None
    except (struct.error, KeyError, MemoryError, RecursionError) as error:
        raise ModelError(f"{path}: broken GGUF header: {error}") from None


def parse_header(cursor: Cursor, path: str) -> GgufHeader:
    if cursor.data[:4] != MAGIC:
        raise ModelError(f"{path}: not a GGUF file")
    cursor.at = 4
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ModelError(
            f"{path}: GGUF version {version} is not supported: 2 and 3 are (little endian)"
        )
    tensor_count, value_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    entries: dict[str, TensorEntry] = {}
    for _ in range(tensor_count):
        name = cursor.text()
        shape = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
        kind = cursor.scalar("<I")
        entries[name] = TensorEntry(tuple(reversed(shape)), kind, cursor.scalar("<Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(
            f"{path}: general.alignment is {alignment!r}: it must be a number of bytes"
        )
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: dataclasses.replace(entry, offset=start + entry.offset)
        for name, entry in entries.items()
    }
    return GgufHeader(metadata, tensors)


def from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Container[str] = (),
    name: str = "",
    max_context_tokens: int | None = None,
) -> ModelSpec:
    """The spec of a GGUF header.

    Embeddings are tied if `tensor_names` lacks `output.weight`. A `max_context_tokens` smaller than
    the model's own replaces it. Raises ModelError with the key.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"general.architecture is {architecture!r}: this engine runs GGUF files of "
            f"{', '.join(ARCHITECTURES)}"
        )
    number = functools.partial(_number, metadata, architecture)
    if experts := number("expert_count", 0, least=0):
        raise ModelError(
            f"{architecture}.expert_count is {experts}: this engine does not support experts"
        )
    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ModelError(
                f"{architecture}.{key} is {number(key)}, not the head size {head_dim}: not "
                "supported"
            )
    own_max_tokens = number("context_length")
    context_tokens = min(own_max_tokens, max_context_tokens or own_max_tokens)
    window = number("attention.sliding_window", 0, least=0)
    if 0 < window < context_tokens:
        raise ModelError(
            f"{architecture}.attention.sliding_window is {window} tokens and the context "
            f"{context_tokens}: this engine has no sliding window; set max_context_tokens to "
            f"{window} or less"
        )
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    ends = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return ModelSpec(
        name=name or metadata.get("general.name", "model"),
        family=architecture,
        layers=number("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=number("feed_forward_length"),
        vocab=number("vocab_size", len(tokens) or None),
        max_context_tokens=context_tokens,
        norm_eps=metadata.get(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5),
        rope=rope_from_gguf(metadata, architecture, own_max_tokens),
        tied_embeddings="output.weight" not in tensor_names,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _number(
    metadata: Mapping[str, Any],
    architecture: str,
    key: str,
    default: int | None = None,
    least: int = 1,
) -> int:
    value = metadata.get(f"{architecture}.{key}", default)
    if not isinstance(value, int) or value < least:
        raise ModelError(
            f"{architecture}.{key} is {value!r}: this engine needs it as one whole number, "
            f"{least} or more"
        )
    return value


def rope_from_gguf(metadata: Mapping[str, Any], architecture: str, max_tokens: int) -> RopeSpec:
    """The scaling in the metadata. A llama3 scaling is not there but in a tensor,
    `rope_freqs.weight`, which model/weights.py applies."""

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.rope.{key}", default)

    theta = value("freq_base", 10000.0)
    kind = value("scaling.type", "none")
    if kind == "none":
        return RopeSpec(theta=theta)
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{architecture}.rope.scaling.type is {kind!r}: this engine supports none, linear and "
            "yarn"
        )
    factor = value("scaling.factor")
    if not isinstance(factor, int | float):
        raise ModelError(
            f"{architecture}.rope.scaling.factor is {factor!r}: scaling type {kind!r} needs it as "
            "a number"
        )
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    for key in (
        "scaling.yarn_log_multiplier",
        "scaling.yarn_ext_factor",
        "scaling.attn_factor",
        "scaling.yarn_attn_factor",
    ):
        if value(key, 1.0) != 1.0:
            raise ModelError(
                f"{architecture}.rope.{key} is {value(key)}: this engine does not support it"
            )
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_tokens=value("scaling.original_context_length", max_tokens),
        beta_fast=value("scaling.yarn_beta_fast", 32.0),
        beta_slow=value("scaling.yarn_beta_slow", 1.0),
    )
