"""Tokenizers and templates from a folder, a GGUF and raw bytes, compared with transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from counterpoint.builder.system_builder import cache_folder
from counterpoint.config import ConfigError
from counterpoint.serve.text.tokenizer import ModelTokenizer, TokenizerError
from counterpoint.serve.text.tokenizer_loader import (
    BYTE_OF_CHARACTER,
    load_tokenizer,
    make_byte_tokenizer,
)
from counterpoint.spec.source import ModelSource, find_pulled

SAMPLES = [
    "Hello world",
    "  two  spaces,\ttab\n\nnewlines \r\n x",
    "I'll, we've, DON'T: 1234567 and 3.14",
    "漢字 héllo 😀👩‍👩‍👧‍👦 \ufffd",
    "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return x**2  # comment",
]


def random_text(chance: random.Random) -> str:
    ranges = [
        (32, 127),
        (32, 127),
        (0xA0, 0x250),
        (0x400, 0x500),
        (0x4E00, 0x5000),
        (0x1F300, 0x1F600),
        (48, 58),
        (9, 14),
    ]
    return "".join(chr(chance.randrange(*chance.choice(ranges))) for _ in range(40))


@pytest.fixture(scope="module")
def smollm2() -> tuple[ModelTokenizer, object]:
    """Our tokenizer and that of transformers, from one file."""
    path = find_pulled("smollm2", cache_folder())
    if path is None:
        pytest.skip("smollm2 is not here: counterpoint pull smollm2")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return load_tokenizer(ModelSource("gguf", str(path), "smollm2")), theirs


def test_smollm2_is_tokenised_as_transformers_does(smollm2):
    ours, theirs = smollm2
    chance = random.Random(0)
    for text in [*SAMPLES, *(random_text(chance) for _ in range(300))]:
        assert ours.encode([text])[0] == theirs(text).input_ids


def test_smollm2_is_detokenised_as_transformers_does(smollm2):
    ours, theirs = smollm2
    chance = random.Random(1)
    for _ in range(300):
        ids = [chance.randrange(len(theirs)) for _ in range(12)]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_smollm2_chat_template(smollm2):
    ours, theirs = smollm2
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "漢"},
    ]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "default"])
def test_a_byte_level_gguf_is_tokenised_as_transformers_does(pre: str, tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    letters = list(BYTE_OF_CHARACTER)
    merges = [
        "h e",
        "l l",
        "he ll",
        "Ġ w",
        "1 2",
        "12 3",
        "' l",
        "'l l",
        "Ġ Ġ",
        "e r",
        "Ċ Ċ",
        "a b",
    ]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), "<|eot|>", "<think>"]
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    for name, value in {
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 1,
        "feed_forward_length": 64,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 4])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 2)
    writer.add_add_bos_token(pre == "llama-bpe")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = load_tokenizer(ModelSource("gguf", str(tmp_path / "m.gguf"), "m"))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    chance = random.Random(2)
    fixed = ["hell'll we're 123456 ab", "her\n\nher  12", "<|eot|>a<think>b"]
    for text in [*SAMPLES, *fixed, *(random_text(chance) for _ in range(100))]:
        assert ours.encode([text])[0] == theirs(text).input_ids, text


def sentencepiece_folder(folder: Path) -> Path:
    """A tokenizer.json as Llama 2 has it: spaces as ▁, byte fallback, a decoder that is not
    byte-level."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("a", "b")], byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
    ]
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_with_byte_fallback(tmp_path: Path):
    text = load_tokenizer(ModelSource("hf", str(sentencepiece_folder(tmp_path)), "m"))
    ids = text.encode(["a ab 漢"])[0]
    assert len(ids) == 7, "a truncation in the file must not be applied"
    assert text.decode(ids) == " a ab 漢", "in the middle of a text, the first space is one"
    assert text.token_bytes(3 + 0xE6) == b"\xe6"
    assert text.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"


def test_a_folder_without_a_tokeniser_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no tokeniser"):
        load_tokenizer(ModelSource("hf", str(tmp_path), "m"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(ModelSource("hf", str(tmp_path), "m"))


def test_a_template_that_fails_says_so():
    text = ModelTokenizer(
        make_byte_tokenizer().tokenizer, "{{ raise_exception('roles must alternate') }}"
    )
    with pytest.raises(TokenizerError, match="roles must alternate"):
        text.apply_chat_template([{"role": "user", "content": "hi"}])
    with pytest.raises(TokenizerError, match="no chat template"):
        ModelTokenizer(make_byte_tokenizer().tokenizer).apply_chat_template(
            [{"role": "user", "content": "hi"}]
        )


def test_a_template_cannot_reach_python():
    text = ModelTokenizer(make_byte_tokenizer().tokenizer, "{{ ''.__class__.__mro__ }}")
    with pytest.raises(TokenizerError):
        text.apply_chat_template([{"role": "user", "content": "hi"}])


def test_least_tokens_is_a_lower_bound():
    text = make_byte_tokenizer()
    for sample in [*SAMPLES, "x" * 10_000]:
        assert text.min_num_tokens(sample) <= len(text.encode([sample])[0])
    assert text.min_num_tokens("x" * 10_000_000) > 4096
