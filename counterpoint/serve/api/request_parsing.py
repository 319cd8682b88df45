"""From a request's body to its type: strict validation, and messages that name the wrong field.

Promises: a body that is wrong is a 400 that names its first wrong fields and repeats no value.
Must not: know the model. Vocabulary and context are checked in text/preprocess.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import pydantic

from counterpoint.serve.api.errors import ApiError
from counterpoint.serve.api.openai import ChatRequest, ModelRequest

MAX_ERRORS_SHOWN = 3
MAX_MESSAGE_CHARACTERS = 1000
MAX_LOCATION_CHARACTERS = 200
MAX_NEUTRAL_BYTES = 100  # every neutral value of an unsupported field is shorter than this

RequestT = TypeVar("RequestT", bound=ModelRequest)
# The members of a JSON object, not parsed further.
split_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def parse_request(request_type: type[RequestT], body: bytes) -> RequestT:
    """Raises ApiError (400) that names the first wrong fields."""
    try:
        request = request_type.model_validate_json(body)
        fields = split_fields(body)
    except pydantic.ValidationError as error:
        raise validation_api_error(error, request_type) from None
    except msgspec.DecodeError as error:  # for example NaN in an ignored field
        raise ApiError(400, f"Invalid JSON: {error}") from None
    for name, neutral_values in request_type.unsupported.items():
        raw = bytes(fields.get(name, b"null"))
        if len(raw) > MAX_NEUTRAL_BYTES or msgspec.json.decode(raw) not in neutral_values:
            hint = request_type.unsupported_hints.get(name)
            raise ApiError(
                400,
                f"{name} is not supported by this server{f': {hint}' if hint else ''}",
                param=name,
                code="unsupported_parameter",
            )
    return request


@contextlib.contextmanager
def errors_in_terms_of(request_type: type[ModelRequest]) -> Iterator[None]:
    """Renames the fields in errors of a chat that was made from a `request_type`."""
    try:
        yield
    except pydantic.ValidationError as error:
        raise rename_error_field(validation_api_error(error, ChatRequest), request_type) from None
    except ApiError as error:
        raise rename_error_field(error, request_type) from None


def rename_error_field(error: ApiError, request_type: type[ModelRequest]) -> ApiError:
    param = request_type.names_of_chat_fields.get(error.param or "", error.param)
    return ApiError(error.status, str(error), param=param, code=error.code)


def validation_api_error(
    error: pydantic.ValidationError, request_type: type[ModelRequest]
) -> ApiError:
    """`param`: the first wrong field, or the field that a message about several begins with."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    messages = [
        f"{format_location(e['loc'])}: {e['msg']}" if e["loc"] else e["msg"]
        for e in found[:MAX_ERRORS_SHOWN]
    ]
    if len(found) > MAX_ERRORS_SHOWN:
        messages.append(f"and {len(found) - MAX_ERRORS_SHOWN} more")
    message = "; ".join(messages)[:MAX_MESSAGE_CHARACTERS].replace("Value error, ", "")
    if found[0]["loc"]:
        return ApiError(400, message, param=str(found[0]["loc"][0]))
    first = message.split(maxsplit=1)[0].rstrip(":")
    return ApiError(400, message, param=first if first in request_type.model_fields else None)


def format_location(location: tuple[int | str, ...]) -> str:
    """As in messages[2].role, without the names that pydantic gives to members of a union."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part != "str":
            text += f".{part}"
    return text.lstrip(".")[:MAX_LOCATION_CHARACTERS]
