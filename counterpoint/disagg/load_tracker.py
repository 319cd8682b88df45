"""Routing: the front's own book of what it has sent where, and the choice of workers from it.

Owns: for every living request its workers, its size and how far it is; from them each worker's load; how long the latest answers
were. Promises: pure; the load is that of this very moment, since every request and every token passes the front (a worker's own
report would be a round trip old, and a burst would all go to the one that looked idle); a request finds a worker as long as a
willing one could ever hold it.
Must not: read a clock, talk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from counterpoint.core.page_pool import page_hashes, root_hash
from counterpoint.core.state import OutputLengths
from counterpoint.disagg.handoff_events import HandoffTimes
from counterpoint.disagg.pool_frontend import Route
from counterpoint.disagg.prefix_index import PrefixIndex
from counterpoint.disagg.role_rebalancer import Change, CommitRole, StartDrain, WorkerLoad
from counterpoint.disagg.router import RouteChoice, Router, RoutingRule, WorkerView, replica_rule
from counterpoint.disagg.ttft_correction import TtftCorrection
from counterpoint.types import AddRequest, BatchShape, Role


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
    """A worker as the router sees it, and what is booked on it. `draining`: it is to change its role (elastic.py). `lost_pages`: in
    quarantine, by its own report."""

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
        """No request is booked on it."""
        return not (self.num_prefills or self.num_decodes or self.num_pages)

    @property
    def pending(self) -> BatchShape:
        layers = self.shape.layers
        return BatchShape(
            self.prefill_tokens,
            self.prefill_squares,
            self.prefill_reused,
            self.num_prefills,
            0,
            0,
            self.num_prefills,
            0,
            layers,
            layers,
        )

    @property
    def running(self) -> BatchShape:
        layers = self.shape.layers
        return BatchShape(0, 0, 0, 0, self.num_decodes, self.context_tokens, self.num_decodes, 0, layers, layers)

    def make_view(self, name: str, factor: float = 1.0) -> WorkerView:
        shape = self.shape
        return WorkerView(
            name=name,
            role=self.role,
            units=shape.units,
            layers=shape.layers,
            page_tokens=shape.page_tokens,
            pages_free=max(0, shape.pages_total - self.num_pages - self.quarantined_pages),
            pages_total=shape.pages_total,
            slots_free=shape.slots - self.num_decodes,
            pending=self.pending,
            running=self.running,
            chunk_tokens=shape.chunk_tokens,
            accepting=self.accepting and not self.draining,
            ttft_factor=factor,
        )


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request on its way. `source`, `target`: where it is prefilled and decoded (a worker that starts again has another seat).
    `tokens`: prompt and answer so far; `new`: those of them that must be computed. `names`: of the pages of the first tokens.
    `told_s`: the time to first token that was predicted; prices alone gave `priced_s` (0: nothing is to be learnt from it)."""

    request: AddRequest
    route: Route
    prefill_worker: TrackedWorker
    decode_worker: TrackedWorker
    tokens: int
    new_tokens: int
    page_hashes: list[bytes] = field(default_factory=list)
    answer_tokens: list[int] = field(default_factory=list)
    prefilling: bool = True
    handed_over: bool = False  # the source has let it go
    predicted_ttft_s: float = 0.0
    uncorrected_ttft_s: float = 0.0


