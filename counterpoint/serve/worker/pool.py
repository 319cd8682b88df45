"""Pool: many workers behind one EngineClient's interface: the front of cluster/ with its clients.

Owns: the streams that are open in the workers, and what is told of them. Promises: every stream ends, with a Delta that has
`finish` or with EngineLost; a stream that is left early is aborted wherever it stands; what ran on a worker that is lost goes on
elsewhere or ends with an error; the pool serves while any worker does.
Must not: know HTTP or text, decide where a request goes (disagg/load_tracker.py), or hold connections (roster.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from counterpoint import build
from counterpoint.config import Config, ConfigError
from counterpoint.disagg import handoff_events
from counterpoint.disagg.dispatch import (
    DeliverPromptLogprobs,
    DeliverTokens,
    OnLoss,
    RequestFinished,
)
from counterpoint.disagg.load_tracker import LoadTracker, TrackedWorker, WorkerShape
from counterpoint.disagg.pool_frontend import PoolFrontend, Route, ToWorker
from counterpoint.disagg.role_rebalancer import (
    Change,
    CommitRole,
    QuarantineRecovery,
    RebalanceTargets,
    ReplaceWorker,
    RoleRebalancer,
    StartDrain,
    WorkerQuarantine,
)
from counterpoint.disagg.router import Router, RoutingRule
from counterpoint.disagg.routing_feedback import LinkBandwidth
from counterpoint.serve.observability.merge_stats import add_rows, merge, without_gauges
from counterpoint.serve.observability.pool_lanes import (
    WorkerLanes,
    lanes_of_worker,
    worker_lane_times,
)
from counterpoint.serve.observability.pool_metrics import PoolMetrics
from counterpoint.serve.worker.client_requests import (
    ClientRequest,
    group_siblings,
    make_delta,
    pair_finishes,
)
from counterpoint.serve.worker.engine_client import (
    EngineFailed,
    EngineLost,
    EngineStatus,
    OutputListener,
    OutputQueue,
    OutputStream,
)
from counterpoint.serve.worker.registry import RegisteredWorker, WorkerRegistry
from counterpoint.serve.worker.wire import EngineInfo, EngineOutputs
from counterpoint.serve.worker.worker_protocol import (
    Orders,
    Shutdown,
    WorkerOrder,
    WorkerReady,
    WorkerReport,
)
from counterpoint.spec.source import ModelSource
from counterpoint.types import AddRequest, FinishReason, LaneStep, OutputDelta, RequestTiming, Stats

CHUNK_TOKENS = 128  # of a CPU's mixed batch, unless it is set;
GPU_CHUNK_TOKENS = 512
log = logging.getLogger("counterpoint")


class Pool:
    """`on_record` is called with the Record of each finished request. `system` names the function that builds a worker's engine.
    Raises ConfigError if workers could be reached from elsewhere without a token."""

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        on_record: Callable[[RequestTiming], None] | None = None,
        system: str = "counterpoint.build:system",
        listener: OutputListener | None = None,
    ) -> None:
        cluster = config.cluster
        self.config = config
        self.source = source
        self.on_timing = on_record
        self.listener = listener
        self.engine_info: EngineInfo | None = None
        self.error = ""
        self.registry = WorkerRegistry(config, system, self)
        self.lost_stats = Stats()  # what workers that are no longer there had counted
        self.load_tracker: LoadTracker | None = None
        on_loss = OnLoss(cluster.on_loss)
        self.frontend = PoolFrontend(self._route, cluster.handoff_deadline_s, on_loss=on_loss)
        self.metrics = PoolMetrics(self.registry.worker_states, lambda: self.load_tracker)
        self.rebalancer = make_rebalancer(config)
        self.quarantine = QuarantineRecovery()
        self._requests: dict[str, ClientRequest] = {}
        self._siblings: dict[
            str, list[AddRequest]
        ] = {}  # request -> those of the same prompt that wait for it
        self._rebalancing: asyncio.Task[None] | None = None
        self._stopped = self._loading = False
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------ life

    async def start(self) -> EngineInfo:
        """Start the workers and wait until each is ready (if there are none, until one has joined). Raises EngineFailed."""
        self._loading = True
        await self.registry.start()
        hello = await asyncio.shield(self._ready)
        self._loading = False
        if self.rebalancer is not None:
            self._rebalancing = asyncio.create_task(self._rebalance_roles(self.rebalancer))
        return hello

    async def close(self) -> None:
        """End every stream and the workers of this machine. May be called at any time, and again."""
        self._stopped = True
        self.fail_streams("the server is shutting down")
        if self._rebalancing is not None:
            self._rebalancing.cancel()
        await self.registry.close()

    # ------------------------------------------------------------ what is here

    @property
    def state(self) -> EngineStatus:
        if self._stopped:
            return "stopped"
        if self.registry.serving:
            return "loading" if self._loading else "ready"
        if any(member.frozen for member in self.registry.workers.values()):
            return "frozen"
        return "loading" if self._loading or self.registry.workers else "dead"

    @property
    def stats(self) -> Stats:
        return merge(
            [self.lost_stats, *(member.stats for member in self.registry.workers.values())]
        )

    def worker_lanes(self) -> list[WorkerLanes]:
        """Where the workers stand in a picture of them all, those of ours also while they are missing."""
        found = []
        for number, name in enumerate(
            dict.fromkeys((*self.registry.supervisor.slots, *self.registry.workers))
        ):
            member = self.registry.workers.get(name)
            ready = member.ready if member is not None else None
            found.append(
                WorkerLanes(number, name, ready.units, ready.engine_info.roles)
                if ready is not None
                else WorkerLanes(number, name)
            )
        return found

    def running_steps(self, now_s: float) -> list[LaneStep]:
        """The steps that run now."""
        members = self.registry.workers
        return [
            step
            for place in self.worker_lanes()
            if place.name in members
            for step in lanes_of_worker(place, members[place.name].stats.running_steps, now_s)
        ]

    def _publish_stats(self, member: RegisteredWorker, before: Stats, now_s: float) -> None:
        """Tell the listener what all have counted, and the steps that are new from `member`."""
        if self.listener is None:
            return
        places = {place.name: place for place in self.worker_lanes()}
        lanes = [
            worker_lane_times(places[name], other.stats)
            for name, other in self.registry.workers.items()
        ]
        fresh = max(0, min(member.stats.steps - before.steps, len(member.stats.recent_steps)))
        recent = lanes_of_worker(
            places[member.name],
            member.stats.recent_steps[len(member.stats.recent_steps) - fresh :],
            now_s,
        )
        stats = msgspec.structs.replace(self.stats, recent_steps=recent, lane_s=add_rows(lanes))
        self.listener.on_outputs(EngineOutputs([], now_s, stats))

    def health(self) -> dict[str, Any]:
        """Of a pool that serves: ok, or degraded with what is missing."""
        missing = self.registry.missing
        return {"status": "degraded", "missing": missing} if missing else {"status": "ok"}

    def check(self) -> None:
        """Raises EngineLost unless some worker can take requests."""
        if self.state != "ready":
            reasons = {"loading": "the workers are still loading", "frozen": "no worker responds"}
            raise EngineLost(reasons.get(self.state, "no worker is there"))

    # ------------------------------------------------------------ streams (client.Backend)

    def open(self, arrives: Iterable[AddRequest], timeout_s: float | None = None) -> OutputStream:
        return OutputStream(self, arrives, timeout_s)

    def add_requests(self, arrives: Sequence[AddRequest], mail: OutputQueue) -> None:
        self.check()
        if self.listener is not None:
            self.listener.on_requests(arrives)
        now = time.monotonic()
        self._requests |= {
            arrive.id: ClientRequest(arrive, now, output_queue=mail) for arrive in arrives
        }
        for first, *twins in group_siblings(
            arrives, 2 * self.engine_info.page_tokens if self.engine_info is not None else 0
        ):
            if twins:
                self._siblings[first.id] = twins
            self.frontend.add_request(first)
        self._dispatch_pending()

    def abort(self, id: str) -> bool:
        life = self._requests.get(id)
        if life is None:
            return False
        self.frontend.abort(id)
        if self.listener is not None:
            self.listener.on_outputs(
                EngineOutputs([OutputDelta(id, finish_reason=FinishReason.ABORT)], time.monotonic())
            )
        self._close_request(life, FinishReason.ABORT)
        self._dispatch_pending()
        return True

    def fail_streams(self, reason: str) -> None:
        """End every open stream with EngineLost, and abort its requests."""
        for life in tuple(self._requests.values()):
            life.output_queue.put_nowait(EngineLost(reason))
            self.abort(life.input.id)

    # ------------------------------------------------------------ what the front says

    def _route(self, arrive: AddRequest, avoid: str, prefill: str) -> Route | None:
        assert self.load_tracker is not None
        if not prefill:
            self._requests[arrive.id].routed_s = time.monotonic()
        return self.load_tracker.choose_route(arrive, avoid, prefill)

    def _dispatch_pending(self) -> None:
        """Tell workers and clients what is to be told."""
        orders: dict[str, list[WorkerOrder]] = {}
        while items := self.frontend.take_items():  # what is delivered may set others going
            for item, end in pair_finishes(items):
                if isinstance(item, ToWorker):
                    to = self.registry.workers.get(item.decode_worker)
                    address = to.ready.address if to is not None and to.ready is not None else None
                    orders.setdefault(item.worker, []).append(WorkerOrder(item.order, address))
                elif item.id in self._requests:
                    self._deliver(self._requests[item.id], item.update, end)
        for name, items in orders.items():
            member = self.registry.workers.get(name)
            if member is not None:
                member.send(Orders(items))

    def _deliver(
        self,
        life: ClientRequest,
        news: DeliverTokens | DeliverPromptLogprobs | RequestFinished,
        end: RequestFinished | None,
    ) -> None:
        """`end`: follows at once; a stop token and its finish are one Delta."""
        id, now = life.input.id, time.monotonic()
        if isinstance(news, DeliverPromptLogprobs):
            delta = OutputDelta(id, prompt_logprobs=news.prompt_logprobs)
        elif isinstance(news, RequestFinished):
            delta, end = make_delta(id, (), news), news
        else:
            assert self.load_tracker is not None
            self.load_tracker.on_delivery(life, news, now, life.routed_s)
            delta = make_delta(id, news.tokens, end, life.cached_tokens if news.start == 0 else 0)
            booking = self.load_tracker.requests.get(id)
            if booking is not None and booking.prefill_worker is booking.decode_worker:
                self._release_siblings(id, booking.route.decode)
        if self.listener is not None:
            self.listener.on_outputs(EngineOutputs([delta], now_s=now))
        life.output_queue.put_nowait(
            EngineLost(end.error) if end is not None and end.worker_lost else delta
        )
        if end is not None:
            self._close_request(life, end.finish)

    def _close_request(self, life: ClientRequest, finish: FinishReason) -> None:
        del self._requests[life.input.id]
        self._release_siblings(life.input.id, "")
        if self.load_tracker is not None:
            self.load_tracker.on_finished(life.input.id)
        if self.on_timing is not None:
            self.on_timing(life.to_timing(time.monotonic(), finish))

    def _release_siblings(self, id: str, worker: str) -> None:
        """Those that wait for `id` may start: where its prompt is (`worker`), or wherever they will ("")."""
        for twin in self._siblings.pop(id, ()):
            if twin.id in self._requests:
                if worker and self.load_tracker is not None:
                    self.load_tracker.pin_to_worker(twin.id, worker)
                self.frontend.add_request(twin)

    # ------------------------------------------------------------ what the roster tells (roster.Listener)

    def on_ready(self, member: RegisteredWorker, word: WorkerReady) -> None:
        if self.load_tracker is None:
            self.load_tracker = self._make_load_tracker(word)
        self.load_tracker.add_worker(member.name, member.role, self._shape(word))
        if not self._ready.done() and self.registry.complete:
            self.engine_info = self._merged_engine_info()
            self._ready.set_result(self.engine_info)

    def on_report(self, member: RegisteredWorker, word: WorkerReport, before: Stats) -> None:
        if word.stats is not None:
            self._publish_stats(member, before, time.monotonic())
        if word.handoff_stats is not None and (seat := self._tracked_worker(member)) is not None:
            seat.quarantined_pages = word.handoff_stats.pages.get("quarantine", 0)
            self._recover_quarantined(time.monotonic())
        for item in word.items:
            if isinstance(item, RequestTiming):  # of an engine's part of a request
                self._on_engine_timing(item)
        for item in word.items:
            if isinstance(item, handoff_events.HandoffEnded):
                self._on_handoff_ended(member.name, item)
            if not isinstance(item, RequestTiming):
                self.frontend.on_report(member.name, item)
        self._dispatch_pending()

    def on_state_change(self, member: RegisteredWorker) -> None:
        seat = self._tracked_worker(member)
        if seat is not None:
            seat.accepting = member.is_serving

    def on_lost(self, member: RegisteredWorker) -> None:
        if self.load_tracker is not None:
            self.load_tracker.remove_worker(member.name)
        if not self._stopped:
            self.frontend.on_worker_lost(member.name)
            self._dispatch_pending()
        self.lost_stats = merge([self.lost_stats, without_gauges(member.stats)])

    def on_start_failure(self, error: str, blame: str) -> None:
        """Workers must start soundly once; after that they are started again."""
        if not self._ready.done():
            self.error = error
            self._ready.set_exception(EngineFailed(error, blame))
            self._ready.exception()  # whoever waits has it; nobody may wait any more

    def _tracked_worker(self, member: RegisteredWorker) -> TrackedWorker | None:
        return self.load_tracker.workers.get(member.name) if self.load_tracker is not None else None

    def _merged_engine_info(self) -> EngineInfo:
        """What all workers can do."""
        hellos = {
            name: member.ready.engine_info
            for name, member in self.registry.workers.items()
            if member.ready is not None
        }
        return msgspec.structs.replace(
            next(iter(hellos.values())),
            lanes="; ".join(f"{name}: {hello.lanes}" for name, hello in sorted(hellos.items())),
            max_context_tokens=min(hello.max_context_tokens for hello in hellos.values()),
            kv_tokens=min(hello.kv_tokens for hello in hellos.values()),
            notes=tuple(dict.fromkeys(note for hello in hellos.values() for note in hello.notes)),
        )

    def _make_load_tracker(self, ready: WorkerReady) -> LoadTracker:
        prices = build.make_estimator(self.config, self.source, ready.units, ready.gpu)
        wires = LinkBandwidth(
            build.link_bytes_per_s(self.config, ready.gpu), ready.kv_bytes_per_token
        )
        return LoadTracker(
            Router(prices, wires, RoutingRule.from_config(self.config.cluster)),
            self.config.scheduler.prefix_cache,
        )

    def _shape(self, ready: WorkerReady) -> WorkerShape:
        size = ready.engine_info.page_tokens
        chunk = self.config.scheduler.chunk_tokens or (
            GPU_CHUNK_TOKENS if ready.gpu else CHUNK_TOKENS
        )
        slots = self.config.scheduler.max_running
        return WorkerShape(
            ready.units,
            ready.digest.layers,
            size,
            ready.engine_info.kv_tokens // size,
            chunk,
            slots,
        )

    def _on_engine_timing(self, record: RequestTiming) -> None:
        known = handoff_events.handoff_of(record.id)
        life = self._requests.get(known[0].request) if known is not None else None
        if life is not None:
            life.preemptions += record.preemptions
            if (
                life.admitted_s is None and record.admitted_s is not None
            ):  # another clock's, but durations hold
                life.admitted_s = life.arrival_s + record.admitted_s - record.arrival_s

    def _on_handoff_ended(self, worker: str, ended: handoff_events.HandoffEnded) -> None:
        assert self.load_tracker is not None
        self.metrics.observe(ended)
        id = ended.handoff.request
        self.load_tracker.on_handoff_ended(worker, ended)
        if ended.outcome in (
            handoff_events.HandoffOutcome.ADOPTED,
            handoff_events.HandoffOutcome.DECODED_IN_PLACE,
        ):
            self._release_siblings(id, worker)
        life = self._requests.get(id)
        if ended.times is not None and life is not None:
            life.admitted_s = life.arrival_s + ended.times.admitted_s

    # ------------------------------------------------------------ roles and pages

    def _drain(self, change: Change) -> None:
        """Give a worker nothing new of its role, or something again."""
        if self.load_tracker is not None:
            self.load_tracker.apply_change(change)
        member = self.registry.workers.get(change.worker)
        if member is not None:
            member.send(Orders([WorkerOrder(handoff_events.Drain(isinstance(change, StartDrain)))]))

    def _recover_quarantined(self, now: float) -> None:
        """Start a worker of ours again whose pages are in a quarantine that doesn't end; not while another is away."""
        assert self.load_tracker is not None
        if self.registry.missing:
            return
        seats = [
            (name, seat)
            for name, seat in self.load_tracker.workers.items()
            if name in self.registry.supervisor.slots
        ]
        found = [
            WorkerQuarantine(name, seat.quarantined_pages / seat.shape.pages_total, seat.is_empty)
            for name, seat in seats
        ]
        for change in self.quarantine.tick(now, found):
            log.warning("pages in quarantine: %s", change)
            if isinstance(change, ReplaceWorker):
                self.registry.workers[change.worker].send(Shutdown())
            else:
                self._drain(change)

    async def _rebalance_roles(self, elastic: RoleRebalancer) -> None:
        """Change the role of a worker when a whole pool is predicted to miss its target."""
        while True:
            await asyncio.sleep(self.config.cluster.elastic_s)
            if self.load_tracker is None:
                continue
            for change in elastic.tick(time.monotonic(), self.load_tracker.worker_loads()):
                log.info("roles: %s", change)
                self._drain(change)
                member = self.registry.workers.get(change.worker)
                if isinstance(change, CommitRole):
                    self.metrics.role_changes += 1
                    if member is not None:
                        member.role = change.role


# ---------------------------------------------------------------- small things


def make_rebalancer(config: Config) -> RoleRebalancer | None:
    """Raises ConfigError if roles are to change and there is no target to judge by."""
    ttft_s, tpot_s = config.scheduler.ttft_s, config.scheduler.tpot_s
    if not config.cluster.elastic:
        return None
    if ttft_s is None or tpot_s is None:
        raise ConfigError(
            "elastic is on, and there are no targets to judge by: set ttft_s and tpot_s"
        )
    return RoleRebalancer(RebalanceTargets(ttft_s, tpot_s))
