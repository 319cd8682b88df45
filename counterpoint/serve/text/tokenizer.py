"""One model's tokenizer: encoding, the chat template, the bytes of each token.

Promises: a token has the same bytes in any context, so text decoded token by token equals text
decoded at once; a template that fails raises TokenizerError and nothing else. Must not: know HTTP,
or hold state of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders

# min_num_tokens assumes tokens longer than the longest by this factor, to stay a lower bound.
LENGTH_MARGIN = 1.25


class TokenizerError(ValueError):
    """This text or conversation can't become a prompt; the message says why."""


class ModelTokenizer:
    """`special_tokens`: the template's names for special tokens, such as bos_token.
    `chat_template`: Jinja source or None. `response_template`: the response format from the
    tokenizer's files, see output_parsing/chat_formats.py."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        special: Mapping[str, str] | None = None,
        response_template: dict[str, Any] | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.special_tokens = dict(special or {})
        self.response_template = response_template
        self.added_tokens = tokenizer.get_added_tokens_decoder()
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}
        self._max_token_characters = 0

    # ------------------------------------------------------------ encoding

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text. `add_special_tokens` adds what the tokenizer puts around a text
        (BOS). Releases the GIL."""
        encodings = self.tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def min_num_tokens(self, text: str) -> int:
        """A lower bound for the tokens of `text`, computed without tokenising it."""
        if not self._max_token_characters:
            self._max_token_characters = max(map(len, self.tokenizer.get_vocab()), default=1)
        return int(len(text) / (self._max_token_characters * LENGTH_MARGIN))

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """The prompt text of a conversation, by default ready for the model's answer. `options` go
        to the template (tools, documents, add_generation_prompt, continue_final_message, its own
        names)."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.chat_template is None:
            raise TokenizerError("this model has no chat template: use /v1/completions")
        options = {"add_generation_prompt": True} | options
        try:
            (prompt,), _ = render_jinja_template(
                [list(messages)],
                chat_template=self.chat_template,
                **{**self.special_tokens, **options},
            )
        except Exception as error:  # a template may fail in any way on the client's data
            raise TokenizerError(
                f"the model's chat template cannot render these messages: {error}"
            ) from None
        return prompt

    # ------------------------------------------------------------ decoding

    def is_special(self, token: int) -> bool:
        return token in self.added_tokens and self.added_tokens[token].special

    def token_string(self, token: int) -> str:
        """The token as the vocabulary spells it, "" for an unknown id."""
        return self.tokenizer.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that `token` adds to a text, maybe part of a character; b"" for an
        unknown id."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._compute_bytes(token)
        return known

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `tokens`, exactly as a stream of them would be."""
        parts = (
            self.token_bytes(t) for t in tokens if not (skip_special_tokens and self.is_special(t))
        )
        return b"".join(parts).decode("utf-8", errors="replace")

    def _compute_bytes(self, token: int) -> bytes:
        piece = self.token_string(token)
        if self._byte_level:
            spelled = [BYTE_OF_CHARACTER.get(character) for character in piece]
            if None in spelled:
                return piece.encode()
            return bytes(byte for byte in spelled if byte is not None)
        if token in self.added_tokens:
            return piece.encode()
        # byte fallback of sentencepiece
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def make_byte_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level BPE, GPT-2's table: printable Latin-1 bytes stand for
    themselves, the others for the code points from 256 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHARACTER = make_byte_alphabet()
