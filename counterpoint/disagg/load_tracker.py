"""What runs where in a pool, as the frontend knows it, and the choice of workers from that.

Owns: for every unfinished request its workers, its size and its progress; from them each worker's
load; the lengths of recent answers. Promises: loads are current, since every request and every
token passes the frontend (a worker's own report would lag by a round trip, and a burst would all go
to one idle worker); a request finds a worker as long as an accepting one could ever hold it.
Must not: read a clock, or talk to workers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from counterpoint.core.page_pool import page_hashes, root_hash
from counterpoint.core.state import OutputLengths
from counterpoint.disagg.dispatch import DeliverTokens
from counterpoint.disagg.handoff_events import HandoffEnded, HandoffOutcome, HandoffTimes
from counterpoint.disagg.pool_frontend import Route
from counterpoint.disagg.role_rebalancer import Change, CommitRole, StartDrain, WorkerLoad
from counterpoint.disagg.router import (
    RouteChoice,
    RouteQuery,
    Router,
    RoutingRule,
    WorkerView,
    replica_rule,
)
from counterpoint.disagg.routing_feedback import PrefixIndex, TtftCorrection
from counterpoint.types import AddRequest, BatchShape, Role

if TYPE_CHECKING:
    from counterpoint.core.request import RequestLifetime


class WorkerShape(msgspec.Struct, frozen=True):
    """What never changes about a worker. `slots`: requests that may run at once."""

    units: int
    layers: int
    page_tokens: int
    pages_total: int
    chunk_tokens: int = 512
    slots: int = 1 << 30


@dataclass(slots=True, eq=False)
class TrackedWorker:
    """A worker and the load on it. `draining`: it is to change its role or to be restarted.
    `quarantined_pages`: by its own report."""

    role: Role
    shape: WorkerShape
    accepting: bool = True
    draining: bool = False
    quarantined_pages: int = 0
    prefill_tokens: int = 0
    prefill_squares: int = 0
    prefill_reused: int = 0
    num_prefills: int = 0
    num_decodes: int = 0
    context_tokens: int = 0
    num_pages: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.num_prefills or self.num_decodes or self.num_pages)

    @property
    def pages_free(self) -> int:
        """Below 0 if requests wait for pages."""
        return self.shape.pages_total - self.num_pages - self.quarantined_pages

    @property
    def pending(self) -> BatchShape:
        layers = self.shape.layers
        return BatchShape(
            prefill_tokens=self.prefill_tokens,
            prefill_squares=self.prefill_squares,
            prefill_reused=self.prefill_reused,
            prefill_requests=self.num_prefills,
            samples=self.num_prefills,
            last_layer=layers,
            layers=layers,
        )

    @property
    def running(self) -> BatchShape:
        layers, batch = self.shape.layers, self.num_decodes
        return BatchShape.decode(batch, self.context_tokens, layers)

    def make_view(self, name: str, ttft_factor: float = 1.0) -> WorkerView:
        shape = self.shape
        return WorkerView(
            name=name,
            role=self.role,
            units=shape.units,
            layers=shape.layers,
            page_tokens=shape.page_tokens,
            pages_free=max(0, self.pages_free),
            pages_total=shape.pages_total,
            slots_free=shape.slots - self.num_decodes,
            pending=self.pending,
            running=self.running,
            chunk_tokens=shape.chunk_tokens,
            accepting=self.accepting and not self.draining,
            ttft_factor=ttft_factor,
        )


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """An unfinished request. A worker that starts again is another TrackedWorker.

    `tokens`: prompt and answer so far, of which `new_tokens` must be computed. `page_hashes`: of
    the full pages. `uncorrected_ttft_s`: what prices alone predicted; 0: do not learn from it.
    """

    request: AddRequest
    route: Route
    prefill_worker: TrackedWorker
    decode_worker: TrackedWorker
    tokens: int
    new_tokens: int
    page_hashes: list[bytes] = field(default_factory=list)
    answer_tokens: list[int] = field(default_factory=list)
    prefilling: bool = True
    handed_over: bool = False  # the prefill worker holds no pages of it
    predicted_ttft_s: float = 0.0
    uncorrected_ttft_s: float = 0.0

    def add_load(self, sign: int) -> None:
        """Put its load on its workers (1), or take it off (-1)."""
        source, target = self.prefill_worker, self.decode_worker
        if self.prefilling:
            source.prefill_tokens += sign * self.new_tokens
            source.prefill_squares += sign * self.new_tokens * self.new_tokens
            source.prefill_reused += sign * self.new_tokens * (self.tokens - self.new_tokens)
            source.num_prefills += sign
        target.num_decodes += sign
        target.context_tokens += sign * self.tokens
        target.num_pages += sign * -(-self.tokens // target.shape.page_tokens)
        if source is not target and not self.handed_over:
            source.num_pages += sign * -(-self.tokens // source.shape.page_tokens)


class LoadTracker:
    """`route_counts`: by reason (router.py, and fork)."""

    def __init__(
        self, router: Router, prefix_cache: bool = True, prefixes: PrefixIndex | None = None
    ) -> None:
        self.router = router
        self.prefix_cache = prefix_cache
        self.prefixes = prefixes or PrefixIndex()
        self.ttft_correction = TtftCorrection()
        self.workers: dict[str, TrackedWorker] = {}
        self.requests: dict[str, RoutedRequest] = {}
        self.output_lengths = OutputLengths()
        self.route_counts: dict[str, int] = {}
        self._pinned: dict[str, str] = {}  # request -> the worker that has all of its prompt

    # ------------------------------------------------------------ workers

    def add_worker(self, worker: str, role: Role, shape: WorkerShape) -> None:
        """It starts empty."""
        self.workers[worker] = TrackedWorker(role, shape)

    def remove_worker(self, worker: str) -> None:
        """It is gone with its cache. Its requests are routed again, or finish."""
        self.workers.pop(worker, None)
        self.prefixes.forget(worker)
        self.router.link_bandwidth.forget(worker)
        self.ttft_correction.forget(worker)

    def worker_loads(self) -> list[WorkerLoad]:
        """For the RoleRebalancer: predictions for a next request like those that run."""
        loads = []
        for name, worker in self.workers.items():
            queue_s = self.router.seconds(worker.pending, worker.shape.units)
            ttft_s = self.ttft_correction.factor(name) * queue_s
            loads.append(
                WorkerLoad(
                    name=name,
                    role=worker.role,
                    ttft_s=ttft_s,
                    compute_s=ttft_s / max(1, worker.num_prefills),
                    tpot_s=self.router.seconds(worker.running, worker.shape.units),
                    kv_share=min(1.0, worker.num_pages / worker.shape.pages_total),
                    is_drained=worker.is_empty,
                )
            )
        return loads

    def apply_change(self, change: Change) -> None:
        worker = self.workers.get(change.worker)
        if worker is not None:
            worker.draining = isinstance(change, StartDrain)
            if isinstance(change, CommitRole):
                worker.role = change.role

    # ------------------------------------------------------------ routes

    def choose_route(self, request: AddRequest, avoid: str, prefilled_on: str) -> Route | None:
        """The request counts as load there from now on. None: no worker could ever hold it."""
        views = [
            worker.make_view(name, self.ttft_correction.factor(name))
            for name, worker in self.workers.items()
        ]
        hashes = self._page_hashes(request, views)
        query = RouteQuery(
            len(request.prompt) + len(request.generated_prefix),
            request.slo,
            self.prefixes.match(hashes),
            avoid,
            prefilled_on,
            self.output_lengths.mean_tokens,
        )
        pinned = self._pinned.pop(request.id, "")
        choice = self._fork_choice(query.tokens, pinned) or self._choose(query, views)
        if choice is None and avoid and not prefilled_on:  # there is only the one that failed it
            choice = self._choose(dataclasses.replace(query, avoid=""), views)
        if choice is None:
            return None
        self._assign(request, choice, hashes, query)
        return choice.route

    def pin_to_worker(self, request: str, worker: str) -> None:
        """`request`, not routed yet, has the prompt of one that `worker` decodes: fork it there."""
        self._pinned[request] = worker

    def _fork_choice(self, tokens: int, name: str) -> RouteChoice | None:
        worker = self.workers.get(name)
        if worker is None or not worker.accepting or worker.draining:
            return None
        if tokens >= worker.pages_free * worker.shape.page_tokens:
            return None
        return RouteChoice(Route(name, name), 0.0, 0.0, 0.0, "fork")

    def _choose(self, query: RouteQuery, views: list[WorkerView]) -> RouteChoice | None:
        """A worker with room; if there is none, one where the request will wait."""
        rule = self.router.rule
        if all(view.role is Role.BOTH for view in views):
            rule = replica_rule(rule)

        def choose_among(views: list[WorkerView], rule: RoutingRule) -> RouteChoice | None:
            return Router(self.router.estimator, self.router.link_bandwidth, rule).route(
                query, views
            )

        choice = choose_among(views, rule)
        if choice is not None:
            return choice
        best = min(1, max((view.slots_free for view in views if view.accepting), default=0))
        emptied = [
            msgspec.structs.replace(
                view, pages_free=view.pages_total, slots_free=int(view.slots_free >= best)
            )
            for view in views
        ]  # no running request needs a reserve there
        return choose_among(emptied, dataclasses.replace(rule, watermark=0.0))

    def _page_hashes(self, request: AddRequest, views: list[WorkerView]) -> list[bytes]:
        if not self.prefix_cache or not views:
            return []
        routed = self.requests.get(request.id)
        if routed is not None and not request.generated_prefix:
            return routed.page_hashes
        tokens = (*request.prompt, *request.generated_prefix)
        return page_hashes(tokens, views[0].page_tokens, root_hash(request.salt))

    def _assign(
        self, request: AddRequest, choice: RouteChoice, hashes: list[bytes], query: RouteQuery
    ) -> None:
        old = self.requests.pop(request.id, None)
        if old is not None:
            old.add_load(-1)
        route, tokens = choice.route, query.tokens
        self.route_counts[choice.reason] = self.route_counts.get(choice.reason, 0) + 1
        source, target = self.workers[route.prefill], self.workers[route.decode]
        cached = query.cached_pages.get(route.prefill, 0) * source.shape.page_tokens
        new, answer = tokens - min(cached, tokens - 1), list(request.generated_prefix)
        routed = RoutedRequest(request, route, source, target, tokens, new, hashes, answer)
        if old is not None and query.prefilled_on:  # only the decode worker changes
            routed.prefilling, routed.new_tokens = old.prefilling, old.new_tokens
            routed.tokens, routed.answer_tokens = old.tokens, old.answer_tokens
            routed.predicted_ttft_s = old.predicted_ttft_s
            routed.uncorrected_ttft_s = old.uncorrected_ttft_s
        elif not request.generated_prefix and choice.reason != "fork":
            routed.predicted_ttft_s = choice.ttft_s
            factor = self.ttft_correction.factor(route.prefill)
            routed.uncorrected_ttft_s = choice.ttft_s / factor
        self.requests[request.id] = routed
        routed.add_load(1)

    # ------------------------------------------------------------ progress

    def on_delivery(
        self, request: RequestLifetime, update: DeliverTokens, now_s: float, routed_s: float
    ) -> None:
        """The client of `request`, whose workers were chosen at `routed_s`, has its next tokens."""
        id = request.input.id
        if update.start == 0:
            request.cached_tokens = update.tokens[0].cached_tokens
            self.on_first_token(id, now_s - routed_s)
        self.on_tokens(id, tuple(sampled.token for sampled in update.tokens))
        request.token_s += [now_s] * len(update.tokens)

    def on_handoff_ended(self, worker: str, ended: HandoffEnded) -> None:
        """`worker` reports it."""
        if ended.outcome is HandoffOutcome.ADOPTED:
            self.on_adopted(ended.handoff.request)
        elif ended.outcome is HandoffOutcome.DECODED_IN_PLACE:
            self.on_decode_in_place(ended.handoff.request)
        if ended.times is not None:
            self.on_transfer(worker, ended.decode_worker, ended.times)

    def on_first_token(self, id: str, ttft_s: float) -> None:
        """`ttft_s`: since workers were chosen for it."""
        routed = self.requests.get(id)
        if routed is None or self.workers.get(routed.route.prefill) is not routed.prefill_worker:
            return
        uncorrected_s, predicted_s = routed.uncorrected_ttft_s, routed.predicted_ttft_s
        self.ttft_correction.observe(routed.route.prefill, uncorrected_s, predicted_s, ttft_s)

    def on_transfer(self, source: str, target: str, times: HandoffTimes) -> None:
        """All of a request's KV went from `source` to `target`."""
        worker, links = self.workers.get(source), self.router.link_bandwidth
        if worker is not None:
            page_bytes = links.kv_bytes_per_token * worker.shape.page_tokens
            kv_bytes = times.page_layers * page_bytes / worker.shape.layers
            links.observe(source, target, kv_bytes, times.sending_s)

    def on_tokens(self, id: str, tokens: tuple[int, ...]) -> None:
        routed = self.requests.get(id)
        if routed is None:
            return
        routed.add_load(-1)
        if routed.prefilling:
            self._record_prefix(routed.route.prefill, routed.prefill_worker, routed.page_hashes)
        routed.prefilling = False
        routed.tokens += len(tokens)
        routed.answer_tokens += tokens
        routed.add_load(1)

    def on_adopted(self, id: str) -> None:
        """The decode worker has it, and the prefill worker released it."""
        routed = self.requests.get(id)
        if routed is not None and not routed.handed_over:
            routed.add_load(-1)
            routed.handed_over = routed.prefill_worker is not routed.decode_worker
            routed.add_load(1)
            self._record_prefix(routed.route.decode, routed.decode_worker, routed.page_hashes)

    def on_decode_in_place(self, id: str) -> None:
        routed = self.requests.get(id)
        if routed is not None:
            routed.add_load(-1)
            routed.route = routed.route._replace(decode=routed.route.prefill)
            routed.decode_worker = routed.prefill_worker
            routed.add_load(1)

    def on_finished(self, id: str) -> None:
        routed = self.requests.pop(id, None)
        if routed is None:
            return
        routed.add_load(-1)
        if routed.answer_tokens:
            self.output_lengths.add(len(routed.answer_tokens))
        if self.prefix_cache and not routed.prefilling:
            size, hashes = routed.decode_worker.shape.page_tokens, routed.page_hashes
            tokens = (*routed.request.prompt, *routed.answer_tokens)
            rest = tokens[len(hashes) * size : -1]  # the last token's KV was never computed
            parent = hashes[-1] if hashes else root_hash(routed.request.salt)
            known = [*hashes, *page_hashes(rest, size, parent)]
            self._record_prefix(routed.route.decode, routed.decode_worker, known)

    def _record_prefix(self, name: str, worker: TrackedWorker, hashes: list[bytes]) -> None:
        if self.workers.get(name) is worker:
            self.prefixes.add(name, hashes)