class LoadTracker:
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
        self.route_counts: dict[str, int] = {}  # by reason (router.py, and fork)
        self._pinned: dict[str, str] = {}  # request -> the worker that has all of its prompt

    # ------------------------------------------------------------ workers

    def add_worker(self, worker: str, role: Role, shape: WorkerShape) -> None:
        """A worker is there, with nothing on it."""
        self.workers[worker] = TrackedWorker(role, shape)

    def remove_worker(self, worker: str) -> None:
        """It is gone, and so is its cache. What was booked on it is booked anew, or ends."""
        self.workers.pop(worker, None)
        self.prefixes.forget(worker)
        self.router.link_bandwidth.forget(worker)
        self.ttft_correction.forget(worker)

    def worker_loads(self) -> list[WorkerLoad]:
        """What elastic.py judges by: each worker's predictions for a next request like those that are here."""
        found = []
        for name, seat in self.workers.items():
            queue = self.ttft_correction.factor(name) * self.router.seconds(
                seat.pending, seat.shape.units
            )
            found.append(
                WorkerLoad(
                    name=name,
                    role=seat.role,
                    ttft_s=queue,
                    compute_s=queue / max(1, seat.num_prefills),
                    tpot_s=self.router.seconds(seat.running, seat.shape.units),
                    kv_share=min(1.0, seat.num_pages / seat.shape.pages_total),
                    drained=seat.is_empty,
                )
            )
        return found

    def apply_change(self, change: Change) -> None:
        """What elastic.py has decided."""
        seat = self.workers.get(change.worker)
        if seat is not None:
            seat.draining = isinstance(change, StartDrain)
            if isinstance(change, CommitRole):
                seat.role = change.role

    # ------------------------------------------------------------ the choice (front.Pick)

    def choose_route(self, arrive: AddRequest, avoid: str, prefill: str) -> Route | None:
        """Where `arrive` goes; it is booked there. None: nobody could ever hold it."""
        tokens, tied = (
            len(arrive.prompt) + len(arrive.generated_prefix),
            self._pinned.pop(arrive.id, ""),
        )
        views = [
            seat.make_view(name, self.ttft_correction.factor(name))
            for name, seat in self.workers.items()
        ]
        names = self._page_hashes(arrive, views)
        cached = self.prefixes.match(names)
        choice = self._fork_choice(tokens, tied) or self._choose(
            tokens, arrive, views, cached, avoid, prefill
        )
        if (
            choice is None and avoid and not prefill
        ):  # the one that failed it is the only one there is
            choice = self._choose(tokens, arrive, views, cached, "", prefill)
        if choice is None:
            return None
        self._assign(arrive, choice, names, cached, prefill)
        return choice.route

    def pin_to_worker(self, request: str, worker: str) -> None:
        """`request`, which is still to be picked for, has the very prompt of one that `worker` decodes: it forks from that one."""
        self._pinned[request] = worker

    def _fork_choice(self, tokens: int, worker: str) -> RouteChoice | None:
        seat = self.workers.get(worker)
        if seat is None or not seat.accepting or seat.draining:
            return None
        room = seat.shape.pages_total - seat.num_pages - seat.quarantined_pages
        return (
            RouteChoice(Route(worker, worker), 0.0, 0.0, 0.0, "fork")
            if tokens < room * seat.shape.page_tokens
            else None
        )

    def _choose(
        self,
        tokens: int,
        arrive: AddRequest,
        views: list[WorkerView],
        cached: Mapping[str, int],
        avoid: str,
        prefill: str,
    ) -> RouteChoice | None:
        """Where there is room; if there is none anywhere, where it will have to wait."""
        rule = self.router.rule
        if all(view.role is Role.BOTH for view in views):
            rule = replica_rule(rule)

        def among(views: list[WorkerView], rule: RoutingRule) -> RouteChoice | None:
            router = Router(self.router.estimator, self.router.link_bandwidth, rule)
            return router.route(
                tokens, arrive.slo, views, cached, avoid, prefill, self.output_lengths.mean_tokens
            )

        choice = among(views, rule)
        if choice is not None:
            return choice
        most = min(1, max((view.slots_free for view in views if view.accepting), default=0))
        roomy = [
            msgspec.structs.replace(
                view, pages_free=view.pages_total, slots_free=int(view.slots_free >= most)
            )
            for view in views
        ]
        return among(roomy, replace(rule, watermark=0.0))  # nobody is left there who grows

    def _page_hashes(self, arrive: AddRequest, views: list[WorkerView]) -> list[bytes]:
        if not self.prefix_cache or not views:
            return []
        booked = self.requests.get(arrive.id)
        if booked is not None and not arrive.generated_prefix:
            return booked.page_hashes
        return page_hashes(
            (*arrive.prompt, *arrive.generated_prefix), views[0].page_tokens, root_hash(arrive.salt)
        )

    # ------------------------------------------------------------ the book

    def _assign(
        self,
        arrive: AddRequest,
        choice: RouteChoice,
        names: list[bytes],
        cached: Mapping[str, int],
        prefill: str,
    ) -> None:
        old = self.requests.pop(arrive.id, None)
        if old is not None:
            _add_load(old, -1)
        route, tokens = choice.route, len(arrive.prompt) + len(arrive.generated_prefix)
        self.route_counts[choice.reason] = self.route_counts.get(choice.reason, 0) + 1
        source, target = self.workers[route.prefill], self.workers[route.decode]
        new = tokens - min(cached.get(route.prefill, 0) * source.shape.page_tokens, tokens - 1)
        booking = RoutedRequest(
            arrive, route, source, target, tokens, new, names, list(arrive.generated_prefix)
        )
        if old is not None and prefill:  # another decode worker for what is prefilled, or nearly so
            booking.prefilling, booking.new_tokens, booking.tokens, booking.answer_tokens = (
                old.prefilling,
                old.new_tokens,
                old.tokens,
                old.answer_tokens,
            )
            booking.predicted_ttft_s, booking.uncorrected_ttft_s = (
                old.predicted_ttft_s,
                old.uncorrected_ttft_s,
            )
        elif not arrive.generated_prefix and choice.reason != "fork":
            booking.predicted_ttft_s, booking.uncorrected_ttft_s = (
                choice.ttft_s,
                choice.ttft_s / self.ttft_correction.factor(route.prefill),
            )
        self.requests[arrive.id] = booking
        _add_load(booking, 1)

    def on_first_token(self, id: str, after_s: float) -> None:
        """The client has its first token, `after_s` seconds after request `id` was picked for."""
        booking = self.requests.get(id)
        if (
            booking is not None
            and self.workers.get(booking.route.prefill) is booking.prefill_worker
        ):
            self.ttft_correction.observe(
                booking.route.prefill, booking.uncorrected_ttft_s, booking.predicted_ttft_s, after_s
            )

    def on_transfer(self, source: str, target: str, times: HandoffTimes) -> None:
        """All of a request's KV has gone from `source` to `target`."""
        seat = self.workers.get(source)
        if seat is not None:
            page_bytes = self.router.link_bandwidth.kv_bytes_per_token * seat.shape.page_tokens
            self.router.link_bandwidth.observe(
                source, target, times.page_layers * page_bytes / seat.shape.layers, times.sending_s
            )

    def on_tokens(self, id: str, tokens: tuple[int, ...]) -> None:
        """The client has more tokens of request `id`."""
        booking = self.requests.get(id)
        if booking is None:
            return
        _add_load(booking, -1)
        if booking.prefilling:
            self._record_prefix(booking.route.prefill, booking.prefill_worker, booking.page_hashes)
        booking.prefilling = False
        booking.tokens += len(tokens)
        booking.answer_tokens += tokens
        _add_load(booking, 1)

    def on_adopted(self, id: str) -> None:
        """The decode worker has it, the prefill worker has let it go."""
        booking = self.requests.get(id)
        if booking is not None and not booking.handed_over:
            _add_load(booking, -1)
            booking.handed_over = booking.prefill_worker is not booking.decode_worker
            _add_load(booking, 1)
            self._record_prefix(booking.route.decode, booking.decode_worker, booking.page_hashes)

    def on_decode_in_place(self, id: str) -> None:
        """It is decoded where it was prefilled."""
        booking = self.requests.get(id)
        if booking is not None:
            _add_load(booking, -1)
            booking.route = booking.route._replace(decode=booking.route.prefill)
            booking.decode_worker = booking.prefill_worker
            _add_load(booking, 1)

    def on_finished(self, id: str) -> None:
        booking = self.requests.pop(id, None)
        if booking is None:
            return
        _add_load(booking, -1)
        if booking.answer_tokens:
            self.output_lengths.add(len(booking.answer_tokens))
        if self.prefix_cache and not booking.prefilling:
            size, names = booking.decode_worker.shape.page_tokens, booking.page_hashes
            tokens = (*booking.request.prompt, *booking.answer_tokens)[
                :-1
            ]  # the last token's KV was never computed
            rest = page_hashes(
                tokens[len(names) * size :],
                size,
                names[-1] if names else root_hash(booking.request.salt),
            )
            self._record_prefix(booking.route.decode, booking.decode_worker, [*names, *rest])

    def _record_prefix(self, worker: str, seat: TrackedWorker, names: list[bytes]) -> None:
        if self.workers.get(worker) is seat:
            self.prefixes.add(worker, names)


def _add_load(booking: RoutedRequest, sign: int) -> None:
    """Put a booking's load on its workers (1), or take it off (-1)."""
    source, target = booking.prefill_worker, booking.decode_worker
    if booking.prefilling:
        source.prefill_tokens += sign * booking.new_tokens
        source.prefill_squares += sign * booking.new_tokens * booking.new_tokens
        source.prefill_reused += sign * booking.new_tokens * (booking.tokens - booking.new_tokens)
        source.num_prefills += sign
    target.num_decodes += sign
    target.context_tokens += sign * booking.tokens
    target.num_pages += sign * -(-booking.tokens // target.shape.page_tokens)
    if source is not target and not booking.handed_over:
        source.num_pages += sign * -(-booking.tokens // source.shape.page_tokens)
