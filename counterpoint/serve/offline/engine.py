"""Offline: the engine on a thread of this process, without a server.

Owns: that thread, and what is asked of it. Promises: the same tokenising, checks, stops and text as the server's; an engine that
fails raises EngineLost in whoever waits, never hangs them. Must not: speak HTTP.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from counterpoint import build
from counterpoint.config import Config
from counterpoint.core.engine import Engine
from counterpoint.core.loop import run
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.serve.api.openai import ChatRequest, CompletionRequest
from counterpoint.serve.api.request_parsing import parse_request
from counterpoint.serve.structured_output.checker import GrammarChecker
from counterpoint.serve.text.output_processor import OutputPiece, OutputProcessor
from counterpoint.serve.text.preprocess import PreparedRequest, Preprocessor
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.serve.text.tokenizer_loader import load_tokenizer
from counterpoint.serve.worker.engine_client import EngineLost
from counterpoint.serve.worker.engine_process import make_engine_info, open_grammar_gate, open_log
from counterpoint.types import Abort, Output, OutputDelta

MAX_CONCURRENT = 512  # choices that are with the engine, where there are many
OutputMailbox = queue.SimpleQueue[OutputDelta | EngineLost]


def encode_body(fields: Mapping[str, Any]) -> bytes:
    """As a client sends them. NaN and half an emoji stay what they are, to be refused by name (msgspec writes null, and raises)."""
    return json.dumps(fields).encode()


def run_coroutine(ask: Coroutine[Any, Any, PreparedRequest]) -> PreparedRequest:
    """Waits for it, on another thread where an event loop runs on this one (in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(ask)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, ask).result()


class FinishedRequest:
    """One ask and, once it is finished, its whole answer: `answers` and `pieces` by choice."""

    def __init__(self, ask: PreparedRequest, text: ModelTokenizer) -> None:
        self.prepared = ask
        self.processors = [
            OutputProcessor(text, ask.output_options, arrive.prompt)
            for arrive in ask.engine_requests
        ]
        self.pieces: list[list[OutputPiece]] = [[] for _ in ask.engine_requests]

    def feed(self, choice: int, delta: OutputDelta) -> OutputPiece:
        piece = self.processors[choice].feed(delta)
        self.pieces[choice].append(piece)
        return piece

    @property
    def error(self) -> str:
        """Why a choice of it failed; "" if none did."""
        ends = (pieces[-1] for pieces in self.pieces)
        return next(
            (
                end.error or "the engine failed on this request"
                for end in ends
                if end.finish_reason == "error"
            ),
            "",
        )


