"""API errors, and the envelope in which each API sends them.

Promises: an error names fields and places, never a client's values.
Must not: know a route's request or response types.
"""

from __future__ import annotations

from typing import Any

MESSAGES_PATH = "/v1/messages"
BUSY_RETRY_S = 1
OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(ValueError):
    """A response other than success. `param` is the field that is wrong, `code` a stable name."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """OpenAI's envelope."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = OPENAI_TYPES.get(self.status, default)
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


class Overloaded(ApiError):
    """Too much is queued. The client may retry after `retry_s` seconds."""

    retry_s = BUSY_RETRY_S

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="server_overloaded")


def error_envelope(path: str, error: ApiError) -> dict[str, Any]:
    """The body of an error, in the form of the API at `path`."""
    if path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/"):
        return anthropic_error(error)
    return error.body()


def anthropic_error(error: ApiError) -> dict[str, Any]:
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    message = str(error)
    if error.param and error.param not in message:  # this envelope has no field for it
        message = f"{error.param}: {message}"
    kind = ANTHROPIC_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": message}}
