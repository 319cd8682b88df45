"""Replay: a load played against a system, open loop.

Owns: when each query is sent, and what is collected.
Promises: no query waits for an answer; one sent late is counted as late (`Outcome.lag_s`); every query ends in exactly one Record;
both ways of replaying, over HTTP and on an engine in this process, give the same Outcome.
Must not: change the load, judge the records (bench/report.py).
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

from counterpoint.bench.client import HttpTarget, QueryResult, scrape, send_query
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

HEAD_START_S = 0.05  # between the start of the clock and the first query
IDLE_WAIT_S = 10.0  # for a server's gauges to come to rest


def ignore_progress(_: Literal["sent", "done", "failed"]) -> None:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayResult:
    """What came of a load. Times are seconds since its start. `records` and `lag_s` are in the order of the queries; `errors` are
    by request id. Stats are those of before and after, where the engine tells."""

    records: tuple[RequestTiming, ...]
    errors: dict[str, str]
    lag_s: tuple[float, ...]
    before: Stats | None = None
    after: Stats | None = None
    notes: tuple[str, ...] = ()

    @property
    def pages_leaked(self) -> int | None:
        """Pages that could be used before the load and not after it, though all requests have ended."""
        if self.before is None or self.after is None or not self.before.pages_total:
            return None
        free_before = self.before.pages_free + self.before.pages_cached
        return free_before - (self.after.pages_free + self.after.pages_cached)


def relative_to(record: RequestTiming, start_s: float) -> RequestTiming:
    """`record` on a clock that began at `start_s`."""
    return msgspec.structs.replace(
        record,
        arrival_s=record.arrival_s - start_s,
        admitted_s=None if record.admitted_s is None else record.admitted_s - start_s,
        finished_s=record.finished_s - start_s,
        token_s=tuple(t - start_s for t in record.token_s),
    )


# ---------------------------------------------------------------- over HTTP


def replay_http(
    target: HttpTarget,
    queries: Sequence[Query],
    *,
    warmup: Sequence[Query] = (),
    tokens: TokenRange = TokenRange(),
    seed: int = 0,
    watch: OnRequest = ignore_progress,
) -> ReplayResult:
    """Play `queries` against a server. `warmup` is sent first, one by one, and not counted.

    Raises ConnectionError if nothing answers at the address, ValueError if a query can't be sent to this endpoint.
    """
    bodies = [target.body(query, tokens, seed) for query in queries]
    return asyncio.run(
        _replay_http_async(
            target, queries, bodies, [(q, target.body(q, tokens, seed)) for q in warmup], watch
        )
    )


async def _replay_http_async(
    target: HttpTarget,
    queries: Sequence[Query],
    bodies: Sequence[bytes],
    warmup: Sequence[tuple[Query, bytes]],
    watch: OnRequest,
) -> ReplayResult:
    _raise_socket_limit(len(queries))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(target.timeout_s, connect=30.0)
    async with httpx.AsyncClient(
        limits=limits, timeout=timeout, headers=target.headers(), trust_env=False
    ) as http:
        for query, body in warmup:
            answer = await send_query(http, target, query, body, clock(), clock)
            if answer.error:
                raise ConnectionError(f"{target.path}: the warm-up request failed: {answer.error}")
        before = await wait_for_idle_stats(http, target)
        start_s = clock() + HEAD_START_S
        answers = await _send_all(http, target, queries, bodies, start_s, watch)
        after = await wait_for_idle_stats(http, target) if before else None
    return _collect_results(answers, start_s, before, after)


async def _send_all(
    http: httpx.AsyncClient,
    target: HttpTarget,
    queries: Sequence[Query],
    bodies: Sequence[bytes],
    start_s: float,
    watch: OnRequest,
) -> list[QueryResult]:
    async def one(query: Query, body: bytes) -> QueryResult:
        answer = await send_query(http, target, query, body, start_s + query.arrival_s, clock)
        watch("failed" if answer.error else "done")
        return answer

    tasks = []
    for query, body in zip(queries, bodies, strict=True):
        await asyncio.sleep(max(0.0, start_s + query.arrival_s - clock()))
        tasks.append(asyncio.create_task(one(query, body)))
        watch("sent")
    return await asyncio.gather(*tasks)


def _collect_results(
    answers: Sequence[QueryResult], start_s: float, before: Stats | None, after: Stats | None
) -> ReplayResult:
    spread = sum(a.times_are_estimated for a in answers)
    notes = (
        [
            f"{spread} answers had several tokens in a chunk without a count: their times are shared out evenly"
        ]
        if spread
        else []
    )
    return ReplayResult(
        records=tuple(relative_to(a.record, start_s) for a in answers),
        errors={a.record.id: a.error for a in answers if a.error},
        lag_s=tuple(a.lag_s for a in answers),
        before=before,
        after=after,
        notes=tuple(notes),
    )


async def wait_for_idle_stats(http: httpx.AsyncClient, target: HttpTarget) -> Stats | None:
    """The server's figures once no request is in it, or as they are after IDLE_WAIT_S. None if it does not tell them."""
    deadline_s = clock() + IDLE_WAIT_S
    while (stats := await scrape(http, target)) is not None:
        if not (stats.running or stats.waiting) or clock() > deadline_s:
            return stats
        await asyncio.sleep(0.1)
    return None


