"""Loads a model's tokenizer from a Hugging Face folder, a GGUF file, or makes one of raw bytes.

Promises: the same token ids as `transformers` for the same files. Common formats (tokenizer.json,
byte-level BPE in a GGUF) load in well under a second; the others go through `transformers`. Must
not: read weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from counterpoint.config import ConfigError
from counterpoint.serve.text.tokenizer import BYTE_OF_CHARACTER, ModelTokenizer
from counterpoint.spec.gguf import read_gguf_header
from counterpoint.spec.source import ModelSource

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
CONTROL, USER_DEFINED = 3, 4  # token types of a GGUF

# Pre-tokenization patterns by `tokenizer.ggml.pre`; None: the pattern of GPT-2.
SPLIT_PATTERNS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_tokenizer(source: ModelSource) -> ModelTokenizer:
    """A model that is only a shape gets one token per byte. Raises ConfigError if there is no
    tokenizer."""
    path = Path(source.path)
    if source.kind == "gguf":
        return load_gguf(path)
    folder = path if source.kind == "hf" else path.parent
    if source.path and (folder / "tokenizer.json").is_file():
        return load_folder(folder)
    if source.path and ((folder / "vocab.json").is_file() or any(folder.glob("tokenizer*.model"))):
        return load_with_transformers(folder)
    if source.kind == "spec":
        return make_byte_tokenizer()
    raise ConfigError(f"model: {folder} has no tokeniser (tokenizer.json or tokenizer.model)")


def load_folder(path: Path) -> ModelTokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # `tokenizers` raises plain Exception
        raise ConfigError(f"model: {path / 'tokenizer.json'} cannot be read: {error}") from None
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).is_file():
            config |= json.loads((path / name).read_text(encoding="utf-8"))
    special = {name: token_content(config[name]) for name in SPECIAL_NAMES if config.get(name)}
    if (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    else:
        template = pick_chat_template(config.get("chat_template"))
    return ModelTokenizer(tokenizer, template, special, config.get("response_template"))


def token_content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def pick_chat_template(template: Any) -> str | None:
    """A tokenizer_config.json has one template or a list of named ones."""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default", next(iter(named.values()), None))
    return template


def load_gguf(path: Path) -> ModelTokenizer:
    metadata = read_gguf_header(path).metadata
    part = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    if part.get("model") != "gpt2" or part.get("pre", "default") not in SPLIT_PATTERNS:
        return load_with_transformers(path.parent, gguf_file=path.name)
    tokens: list[str] = part["tokens"]
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {
        name: tokens[part[f"{key}_token_id"]]
        for name, key in ids.items()
        if f"{key}_token_id" in part
    }
    tokenizer = make_byte_level_bpe(
        tokens,
        part["merges"],
        part.get("token_type", ()),
        SPLIT_PATTERNS[part.get("pre", "default")],
    )
    if part.get("add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B"],
            special_tokens=[(bos, tokens.index(bos))],
        )
    return ModelTokenizer(tokenizer, metadata.get("tokenizer.chat_template"), special)


def make_byte_level_bpe(
    tokens: list[str], merges: list[str], types: list[int] | tuple[()], split: str | None
) -> Tokenizer:
    """A byte-level BPE from a GGUF's lists. `split`: the pattern that cuts text before merging."""
    character_of_byte = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    alphabet = BYTE_OF_CHARACTER.keys()
    vocab = {
        token
        if alphabet >= set(token)
        else "".join(character_of_byte[b] for b in token.encode()): index
        for index, token in enumerate(tokens)
    }
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is None:
        tokenizer.pre_tokenizer = bytes_only
    else:
        cut = pre_tokenizers.Split(Regex(split), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    # Without control tokens that have a character outside the byte alphabet: the vocabulary has
    # them in another spelling.
    for token, kind in zip(tokens, types, strict=False):
        if kind == CONTROL and alphabet >= set(token):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED and token in vocab:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    return tokenizer


def load_with_transformers(folder: Path, **options: Any) -> ModelTokenizer:
    """Any tokenizer that `transformers` can make fast. Takes seconds and imports torch."""
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
        backend: Tokenizer = loaded.backend_tokenizer
    except Exception as error:  # a broken or unknown file may raise anything
        raise ConfigError(f"model: no tokeniser could be made of {folder}: {error}") from None
    template = pick_chat_template(loaded.chat_template)
    return ModelTokenizer(
        backend, template, dict(loaded.special_tokens_map), loaded.response_template
    )


def make_byte_tokenizer() -> ModelTokenizer:
    """One token per byte (id = byte) and ChatML's two markers."""
    vocab = dict(BYTE_OF_CHARACTER)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(mark, special=True, normalized=False)
            for mark in ("<|im_start|>", "<|im_end|>")
        ]
    )
    return ModelTokenizer(tokenizer, CHATML, {"eos_token": "<|im_end|>"})
