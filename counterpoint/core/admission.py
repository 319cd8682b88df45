"""Which requests hold slots and pages: the waiting queue, admission, growth and preemption.

Room for pages is made in this order: free pages, then eviction of cached ones, then preemption of
the running request of last rank. A preempted request is recomputed later, from what the prefix
cache still has. A request never preempts one ahead of it. One preempted `max_preemptions` times
comes back only with all the pages it can ever need. So preemptions are bounded, and the oldest
request always advances.

Freeing is deferred: a slot and its pages go back only when no pass names them, so nothing in flight
reads a reused page. Pages of a pinned request (core/handoff_state.py) stay until ResumeDecode or
Release, so such a request is not preempted either.
"""

from __future__ import annotations

import bisect
import itertools

from counterpoint.core.handoff_state import HandoffState
from counterpoint.core.limits import EngineLimits
from counterpoint.core.metrics import EngineCounters
from counterpoint.core.page_pool import PagePool
from counterpoint.core.prefix_cache import PrefixCache
from counterpoint.core.request import Phase, Request
from counterpoint.core.state import EngineState
from counterpoint.interfaces import Policy
from counterpoint.types import Command, DisaggRole, FreeSlot, InitSlot

ADMISSION_SCAN = 64  # waiting requests that one scheduling round looks at


class Admission:
    """Owns the queue, the slots and the pages. Appends InitSlot and FreeSlot to `commands`."""

    def __init__(
        self,
        limits: EngineLimits,
        policy: Policy,
        state: EngineState,
        counters: EngineCounters,
        commands: list[Command],
    ) -> None:
        self.waiting: list[Request] = []  # by rank
        self.page_pool = PagePool(limits.pages)
        self.prefix_cache = PrefixCache(self.page_pool, limits)
        self.handoffs = HandoffState(state, self.prefix_cache)
        self._limits = limits
        self._policy = policy
        self._state = state
        self._counters = counters
        self._commands = commands
        self._slots = list(range(limits.max_running - 1, -1, -1))

    def enqueue(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=lambda r: r.rank)

    def admit(self, now: float) -> None:
        """Give slots and prompt pages to waiting requests, in the policy's order.

        Requests behind one that does not fit may pass it, for at most `max_bypass_s`.
        """
        if not self.waiting or not self._slots:
            return
        max_backlog = self._limits.max_pass_tokens
        backlog_tokens = sum(
            r.prefill_target
            for r in self._state.prefilling.values()
            if not r.computed_tokens and not r.open_passes
        )
        if backlog_tokens < max_backlog:
            self.prefix_cache.update_matches(itertools.islice(self.waiting, ADMISSION_SCAN))
        order = self._policy.admission_order(self.waiting, now)
        for request in tuple(itertools.islice(order, ADMISSION_SCAN)):
            if not self._slots or backlog_tokens >= max_backlog:
                return
            admitted = self._try_admit(request, now)
            if admitted:
                request.blocked_since_s = None
                if request.phase is Phase.PREFILL:
                    backlog_tokens += request.unscheduled_tokens
            elif admitted is False:
                if request.blocked_since_s is None:
                    request.blocked_since_s = now
                if now - request.blocked_since_s >= self._limits.max_bypass_s:
                    return

    def _try_admit(self, request: Request, now: float) -> bool | None:
        """True: admitted. False: does not fit. None: waits for a prefix that another computes."""
        tokens = request.tokens
        hits = self.prefix_cache.match(request, len(tokens))
        if hits is None:
            return None
        need = len(tokens)
        if request.preemptions >= self._limits.max_preemptions:
            need = max(need, request.max_cache_tokens)
        new_pages = -(-need // self._limits.page_tokens) - len(hits)
        spare = len(self._state.running)  # so that running requests can grow a little
        if new_pages + spare > self.page_pool.available - self.page_pool.count_evictable(hits):
            return False
        self.page_pool.ref(hits)
        pages = self.page_pool.allocate(new_pages)
        assert pages is not None
        self._start(request, now, tokens, hits, pages)
        return True

    def _start(
        self,
        request: Request,
        now: float,
        tokens: tuple[int, ...],
        hits: list[int],
        new_pages: list[int],
    ) -> None:
        """Move `request` from the queue into a slot, with pages for `tokens`."""
        self.waiting.remove(request)
        self._state.set_phase(request, Phase.PREFILL)
        request.slot = self._slots.pop()
        request.pages = hits + new_pages
        request.prefill_target = len(tokens)
        cached_tokens = len(hits) * self._limits.page_tokens
        request.scheduled_tokens = request.computed_tokens = cached_tokens
        request.registered_pages, request.matched_tokens = len(hits), 0
        self._counters.add_prefix_lookup(len(tokens), cached_tokens)
        if request.admitted_s is None:
            request.admitted_s = now
            request.cached_tokens = cached_tokens
            if request.input.disagg_role is not DisaggRole.DECODE:
                self._counters.prompt_tokens += len(tokens)
        self._state.running[request.id] = request
        if request.pinned:
            self.handoffs.on_admitted(request, len(hits))
            if request.phase is Phase.HELD:
                return
        self.prefix_cache.mark_computing(request)
        self.init_slot(request, hits)

    def init_slot(self, request: Request, pages: list[int]) -> None:
        """Give the executor the request's row, with `pages` as the start of its block table."""
        request.slot_initialised = True
        request.pages_sent = len(pages)
        prompt_tokens = len(request.input.prompt)
        self._commands.append(
            InitSlot(
                request.slot, request.tokens, prompt_tokens, tuple(pages), request.input.sampling
            )
        )

    def reserve_pages(self, request: Request, tokens: int) -> bool:
        """Extend the block table to `tokens` tokens; may preempt requests of later rank."""
        missing = -(-tokens // self._limits.page_tokens) - len(request.pages)
        while missing > 0:
            pages = self.page_pool.allocate(missing)
            if pages is not None:
                request.pages += pages
                return True
            if not self._make_room(request):
                return False
        return True

    def _make_room(self, request: Request) -> bool:
        """Preempt the running request of last rank behind `request`.

        False if a pass still names it, or if there is none. Requests ahead, and those that hold all
        their pages, will finish and give pages back.
        """
        victim = request
        for other in self._state.running.values():
            if (
                other.phase is not Phase.DONE
                and not other.pinned
                and other.rank > victim.rank
                and other.preemptions < self._limits.max_preemptions
            ):
                victim = other
        if victim is request:
            return False
        if victim.open_passes:
            victim.preempt_pending = True
            return False
        self.preempt(victim)
        return True

    def preempt(self, request: Request) -> None:
        """Back to the queue, at its old rank; it keeps its tokens. No pass names the request."""
        self.prefix_cache.register(request)
        self.free(request)
        self._state.set_phase(request, Phase.WAITING)
        request.preempt_pending = False
        request.scheduled_tokens = request.computed_tokens = 0
        request.registered_pages = request.pages_sent = 0
        request.preemptions += 1
        self._counters.preemptions += 1
        self.enqueue(request)

    def free(self, request: Request) -> None:
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
        del self._state.running[request.id]
