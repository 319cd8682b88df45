"""The OpenAPI document.

Routes read and validate bodies themselves, so FastAPI does not know their types: this module adds
the schemas of the request bodies to the document.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from counterpoint.serve.api.messages import CountTokensRequest, MessagesRequest
from counterpoint.serve.api.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    SampledRequest,
    TokenizeRequest,
)
from counterpoint.serve.api.response_format import Json
from counterpoint.serve.api.responses import ResponsesRequest

SCHEMA_REF = "#/components/schemas/{model}"
BODY_TYPES = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def openapi_options(request_type: type[ModelRequest], summary: str) -> dict[str, Any]:
    """A route's keyword arguments that describe its body and its responses."""
    answer: Json = {"description": "The answer"}
    if issubclass(request_type, SampledRequest):
        answer = {
            "description": "Whole, or with `stream` as server-sent events",
            "content": {"text/event-stream": {}},
        }
    schema = {"$ref": SCHEMA_REF.format(model=request_type.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "summary": summary,
        "response_model": None,
        "openapi_extra": {"requestBody": body},
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


def openapi_document(app: FastAPI) -> Json:
    """The document of `app` with the schemas of the bodies, made once."""
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, bodies = models_json_schema(
            [(kind, "validation") for kind in BODY_TYPES], ref_template=SCHEMA_REF
        )
        components = app.openapi_schema.setdefault("components", {})
        components.setdefault("schemas", {}).update(bodies["$defs"])
    return app.openapi_schema