class OfflineEngine:
    """`with Offline(config) as engine: ...`. Raises ConfigError or ModelError if the model can't be had."""

    def __init__(self, config: Config, progress: build.OnProgress = lambda stage: None) -> None:
        self._log = open_log(config.server.event_log)
        self.tokenizer = load_tokenizer(build.find_model(config))
        self._inbox = WallClockEventQueue()
        self._system = build.build_system(config, self._inbox, progress)
        self.engine_info = make_engine_info(config, self._system)
        source = self._system.source
        self._checker = GrammarChecker(
            source, self.engine_info.vocab, self.engine_info.eos_token_ids
        )
        self.preprocessor = Preprocessor(
            self.tokenizer, self.engine_info, source.name, self._checker, config.scheduler
        )
        self._gate = open_grammar_gate(self._system, self._inbox)
        self._mail: dict[str, OutputMailbox] = {}
        self._lock = threading.Lock()  # of `_mail` and `_lost`
        self._lost: EngineLost | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._checker.close()
        self._gate.close()
        self._inbox.stop()
        self._thread.join()
        self._system.executor.close()
        if self._log is not None:
            self._log.close()

    # ------------------------------------------------------------ asking

    def complete(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Any
    ) -> Iterator[tuple[int, OutputPiece]]:
        """(choice, piece) as they come, for texts or token ids; `options` are the fields of a completion request.
        Raises ApiError if they are wrong."""
        return self.pieces(self.completion({"prompt": prompts, **options}))

    def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> Iterator[OutputPiece]:
        """The pieces of the answer to a conversation; `options` are the fields of a chat request. Raises ApiError."""
        return (
            piece for _, piece in self.pieces(self.conversation({"messages": messages, **options}))
        )

    def completion(self, fields: Mapping[str, Any]) -> PreparedRequest:
        """What the fields of a completion request ask of the engine. Raises ApiError if they are wrong."""
        return run_coroutine(
            self.preprocessor.prepare_completion(
                parse_request(CompletionRequest, encode_body(fields))
            )
        )

    def conversation(self, fields: Mapping[str, Any]) -> PreparedRequest:
        """The same of a chat request."""
        return run_coroutine(
            self.preprocessor.prepare_chat(parse_request(ChatRequest, encode_body(fields)))
        )

    def pieces(self, ask: PreparedRequest) -> Iterator[tuple[int, OutputPiece]]:
        """Ends when each choice has had its finish; left early, it aborts them. Raises EngineLost."""
        mail: OutputMailbox = queue.SimpleQueue()
        answers = {
            arrive.id: (i, OutputProcessor(self.tokenizer, ask.output_options, arrive.prompt))
            for i, arrive in enumerate(ask.engine_requests)
        }
        self._add_requests(ask, mail)
        try:
            while not all(answer.finished for _, answer in answers.values()):
                delta = mail.get()
                if isinstance(delta, EngineLost):
                    raise delta
                choice, answer = answers[delta.id]
                piece = answer.feed(delta)
                if piece.finish_reason == "error":
                    raise EngineLost(piece.error)
                if piece.needs_abort:
                    self._abort([delta.id])
                yield choice, piece
        finally:
            self._abort([id for id, (_, answer) in answers.items() if not answer.finished])

    def answer_all(self, asks: Iterable[PreparedRequest]) -> Iterator[FinishedRequest]:
        """Each ask's whole answer, as soon as it is there; asks are taken so that AT_ONCE or more choices are with the engine while
        there are any. A choice that fails has a piece with `finish` "error". Left early, it aborts what runs. Raises EngineLost."""
        mail: OutputMailbox = queue.SimpleQueue()
        coming = iter(asks)
        open_: dict[str, tuple[FinishedRequest, int]] = {}
        try:
            while True:
                while len(open_) < MAX_CONCURRENT and (ask := next(coming, None)) is not None:
                    entered = FinishedRequest(ask, self.tokenizer)
                    open_ |= {
                        arrive.id: (entered, choice)
                        for choice, arrive in enumerate(ask.engine_requests)
                    }
                    self._add_requests(ask, mail)
                if not open_:
                    return
                delta = mail.get()
                if isinstance(delta, EngineLost):
                    raise delta
                if delta.id not in open_:
                    continue  # the rest of one that a stop string ended
                answered, choice = open_[delta.id]
                piece = answered.feed(choice, delta)
                if piece.needs_abort:
                    self._abort([delta.id])
                if piece.finish_reason:
                    del open_[delta.id]
                if all(answer.finished for answer in answered.processors):
                    yield answered
        finally:
            self._abort(list(open_))

    def _add_requests(self, ask: PreparedRequest, mail: OutputMailbox) -> None:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._mail |= {arrive.id: mail for arrive in ask.engine_requests}
        for arrive in ask.engine_requests:
            self._gate.put(arrive)

    def _abort(self, ids: Sequence[str]) -> None:
        with self._lock:
            for id in ids:
                self._mail.pop(id, None)
        for id in ids:
            self._gate.put(Abort(id))

    # ------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        reason = "the engine has been closed"
        try:
            run(self._system.engine, self._inbox, self._system.executor, self._deliver, self._log)
        except Exception as error:  # the device is lost, or the engine is wrong: nothing can go on
            reason = f"{type(error).__name__}: {error}"
        with self._lock:
            self._lost = EngineLost(reason)
            waiting = set(self._mail.values())
            self._mail.clear()
        for mail in waiting:
            mail.put(self._lost)

    def _deliver(self, outputs: list[Output], engine: Engine) -> None:
        with self._lock:
            for output in outputs:
                if isinstance(output, OutputDelta) and output.id in self._mail:
                    mail = (
                        self._mail[output.id]
                        if output.finish_reason is None
                        else self._mail.pop(output.id)
                    )
                    mail.put(output)
