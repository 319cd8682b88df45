"""Raw requests to the server's APIs, their errors and events."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anthropic
import httpx
from serve_process import Running, poll

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hello there"}]
MESSAGES_BODY: dict[str, Any] = {"model": "echo", "max_tokens": 100, "messages": HELLO}


def openai_error(response, status: int = 400) -> dict[str, Any]:
    """The error of a openai_error request, which has OpenAI's envelope and says something."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    assert len(response.content) < 3000
    return error


def response_error(server: Running, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    response = server.post(RESPONSES, {"input": "hi"} | body)
    assert response.status_code == status, response.text
    return response.json()["error"]


def response_events(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    return server.named_events(RESPONSES, body)


def anthropic_client(server: Running, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, api_key=key, auth_token=None, max_retries=0, timeout=30
    )


def message_error(
    server: Running, body: dict[str, Any], status: int = 400, path: str = MESSAGES
) -> dict[str, Any]:
    """The error of a message_error request, in Anthropic's envelope."""
    response = server.post(path, body)
    assert response.status_code == status, response.text
    answer = response.json()
    assert answer.keys() == {"type", "error"} and answer["type"] == "error"
    assert answer["error"].keys() == {"type", "message"} and answer["error"]["message"]
    return answer["error"]


def message_events(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    return server.named_events(MESSAGES, MESSAGES_BODY | body)


class HeldRequest:
    """A request whose first token comes when it is let go."""

    def __init__(self, server: Running, file: Path) -> None:
        self.file = file
        self.body: dict[str, Any] = {"prompt": f"HOLD UNTIL {file} ", "max_tokens": 1}
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(server.post(COMPLETIONS, self.body))
        )
        self._thread.start()
        poll(lambda: server.metric("counterpoint_queued_requests") == 1)

    def release(self) -> bool:
        self.file.touch()
        self._thread.join(20)
        return self._answers[0].is_success
