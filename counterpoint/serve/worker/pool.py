"""Pool: many workers behind EngineClient's interface.

Owns: the streams that are open in the workers, and what their clients have been sent. Promises: a
stream that is left early is aborted wherever its request runs; what ran on a lost worker goes on
elsewhere or ends with an error; the pool serves while any worker does.
Must not: know HTTP or text, decide where a request goes (disagg/load_tracker.py), or hold
connections (registry.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from counterpoint.config import Config
from counterpoint.disagg import handoff_events
from counterpoint.disagg.dispatch import (
    DeliverPromptLogprobs,
    DeliverTokens,
    OnLoss,
    RequestFinished,
)
from counterpoint.disagg.load_tracker import LoadTracker, TrackedWorker
from counterpoint.disagg.pool_frontend import PoolFrontend, Route, ToWorker
from counterpoint.disagg.role_rebalancer import (
    Change,
    CommitRole,
    QuarantineRecovery,
    ReplaceWorker,
    RoleRebalancer,
    StartDrain,
)
from counterpoint.serve.observability.merge_stats import merge, without_gauges
from counterpoint.serve.observability.pool_lanes import PoolLanes
from counterpoint.serve.observability.pool_metrics import PoolMetrics
from counterpoint.serve.worker import pool_setup
from counterpoint.serve.worker.client_requests import (
    ClientRequest,
    group_siblings,
    make_delta,
    pair_finishes,
)
from counterpoint.serve.worker.engine_client import EngineClient, OnTiming
from counterpoint.serve.worker.engine_runner import BUILDER
from counterpoint.serve.worker.registry import RegisteredWorker, WorkerRegistry
from counterpoint.serve.worker.streams import (
    EngineLost,
    EngineStatus,
    OutputListener,
    OutputQueue,
)
from counterpoint.serve.worker.wire import (
    EngineFailure,
    EngineInfo,
    EngineOutputs,
    Orders,
    Shutdown,
    WorkerOrder,
    WorkerReady,
)
from counterpoint.spec.source import ModelSource
from counterpoint.stats import Stats
from counterpoint.types import AddRequest, FinishReason, OutputDelta, RequestTiming

log = logging.getLogger("counterpoint")


class Pool(EngineClient):
    """`system` names the function that builds a worker's engine. Raises ConfigError."""

    reasons = {
        "loading": "the workers are still loading",
        "frozen": "no worker responds",
        "dead": "no worker is there",
        "stopped": "no worker is there",
    }

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        on_timing: OnTiming | None = None,
        system: str = BUILDER,
        listener: OutputListener | None = None,
    ) -> None:
        super().__init__(on_timing, listener)
        self.config = config
        self.source = source
        self.registry = WorkerRegistry(
            pool_setup.make_plan(config, system),
            pool_setup.make_listen_address(config),
            pool_setup.make_heartbeat_limits(config),
            self,
        )
        self.lost_stats = Stats()  # what workers that are no longer there had counted
        self.load_tracker: LoadTracker | None = None
        self.frontend = PoolFrontend(
            self._route, config.cluster.handoff_deadline_s, on_loss=OnLoss(config.cluster.on_loss)
        )
        self.lanes = PoolLanes(self.registry)
        self.metrics = PoolMetrics(self.registry.worker_states, lambda: self.load_tracker)
        self.rebalancer = pool_setup.make_rebalancer(config)
        self.quarantine = QuarantineRecovery()
        self._requests: dict[str, ClientRequest] = {}
        # By request: those of the same prompt, which start when its KV is there.
        self._siblings: dict[str, list[AddRequest]] = {}
        self._rebalancing: asyncio.Task[None] | None = None
        self._loading = False

    # ------------------------------------------------------------ life

    async def start(self) -> EngineInfo:
        """Wait until each worker that this server starts, or any other, is ready."""
        self._loading = True
        info = await super().start()
        self._loading = False
        if self.rebalancer is not None:
            self._rebalancing = asyncio.create_task(self._rebalance_roles(self.rebalancer))
        return info

    async def close(self) -> None:
        self._stopped = True
        if self._rebalancing is not None:
            self._rebalancing.cancel()
        await super().close()

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
        workers = self.registry.workers.values()
        return merge([self.lost_stats, *(member.stats for member in workers)])

    def health(self) -> dict[str, Any]:
        """Of a pool that serves: ok, or degraded with the workers that are missing."""
        missing = self.registry.missing
        return {"status": "degraded", "missing": missing} if missing else {"status": "ok"}

    # ------------------------------------------------------------ streams

    def add_requests(self, arrives: Sequence[AddRequest], queue: OutputQueue) -> None:
        self.check()
        if self.listener is not None:
            self.listener.on_requests(arrives)
        now_s = time.monotonic()
        self._requests |= {
            arrive.id: ClientRequest(arrive, now_s, output_queue=queue) for arrive in arrives
        }
        page_tokens = self.engine_info.page_tokens if self.engine_info is not None else 0
        for first, *siblings in group_siblings(arrives, 2 * page_tokens):
            if siblings:
                self._siblings[first.id] = siblings
            self.frontend.add_request(first)
        self._dispatch_pending()

    def abort(self, id: str) -> bool:
        request = self._requests.get(id)
        if request is None:
            return False
        self.frontend.abort(id)
        if self.listener is not None:
            aborted = OutputDelta(id, finish_reason=FinishReason.ABORT)
            self.listener.on_outputs(EngineOutputs([aborted], time.monotonic()))
        self._close_request(request, FinishReason.ABORT)
        self._dispatch_pending()
        return True

    def fail_streams(self, reason: str) -> None:
        for request in tuple(self._requests.values()):
            request.output_queue.put_nowait(EngineLost(reason))
            self.abort(request.input.id)

    # ------------------------------------------------------------ what the frontend decides

    def _route(self, arrive: AddRequest, avoid: str, prefill: str) -> Route | None:
        assert self.load_tracker is not None
        if not prefill:
            self._requests[arrive.id].routed_s = time.monotonic()
        return self.load_tracker.choose_route(arrive, avoid, prefill)

    def _dispatch_pending(self) -> None:
        """Send pending orders to workers and outputs to clients."""
        orders: dict[str, list[WorkerOrder]] = {}
        while items := self.frontend.take_items():  # a delivery may start other requests
            for item, end in pair_finishes(items):
                if isinstance(item, ToWorker):
                    to = self.registry.workers.get(item.decode_worker)
                    ready = to.ready if to is not None else None
                    address = pool_setup.endpoint_of(ready).address if ready is not None else None
                    orders.setdefault(item.worker, []).append(WorkerOrder(item.order, address))
                elif item.id in self._requests:
                    self._deliver(self._requests[item.id], item.update, end)
        for name, items in orders.items():
            member = self.registry.workers.get(name)
            if member is not None:
                member.send(Orders(items))

    def _deliver(
        self,
        request: ClientRequest,
        update: DeliverTokens | DeliverPromptLogprobs | RequestFinished,
        end: RequestFinished | None,
    ) -> None:
        """`end`: follows at once; a stop token and its finish are one OutputDelta."""
        id, now_s = request.input.id, time.monotonic()
        if isinstance(update, DeliverPromptLogprobs):
            delta = OutputDelta(id, prompt_logprobs=update.prompt_logprobs)
        elif isinstance(update, RequestFinished):
            delta, end = make_delta(id, (), update), update
        else:
            delta = self._take_tokens(request, update, end, now_s)
        if self.listener is not None:
            self.listener.on_outputs(EngineOutputs([delta], now_s=now_s))
        request.output_queue.put_nowait(
            EngineLost(end.error) if end is not None and end.worker_lost else delta
        )
        if end is not None:
            self._close_request(request, end.finish)

    def _take_tokens(
        self,
        request: ClientRequest,
        update: DeliverTokens,
        end: RequestFinished | None,
        now_s: float,
    ) -> OutputDelta:
        id, tracker = request.input.id, self.load_tracker
        assert tracker is not None
        tracker.on_delivery(request, update, now_s, request.routed_s)
        cached_tokens = request.cached_tokens if update.start == 0 else 0
        routed = tracker.requests.get(id)
        if routed is not None and routed.prefill_worker is routed.decode_worker:
            self._release_siblings(id, routed.route.decode)
        return make_delta(id, update.tokens, end, cached_tokens)

    def _close_request(self, request: ClientRequest, finish: FinishReason) -> None:
        del self._requests[request.input.id]
        self._release_siblings(request.input.id, "")
        if self.load_tracker is not None:
            self.load_tracker.on_finished(request.input.id)
        if self.on_timing is not None:
            self.on_timing(request.to_timing(time.monotonic(), finish))

    def _release_siblings(self, id: str, worker: str) -> None:
        """Start those that wait for `id`: on `worker`, where its prompt is, or on any ("")."""
        for sibling in self._siblings.pop(id, ()):
            if sibling.id in self._requests:
                if worker and self.load_tracker is not None:
                    self.load_tracker.pin_to_worker(sibling.id, worker)
                self.frontend.add_request(sibling)

    # ------------------------------------------------------------ registry.RegistryListener

    def on_progress(self, member: RegisteredWorker, stage: str) -> None:
        log.info("%s: %s", member.name, stage)

    def on_ready(self, member: RegisteredWorker, ready: WorkerReady) -> None:
        endpoint = pool_setup.endpoint_of(ready)
        log.info(
            "worker %s (%s) is ready at %s:%d: %s; KV over %s",
            member.name,
            member.role,
            *endpoint.address,
            ready.engine_info.lanes,
            "/".join(endpoint.transports),
        )
        if self.load_tracker is None:
            self.load_tracker = pool_setup.make_load_tracker(self.config, self.source, ready)
        self.load_tracker.add_worker(
            member.name, member.role, pool_setup.worker_shape(self.config, ready)
        )
        if self.registry.complete:
            self._start_succeeded(pool_setup.merge_engine_info(self.registry.workers.values()))

    def on_report(self, member: RegisteredWorker, outputs: EngineOutputs, before: Stats) -> None:
        now_s = time.monotonic()
        if outputs.stats is not None and self.listener is not None:
            stats = self.lanes.stats_after(member, before, self.stats, now_s)
            self.listener.on_outputs(EngineOutputs([], now_s, stats))
        tracked = self._tracked_worker(member)
        if outputs.handoff_stats is not None and tracked is not None:
            tracked.quarantined_pages = outputs.handoff_stats.pages.get("quarantine", 0)
            self._recover_quarantined(now_s)
        for item in outputs.items:
            if isinstance(item, RequestTiming):  # of an engine's part of a request
                self._on_engine_timing(item)
        for item in outputs.items:
            if isinstance(item, handoff_events.HandoffEnded):
                self._on_handoff_ended(member.name, item)
            if not isinstance(item, RequestTiming):
                self.frontend.on_report(member.name, item)
        self._dispatch_pending()

    def on_state_change(self, member: RegisteredWorker) -> None:
        tracked = self._tracked_worker(member)
        if tracked is not None:
            tracked.accepting = member.is_serving
        if member.frozen:
            log.error(
                "worker %s has not been heard of for %.1f s", member.name, member.since_message_s
            )
        elif not member.leaving:
            log.warning("worker %s responds again", member.name)

    def on_silent(self, member: RegisteredWorker) -> None:
        silence = f"has not been heard of for {member.since_message_s:.1f} s"
        self.registry.remove(member, f"worker {member.name} {silence}: given up")
        self.registry.supervisor.kill(member.name)

    def on_lost(self, member: RegisteredWorker, reason: str) -> None:
        if self.load_tracker is not None:
            self.load_tracker.remove_worker(member.name)
        if not self._stopped:
            log.error("%s", reason)
            self.frontend.on_worker_lost(member.name)
            self._dispatch_pending()
        self.lost_stats = merge([self.lost_stats, without_gauges(member.stats)])

    def on_failure(self, member: RegisteredWorker, failure: EngineFailure) -> None:
        log.error("worker %s: %s", member.name, failure.error)
        self._fail_start(f"worker {member.name}: {failure.error}", failure.blame)

    def on_exit(self, name: str, how: str) -> None:
        reason = f"worker {name} has ended ({how})"
        member = self.registry.workers.get(name)
        if member is not None:
            self.registry.remove(member, reason)
        self._fail_start(reason, "engine")

    def _tracked_worker(self, member: RegisteredWorker) -> TrackedWorker | None:
        return self.load_tracker.workers.get(member.name) if self.load_tracker is not None else None

    def _on_engine_timing(self, timing: RequestTiming) -> None:
        known = handoff_events.handoff_of(timing.id)
        request = self._requests.get(known[0].request) if known is not None else None
        if request is not None:
            request.add_engine_timing(timing)

    def _on_handoff_ended(self, worker: str, ended: handoff_events.HandoffEnded) -> None:
        assert self.load_tracker is not None
        self.metrics.observe(ended)
        self.load_tracker.on_handoff_ended(worker, ended)
        id = ended.handoff.request
        if ended.outcome in (
            handoff_events.HandoffOutcome.ADOPTED,
            handoff_events.HandoffOutcome.DECODED_IN_PLACE,
        ):
            self._release_siblings(id, worker)
        request = self._requests.get(id)
        if ended.times is not None and request is not None:
            request.admitted_s = request.arrival_s + ended.times.admitted_s

    # ------------------------------------------------------------ roles and quarantined pages

    def _drain(self, change: Change) -> None:
        """Give a worker nothing new of its role, or something again."""
        if self.load_tracker is not None:
            self.load_tracker.apply_change(change)
        member = self.registry.workers.get(change.worker)
        if member is not None:
            member.send(Orders([WorkerOrder(handoff_events.Drain(isinstance(change, StartDrain)))]))

    def _recover_quarantined(self, now_s: float) -> None:
        """Restart a worker whose pages stay in quarantine, unless another is missing."""
        assert self.load_tracker is not None
        if self.registry.missing:
            return
        workers = pool_setup.quarantines(self.load_tracker, self.registry.supervisor.slots)
        for change in self.quarantine.tick(now_s, workers):
            log.warning("pages in quarantine: %s", change)
            if isinstance(change, ReplaceWorker):
                self.registry.workers[change.worker].send(Shutdown())
            else:
                self._drain(change)

    async def _rebalance_roles(self, rebalancer: RoleRebalancer) -> None:
        """Change a worker's role when a whole pool is predicted to miss its target."""
        while True:
            await asyncio.sleep(self.config.cluster.elastic_s)
            if self.load_tracker is None:
                continue
            for change in rebalancer.tick(time.monotonic(), self.load_tracker.worker_loads()):
                log.info("roles: %s", change)
                self._drain(change)
                member = self.registry.workers.get(change.worker)
                if isinstance(change, CommitRole):
                    self.metrics.role_changes += 1
                    if member is not None:
                        member.role = change.role
