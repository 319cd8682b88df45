"""All requests of a pool, from the frontend: what workers and clients must be told.

Owns: the RequestDispatch of every unfinished request. Promises: pure; reports in any order become
one stream of tokens per client; a worker that reports on a finished request is told to release it.
Must not: choose workers (`choose_route` does), or keep what a client already has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from counterpoint.disagg import handoff_events
from counterpoint.disagg.dispatch import (
    Action,
    CancelAttempt,
    DecodeInPlace,
    DeliverPromptLogprobs,
    DeliverTokens,
    OnLoss,
    ReleaseSource,
    RequestDispatch,
    RequestFinished,
    Restart,
    RetryDecode,
)
from counterpoint.disagg.handoff_events import (
    HandoffEnded,
    Order,
    Reroute,
    TransferGranularity,
    handoff_of,
)
from counterpoint.disagg.messages import SampledToken
from counterpoint.types import AddRequest, DisaggRole, FinishReason, OutputDelta


class Route(NamedTuple):
    """One worker for all of a request, or two and the granularity in which KV is sent."""

    prefill: str
    decode: str
    granularity: TransferGranularity = TransferGranularity.LAYER


# (request, worker to avoid, prefill worker if it prefilled already) -> Route; None: no worker
ChooseRoute = Callable[[AddRequest, str, str], Route | None]


class ToWorker(NamedTuple):
    """`decode_worker`: to which StartHandoff or Redirect needs a link."""

    worker: str
    order: Order
    decode_worker: str = ""


class ToClient(NamedTuple):
    id: str
    update: DeliverTokens | DeliverPromptLogprobs | RequestFinished


class PoolFrontend:
    """`deadline_s`: from the start of a prefill to the end of its handoff."""

    def __init__(
        self,
        choose_route: ChooseRoute,
        deadline_s: float,
        retries: int = 1,
        on_loss: OnLoss = OnLoss.FAIL,
        decode_in_place: bool = True,
    ) -> None:
        self.choose_route = choose_route
        self.deadline_s = deadline_s
        self.retries = retries
        self.on_loss = on_loss
        self.decode_in_place = decode_in_place
        self.requests: dict[str, RequestDispatch] = {}
        # By engine id, tokens received, counted from the prefill worker's first.
        self._num_tokens: dict[str, int] = {}
        self._engine_ids: dict[str, list[str]] = {}  # request -> its keys in `_num_tokens`
        self._out: list[ToWorker | ToClient] = []

    def take_items(self) -> list[ToWorker | ToClient]:
        """What is to be sent since the last call, in order."""
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------ clients

    def add_request(self, arrive: AddRequest) -> None:
        dispatch = RequestDispatch(arrive, self.retries, self.on_loss, self.decode_in_place)
        self.requests[arrive.id] = dispatch
        self._apply(dispatch, dispatch.start())

    def abort(self, id: str) -> None:
        """The client is gone."""
        dispatch = self.requests.get(id)
        if dispatch is not None:
            self._apply(dispatch, dispatch.abort())

    # ------------------------------------------------------------ workers

    def on_report(self, worker: str, report: HandoffEnded | Reroute | OutputDelta) -> None:
        """A worker's reports must come in its order."""
        if isinstance(report, OutputDelta):
            self._on_output(report)
            return
        dispatch = self.requests.get(report.handoff.request)
        if dispatch is None:
            if isinstance(report, Reroute):
                self._out.append(
                    ToWorker(
                        worker,
                        handoff_events.SettleSource(report.source, "the request is finished"),
                    )
                )
        elif isinstance(report, Reroute):
            self._apply(dispatch, dispatch.on_reroute(report))
        else:
            self._apply(dispatch, dispatch.on_ended(report))

    def on_worker_lost(self, worker: str) -> None:
        """Its process is gone."""
        for dispatch in tuple(self.requests.values()):
            self._apply(dispatch, dispatch.on_worker_lost(worker))

    def _on_output(self, delta: OutputDelta) -> None:
        known = handoff_of(delta.id)
        dispatch = self.requests.get(known[0].request) if known is not None else None
        if known is None or dispatch is None:
            return
        handoff, part = known
        if delta.prompt_logprobs:
            self._apply(dispatch, dispatch.on_prompt_logprobs(handoff, part, delta.prompt_logprobs))
        if delta.id not in self._num_tokens:
            self._num_tokens[delta.id] = 1 if part is DisaggRole.DECODE else 0
            self._engine_ids.setdefault(handoff.request, []).append(delta.id)
        offset = self._num_tokens[delta.id]
        self._num_tokens[delta.id] += len(delta.tokens)
        refused = (
            delta.finish_reason is FinishReason.ERROR
            and part is DisaggRole.DECODE
            and offset == 1
            and not dispatch.settled
        )
        if delta.finish_reason is FinishReason.ABORT or refused:
            return  # HandoffEnded or Reroute decides what follows
        logprobs = delta.logprobs or (None,) * len(delta.tokens)
        tokens = tuple(
            SampledToken(*pair, delta.cached_tokens)
            for pair in zip(delta.tokens, logprobs, strict=True)
        )
        finish = (
            RequestFinished(delta.finish_reason, delta.error, delta.stop_reason)
            if delta.finish_reason is not None
            else None
        )
        self._apply(dispatch, dispatch.on_tokens(handoff, part, offset, tokens, finish))

    # ------------------------------------------------------------ actions

    def _apply(self, dispatch: RequestDispatch, actions: list[Action]) -> None:
        id = dispatch.request.id
        for action in actions:
            if isinstance(action, DeliverTokens | DeliverPromptLogprobs | RequestFinished):
                self._out.append(ToClient(id, action))
            elif isinstance(action, Restart):
                self._start_attempt(dispatch, action)
            elif isinstance(action, RetryDecode):
                self._retry_decode(dispatch, action)
            elif isinstance(action, CancelAttempt):
                self._out.append(
                    ToWorker(action.worker, handoff_events.WithdrawRequest(action.handoff))
                )
            elif isinstance(action, DecodeInPlace):
                self._out.append(
                    ToWorker(action.prefill_worker, handoff_events.StayInPlace(action.source))
                )
            elif isinstance(action, ReleaseSource):
                self._out.append(
                    ToWorker(
                        action.prefill_worker,
                        handoff_events.SettleSource(action.source, action.reason),
                    )
                )
        if dispatch.is_over and self.requests.pop(id, None) is not None:
            for name in self._engine_ids.pop(id, ()):
                del self._num_tokens[name]

    def _start_attempt(self, dispatch: RequestDispatch, action: Restart) -> None:
        route = self.choose_route(action.request, action.avoid, "")
        if route is None:
            self._apply(dispatch, dispatch.on_no_worker())
            return
        prefill, decode, granularity = route
        dispatch.assign(prefill, decode)
        if prefill == decode:
            self._out.append(
                ToWorker(prefill, handoff_events.RunWithoutHandoff(action.handoff, action.request))
            )
        else:
            start = handoff_events.StartHandoff(
                action.handoff, action.request, 0, self.deadline_s, granularity
            )
            self._out.append(ToWorker(prefill, start, decode))

    def _retry_decode(self, dispatch: RequestDispatch, action: RetryDecode) -> None:
        """Only the decode worker changes."""
        route = self.choose_route(dispatch.request, action.avoid, action.prefill_worker)
        if route is None or route.decode == action.prefill_worker:
            self._apply(dispatch, dispatch.on_no_worker())
            return
        dispatch.assign(action.prefill_worker, route.decode)
        self._out.append(
            ToWorker(
                action.prefill_worker,
                handoff_events.Redirect(action.source, action.handoff, 0),
                route.decode,
            )
        )
