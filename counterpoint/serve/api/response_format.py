"""What the responses of every API share: the formatter's interface, server-sent events, usage,
log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from counterpoint.serve.api.errors import ApiError
from counterpoint.serve.text.engine_requests import PreparedRequest
from counterpoint.serve.text.output_processor import (
    LogprobEntry,
    OutputOptions,
    OutputPiece,
    OutputProcessor,
)
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.types import TokenLogprobs

Json = dict[str, Any]
MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this
encode = msgspec.json.Encoder().encode
# Line ends of Unicode that JSON need not escape, and their escapes.
LINE_ENDS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))


class ResponseFormatter(Protocol):
    """Writes the response to `prepared` in one API's form: whole, or as bytes of server-sent
    events."""

    prepared: PreparedRequest

    def full_response(
        self, processors: Sequence[OutputProcessor], pieces: Sequence[Sequence[OutputPiece]]
    ) -> Json:
        """`pieces`: by choice."""
        ...

    def start_events(self) -> Iterator[bytes]:
        """Events that need nothing from the engine."""
        ...

    def delta_events(
        self, choice: int, piece: OutputPiece, processors: Sequence[OutputProcessor]
    ) -> Iterator[bytes]: ...

    def end_events(self, processors: Sequence[OutputProcessor]) -> Iterator[bytes]:
        """Events after the last piece of every choice."""
        ...

    def error_event(self, error: ApiError) -> bytes:
        """The one event that replaces all remaining ones."""
        ...


def sse_event(body: Json, name: str = "") -> bytes:
    """One server-sent event. Escapes the other line ends of Unicode: some clients split there
    (httpx's iter_lines)."""
    data = encode(body)
    for character, escaped in LINE_ENDS:
        if character in data:
            data = data.replace(character, escaped)
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"


def make_usage(prepared: PreparedRequest, processors: Sequence[OutputProcessor]) -> Json:
    """A prompt counts once, however many choices it has."""
    prompt_tokens = sum(len(prompt.tokens) for prompt in prepared.prompts)
    completion_tokens = sum(len(processor.token_ids) for processor in processors)
    if prepared.output_options.discard_tokens:
        completion_tokens = 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(processor.cached_tokens for processor in processors[:: prepared.n])
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(processor.reasoning_tokens for processor in processors)
        },
    }


def pair_prompt_logprobs(
    tokens: Sequence[int], processor: OutputProcessor
) -> list[tuple[int, TokenLogprobs | None]]:
    """Each prompt token with its log-probabilities; None for the first, which follows nothing."""
    missing = [None] * (len(tokens) - len(processor.prompt_logprobs))
    return list(zip(tokens, [*missing, *processor.prompt_logprobs], strict=True))


def to_finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


class LogprobWriter:
    """Writes tokens with their log-probabilities."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.tokenizer = tokenizer

    def token_bytes(self, token: int) -> bytes:
        return (
            self.tokenizer.token_string(token).encode()
            if self.tokenizer.is_special(token)
            else self.tokenizer.token_bytes(token)
        )

    def display_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def unique_text(self, token: int) -> str:
        """Like `display_text`, but distinct for distinct bytes: bytes that are no text are written
        as in OpenAI's completions."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat_entry(self, entry: LogprobEntry, options: OutputOptions) -> Json:
        """The form of chat and responses."""
        known = entry.logprobs or TokenLogprobs(MIN_LOGPROB)
        hidden = options.skip_special_tokens and self.tokenizer.is_special(entry.token)
        top = [
            self._token(token, logprob)
            for token, logprob in zip(known.top_ids, known.top_logprobs, strict=True)
        ]
        written = self._token(entry.token, known.logprob)
        return written | ({"bytes": None} if hidden else {}) | {"top_logprobs": top}

    def entries_by_id(self, token: int, known: TokenLogprobs) -> Json:
        """The form of `prompt_logprobs`. Only the likeliest tokens have a `rank`."""
        ranked = {
            t: (value, rank)
            for rank, (t, value) in enumerate(
                zip(known.top_ids, known.top_logprobs, strict=True), 1
            )
        }
        every = {token: (known.logprob, None)} | ranked
        return {
            str(t): {
                "logprob": to_finite(value),
                "rank": rank,
                "decoded_token": self.display_text(t),
            }
            for t, (value, rank) in every.items()
        }

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "token": self.display_text(token),
            "logprob": to_finite(logprob),
            "bytes": list(self.token_bytes(token)),
        }
