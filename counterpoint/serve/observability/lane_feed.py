"""LaneFeed: the dashboard's frames, as server-sent events.

Owns: the viewers. Promises: a viewer costs the engine nothing and the server one write a frame;
each frame is made once for all viewers; a slow viewer misses frames, one that takes none is closed,
and more than MAX_VIEWERS are refused. Must not: wait for a viewer, or show a request's content.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import counterpoint
from counterpoint.serve.api.limits import AdmissionQueue, Overloaded
from counterpoint.serve.api.response_format import Json, sse_event
from counterpoint.serve.api.streaming import ClientDisconnected, run_until_disconnect
from counterpoint.serve.observability.pool_lanes import describe_workers, worker_label
from counterpoint.serve.observability.rolling_stats import RollingStats
from counterpoint.serve.worker.engine_client import EngineClient
from counterpoint.serve.worker.pool import Pool
from counterpoint.stats import LaneStep

FRAME_S = 0.2
SPLITS, GUARDS = 3, 3  # shown: the splits longest in force, the highest guards
QUIET_S = 1.0  # between frames while nothing changes
MAX_VIEWERS = 32
MAX_QUEUED_FRAMES = 4  # of one viewer
STALL_S = 10.0  # a viewer that takes no frame for so long is closed

Frames = asyncio.Queue["bytes | None"]  # None: the end


class LaneFeed:
    def __init__(
        self, engine: EngineClient | Pool, pulse: RollingStats, queue: AdmissionQueue, name: str
    ) -> None:
        self.engine = engine
        self.rolling_stats = pulse
        self.queue = queue
        self.name = name
        self.viewers: set[Frames] = set()
        self._closed = False
        self._ticking: asyncio.Task[None] | None = None

    def watch(self) -> LaneFeedResponse:
        """Raises Overloaded at MAX_VIEWERS, or when the server stops."""
        if self._closed or len(self.viewers) >= MAX_VIEWERS:
            raise Overloaded(
                f"{len(self.viewers)} watch already, of at most {MAX_VIEWERS}: try again later"
            )
        frames: Frames = asyncio.Queue(MAX_QUEUED_FRAMES)
        put(frames, sse_event(self.frame(time.monotonic())))
        self.viewers.add(frames)
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick())
        return LaneFeedResponse(self, frames)

    def close(self) -> None:
        """End every stream, so that the server can stop."""
        self._closed = True
        for frames in self.viewers:
            put(frames, None)

    # ------------------------------------------------------------ frames

    async def _tick(self) -> None:
        """Make frames while there are viewers."""
        shown, shown_s, step = None, 0.0, self.rolling_stats.last_step
        while self.viewers and not self._closed:
            now_s = time.monotonic()
            state = (self.engine.stats, self.engine.state, self.queue.queued_requests)
            if state != shown or now_s - shown_s >= QUIET_S:
                frame = sse_event(self.frame(now_s, step))
                step, shown, shown_s = self.rolling_stats.last_step, state, now_s
                for frames in self.viewers:
                    put(frames, frame)
            await asyncio.sleep(FRAME_S)

    def frame(self, now_s: float, after_step: int = 0) -> Json:
        """The state now, and the kept steps after number `after_step`. Times are in seconds on one
        clock."""
        stats = self.engine.stats
        pool = self.engine if isinstance(self.engine, Pool) else None
        prompt, generated = self.rolling_stats.rates(now_s)
        steps = list(self.rolling_stats.steps)
        fresh = min(self.rolling_stats.last_step - after_step, len(steps))
        return {
            "now_s": round(now_s, 4),
            "about": self._about(),
            "state": self.engine.state,
            "reason": self.engine.error,
            "running": stats.running,
            "waiting": stats.waiting,
            "queued": self.queue.queued_requests,
            "kv_tokens": {
                "total": stats.pages_total * stats.page_tokens,
                "cached": stats.pages_cached * stats.page_tokens,
                "free": stats.pages_free * stats.page_tokens,
            },
            "prompt_rate": round(prompt, 1),
            "generated_rate": round(generated, 1),
            "hit_rate": self.rolling_stats.hit_rate(now_s),
            "ttft_s": self.rolling_stats.ttft.percentiles(now_s),
            "itl_s": self.rolling_stats.itl.percentiles(now_s),
            "finished": sum(stats.finished.values()),
            "preemptions": stats.preemptions,
            "resplit_rate": round(self.rolling_stats.resplit_rate(now_s), 2),
            "lanes": self.rolling_stats.lanes(now_s),
            "splits": self.rolling_stats.splits(now_s)[:SPLITS],
            "active_share": self.rolling_stats.active_share(now_s),
            "fallbacks": self.rolling_stats.fallbacks(now_s),
            "prediction_errors": {
                kind: (round(median, 3), round(high, 3))
                for kind, median, high, _ in stats.policy.errors
            },
            "guards": sorted(
                ((cell, round(guard, 3)) for cell, _, guard in stats.policy.cells),
                key=lambda row: -row[1],
            )[:GUARDS],
            "last_step": self.rolling_stats.last_step,
            "steps": [step_row(step) for step in steps[len(steps) - fresh :]],
            "playing": [
                step_row(step)
                for step in (
                    pool.lanes.running_steps(now_s) if pool is not None else stats.running_steps
                )
            ],
            "workers": [worker_label(worker) for worker in pool.registry.worker_states()]
            if pool is not None
            else [],
        }

    def _about(self) -> Json:
        """What seldom changes."""
        engine, info = self.engine, self.engine.engine_info
        return {
            "model": self.name,
            "version": counterpoint.__version__,
            "policy": info.policy if info else "",
            "lanes": info.lanes if info else "",
            "roles": info.roles if info else (),
            "units": engine.stats.units_total,
            "bands": (),
            **(describe_workers(engine.lanes.workers()) if isinstance(engine, Pool) else {}),
            "context_tokens": info.max_context_tokens if info else 0,
        }


def step_row(step: LaneStep) -> tuple[float, ...]:
    """[lane, pass id, started_s, ended_s, units, prefill tokens, decode batch]."""
    started_s, ended_s = round(step.started_s, 4), round(step.ended_s, 4)
    return (
        step.lane,
        step.pass_id,
        started_s,
        ended_s,
        step.units,
        step.prefill_tokens,
        step.decode_batch,
    )


def put(frames: Frames, frame: bytes | None) -> None:
    """A full queue drops its oldest frame."""
    if frames.full():
        frames.get_nowait()
    frames.put_nowait(frame)


class LaneFeedResponse(Response):
    """The stream of one viewer."""

    media_type = "text/event-stream"

    def __init__(self, live: LaneFeed, frames: Frames) -> None:
        self.feed = live
        self.frames = frames
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnected, TimeoutError):
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                await run_until_disconnect(receive, self._send_all(send))
        finally:
            self.feed.viewers.discard(self.frames)

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._stream_taken()) as taken:
            async for frame in taken:
                async with asyncio.timeout(STALL_S):
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream_taken(self) -> AsyncGenerator[bytes, None]:
        while (frame := await self.frames.get()) is not None:
            yield frame
