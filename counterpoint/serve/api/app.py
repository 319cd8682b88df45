"""The HTTP application: routes, and what becomes of errors.

Owns: paths, status codes, the OpenAPI document. Promises: whatever a client sends is answered below 500; every error has the
envelope of its path's API; a server that is loading or has lost its engine says 503, at /health too.
Must not: tokenise, schedule, or shape an answer itself.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

import fastapi
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import counterpoint
from counterpoint.config import ServerConfig
from counterpoint.serve.api import messages
from counterpoint.serve.api.limits import AdmissionQueue, ApiKey, Overloaded
from counterpoint.serve.api.messages import (
    CountTokensRequest,
    MessagesRequest,
    chat_of,
    conversation_of,
)
from counterpoint.serve.api.messages_format import MessageFormatter
from counterpoint.serve.api.openai import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    SampledRequest,
    TokenizeRequest,
    errors_in_terms_of,
    parse_request,
)
from counterpoint.serve.api.response_format import ChatFormatter, CompletionFormatter, Json
from counterpoint.serve.api.responses import ResponsesRequest
from counterpoint.serve.api.responses_format import ResponsesFormatter
from counterpoint.serve.api.streaming import (
    BEGAN_NS,
    ClientDisconnected,
    Generation,
    read_body,
    respond,
)
from counterpoint.serve.dashboard import page
from counterpoint.serve.observability.lane_feed import LaneFeed
from counterpoint.serve.observability.metrics import Metrics
from counterpoint.serve.observability.otel import Tracing
from counterpoint.serve.observability.rolling_stats import RollingStats
from counterpoint.serve.text.preprocess import PreparedRequest, Preprocessor, run_in_thread_if_large
from counterpoint.serve.worker.engine_client import EngineClient
from counterpoint.serve.worker.streams import EngineLost

LOADING_RETRY_S = 5
UNLOGGED = frozenset(("/health", "/metrics"))
REFERENCE = "#/components/schemas/{model}"
BODIES = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
Asked = TypeVar("Asked", bound=ModelRequest)
CLIENT_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
log = logging.getLogger("counterpoint")


class Service:
    """What the routes work with. `intake` is None until the model is ready."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        pulse: RollingStats,
        name: str,
        config: ServerConfig,
        tracing: Tracing | None = None,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.name = name
        self.config = config
        self.tracing = tracing
        self.queue = metrics.queue = AdmissionQueue(
            config.max_queued_requests, config.max_queued_tokens
        )
        self.lane_feed = LaneFeed(engine, pulse, self.queue, name)
        self.preprocessor: Preprocessor | None = None
        self.started_s = 0

    def ready(self) -> Preprocessor:
        """Raises EngineLost if requests can't be taken now."""
        self.engine.check()
        if self.preprocessor is None:
            raise EngineLost("the model is still being loaded")
        return self.preprocessor

    async def parsed(self, kind: type[Asked], request: Request) -> Asked:
        """The body as a request of `kind`. Raises ApiError."""
        body = await read_body(request, self.config.max_body_bytes)
        if issubclass(kind, SampledRequest):
            self.queue.check()
        return await run_in_thread_if_large(parse_request, len(body), kind, body)

    def generation(self, ask: PreparedRequest, intake: Preprocessor) -> Generation:
        """Raises EngineLost, or Overloaded: from here on it must be closed."""
        self.engine.check()
        place = self.queue.enter(ask.engine_requests)
        return Generation(
            self.engine,
            ask,
            intake.tokenizer,
            place,
            self.metrics.cut_short,
            self.config.request_timeout_s,
            self.tracing,
        )


