"""Router: where a request is prefilled, and where it is decoded.

Owns: the prediction of each choice and the order in which choices are preferred. Promises: pure (the same views give the same
route); every route has its reason and its predicted TTFT; a prefill worker is never chosen that can't hold the prompt.
Must not: read a clock or guess costs by itself (an Estimator prices every step).

Preferred in this order, the first that keeps the request's targets; if none does, the one with the least predicted TTFT:

    local      the whole request on a decode worker, if little of its prompt must be computed there (conditional disaggregation: a
               short prefill costs less than a handoff)
    disagg     prefill pool, then the decode worker with the least predicted time per token
    borrowed   prefill on a worker of the other pool that would be faster (the mixed pool of Splitwise, ISCA'24 section 4.1)
    together   the whole request on any worker that has room

Plain replicas (every role BOTH, nothing handed on) are the same router with `local_tokens` unbounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from counterpoint.config import ClusterConfig
from counterpoint.cost_model.calibration import fused_work
from counterpoint.disagg.handoff_events import TransferGranularity
from counterpoint.disagg.link_bandwidth import LinkBandwidth
from counterpoint.disagg.link_choice import choose_granularity, visible_transfer_s
from counterpoint.disagg.pool_frontend import Route
from counterpoint.interfaces import Estimator
from counterpoint.types import BatchShape, Role, Slo


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker said of itself last. `pending`: prefill that it has accepted and not computed, of all layers; `running`: its
    next decode step. `pages_free`: neither held nor reserved. `slots_free`: so many more requests may run at once; below 0, so many
    wait for that. `willing`: alive, not suspect, not draining.
    `factor`: what its times to first token have been, over what prices alone gave (forecast.py)."""

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
    """`local_tokens`: a prompt of which no more must be computed is prefilled where it is decoded. `spill_s`: predicted TTFT above
    which, for requests without a target, the other pool is asked. `watermark`: share of a decode worker's pages kept free.
    `grain`: how KV is sent; None: as pays (disagg/link_choice.py)."""

    local_tokens: int = 512
    spill_s: float = 2.0
    watermark: float = 0.02
    granularity: TransferGranularity | None = None

    @classmethod
    def from_config(cls, cluster: ClusterConfig) -> RoutingRule:
        """As configured."""
        grain = None if cluster.kv_grain == "auto" else TransferGranularity(cluster.kv_grain)
        return cls(local_tokens=cluster.local_tokens, spill_s=cluster.spill_s, granularity=grain)


