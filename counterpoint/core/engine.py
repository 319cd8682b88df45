"""Engine: the state machine that turns events into commands.

It owns every request and pass; core/admission.py has the slots and pages. It is deterministic: the
same events at the same times give the same commands. Each request gets exactly its tokens and one
finish. The engine reads no clock, touches no tensor and never waits: time enters with `on_event`
and `schedule`.
"""

from __future__ import annotations

from counterpoint.core.admission import Admission
from counterpoint.core.batch_builder import align_with_segments, make_pass
from counterpoint.core.limits import EngineLimits
from counterpoint.core.metrics import ActiveUnitsModel, EngineCounters
from counterpoint.core.request import DONE, PREFILL, Phase, Request
from counterpoint.core.state import EngineState, LaneState, Pass
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


class Engine:
    """`active_units_model`: for devices that do not report active units (core/metrics.py)."""

    def __init__(
        self,
        limits: EngineLimits,
        policy: Policy,
        active_units_model: ActiveUnitsModel | None = None,
    ) -> None:
        self.limits = limits
        self.emit_deltas = True  # a simulation, which has no client, turns it off
        self.policy = policy
        self.state = EngineState(policy.lanes, limits.units, limits.layers, limits.overlap)
        # Until the client has its finish and nothing in flight names the request.
        self.requests: dict[str, Request] = {}
        self.counters = EngineCounters(limits.units, active_units_model)
        self._commands: list[Command] = []
        self.admission = Admission(limits, policy, self.state, self.counters, self._commands)
        self.page_pool = self.admission.page_pool
        self._handoffs = self.admission.handoffs
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
        else:
            request = self.requests.get(event.id)
            if request is not None:
                self._change_request(now, request, event)

    def schedule(self, now: float) -> list[Command]:
        """Give every lane with room its next step. The commands must be submitted in this order."""
        for lane in self.state.lanes.values():
            self._discard_dead_passes(lane)
        progress = True
        while progress:
            self.admission.admit(now)
            progress = False
            for lane in self.state.lanes.values():
                while lane.has_room and self._launch_next(lane, now):
                    progress = True
        self.counters.note_idle_reasons(self.state, bool(self.admission.waiting))
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    # ------------------------------------------------------------ out

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_progress(self) -> list[Progress]:
        """What KV transfer must know of the requests of which this engine runs a part."""
        return self._handoffs.take_progress()

    @property
    def idle(self) -> bool:
        return not self.requests

    def stats(self) -> Stats:
        return self.counters.stats(
            self.policy.report(),
            self.state,
            waiting=len(self.admission.waiting),
            running=len(self.state.running),
            pages_total=self.page_pool.total,
            pages_free=self.page_pool.free,
            pages_cached=self.page_pool.cached,
            page_tokens=self.limits.page_tokens,
        )

    # ------------------------------------------------------------ events

    def _add_request(self, now: float, event: AddRequest) -> None:
        if event.id in self.requests:
            return
        request = Request(
            event,
            now,
            arrival_index=self._next_arrival,
            output=list(event.generated_prefix),
            stop_token_ids=self.limits.stop_token_ids(event.sampling),
            pinned=event.disagg_role is not DisaggRole.WHOLE,
        )
        self._next_arrival += 1
        if event.generated_prefix or event.disagg_role is DisaggRole.DECODE:
            # The engine that computed the prompt first has sent them.
            request.prompt_logprobs_sent = len(event.prompt) - 1
        problem = self.limits.rejection_reason(event)
        if problem:
            self._outputs += [
                OutputDelta(event.id, finish_reason=FinishReason.ERROR, error=problem),
                request.to_timing(now, FinishReason.ERROR),
            ]
            self.counters.add_finished(FinishReason.ERROR)
            return
        self.requests[event.id] = request
        self.admission.enqueue(request)

    def _change_request(
        self, now: float, request: Request, event: Abort | ResumeDecode | Release
    ) -> None:
        if isinstance(event, Abort):
            if request.phase is not Phase.DONE:
                self._finish_early(request, now, FinishReason.ABORT)
        elif isinstance(event, Release):
            if request.pinned:
                request.pinned = False
                self._set_done(request)
        elif request.phase is Phase.HELD and self._handoffs.resume_decode(
            request, event.token, now
        ):
            self.admission.init_slot(request, request.pages)

    def _on_step_done(self, now: float, done: StepDone) -> None:
        lane = self.state.lanes[done.lane]
        step, batch = lane.in_flight.pop(0)
        if step.id != done.step:
            raise AssertionError(
                f"lane {done.lane} finished step {done.step}, but step {step.id} is its oldest"
            )
        batch.in_flight -= 1
        co_running = next(
            (
                other.in_flight[0][0]
                for other in self.state.lanes.values()
                if other.in_flight and other is not lane
            ),
            None,
        )
        self.policy.observe(step, done, co_running)
        self.counters.on_step_done(step, done, now)
        if done.error:
            for request in batch.requests:
                if request.phase is not Phase.DONE:
                    self._finish_early(request, now, FinishReason.ERROR, done.error)
        if step.last_layer == self.limits.layers:
            self._on_pass_done(now, batch, done)
        elif not done.error:
            self._handoffs.on_layers_computed(batch, step.last_layer)

    def _on_pass_done(self, now: float, batch: Pass, done: StepDone) -> None:
        segments, requests = batch.segments, batch.requests
        for segment, request, prompt_logprobs in zip(
            segments, requests, done.prompt_logprobs, strict=False
        ):
            if prompt_logprobs and request.phase is not DONE:
                self._emit_prompt_logprobs(request, segment, prompt_logprobs)
        size = self.limits.page_tokens
        tokens = align_with_segments(done.tokens, segments)
        logprobs = align_with_segments(done.logprobs, segments)
        for segment, request, token, logprob in zip(
            segments, requests, tokens, logprobs, strict=True
        ):
            request.open_passes -= 1
            if request.phase is DONE:
                self._free_if_unused(request)
                continue
            request.computed_tokens = computed = segment.start + segment.tokens
            if request.pinned:
                self._handoffs.on_computed(request)
            # KV that led to no finite logits is not shared.
            if computed >= (request.registered_pages + 1) * size and (token is None or token >= 0):
                self.admission.prefix_cache.register(request)
            if token is not None:
                self._add_token(request, now, token, logprob)
            if request.preempt_pending and not request.open_passes and request.phase is not DONE:
                self.admission.preempt(request)

    def _emit_prompt_logprobs(
        self, request: Request, segment: Segment, logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        """Send those behind `segment.start` that were not sent before a preemption."""
        new = logprobs[request.prompt_logprobs_sent - segment.start :]
        if new:
            request.prompt_logprobs_sent += len(new)
            self._outputs.append(OutputDelta(request.id, prompt_logprobs=new))

    def _add_token(
        self, request: Request, now: float, token: int, logprobs: TokenLogprobs | None
    ) -> None:
        if token < 0:
            self._finish_early(request, now, FinishReason.ERROR, UNSAMPLED_REASONS[token])
            return
        output = request.output
        finish, stop_reason, cached_tokens = None, None, 0
        if request.phase is PREFILL:
            self.state.set_phase(request, Phase.HELD if request.pinned else Phase.DECODE)
            if len(output) == len(request.input.generated_prefix):
                cached_tokens = request.cached_tokens
        output.append(token)
        request.token_s.append(now)
        self.counters.generated_tokens += 1
        if token in request.stop_token_ids:
            finish, stop_reason = FinishReason.STOP, token
        elif len(output) >= request.input.sampling.max_tokens:
            finish = FinishReason.LENGTH
        if self.emit_deltas:
            entry = () if logprobs is None else (logprobs,)
            self._outputs.append(
                OutputDelta(request.id, (token,), entry, None, finish, stop_reason, cached_tokens)
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
        if request.phase is Phase.WAITING:
            self.admission.waiting.remove(request)
        self.state.set_phase(request, Phase.DONE)
        self._free_if_unused(request)

    def _free_if_unused(self, request: Request) -> None:
        """Forget a request that is done, unless a pass names it or it is pinned."""
        if request.open_passes or request.pinned:
            return
        del self.requests[request.id]
        self.admission.free(request)

    # ------------------------------------------------------------ lanes

    def _launch_next(self, lane: LaneState, now: float) -> bool:
        """Launch one step on a lane that has room; False if there is nothing for it now."""
        batch = lane.open_pass
        if batch is None:
            return self._start_pass(lane, now)
        if not batch.alive:
            return False  # discarded when its steps in flight have come back
        if lane.suspended is None and self.policy.should_preempt(lane.lane, batch, self.state, now):
            lane.open_pass, lane.suspended = None, batch
            if self._start_pass(lane, now):
                self.counters.overtakes += 1
                return True
            lane.open_pass, lane.suspended = batch, None
        step = self.policy.next_layers(lane.lane, batch, self.state, now)
        if step is None:
            return False
        self._launch(lane, now, batch, *step)
        return True

    def _start_pass(self, lane: LaneState, now: float) -> bool:
        """Launch the first step of a new pass on a lane without an open one.

        False if the policy plans none, or no request of the plan gets its pages.
        """
        plan = self.policy.next_batch(lane.lane, self.state, now)
        if plan is None:
            return False
        batch = make_pass(
            plan, self._new_id, lane.lane.id, self.limits, self.admission.reserve_pages
        )
        if batch is None:
            return False
        self._launch(lane, now, batch, plan.units, plan.layers or self.limits.layers)
        return True

    def _launch(self, lane: LaneState, now: float, batch: Pass, units: int, layers: int) -> None:
        first, last = batch.next_layer, min(batch.next_layer + layers, self.limits.layers)
        assert last > first and 0 < units <= self.state.free_units(lane.lane), (
            "the policy asked for layers or units there are not"
        )
        work = batch.work.over_layers(first, last)
        step = Step(
            self._new_id(), lane.lane.id, batch.id, first, last, units, batch.segments, work
        )
        batch.next_layer = last
        batch.in_flight += 1
        if last < self.limits.layers:
            lane.open_pass = batch
        else:
            lane.open_pass, lane.suspended = lane.suspended, None
        lane.in_flight.append((step, batch))
        self._commands.append(step)
        self.counters.on_launch(lane, self.state, now)

    def _discard_dead_passes(self, lane: LaneState) -> None:
        """Discard passes that stand between two layer groups and whose requests have all ended."""
        for batch in (lane.open_pass, lane.suspended):
            if batch is None or batch.alive or batch.in_flight:
                continue
            self._commands.append(DiscardPass(batch.id))
            if batch is lane.open_pass:
                lane.open_pass, lane.suspended = lane.suspended, None
            else:
                lane.suspended = None
            for request in batch.requests:
                request.open_passes -= 1
                self._free_if_unused(request)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
