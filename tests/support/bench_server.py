"""A small server of the completions API for the replay tests.

Its answer depends on the first prompt id. Events, never sleeps, decide when tokens come:

    prompt ids [0, ...]   max_tokens tokens, each in a chunk with a count
    prompt ids [1, ...]   HTTP 400
    prompt ids [2, ...]   an error event after the first token
    prompt ids [3, ...]   the connection breaks after the first token
    prompt ids [4, ...]   one token too few
    prompt ids [5, ...]   waits for `FakeServer.gate` before the first token
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse


class FakeServer:
    """`seen`: request bodies in order of arrival. `all_here` is set once `expected` have arrived.
    `metrics`: pages of /metrics to show, one after the other; the last stays."""

    def __init__(self) -> None:
        self.seen: list[dict] = []
        self.waiting = 0
        self.gate = threading.Event()
        self.all_here = threading.Event()
        self.expected = 0
        self.metrics: list[str] = []
        self.app = FastAPI()
        self.app.post("/v1/completions")(self.complete)
        self.app.get("/metrics")(self.page)
        self.app.get("/v1/models")(self.models)

    async def models(self) -> dict:
        return {"object": "list", "data": [{"id": "fake", "object": "model"}]}

    async def page(self) -> PlainTextResponse:
        if not self.metrics:
            return PlainTextResponse("not found", status_code=404)
        return PlainTextResponse(self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0])

    async def complete(self, request: Request) -> object:
        body = await request.json()
        self.seen.append(body)
        if len(self.seen) == self.expected:
            self.all_here.set()
        kind = body["prompt"][0]
        if kind == 1:
            return JSONResponse(
                {"error": {"message": "prompt too long", "code": "x"}}, status_code=400
            )
        return StreamingResponse(self.stream(body, kind), media_type="text/event-stream")

    async def stream(self, body: dict, kind: int) -> AsyncIterator[bytes]:
        if kind == 5:
            await asyncio.to_thread(self.gate.wait, 30)
        count = body["max_tokens"] - (kind == 4)
        for i in range(count):
            finish = "length" if i == count - 1 else None
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": i + 1}
            chunk = {
                "choices": [{"index": 0, "text": "w", "finish_reason": finish}],
                "usage": usage,
            }
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            if kind == 2:
                yield b'data: {"error": {"message": "engine lost"}}\n\n'
                return
            if kind == 3:
                raise ConnectionResetError("the test asked for it")
        yield b"data: [DONE]\n\n"


@contextmanager
def running(fake: FakeServer) -> Iterator[str]:
    """The server's address while it runs in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(fake.app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        fake.gate.set()
        server.should_exit = True
        thread.join(10)
        listener.close()