class RouteChoice(NamedTuple):
    """A route, its predictions in seconds (`gap_s`: the longest pause it makes in the answers that run there or in its own;
    `visible_s`: transfer that the prefill doesn't hide), and why."""

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

    def route(
        self,
        tokens: int,
        slo: Slo,
        workers: Sequence[WorkerView],
        cached_pages: Mapping[str, int],
        avoid: str = "",
        prefill: str = "",
        answer_tokens: float = math.inf,
    ) -> RouteChoice | None:
        """Where a request of `tokens` tokens goes. `cached_pages`: by worker, pages of its beginning that are there already
        (prefixes.py). `avoid`: a worker that just failed it. `prefill`: it is prefilled there already, only the decode worker
        is to be chosen. `answer_tokens`: of a usual answer. None: nobody can take it."""
        able = [w for w in workers if w.accepting and w.name != avoid]
        if prefill:
            source = next((w for w in workers if w.name == prefill), None)
            rest = [w for w in able if w.name != prefill and w.role is not Role.PREFILL]
            choices = (
                self._handoff_choices([source], rest, tokens, cached_pages, "disagg") if source else []
            )
            return min(choices, key=lambda c: c.tpot_s, default=None)
        prefills = [w for w in able if w.role is not Role.DECODE]
        decodes = [w for w in able if w.role is not Role.PREFILL]
        little = [
            w
            for w in decodes
            if self._prefill_work(w, tokens, cached_pages).prefill_tokens <= self.rule.local_tokens
        ]
        last: list[RouteChoice] = []
        for choices in (
            self._single_worker_choices(little, tokens, cached_pages, "local", answer_tokens),
            self._handoff_choices(prefills, decodes, tokens, cached_pages, "disagg"),
            self._handoff_choices(
                [w for w in able if w.role is Role.DECODE],
                decodes,
                tokens,
                cached_pages,
                "borrowed",
            ),
            self._single_worker_choices(able, tokens, cached_pages, "together"),
        ):
            good = [c for c in choices if self._meets_slo(c, slo)]
            if good:
                return min(good, key=lambda c: (c.ttft_s, c.tpot_s))
            last += choices
        return min(last, key=lambda c: c.ttft_s, default=None)

    # ------------------------------------------------------------ choices

    def _single_worker_choices(
        self,
        workers: Sequence[WorkerView],
        tokens: int,
        cached: Mapping[str, int],
        reason: str,
        answer_tokens: float = math.inf,
    ) -> list[RouteChoice]:
        """All of it on one worker, in chunks beside the answers that run there. If all that run in a decode worker came so, each
        step carries a share of such a prefill for each of them: it comes once in an answer."""
        choices = []
        for w in workers:
            if not self._has_room(w, tokens, cached):
                continue
            work = self._prefill_work(w, tokens, cached)
            chunks = max(1, math.ceil(work.prefill_tokens / w.chunk_tokens))
            part = _share(work, chunks)
            step = self.seconds(
                fused_work(part, w.running, part.samples + w.running.samples), w.units
            )
            ttft_s, tpot_s = (
                w.ttft_factor * (self.seconds(w.pending, w.units) + chunks * step),
                self._predicted_tpot_s(w, tokens),
            )
            if w.role is Role.DECODE:
                prefill_s = chunks * (step - self.seconds(w.running, w.units))
                tpot_s += (w.running.decode_batch + 1) * prefill_s / answer_tokens
            choices.append(RouteChoice(Route(w.name, w.name), ttft_s, step, tpot_s, reason))
        return choices

    def _handoff_choices(
        self,
        sources: Sequence[WorkerView],
        targets: Sequence[WorkerView],
        tokens: int,
        cached: Mapping[str, int],
        reason: str,
    ) -> list[RouteChoice]:
        """Every prefill worker with the decode worker that has the least predicted time per token. (The client gets the first
        token from the prefill worker, so the transfer is a pause behind it.)"""
        choices = []
        for p in sources:
            decode = self._least_loaded([w for w in targets if w.name != p.name], tokens, cached)
            if decode is None or -(-tokens // p.page_tokens) > p.pages_total:
                continue
            work = self._prefill_work(p, tokens, cached)
            alone = self.seconds(work, p.units)
            total = self.link_bandwidth.kv_bytes_per_token * (
                tokens - cached.get(decode.name, 0) * decode.page_tokens
            )
            chunks = max(1, math.ceil(work.prefill_tokens / p.chunk_tokens))
            bandwidth = self.link_bandwidth.bytes_per_s(p.name, decode.name)
            grain = (
                self.rule.granularity
                or choose_granularity(total, alone, bandwidth, p.layers, chunks)[0]
            )
            groups = {
                TransferGranularity.PROMPT: 1,
                TransferGranularity.CHUNK: chunks,
                TransferGranularity.LAYER: chunks * p.layers,
            }[grain]
            pause = visible_transfer_s(
                total, alone, bandwidth, groups, control_s=self.link_bandwidth.control_s
            )
            tpot, ttft_s = (
                self._predicted_tpot_s(decode, tokens),
                p.ttft_factor * (self.seconds(p.pending, p.units) + alone),
            )
            choices.append(
                RouteChoice(
                    Route(p.name, decode.name, grain), ttft_s, pause + tpot, tpot, reason, pause
                )
            )
        return choices

    def _least_loaded(
        self, workers: Sequence[WorkerView], tokens: int, cached: Mapping[str, int]
    ) -> WorkerView | None:
        """By predicted time per token, then by free pages."""
        fitting = [w for w in workers if self._has_room(w, tokens, cached)]
        return min(
            fitting,
            key=lambda w: (self._predicted_tpot_s(w, tokens), -w.pages_free / w.pages_total),
            default=None,
        )

    # ------------------------------------------------------------ judgement

    def _meets_slo(self, choice: RouteChoice, slo: Slo) -> bool:
        limits = (
            (choice.ttft_s, self.rule.spill_s if slo.ttft_s is None else slo.ttft_s),
            (choice.tpot_s, slo.tpot_s),
            (choice.gap_s, slo.itl_s),
        )
        return all(limit is None or value <= limit for value, limit in limits)

    def _has_room(self, w: WorkerView, tokens: int, cached: Mapping[str, int]) -> bool:
        """The request's pages are there, and a little for those that run to grow; and it may run."""
        missing = -(-tokens // w.page_tokens) - cached.get(w.name, 0)
        return (
            w.slots_free > 0
            and missing + math.ceil(self.rule.watermark * w.pages_total) <= w.pages_free
        )

    # ------------------------------------------------------------ prices

    def _prefill_work(self, w: WorkerView, tokens: int, cached: Mapping[str, int]) -> BatchShape:
        """What `w` must compute: all but what it has, and at least one token."""
        reused = min(cached.get(w.name, 0) * w.page_tokens, tokens - 1)
        new = tokens - reused
        return BatchShape(new, new * new, new * reused, 1, 0, 0, 1, 0, w.layers, w.layers)

    def _predicted_tpot_s(self, w: WorkerView, tokens: int) -> float:
        """A decode step of `w` with this request in it."""
        batch, context = w.running.decode_batch + 1, w.running.decode_context + tokens
        return self.seconds(
            BatchShape(0, 0, 0, 0, batch, context, batch, 0, w.layers, w.layers), w.units
        )

    def seconds(self, work: BatchShape, units: int) -> float:
        """Of a step, which may be none."""
        return (
            self.estimator.seconds(work, units) if work.prefill_tokens or work.decode_batch else 0.0
        )


def _share(work: BatchShape, parts: int) -> BatchShape:
    """One of `parts` equal chunks of a prefill: it has its own tokens, and on average half of the others before it."""
    tokens = math.ceil(work.prefill_tokens / parts)
    squares = tokens * tokens
    reused = math.ceil(work.prefill_reused / parts) + (work.prefill_tokens - tokens) * tokens // 2
    return BatchShape(
        tokens, squares, reused, 1, 0, 0, 1, work.first_layer, work.last_layer, work.layers
    )


def replica_rule(rule: RoutingRule = RoutingRule()) -> RoutingRule:
    """The rule for plain replicas: nothing is handed on while a worker has room."""
    return dataclasses.replace(rule, local_tokens=1 << 60)
