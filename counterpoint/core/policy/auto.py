"""Auto: at each edge, price every way to run what there is, and take the best.

With one phase empty, the other has the whole device. With both, the options are chunks fused into the decode steps and splits of
the device (options.py); the one taken meets the time between tokens, then the time to first token, then has most of two things
together: work done per second (multiplexing gain) and prefill speed. So a split is in force only when it is predicted to pay:
what DuetServe (arXiv 2511.04791) and MuxWise (ASPLOS'26) do by rule, done by price.

    order      prompts by least slack; those that are late already go behind, but no one waits more than PATIENCE targets
    admission  held back while the running decodes could not bear one more
    split      smallest decode partition in force moves only for a gain of some per cent (hysteresis), at layer-group edges
    pause      decode may sit out layer groups that its slack pays for, when a first token is about to be late
    overtake   a short prompt goes before a long one between layer groups, if the long one can still be in time

Owns: all of that. Promises: a decision in well under a millisecond. Must not: know what kind of device runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from counterpoint.config import SchedulerConfig
from counterpoint.core.policy.belief import Belief
from counterpoint.core.policy.options import Backlog, Option, options
from counterpoint.core.policy.pick import chunks, whole_prompts
from counterpoint.core.request import Request
from counterpoint.core.state import Pass, State
from counterpoint.ports import Estimator, Fill
from counterpoint.types import Lane, PolicyReport, Role, Step, StepDone, Work

STICK = 1.04  # another option must be better by so much
MARGIN = 0.92  # share of the target that is aimed at
HASTE = 1.0  # what the fastest prefill is worth, in gain
LONGEST_GAP = 4.0  # in times the target per token, where no longest gap is asked for
PATIENCE = 8.0  # in targets: then a late prompt goes first
SHORT = 0.25  # a prompt may overtake one that has four times its work left


class Targets(NamedTuple):
    ttft_s: float
    tpot_s: float
    itl_s: float


class Auto:
    """Lane 0 decodes and runs fused passes; lane 1 prefills in layer groups, beside it."""

    def __init__(
        self, scheduler: SchedulerConfig, units: int, layers: int, levels: tuple[int, ...], estimator: Estimator, depth: int = 1
    ) -> None:
        self.lanes = (Lane(0, Role.DECODE, depth), Lane(1, Role.PREFILL, depth))
        self.scheduler = scheduler
        self.units = units
        self.layers = layers
        self.levels = levels
        self.shares = (levels[len(levels) // 2], units - levels[len(levels) // 2])
        self.belief = Belief(estimator)
        self.choice: Option | None = None
        self.decisions: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self._waiting: tuple[Request, ...] = ()
        self._priced: dict[tuple[int, ...], list[Option]] = {}
        self._priced_version = 0
        self._prompt_s: dict[str, float] = {}

    # ------------------------------------------------------------ the seam

    def order(self, waiting: Iterable[Request], now: float) -> Iterable[Request]:
        self._waiting = tuple(waiting)
        return sorted(self._waiting, key=lambda r: self._urgency(r, now))

    def fill(self, lane: Lane, state: State, now: float) -> Fill | None:
        return self._fill_decode(lane, state, now) if lane.id == 0 else self._fill_prefill(lane, state, now)

    def advance(self, lane: Lane, open_pass: Pass, state: State, now: float) -> tuple[int, int] | None:
        units = self._prefill_units(lane, state)
        return (units, self._group(open_pass.work, units, state)) if units else None

    def preempts(self, lane: Lane, open_pass: Pass, state: State, now: float) -> bool:
        short = min(state.prefills(lane), key=lambda r: r.remaining_prefill, default=None)
        if short is None or short in open_pass.requests:
            return False
        left = 1 - open_pass.cursor / self.layers
        rest_s = left * self._alone_s(open_pass.work)
        short_s = self._prompt_seconds(short)
        if short_s > SHORT * rest_s:
            return False
        victim = min(open_pass.requests, key=lambda r: self._due(r))
        in_time = now + rest_s + short_s < self._due(victim)
        return in_time or now + rest_s > self._due(victim)

    def observe(self, step: Step, done: StepDone, beside: Step | None) -> None:
        self.belief.observe(step, done, beside)

    def report(self) -> PolicyReport:
        return PolicyReport(self.belief.errors(), self.belief.cells(), dict(self.decisions), dict(self.fallbacks))

    # ------------------------------------------------------------ lanes

    def _fill_decode(self, lane: Lane, state: State, now: float) -> Fill | None:
        decodes = state.decodes(lane)
        if not decodes:
            return None
        prefill_lane = state.lanes[1]
        prefilling = prefill_lane.open is not None or bool(prefill_lane.in_flight)
        prefills = [] if prefilling else state.prefills(self.lanes[1])
        picks = [(r, 1) for r in decodes]
        if not prefilling and not prefills:
            self.choice = None
            units = state.free_units(lane)
            return Fill(picks, units) if units else None
        self.choice = self._choose(decodes, state, now, prefilling)
        if self.choice.chunk:
            if state.free_units(lane) < self.units:
                return None
            return Fill(picks + chunks(self._by_urgency(prefills, now), self.choice.chunk), self.units)
        if prefilling and self._pauses(decodes, state, now):
            self.decisions["pause"] += 1
            return None
        units = min(self.choice.units, state.free_units(lane))
        return Fill(picks, units) if units else None

    def _fill_prefill(self, lane: Lane, state: State, now: float) -> Fill | None:
        units = self._prefill_units(lane, state)
        if not units or (state.has_decode and (self.choice is None or self.choice.chunk)):
            return None
        picks = whole_prompts(self._by_urgency(state.prefills(lane), now), self.scheduler.max_pass_tokens)
        if not picks:
            return None
        return Fill(picks, units, self._group(_backlog(picks).work(self.layers), units, state))

    def _prefill_units(self, lane: Lane, state: State) -> int:
        kept = 0
        if state.has_decode:
            kept = self.choice.units if self.choice is not None and not self.choice.chunk else self.shares[0]
            if not state.lanes[0].in_flight and state.lanes[1].in_flight:
                kept = 0  # decode sits this group out
        return min(self.units - kept, state.free_units(lane))

    def _group(self, work: Work, units: int, state: State) -> int:
        """Layers that take about as long as one decode step, N = ceil(T_decode * L / T_prefill) (MuxWise); while nothing decodes,
        as long as a short prompt may have to wait."""
        whole_s = self.belief.seconds(_all_layers(work), units)
        if state.has_decode and self.choice is not None:
            turn_s = self.choice.period_s
        else:
            turn_s = max(self._targets_default().tpot_s, whole_s / 4)
        return max(1, min(self.layers, math.ceil(turn_s * self.layers / whole_s)))

    # ------------------------------------------------------------ the choice

    def _choose(self, decodes: list[Request], state: State, now: float, prefilling: bool) -> Option:
        """The option to be in force from this edge on. A pass that has begun in layer groups leaves only the splits."""
        batch = len(decodes)
        context = sum(r.scheduled + 1 for r in decodes)
        backlog = self._backlog(state)
        found = self._price(backlog, batch, context)
        if prefilling:
            found = [option for option in found if not option.chunk] or found
        allowed_s = MARGIN * self._allowed(decodes, now)
        need = self._needed_rate(state, now)
        before = self.choice
        fastest = max(option.rate for option in found)

        def cost(option: Option) -> tuple[float, float]:
            late = max(0.0, option.period_s / allowed_s - 1) * self.scheduler.tbt_weight
            slow = min(1.0, max(0.0, need / option.rate - 1)) * self.scheduler.ttft_weight
            stays = before is not None and option.chunk == before.chunk and option.units == before.units
            stick = STICK if stays else 1.0
            return (round(late + slow, 2), -(option.gain + HASTE * option.rate / fastest) * stick)

        best = min(found, key=cost)
        self._note(best, found, allowed_s, need)
        return best

    def _note(self, best: Option, found: list[Option], allowed_s: float, need: float) -> None:
        """Count what was decided, and why the device is not split."""
        self.decisions["fused" if best.chunk else "split"] += 1
        if best.period_s > allowed_s:
            self.decisions["none meets tpot"] += 1
        if not best.chunk:
            return
        splits = [option for option in found if not option.chunk]
        in_time = [option for option in splits if option.period_s <= allowed_s]
        if not in_time:
            self.fallbacks["no split meets tpot"] += 1
        elif all(option.rate < need for option in in_time) and best.rate >= need:
            self.fallbacks["no split meets ttft"] += 1
        else:
            self.fallbacks["fused gains more"] += 1

    def _price(self, backlog: Backlog, batch: int, context: int) -> list[Option]:
        if self._priced_version != self.belief.version or len(self._priced) > 4096:
            self._priced.clear()
            self._priced_version = self.belief.version
        # To about 10 %: close enough, and most edges are priced already.
        key = (_coarse(backlog.tokens), _coarse(backlog.squares), _coarse(backlog.products), _coarse(batch), _coarse(context))
        if key not in self._priced:
            self._priced[key] = options(
                self.belief, backlog, batch, context, self.units, self.layers, self.levels, self.scheduler.max_pass_tokens
            )
        return self._priced[key]

    def _allowed(self, decodes: list[Request], now: float) -> float:
        """Time until the next tokens are due: the target, more if every request is ahead of it, within its longest gap."""
        least = math.inf
        for request in decodes:
            targets = self._targets(request)
            due_s = request.token_s[0] + targets.tpot_s * len(request.output) - now
            least = min(least, min(targets.itl_s, max(targets.tpot_s, due_s)))
        return least

    def _pauses(self, decodes: list[Request], state: State, now: float) -> bool:
        """Whether decode lets the next layer group run alone: a first token is about to be late, and no next token would be."""
        whole = state.lanes[1].open
        if whole is None or self.choice is None:
            return False
        due = min(self._due(r) for r in whole.requests)
        left = 1 - whole.cursor / self.layers
        left_s = left * self._alone_s(whole.work)
        beside_s = left * whole.work.prefill_tokens / self.choice.rate
        if not (now + left_s < due < now + beside_s):
            return False
        return self._allowed(decodes, now) > left_s + 2 * self.choice.period_s

    def _needed_rate(self, state: State, now: float) -> float:
        """Prefill tokens per second that bring every prompt in time that still can be, in order of urgency."""
        todo = [r for r in state.running.values() if r.computed < r.target and not r.output]
        todo = self._by_urgency([*todo, *self._waiting[:64]], now)
        tokens, need = 0, 0.0
        for request in todo:
            left_s = self._due(request) - now
            if left_s < self._prompt_seconds(request):
                continue
            tokens += max(1, (request.target or len(request.arrive.prompt)) - request.computed)
            need = max(need, tokens / left_s)
        return need

    def _backlog(self, state: State) -> Backlog:
        """What is to be prefilled soon: what is admitted, up to one pass."""
        todo = [r for r in state.running.values() if r.computed < r.target]
        picks: list[tuple[Request, int]] = []
        room = self.scheduler.max_pass_tokens
        for request in todo:
            left = request.target - request.computed
            if picks and left > room:
                break
            picks.append((request, left))
            room -= left
        return _backlog(picks)

    # ------------------------------------------------------------ targets

    def _targets_default(self) -> Targets:
        scheduler = self.scheduler
        tpot_s = scheduler.tpot_s or max(0.025, 3 * self._step_s())
        return Targets(scheduler.ttft_s or 1.0, tpot_s, scheduler.itl_s or LONGEST_GAP * tpot_s)

    def _targets(self, request: Request) -> Targets:
        default, slo = self._targets_default(), request.arrive.slo
        tpot_s = slo.tpot_s or default.tpot_s
        itl_s = slo.itl_s or (LONGEST_GAP * tpot_s if slo.tpot_s else default.itl_s)
        return Targets(slo.ttft_s or default.ttft_s, tpot_s, itl_s)

    def _due(self, request: Request) -> float:
        """When its first token is due."""
        scheduler, slo = self.scheduler, request.arrive.slo
        target_s = slo.ttft_s or scheduler.ttft_s
        if target_s is None:
            target_s = max(1.0, 10 * self._prompt_seconds(request))
        return request.arrival_s + max(target_s, (scheduler.ttft_per_token_s or 0.0) * len(request.arrive.prompt))

    def _urgency(self, request: Request, now: float) -> tuple[int, int, float, int]:
        """Order of prefills: priority, those that have waited very long, those that can be in time by slack, then the late ones."""
        due = self._due(request)
        if now > request.arrival_s + PATIENCE * (due - request.arrival_s):
            group = 0
        else:
            group = 1 if now + self._prompt_seconds(request) <= due else 2
        slack = due - self._prompt_seconds(request)
        return (-request.arrive.priority, group, slack if group < 2 else self._prompt_seconds(request), request.serial)

    def _by_urgency(self, requests: list[Request], now: float) -> list[Request]:
        return sorted(requests, key=lambda r: self._urgency(r, now))

    # ------------------------------------------------------------ prices of single things

    def _prompt_seconds(self, request: Request) -> float:
        """Its whole prompt alone on the whole device."""
        tokens = request.target or len(request.arrive.prompt)
        left = max(1, tokens - request.computed)
        return self._alone_s(
            Work(left, left * left, left * request.computed, 1, samples=1, last_layer=self.layers, layers=self.layers)
        )

    def _alone_s(self, work: Work) -> float:
        return self.belief.seconds(_all_layers(work), self.units)

    def _step_s(self) -> float:
        """A decode step of one request with a short context, on the whole device: the device's own tempo."""
        return self.belief.seconds(Work(0, 0, 0, 0, 1, 512, 1, 0, self.layers, self.layers), self.units)


def _all_layers(work: Work) -> Work:
    if work.first_layer == 0 and work.last_layer == work.layers:
        return work
    return Work(
        work.prefill_tokens,
        work.prefill_squares,
        work.prefill_reused,
        work.prefill_requests,
        work.decode_batch,
        work.decode_context,
        work.samples,
        0,
        work.layers,
        work.layers,
    )


def _backlog(picks: list[tuple[Request, int]]) -> Backlog:
    tokens = sum(n for _, n in picks)
    squares = sum(n * n for _, n in picks)
    products = sum(n * (r.target - n) for r, n in picks)
    return Backlog(tokens, squares, products, len(picks))


def _coarse(value: int) -> int:
    """About log1.1(value): equal for values within 10 %."""
    return round(10.5 * math.log(value)) if value > 0 else -1
