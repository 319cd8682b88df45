"""Engine: the state machine that turns events into commands.

Owns: every request, slot, page and pass. Promises: deterministic (the same events at the same times give the same commands);
pages are conserved; each request gets exactly its tokens and one finish; the oldest request always advances, so none starves.
Must not: read a clock, touch a tensor, wait. Time enters with `handle` and `pump`.

Freeing is deferred: a slot and its pages go back only when no pass names them, so nothing in flight reads a reused page. Pages of
a request of which this engine has only a part are *kept* (core/handoff_state.py): others read or write them until Adopt or Release, so such
a request is not preempted either.

Room for pages is made in this order: free pages, then evicting cached ones, then preempting the request that is last in rank
(it is recomputed later, from what the prefix cache still has). A request never preempts one ahead of it, and one preempted
`max_preemptions` times comes back only with all the pages it can ever need: so preemptions are bounded.
"""

from __future__ import annotations

import bisect
import itertools

from msgspec.structs import replace

from counterpoint.core.batch_builder import align_with_segments, make_pass
from counterpoint.core.handoff_state import HandoffState
from counterpoint.core.limits import EngineLimits
from counterpoint.core.metrics import ActiveUnitsModel, EngineCounters
from counterpoint.core.page_pool import PagePool
from counterpoint.core.prefix_cache import PrefixCache
from counterpoint.core.request import DONE, PREFILL, Phase, Request
from counterpoint.core.state import EngineState, LaneState, Pass
from counterpoint.core.step_history import StepHistory
from counterpoint.interfaces import Policy
from counterpoint.stats import Stats
from counterpoint.types import (
    UNSAMPLED_REASONS,
    Abort,
    AddRequest,
    Command,
    DisaggRole,
    DiscardPass,
    Event,
    FinishReason,
    FreeSlot,
    InitSlot,
    Output,
    OutputDelta,
    Progress,
    Release,
    ResumeDecode,
    Segment,
    Step,
    StepDone,
    TokenLogprobs,
)

ADMISSION_SCAN = 64  # waiting requests looked at in one pump


