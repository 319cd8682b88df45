"""OfflineEngine: an engine on a thread of this process, without a server.

Owns: that thread, and the requests given to it, through the client (EngineStreams) and the runner
(EngineRunner) that a server's engine has, linked in-process. Promises: tokens, checks, stops and
text are those of the server; an engine that fails raises EngineLost in whoever waits.
Must not: speak HTTP.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from counterpoint.builder import system_builder
from counterpoint.config import Config
from counterpoint.core.engine import Engine
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.serve.api.openai import ChatRequest, CompletionRequest
from counterpoint.serve.api.request_parsing import parse_request
from counterpoint.serve.structured_output.checker import GrammarChecker
from counterpoint.serve.text.output_processor import OutputPiece, OutputProcessor
from counterpoint.serve.text.preprocess import PreparedRequest, Preprocessor
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.serve.text.tokenizer_loader import load_tokenizer
from counterpoint.serve.worker.engine_runner import EngineRunner, EngineSetup
from counterpoint.serve.worker.streams import EngineLost, EngineStreams
from counterpoint.stats import Stats
from counterpoint.types import Abort, AddRequest, Output, OutputDelta

MAX_CONCURRENT = 512  # choices that are with the engine, where there are many
Outputs = queue.SimpleQueue[OutputDelta | EngineLost]


def encode_body(fields: Mapping[str, Any]) -> bytes:
    """As a client sends them. Unlike msgspec, json keeps NaN and lone surrogates, so that the
    request's checks refuse them by name."""
    return json.dumps(fields).encode()


def run_coroutine(preparing: Coroutine[Any, Any, PreparedRequest]) -> PreparedRequest:
    """Waits for it, on another thread where an event loop runs on this one (in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(preparing)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, preparing).result()


class FinishedRequest:
    """A request and its whole answer; `processors` and `pieces` by choice."""

    def __init__(self, prepared: PreparedRequest, tokenizer: ModelTokenizer) -> None:
        self.prepared = prepared
        self.processors = [
            OutputProcessor(tokenizer, prepared.output_options, arrive.prompt)
            for arrive in prepared.engine_requests
        ]
        self.pieces: list[list[OutputPiece]] = [[] for _ in prepared.engine_requests]

    def feed(self, choice: int, delta: OutputDelta) -> OutputPiece:
        piece = self.processors[choice].feed(delta)
        self.pieces[choice].append(piece)
        return piece

    @property
    def error(self) -> str:
        """Why a choice of it failed; "" if none did."""
        for pieces in self.pieces:
            if pieces[-1].finish_reason == "error":
                return pieces[-1].error or "the engine failed on this request"
        return ""


class OfflineEngine:
    """`with OfflineEngine(config) as engine: ...`. Raises ConfigError or ModelError."""

    def __init__(
        self, config: Config, progress: system_builder.OnProgress = lambda stage: None
    ) -> None:
        self.tokenizer = load_tokenizer(system_builder.find_model(config))
        self._inbox = WallClockEventQueue()
        self._runner = EngineRunner(EngineSetup(config), self._inbox, progress)
        self.engine_info = info = self._runner.info
        source = self._runner.system.source
        self._checker = GrammarChecker(source, info.vocab, info.eos_token_ids)
        self.preprocessor = Preprocessor(
            self.tokenizer, info, source.name, self._checker, config.scheduler
        )
        self._streams = EngineStreams(self._send)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._checker.close()
        self._inbox.stop()
        self._thread.join()
        self._runner.close()

    # ------------------------------------------------------------ requests

    def complete(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Any
    ) -> Iterator[tuple[int, OutputPiece]]:
        """(choice, piece) as they come, for texts or token ids; `options` are the fields of a
        completion request. Raises ApiError if they are wrong."""
        return self.pieces(self.completion({"prompt": prompts, **options}))

    def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> Iterator[OutputPiece]:
        """The pieces of the answer to a conversation; `options` are the fields of a chat request.
        Raises ApiError."""
        pieces = self.pieces(self.conversation({"messages": messages, **options}))
        return (piece for _, piece in pieces)

    def completion(self, fields: Mapping[str, Any]) -> PreparedRequest:
        """Of the fields of a completion request. Raises ApiError if they are wrong."""
        request = parse_request(CompletionRequest, encode_body(fields))
        return run_coroutine(self.preprocessor.prepare_completion(request))

    def conversation(self, fields: Mapping[str, Any]) -> PreparedRequest:
        """Of the fields of a chat request. Raises ApiError if they are wrong."""
        request = parse_request(ChatRequest, encode_body(fields))
        return run_coroutine(self.preprocessor.prepare_chat(request))

    def pieces(self, prepared: PreparedRequest) -> Iterator[tuple[int, OutputPiece]]:
        """Ends when each choice has finished; left early, it aborts them. Raises EngineLost."""
        outputs: Outputs = queue.SimpleQueue()
        request = FinishedRequest(prepared, self.tokenizer)
        choices = {each.id: choice for choice, each in enumerate(prepared.engine_requests)}
        self._streams.add(prepared.engine_requests, outputs)
        try:
            while not all(each.finished for each in request.processors):
                delta = take(outputs)
                choice = choices[delta.id]
                piece = request.processors[choice].feed(delta)
                if piece.finish_reason == "error":
                    raise EngineLost(piece.error)
                if piece.needs_abort:
                    self._streams.abort([delta.id])
                yield choice, piece
        finally:
            self._streams.abort(choices)

    def answer_all(self, requests: Iterable[PreparedRequest]) -> Iterator[FinishedRequest]:
        """Each request's whole answer, as soon as it is there. Requests are taken so that
        MAX_CONCURRENT or more choices are with the engine while there are any. A choice that fails
        has a piece with `finish_reason` "error". Left early, it aborts what runs. Raises
        EngineLost."""
        outputs: Outputs = queue.SimpleQueue()
        coming = iter(requests)
        unfinished: dict[str, tuple[FinishedRequest, int]] = {}
        try:
            while True:
                while (
                    len(unfinished) < MAX_CONCURRENT
                    and (prepared := next(coming, None)) is not None
                ):
                    request = FinishedRequest(prepared, self.tokenizer)
                    for choice, each in enumerate(prepared.engine_requests):
                        unfinished[each.id] = (request, choice)
                    self._streams.add(prepared.engine_requests, outputs)
                if not unfinished:
                    return
                delta = take(outputs)
                if delta.id not in unfinished:
                    continue  # it came after a stop string had ended its choice
                request, choice = unfinished[delta.id]
                piece = request.feed(choice, delta)
                if piece.needs_abort:
                    self._streams.abort([delta.id])
                if piece.finish_reason:
                    del unfinished[delta.id]
                if all(each.finished for each in request.processors):
                    yield request
        finally:
            self._streams.abort(unfinished)

    # ------------------------------------------------------------ the link to the engine's thread

    def _send(self, events: Sequence[AddRequest | Abort]) -> None:
        for event in events:
            self._runner.gate.put(event)

    def _run(self) -> None:
        reason = "the engine has been closed"
        try:
            self._runner.run(self._deliver)
        except Exception as error:  # the device is lost, or the engine is wrong: nothing can go on
            reason = f"{type(error).__name__}: {error}"
        self._streams.close(reason)

    def _deliver(self, outputs: Sequence[Output], stats: Stats | None, engine: Engine) -> None:
        self._streams.deliver(output for output in outputs if isinstance(output, OutputDelta))


def take(outputs: Outputs) -> OutputDelta:
    """The next output. Raises EngineLost."""
    item = outputs.get()
    if isinstance(item, EngineLost):
        raise item
    return item
