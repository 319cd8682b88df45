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
from counterpoint.disagg.link_bandwidth import LinkBandwidth
from counterpoint.disagg.load_tracker import LoadTracker, TrackedWorker, WorkerShape
from counterpoint.disagg.pool_frontend import PoolFrontend, Route, ToWorker
from counterpoint.disagg.quarantine_recovery import (
    QuarantineRecovery,
    ReplaceWorker,
    WorkerQuarantine,
)
from counterpoint.disagg.role_rebalancer import (
    Change,
    CommitRole,
    RebalanceTargets,
    RoleRebalancer,
    StartDrain,
)
from counterpoint.disagg.router import Router, RoutingRule
from counterpoint.serve.observability.merge_stats import added_rows, counters, total
from counterpoint.serve.observability.pool_lanes import WorkerLanes, named_lanes, staged
from counterpoint.serve.observability.pool_metrics import PoolMetrics
from counterpoint.serve.worker.client_requests import ClientRequest, alike, delta_of, with_ends
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
        self.on_record = on_record
        self.listener = listener
        self.hello: EngineInfo | None = None
        self.error = ""
        self.roster = WorkerRegistry(config, system, self)
        self.gone = Stats()  # what workers that are no longer there had counted
        self.routing: LoadTracker | None = None
        on_loss = OnLoss(cluster.on_loss)
        self.front = PoolFrontend(self._pick, cluster.handoff_deadline_s, on_loss=on_loss)
        self.metrics = PoolMetrics(self.roster.look, lambda: self.routing)
        self.elastic = make_elastic(config)
        self.wear = QuarantineRecovery()
        self._lives: dict[str, ClientRequest] = {}
        self._twins: dict[
            str, list[AddRequest]
        ] = {}  # request -> those of the same prompt that wait for it
        self._shaping: asyncio.Task[None] | None = None
        self._stopped = self._loading = False
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------ life

    async def start(self) -> EngineInfo:
        """Start the workers and wait until each is ready (if there are none, until one has joined). Raises EngineFailed."""
        self._loading = True
        await self.roster.start()
        hello = await asyncio.shield(self._ready)
        self._loading = False
        if self.elastic is not None:
            self._shaping = asyncio.create_task(self._shape_pools(self.elastic))
        return hello

    async def close(self) -> None:
        """End every stream and the workers of this machine. May be called at any time, and again."""
        self._stopped = True
        self.fail_streams("the server is shutting down")
        if self._shaping is not None:
            self._shaping.cancel()
        await self.roster.close()

    # ------------------------------------------------------------ what is here

    @property
    def state(self) -> EngineStatus:
        if self._stopped:
            return "stopped"
        if self.roster.serving:
            return "loading" if self._loading else "ready"
        if any(member.frozen for member in self.roster.members.values()):
            return "frozen"
        return "loading" if self._loading or self.roster.members else "dead"

    @property
    def stats(self) -> Stats:
        return total([self.gone, *(member.stats for member in self.roster.members.values())])

    def places(self) -> list[WorkerLanes]:
        """Where the workers stand in a picture of them all, those of ours also while they are missing."""
        found = []
        for number, name in enumerate(
            dict.fromkeys((*self.roster.crew.posts, *self.roster.members))
        ):
            member = self.roster.members.get(name)
            ready = member.ready if member is not None else None
            found.append(
                WorkerLanes(number, name, ready.units, ready.hello.roles)
                if ready is not None
                else WorkerLanes(number, name)
            )
        return found

    def playing(self, now_s: float) -> list[LaneStep]:
        """The steps that run now."""
        members = self.roster.members
        return [
            step
            for place in self.places()
            if place.name in members
            for step in staged(place, members[place.name].stats.playing, now_s)
        ]

    def _show(self, member: RegisteredWorker, before: Stats, now_s: float) -> None:
        """Tell the listener what all have counted, and the steps that are new from `member`."""
        if self.listener is None:
            return
        places = {place.name: place for place in self.places()}
        lanes = [
            named_lanes(places[name], other.stats) for name, other in self.roster.members.items()
        ]
        fresh = max(0, min(member.stats.steps - before.steps, len(member.stats.recent)))
        recent = staged(
            places[member.name], member.stats.recent[len(member.stats.recent) - fresh :], now_s
        )
        stats = msgspec.structs.replace(self.stats, recent=recent, lane_s=added_rows(lanes))
        self.listener.heard(EngineOutputs([], now_s, stats))

    def health(self) -> dict[str, Any]:
        """Of a pool that serves: ok, or degraded with what is missing."""
        missing = self.roster.missing
        return {"status": "degraded", "missing": missing} if missing else {"status": "ok"}

    def check(self) -> None:
        """Raises EngineLost unless some worker can take requests."""
        if self.state != "ready":
            reasons = {"loading": "the workers are still loading", "frozen": "no worker responds"}
            raise EngineLost(reasons.get(self.state, "no worker is there"))

    # ------------------------------------------------------------ streams (client.Backend)

    def open(self, arrives: Iterable[AddRequest], timeout_s: float | None = None) -> OutputStream:
        return OutputStream(self, arrives, timeout_s)

    def enter(self, arrives: Sequence[AddRequest], mail: OutputQueue) -> None:
        self.check()
        if self.listener is not None:
            self.listener.entered(arrives)
        now = time.monotonic()
        self._lives |= {arrive.id: ClientRequest(arrive, now, mail=mail) for arrive in arrives}
        for first, *twins in alike(
            arrives, 2 * self.hello.page_tokens if self.hello is not None else 0
        ):
            if twins:
                self._twins[first.id] = twins
            self.front.submit(first)
        self._flow()

    def leave(self, id: str) -> bool:
        life = self._lives.get(id)
        if life is None:
            return False
        self.front.withdraw(id)
        if self.listener is not None:
            self.listener.heard(
                EngineOutputs([OutputDelta(id, finish=FinishReason.ABORT)], time.monotonic())
            )
        self._close(life, FinishReason.ABORT)
        self._flow()
        return True

    def fail_streams(self, reason: str) -> None:
        """End every open stream with EngineLost, and abort its requests."""
        for life in tuple(self._lives.values()):
            life.mail.put_nowait(EngineLost(reason))
            self.leave(life.arrive.id)

    # ------------------------------------------------------------ what the front says

    def _pick(self, arrive: AddRequest, avoid: str, prefill: str) -> Route | None:
        assert self.routing is not None
        if not prefill:
            self._lives[arrive.id].picked_s = time.monotonic()
        return self.routing.pick(arrive, avoid, prefill)

    def _flow(self) -> None:
        """Tell workers and clients what is to be told."""
        orders: dict[str, list[WorkerOrder]] = {}
        while items := self.front.take():  # what is delivered may set others going
            for item, end in with_ends(items):
                if isinstance(item, ToWorker):
                    to = self.roster.members.get(item.decode)
                    address = to.ready.address if to is not None and to.ready is not None else None
                    orders.setdefault(item.worker, []).append(WorkerOrder(item.order, address))
                elif item.id in self._lives:
                    self._deliver(self._lives[item.id], item.news, end)
        for name, items in orders.items():
            member = self.roster.members.get(name)
            if member is not None:
                member.say(Orders(items))

    def _deliver(
        self,
        life: ClientRequest,
        news: DeliverTokens | DeliverPromptLogprobs | RequestFinished,
        end: RequestFinished | None,
    ) -> None:
        """`end`: follows at once; a stop token and its finish are one Delta."""
        id, now = life.arrive.id, time.monotonic()
        if isinstance(news, DeliverPromptLogprobs):
            delta = OutputDelta(id, prompt_logprobs=news.prompt_logprobs)
        elif isinstance(news, RequestFinished):
            delta, end = delta_of(id, (), news), news
        else:
            assert self.routing is not None
            if news.start == 0:
                self.routing.began(id, now - life.picked_s)
            self.routing.grew(id, tuple(sampled.token for sampled in news.tokens))
            life.token_s += [now] * len(news.tokens)
            if news.start == 0:
                life.cached_tokens = news.tokens[0].cached_tokens
            delta = delta_of(id, news.tokens, end, life.cached_tokens if news.start == 0 else 0)
            booking = self.routing.bookings.get(id)
            if booking is not None and booking.source is booking.target:
                self._fork(id, booking.route.decode)
        if self.listener is not None:
            self.listener.heard(EngineOutputs([delta], now_s=now))
        life.mail.put_nowait(EngineLost(end.error) if end is not None and end.lost else delta)
        if end is not None:
            self._close(life, end.finish)

    def _close(self, life: ClientRequest, finish: FinishReason) -> None:
        del self._lives[life.arrive.id]
        self._fork(life.arrive.id, "")
        if self.routing is not None:
            self.routing.ended(life.arrive.id)
        if self.on_record is not None:
            self.on_record(life.record(time.monotonic(), finish))

    def _fork(self, id: str, worker: str) -> None:
        """Those that wait for `id` may start: where its prompt is (`worker`), or wherever they will ("")."""
        for twin in self._twins.pop(id, ()):
            if twin.id in self._lives:
                if worker and self.routing is not None:
                    self.routing.tie(twin.id, worker)
                self.front.submit(twin)

    # ------------------------------------------------------------ what the roster tells (roster.Listener)

    def ready(self, member: RegisteredWorker, word: WorkerReady) -> None:
        if self.routing is None:
            self.routing = self._make_routing(word)
        self.routing.seat(member.name, member.role, self._shape(word))
        if not self._ready.done() and self.roster.complete:
            self.hello = self._joint_hello()
            self._ready.set_result(self.hello)

    def said(self, member: RegisteredWorker, word: WorkerReport, before: Stats) -> None:
        if word.stats is not None:
            self._show(member, before, time.monotonic())
        if word.census is not None and (seat := self._seat(member)) is not None:
            seat.lost_pages = word.census.pages.get("quarantine", 0)
            self._renew(time.monotonic())
        for item in word.items:
            if isinstance(item, RequestTiming):  # of an engine's part of a request
                self._note_record(item)
        for item in word.items:
            if isinstance(item, handoff_events.HandoffEnded):
                self._note_ended(member.name, item)
            if not isinstance(item, RequestTiming):
                self.front.report(member.name, item)
        self._flow()

    def changed(self, member: RegisteredWorker) -> None:
        seat = self._seat(member)
        if seat is not None:
            seat.willing = member.serves

    def lost(self, member: RegisteredWorker) -> None:
        if self.routing is not None:
            self.routing.unseat(member.name)
        if not self._stopped:
            self.front.lost(member.name)
            self._flow()
        self.gone = total([self.gone, counters(member.stats)])

    def failed(self, error: str, blame: str) -> None:
        """Workers must start soundly once; after that they are started again."""
        if not self._ready.done():
            self.error = error
            self._ready.set_exception(EngineFailed(error, blame))
            self._ready.exception()  # whoever waits has it; nobody may wait any more

    def _seat(self, member: RegisteredWorker) -> TrackedWorker | None:
        return self.routing.seats.get(member.name) if self.routing is not None else None

    def _joint_hello(self) -> EngineInfo:
        """What all workers can do."""
        hellos = {
            name: member.ready.hello
            for name, member in self.roster.members.items()
            if member.ready is not None
        }
        return msgspec.structs.replace(
            next(iter(hellos.values())),
            lanes="; ".join(f"{name}: {hello.lanes}" for name, hello in sorted(hellos.items())),
            max_context_tokens=min(hello.max_context_tokens for hello in hellos.values()),
            kv_tokens=min(hello.kv_tokens for hello in hellos.values()),
            notes=tuple(dict.fromkeys(note for hello in hellos.values() for note in hello.notes)),
        )

    def _make_routing(self, ready: WorkerReady) -> LoadTracker:
        prices = build.estimator(self.config, self.source, ready.units, ready.gpu)
        wires = LinkBandwidth(
            build.link_bytes_per_s(self.config, ready.gpu), ready.kv_bytes_per_token
        )
        return LoadTracker(
            Router(prices, wires, RoutingRule.of(self.config.cluster)),
            self.config.scheduler.prefix_cache,
        )

    def _shape(self, ready: WorkerReady) -> WorkerShape:
        size = ready.hello.page_tokens
        chunk = self.config.scheduler.chunk_tokens or (
            GPU_CHUNK_TOKENS if ready.gpu else CHUNK_TOKENS
        )
        slots = self.config.scheduler.max_running
        return WorkerShape(
            ready.units, ready.digest.layers, size, ready.hello.kv_tokens // size, chunk, slots
        )

    def _note_record(self, record: RequestTiming) -> None:
        known = handoff_events.handoff_of(record.id)
        life = self._lives.get(known[0].request) if known is not None else None
        if life is not None:
            life.preemptions += record.preemptions
            if (
                life.admitted_s is None and record.admitted_s is not None
            ):  # another clock's, but durations hold
                life.admitted_s = life.arrival_s + record.admitted_s - record.arrival_s

    def _note_ended(self, worker: str, ended: handoff_events.HandoffEnded) -> None:
        assert self.routing is not None
        self.metrics.observe(ended)
        id = ended.handoff.request
        if ended.outcome is handoff_events.HandoffOutcome.ADOPTED:
            self.routing.adopted(id)
            self._fork(id, worker)
        elif ended.outcome is handoff_events.HandoffOutcome.STAYED:
            self.routing.stayed(id)
            self._fork(id, worker)
        life = self._lives.get(id)
        if ended.times is not None:
            self.routing.sent(worker, ended.to, ended.times)
            if life is not None:
                life.admitted_s = life.arrival_s + ended.times.admitted_s

    # ------------------------------------------------------------ roles and pages

    def _drain(self, change: Change) -> None:
        """Give a worker nothing new of its role, or something again."""
        if self.routing is not None:
            self.routing.change(change)
        member = self.roster.members.get(change.worker)
        if member is not None:
            member.say(Orders([WorkerOrder(handoff_events.Drain(isinstance(change, StartDrain)))]))

    def _renew(self, now: float) -> None:
        """Start a worker of ours again whose pages are in a quarantine that doesn't end; not while another is away."""
        assert self.routing is not None
        if self.roster.missing:
            return
        seats = [
            (name, seat)
            for name, seat in self.routing.seats.items()
            if name in self.roster.crew.posts
        ]
        found = [
            WorkerQuarantine(name, seat.lost_pages / seat.shape.pages_total, seat.empty)
            for name, seat in seats
        ]
        for change in self.wear.tick(now, found):
            log.warning("pages in quarantine: %s", change)
            if isinstance(change, ReplaceWorker):
                self.roster.members[change.worker].say(Shutdown())
            else:
                self._drain(change)

    async def _shape_pools(self, elastic: RoleRebalancer) -> None:
        """Change the role of a worker when a whole pool is predicted to miss its target."""
        while True:
            await asyncio.sleep(self.config.cluster.elastic_s)
            if self.routing is None:
                continue
            for change in elastic.tick(time.monotonic(), self.routing.loads()):
                log.info("roles: %s", change)
                self._drain(change)
                member = self.roster.members.get(change.worker)
                if isinstance(change, CommitRole):
                    self.metrics.role_changes += 1
                    if member is not None:
                        member.role = change.role


# ---------------------------------------------------------------- small things


def make_elastic(config: Config) -> RoleRebalancer | None:
    """Raises ConfigError if roles are to change and there is no target to judge by."""
    ttft_s, tpot_s = config.scheduler.ttft_s, config.scheduler.tpot_s
    if not config.cluster.elastic:
        return None
    if ttft_s is None or tpot_s is None:
        raise ConfigError(
            "elastic is on, and there are no targets to judge by: set ttft_s and tpot_s"
        )
    return RoleRebalancer(RebalanceTargets(ttft_s, tpot_s))
