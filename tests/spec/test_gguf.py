"""GGUF headers, against the writer of the `gguf` package."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from counterpoint.spec import ModelError
from counterpoint.spec.gguf import from_gguf, read_gguf_header

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 5e5,
    "llama.vocab_size": 100,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 7,
    "tokenizer.ggml.bos_token_id": 1,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("small", 200)
    writer.add_int64("large", -(2**40))
    writer.add_float64("double", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("words", ["one", "zwei", "три", ""])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, 0.25])
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_header_is_read_as_the_package_reads_it(file: Path):
    header, reader = read_gguf_header(file), GGUFReader(file)
    assert header.metadata == {
        "general.architecture": "llama",
        "small": 200,
        "large": -(2**40),
        "double": 0.1,
        "yes": True,
        "words": ["one", "zwei", "три", ""],
        "numbers": [1, -2, 3],
        "floats": [0.5, 0.25],
    }
    for tensor in reader.tensors:
        entry = header.tensors[tensor.name]
        assert (entry.offset, entry.type, entry.shape) == (
            tensor.data_offset,
            tensor.tensor_type,
            tensor.data.shape,
        )


def test_broken_files(file: Path, tmp_path: Path):
    whole = file.read_bytes()
    for size in (0, 3, 20, 60, 150, 300):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf_header(tmp_path / "cut.gguf")
    (tmp_path / "other.gguf").write_bytes(b"PK34" + whole[4:])
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_gguf_header(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"gone\.gguf"):
        read_gguf_header(tmp_path / "gone.gguf")


@pytest.mark.parametrize("alignment", [0, -32, "wide"])
def test_an_alignment_that_is_none(tmp_path: Path, alignment: int | str):
    writer = GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_key_value("general.alignment", alignment, GGUFValueType.get_type(alignment))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"general\.alignment"):
        read_gguf_header(tmp_path / "odd.gguf")


def test_lists_in_lists_without_end(file: Path, tmp_path: Path):
    """An array's items may be arrays: 12 bytes each."""
    nested = (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q1sI", 1, b"a", 9)
        + struct.pack("<IQ", 9, 1) * 10_000
    )
    (tmp_path / "deep.gguf").write_bytes(nested)
    with pytest.raises(ModelError, match=r"deep\.gguf"):
        read_gguf_header(tmp_path / "deep.gguf")


def test_the_fields():
    spec = from_gguf(METADATA, {"output.weight"})
    assert (spec.name, spec.family, spec.layers, spec.hidden, spec.ffn, spec.vocab) == (
        "Tiny",
        "llama",
        2,
        64,
        128,
        100,
    )
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.norm_eps, spec.rope.theta) == (
        4,
        2,
        16,
        1e-6,
        5e5,
    )
    assert (spec.eos_token_ids, spec.bos_token_id, spec.tied_embeddings) == ((2, 7), 1, False)
    assert from_gguf(METADATA).tied_embeddings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "gemma3"),
        ("llama.expert_count", 8),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 32),
        ("llama.attention.head_count_kv", [2, 1]),
        ("llama.attention.sliding_window", 128),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.block_count", None),
        ("llama.attention.head_count", 0),
    ],
)
def test_what_is_not_supported_is_refused_by_name(key: str, value: object):
    with pytest.raises(ModelError, match=key):
        from_gguf({**METADATA, key: value})


def test_rope_scaling_and_windows():
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert (
        from_gguf({**METADATA, **linear}).rope.kind,
        from_gguf({**METADATA, **linear}).rope.factor,
    ) == ("linear", 4.0)
    yarn = {
        **linear,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.original_context_length": 128,
    }
    assert from_gguf({**METADATA, **yarn}).rope.original_max_tokens == 128
    windowed = {**METADATA, "llama.attention.sliding_window": 128}
    assert from_gguf(windowed, max_context_tokens=128).max_context_tokens == 128
