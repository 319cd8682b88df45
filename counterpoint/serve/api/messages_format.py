"""Responses of /v1/messages: content blocks, whole or as stream events.

Promises: one block is open at a time; each is started, extended and stopped. Whole and streamed
responses hold the same blocks, because both are built the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import pydantic_core

from counterpoint.serve.api.errors import ApiError, anthropic_error
from counterpoint.serve.api.messages import MessagesRequest
from counterpoint.serve.api.request_parsing import split_fields
from counterpoint.serve.api.response_format import Json, make_usage, sse_event
from counterpoint.serve.output_parsing.output_parser import (
    CallArguments,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from counterpoint.serve.text.engine_requests import PreparedRequest
from counterpoint.serve.text.output_processor import OutputPiece, OutputProcessor

BlockKind = Literal["text", "thinking", "tool_use"]
DELTAS: dict[BlockKind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class ContentBlock:
    """A block under construction. `attributes`: fields known at its start (a call's id)."""

    def __init__(self, kind: BlockKind, index: int, **attributes: str) -> None:
        self.kind: BlockKind = kind
        self.index = index
        self.attributes = attributes
        self._texts: list[str] = []

    def to_json(self) -> Json:
        text = "".join(self._texts)
        if self.kind == "tool_use":
            return {"type": "tool_use"} | self.attributes | {"input": parse_arguments(text)}
        return {"type": self.kind, self.kind: text} | (
            {"signature": ""} if self.kind == "thinking" else {}
        )

    def start_event(self) -> Json:
        return {"type": "content_block_start", "index": self.index, "content_block": self.to_json()}

    def delta_event(self, text: str) -> Json:
        self._texts.append(text)
        kind, name = DELTAS[self.kind]
        return {
            "type": "content_block_delta",
            "index": self.index,
            "delta": {"type": kind, name: text},
        }

    def stop_event(self) -> Json:
        return {"type": "content_block_stop", "index": self.index}


def parse_arguments(arguments: str) -> Json | msgspec.Raw:
    """A call's arguments as the model wrote them; if they were cut short, what can be parsed of
    them."""
    try:
        split_fields(arguments)
        return msgspec.Raw(arguments.encode())
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        found = pydantic_core.from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class MessageFormatter:
    def __init__(self, prepared: PreparedRequest, request: MessagesRequest) -> None:
        self.prepared = prepared
        self.request = request
        self._started = False
        self._finished_blocks: list[Json] = []
        self._block: ContentBlock | None = None
        self._last_piece = OutputPiece()

    # ------------------------------------------------------------ as a ResponseFormatter

    def full_response(
        self, processors: Sequence[OutputProcessor], pieces: Sequence[Sequence[OutputPiece]]
    ) -> Json:
        for piece in pieces[0]:
            for _ in self._block_events(piece):
                pass
        return self._message(self._finished_blocks, processors) | self._stop_fields(processors[0])

    def start_events(self) -> Iterator[bytes]:
        return iter(())

    def delta_events(
        self, choice: int, piece: OutputPiece, processors: Sequence[OutputProcessor]
    ) -> Iterator[bytes]:
        # The first token comes with the count of cached prompt tokens.
        if not self._started and (piece.num_tokens or piece.finish_reason):
            self._started = True
            message = self._message([], processors) | {"stop_reason": None, "stop_sequence": None}
            yield message_event({"type": "message_start", "message": message})
        yield from map(message_event, self._block_events(piece))

    def end_events(self, processors: Sequence[OutputProcessor]) -> Iterator[bytes]:
        delta = self._stop_fields(processors[0])
        usage = self._usage(processors)
        yield message_event({"type": "message_delta", "delta": delta, "usage": usage})
        yield message_event({"type": "message_stop"})

    def error_event(self, error: ApiError) -> bytes:
        return message_event(anthropic_error(error))

    # ------------------------------------------------------------ blocks

    def _block_events(self, piece: OutputPiece) -> Iterator[Json]:
        for part in piece.parts:
            match part:
                case ContentDelta(text):
                    yield from self._extend_block("text", text)
                case ReasoningDelta(text):
                    yield from self._extend_block("thinking", text)
                case CallStart(_, id, name):
                    yield from self._open_block("tool_use", id=id, name=name)
                case CallArguments(_, text):
                    yield from self._extend_block("tool_use", text)
        if piece.finish_reason:
            self._last_piece = piece
            if self._block is None and not self._finished_blocks:
                yield from self._open_block("text")
            yield from self._close_block()

    def _extend_block(self, kind: BlockKind, text: str) -> Iterator[Json]:
        if self._block is None or self._block.kind != kind:
            yield from self._open_block(kind)
        assert self._block is not None
        yield self._block.delta_event(text)

    def _open_block(self, kind: BlockKind, **attributes: str) -> Iterator[Json]:
        yield from self._close_block()
        self._block = ContentBlock(kind, len(self._finished_blocks), **attributes)
        yield self._block.start_event()

    def _close_block(self) -> Iterator[Json]:
        if self._block is not None:
            yield self._block.stop_event()
            self._finished_blocks.append(self._block.to_json())
            self._block = None

    # ------------------------------------------------------------ the message

    def _message(self, content: list[Json], processors: Sequence[OutputProcessor]) -> Json:
        return {
            "id": self.prepared.id,
            "type": "message",
            "role": "assistant",
            "model": self.prepared.model,
            "content": content,
            "usage": self._usage(processors),
        }

    def _usage(self, processors: Sequence[OutputProcessor]) -> Json:
        """`input_tokens` excludes those from the prefix cache."""
        usage = make_usage(self.prepared, processors)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": processors[0].reasoning_tokens},
        }

    def _stop_fields(self, processor: OutputProcessor) -> Json:
        stop_reason = self._last_piece.stop_reason
        reason, sequence = "end_turn", None
        if self._last_piece.finish_reason == "length":
            cut_by_context = len(processor.token_ids) < self.request.max_tokens
            reason = "model_context_window_exceeded" if cut_by_context else "max_tokens"
        elif isinstance(stop_reason, str):
            reason, sequence = "stop_sequence", stop_reason
        elif processor.num_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}


def message_event(body: Json) -> bytes:
    return sse_event(body, body["type"])
