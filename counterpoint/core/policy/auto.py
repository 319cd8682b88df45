"""Auto: at each edge, price every way to run what there is, and take the best.

With one phase empty, the other has the whole device. With both, the options are chunks fused into the decode steps and splits of
the device (options.py); the one taken meets the time between tokens, then the time to first token, then delays all requests
least, those that run and those that wait, each by its share of what it is allowed. So a split is in force only when it is predicted
to pay: what DuetServe (arXiv 2511.04791) and MuxWise (ASPLOS'26) do by rule, done by price.

    order      prompts by due time; where not all can be in time the longest go behind, but no one waits more than PATIENCE targets
    admission  a prompt is held back while the harm its decode would do to the running ones outweighs its own lateness
    split      moves for a gain of some per cent (hysteresis), at layer-group edges, once a group at most
    pause      decode may sit out layer groups that its slack pays for, when a first token is about to be late
    overtake   a short prompt goes before a long one between layer groups, if that one has time to spare, or if it would be late
               itself and the long one can still be in time
    cut        a pass ends before a prompt that would make the others in it late, and leaves out short ones that it would make late
    queue      no chunk stands behind a step that takes long: who comes meanwhile would wait for both

Owns: all of that. Promises: a decision takes a millisecond or so at most. Must not: know what kind of device runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from counterpoint.config import SchedulerConfig
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy.batching import pack_chunks, pack_prompts
from counterpoint.core.policy.candidates import Candidate, CandidatePricer, PrefillBacklog
from counterpoint.core.policy.online_cost import OnlineCostModel
from counterpoint.core.policy.slo import DecodeBudget, DelayWeights, SloTracker
from counterpoint.core.request import DECODE, WAITING, Request
from counterpoint.core.state import EngineState, Pass
from counterpoint.interfaces import BatchPlan, Estimator
from counterpoint.stats import PolicyReport
from counterpoint.types import BatchShape, Lane, Role, Slo, Step, StepDone

HYSTERESIS = 1.04  # another option must be better by so much
TARGET_SHARE = 0.95  # share of the target that is aimed at
MIN_ALLOWED_SLOWDOWN = 1.25  # a step with prefill may take so many times one without: what no option can meet is held against none
MAX_QUEUED_SHARE = (
    0.125  # of a target for the first token: no chunk is queued behind a step that takes longer
)
SHORT_RATIO = 0.25  # a prompt may overtake one that has four times its work left
SPARED_SHARE = 0.3  # of its time for the first token, which that one must not lose, unless the other would be late behind it


class Auto:
    """Lane 0 decodes and runs fused passes; lane 1 prefills in layer groups, beside it."""

    pricer_class: type[CandidatePricer] = CandidatePricer

    def __init__(
        self,
        scheduler: SchedulerConfig,
        device: DeviceShape,
        estimator: Estimator,
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
        self.current: Candidate | None = None  # in force; None: one phase is empty
        self.preferred: Candidate | None = (
            None  # the best; another than in force while a pass in layer groups has to end first
        )
        self.decisions: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self._split_changed_in = 0  # the layer group (step) during which the split changed last
        self._decode_paused = False  # decode sits the next layer group out
        self._waiting: tuple[Request, ...] = ()

    # ------------------------------------------------------------ the seam

    def admission_order(self, waiting: Iterable[Request], now: float) -> Iterable[Request]:
        self._waiting = tuple(waiting)
        return self.slo_tracker.sort_by_urgency(self._waiting, now)

    def next_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        return (
            self._next_decode_batch(lane, state, now)
            if lane.id == 0
            else self._next_prefill_batch(lane, state, now)
        )

    def next_layers(
        self, lane: Lane, open_pass: Pass, state: EngineState, now: float
    ) -> tuple[int, int] | None:
        units = self._prefill_units(lane, state)
        return (units, self._layer_group(open_pass.work, units, state)) if units else None

    def should_preempt(self, lane: Lane, open_pass: Pass, state: EngineState, now: float) -> bool:
        """Much shorter prompts go first if all of the pass would still be in time behind them, or are late without them."""
        waiting = [r for r in state.schedulable_prefills(lane) if r not in open_pass.requests]
        return bool(
            self._select_overtaking(
                sorted(waiting, key=lambda r: r.unscheduled_tokens)[:1], open_pass, now
            )
        )

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
        prefills = (
            []
            if prefilling
            else self._select_admissible(state.schedulable_prefills(lane), state, now)
        )
        picks = [(r, 1) for r in decodes]
        if not prefilling and not prefills:
            self.current, self.preferred, self._decode_paused = None, None, False
            self.slo_tracker.set_pace(1.0, 0.0)
            units = state.free_units(lane)
            return BatchPlan(picks, units) if units else None
        self.current = self._choose(decodes, state, now, prefilling)
        if self.current.chunk:
            if state.free_units(lane) < self.units or self._has_long_step(state.lanes[0].in_flight):
                return None
            return BatchPlan(
                picks + pack_chunks(prefills, self.current.chunk - len(picks)), self.units
            )
        if prefilling and state.lanes[0].in_flight and prefill_lane.open_pass is None:
            return None  # a pass ends, perhaps during the step in flight: the next one may have more requests, or all units
        self._decode_paused = prefilling and self._should_pause(decodes, state, now)
        if self._decode_paused:
            self.decisions["pause"] += 1
            return None
        units = min(self.current.units, state.free_units(lane))
        return BatchPlan(picks, units) if units else None

    def _has_long_step(self, in_flight: Iterable[tuple[Step, Pass]]) -> bool:
        """Whether a step is in flight behind which none should stand yet: a prompt that comes meanwhile would wait for both."""
        most_s = MAX_QUEUED_SHARE * (self.scheduler.ttft_s or 1.0)
        return any(self.cost_model.seconds(step.work, step.units) > most_s for step, _ in in_flight)

    def _next_prefill_batch(self, lane: Lane, state: EngineState, now: float) -> BatchPlan | None:
        units = self._prefill_units(lane, state)
        if not units or (state.has_decode and (self.preferred is None or self.preferred.chunk)):
            return None
        if any(step.work.prefill_tokens for step, _ in state.lanes[0].in_flight):
            return (
                None  # a pass with chunks was meant to have all units, and would take twice as long
            )
        admitted, aside = (
            self._select_admissible(state.schedulable_prefills(lane), state, now),
            state.lanes[1].suspended,
        )
        if aside is not None:
            admitted = self._select_overtaking(admitted, aside, now)
        picks = self._cut_batch_in_time(pack_prompts(admitted, self.scheduler.max_pass_tokens), now)
        if not picks:
            return None
        return BatchPlan(
            picks,
            units,
            self._layer_group(make_backlog(picks).batch_shape(self.layers), units, state),
        )

    def _cut_batch_in_time(
        self, picks: list[tuple[Request, int]], now: float
    ) -> list[tuple[Request, int]]:
        """Of `picks`, which a pass ends for all at once: the first, up to one that would make others late which are in time without
        it; but for short ones that it would make late, and that can overtake it."""
        ends_s, first_due, together = now, math.inf, list[tuple[Request, int]]()
        for pick in picks:
            takes_s, due = (
                self.slo_tracker.expected_prefill_s(pick[0]),
                self.slo_tracker.due_s(pick[0]),
            )
            before_s, with_it_s = ends_s, ends_s + takes_s
            if before_s <= first_due < with_it_s:
                break
            if due < with_it_s <= first_due and takes_s <= SHORT_RATIO * (before_s - now):
                continue
            together.append(pick)
            ends_s, first_due = with_it_s, min(first_due, due)
        return together

    def _prefill_units(self, lane: Lane, state: EngineState) -> int:
        kept = 0
        if state.has_decode:
            kept = (
                self.current.units
                if self.current is not None and not self.current.chunk
                else self.lane_units[0]
            )
            if self._decode_paused and not state.lanes[0].in_flight:
                kept = 0
        return min(self.units - kept, state.free_units(lane))

    def _layer_group(self, work: BatchShape, units: int, state: EngineState) -> int:
        """Layers that take about as long as one decode step, N = ceil(T_decode * L / T_prefill) (MuxWise); while nothing decodes,
        as long as a short prompt may have to wait."""
        whole_s = self.cost_model.seconds(with_all_layers(work), units)
        if state.has_decode and self.current is not None:
            turn_s = self.current.guarded_step_s
        else:
            turn_s = max(self.slo_tracker.targets(Slo()).tpot_s, whole_s / 4)
        return max(1, min(self.layers, math.ceil(turn_s * self.layers / whole_s)))

    # ------------------------------------------------------------ admission and order

    def _select_admissible(
        self, prefills: list[Request], state: EngineState, now: float
    ) -> list[Request]:
        """Those of `prefills` that may start, by urgency. Once prefilled, each makes every later decode step longer: one is held
        back while what it adds to the running ones' excess over their target, weighed, is more than its own lateness, weighed."""
        prefills = self.slo_tracker.sort_by_urgency(prefills, now)
        joining = [r for r in state.running.values() if r.phase is DECODE] if prefills else []
        if not joining:
            return prefills
        scheduler, target_s = self.scheduler, self.slo_tracker.min_tpot_s(joining)
        batch, context = len(joining), sum([r.scheduled_tokens for r in joining])
        for index, request in enumerate(prefills):
            period_s = self.pricer.decode_s(batch + 1, context + request.prefill_target, self.units)
            if period_s > target_s:
                before_s = max(target_s, self.pricer.decode_s(batch, context, self.units))
                harm = batch * (period_s - before_s) / target_s
                if (
                    harm * scheduler.tbt_weight
                    > self._ttft_excess(request, now) * scheduler.ttft_weight
                ):
                    self.decisions["hold"] += 1
                    return prefills[:index]
            batch, context = batch + 1, context + request.prefill_target
        return prefills

    def _ttft_excess(self, request: Request, now: float) -> float:
        """By how many targets its first token will be late, if it starts now."""
        promises = self.slo_tracker
        return max(
            0.0,
            (now + promises.solo_prefill_s(request) - promises.due_s(request))
            / promises.ttft_s(request),
        )

    def _select_overtaking(
        self, prompts: list[Request], victims: Pass, now: float
    ) -> list[Request]:
        """Those of `prompts` that may go before the rest of a pass, together: anyone while all of it keep SPARE of their time,
        else who would be late behind it, if nothing is lost by that."""
        rest_s, spent_s, pace, found = (
            self._remaining_s(victims),
            0.0,
            self.slo_tracker.prefill_slowdown,
            list[Request](),
        )
        for request in prompts:
            delay_s = spent_s + self.slo_tracker.solo_prefill_s(request)
            if delay_s > SHORT_RATIO * rest_s:
                continue
            both_s = now + pace * (
                rest_s + delay_s
            )  # when the last of them is done, whoever goes first
            spared = all(
                both_s
                <= self.slo_tracker.due_s(victim) - SPARED_SHARE * self.slo_tracker.ttft_s(victim)
                for victim in victims.requests
            )
            urgent = both_s > self.slo_tracker.due_s(request)
            if spared or (
                urgent and self._tolerates_delay(victims, pace * rest_s, pace * delay_s, now)
            ):
                spent_s = delay_s
                found.append(request)
        return found

    def _tolerates_delay(self, victims: Pass, rest_s: float, delay_s: float, now: float) -> bool:
        """Whether the rest of a pass loses nothing by a delay: all are in time all the same, or late already and not yet out of
        patience."""
        ends_s = now + rest_s
        for victim in victims.requests:
            due = self.slo_tracker.due_s(victim)
            if ends_s + delay_s > due and (
                ends_s <= due or self.slo_tracker.is_starved(victim, now)
            ):
                return False
        return True

    def _remaining_s(self, whole: Pass) -> float:
        """What is left of an open pass, on the whole device."""
        return (1 - whole.next_layer / self.layers) * self.cost_model.seconds(
            with_all_layers(whole.work), self.units
        )

    # ------------------------------------------------------------ the choice

    def _choose(
        self, decodes: Sequence[Request], state: EngineState, now: float, prefilling: bool
    ) -> Candidate:
        """The option to be in force from this edge on. A pass that has begun in layer groups leaves only the splits: if a chunk
        would be better, none begins after it."""
        before, in_flight = self.current, state.lanes[1].in_flight
        group = in_flight[0][0].id if in_flight else 0
        if group and group == self._split_changed_in and before is not None and not before.chunk:
            return before
        batch, context = len(decodes), sum([r.scheduled_tokens for r in decodes]) + len(decodes)
        backlog = self._backlog(state)
        found = self.pricer.candidates(backlog, batch, context)
        quiet_s = self.pricer.decode_s(batch, context, self.units)
        limits = self.slo_tracker.decode_budget(decodes, state.output_lengths, now, quiet_s)
        fastest = min([option.prefill_slowdown for option in found])
        waiting, blocked = self._split_waiting(state)
        need = self.slo_tracker.max_prefill_slowdown(
            state.prefilling.values(), waiting, now, fastest
        )
        stakes = self.slo_tracker.delay_weights(
            state.prefilling.values(), waiting, blocked, limits.delay_weight, backlog
        )
        late = self._decode_excess(found, limits, quiet_s, stakes.load, stakes.backlog_multiple)
        best = self.preferred = self._pick_best(found, late, need, stakes)
        if prefilling and best.chunk:
            only = [
                math.inf if option.chunk else by for option, by in zip(found, late, strict=True)
            ]
            best = self._pick_best(found, only, need, stakes)
        if before is None or (best.chunk, best.units) != (before.chunk, before.units):
            self._split_changed_in = group
        self._count_decision(best, found, late, need)
        self.slo_tracker.set_pace(best.prefill_slowdown, best.guarded_step_s)
        return best

    def _split_waiting(self, state: EngineState) -> tuple[list[Request], list[Request]]:
        """Of the requests that wait: those that prefill alone holds up, and those for which no slot or page is left: they wait for
        a decode to end."""
        room = self.scheduler.max_running - len(state.running)
        waiting, blocked = list[Request](), list[Request]()
        for request in self._waiting:
            if request.phase is WAITING:
                (
                    waiting if len(waiting) < room and request.blocked_since_s is None else blocked
                ).append(request)
        return waiting, blocked

    def _decode_excess(
        self,
        found: list[Candidate],
        limits: DecodeBudget,
        decode_only_s: float,
        load: float,
        queue: float,
    ) -> list[float]:
        """By which share decode steps would be too long, of each option. All have prefill till the prompts that wait are done
        (`queue` times the backlog). Then those with prefill alternate with quiet ones (`load`: backlogs per second), the more the
        faster prompts are done: so a longer step is not always a longer mean."""
        limit_s, gap_s, to_come = (
            max(TARGET_SHARE * limits.mean_s, MIN_ALLOWED_SLOWDOWN * decode_only_s),
            TARGET_SHARE * limits.gap_s,
            limits.remaining_tokens,
        )
        late: list[float] = []
        for option in found:
            whole_s, step_s = option.backlog_s, option.step_s
            busy, crowded = min(1.0, load * whole_s), min(1.0, queue * whole_s / step_s / to_come)
            mean_s = 1 / (busy / step_s + (1 - busy) / decode_only_s)
            felt_s = crowded * step_s + (1 - crowded) * mean_s
            late.append(max(0.0, felt_s / limit_s - 1, option.guarded_step_s / gap_s - 1))
        return late

    def _pick_best(
        self, found: list[Candidate], late: list[float], need: float, stakes: DelayWeights
    ) -> Candidate:
        """The least harm to targets, to one per cent; then the least delay of all requests together; rather the one before than
        one hardly better."""
        before = self.preferred or self.current
        tbt_weight, ttft_weight = self.scheduler.tbt_weight, self.scheduler.ttft_weight
        best, least_harm, least_delay = found[0], math.inf, math.inf
        for option, by in zip(found, late, strict=True):
            takes_all = (
                stakes.is_queue_empty and option.chunk and option.backlog_s <= option.step_s
            )  # and could take more
            to_come = 0.0 if takes_all else stakes.demand * option.backlog_s
            behind = max(
                option.prefill_slowdown / need if need else math.inf, to_come
            )  # of those here, and to come
            slow = saturate(behind - 1)
            harm = round(by * tbt_weight + slow * ttft_weight, 2) if by < math.inf else by
            if harm > least_harm:
                continue
            delay = self._total_delay(option, stakes)
            if before is not None and option.chunk == before.chunk and option.units == before.units:
                delay /= HYSTERESIS
            if harm < least_harm or delay < least_delay:
                best, least_harm, least_delay = option, harm, delay
        return best

    def _total_delay(self, option: Candidate, stakes: DelayWeights) -> float:
        """Of all requests, till the prompts that wait are done, in shares of what each is allowed. Prompts that come meanwhile wait
        for half of that time. With a split, decode has its share of units for half a step longer: what is in flight keeps them."""
        whole_s = option.backlog_s
        decodes_s = whole_s if option.chunk else whole_s + option.guarded_step_s / 2
        prompts = (
            stakes.next_prompts * option.mean_ttft_s
            + (stakes.queued_prompts + stakes.future_prompts * whole_s / 2) * whole_s
        )
        return (
            prompts + (stakes.decodes + stakes.blocked_prompts) * option.decode_slowdown * decodes_s
        )

    def _count_decision(
        self, best: Candidate, found: list[Candidate], late: list[float], need: float
    ) -> None:
        """Count what was decided, and why the device is not split."""
        self.decisions["fused" if best.chunk else "split"] += 1
        if min(late) > 0:
            self.decisions["none meets tpot"] += 1
        if not best.chunk:
            return
        in_time = [
            option.prefill_slowdown
            for option, by in zip(found, late, strict=True)
            if not option.chunk and not by
        ]
        if not in_time:
            self.fallbacks["no split meets tpot"] += 1
        elif best.prefill_slowdown <= need < min(in_time):
            self.fallbacks["no split meets ttft"] += 1
        else:
            self.fallbacks["fused gains more"] += 1

    def _should_pause(self, decodes: Sequence[Request], state: EngineState, now: float) -> bool:
        """Whether decode lets the next layer group run alone: a first token is about to be late, and no next token would be."""
        whole = state.lanes[1].open_pass
        if whole is None or self.current is None:
            return False
        due = min(self.slo_tracker.due_s(r) for r in whole.requests)
        left_s = self._remaining_s(whole)
        beside_s = (
            (1 - whole.next_layer / self.layers)
            * self.cost_model.seconds(with_all_layers(whole.work), self.units)
            * self.current.prefill_slowdown
        )
        if not (now + left_s < due < now + beside_s):
            return False
        return (
            self.slo_tracker.decode_budget(decodes, state.output_lengths, now, 0.0).next_s
            > left_s + 2 * self.current.guarded_step_s
        )

    def _backlog(self, state: EngineState) -> PrefillBacklog:
        """What is to be prefilled soon: what is admitted, up to one pass."""
        picks: list[tuple[Request, int]] = []
        room = self.scheduler.max_pass_tokens
        for request in state.prefilling.values():
            left = request.prefill_target - request.computed_tokens
            if picks and left > room:
                break
            picks.append((request, left))
            room -= left
        return make_backlog(picks)


def saturate(excess: float) -> float:
    """How much it harms that prompts take longer than they may, by so many times that: in proportion up to 1, then less and less,
    never 2. So where all will be late it still matters by how much, and can't outweigh every promise to decodes."""
    return max(0.0, excess) if excess <= 1 else 2 - 1 / excess


def with_all_layers(work: BatchShape) -> BatchShape:
    if work.first_layer == 0 and work.last_layer == work.layers:
        return work
    return msgspec.structs.replace(work, first_layer=0, last_layer=work.layers)


def make_backlog(picks: Sequence[tuple[Request, int]]) -> PrefillBacklog:
    tokens = sum([n for _, n in picks])
    squares = sum([n * n for _, n in picks])
    products = sum([n * (r.prefill_target - n) for r, n in picks])
    return PrefillBacklog(tokens, squares, products, len(picks))
