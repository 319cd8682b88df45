"""What goes back to clients of the OpenAI API: chunks of a stream and whole answers, for chat and for completions.

Owns: the shape of an answer, and what the shape of any API must be able to do (Reply). Promises: a stream's parts, joined, are the
whole answer; each choice has exactly one finish_reason and nothing after it; log-probabilities' bytes, joined, are the answer's.
Must not: wait for anything, or decide what is shown (answer.py does).
"""

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
LINE_ENDS = tuple(
    (chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029)
)  # legal in JSON as they are


class ResponseFormatter(Protocol):
    """How one API writes the answer to `ask`: whole, or as a stream's events (in bytes, as `event` makes them)."""

    prepared: PreparedRequest

    def full_response(
        self, answers: Sequence[OutputProcessor], pieces: Sequence[Sequence[OutputPiece]]
    ) -> Json:
        """`pieces` by choice."""
        ...

    def start_events(self) -> Iterator[bytes]:
        """What can be said before anything has come of the engine."""
        ...

    def delta_events(
        self, choice: int, piece: OutputPiece, answers: Sequence[OutputProcessor]
    ) -> Iterator[bytes]: ...

    def end_events(self, answers: Sequence[OutputProcessor]) -> Iterator[bytes]:
        """After the last piece of every choice."""
        ...

    def error_event(self, error: ApiError) -> bytes:
        """In place of all that was to come."""
        ...


def sse_event(body: Json, name: str = "") -> bytes:
    """A server-sent event. What Unicode also counts as ends of lines is escaped: a few clients split there (httpx's iter_lines)."""
    data = encode(body)
    for character, escaped in LINE_ENDS:
        if character in data:
            data = data.replace(character, escaped)
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"


def make_usage(prepared: PreparedRequest, processors: Sequence[OutputProcessor]) -> Json:
    """A prompt counts once, however many choices it has."""
    prompt_tokens = sum(len(prompt.tokens) for prompt in prepared.prompts)
    completion_tokens = (
        0
        if prepared.output_options.discard_tokens
        else sum(len(answer.token_ids) for answer in processors)
    )
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.cached_tokens for answer in processors[:: prepared.n])
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(answer.reasoning_tokens for answer in processors)
        },
    }


def pair_prompt_logprobs(
    tokens: Sequence[int], processor: OutputProcessor
) -> list[tuple[int, TokenLogprobs | None]]:
    """Each token of a prompt with what is known of it: nothing of the first."""
    missing = [None] * (len(tokens) - len(processor.prompt_logprobs))
    return list(zip(tokens, [*missing, *processor.prompt_logprobs], strict=True))


def to_finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


class LogprobWriter:
    """How tokens are written beside their log-probabilities."""

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
        """As `shown`, but different for different bytes, as OpenAI's completions write what is not a character."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat_entry(self, entry: LogprobEntry, options: OutputOptions) -> Json:
        """As chats have it."""
        known = entry.logprobs or TokenLogprobs(MIN_LOGPROB)
        hidden = options.skip_special_tokens and self.tokenizer.is_special(entry.token)
        top = [
            self._token(token, logprob)
            for token, logprob in zip(known.top_ids, known.top_logprobs, strict=True)
        ]
        written = self._token(entry.token, known.logprob)
        return written | ({"bytes": None} if hidden else {}) | {"top_logprobs": top}

    def entries_by_id(self, token: int, known: TokenLogprobs) -> Json:
        """`rank` is told of the likeliest alone."""
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
