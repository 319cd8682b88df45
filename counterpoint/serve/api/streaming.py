"""From the engine's Deltas to an HTTP response, streamed or whole, for any API's shape.

Owns: the order of what is sent, and what a client's leaving means. Promises: a client that leaves, streaming or not, ends its
requests at once; a stream that cannot go on says so in an error event and then ends, with no finish_reason and no [DONE].
Must not: know what a chunk looks like (replies.py), or what the engine is (client.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from counterpoint.serve.api.limits import QueueTicket
from counterpoint.serve.api.openai import ApiError
from counterpoint.serve.api.response_format import Json, ResponseFormatter, encode, make_usage
from counterpoint.serve.observability.otel import TracedRequest, Tracing
from counterpoint.serve.text.output_processor import OutputPiece, OutputProcessor
from counterpoint.serve.text.preprocess import PreparedRequest
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.serve.worker.engine_client import EngineClient
from counterpoint.serve.worker.streams import EngineLost, OutputStream, TimedOut
from counterpoint.types import NO_GRAMMAR, UNSAMPLED_REASONS, OutputDelta

Result = TypeVar("Result")
BEGAN_NS = "counterpoint.began_ns"  # in a request's scope: when it came, on the wall clock


def failed(error: str) -> ApiError:
    """What a choice failed of. A structure that proves too costly on the way is its client's fault, all else is ours."""
    if error == UNSAMPLED_REASONS[NO_GRAMMAR]:
        return ApiError(400, error, code="invalid_structure")
    return ApiError(500, error or "the engine failed on this request", code="engine_error")


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


class Generation:
    """One Ask on its way through the engine: an Answer for each choice, and the pieces as they come. It holds `place` until each
    choice has its first token, or until it is closed. The ids of requests that a stop string ended go into `cut_short`: the engine
    will report them as aborted. With `tracing`, a span tells of it."""

    def __init__(
        self,
        engine: EngineClient,
        ask: PreparedRequest,
        text: ModelTokenizer,
        place: QueueTicket,
        cut_short: set[str],
        timeout_s: float | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.engine = engine
        self.ask = ask
        self.place = place
        self.cut_short = cut_short
        self.timeout_s = timeout_s
        self.tracing = tracing
        self.traced: TracedRequest | None = None
        self.error: str | None = None
        self.finishes: list[str | None] = [None] * len(ask.engine_requests)
        self.answers = [
            OutputProcessor(text, ask.output_options, arrive.prompt)
            for arrive in ask.engine_requests
        ]
        self._choice = {arrive.id: index for index, arrive in enumerate(ask.engine_requests)}

    def begin(self, request: Request) -> None:
        if self.tracing is not None:
            began_ns = request.scope[BEGAN_NS]
            self.traced = self.tracing.begin(self.ask, request.url.path, request.headers, began_ns)

    def close(self) -> None:
        self.place.leave()
        if self.traced is not None:
            self.traced.end(make_usage(self.ask, self.answers), self.finishes, self.error)

    async def stream_pieces(self) -> AsyncGenerator[tuple[int, OutputPiece, bool], None]:
        """(choice, piece, whether another one is there already). Raises EngineLost; ApiError for a choice that failed or an answer
        that took too long."""
        try:
            async with self.engine.open(self.ask.engine_requests, self.timeout_s) as deltas:
                async for delta in unless_late(deltas):
                    self.place.served(delta.id)
                    if self.traced is not None and delta.tokens:
                        self.traced.token()
                    choice = self._choice[delta.id]
                    piece = self.answers[choice].feed(delta)
                    if piece.needs_abort:
                        self.cut_short.add(delta.id)  # first: its Record may come at once
                        if not deltas.abort(delta.id):
                            self.cut_short.discard(delta.id)
                    if piece.finish_reason == "error":
                        raise failed(piece.error)
                    self.finishes[choice] = piece.finish_reason
                    yield choice, piece, not deltas.empty
        except EngineLost:
            self.error = "engine_lost"
            raise
        except ApiError as error:
            self.error = error.code
            raise

    async def whole(self, reply: ResponseFormatter) -> Json:
        pieces: list[list[OutputPiece]] = [[] for _ in self.answers]
        async with contextlib.aclosing(self.stream_pieces()) as stream:
            async for choice, piece, _ in stream:
                pieces[choice].append(piece)
        return reply.full_response(self.answers, pieces)

    async def events(self, reply: ResponseFormatter) -> AsyncGenerator[bytes, None]:
        """Server-sent events. What is there at one time is sent at one time."""
        ready = list(reply.beginning())
        try:
            if ready:
                yield b"".join(ready)
                ready.clear()
            async with contextlib.aclosing(self.stream_pieces()) as stream:
                async for choice, piece, more in stream:
                    ready += reply.step(choice, piece, self.answers)
                    if ready and not more:
                        yield b"".join(ready)
                        ready.clear()
            ready += reply.ending(self.answers)
        except EngineLost as error:
            ready.append(reply.failure(ApiError(503, str(error), code="engine_lost")))
        except ApiError as error:
            ready.append(reply.failure(error))
        yield b"".join(ready)


async def unless_late(deltas: OutputStream) -> AsyncIterator[OutputDelta]:
    """Its TimedOut as an ApiError."""
    try:
        async for delta in deltas:
            yield delta
    except TimedOut as late:
        raise ApiError(504, str(late), code="request_timeout") from None


class EventStream(Response):
    """A response of the generation's server-sent events. Closes it as soon as the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, reply: ResponseFormatter) -> None:
        self.generation = generation
        self.events = generation.events(reply)
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
    """The result of `work`, which is cancelled if the client leaves first: then ClientGone. The request's body must have
    been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(request: Request, generation: Generation, reply: ResponseFormatter) -> Response:
    """Raises ClientGone, and what `pieces` raises, unless the answer is streamed."""
    generation.begin(request)
    if generation.ask.api_request.stream:
        return EventStream(generation, reply)
    with contextlib.closing(generation):
        body = await run_until_disconnect(request.receive, generation.whole(reply))
    return Response(encode(body), media_type="application/json")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Raises ApiError if the body is not JSON by its own word, or too long; ClientGone if it never ends."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type is {kind[:100]!r}: it must be application/json")
    body = bytearray()
    async for part in chunks(request):
        body += part
        if len(body) > most_bytes:
            raise ApiError(
                413,
                f"the request's body is larger than {most_bytes} bytes",
                code="request_too_large",
            )
    return bytes(body)


async def chunks(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