def create_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="Counterpoint",
        version=counterpoint.__version__,
        description="The OpenAI API of one model.",
    )
    if service.config.api_key is not None:
        app.add_middleware(ApiKey, key=service.config.api_key)
    app.add_middleware(RequestIds)
    add_error_handlers(app)

    @app.post("/v1/chat/completions", **documented(ChatRequest, "A chat"))
    async def chat_completions(request: Request) -> Response:
        intake = service.ready()
        asked = await service.parsed(ChatRequest, request)
        ask = await intake.prepare_chat(asked)
        return await respond(
            request, service.generation(ask, intake), ChatFormatter(ask, intake.tokenizer)
        )

    @app.post("/v1/completions", **documented(CompletionRequest, "A completion"))
    async def completions(request: Request) -> Response:
        intake = service.ready()
        asked = await service.parsed(CompletionRequest, request)
        ask = await intake.prepare_completion(asked)
        return await respond(
            request,
            service.generation(ask, intake),
            CompletionFormatter(ask, intake.tokenizer, asked),
        )

    @app.post(
        "/tokenize", **documented(TokenizeRequest, "The tokens of a text or of a conversation")
    )
    async def tokenize(request: Request) -> Response:
        intake = service.ready()
        return json_response(await intake.tokenize(await service.parsed(TokenizeRequest, request)))

    @app.post("/detokenize", **documented(DetokenizeRequest, "The text of tokens"))
    async def detokenize(request: Request) -> Response:
        intake = service.ready()
        return json_response(
            await intake.detokenize(await service.parsed(DetokenizeRequest, request))
        )

    add_other_apis(app, service)
    add_facts(app, service)
    add_page(app, service)
    app.openapi = lambda: document(app)
    return app


def add_other_apis(app: FastAPI, service: Service) -> None:
    """What is a chat in other words."""

    @app.post("/v1/responses", **documented(ResponsesRequest, "A response"))
    async def responses(request: Request) -> Response:
        intake = service.ready()
        asked = await service.parsed(ResponsesRequest, request)
        with errors_in_terms_of(ResponsesRequest):
            ask = await intake.prepare_chat(asked.to_chat_request(), "resp_")
        return await respond(
            request,
            service.generation(ask, intake),
            ResponsesFormatter(ask, intake.tokenizer, asked),
        )

    @app.post(
        messages.PATH,
        **documented(MessagesRequest, "A message, as clients of Anthropic's API have it"),
    )
    async def create_message(request: Request) -> Response:
        intake = service.ready()
        asked = await service.parsed(MessagesRequest, request)
        with errors_in_terms_of(MessagesRequest):
            ask = await intake.prepare_chat(chat_of(asked), "msg_", at_most=asked.max_tokens)
        return await respond(request, service.generation(ask, intake), MessageFormatter(ask, asked))

    @app.post(
        f"{messages.PATH}/count_tokens",
        **documented(CountTokensRequest, "How many tokens a message's prompt has"),
    )
    async def count_tokens(request: Request) -> Response:
        intake = service.ready()
        asked = await service.parsed(CountTokensRequest, request)
        with errors_in_terms_of(CountTokensRequest):
            tokens = await intake.tokens_of(
                TokenizeRequest(model=asked.model, **conversation_of(asked))
            )
        return JSONResponse({"input_tokens": len(tokens)})


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def add_facts(app: FastAPI, service: Service) -> None:
    """The routes that only tell."""

    def model() -> Json:
        hello = service.engine.engine_info
        return {
            "id": service.name,
            "object": "model",
            "created": service.started_s,
            "owned_by": "counterpoint",
            "max_model_len": hello.max_context_tokens if hello else None,
        }

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}", responses={404: {"description": "Another model"}})
    async def one_model(name: str) -> Json:
        if name != service.name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist",
                param="model",
                code="model_not_found",
            )
        return model()

    @app.get(
        "/health", responses={503: {"description": "Loading, or the engine is dead or frozen"}}
    )
    async def health() -> Response:
        try:
            service.ready()
        except EngineLost as lost:
            return JSONResponse({"status": service.engine.state, "reason": str(lost)}, 503)
        return JSONResponse(service.engine.health())

    @app.get("/metrics", response_class=fastapi.responses.PlainTextResponse)
    async def metrics() -> Response:
        service.metrics.stats, service.metrics.engine_info = (
            service.engine.stats,
            service.engine.engine_info,
        )
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/version")
    async def version() -> Json:
        return {"version": counterpoint.__version__}


