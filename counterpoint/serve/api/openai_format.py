"""Responses of /v1/chat/completions and /v1/completions: chunks of a stream and whole bodies.

Promises: a stream's chunks, joined, are the whole response; each choice has one finish_reason and
nothing after it; the bytes in log-probabilities, joined, are the text's.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

from counterpoint.serve.api.errors import ApiError
from counterpoint.serve.api.openai import ChatRequest, CompletionRequest
from counterpoint.serve.api.response_format import (
    Json,
    LogprobWriter,
    make_usage,
    pair_prompt_logprobs,
    sse_event,
    to_finite,
)
from counterpoint.serve.output_parsing.output_parser import (
    CallArguments,
    CallStart,
    ContentDelta,
    OutputPart,
    ParsedOutput,
    ReasoningDelta,
    merge_parts,
)
from counterpoint.serve.text.engine_requests import PreparedRequest
from counterpoint.serve.text.output_processor import LogprobEntry, OutputPiece, OutputProcessor
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.types import TokenLogprobs

DONE = b"data: [DONE]\n\n"


class ChoiceFormatter(abc.ABC):
    """What chat and completions share: several choices, each a series of chunks, then [DONE]."""

    def __init__(
        self, prepared: PreparedRequest, tokenizer: ModelTokenizer, kind: str, chunk_kind: str
    ) -> None:
        self.prepared = prepared
        self.logprob_writer = LogprobWriter(tokenizer)
        self.head: Json = {
            "id": prepared.id,
            "object": kind,
            "created": prepared.created_s,
            "model": prepared.model,
        }
        self.chunk_head = self.head | {"object": chunk_kind}
        self._started: set[int] = set()

    def full_response(
        self, processors: Sequence[OutputProcessor], pieces: Sequence[Sequence[OutputPiece]]
    ) -> Json:
        choices = [
            self.full_choice(i, processor, pieces[i]) | self._prompt_logprobs_field(i, processor)
            for i, processor in enumerate(processors)
        ]
        return self.head | {"choices": choices, "usage": make_usage(self.prepared, processors)}

    def _prompt_logprobs_field(self, choice: int, processor: OutputProcessor) -> Json:
        """For each prompt token, it and its likeliest alternatives by id; None for the first."""
        if self.prepared.api_request.prompt_logprobs is None:
            return {}
        tokens = self.prepared.prompt_of(choice).tokens
        return {
            "prompt_logprobs": [
                known and self.logprob_writer.entries_by_id(t, known)
                for t, known in pair_prompt_logprobs(tokens, processor)
            ]
        }

    def start_events(self) -> Iterator[bytes]:
        return iter(())

    def delta_events(
        self, choice: int, piece: OutputPiece, processors: Sequence[OutputProcessor]
    ) -> Iterator[bytes]:
        for part in self._chunks(choice, piece, processors[choice]):
            request = self.prepared.api_request
            usage: Json = {}
            if request.continuous_usage:
                usage = {"usage": make_usage(self.prepared, processors)}
            elif request.usage_at_end:
                usage = {"usage": None}
            yield sse_event(self.chunk_head | {"choices": [part]} | usage)

    def end_events(self, processors: Sequence[OutputProcessor]) -> Iterator[bytes]:
        request = self.prepared.api_request
        if request.usage_at_end or request.continuous_usage:
            usage = make_usage(self.prepared, processors)
            yield sse_event(self.chunk_head | {"choices": [], "usage": usage})
        yield DONE

    def error_event(self, error: ApiError) -> bytes:
        return sse_event(error.body())

    def _chunks(
        self, choice: int, piece: OutputPiece, processor: OutputProcessor
    ) -> Iterator[Json]:
        # The first token comes with all log-probabilities of the prompt.
        if choice not in self._started and (piece.num_tokens or piece.finish_reason):
            self._started.add(choice)
            first = self.first_chunk(choice, processor)
            if first is not None:
                yield first
        continuous_usage = self.prepared.api_request.continuous_usage
        counted = bool(continuous_usage and piece.num_tokens and not piece.finish_reason)
        yield from self.delta_chunks(choice, piece, counted)
        if piece.finish_reason:
            yield self.last_chunk(choice, piece, processor)

    @abc.abstractmethod
    def first_chunk(self, choice: int, processor: OutputProcessor) -> Json | None:
        """The chunk before the choice's first token, if any."""

    @abc.abstractmethod
    def delta_chunks(self, choice: int, piece: OutputPiece, counted: bool) -> Iterator[Json]:
        """At least one if `counted`: each token must be counted in some chunk's usage."""

    @abc.abstractmethod
    def last_chunk(self, choice: int, piece: OutputPiece, processor: OutputProcessor) -> Json: ...

    @abc.abstractmethod
    def full_choice(
        self, choice: int, processor: OutputProcessor, pieces: Sequence[OutputPiece]
    ) -> Json: ...


