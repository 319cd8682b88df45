"""Plays a load against a server or an engine in this process, open loop.

Owns: when each query is sent, and what is collected. No query waits for an answer; one sent late
counts as late (`lag_s`). Every query ends in exactly one RequestTiming.
Must not: change the load or judge the records.
"""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import httpx
import msgspec

from counterpoint.bench.client import (
    EncodedQuery,
    HttpTarget,
    QueryResult,
    scrape,
    send_query,
)
from counterpoint.bench.report import ReplayResult
from counterpoint.bench.workload import Query, TokenRange, prompt_ids
from counterpoint.core.engine import Engine
from counterpoint.core.loop import DeliverOutputs
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.timeline import Timeline, run
from counterpoint.interfaces import Executor
from counterpoint.stats import Stats
from counterpoint.types import Abort, AddRequest, Output, RequestTiming, Sampling

OnRequest = Callable[[Literal["sent", "done", "failed"]], None]
clock = time.perf_counter

HEAD_START_S = 0.05  # from the start of the clock to the first query
IDLE_WAIT_S = 10.0  # for a server to become idle


def ignore_progress(_: Literal["sent", "done", "failed"]) -> None:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayOptions:
    """`warmup` is sent first and not counted. `tokens` and `seed` make synthetic prompts.
    `on_request` is told of each request. In this process alone: `timeline`, over the same executor
    and inbox, and `limit_s`, after which unfinished requests are aborted."""

    warmup: Sequence[Query] = ()
    tokens: TokenRange = dataclasses.field(default_factory=TokenRange)
    seed: int = 0
    on_request: OnRequest = ignore_progress
    timeline: Timeline | None = None
    limit_s: float | None = None


def relative_to(record: RequestTiming, start_s: float) -> RequestTiming:
    """`record` on a clock that starts at `start_s`."""
    return msgspec.structs.replace(
        record,
        arrival_s=record.arrival_s - start_s,
        admitted_s=None if record.admitted_s is None else record.admitted_s - start_s,
        finished_s=record.finished_s - start_s,
        token_s=tuple(t - start_s for t in record.token_s),
    )


# ---------------------------------------------------------------- over HTTP


def replay_http(
    target: HttpTarget, queries: Sequence[Query], options: ReplayOptions = ReplayOptions()
) -> ReplayResult:
    """Play `queries` against a server; warm-up queries one by one.

    Raises ConnectionError if nothing answers at the address, ValueError if a query can't be sent to
    this endpoint.
    """

    def encode(queries: Sequence[Query]) -> list[EncodedQuery]:
        return [
            EncodedQuery(query, target.body(query, options.tokens, options.seed))
            for query in queries
        ]

    requests, warmup = encode(queries), encode(options.warmup)
    return asyncio.run(_replay_http_async(target, requests, warmup, options.on_request))


async def _replay_http_async(
    target: HttpTarget,
    requests: Sequence[EncodedQuery],
    warmup: Sequence[EncodedQuery],
    on_request: OnRequest,
) -> ReplayResult:
    _raise_socket_limit(len(requests))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(target.timeout_s, connect=30.0)
    async with httpx.AsyncClient(
        limits=limits, timeout=timeout, headers=target.headers(), trust_env=False
    ) as http:
        for request in warmup:
            answer = await send_query(http, target, request, clock(), clock)
            if answer.error:
                raise ConnectionError(f"{target.path}: the warm-up request failed: {answer.error}")
        before = await wait_for_idle_stats(http, target)
        start_s = clock() + HEAD_START_S
        answers = await _send_all(http, target, requests, start_s, on_request)
        after = await wait_for_idle_stats(http, target) if before else None
    return _collect_results(answers, start_s, before, after)


async def _send_all(
    http: httpx.AsyncClient,
    target: HttpTarget,
    requests: Sequence[EncodedQuery],
    start_s: float,
    on_request: OnRequest,
) -> list[QueryResult]:
    async def send(request: EncodedQuery, due_s: float) -> QueryResult:
        answer = await send_query(http, target, request, due_s, clock)
        on_request("failed" if answer.error else "done")
        return answer

    tasks = []
    for request in requests:
        due_s = start_s + request.query.arrival_s
        await asyncio.sleep(max(0.0, due_s - clock()))
        tasks.append(asyncio.create_task(send(request, due_s)))
        on_request("sent")
    return await asyncio.gather(*tasks)


def _collect_results(
    answers: Sequence[QueryResult], start_s: float, before: Stats | None, after: Stats | None
) -> ReplayResult:
    estimated = sum(a.times_are_estimated for a in answers)
    note = (
        f"{estimated} answers had several tokens in a chunk without a count: their times are "
        "divided evenly among the chunks"
    )
    return ReplayResult(
        records=tuple(relative_to(a.record, start_s) for a in answers),
        errors={a.record.id: a.error for a in answers if a.error},
        lag_s=tuple(a.lag_s for a in answers),
        before=before,
        after=after,
        notes=(note,) if estimated else (),
    )