def add_page(app: FastAPI, service: Service) -> None:
    """Not in the OpenAPI document: the page is for people, and its events never end."""
    whole = page()

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return whole

    @app.get("/live", include_in_schema=False)
    async def live() -> Response:
        return service.lane_feed.watch()


def documented(kind: type[ModelRequest], what: str) -> dict[str, Any]:
    """Bodies are read by hand (their size is watched, and parsing is strict), so the document is told what they are."""
    answer: Json = {"description": "The answer"}
    if issubclass(kind, SampledRequest):
        answer = {
            "description": "Whole, or with `stream` as server-sent events",
            "content": {"text/event-stream": {}},
        }
    return {
        "summary": what,
        "response_model": None,
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {"schema": {"$ref": REFERENCE.format(model=kind.__name__)}}
                },
            }
        },
        "responses": {
            200: answer,
            400: {"description": "The request is wrong, and the message says where"},
            404: {"description": "Another model"},
            413: {"description": "The body is too large"},
            415: {"description": "The body is not JSON"},
            401: {"description": "The API key is missing or wrong"},
            503: {"description": "Loading, too much waits already, or the engine is lost"},
            504: {"description": "The answer took longer than the server allows"},
        },
    }


def document(app: FastAPI) -> Json:
    """The OpenAPI document, with the schemas of the bodies."""
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, bodies = models_json_schema(
            [(kind, "validation") for kind in BODIES], ref_template=REFERENCE
        )
        app.openapi_schema.setdefault("components", {}).setdefault("schemas", {}).update(
            bodies["$defs"]
        )
    return app.openapi_schema


# ---------------------------------------------------------------- errors


def add_error_handlers(app: FastAPI) -> None:
    def told(
        request: Request, error: ApiError, headers: Mapping[str, str] | None = None
    ) -> Response:
        return JSONResponse(messages.envelope(request.url.path, error), error.status, headers)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return told(
            request,
            error,
            {"retry-after": str(error.retry_s)} if isinstance(error, Overloaded) else {},
        )

    @app.exception_handler(EngineLost)
    async def engine_lost(request: Request, error: EngineLost) -> Response:
        lost = ApiError(503, str(error), code="engine_unavailable")
        return told(request, lost, {"retry-after": str(LOADING_RETRY_S)})

    @app.exception_handler(ClientDisconnected)
    async def client_gone(_: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=499)  # nobody reads this

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        wrong = ApiError(
            error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}"
        )
        return told(request, wrong, error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return told(request, ApiError(500, f"internal error: {type(error).__name__}"))


class RequestIds:
    """Every response has an x-request-id: the client's, if it sent a decent one. It is told, never used as a key. At level debug,
    each request is logged at its end (probes and scrapes are not)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        id = given if CLIENT_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope[BEGAN_NS] = time.time_ns()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (
                    (b"x-request-id", b"request-id")
                    if scope["path"].startswith(messages.PATH)
                    else (b"x-request-id",)
                )
                message["headers"] = [*message["headers"], *((name, id.encode()) for name in names)]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if log.isEnabledFor(logging.DEBUG) and scope["path"] not in UNLOGGED:
                tell(scope, id, status)


def tell(scope: Scope, id: str, status: int) -> None:
    """The path as it was sent, without a query: it can't break the line, and holds no secrets."""
    path, seconds = (
        scope["raw_path"].decode("latin-1")[:200],
        (time.time_ns() - scope[BEGAN_NS]) / 1e9,
    )
    fields = {
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(seconds, 4),
        "request_id": id,
    }
    log.debug(
        "%s %s %d in %.3f s, id %s",
        scope["method"],
        path,
        status,
        seconds,
        id,
        extra={"fields": fields},
    )
