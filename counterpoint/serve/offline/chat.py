"""A chat in the terminal, with a model in this process or behind a URL.

Owns: the conversation and how it is shown. Promises: Ctrl-C stops an answer, not the chat; the
content of a stopped answer stays in the conversation; reasoning is shown, and does not stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import msgspec
from rich.console import Console

from counterpoint.serve.offline.engine import OfflineEngine
from counterpoint.serve.output_parsing.output_parser import ContentDelta, OutputPart, ReasoningDelta

Messages = list[dict[str, Any]]
Speaker = Callable[[Messages], Iterator[OutputPart]]  # the answer to a conversation
HELP = "/clear starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def local_speaker(engine: OfflineEngine, options: dict[str, Any]) -> Speaker:
    def speak(messages: Messages) -> Iterator[OutputPart]:
        return (part for piece in engine.chat(messages, **options) for part in piece.parts)

    return speak


def remote_speaker(url: str, api_key: str | None, options: dict[str, Any]) -> Speaker:
    """`url`: any server of the OpenAI API, with or without /v1; its first model answers. Raises
    ConnectionError."""
    root = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    http = httpx.Client(
        base_url=f"{root}/v1", headers=headers, timeout=httpx.Timeout(600, connect=10)
    )
    try:
        response = http.get("/models")
        if response.status_code in (401, 403):
            raise ConnectionError(
                f"{url}: {response.status_code} {response.reason_phrase}:"
                " set OPENAI_API_KEY to a key of this server"
            )
        listed = response.raise_for_status().json()
        model = listed["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConnectionError(f"{url}: no model of the OpenAI API found there: {error}") from None

    def speak(messages: Messages) -> Iterator[OutputPart]:
        body = {"model": model, "messages": messages, "stream": True} | options
        try:
            with http.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != 200:
                    error = response.read().decode(errors="replace")[:500]
                    raise ConnectionError(f"{url}: {response.status_code}: {error}")
                for line in lines_of(response.iter_bytes()):
                    yield from parts_of(line)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise ConnectionError(f"{url}: the answer broke off: {error}") from None

    return speak


class StreamDelta(msgspec.Struct):
    """The parts of a choice that are read."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class StreamChoice(msgspec.Struct):
    delta: StreamDelta


class StreamChunk(msgspec.Struct):
    choices: list[StreamChoice] = []
    error: Any = None


decode = msgspec.json.Decoder(StreamChunk).decode


def lines_of(data: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of server-sent events: they end with line feeds, and may hold Unicode's other ends of
    lines."""
    rest = b""
    for part in data:
        *lines, rest = (rest + part).split(b"\n")
        yield from lines


def parts_of(line: bytes) -> Iterator[OutputPart]:
    """The parts in one line of a stream. Raises ConnectionError for an error event, DecodeError for
    what is none of the API's."""
    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
        return
    chunk = decode(line[5:])
    if chunk.error is not None:
        raise ConnectionError(str(chunk.error))
    for choice in chunk.choices:
        if reasoning := choice.delta.reasoning or choice.delta.reasoning_content:
            yield ReasoningDelta(reasoning)
        if choice.delta.content:
            yield ContentDelta(choice.delta.content)


def run_chat(speak: Speaker, console: Console, system: str | None = None) -> None:
    """Until the user ends it."""
    console.print(f"[dim]{HELP}[/dim]")
    messages = initial_messages(system)
    while True:
        try:
            text = console.input("[bold cyan]> [/bold cyan]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/clear":
            messages = initial_messages(system)
        elif text == "/help":
            console.print(f"[dim]{HELP}[/dim]")
        elif text:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": show(speak(messages), console)})


def initial_messages(system: str | None) -> Messages:
    return [{"role": "system", "content": system}] if system else []


def show(answer: Iterator[OutputPart], console: Console) -> str:
    """Print an answer as it comes. Returns its content, without reasoning."""
    content: list[str] = []
    in_reasoning = False
    try:
        for part in answer:
            match part:
                case ReasoningDelta(text):
                    in_reasoning = True
                    console.print(
                        text, end="", style="dim", markup=False, highlight=False, soft_wrap=True
                    )
                case ContentDelta(text):
                    console.print(
                        "\n\n" * in_reasoning + text,
                        end="",
                        markup=False,
                        highlight=False,
                        soft_wrap=True,
                    )
                    in_reasoning = False
                    content.append(text)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/dim]", end="")
    finally:
        console.print()
    return "".join(content)
