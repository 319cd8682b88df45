"""The HTTP application: routes, and the responses to errors.

Promises: no client input causes a status of 500 or more; each error has the envelope of its path's
API; while the model loads or after the engine is lost, requests and /health get 503.
Must not: tokenise, schedule or shape a response.
"""

from __future__ import annotations

from collections.abc import Mapping

import fastapi
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

import counterpoint
from counterpoint.config import ServerConfig
from counterpoint.serve.api.errors import MESSAGES_PATH, ApiError, Overloaded, error_envelope
from counterpoint.serve.api.limits import AdmissionQueue
from counterpoint.serve.api.messages import (
    CountTokensRequest,
    MessagesRequest,
    to_chat_fields,
    to_chat_request,
)
from counterpoint.serve.api.messages_format import MessageFormatter
from counterpoint.serve.api.middleware import ApiKeyMiddleware, RequestIdMiddleware
from counterpoint.serve.api.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SampledRequest,
    TokenizeRequest,
)
from counterpoint.serve.api.openai_format import ChatFormatter, CompletionFormatter
from counterpoint.serve.api.openapi import openapi_document, openapi_options
from counterpoint.serve.api.request_parsing import RequestT, errors_in_terms_of, parse_request
from counterpoint.serve.api.response_format import Json, ResponseFormatter
from counterpoint.serve.api.responses import ResponsesRequest
from counterpoint.serve.api.responses_format import ResponsesFormatter
from counterpoint.serve.api.streaming import (
    ClientDisconnected,
    Generation,
    GenerationContext,
    read_body,
    respond,
)
from counterpoint.serve.dashboard import make_page
from counterpoint.serve.observability.lane_feed import LaneFeed
from counterpoint.serve.observability.metrics import Metrics
from counterpoint.serve.observability.otel import Tracing
from counterpoint.serve.observability.rolling_stats import RollingStats
from counterpoint.serve.text.engine_requests import PreparedRequest
from counterpoint.serve.text.preprocess import Preprocessor, run_in_thread_if_large
from counterpoint.serve.worker.engine_client import EngineClient
from counterpoint.serve.worker.streams import EngineLost

LOADING_RETRY_S = 5


class Service:
    """What the routes work with. `preprocessor` is None until the model is loaded."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        rolling_stats: RollingStats,
        config: ServerConfig,
        tracing: Tracing | None = None,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.model_name = metrics.model
        self.config = config
        self.tracing = tracing
        self.admission_queue = metrics.queue = AdmissionQueue(
            config.max_queued_requests, config.max_queued_tokens
        )
        self.lane_feed = LaneFeed(engine, rolling_stats, self.admission_queue, self.model_name)
        self.preprocessor: Preprocessor | None = None
        self.started_s = 0

    def ready_preprocessor(self) -> Preprocessor:
        """Raises EngineLost if requests can't be taken now."""
        self.engine.check()
        if self.preprocessor is None:
            raise EngineLost("the model is still being loaded")
        return self.preprocessor

    async def parse_body(self, request_type: type[RequestT], request: Request) -> RequestT:
        """Raises ApiError; Overloaded before parsing, if the queue is full."""
        body = await read_body(request, self.config.max_body_bytes)
        if issubclass(request_type, SampledRequest):
            self.admission_queue.check()
        return await run_in_thread_if_large(parse_request, len(body), request_type, body)

    async def generate(
        self, request: Request, prepared: PreparedRequest, formatter: ResponseFormatter
    ) -> Response:
        """Raises EngineLost, Overloaded, and what `respond` raises."""
        context = GenerationContext(
            self.engine,
            self.ready_preprocessor().tokenizer,
            self.metrics.cut_short,
            self.config.request_timeout_s,
            self.tracing,
        )
        ticket = self.admission_queue.enter(prepared.engine_requests)
        return await respond(request, Generation(context, prepared, ticket), formatter)


def create_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="Counterpoint",
        version=counterpoint.__version__,
        description="The OpenAI API of one model.",
    )
    if service.config.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, key=service.config.api_key)
    app.add_middleware(RequestIdMiddleware)
    add_error_handlers(app)
    add_openai_routes(app, service)
    add_translated_routes(app, service)
    add_info_routes(app, service)
    add_dashboard(app, service)
    app.openapi = lambda: openapi_document(app)
    return app