class ChatFormatter(ChoiceFormatter):
    """Responses of /v1/chat/completions."""

    def __init__(self, prepared: PreparedRequest, tokenizer: ModelTokenizer) -> None:
        super().__init__(prepared, tokenizer, "chat.completion", "chat.completion.chunk")
        self._hide_reasoning = (
            isinstance(prepared.api_request, ChatRequest)
            and prepared.api_request.include_reasoning is False
        )

    def first_chunk(self, choice: int, processor: OutputProcessor) -> Json | None:
        return self._choice(choice, {"role": "assistant", "content": ""})

    def delta_chunks(self, choice: int, piece: OutputPiece, counted: bool) -> Iterator[Json]:
        """A chunk per part. The log-probabilities of all tokens go with the last one."""
        deltas = [
            chat_delta(part)
            for part in piece.parts
            if not (self._hide_reasoning and isinstance(part, ReasoningDelta))
        ]
        if not deltas and (piece.logprob_entries or counted):
            deltas = [{"content": ""}]
        for index, delta in enumerate(deltas, 1):
            entries = piece.logprob_entries if index == len(deltas) else ()
            yield self._choice(choice, delta, self._logprobs(entries))

    def last_chunk(self, choice: int, piece: OutputPiece, processor: OutputProcessor) -> Json:
        finish_reason = chat_finish_reason(piece, processor)
        chunk = self._choice(choice, {}, None, finish_reason)
        return chunk | stop_reason_field(self.prepared, piece)

    def full_choice(
        self, choice: int, processor: OutputProcessor, pieces: Sequence[OutputPiece]
    ) -> Json:
        entries = [entry for piece in pieces for entry in piece.logprob_entries]
        return {
            "index": choice,
            "message": self._message(merge_parts(part for piece in pieces for part in piece.parts)),
            "logprobs": self._logprobs(entries),
            "finish_reason": chat_finish_reason(pieces[-1], processor),
        } | stop_reason_field(self.prepared, pieces[-1])

    def _message(self, output: ParsedOutput) -> Json:
        """Reasoning has two names, because clients differ in which one they read."""
        message: Json = {"role": "assistant", "content": output.content, "refusal": None}
        if not output.content and (output.calls or output.reasoning):
            message["content"] = None
        if output.reasoning and not self._hide_reasoning:
            message |= {"reasoning_content": output.reasoning, "reasoning": output.reasoning}
        if output.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in output.calls
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
    """Responses of /v1/completions."""

    def __init__(
        self, prepared: PreparedRequest, tokenizer: ModelTokenizer, request: CompletionRequest
    ) -> None:
        super().__init__(prepared, tokenizer, "text_completion", "text_completion")
        self.echo = bool(request.echo)
        self.with_alternatives = bool(request.logprobs)

    def first_chunk(self, choice: int, processor: OutputProcessor) -> Json | None:
        if not self.echo:
            return None
        return self._choice(
            choice, self._prompt_text(choice), self._prompt_logprobs(choice, processor)
        )

    def delta_chunks(self, choice: int, piece: OutputPiece, counted: bool) -> Iterator[Json]:
        if piece.parts or piece.logprob_entries or counted:
            yield self._choice(choice, piece.text, self._logprobs(choice, piece.logprob_entries))

    def last_chunk(self, choice: int, piece: OutputPiece, processor: OutputProcessor) -> Json:
        chunk = self._choice(choice, "", None, piece.finish_reason)
        return chunk | stop_reason_field(self.prepared, piece)

    def full_choice(
        self, choice: int, processor: OutputProcessor, pieces: Sequence[OutputPiece]
    ) -> Json:
        text = "".join(piece.text for piece in pieces)
        logprobs = self._logprobs(
            choice, [entry for piece in pieces for entry in piece.logprob_entries]
        )
        if self.echo:
            text = self._prompt_text(choice) + text
            before = self._prompt_logprobs(choice, processor)
            if logprobs is not None and before is not None:
                logprobs = {key: before[key] + logprobs[key] for key in logprobs}
        whole = self._choice(choice, text, logprobs, pieces[-1].finish_reason)
        return whole | stop_reason_field(self.prepared, pieces[-1])

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

    def _prompt_logprobs(self, choice: int, processor: OutputProcessor) -> Json | None:
        """Of the prompt's tokens; null for the first."""
        if not self.prepared.output_options.logprobs:
            return None
        tokens = self.prepared.prompt_of(choice).tokens
        known = [k for _, k in pair_prompt_logprobs(tokens, processor)]
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
        """By text. If two tokens have the same text, the second is named by its id, so none is
        lost."""
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
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def chat_finish_reason(piece: OutputPiece, processor: OutputProcessor) -> str | None:
    called = piece.finish_reason == "stop" and processor.num_calls
    return "tool_calls" if called else piece.finish_reason


def stop_reason_field(prepared: PreparedRequest, piece: OutputPiece) -> Json:
    """vLLM's field: the stop string or the id of `stop_token_ids` that ended the choice."""
    reason = piece.stop_reason
    stop_token_ids = prepared.api_request.stop_token_ids or ()
    is_given = isinstance(reason, str) or reason in stop_token_ids
    return {"stop_reason": reason if is_given else None}
