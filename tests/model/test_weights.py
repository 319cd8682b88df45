"""From files to a decoder: every tensor in its place, and an error for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from model_builders import (
    CONFIGS,
    SHAPE_EVEN,
    Run,
    expected,
    load,
    prompts,
    random_model,
    save,
    write_gguf,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from counterpoint.config import ConfigError, ModelConfig
from counterpoint.model import load_decoder
from counterpoint.model.checkpoint import RandomCheckpoint
from counterpoint.spec import ModelError
from counterpoint.spec.source import ModelSource, resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(random_model(CONFIGS["llama"]), tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Change or (None) drop tensors, in whatever shard they are."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, value in change.items():
        shard = index["weight_map"].setdefault(name, next(iter(index["weight_map"].values())))
        tensors = load_file(folder / shard)
        tensors.pop(name, None)
        save_file(
            tensors if value is None else {**tensors, name: value}, folder / shard, {"format": "pt"}
        )


def test_a_missing_tensor(folder: Path):
    edit(folder, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(resolve_model(str(folder)))


def test_a_tensor_left_over(folder: Path):
    edit(folder, {"model.layers.2.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(
        ModelError, match=r"model\.layers\.2\.self_attn\.q_proj\.bias belongs to no part"
    ):
        load(resolve_model(str(folder)))


def test_a_tensor_of_the_wrong_shape(folder: Path):
    edit(folder, {"model.norm.weight": torch.zeros(63)})
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight has shape \[63\], the config says \[64\]"
    ):
        load(resolve_model(str(folder)))


def test_a_missing_shard(folder: Path):
    next(folder.glob("*-of-*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"shard .* is missing"):
        load(resolve_model(str(folder)))


def test_a_folder_without_safetensors(folder: Path):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        load(resolve_model(str(folder)))


def test_a_tied_checkpoint_may_repeat_its_embeddings(tmp_path: Path):
    model = random_model(CONFIGS["llama, llama3 rope, tied"])
    source = save(model, tmp_path / "model")
    edit(tmp_path / "model", {"lm_head.weight": torch.zeros(211, 64)})
    (tokens,) = prompts(211, 20)
    torch.testing.assert_close(
        Run(load(source), [tokens]).step((0, 0, 20)),
        expected(model, tokens)[-1:],
        atol=1e-4,
        rtol=1e-4,
    )


def test_weights_in_bfloat16(tmp_path: Path):
    """16-bit files hold the same numbers in any arithmetic that keeps them."""
    source = save(random_model(CONFIGS["qwen2"]).bfloat16(), tmp_path / "model")
    (tokens,) = prompts(211, 30)
    want = expected(AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32), tokens)[
        -1:
    ]
    torch.testing.assert_close(
        Run(load(source), [tokens]).step((0, 0, 30)), want, atol=1e-4, rtol=1e-4
    )
    close = Run(load(source, "auto"), [tokens]).step((0, 0, 30))
    assert torch.nn.functional.cosine_similarity(close, want).item() > 0.999


@pytest.mark.parametrize("name", ["llama", "llama, llama3 rope, tied", "mistral", "qwen2", "qwen3"])
def test_gguf(name: str, tmp_path: Path):
    model = random_model(CONFIGS[name])
    if (
        "llama3" in name
    ):  # the converter leaves this scaling to a tensor, and says nothing in the metadata
        plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
        source = write_gguf(
            model,
            tmp_path / "m.gguf",
            **{"rope_freqs.weight": plain / model.model.rotary_emb.inv_freq},
        )
    else:
        source = write_gguf(model, tmp_path / "m.gguf")
    (tokens,) = prompts(211, 60)
    decoder = load(source)
    assert decoder.spec.tied_embeddings == model.config.tie_word_embeddings
    torch.testing.assert_close(
        Run(decoder, [tokens]).step((0, 0, 60)), expected(model, tokens)[-1:], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    "kind",
    [
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
    ],
)
def test_quantised_gguf(kind: GGMLQuantizationType, tmp_path: Path):
    """Close to the model it was made from, and not equal."""
    model = random_model(
        LlamaConfig(**{**SHAPE_EVEN, "intermediate_size": 128})
    )  # whole blocks of 32
    (tokens,) = prompts(211, 30)
    want = expected(model, tokens)[-1:]
    got = Run(load(write_gguf(model, tmp_path / "m.gguf", kind)), [tokens]).step((0, 0, 30))
    assert (got - want).abs().max().item() > 1e-5
    similar = 0.9 if kind is GGMLQuantizationType.Q4_1 else 0.99
    assert torch.nn.functional.cosine_similarity(got, want).item() > similar


def test_a_gguf_tensor_missing_or_left_over(tmp_path: Path):
    model = random_model(CONFIGS["qwen3"])
    extra = {"model.layers.7.mlp.up_proj.weight": torch.zeros(4, 4)}
    with pytest.raises(ModelError, match=r"blk\.7\.ffn_up\.weight belongs to no part"):
        load(write_gguf(model, tmp_path / "more.gguf", **extra))
    broken = Path(write_gguf(model, tmp_path / "m.gguf").path)
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match="the file ends inside it"):
        load(ModelSource("gguf", str(broken), "m"))
    broken.write_bytes(whole.replace(b"blk.0.attn_k_norm.weight", b"blk.0.attn_k_mist.weight"))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k_norm\.weight .* is missing"):
        load(ModelSource("gguf", str(broken), "m"))


def test_dummy_weights_follow_the_seed(tmp_path: Path, family: tuple[PreTrainedModel, ModelSource]):
    (tmp_path / "config.json").write_text((Path(family[1].path) / "config.json").read_text())
    source = resolve_model(str(tmp_path / "config.json"))
    (tokens,) = prompts(211, 12)

    def logits(seed: int) -> torch.Tensor:
        config = ModelConfig(dtype="float32", load_format="dummy", weights_seed=seed)
        return Run(load_decoder(source, config), [tokens]).step((0, 0, 12))

    assert logits(0).isfinite().all() and logits(0).std() > 0
    assert torch.equal(logits(0), logits(0))
    assert not torch.allclose(logits(0), logits(1))


def test_dummy_matrices_have_full_rank():
    weight = RandomCheckpoint(0).take("w", (4096, 1024))
    assert len(weight[:, 0].unique()) > 4000 and abs(weight.std().item() - 0.02) < 1e-3


def test_a_shape_has_no_weights():
    with pytest.raises(ConfigError, match="load_format to dummy"):
        load_decoder(resolve_model("qwen3-8b"), ModelConfig())
