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
