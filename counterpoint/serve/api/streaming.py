"""From the engine's OutputDeltas to an HTTP response, streamed or whole, for any API's shape.

Promises: a client that disconnects, streaming or not, ends its engine requests at once; a stream
that fails sends one error event and ends, without finish_reason or [DONE].
Must not: know an API's fields; a ResponseFormatter writes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from counterpoint.serve.api.errors import ApiError
from counterpoint.serve.api.limits import QueueTicket
from counterpoint.serve.api.response_format import Json, ResponseFormatter, encode, make_usage
from counterpoint.serve.observability.otel import TracedRequest, Tracing
from counterpoint.serve.text.engine_requests import PreparedRequest
from counterpoint.serve.text.output_processor import OutputPiece, OutputProcessor
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.serve.worker.engine_client import EngineClient
from counterpoint.serve.worker.streams import EngineLost, OutputStream, TimedOut
from counterpoint.types import NO_GRAMMAR, UNSAMPLED_REASONS, OutputDelta

Result = TypeVar("Result")
ARRIVAL_NS = "counterpoint.began_ns"  # key in a request's scope: wall clock at arrival


def choice_error(error: str) -> ApiError:
    """A grammar that proves too costly while decoding is the client's error; all else is ours."""
    if error == UNSAMPLED_REASONS[NO_GRAMMAR]:
        return ApiError(400, error, code="invalid_structure")
    return ApiError(500, error or "the engine failed on this request", code="engine_error")


class ClientDisconnected(Exception):
    """Nobody waits for the response any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationContext:
    """What the generations of a server share.

    `stopped_early`: ids of requests that a stop string ended; the engine reports them as aborted.
    """

    engine: EngineClient
    tokenizer: ModelTokenizer
    stopped_early: set[str]
    timeout_s: float | None = None
    tracing: Tracing | None = None


class Generation:
    """One PreparedRequest in the engine: an OutputProcessor per choice, and their pieces.

    `ticket` holds a place in the queue until each choice has its first token. Must be closed.
    """

    def __init__(
        self, context: GenerationContext, prepared: PreparedRequest, ticket: QueueTicket
    ) -> None:
        self.context = context
        self.prepared = prepared
        self.ticket = ticket
        self.traced_request: TracedRequest | None = None
        self.error: str | None = None
        requests = prepared.engine_requests
        self.finish_reasons: list[str | None] = [None] * len(requests)
        self.processors = [
            OutputProcessor(context.tokenizer, prepared.output_options, request.prompt)
            for request in requests
        ]
        self._choice = {request.id: index for index, request in enumerate(requests)}

    def start_trace(self, request: Request) -> None:
        if self.context.tracing is not None:
            began_ns = request.scope[ARRIVAL_NS]
            self.traced_request = self.context.tracing.begin(
                self.prepared, request.url.path, request.headers, began_ns
            )

    def close(self) -> None:
        self.ticket.close()
        if self.traced_request is not None:
            usage = make_usage(self.prepared, self.processors)
            self.traced_request.end(usage, self.finish_reasons, self.error)

    async def stream_pieces(self) -> AsyncGenerator[tuple[int, OutputPiece, bool], None]:
        """(choice, piece, whether another one is ready). Raises EngineLost; ApiError for a choice
        that failed or a response that took too long."""
        try:
            async with self.context.engine.open(
                self.prepared.engine_requests, self.context.timeout_s
            ) as deltas:
                async for delta in timeout_as_api_error(deltas):
                    self.ticket.on_first_token(delta.id)
                    if self.traced_request is not None and delta.tokens:
                        self.traced_request.token()
                    choice = self._choice[delta.id]
                    piece = self.processors[choice].feed(delta)
                    if piece.needs_abort:
                        self.context.stopped_early.add(
                            delta.id
                        )  # before abort: its timing may follow at once
                        if not deltas.abort(delta.id):
                            self.context.stopped_early.discard(delta.id)
                    if piece.finish_reason == "error":
                        raise choice_error(piece.error)
                    self.finish_reasons[choice] = piece.finish_reason
                    yield choice, piece, not deltas.empty
        except EngineLost:
            self.error = "engine_lost"
            raise
        except ApiError as error:
            self.error = error.code
            raise

    async def collect_response(self, formatter: ResponseFormatter) -> Json:
        pieces: list[list[OutputPiece]] = [[] for _ in self.processors]
        async with contextlib.aclosing(self.stream_pieces()) as stream:
            async for choice, piece, _ in stream:
                pieces[choice].append(piece)
        return formatter.full_response(self.processors, pieces)

    async def stream_events(self, formatter: ResponseFormatter) -> AsyncGenerator[bytes, None]:
        """Server-sent events; those that are ready together are one chunk."""
        ready = list(formatter.start_events())
        try:
            if ready:
                yield b"".join(ready)
                ready.clear()
            async with contextlib.aclosing(self.stream_pieces()) as stream:
                async for choice, piece, more in stream:
                    ready += formatter.delta_events(choice, piece, self.processors)
                    if ready and not more:
                        yield b"".join(ready)
                        ready.clear()
            ready += formatter.end_events(self.processors)
        except EngineLost as error:
            ready.append(formatter.error_event(ApiError(503, str(error), code="engine_lost")))
        except ApiError as error:
            ready.append(formatter.error_event(error))
        yield b"".join(ready)


async def timeout_as_api_error(deltas: OutputStream) -> AsyncIterator[OutputDelta]:
    """The deltas; TimedOut becomes an ApiError."""
    try:
        async for delta in deltas:
            yield delta
    except TimedOut as late:
        raise ApiError(504, str(late), code="request_timeout") from None


class EventStream(Response):
    """Streams the generation's events. Closes it as soon as the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, formatter: ResponseFormatter) -> None:
        self.generation = generation
        self.events = generation.stream_events(formatter)
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self.generation), contextlib.suppress(ClientDisconnected):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await run_until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self.events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; if the client disconnects first, cancels it and raises
    ClientDisconnected. The request's body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(
    request: Request, generation: Generation, formatter: ResponseFormatter
) -> Response:
    """Unless it streams, raises ClientDisconnected and what `stream_pieces` raises."""
    generation.start_trace(request)
    if generation.prepared.api_request.stream:
        return EventStream(generation, formatter)
    with contextlib.closing(generation):
        body = await run_until_disconnect(request.receive, generation.collect_response(formatter))
    return Response(encode(body), media_type="application/json")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError if the body is too long or not JSON by its content-type; ClientDisconnected
    if it does not end."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type is {kind[:100]!r}: it must be application/json")
    body = bytearray()
    async for part in receive_chunks(request):
        body += part
        if len(body) > max_bytes:
            raise ApiError(
                413,
                f"the request's body is larger than {max_bytes} bytes",
                code="request_too_large",
            )
    return bytes(body)


async def receive_chunks(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
