"""Batch files: requests in OpenAI's batch format, answered without a server.

Owns: the two formats. Promises: each line of the input has in the end one line in the output, in
the order in which they finish; a run that was interrupted goes on where it was, after dropping a
half-written line; an input that is not a batch is refused before anything runs, and a request that
is wrong gets its error as its answer. Must not: show progress, or load a model.

Each line of the input: {"custom_id", "method": "POST", "url": "/v1/chat/completions",
"/v1/completions" or "/v1/responses", "body"}. Each line of the output: {"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error": null}.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from counterpoint.config import ConfigError, name_file_in_errors, require_writable
from counterpoint.serve.api.errors import ApiError
from counterpoint.serve.api.openai import ChatRequest, CompletionRequest
from counterpoint.serve.api.openai_format import ChatFormatter, CompletionFormatter
from counterpoint.serve.api.request_parsing import errors_in_terms_of, parse_request
from counterpoint.serve.api.response_format import Json, ResponseFormatter
from counterpoint.serve.api.responses import ResponsesRequest
from counterpoint.serve.api.responses_format import ResponsesFormatter
from counterpoint.serve.offline.engine import FinishedRequest, OfflineEngine
from counterpoint.serve.text.preprocess import PreparedRequest

Request = TypeVar("Request", ChatRequest, CompletionRequest, ResponsesRequest)
BATCH_ID = "batch_req_"
BEGINNING = f'{{"id":"{BATCH_ID}'.encode()  # of every line of the output
Progress = Callable[[int, int, int], None]  # answered, of them with an error, in all


class BatchLine(msgspec.Struct):
    """A request of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class CompletedLine(msgspec.Struct):
    """The parts of a line of the output that are read. No line of an input has a `response`."""

    custom_id: str
    response: msgspec.Raw


decode = msgspec.json.Decoder(BatchLine).decode
decode_done = msgspec.json.Decoder(CompletedLine).decode


def remaining_lines(source: Path, out: Path) -> list[BatchLine]:
    """The requests of `source` that have no answer in `out`, from which a half-written last line is
    removed. Raises ConfigError."""
    require_writable("--out", out)
    lines = read_requests(source)
    done = read_completed_ids(out) if out.exists() else set()
    return [line for line in lines if line.custom_id not in done]


def read_requests(path: Path) -> list[BatchLine]:
    lines: dict[str, BatchLine] = {}
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if not data.strip():
                    continue
                try:
                    line = decode(data)
                except msgspec.DecodeError as error:
                    raise ConfigError(
                        f"{path}:{number}: not a request of a batch: {error}"
                    ) from None
                if line.custom_id in lines:
                    raise ConfigError(
                        f"{path}:{number}: custom_id {line.custom_id[:100]!r} is there twice:"
                        " give each its own"
                    )
                lines[line.custom_id] = line
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return list(lines.values())


def read_completed_ids(path: Path) -> set[str]:
    """The ids in an output, from which a half-written last line is removed."""
    done: set[str] = set()
    with path.open("r+b") as file:
        whole = 0
        for number, data in enumerate(file, 1):
            if not data.endswith(b"\n") and (
                data.startswith(BEGINNING) or BEGINNING.startswith(data)
            ):
                file.truncate(whole)
                break
            whole += len(data)
            try:
                done.add(decode_done(data).custom_id)
            except msgspec.DecodeError:
                raise ConfigError(
                    f"{path}:{number}: not an answer of a batch: choose another file with -o"
                ) from None
    return done


def answer_lines(
    lines: list[BatchLine], out: Path, engine: OfflineEngine, progress: Progress
) -> int:
    """Append the answers of `lines` to `out`. Returns how many are errors. Raises EngineLost."""
    failed = count = 0
    names: dict[str, tuple[BatchLine, ResponseFormatter]] = {}
    with name_file_in_errors(out), out.open("ab") as file:

        def finish(line: BatchLine, status: int, body: Json, id: str) -> None:
            nonlocal failed, count
            failed, count = failed + (status != 200), count + 1
            write(file, line.custom_id, status, body, id)
            progress(count, failed, len(lines))

        def prepared() -> Iterator[PreparedRequest]:
            for line in lines:
                try:
                    reply = prepare_line(line, engine)
                except ApiError as error:
                    finish(line, error.status, error.body(), "")
                else:
                    names[reply.prepared.id] = line, reply
                    yield reply.prepared

        for finished in engine.answer_all(prepared()):
            line, reply = names.pop(finished.prepared.id)
            finish(line, *result_of(finished, reply), finished.prepared.id)
    return failed


def prepare_line(line: BatchLine, engine: OfflineEngine) -> ResponseFormatter:
    """Raises ApiError."""
    body = bytes(line.body)
    if line.method != "POST":
        raise ApiError(405, f"method is {line.method[:20]!r}: it must be POST")
    if line.url == "/v1/chat/completions":
        chat = parse_request(ChatRequest, body)
        return ChatFormatter(
            asyncio.run(engine.preprocessor.prepare_chat(without_stream(chat))), engine.tokenizer
        )
    if line.url == "/v1/completions":
        completion = parse_request(CompletionRequest, body)
        return CompletionFormatter(
            asyncio.run(engine.preprocessor.prepare_completion(without_stream(completion))),
            engine.tokenizer,
            completion,
        )
    if line.url == "/v1/responses":
        response = without_stream(parse_request(ResponsesRequest, body))
        with errors_in_terms_of(ResponsesRequest):
            return ResponsesFormatter(
                asyncio.run(engine.preprocessor.prepare_chat(response.to_chat_request(), "resp_")),
                engine.tokenizer,
                response,
            )
    raise ApiError(
        404,
        f"url is {line.url[:100]!r}: "
        "it must be /v1/chat/completions, /v1/completions or /v1/responses",
    )


def without_stream(request: Request) -> Request:
    if request.stream:
        raise ApiError(400, "stream has no meaning in a batch: leave it out", param="stream")
    return request


def result_of(finished: FinishedRequest, reply: ResponseFormatter) -> tuple[int, Json]:
    if finished.error:
        return 500, ApiError(500, finished.error).body()
    return 200, reply.full_response(finished.processors, finished.pieces)


def write(file: BinaryIO, custom_id: str, status: int, body: Json, request_id: str) -> None:
    """Flushed: progress is shown only for lines that the system has."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    line = {
        "id": f"{BATCH_ID}{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": None,
    }
    file.write(msgspec.json.encode(line) + b"\n")
    file.flush()
