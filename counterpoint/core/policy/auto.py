"""Auto: at each edge, price every way to run what there is, and take the best.

With one phase empty, the other has the whole device. With both, the candidates are chunks fused
into decode steps and splits of the device (candidates.py). The choice first meets the time between
tokens, then the time to first token. Then it delays all requests least, each weighed by its SLO
budget (selection.py). So the device is split only when that is predicted to pay. DuetServe (arXiv
2511.04791) and MuxWise (ASPLOS'26) decide this by rule; auto decides it by price.

    order      prompts by due time. Where not all can be in time, the longest are deferred, but no
               prompt waits more than PATIENCE targets
    admission  a prompt is held back while its decode would harm the running ones more than it
               gains itself
    split      changes for a gain of 4 % (hysteresis), at layer-group edges, once a group at most
    pause      decode skips layer groups within its slack when a first token is about to be late
    overtake   a short prompt goes before a long one between layer groups, if the long one has time
               to spare, or if the short one would be late and the long one can still be in time
    cut        a pass ends before a prompt that would make the others late. It leaves out short
               prompts that it would make late
    queue      no chunk is queued behind a long step: a prompt that arrives would wait for both

A decision takes about a millisecond at most. Auto does not know what kind of device runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from counterpoint.config import SchedulerConfig
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy.batching import pack_chunks, pack_prompts
from counterpoint.core.policy.candidates import (
    Candidate,
    CandidatePricer,
    PrefillBacklog,
    make_backlog,
)
from counterpoint.core.policy.online_cost import OnlineCostModel
from counterpoint.core.policy.selection import CandidateSelector
from counterpoint.core.policy.slo import SloTracker
from counterpoint.core.request import DECODE, WAITING, Request
from counterpoint.core.state import EngineState, Pass
from counterpoint.interfaces import BatchPlan, Estimator
from counterpoint.stats import PolicyReport
from counterpoint.types import BatchShape, Lane, Role, Slo, Step, StepDone

# Of a target for the first token: no chunk is queued behind a step that takes longer.
MAX_QUEUED_SHARE = 0.125
SHORT_RATIO = 0.25  # a prompt may overtake one that has four times its work left
SPARED_SHARE = (
    0.3  # of its TTFT target, which the overtaken prompt keeps unless the other is urgent
)


class Auto:
    """Lane 0 decodes and runs fused passes; lane 1 prefills in layer groups, at the same time."""

    pricer_class: type[CandidatePricer] = CandidatePricer

    def __init__(
        self, scheduler: SchedulerConfig, device: DeviceShape, estimator: Estimator
    ) -> None:
        units, levels = device.units, device.levels
        self.lanes = (Lane(0, Role.DECODE, device.depth), Lane(1, Role.PREFILL, device.depth))
        self.scheduler = scheduler
        self.units = units
        self.layers = device.layers
        self.lane_units = (levels[len(levels) // 2], units - levels[len(levels) // 2])
        self.cost_model = OnlineCostModel(estimator)
        self.pricer = self.pricer_class(self.cost_model, device, scheduler.max_pass_tokens)
        self.slo_tracker = SloTracker(scheduler, self.cost_model, units, device.layers)
        self.selector = CandidateSelector(scheduler)
        self.current: Candidate | None = None  # in force; None: one phase is empty
        # The best one. It differs from `current` while a pass in layer groups has to end first.
        self.preferred: Candidate | None = None
        self.decisions: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self._split_changed_in = 0  # the layer group (step) during which the split changed last
        self._decode_paused = False  # decode sits the next layer group out
        self._waiting: tuple[Request, ...] = ()

    # ------------------------------------------------------------ interfaces.Policy

    def admission_order(self, waiting: Iterable[Request], now: float) -> Iterable[Request]:
        self._waiting = tuple(waiting)
        return self.slo_tracker.sort_by_urgency(self._waiting, now)

    def next_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        if lane.id == 0:
            return self._next_decode_batch(lane, state, now)
        return self._next_prefill_batch(lane, state, now)

    def next_layers(
        self, lane: Lane, open_pass: Pass, state: EngineState, now: float
    ) -> tuple[int, int] | None:
        units = self._prefill_units(lane, state)
        return (units, self._layer_group(open_pass.work, units, state)) if units else None

    def should_preempt(self, lane: Lane, open_pass: Pass, state: EngineState, now: float) -> bool:
        """Whether the shortest waiting prompt may overtake `open_pass`."""
        waiting = [r for r in state.schedulable_prefills(lane) if r not in open_pass.requests]
        shortest = sorted(waiting, key=lambda r: r.unscheduled_tokens)[:1]
        return bool(self._select_overtaking(shortest, open_pass, now))

    def observe(self, step: Step, done: StepDone, co_running: Step | None) -> None:
        self.cost_model.observe(step, done, co_running)
        work = step.work
        self.slo_tracker.add_prefilled(
            work.prefill_tokens * (step.last_layer - step.first_layer) / work.layers, done.ended_s
        )

    def report(self) -> PolicyReport:
        return PolicyReport(
            self.cost_model.errors(),
            self.cost_model.cells(),
            dict(self.decisions),
            dict(self.fallbacks),
        )

    # ------------------------------------------------------------ lanes

    def _next_decode_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        decodes = state.schedulable_decodes(lane)
        if not decodes:
            return None
        prefill_lane = state.lanes[1]
        prefilling = bool(state.prefilling) and (
            prefill_lane.open_pass is not None or bool(prefill_lane.in_flight)
        )
        prefills: list[Request] = []
        if not prefilling:
            prefills = self._select_admissible(state.schedulable_prefills(lane), state, now)
        items = [(r, 1) for r in decodes]
        if not prefilling and not prefills:
            self.current, self.preferred, self._decode_paused = None, None, False
            self.slo_tracker.set_pace(1.0, 0.0)
            units = state.free_units(lane)
            return BatchPlan(items, units) if units else None
        self.current = self._choose(decodes, state, now, prefilling)
        if self.current.chunk:
            if state.free_units(lane) < self.units or self._has_long_step(state.lanes[0].in_flight):
                return None
            items += pack_chunks(prefills, self.current.chunk - len(items))
            return BatchPlan(items, self.units)
        if prefilling and state.lanes[0].in_flight and prefill_lane.open_pass is None:
            # A prefill pass is about to end. Wait: the next step may have more requests or units.
            return None
        self._decode_paused = prefilling and self._should_pause(decodes, state, now)
        if self._decode_paused:
            self.decisions["pause"] += 1
            return None
        units = min(self.current.units, state.free_units(lane))
        return BatchPlan(items, units) if units else None

    def _has_long_step(self, in_flight: Iterable[tuple[Step, Pass]]) -> bool:
        """Whether a step in flight is so long that none may be queued behind it."""
        limit_s = MAX_QUEUED_SHARE * (self.scheduler.ttft_s or 1.0)
        return any(
            self.cost_model.seconds(step.work, step.units) > limit_s for step, _ in in_flight
        )

    def _next_prefill_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        units = self._prefill_units(lane, state)
        if not units or (state.has_decode and (self.preferred is None or self.preferred.chunk)):
            return None
        if any(step.work.prefill_tokens for step, _ in state.lanes[0].in_flight):
            return None  # a pass with chunks was priced with all units
        prompts = self._select_admissible(state.schedulable_prefills(lane), state, now)
        suspended = state.lanes[1].suspended
        if suspended is not None:
            prompts = self._select_overtaking(prompts, suspended, now)
        items = self._cut_batch_in_time(pack_prompts(prompts, self.scheduler.max_pass_tokens), now)
        if not items:
            return None
        work = make_backlog(items).batch_shape(self.layers)
        return BatchPlan(items, units, self._layer_group(work, units, state))

    def _cut_batch_in_time(
        self, items: list[tuple[Request, int]], now: float
    ) -> list[tuple[Request, int]]:
        """The items that fit one pass in time; the pass ends for all of them at once.

        It stops before an item that would make others late. It skips short items that it would make
        late and that can overtake it.
        """
        ends_s, first_due_s, batch = now, math.inf, list[tuple[Request, int]]()
        for item in items:
            takes_s = self.slo_tracker.expected_prefill_s(item[0])
            due_s = self.slo_tracker.due_s(item[0])
            before_s, with_it_s = ends_s, ends_s + takes_s
            if before_s <= first_due_s < with_it_s:
                break
            if due_s < with_it_s <= first_due_s and takes_s <= SHORT_RATIO * (before_s - now):
                continue
            batch.append(item)
            ends_s, first_due_s = with_it_s, min(first_due_s, due_s)
        return batch

    def _prefill_units(self, lane: Lane, state: EngineState) -> int:
        decode_units = 0
        if state.has_decode and not (self._decode_paused and not state.lanes[0].in_flight):
            split = self.current if self.current is not None and not self.current.chunk else None
            decode_units = split.units if split is not None else self.lane_units[0]
        return min(self.units - decode_units, state.free_units(lane))

    def _layer_group(self, work: BatchShape, units: int, state: EngineState) -> int:
        """Layers that take as long as one decode step: N = ceil(T_decode * L / T_prefill).

        (MuxWise.) While nothing decodes: as long as a short prompt may have to wait.
        """
        prefill_s = self.cost_model.seconds(work, units)
        if state.has_decode and self.current is not None:
            group_s = self.current.guarded_step_s
        else:
            group_s = max(self.slo_tracker.targets(Slo()).tpot_s, prefill_s / 4)
        return max(1, min(self.layers, math.ceil(group_s * self.layers / prefill_s)))

    # ------------------------------------------------------------ admission and order

    def _select_admissible(
        self, prefills: list[Request], state: EngineState, now: float
    ) -> list[Request]:
        """Those of `prefills` that may start, by urgency.

        Each makes every later decode step longer once it is prefilled. It is held back while the
        added excess of the running decodes outweighs its own lateness.
        """
        prefills = self.slo_tracker.sort_by_urgency(prefills, now)
        decodes = [r for r in state.running.values() if r.phase is DECODE] if prefills else []
        if not decodes:
            return prefills
        scheduler, target_s = self.scheduler, self.slo_tracker.min_tpot_s(decodes)
        batch, context = len(decodes), sum([r.scheduled_tokens for r in decodes])
        for index, request in enumerate(prefills):
            step_s = self.pricer.decode_s(batch + 1, context + request.prefill_target, self.units)
            if step_s > target_s:
                before_s = max(target_s, self.pricer.decode_s(batch, context, self.units))
                harm = batch * (step_s - before_s) / target_s
                excess = self._ttft_excess(request, now)
                if harm * scheduler.tbt_weight > excess * scheduler.ttft_weight:
                    self.decisions["hold"] += 1
                    return prefills[:index]
            batch, context = batch + 1, context + request.prefill_target
        return prefills

    def _ttft_excess(self, request: Request, now: float) -> float:
        """By how many targets its first token will be late, if it starts now."""
        tracker = self.slo_tracker
        late_s = now + tracker.solo_prefill_s(request) - tracker.due_s(request)
        return max(0.0, late_s / tracker.ttft_s(request))

    def _select_overtaking(
        self, prompts: list[Request], victims: Pass, now: float
    ) -> list[Request]:
        """Those of `prompts` that may all go before the rest of a pass.

        Either every victim keeps SPARED_SHARE of its target. Or the prompt would be late behind the
        pass, and the pass loses nothing by the delay.
        """
        tracker, slowdown = self.slo_tracker, self.slo_tracker.prefill_slowdown
        rest_s, spent_s, chosen = self._remaining_s(victims), 0.0, list[Request]()
        for request in prompts:
            delay_s = spent_s + tracker.solo_prefill_s(request)
            if delay_s > SHORT_RATIO * rest_s:
                continue
            both_end_s = now + slowdown * (rest_s + delay_s)  # whoever goes first
            spared = all(
                both_end_s <= tracker.due_s(victim) - SPARED_SHARE * tracker.ttft_s(victim)
                for victim in victims.requests
            )
            urgent = both_end_s > tracker.due_s(request)
            if spared or (
                urgent
                and self._tolerates_delay(victims, slowdown * rest_s, slowdown * delay_s, now)
            ):
                spent_s = delay_s
                chosen.append(request)
        return chosen

    def _tolerates_delay(self, victims: Pass, rest_s: float, delay_s: float, now: float) -> bool:
        """Whether each victim is still in time after the delay, or late anyway and not starved."""
        ends_s = now + rest_s
        for victim in victims.requests:
            due_s = self.slo_tracker.due_s(victim)
            if ends_s + delay_s > due_s and (
                ends_s <= due_s or self.slo_tracker.is_starved(victim, now)
            ):
                return False
        return True

    def _remaining_s(self, open_pass: Pass) -> float:
        """The rest of an open pass, alone on the whole device."""
        share = 1 - open_pass.next_layer / self.layers
        return share * self.cost_model.seconds(open_pass.work, self.units)

    # ------------------------------------------------------------ the choice

    def _choose(
        self, decodes: Sequence[Request], state: EngineState, now: float, prefilling: bool
    ) -> Candidate:
        """The candidate to be in force from this edge on.

        A pass that has begun in layer groups leaves only the splits. If a chunk would be better, no
        new pass begins after it.
        """
        before, in_flight = self.current, state.lanes[1].in_flight
        group = in_flight[0][0].id if in_flight else 0
        if group and group == self._split_changed_in and before is not None and not before.chunk:
            return before
        batch, context = len(decodes), sum([r.scheduled_tokens for r in decodes]) + len(decodes)
        backlog = self._backlog(state)
        candidates = self.pricer.candidates(backlog, batch, context)
        decode_only_s = self.pricer.decode_s(batch, context, self.units)
        tracker, prefilled = self.slo_tracker, state.prefilling.values()
        budget = tracker.decode_budget(decodes, state.output_lengths, now, decode_only_s)
        fastest = min([option.prefill_slowdown for option in candidates])
        waiting, blocked = self._split_waiting(state)
        max_slowdown = tracker.max_prefill_slowdown(prefilled, waiting, now, fastest)
        weights = tracker.delay_weights(prefilled, waiting, blocked, budget.delay_weight, backlog)
        excess = self.selector.decode_excess(candidates, budget, decode_only_s, weights)
        best = self.selector.pick(
            candidates, excess, max_slowdown, weights, self.preferred or before
        )
        self.preferred = best
        if prefilling and best.chunk:
            splits_only = [
                math.inf if option.chunk else by
                for option, by in zip(candidates, excess, strict=True)
            ]
            best = self.selector.pick(candidates, splits_only, max_slowdown, weights, best)
        if before is None or (best.chunk, best.units) != (before.chunk, before.units):
            self._split_changed_in = group
        self._count_decision(best, candidates, excess, max_slowdown)
        tracker.set_pace(best.prefill_slowdown, best.guarded_step_s)
        return best

    def _split_waiting(self, state: EngineState) -> tuple[list[Request], list[Request]]:
        """The waiting requests that only prefill holds up, and those that lack a slot or pages."""
        room = self.scheduler.max_running - len(state.running)
        waiting, blocked = list[Request](), list[Request]()
        for request in self._waiting:
            if request.phase is WAITING:
                fits = len(waiting) < room and request.blocked_since_s is None
                (waiting if fits else blocked).append(request)
        return waiting, blocked

    def _count_decision(
        self,
        best: Candidate,
        candidates: list[Candidate],
        excess: list[float],
        max_slowdown: float,
    ) -> None:
        """Count what was decided, and why the device is not split."""
        self.decisions["fused" if best.chunk else "split"] += 1
        if min(excess) > 0:
            self.decisions["none meets tpot"] += 1
        if not best.chunk:
            return
        in_time = [
            option.prefill_slowdown
            for option, by in zip(candidates, excess, strict=True)
            if not option.chunk and not by
        ]
        if not in_time:
            self.fallbacks["no split meets tpot"] += 1
        elif best.prefill_slowdown <= max_slowdown < min(in_time):
            self.fallbacks["no split meets ttft"] += 1
        else:
            self.fallbacks["fused gains more"] += 1

    def _should_pause(self, decodes: Sequence[Request], state: EngineState, now: float) -> bool:
        """Whether decode lets the next layer group run alone.

        That is when a first token is about to be late, and no next token would be.
        """
        open_pass = state.lanes[1].open_pass
        if open_pass is None or self.current is None:
            return False
        due_s = min(self.slo_tracker.due_s(r) for r in open_pass.requests)
        solo_s = self._remaining_s(open_pass)
        if not (now + solo_s < due_s < now + solo_s * self.current.prefill_slowdown):
            return False
        budget = self.slo_tracker.decode_budget(decodes, state.output_lengths, now, 0.0)
        return budget.next_s > solo_s + 2 * self.current.guarded_step_s

    def _backlog(self, state: EngineState) -> PrefillBacklog:
        """The admitted prompts that are not computed, up to one pass."""
        items: list[tuple[Request, int]] = []
        room = self.scheduler.max_pass_tokens
        for request in state.prefilling.values():
            tokens = request.prefill_target - request.computed_tokens
            if items and tokens > room:
                break
            items.append((request, tokens))
            room -= tokens
        return make_backlog(items)
