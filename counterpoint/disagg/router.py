"""Where a request is prefilled, and where it is decoded.

Owns: the prediction for each choice and the order in which choices are preferred. Promises: the
same views give the same route; every route has its reason and its predicted TTFT; a prefill worker
that can't hold the prompt is never chosen. Must not: price steps (the Estimator does).

The first of these that meets the request's SLO is taken, else that with the least predicted TTFT:

    local      all of it on a decode worker, if little of its prompt must be computed there
               (conditional disaggregation: a short prefill costs less than a handoff)
    disagg     a prefill worker, then the decode worker with the least predicted TPOT
    borrowed   prefill on a worker of the decode pool that would be faster (the mixed pool of
               Splitwise, ISCA'24, section 4.1)
    together   all of it on any worker that has room

Replicas (every role BOTH) use the same router with `local_tokens` unbounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from counterpoint.config import ClusterConfig
from counterpoint.disagg.handoff_events import TransferGranularity
from counterpoint.disagg.pool_frontend import Route
from counterpoint.disagg.routing_feedback import LinkBandwidth
from counterpoint.interfaces import Estimator
from counterpoint.types import BatchShape, Role, Slo

HIDE_SHARE = 0.05  # a transfer that takes less of the prefill's time is sent whole
MIN_GROUP_BYTES = 4 << 20  # a layer group is sent by itself if it is so large,
MIN_GROUP_S = 0.001  # or takes so long to compute


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load. `pending`: prefill that it accepted and has not computed. `running`: its
    next decode step. `pages_free`: neither held nor reserved. `slots_free`: how many more requests
    may run; below 0, so many wait. `ttft_factor` corrects TTFT predictions by prices alone."""

    name: str
    role: Role
    units: int
    layers: int
    page_tokens: int
    pages_free: int
    pages_total: int
    slots_free: int = 1 << 30
    pending: BatchShape = BatchShape()
    running: BatchShape = BatchShape()
    chunk_tokens: int = 512
    accepting: bool = True
    ttft_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """`local_tokens`: a prompt with no more tokens to compute is prefilled where it is decoded.
    `spill_s`: without a TTFT target, the predicted TTFT above which the other pool is considered.
    `watermark`: share of a worker's pages kept free. `granularity` None: the cheapest per request.
    """

    local_tokens: int = 512
    spill_s: float = 2.0
    watermark: float = 0.02
    granularity: TransferGranularity | None = None

    @classmethod
    def from_config(cls, cluster: ClusterConfig) -> RoutingRule:
        fixed = None if cluster.kv_grain == "auto" else TransferGranularity(cluster.kv_grain)
        return cls(local_tokens=cluster.local_tokens, spill_s=cluster.spill_s, granularity=fixed)


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """A request of `tokens` tokens. `cached_pages`: by worker, how many pages of its start are
    there. `avoid`: a worker that just failed it. `prefilled_on`: only a decode worker is to be
    chosen. `answer_tokens`: the usual length of an answer."""

    tokens: int
    slo: Slo = dataclasses.field(default_factory=Slo)
    cached_pages: Mapping[str, int] = dataclasses.field(default_factory=dict)
    avoid: str = ""
    prefilled_on: str = ""
    answer_tokens: float = math.inf


class RouteChoice(NamedTuple):
    """A route and its predictions, in seconds. `gap_s`: the longest pause that it causes in any
    answer. `visible_transfer_s`: KV transfer that the prefill doesn't hide."""

    route: Route
    ttft_s: float
    gap_s: float
    tpot_s: float
    reason: str
    visible_transfer_s: float = 0.0


