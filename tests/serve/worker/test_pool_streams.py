"""Streams of a pool whose worker is only a connection: what is counted, and that nothing remains of
a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from counterpoint.config import Config
from counterpoint.disagg.compatibility import make_digest
from counterpoint.disagg.handoff_events import engine_id
from counterpoint.disagg.messages import HandoffId
from counterpoint.disagg.peer_connection import Address
from counterpoint.serve.api.limits import AdmissionQueue
from counterpoint.serve.api.openai import CompletionRequest
from counterpoint.serve.api.request_parsing import parse_request
from counterpoint.serve.api.streaming import Generation, GenerationContext
from counterpoint.serve.observability.metrics import Metrics
from counterpoint.serve.observability.rolling_stats import RollingStats
from counterpoint.serve.structured_output.checker import GrammarChecker
from counterpoint.serve.text.output_processor import OutputPiece
from counterpoint.serve.text.preprocess import PreparedRequest, Preprocessor
from counterpoint.serve.text.tokenizer_loader import make_byte_tokenizer
from counterpoint.serve.worker.pool import Pool
from counterpoint.serve.worker.registry import RegisteredWorker
from counterpoint.serve.worker.wire import EngineInfo, EngineOutputs, KvEndpoint, WorkerReady
from counterpoint.spec.presets import PRESETS
from counterpoint.spec.source import ModelSource
from counterpoint.stats import Stats
from counterpoint.types import DisaggRole, FinishReason, OutputDelta, Role

SPEC, SOURCE, TEXT = (
    PRESETS["smollm2-135m"],
    ModelSource("spec", "", "smollm2-135m"),
    make_byte_tokenizer(),
)
HELLO = EngineInfo(
    pid=1, policy="chunked", lanes="", roles=(Role.BOTH,), vocab=258, max_context_tokens=256,
    page_tokens=4, kv_tokens=4096, eos_token_ids=(257,),
)  # fmt: skip


class Line:
    """A connection that takes what is said."""

    def write_frame(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Front:
    """A pool of one worker, and what a server has beside it. To be made within an event loop."""

    def __init__(self) -> None:
        self.metrics, self.pulse = Metrics("m"), RollingStats()
        self.pool = Pool(
            Config().replace(replicas=1), SOURCE, self.metrics.observe, listener=self.pulse
        )
        digest = make_digest(SPEC, "dummy 0", "float16", 4)
        ready = WorkerReady(
            engine_info=HELLO,
            units=2,
            kv=KvEndpoint(
                address=Address("127.0.0.1", 1),
                digest=digest,
                transports=("tcp",),
                bytes_per_token=64,
            ),
        )
        self.member = self.pool.registry.workers["replica-0"] = RegisteredWorker(
            "replica-0", Role.BOTH, Line(), ready
        )  # type: ignore[arg-type]
        self.pool.on_ready(self.member, ready)

    async def ask(self, **fields: object) -> PreparedRequest:
        checker = GrammarChecker(SOURCE, HELLO.vocab, HELLO.eos_token_ids)
        try:
            request = parse_request(
                CompletionRequest,
                msgspec.json.encode({"prompt": "one, two", "max_tokens": 50} | fields),
            )
            return await Preprocessor(TEXT, HELLO, "m", checker).prepare_completion(request)
        finally:
            checker.close()

    def say(self, ask: PreparedRequest, text: str, finish: FinishReason | None = None) -> None:
        """The worker says more of the ask's one answer."""
        name = engine_id(HandoffId(ask.engine_requests[0].id, 1), DisaggRole.WHOLE)
        self.pool.on_report(
            self.member,
            EngineOutputs([OutputDelta(name, tuple(TEXT.encode([text])[0]), finish_reason=finish)]),
            Stats(),
        )

    def clean(self) -> bool:
        return not (
            self.metrics.cut_short
            or self.pulse._last_s
            or self.pool._requests
            or self.pool.frontend.requests
        )


async def pieces_of(front: Front, ask: PreparedRequest) -> list[OutputPiece]:
    context = GenerationContext(front.pool, TEXT, front.metrics.cut_short)
    generation = Generation(context, ask, AdmissionQueue().enter(ask.engine_requests))
    return [piece async for _, piece, _ in generation.stream_pieces()]


def in_loop(work):
    asyncio.run(asyncio.wait_for(work(), 20))


@pytest.mark.parametrize(
    ("said", "finish"), [(["a", "b"], FinishReason.LENGTH), (["three, st", "op and more"], None)]
)
def test_an_answer_that_a_stop_string_ends_has_stopped_and_leaves_nothing(
    said: Sequence[str], finish
):
    async def work() -> None:
        front = Front()
        ask = await front.ask(stop="stop")
        reading = asyncio.create_task(pieces_of(front, ask))
        await asyncio.sleep(0)
        for text in said:
            front.say(ask, text, finish if text is said[-1] else None)
        pieces = await reading
        ends = FinishReason.STOP if finish is None else finish
        assert (
            "".join(piece.text for piece in pieces) == "".join(said).partition("stop")[0]
            and pieces[-1].finish_reason == ends
        )
        assert {reason: count for reason, count in front.metrics.finished.items() if count} == {
            ends: 1
        }
        assert front.clean()

    in_loop(work)


def test_a_client_that_leaves_leaves_nothing_behind():
    async def work() -> None:
        front = Front()
        ask = await front.ask()
        reading = asyncio.create_task(pieces_of(front, ask))
        await asyncio.sleep(0)
        front.say(ask, "three")
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert front.metrics.finished[FinishReason.ABORT] == 1 and front.clean()

    in_loop(work)