def _raise_socket_limit(count: int) -> None:
    """An open load needs a socket for every request in flight; the usual soft limit is 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard),
        )


# ---------------------------------------------------------------- in this process


class ReplayPhase:
    """Collects what the engine says of one set of requests. `over` is set when all have ended and the engine is idle."""

    def __init__(self, count: int, watch: OnRequest) -> None:
        self.num_requests = count
        self.watch = watch
        self.records: dict[str, RequestTiming] = {}
        self.errors: dict[str, str] = {}
        self.stats: Stats | None = None
        self.finished = threading.Event()

    def on_outputs(self, outputs: Sequence[Output], engine: Engine) -> None:
        for output in outputs:
            if isinstance(output, RequestTiming):
                self.records[output.id] = output
                self.watch("failed" if output.id in self.errors else "done")
            elif output.error:
                self.errors[output.id] = output.error
        if len(self.records) == self.num_requests and engine.idle and not self.finished.is_set():
            self.stats = engine.stats()
            self.finished.set()


class EnginePlayer:
    """Puts a load into the inbox of an engine whose loop runs in a thread, from `start` to `stop`."""

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
        arrives: Sequence[tuple[float, AddRequest]],
        watch: OnRequest,
        limit_s: float | None = None,
    ) -> tuple[ReplayPhase, float, list[float]]:
        """Put each Arrive when its time has come, and wait for all ends, of which those after `limit_s` are aborts: the phase, its
        start, and when each was put. Raises RuntimeError if the loop fails."""
        phase = self.phase = ReplayPhase(len(arrives), watch)
        inbox, sent_s = self.inbox, []
        start_s = inbox.clock() + HEAD_START_S
        for at_s, arrive in arrives:
            wait_s = start_s + at_s - inbox.clock()
            if wait_s > 0:
                time.sleep(wait_s)
            sent_s.append(inbox.clock())
            inbox.put(arrive)
            watch("sent")
        if arrives and self.failure is None:
            if limit_s is not None and not phase.finished.wait(
                max(0.0, start_s + limit_s - inbox.clock())
            ):
                for _, arrive in arrives:
                    inbox.put(Abort(arrive.id))
            phase.finished.wait()
        if self.failure is not None:
            raise RuntimeError(f"the engine failed: {self.failure}") from self.failure
        return phase, start_s, sent_s


def replay_engine(
    engine: Engine,
    inbox: WallClockEventQueue,
    executor: Executor,
    queries: Sequence[Query],
    *,
    warmup: Sequence[Query] = (),
    tokens: TokenRange = TokenRange(),
    seed: int = 0,
    watch: OnRequest = ignore_progress,
    timeline: Timeline | None = None,
    limit_s: float | None = None,
) -> ReplayResult:
    """Play `queries` on an engine whose loop is not running: it runs in a thread meanwhile, and has ended afterwards.

    A Record's arrival is the moment the query was put into the inbox. `warmup` is played first, all at once, and not counted.
    `timeline` is one over this executor and inbox. What is unanswered after `limit_s` is aborted. Raises ValueError for a query
    that is a text (see reshape.without_texts), RuntimeError if the engine or its device fails.
    """
    warm = [(0.0, _make_add_request(query, tokens, seed)) for query in warmup]
    arrives = [(query.arrival_s, _make_add_request(query, tokens, seed)) for query in queries]
    player = EnginePlayer(
        inbox, lambda deliver: run(engine, (inbox, executor), deliver, timeline=timeline)
    )
    before = engine.stats()
    player.start()
    try:
        before = player.play(warm, ignore_progress)[0].stats or before
        phase, start_s, sent_s = player.play(arrives, watch, limit_s)
    finally:
        player.stop()
    records = [
        msgspec.structs.replace(phase.records[q.id], arrival_s=at_s)
        for q, at_s in zip(queries, sent_s, strict=True)
    ]
    return ReplayResult(
        records=tuple(relative_to(record, start_s) for record in records),
        errors=phase.errors,
        lag_s=tuple(
            max(0.0, at_s - start_s - q.arrival_s) for q, at_s in zip(queries, sent_s, strict=True)
        ),
        before=before,
        after=phase.stats,
    )


def _make_add_request(query: Query, tokens: TokenRange, seed: int) -> AddRequest:
    sampling = Sampling(
        max_tokens=query.output_tokens, temperature=0.0, seed=query.number, ignore_eos=True
    )
    return AddRequest(
        id=query.id, prompt=prompt_ids(query, tokens, seed), sampling=sampling, slo=query.slo
    )
