"""Who may come in: the API key, and how much may wait.

Owns: the count of what is in flight without a first token, the limits on it, and the refusals. Promises: a refusal costs no
tokenising and is a whole response with its API's envelope, for a stream too; whoever was let in is counted out exactly once; the
key is compared in constant time, and never told to anyone.
Must not: tokenise, or talk to the engine.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from counterpoint.serve.api.messages import error_envelope
from counterpoint.serve.api.openai import ApiError
from counterpoint.types import AddRequest

KEYLESS_PATHS = frozenset(
    ("/health", "/metrics", "/")
)  # probes and scrapers have no key; the page asks for it
BUSY_RETRY_S = 1
REJECT_REASONS = ("queued_requests", "queued_tokens")


class Overloaded(ApiError):
    """Too much waits already. The client may come back after `retry_s`."""

    retry_s = BUSY_RETRY_S

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="server_overloaded")


class AdmissionQueue:
    """Counts engine requests (each choice of each prompt is one) without a first token, and their prompt tokens. None is no limit.
    What is larger than a limit by itself is let in when nothing else waits. `refused` counts by reason."""

    def __init__(self, max_requests: int | None = None, max_tokens: int | None = None) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.rejected = dict.fromkeys(REJECT_REASONS, 0)
        self.queued_requests = 0
        self.queued_tokens = 0

    def check(self, requests: int = 1, tokens: int = 1) -> None:
        """Raises Overloaded if so much more can't wait now."""
        if not self.queued_requests:
            return
        if self.max_requests is not None and self.queued_requests + requests > self.max_requests:
            self.rejected["queued_requests"] += 1
            raise Overloaded(
                f"{self.queued_requests} requests wait already, of at most {self.max_requests}: try again later"
            )
        if self.max_tokens is not None and self.queued_tokens + tokens > self.max_tokens:
            self.rejected["queued_tokens"] += 1
            raise Overloaded(
                f"{self.queued_tokens} prompt tokens wait already, of at most {self.max_tokens}: try again later"
            )

    def enter(self, engine_requests: Sequence[AddRequest]) -> QueueTicket:
        """Raises Overloaded."""
        sizes = {arrive.id: len(arrive.prompt) for arrive in engine_requests}
        self.check(len(sizes), sum(sizes.values()))
        self.queued_requests += len(sizes)
        self.queued_tokens += sum(sizes.values())
        return QueueTicket(self, sizes)


class QueueTicket:
    """A place in the queue, for requests of the given prompt sizes."""

    def __init__(self, queue: AdmissionQueue, sizes: dict[str, int]) -> None:
        self._queue = queue
        self._sizes = sizes

    def on_first_token(self, id: str) -> None:
        """Request `id` has its first token, or has ended."""
        size = self._sizes.pop(id, None)
        if size is not None:
            self._queue.queued_requests -= 1
            self._queue.queued_tokens -= size

    def close(self) -> None:
        for id in tuple(self._sizes):
            self.on_first_token(id)


class ApiKeyMiddleware:
    """Lets a request pass that has `key` as its Bearer token, or as its x-api-key; others are answered 401, whatever they ask
    for."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in KEYLESS_PATHS or self._is_authorised(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key"
        )
        await JSONResponse(
            error_envelope(scope["path"], error), 401, {"www-authenticate": "Bearer"}
        )(scope, receive, send)

    def _is_authorised(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(
            given.strip()
        ).digest()  # equal lengths: the time tells nothing of the key's
        return hmac.compare_digest(digest, self._digest)