def add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", **openapi_options(ChatRequest, "A chat"))
    async def chat_completions(request: Request) -> Response:
        preprocessor = service.ready_preprocessor()
        chat = await service.parse_body(ChatRequest, request)
        prepared = await preprocessor.prepare_chat(chat)
        formatter = ChatFormatter(prepared, preprocessor.tokenizer)
        return await service.generate(request, prepared, formatter)

    @app.post("/v1/completions", **openapi_options(CompletionRequest, "A completion"))
    async def completions(request: Request) -> Response:
        preprocessor = service.ready_preprocessor()
        completion = await service.parse_body(CompletionRequest, request)
        prepared = await preprocessor.prepare_completion(completion)
        formatter = CompletionFormatter(prepared, preprocessor.tokenizer, completion)
        return await service.generate(request, prepared, formatter)

    @app.post(
        "/tokenize", **openapi_options(TokenizeRequest, "The tokens of a text or of a conversation")
    )
    async def tokenize(request: Request) -> Response:
        preprocessor = service.ready_preprocessor()
        body = await preprocessor.tokenize(await service.parse_body(TokenizeRequest, request))
        return Response(body, media_type="application/json")

    @app.post("/detokenize", **openapi_options(DetokenizeRequest, "The text of tokens"))
    async def detokenize(request: Request) -> Response:
        preprocessor = service.ready_preprocessor()
        body = await preprocessor.detokenize(await service.parse_body(DetokenizeRequest, request))
        return Response(body, media_type="application/json")


def add_translated_routes(app: FastAPI, service: Service) -> None:
    """The APIs whose requests are translated into chats."""

    @app.post("/v1/responses", **openapi_options(ResponsesRequest, "A response"))
    async def responses(request: Request) -> Response:
        preprocessor = service.ready_preprocessor()
        body = await service.parse_body(ResponsesRequest, request)
        with errors_in_terms_of(ResponsesRequest):
            prepared = await preprocessor.prepare_chat(body.to_chat_request(), "resp_")
        formatter = ResponsesFormatter(prepared, preprocessor.tokenizer, body)
        return await service.generate(request, prepared, formatter)

    @app.post(
        MESSAGES_PATH,
        **openapi_options(MessagesRequest, "A message, as clients of Anthropic's API have it"),
    )
    async def create_message(request: Request) -> Response:
        preprocessor = service.ready_preprocessor()
        body = await service.parse_body(MessagesRequest, request)
        with errors_in_terms_of(MessagesRequest):
            prepared = await preprocessor.prepare_chat(
                to_chat_request(body), "msg_", max_tokens=body.max_tokens
            )
        return await service.generate(request, prepared, MessageFormatter(prepared, body))

    @app.post(
        f"{MESSAGES_PATH}/count_tokens",
        **openapi_options(CountTokensRequest, "How many tokens a message's prompt has"),
    )
    async def count_tokens(request: Request) -> Response:
        preprocessor = service.ready_preprocessor()
        body = await service.parse_body(CountTokensRequest, request)
        with errors_in_terms_of(CountTokensRequest):
            tokens = await preprocessor.tokenize_prompt(
                TokenizeRequest(model=body.model, **to_chat_fields(body))
            )
        return JSONResponse({"input_tokens": len(tokens)})


def add_info_routes(app: FastAPI, service: Service) -> None:
    def model() -> Json:
        engine_info = service.engine.engine_info
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started_s,
            "owned_by": "counterpoint",
            "max_model_len": engine_info.max_context_tokens if engine_info else None,
        }

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}", responses={404: {"description": "Another model"}})
    async def one_model(name: str) -> Json:
        if name != service.model_name:
            message = f"the model {name[:200]!r} does not exist"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model()

    @app.get(
        "/health", responses={503: {"description": "Loading, or the engine is dead or frozen"}}
    )
    async def health() -> Response:
        try:
            service.ready_preprocessor()
        except EngineLost as lost:
            return JSONResponse({"status": service.engine.state, "reason": str(lost)}, 503)
        return JSONResponse(service.engine.health())

    @app.get("/metrics", response_class=fastapi.responses.PlainTextResponse)
    async def metrics() -> Response:
        service.metrics.stats = service.engine.stats
        service.metrics.engine_info = service.engine.engine_info
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/version")
    async def version() -> Json:
        return {"version": counterpoint.__version__}


def add_dashboard(app: FastAPI, service: Service) -> None:
    """The page and its event stream, which are not part of the OpenAPI document."""
    page = make_page()

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return page

    @app.get("/live", include_in_schema=False)
    async def live() -> Response:
        return service.lane_feed.watch()


def add_error_handlers(app: FastAPI) -> None:
    def error_response(
        request: Request, error: ApiError, headers: Mapping[str, str] | None = None
    ) -> Response:
        return JSONResponse(error_envelope(request.url.path, error), error.status, headers)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        headers = {"retry-after": str(error.retry_s)} if isinstance(error, Overloaded) else {}
        return error_response(request, error, headers)

    @app.exception_handler(EngineLost)
    async def engine_lost(request: Request, error: EngineLost) -> Response:
        lost = ApiError(503, str(error), code="engine_unavailable")
        return error_response(request, lost, {"retry-after": str(LOADING_RETRY_S)})

    @app.exception_handler(ClientDisconnected)
    async def client_disconnected(_: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return error_response(request, ApiError(error.status_code, message), error.headers)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return error_response(request, ApiError(500, f"internal error: {type(error).__name__}"))