class Router:
    def __init__(
        self, estimator: Estimator, link_bandwidth: LinkBandwidth, rule: RoutingRule = RoutingRule()
    ) -> None:
        self.estimator = estimator
        self.link_bandwidth = link_bandwidth
        self.rule = rule

    def route(self, query: RouteQuery, workers: Sequence[WorkerView]) -> RouteChoice | None:
        """None: no worker can take it."""
        able = [w for w in workers if w.accepting and w.name != query.avoid]
        decodes = [w for w in able if w.role is not Role.PREFILL]
        if query.prefilled_on:
            source = [w for w in workers if w.name == query.prefilled_on]
            others = [w for w in decodes if w.name != query.prefilled_on]
            choices = self._handoff_choices(source, others, query, "disagg")
            return min(choices, key=lambda c: c.tpot_s, default=None)
        prefills = [w for w in able if w.role is not Role.DECODE]
        borrowed = [w for w in able if w.role is Role.DECODE]
        local = [
            w
            for w in decodes
            if self._prefill_work(w, query).prefill_tokens <= self.rule.local_tokens
        ]
        alone = dataclasses.replace(query, answer_tokens=math.inf)
        missed: list[RouteChoice] = []
        for choices in (
            self._single_worker_choices(local, query, "local"),
            self._handoff_choices(prefills, decodes, query, "disagg"),
            self._handoff_choices(borrowed, decodes, query, "borrowed"),
            self._single_worker_choices(able, alone, "together"),
        ):
            good = [c for c in choices if self._meets_slo(c, query.slo)]
            if good:
                return min(good, key=lambda c: (c.ttft_s, c.tpot_s))
            missed += choices
        return min(missed, key=lambda c: c.ttft_s, default=None)

    # ------------------------------------------------------------ choices

    def _single_worker_choices(
        self, workers: Sequence[WorkerView], query: RouteQuery, reason: str
    ) -> list[RouteChoice]:
        """All of it on one worker, in chunks that share steps with the running decodes.

        If all requests of a decode worker came so, each of its answers would carry one such prefill
        per running request, spread over `answer_tokens` steps.
        """
        choices = []
        for w in workers:
            if not self._has_room(w, query):
                continue
            work = self._prefill_work(w, query)
            chunks = max(1, math.ceil(work.prefill_tokens / w.chunk_tokens))
            chunk = _share(work, chunks)
            fused = chunk + w.running
            step_s = self.seconds(fused, w.units)
            ttft_s = w.ttft_factor * (self.seconds(w.pending, w.units) + chunks * step_s)
            tpot_s = self._predicted_tpot_s(w, query)
            if w.role is Role.DECODE:
                prefill_s = chunks * (step_s - self.seconds(w.running, w.units))
                tpot_s += (w.running.decode_batch + 1) * prefill_s / query.answer_tokens
            choices.append(RouteChoice(Route(w.name, w.name), ttft_s, step_s, tpot_s, reason))
        return choices

    def _handoff_choices(
        self,
        sources: Sequence[WorkerView],
        targets: Sequence[WorkerView],
        query: RouteQuery,
        reason: str,
    ) -> list[RouteChoice]:
        """Every prefill worker, with the decode worker of the least predicted TPOT. The client gets
        the first token from the prefill worker, so the transfer is a pause after it."""
        links, choices = self.link_bandwidth, []
        for p in sources:
            decode = self._least_loaded([w for w in targets if w.name != p.name], query)
            if decode is None or -(-query.tokens // p.page_tokens) > p.pages_total:
                continue
            work = self._prefill_work(p, query)
            prefill_s = self.seconds(work, p.units)
            cached_tokens = query.cached_pages.get(decode.name, 0) * decode.page_tokens
            kv_bytes = links.kv_bytes_per_token * (query.tokens - cached_tokens)
            chunks = max(1, math.ceil(work.prefill_tokens / p.chunk_tokens))
            bandwidth = links.bytes_per_s(p.name, decode.name)
            granularity = (
                self.rule.granularity
                or choose_granularity(kv_bytes, prefill_s, bandwidth, p.layers, chunks)[0]
            )
            groups = {
                TransferGranularity.PROMPT: 1,
                TransferGranularity.CHUNK: chunks,
                TransferGranularity.LAYER: chunks * p.layers,
            }[granularity]
            pause_s = visible_transfer_s(kv_bytes, prefill_s, bandwidth, groups, links.control_s)
            ttft_s = p.ttft_factor * (self.seconds(p.pending, p.units) + prefill_s)
            tpot_s = self._predicted_tpot_s(decode, query)
            route = Route(p.name, decode.name, granularity)
            choices.append(RouteChoice(route, ttft_s, pause_s + tpot_s, tpot_s, reason, pause_s))
        return choices

    def _least_loaded(self, workers: Sequence[WorkerView], query: RouteQuery) -> WorkerView | None:
        """By predicted TPOT, then by free pages."""
        return min(
            (w for w in workers if self._has_room(w, query)),
            key=lambda w: (self._predicted_tpot_s(w, query), -w.pages_free / w.pages_total),
            default=None,
        )

    def _meets_slo(self, choice: RouteChoice, slo: Slo) -> bool:
        limits = (
            (choice.ttft_s, self.rule.spill_s if slo.ttft_s is None else slo.ttft_s),
            (choice.tpot_s, slo.tpot_s),
            (choice.gap_s, slo.itl_s),
        )
        return all(limit is None or value <= limit for value, limit in limits)

    def _has_room(self, w: WorkerView, query: RouteQuery) -> bool:
        """A slot and the request's pages, with a reserve for running requests to grow."""
        missing = -(-query.tokens // w.page_tokens) - query.cached_pages.get(w.name, 0)
        reserve = math.ceil(self.rule.watermark * w.pages_total)
        return w.slots_free > 0 and missing + reserve <= w.pages_free

    # ------------------------------------------------------------ prices

    def _prefill_work(self, w: WorkerView, query: RouteQuery) -> BatchShape:
        """All tokens but the cached ones, and at least one."""
        reused = min(query.cached_pages.get(w.name, 0) * w.page_tokens, query.tokens - 1)
        new = query.tokens - reused
        return BatchShape.prefill(new, reused, w.layers)

    def _predicted_tpot_s(self, w: WorkerView, query: RouteQuery) -> float:
        """A decode step of `w` with this request in it."""
        batch, context = w.running.decode_batch + 1, w.running.decode_context + query.tokens
        step = BatchShape.decode(batch, context, w.layers)
        return self.seconds(step, w.units)

    def seconds(self, work: BatchShape, units: int) -> float:
        """Of a step; 0 if it is empty."""
        empty = not (work.prefill_tokens or work.decode_batch)
        return 0.0 if empty else self.estimator.seconds(work, units)


def choose_granularity(
    total_bytes: float, prefill_s: float, bandwidth: float, layers: int, chunks: int = 1
) -> tuple[TransferGranularity, str]:
    """(granularity, reason) for `total_bytes` of KV, computed in `chunks` passes that take
    `prefill_s`, over a link of `bandwidth` bytes/s. As in Splitwise (ISCA'24, section 4.3), only
    large prompts are sent layer by layer."""
    transfer_s = total_bytes / bandwidth
    if transfer_s <= HIDE_SHARE * prefill_s:
        share = f"{transfer_s / prefill_s:.1%}"
        return TransferGranularity.PROMPT, f"the transfer takes {share} of the prefill"
    share, per_chunk = f"{transfer_s / prefill_s:.0%}", 1 / chunks
    if (
        total_bytes * per_chunk / layers >= MIN_GROUP_BYTES
        or prefill_s * per_chunk / layers >= MIN_GROUP_S
    ):
        size, found = "large enough", TransferGranularity.LAYER
    else:
        size, found = "too small", TransferGranularity.CHUNK
    return found, f"the transfer takes {share} of the prefill, and a layer is {size} to send"


def visible_transfer_s(
    total_bytes: float, prefill_s: float, bandwidth: float, groups: int, control_s: float = 0.0
) -> float:
    """Seconds of transfer that remain after the prefill.

    KV is sent in `groups` equal parts as they are computed (1: at the end). Parts before the last
    one overlap with computing; the last one is sent after it.
    """
    group_s = total_bytes / groups / bandwidth
    behind = max(0.0, (groups - 1) * group_s - (1 - 1 / groups) * prefill_s)
    return behind + group_s + control_s


def _share(work: BatchShape, parts: int) -> BatchShape:
    """One of `parts` equal chunks of a prefill, which reads half of the other chunks on average."""
    tokens = math.ceil(work.prefill_tokens / parts)
    squares = tokens * tokens
    reused = math.ceil(work.prefill_reused / parts) + (work.prefill_tokens - tokens) * tokens // 2
    return msgspec.structs.replace(
        work,
        prefill_tokens=tokens,
        prefill_squares=squares,
        prefill_reused=reused,
        prefill_requests=1,
        samples=1,
    )


def replica_rule(rule: RoutingRule = RoutingRule()) -> RoutingRule:
    """For replicas: no handoff while a worker has room."""
    return dataclasses.replace(rule, local_tokens=1 << 60)
