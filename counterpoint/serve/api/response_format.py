"""What goes back to clients of the OpenAI API: chunks of a stream and whole answers, for chat and for completions.

Owns: the shape of an answer, and what the shape of any API must be able to do (Reply). Promises: a stream's parts, joined, are the
whole answer; each choice has exactly one finish_reason and nothing after it; log-probabilities' bytes, joined, are the answer's.
Must not: wait for anything, or decide what is shown (answer.py does).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from counterpoint.serve.api.openai import ApiError, ChatRequest, CompletionRequest
from counterpoint.serve.output_parsing.output_parser import (
    CallArguments,
    CallStart,
    ContentDelta,
    OutputPart,
    ParsedOutput,
    ReasoningDelta,
    merge_parts,
)
from counterpoint.serve.text.output_processor import (
    LogprobEntry,
    OutputOptions,
    OutputPiece,
    OutputProcessor,
)
from counterpoint.serve.text.preprocess import PreparedRequest
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.types import TokenLogprobs

Json = dict[str, Any]
MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this
DONE = b"data: [DONE]\n\n"
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


class ChoiceFormatter(abc.ABC):
    """What chat and completions have in common: several choices, each a chain of chunks, and [DONE]."""

    def __init__(
        self, ask: PreparedRequest, text: ModelTokenizer, kind: str, chunk_kind: str
    ) -> None:
        self.prepared = ask
        self.logprob_writer = LogprobWriter(text)
        self.head: Json = {
            "id": ask.id,
            "object": kind,
            "created": ask.created_s,
            "model": ask.model,
        }
        self.chunk_head = self.head | {"object": chunk_kind}
        self._started: set[int] = set()

    def full_response(
        self, answers: Sequence[OutputProcessor], pieces: Sequence[Sequence[OutputPiece]]
    ) -> Json:
        choices = [
            self.full_choice(i, answer, pieces[i]) | self._about_prompt(i, answer)
            for i, answer in enumerate(answers)
        ]
        return self.head | {"choices": choices, "usage": make_usage(self.prepared, answers)}

    def _about_prompt(self, choice: int, answer: OutputProcessor) -> Json:
        """For each token of the prompt, it and the likeliest instead of it, by id. The first has none, as nothing comes before."""
        if self.prepared.api_request.prompt_logprobs is None:
            return {}
        tokens = self.prepared.prompt_of(choice).tokens
        return {
            "prompt_logprobs": [
                known and self.logprob_writer.entries_by_id(t, known)
                for t, known in pair_prompt_logprobs(tokens, answer)
            ]
        }

    def start_events(self) -> Iterator[bytes]:
        return iter(())

    def delta_events(
        self, choice: int, piece: OutputPiece, answers: Sequence[OutputProcessor]
    ) -> Iterator[bytes]:
        for part in self._chunks(choice, piece, answers[choice]):
            request = self.prepared.api_request
            usage: Json = (
                {"usage": make_usage(self.prepared, answers)} if request.continuous_usage else {}
            )
            if request.usage_at_end:
                usage = usage or {"usage": None}
            yield sse_event(self.chunk_head | {"choices": [part]} | usage)

    def end_events(self, answers: Sequence[OutputProcessor]) -> Iterator[bytes]:
        if self.prepared.api_request.usage_at_end or self.prepared.api_request.continuous_usage:
            yield sse_event(
                self.chunk_head | {"choices": [], "usage": make_usage(self.prepared, answers)}
            )
        yield DONE

    def error_event(self, error: ApiError) -> bytes:
        return sse_event(error.body())

    def _chunks(self, choice: int, piece: OutputPiece, answer: OutputProcessor) -> Iterator[Json]:
        if choice not in self._started and (
            piece.num_tokens or piece.finish_reason
        ):  # all is known of the prompt
            self._started.add(choice)
            opening = self.first_chunk(choice, answer)
            if opening is not None:
                yield opening
        yield from self.delta_chunks(
            choice,
            piece,
            counted=bool(
                self.prepared.api_request.continuous_usage
                and piece.num_tokens
                and not piece.finish_reason
            ),
        )
        if piece.finish_reason:
            yield self.last_chunk(choice, piece, answer)

    @abc.abstractmethod
    def first_chunk(self, choice: int, answer: OutputProcessor) -> Json | None:
        """What begins the stream of a choice, before its first token."""

    @abc.abstractmethod
    def delta_chunks(self, choice: int, piece: OutputPiece, counted: bool) -> Iterator[Json]:
        """At least one if its tokens are `counted` in the stream."""

    @abc.abstractmethod
    def last_chunk(self, choice: int, piece: OutputPiece, answer: OutputProcessor) -> Json: ...

    @abc.abstractmethod
    def full_choice(
        self, choice: int, answer: OutputProcessor, pieces: Sequence[OutputPiece]
    ) -> Json: ...


class ChatFormatter(ChoiceFormatter):
    """Answers of /v1/chat/completions."""

    def __init__(self, ask: PreparedRequest, text: ModelTokenizer) -> None:
        super().__init__(ask, text, "chat.completion", "chat.completion.chunk")
        self._hide_reasoning = (
            isinstance(ask.api_request, ChatRequest) and ask.api_request.include_reasoning is False
        )

    def first_chunk(self, choice: int, answer: OutputProcessor) -> Json | None:
        return self._choice(choice, {"role": "assistant", "content": ""})

    def delta_chunks(self, choice: int, piece: OutputPiece, counted: bool) -> Iterator[Json]:
        """A chunk for each thing that was said. Log-probabilities are of all tokens, and go with the last."""
        deltas = [
            chat_delta(said)
            for said in piece.parts
            if not (self._hide_reasoning and isinstance(said, ReasoningDelta))
        ]
        if not deltas and (piece.logprob_entries or counted):
            deltas = [{"content": ""}]
        for at, delta in enumerate(deltas):
            yield self._choice(
                choice,
                delta,
                self._logprobs(piece.logprob_entries if at == len(deltas) - 1 else ()),
            )

    def last_chunk(self, choice: int, piece: OutputPiece, answer: OutputProcessor) -> Json:
        return self._choice(
            choice, {}, None, chat_finish_reason(piece, answer)
        ) | stop_reason_field(self.prepared, piece)

    def full_choice(
        self, choice: int, answer: OutputProcessor, pieces: Sequence[OutputPiece]
    ) -> Json:
        entries = [entry for piece in pieces for entry in piece.logprob_entries]
        return {
            "index": choice,
            "message": self._message(merge_parts(said for piece in pieces for said in piece.parts)),
            "logprobs": self._logprobs(entries),
            "finish_reason": chat_finish_reason(pieces[-1], answer),
        } | stop_reason_field(self.prepared, pieces[-1])

    def _message(self, speech: ParsedOutput) -> Json:
        """What was thought has two names, as clients look for one or the other."""
        message: Json = {"role": "assistant", "content": speech.content, "refusal": None}
        if not speech.content and (speech.calls or speech.reasoning):
            message["content"] = None
        if speech.reasoning and not self._hide_reasoning:
            message |= {"reasoning_content": speech.reasoning, "reasoning": speech.reasoning}
        if speech.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in speech.calls
            ]
        return message

    def _choice(
        self, choice: int, delta: Json, logprobs: Json | None = None, finish: str | None = None
    ) -> Json:
        return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> Json | None:
        if not self.prepared.output_options.logprobs:
            return None
        return {
            "content": [
                self.logprob_writer.chat_entry(entry, self.prepared.output_options)
                for entry in entries
            ],
            "refusal": None,
        }


class CompletionFormatter(ChoiceFormatter):
    """Answers of /v1/completions."""

    def __init__(
        self, ask: PreparedRequest, text: ModelTokenizer, request: CompletionRequest
    ) -> None:
        super().__init__(ask, text, "text_completion", "text_completion")
        self.echo = bool(request.echo)
        self.with_alternatives = bool(request.logprobs)

    def first_chunk(self, choice: int, answer: OutputProcessor) -> Json | None:
        if not self.echo:
            return None
        return self._choice(
            choice, self._prompt_text(choice), self._prompt_logprobs(choice, answer)
        )

    def delta_chunks(self, choice: int, piece: OutputPiece, counted: bool) -> Iterator[Json]:
        if piece.parts or piece.logprob_entries or counted:
            yield self._choice(choice, piece.text, self._logprobs(choice, piece.logprob_entries))

    def last_chunk(self, choice: int, piece: OutputPiece, answer: OutputProcessor) -> Json:
        return self._choice(choice, "", None, piece.finish_reason) | stop_reason_field(
            self.prepared, piece
        )

    def full_choice(
        self, choice: int, answer: OutputProcessor, pieces: Sequence[OutputPiece]
    ) -> Json:
        text = "".join(piece.text for piece in pieces)
        logprobs = self._logprobs(
            choice, [entry for piece in pieces for entry in piece.logprob_entries]
        )
        if self.echo:
            text = self._prompt_text(choice) + text
            before = self._prompt_logprobs(choice, answer)
            if logprobs is not None and before is not None:
                logprobs = {key: before[key] + logprobs[key] for key in logprobs}
        return self._choice(choice, text, logprobs, pieces[-1].finish_reason) | stop_reason_field(
            self.prepared, pieces[-1]
        )

    def _choice(
        self, choice: int, text: str, logprobs: Json | None = None, finish: str | None = None
    ) -> Json:
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _prompt_text(self, choice: int) -> str:
        prompt = self.prepared.prompt_of(choice)
        if prompt.text is not None:
            return prompt.text
        return self.logprob_writer.tokenizer.decode(
            prompt.tokens, skip_special_tokens=self.prepared.output_options.skip_special_tokens
        )

    def _logprobs(self, choice: int, entries: Sequence[LogprobEntry]) -> Json | None:
        if not self.prepared.output_options.logprobs:
            return None
        shift = len(self._prompt_text(choice)) if self.echo else 0
        return {
            "tokens": [self.logprob_writer.unique_text(entry.token) for entry in entries],
            "token_logprobs": [
                to_finite(entry.logprobs.logprob) if entry.logprobs else None for entry in entries
            ],
            "top_logprobs": [self._alternatives(entry.logprobs) for entry in entries],
            "text_offset": [shift + entry.start for entry in entries],
        }

    def _prompt_logprobs(self, choice: int, answer: OutputProcessor) -> Json | None:
        """Those of the prompt's tokens. The first has none, as nothing comes before it."""
        if not self.prepared.output_options.logprobs:
            return None
        tokens = self.prepared.prompt_of(choice).tokens
        known = [k for _, k in pair_prompt_logprobs(tokens, answer)]
        offsets, at = [], 0
        for token in tokens:
            offsets.append(at)
            at += len(self.logprob_writer.display_text(token))
        return {
            "tokens": [self.logprob_writer.unique_text(token) for token in tokens],
            "token_logprobs": [to_finite(k.logprob) if k else None for k in known],
            "top_logprobs": [self._alternatives(k) for k in known],
            "text_offset": offsets,
        }

    def _alternatives(self, known: TokenLogprobs | None) -> dict[str, float] | None:
        """By text; where two tokens read alike, the second is named by its id, so that there are as many as were asked for."""
        if known is None or not self.with_alternatives:
            return None
        top: dict[str, float] = {}
        for token, logprob in zip(known.top_ids, known.top_logprobs, strict=True):
            name = self.logprob_writer.unique_text(token)
            top[name if name not in top else f"token_id:{token}"] = to_finite(logprob)
        return top


def chat_delta(part: OutputPart) -> Json:
    match part:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, id, name):
            return {
                "tool_calls": [
                    {
                        "index": index,
                        "id": id,
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                ]
            }
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def chat_finish_reason(piece: OutputPiece, answer: OutputProcessor) -> str | None:
    return (
        "tool_calls" if piece.finish_reason == "stop" and answer.num_calls else piece.finish_reason
    )


def stop_reason_field(ask: PreparedRequest, piece: OutputPiece) -> Json:
    """Beside OpenAI's fields: the stop string, or the id of `stop_token_ids`, that ended the choice."""
    by = piece.stop_reason
    return {
        "stop_reason": by
        if isinstance(by, str) or by in (ask.api_request.stop_token_ids or ())
        else None
    }
