"""ASGI middleware: the API key, request ids, and the debug log of each request.

Promises: the key is compared in constant time and never logged or sent.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from counterpoint.serve.api.errors import MESSAGES_PATH, ApiError, error_envelope
from counterpoint.serve.api.streaming import ARRIVAL_NS

# Probes and scrapers have no key; the dashboard asks its user for it.
KEYLESS_PATHS = frozenset(("/health", "/metrics", "/"))
UNLOGGED_PATHS = frozenset(("/health", "/metrics"))
CLIENT_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
log = logging.getLogger("counterpoint")


class ApiKeyMiddleware:
    """Answers 401 unless `key` is the request's Bearer token or its x-api-key."""

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
        body = error_envelope(scope["path"], error)
        response = JSONResponse(body, 401, {"www-authenticate": "Bearer"})
        await response(scope, receive, send)

    def _is_authorised(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # Digests have one length, so the comparison's time depends on nothing of the key.
        return hmac.compare_digest(hashlib.sha256(given.strip()).digest(), self._digest)


class RequestIdMiddleware:
    """Adds an x-request-id to every response: the client's own if it is printable, else a new one.

    The id is never used as a key. At level debug, each request is logged when it ends.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        id = given if CLIENT_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        names = [b"x-request-id"]
        if scope["path"].startswith(MESSAGES_PATH):
            names.append(b"request-id")
        scope[ARRIVAL_NS] = time.time_ns()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *((name, id.encode()) for name in names)]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if log.isEnabledFor(logging.DEBUG) and scope["path"] not in UNLOGGED_PATHS:
                log_request(scope, id, status)


def log_request(scope: Scope, id: str, status: int) -> None:
    """Logs the raw path without its query, which could hold secrets or break the line."""
    path = scope["raw_path"].decode("latin-1")[:200]
    seconds = (time.time_ns() - scope[ARRIVAL_NS]) / 1e9
    fields = {
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(seconds, 4),
        "request_id": id,
    }
    text = f"{scope['method']} {path} {status} in {seconds:.3f} s, id {id}"
    log.debug("%s", text, extra={"fields": fields})
