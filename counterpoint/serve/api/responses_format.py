"""Responses of /v1/responses: output items, whole or as stream events.

Promises: events are numbered from 0 without a gap; an item is done before the next is added. A
whole response equals the last event of a stream, because both are built the same way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal

from counterpoint.serve.api.errors import ApiError
from counterpoint.serve.api.response_format import Json, LogprobWriter, make_usage, sse_event
from counterpoint.serve.api.responses import NamedTool, ResponsesRequest
from counterpoint.serve.output_parsing.output_parser import (
    CallArguments,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from counterpoint.serve.text.engine_requests import PreparedRequest
from counterpoint.serve.text.output_processor import OutputPiece, OutputProcessor
from counterpoint.serve.text.tokenizer import ModelTokenizer

ItemKind = Literal["message", "reasoning", "function_call"]
ID_PREFIXES: dict[ItemKind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
TEXT_EVENTS: dict[ItemKind, str] = {  # event types of an item's text
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class OutputItem:
    """An item under construction. `attributes`: fields known at its start (a call's name)."""

    def __init__(self, kind: ItemKind, index: int, key: str, **attributes: str) -> None:
        self.kind: ItemKind = kind
        self.index = index
        self.id = f"{ID_PREFIXES[kind]}_{key}{index:04x}"
        self.attributes = attributes
        self._texts: list[str] = []
        self._logprobs: list[Json] = []

    def to_json(self, status: str) -> Json:
        head: Json = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return head | self.attributes | {"arguments": "".join(self._texts)}
        content = [] if status == "in_progress" else [self._content_part()]
        return (
            head
            | ({"role": "assistant"} if self.kind == "message" else {"summary": []})
            | {"content": content}
        )

    def start_events(self) -> Iterator[Json]:
        yield {
            "type": "response.output_item.added",
            "output_index": self.index,
            "item": self.to_json("in_progress"),
        }
        if self.kind != "function_call":
            yield (
                {"type": "response.content_part.added"}
                | self._position()
                | {"part": self._content_part()}
            )

    def delta_events(self, text: str, logprobs: Sequence[Json]) -> Iterator[Json]:
        self._texts.append(text)
        self._logprobs += logprobs
        yield (
            {"type": f"{TEXT_EVENTS[self.kind]}.delta"}
            | self._position()
            | {"delta": text}
            | self._with_logprobs(logprobs)
        )

    def end_events(self, status: str) -> Iterator[Json]:
        text = "".join(self._texts)
        done: Json = {"type": f"{TEXT_EVENTS[self.kind]}.done"} | self._position()
        if self.kind == "function_call":
            yield done | {"arguments": text, "name": self.attributes["name"]}
        else:
            yield done | {"text": text} | self._with_logprobs(self._logprobs)
            yield (
                {"type": "response.content_part.done"}
                | self._position()
                | {"part": self._content_part()}
            )
        yield {
            "type": "response.output_item.done",
            "output_index": self.index,
            "item": self.to_json(status),
        }

    def _content_part(self) -> Json:
        text = "".join(self._texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def _position(self) -> Json:
        place: Json = {"item_id": self.id, "output_index": self.index}
        return place if self.kind == "function_call" else place | {"content_index": 0}

    def _with_logprobs(self, logprobs: Sequence[Json]) -> Json:
        return {"logprobs": list(logprobs)} if self.kind == "message" else {}


class ResponsesFormatter:
    def __init__(
        self, prepared: PreparedRequest, tokenizer: ModelTokenizer, request: ResponsesRequest
    ) -> None:
        self.prepared = prepared
        self.request = request
        self.logprob_writer = LogprobWriter(tokenizer)
        self._key = prepared.id.partition("_")[2]
        self._finished_items: list[Json] = []
        self._item: OutputItem | None = None
        self._finish_reason: str | None = None
        self._num_events = 0

    # ------------------------------------------------------------ as a ResponseFormatter

    def full_response(
        self, processors: Sequence[OutputProcessor], pieces: Sequence[Sequence[OutputPiece]]
    ) -> Json:
        for piece in pieces[0]:
            for _ in self._item_events(piece):
                pass
        return self._response(self._status, processors)

    def start_events(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self._response("in_progress")})

    def delta_events(
        self, choice: int, piece: OutputPiece, processors: Sequence[OutputProcessor]
    ) -> Iterator[bytes]:
        yield from map(self._event, self._item_events(piece))

    def end_events(self, processors: Sequence[OutputProcessor]) -> Iterator[bytes]:
        yield self._event(
            {
                "type": f"response.{self._status}",
                "response": self._response(self._status, processors),
            }
        )

    def error_event(self, error: ApiError) -> bytes:
        failed = self._response("failed") | {
            "error": {"code": "server_error", "message": str(error)}
        }
        return self._event({"type": "response.failed", "response": failed})

    def _event(self, body: Json) -> bytes:
        self._num_events += 1
        return sse_event(body | {"sequence_number": self._num_events - 1}, body["type"])

    # ------------------------------------------------------------ items

    def _item_events(self, piece: OutputPiece) -> Iterator[Json]:
        logprobs = [
            self.logprob_writer.chat_entry(entry, self.prepared.output_options)
            for entry in piece.logprob_entries
        ]
        for part in piece.parts:
            match part:
                case ContentDelta(text):
                    yield from self._extend_item("message", text, logprobs)
                    logprobs = []
                case ReasoningDelta(text):
                    yield from self._extend_item("reasoning", text)
                case CallStart(_, id, name):
                    yield from self._open_item("function_call", call_id=id, name=name)
                case CallArguments(_, text):
                    yield from self._extend_item("function_call", text)
        # Log-probabilities of tokens without text.
        if logprobs and (self._item is None or self._item.kind == "message"):
            yield from self._extend_item("message", "", logprobs)
        if piece.finish_reason:
            self._finish_reason = piece.finish_reason
            if self._item is None and not self._finished_items:
                yield from self._open_item("message")
            yield from self._close_item(self._status)

    def _extend_item(
        self, kind: ItemKind, text: str, logprobs: Sequence[Json] = ()
    ) -> Iterator[Json]:
        if self._item is None or self._item.kind != kind:
            yield from self._open_item(kind)
        assert self._item is not None
        yield from self._item.delta_events(text, logprobs)

    def _open_item(self, kind: ItemKind, **attributes: str) -> Iterator[Json]:
        yield from self._close_item("completed")
        self._item = OutputItem(kind, len(self._finished_items), self._key, **attributes)
        yield from self._item.start_events()

    def _close_item(self, status: str) -> Iterator[Json]:
        if self._item is not None:
            yield from self._item.end_events(status)
            self._finished_items.append(self._item.to_json(status))
            self._item = None

    # ------------------------------------------------------------ the response

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._finish_reason in ("length", "abort") else "completed"

    def _response(self, status: str, processors: Sequence[OutputProcessor] | None = None) -> Json:
        """Without `processors`, of a response that has not ended."""
        ended = processors is not None
        return {
            "id": self.prepared.id,
            "object": "response",
            "created_at": self.prepared.created_s,
            "completed_at": int(time.time()) if ended else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if ended and self._finish_reason == "length"
            else None,
            "model": self.prepared.model,
            "output": list(self._finished_items),
            "usage": self._usage(processors) if processors is not None else None,
        } | echo_request(self.request)

    def _usage(self, processors: Sequence[OutputProcessor]) -> Json:
        usage = make_usage(self.prepared, processors)
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": processors[0].reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def echo_request(request: ResponsesRequest) -> Json:
    """The request's parameters as they are in force; nothing is stored, whatever `store` says."""
    text = request.text.model_dump(exclude_none=True, by_alias=True) if request.text else {}
    choice = request.tool_choice
    reasoning = (
        request.reasoning.model_dump() if request.reasoning else {"effort": None, "summary": None}
    )
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": reasoning,
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