class Engine:
    """`active`: how many of its units a step keeps at work, where the device does not tell (core/metrics.py)."""

    def __init__(
        self,
        limits: EngineLimits,
        policy: Policy,
        active_units_model: ActiveUnitsModel | None = None,
    ) -> None:
        self.limits = limits
        self.emit_deltas = (
            True  # of each token; a simulation has nobody who listens, and turns it off
        )
        self.policy = policy
        self.page_pool = PagePool(limits.pages)
        self.state = EngineState(policy.lanes, limits.units, limits.layers, limits.overlap)
        self.requests: dict[
            str, Request
        ] = {}  # until the client has its finish and nothing in flight names it
        self.waiting: list[Request] = []  # by rank
        self.prefix_cache = PrefixCache(self.page_pool, limits)
        self.handoffs = HandoffState(self.state, self.prefix_cache)
        self.counters = EngineCounters(limits.units, active_units_model)
        self.step_history = StepHistory()
        self._slots = list(range(limits.max_running - 1, -1, -1))
        self._commands: list[Command] = []
        self._outputs: list[Output] = []
        self._next_arrival = 0
        self._next_id = 0

    # ------------------------------------------------------------ in

    def on_event(self, now: float, event: Event) -> None:
        """Take one event. Unknown or repeated ids do no harm."""
        self.counters.add_elapsed(now, self.state)
        if isinstance(event, StepDone):
            self._on_step_done(now, event)
        elif isinstance(event, AddRequest):
            self._add_request(now, event)
        elif isinstance(event, ResumeDecode):
            request = self.requests.get(event.id)
            if (
                request is not None
                and request.phase is Phase.HELD
                and self.handoffs.resume_decode(request, event.token, now)
            ):
                self._init_slot(request, request.pages)
        elif isinstance(event, Release):
            request = self.requests.get(event.id)
            if request is not None and request.pinned:
                request.pinned = False
                self._set_done(request)
        else:
            self._abort(now, event)

    def schedule(self, now: float) -> list[Command]:
        """Give every lane that has room its next step; the commands, in the order in which they must be submitted."""
        for lane in self.state.lanes.values():
            self._discard_dead_passes(lane)
        progress = True
        while progress:
            self._admit(now)
            progress = False
            for lane in self.state.lanes.values():
                while lane.has_room and self._launch_next(lane, now):
                    progress = True
        self.counters.note_idle_reasons(self.state, bool(self.waiting))
        commands, self._commands = self._commands, []
        return commands

    # ------------------------------------------------------------ out

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_progress(self) -> list[Progress]:
        """For whoever moves KV: what has become of requests of which this engine has a part."""
        return self.handoffs.take_progress()

    @property
    def idle(self) -> bool:
        return not self.requests

    def stats(self) -> Stats:
        return self.counters.stats(
            self.policy.report(),
            waiting=len(self.waiting),
            running=len(self.state.running),
            pages_total=self.page_pool.total,
            pages_free=self.page_pool.free,
            pages_cached=self.page_pool.cached,
            page_tokens=self.limits.page_tokens,
            running_steps=self.step_history.running_steps(self.state),
            recent_steps=self.step_history.recent_steps(),
        )

    # ------------------------------------------------------------ events

    def _add_request(self, now: float, arrive: AddRequest) -> None:
        if arrive.id in self.requests:
            return
        request = Request(
            arrive,
            now,
            arrival_index=self._next_arrival,
            output=list(arrive.generated_prefix),
            pinned=arrive.disagg_role is not DisaggRole.WHOLE,
        )
        request.stop_token_ids = self.limits.stop_token_ids(arrive.sampling)
        self._next_arrival += 1
        if arrive.generated_prefix or arrive.disagg_role is DisaggRole.DECODE:
            request.prompt_logprobs_sent = (
                len(arrive.prompt) - 1
            )  # by whoever computed the prompt first
        problem = self.limits.rejection_reason(arrive)
        if problem:
            self._outputs += [
                OutputDelta(arrive.id, finish_reason=FinishReason.ERROR, error=problem),
                request.to_timing(now, FinishReason.ERROR),
            ]
            self.counters.add_finished(FinishReason.ERROR)
            return
        self.requests[arrive.id] = request
        bisect.insort(self.waiting, request, key=lambda r: r.rank)

    def _abort(self, now: float, abort: Abort) -> None:
        request = self.requests.get(abort.id)
        if request is not None and request.phase is not Phase.DONE:
            self._finish_early(request, now, FinishReason.ABORT)

    def _on_step_done(self, now: float, done: StepDone) -> None:
        lane = self.state.lanes[done.lane]
        step, whole = lane.in_flight.pop(0)
        if step.id != done.step:
            raise AssertionError(
                f"lane {done.lane} finished step {done.step}, but step {step.id} is its oldest"
            )
        whole.in_flight -= 1
        beside = next(
            (
                other.in_flight[0][0]
                for other in self.state.lanes.values()
                if other.in_flight and other is not lane
            ),
            None,
        )
        self.policy.observe(step, done, beside)
        self.counters.add_step(step, done)
        self.step_history.on_step_done(step, done, now)
        if done.error:
            for request in whole.requests:
                if request.phase is not Phase.DONE:
                    self._finish_early(request, now, FinishReason.ERROR, done.error)
        if step.last_layer == self.limits.layers:
            self._on_pass_done(now, whole, done)
        elif not done.error:
            self.handoffs.on_layers_computed(whole, step.last_layer)

    def _on_pass_done(self, now: float, whole: Pass, done: StepDone) -> None:
        for segment, request, told in zip(
            whole.segments, whole.requests, done.prompt_logprobs, strict=False
        ):
            if told and request.phase is not DONE:
                self._emit_prompt_logprobs(request, segment, told)
        segments, size = whole.segments, self.limits.page_tokens
        tokens, logprobs = (
            align_with_segments(done.tokens, segments),
            align_with_segments(done.logprobs, segments),
        )
        for segment, request, token, logprob in zip(
            segments, whole.requests, tokens, logprobs, strict=True
        ):
            request.open_passes -= 1
            if request.phase is DONE:
                self._free_if_unused(request)
                continue
            request.computed_tokens = computed = segment.start + segment.tokens
            if request.pinned:
                self.handoffs.on_computed(request)
            if computed >= (request.registered_pages + 1) * size and (token is None or token >= 0):
                self.prefix_cache.register(request)  # what gave no finite logits is no one's prefix
            if token is not None:
                self._add_token(request, now, token, logprob)
            if request.preempt_pending and not request.open_passes and request.phase is not DONE:
                self._preempt(request)

    def _emit_prompt_logprobs(
        self, request: Request, segment: Segment, logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        """Pass on the log-probabilities of the prompt tokens behind `segment.start`, those told before a preemption left out."""
        fresh = logprobs[request.prompt_logprobs_sent - segment.start :]
        if fresh:
            request.prompt_logprobs_sent += len(fresh)
            self._outputs.append(OutputDelta(request.id, prompt_logprobs=fresh))

    def _add_token(
        self, request: Request, now: float, token: int, logprobs: TokenLogprobs | None
    ) -> None:
        if token < 0:
            self._finish_early(request, now, FinishReason.ERROR, UNSAMPLED_REASONS[token])
            return
        arrive, output = request.input, request.output
        finish, stopped_by, cached = None, None, 0
        if request.phase is PREFILL:
            self.state.set_phase(request, Phase.HELD if request.pinned else Phase.DECODE)
            if len(output) == len(arrive.generated_prefix):
                cached = request.cached_tokens
        output.append(token)
        request.token_s.append(now)
        self.counters.generated_tokens += 1
        if token in request.stop_token_ids:
            finish, stopped_by = FinishReason.STOP, token
        elif len(output) >= arrive.sampling.max_tokens:
            finish = FinishReason.LENGTH
        if self.emit_deltas:
            told = () if logprobs is None else (logprobs,)
            self._outputs.append(
                OutputDelta(arrive.id, (token,), told, None, finish, stopped_by, cached)
            )
        if finish is not None:
            self._finish(request, now, finish)

    # ------------------------------------------------------------ ends

    def _finish_early(
        self, request: Request, now: float, finish: FinishReason, error: str = ""
    ) -> None:
        """End a request for another reason than its own tokens."""
        self._outputs.append(OutputDelta(request.id, finish_reason=finish, error=error))
        self._finish(request, now, finish)

    def _finish(self, request: Request, now: float, finish: FinishReason) -> None:
        self._outputs.append(request.to_timing(now, finish))
        self.counters.add_finished(finish)
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self.state.output_lengths.add(len(request.output))
        self._set_done(request)

    def _set_done(self, request: Request) -> None:
        """Nothing more becomes of it."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        self.state.set_phase(request, Phase.DONE)
        self._free_if_unused(request)

    def _free_if_unused(self, request: Request) -> None:
        """The last trace of a finished request, unless a pass names it or its pages are kept."""
        if request.open_passes or request.pinned:
            return
        del self.requests[request.id]
        self._free(request)

    def _free(self, request: Request) -> None:
        """Give back slot and pages, if it has them. No pass names the request."""
        if request.slot < 0:
            return
        if request.slot_initialised:
            self._commands.append(FreeSlot(request.slot))
        request.slot_initialised = False
        self._slots.append(request.slot)
        request.slot = -1
        self.page_pool.release(request.pages)
        request.pages = []
        self.prefix_cache.unmark_computing(request)
        del self.state.running[request.id]

    def _preempt(self, request: Request) -> None:
        """Back to the queue, at its old rank; its tokens stay."""
        self.prefix_cache.register(request)
        self._free(request)
        self.state.set_phase(request, Phase.WAITING)
        request.preempt_pending = False
        request.scheduled_tokens = request.computed_tokens = request.registered_pages = (
            request.pages_sent
        ) = 0
        request.preemptions += 1
        self.counters.preemptions += 1
        bisect.insort(self.waiting, request, key=lambda r: r.rank)

    # ------------------------------------------------------------ admission

    def _admit(self, now: float) -> None:
        """Give slots and prompt pages to waiting requests, in the policy's order. One that does not fit is overtaken by those
        behind it that do, for at most `max_bypass_s`."""
        if not self.waiting or not self._slots:
            return
        backlog = sum(
            r.prefill_target
            for r in self.state.prefilling.values()
            if not r.computed_tokens and not r.open_passes
        )
        if backlog < self.limits.max_pass_tokens:
            self.prefix_cache.update_matches(itertools.islice(self.waiting, ADMISSION_SCAN))
        for request in tuple(
            itertools.islice(self.policy.admission_order(self.waiting, now), ADMISSION_SCAN)
        ):
            if not self._slots or backlog >= self.limits.max_pass_tokens:
                return
            admitted = self._try_admit(request, now)
            if admitted:
                request.blocked_since_s = None
                backlog += request.unscheduled_tokens if request.phase is Phase.PREFILL else 0
            elif admitted is False:
                request.blocked_since_s = (
                    now if request.blocked_since_s is None else request.blocked_since_s
                )
                if now - request.blocked_since_s >= self.limits.max_bypass_s:
                    return

    def _try_admit(self, request: Request, now: float) -> bool | None:
        """True: admitted. False: does not fit. None: another request is computing its prefix, so it waits for that."""
        limits, size = self.limits, self.limits.page_tokens
        tokens = request.tokens
        hits = self.prefix_cache.match(request, len(tokens))
        if hits is None:
            return None
        all_pages = request.preemptions >= limits.max_preemptions
        wanted = max(len(tokens), request.max_cache_tokens) if all_pages else len(tokens)
        fresh = -(-wanted // size) - len(hits)
        spare = len(self.state.running)  # so that those who run can grow a little
        if fresh + spare > self.page_pool.available - self.page_pool.count_evictable(hits):
            return False
        self.page_pool.ref(hits)
        taken = self.page_pool.allocate(fresh)
        assert taken is not None
        self._allocate(request, now, tokens, hits, taken)
        return True

    def _allocate(
        self,
        request: Request,
        now: float,
        tokens: tuple[int, ...],
        hits: list[int],
        taken: list[int],
    ) -> None:
        size = self.limits.page_tokens
        self.waiting.remove(request)
        self.state.set_phase(request, Phase.PREFILL)
        request.slot = self._slots.pop()
        request.pages = hits + taken
        request.prefill_target = len(tokens)
        request.scheduled_tokens = request.computed_tokens = len(hits) * size
        request.registered_pages, request.matched_tokens = len(hits), 0
        self.counters.add_prefix_lookup(len(tokens), request.computed_tokens)
        if request.admitted_s is None:
            request.admitted_s = now
            request.cached_tokens = request.computed_tokens
            if request.input.disagg_role is not DisaggRole.DECODE:
                self.counters.prompt_tokens += len(tokens)
        self.state.running[request.id] = request
        if request.pinned:
            self.handoffs.on_admitted(request, len(hits))
            if request.phase is Phase.HELD:
                return
        self.prefix_cache.mark_computing(request)
        self._init_slot(request, hits)

    def _init_slot(self, request: Request, pages: list[int]) -> None:
        """Give the executor the request's row, with `pages` as the start of its block table."""
        request.slot_initialised = True
        request.pages_sent = len(pages)
        arrive = request.input
        self._commands.append(
            InitSlot(
                request.slot, request.tokens, len(arrive.prompt), tuple(pages), arrive.sampling
            )
        )

    # ------------------------------------------------------------ lanes

    def _launch_next(self, lane: LaneState, now: float) -> bool:
        """Launch one step on a lane that has room; False if there is nothing for it now."""
        whole = lane.open_pass
        if whole is not None and not whole.alive:
            return False  # given up when its steps in flight have come back
        if (
            whole is not None
            and lane.suspended is None
            and self.policy.should_preempt(lane.lane, whole, self.state, now)
        ):
            lane.open_pass, lane.suspended = None, whole
            if self._start_pass(lane, now):
                self.counters.overtakes += 1
                return True
            lane.open_pass, lane.suspended = whole, None
        if whole is None:
            return self._start_pass(lane, now)
        turn = self.policy.next_layers(lane.lane, whole, self.state, now)
        if turn is None:
            return False
        self._launch(lane, now, whole, *turn)
        return True

    def _start_pass(self, lane: LaneState, now: float) -> bool:
        """Launch the first step of a new pass on a lane without an open one; False if the policy has none or no page is left."""
        fill = self.policy.next_batch(lane.lane, self.state, now)
        whole = (
            make_pass(fill, self._new_id, lane.lane.id, self.limits, self._reserve_pages)
            if fill is not None
            else None
        )
        if fill is None or whole is None:
            return False
        self._launch(lane, now, whole, fill.units, fill.layers or self.limits.layers)
        return True

    def _launch(self, lane: LaneState, now: float, whole: Pass, units: int, layers: int) -> None:
        first, last = whole.next_layer, min(whole.next_layer + layers, self.limits.layers)
        assert last > first and 0 < units <= self.state.free_units(lane.lane), (
            "the policy asked for layers or units there are not"
        )
        work = (
            whole.work
            if first == 0 and last == self.limits.layers
            else replace(whole.work, first_layer=first, last_layer=last)
        )
        step = Step(
            self._new_id(), lane.lane.id, whole.id, first, last, units, whole.segments, work
        )
        whole.next_layer = last
        whole.in_flight += 1
        if last < self.limits.layers:
            lane.open_pass = whole
        else:
            lane.open_pass, lane.suspended = lane.suspended, None
        lane.in_flight.append((step, whole))
        self._commands.append(step)
        self.counters.note_split(self.state)
        self.step_history.on_launch(lane, now)

    def _discard_dead_passes(self, lane: LaneState) -> None:
        """Give up passes that stand between two layer groups if all their requests have ended."""
        for whole in (lane.open_pass, lane.suspended):
            if whole is None or whole.alive or whole.in_flight:
                continue
            self._commands.append(DiscardPass(whole.id))
            if whole is lane.open_pass:
                lane.open_pass, lane.suspended = lane.suspended, None
            else:
                lane.suspended = None
            for request in whole.requests:
                request.open_passes -= 1
                self._free_if_unused(request)

    def _reserve_pages(self, request: Request, tokens: int) -> bool:
        """Make the block table long enough for `tokens`; may preempt requests that come after this one."""
        missing = -(-tokens // self.limits.page_tokens) - len(request.pages)
        while missing > 0:
            taken = self.page_pool.allocate(missing)
            if taken is not None:
                request.pages += taken
                return True
            if not self._make_room(request):
                return False
        return True

    def _make_room(self, request: Request) -> bool:
        """Preempt the running request of last rank behind `request`. False if there is none (those ahead, or those that
        hold all their pages, will finish and give pages back) or a pass still names it."""
        victim = request
        for other in self.state.running.values():
            movable = other.phase is not Phase.DONE and not other.pinned
            if (
                movable
                and other.rank > victim.rank
                and other.preemptions < self.limits.max_preemptions
            ):
                victim = other
        if victim is request:
            return False
        if victim.open_passes:
            victim.preempt_pending = True
            return False
        self._preempt(victim)
        return True

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
