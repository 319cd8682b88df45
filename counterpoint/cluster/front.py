"""Front: all requests on their way through the pools, and what workers and clients must be told.

Owns: the Dispatch of every living request. Promises: pure; what workers report in any order ends in one stream of tokens per
client; reports about requests that nobody waits for make their workers let go.
Must not: choose workers (`pick` does), or hold what a client has already got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from counterpoint.cluster import nouns
from counterpoint.cluster.dispatch import About, Action, Again, Deliver, Dispatch, Drop, Elsewhere, Finished, Keep, LetGo, OnLoss
from counterpoint.cluster.messages import Sampled
from counterpoint.cluster.nouns import Ended, Grain, Order, Reroute, handoff_of
from counterpoint.types import Arrive, Delta, Finish, Part


class Route(NamedTuple):
    """Where a request goes: one worker for all of it, or two and the grain in which KV is sent."""

    prefill: str
    decode: str
    grain: Grain = Grain.LAYER


# (request, worker to avoid, prefill worker if that is settled) -> Route, or None: nobody can take it
Pick = Callable[[Arrive, str, str], Route | None]


class ToWorker(NamedTuple):
    """`decode`: the worker that a Start or Redirect is to be linked to."""

    worker: str
    order: Order
    decode: str = ""


class ToClient(NamedTuple):
    id: str
    news: Deliver | About | Finished


class Front:
    """`deadline_s`: from the start of a prefill to the end of its handoff."""

    def __init__(
        self, pick: Pick, deadline_s: float, retries: int = 1, on_loss: OnLoss = OnLoss.FAIL, may_stay: bool = True
    ) -> None:
        self.pick = pick
        self.deadline_s = deadline_s
        self.retries = retries
        self.on_loss = on_loss
        self.may_stay = may_stay
        self.requests: dict[str, Dispatch] = {}
        self._given: dict[str, int] = {}  # by the engine's name: tokens it has given, counted from the prefill worker's first
        self._names: dict[str, list[str]] = {}  # request -> its engine names in `_given`
        self._out: list[ToWorker | ToClient] = []

    def take(self) -> list[ToWorker | ToClient]:
        """What is to be told, in order."""
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------ clients

    def submit(self, arrive: Arrive) -> None:
        dispatch = Dispatch(arrive, self.retries, self.on_loss, self.may_stay)
        self.requests[arrive.id] = dispatch
        self._act(dispatch, dispatch.begin())

    def withdraw(self, id: str) -> None:
        """The client is gone."""
        dispatch = self.requests.get(id)
        if dispatch is not None:
            self._act(dispatch, dispatch.withdrawn())

    # ------------------------------------------------------------ workers

    def report(self, worker: str, report: Ended | Reroute | Delta) -> None:
        """What a worker says; its words must come in their order."""
        if isinstance(report, Delta):
            self._delta(report)
            return
        dispatch = self.requests.get(report.handoff.request)
        if dispatch is None:
            if isinstance(report, Reroute):
                self._out.append(ToWorker(worker, nouns.Settle(report.source, "nobody waits for it")))
        elif isinstance(report, Reroute):
            self._act(dispatch, dispatch.rerouted(report))
        else:
            self._act(dispatch, dispatch.ended(report))

    def lost(self, worker: str) -> None:
        """A worker's process is gone."""
        for dispatch in tuple(self.requests.values()):
            self._act(dispatch, dispatch.lost(worker))

    def _delta(self, delta: Delta) -> None:
        known = handoff_of(delta.id)
        dispatch = self.requests.get(known[0].request) if known is not None else None
        if known is None or dispatch is None:
            return
        handoff, part = known
        if delta.prompt_logprobs:
            self._act(dispatch, dispatch.told(handoff, part, delta.prompt_logprobs))
        if delta.id not in self._given:
            self._given[delta.id] = 1 if part is Part.DECODE else 0
            self._names.setdefault(handoff.request, []).append(delta.id)
        offset = self._given[delta.id]
        self._given[delta.id] += len(delta.tokens)
        refused = delta.finish is Finish.ERROR and part is Part.DECODE and offset == 1 and not dispatch.settled
        if delta.finish is Finish.ABORT or refused:
            return  # withdrawn, or never adopted: Ended and Reroute say what follows
        logprobs = delta.logprobs or (None,) * len(delta.tokens)
        tokens = tuple(Sampled(*pair, delta.cached_tokens) for pair in zip(delta.tokens, logprobs, strict=True))
        finish = Finished(delta.finish, delta.error, delta.stopped_by) if delta.finish is not None else None
        self._act(dispatch, dispatch.took(handoff, part, offset, tokens, finish))

    # ------------------------------------------------------------ actions

    def _act(self, dispatch: Dispatch, actions: list[Action]) -> None:
        id = dispatch.arrive.id
        for action in actions:
            if isinstance(action, Deliver | About | Finished):
                self._out.append(ToClient(id, action))
            elif isinstance(action, Again):
                self._start(dispatch, action)
            elif isinstance(action, Elsewhere):
                self._elsewhere(dispatch, action)
            elif isinstance(action, Drop):
                self._out.append(ToWorker(action.worker, nouns.Withdraw(action.handoff)))
            elif isinstance(action, Keep):
                self._out.append(ToWorker(action.prefill, nouns.Stay(action.source)))
            elif isinstance(action, LetGo):
                self._out.append(ToWorker(action.prefill, nouns.Settle(action.source, action.reason)))
        if dispatch.over and self.requests.pop(id, None) is not None:
            for name in self._names.pop(id, ()):
                del self._given[name]

    def _start(self, dispatch: Dispatch, action: Again) -> None:
        route = self.pick(action.arrive, action.avoid, "")
        if route is None:
            self._act(dispatch, dispatch.no_worker())
            return
        prefill, decode, grain = route
        dispatch.sent_to(prefill, decode)
        if prefill == decode:
            self._out.append(ToWorker(prefill, nouns.Plain(action.handoff, action.arrive)))
        else:
            start = nouns.Start(action.handoff, action.arrive, 0, self.deadline_s, grain)
            self._out.append(ToWorker(prefill, start, decode))

    def _elsewhere(self, dispatch: Dispatch, action: Elsewhere) -> None:
        """The source stays where it is; only another decode worker will do."""
        route = self.pick(dispatch.arrive, action.avoid, action.prefill)
        if route is None or route.decode == action.prefill:
            self._act(dispatch, dispatch.no_worker())
            return
        dispatch.sent_to(action.prefill, route.decode)
        self._out.append(ToWorker(action.prefill, nouns.Redirect(action.source, action.handoff, 0), route.decode))