async def wait_for_idle_stats(http: httpx.AsyncClient, target: HttpTarget) -> Stats | None:
    """The server's Stats once it has no request, or as they are after IDLE_WAIT_S. None if it has
    no /metrics of this engine."""
    deadline_s = clock() + IDLE_WAIT_S
    while (stats := await scrape(http, target)) is not None:
        if not (stats.running or stats.waiting) or clock() > deadline_s:
            return stats
        await asyncio.sleep(0.1)
    return None


def _raise_socket_limit(count: int) -> None:
    """Raises the soft limit on open files, usually 1,024: each request in flight needs a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard),
        )


# ---------------------------------------------------------------- in this process


class ReplayPhase:
    """Collects the outputs of one set of requests. `finished` is set when all have ended and the
    engine is idle."""

    def __init__(self, num_requests: int, on_request: OnRequest) -> None:
        self.num_requests = num_requests
        self.on_request = on_request
        self.records: dict[str, RequestTiming] = {}
        self.errors: dict[str, str] = {}
        self.stats: Stats | None = None
        self.finished = threading.Event()

    def on_outputs(self, outputs: Sequence[Output], engine: Engine) -> None:
        for output in outputs:
            if isinstance(output, RequestTiming):
                self.records[output.id] = output
                self.on_request("failed" if output.id in self.errors else "done")
            elif output.error:
                self.errors[output.id] = output.error
        if len(self.records) == self.num_requests and engine.idle and not self.finished.is_set():
            self.stats = engine.stats()
            self.finished.set()


class EnginePlayer:
    """Feeds requests to an engine whose loop runs in a thread, from `start` to `stop`."""

    def __init__(self, inbox: WallClockEventQueue, loop: Callable[[DeliverOutputs], None]) -> None:
        self.inbox = inbox
        self.phase = ReplayPhase(-1, ignore_progress)
        self.failure: BaseException | None = None
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _run(self) -> None:
        try:
            self._loop(lambda outputs, engine: self.phase.on_outputs(outputs, engine))
        except BaseException as error:
            self.failure = error
            self.phase.finished.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.inbox.stop()
        self._thread.join()

    def play(
        self,
        requests: Sequence[tuple[float, AddRequest]],
        on_request: OnRequest,
        limit_s: float | None = None,
    ) -> tuple[ReplayPhase, float, list[float]]:
        """Put each request into the inbox at its time and wait until all have ended; abort what is
        unfinished after `limit_s`. Returns the phase, its start, and when each request was put.
        Raises RuntimeError if the loop fails."""
        phase = self.phase = ReplayPhase(len(requests), on_request)
        inbox, sent_s = self.inbox, []
        start_s = inbox.clock() + HEAD_START_S
        for at_s, request in requests:
            wait_s = start_s + at_s - inbox.clock()
            if wait_s > 0:
                time.sleep(wait_s)
            sent_s.append(inbox.clock())
            inbox.put(request)
            on_request("sent")
        if requests and self.failure is None:
            if limit_s is not None:
                left_s = start_s + limit_s - inbox.clock()
                if not phase.finished.wait(max(0.0, left_s)):
                    for _, request in requests:
                        inbox.put(Abort(request.id))
            phase.finished.wait()
        if self.failure is not None:
            raise RuntimeError(f"the engine failed: {self.failure}") from self.failure
        return phase, start_s, sent_s


def replay_engine(
    engine: Engine,
    inbox: WallClockEventQueue,
    executor: Executor,
    queries: Sequence[Query],
    options: ReplayOptions = ReplayOptions(),
) -> ReplayResult:
    """Play `queries` on an engine whose loop is not running; warm-up queries all at once.

    The loop runs in a thread until all have ended. A request arrives when it enters the inbox.
    Raises ValueError for a query that is a text (see transform.drop_texts), RuntimeError if the
    engine fails.
    """
    warmup = [(0.0, _make_add_request(query, options)) for query in options.warmup]
    requests = [(query.arrival_s, _make_add_request(query, options)) for query in queries]
    player = EnginePlayer(
        inbox, lambda deliver: run(engine, (inbox, executor), deliver, timeline=options.timeline)
    )
    before = engine.stats()
    player.start()
    try:
        before = player.play(warmup, ignore_progress)[0].stats or before
        phase, start_s, sent_s = player.play(requests, options.on_request, options.limit_s)
    finally:
        player.stop()
    records = [
        msgspec.structs.replace(phase.records[query.id], arrival_s=at_s)
        for query, at_s in zip(queries, sent_s, strict=True)
    ]
    return ReplayResult(
        records=tuple(relative_to(record, start_s) for record in records),
        errors=phase.errors,
        lag_s=tuple(
            max(0.0, at_s - start_s - query.arrival_s)
            for query, at_s in zip(queries, sent_s, strict=True)
        ),
        before=before,
        after=phase.stats,
    )


def _make_add_request(query: Query, options: ReplayOptions) -> AddRequest:
    return AddRequest(
        id=query.id,
        prompt=prompt_ids(query, options.tokens, options.seed),
        sampling=Sampling(
            max_tokens=query.output_tokens, temperature=0.0, seed=query.number, ignore_eos=True
        ),
        slo=query.slo,
    )
