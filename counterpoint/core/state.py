"""What a policy may look at: the running requests, the lanes, the units in use.

Owns: the running set and the passes. Promises: cheap questions for policies. Must not: be changed by a policy.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from counterpoint.core.request import DECODE, DONE, PREFILL, Phase, Request
from counterpoint.types import BatchShape, Lane, Segment, Step

MAX_LENGTHS = 256  # remembered
FEWEST, USUAL = (
    8,
    64,
)  # answers beyond a length before that is relied on; tokens of an answer till then
SOON, LINDY = (
    8,
    4,
)  # tokens still to come till then: what has run for long goes on for longer, but may end soon
EARLY_SHARE = 0.2  # share of answers that may end sooner


class OutputLengths:
    """Lengths of the latest answers that came to their end: what is likely still to come of one that runs."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._ordered: list[int] = []
        self.likely_remaining: Callable[[int], int] = cache(
            self._likely_remaining
        )  # until the next one is added
        self.mean_tokens: float = USUAL  # tokens of an answer

    def add(self, tokens: int) -> None:
        if len(self._latest) == MAX_LENGTHS:
            del self._ordered[bisect.bisect_left(self._ordered, self._latest.popleft())]
        self._latest.append(tokens)
        bisect.insort(self._ordered, tokens)
        self.likely_remaining = cache(self._likely_remaining)
        if len(self._ordered) >= FEWEST:
            self.mean_tokens = sum(self._ordered) / len(self._ordered)

    def _likely_remaining(self, tokens: int) -> int:
        """Tokens that four in five of the answers longer than `tokens` had beyond it; at least 1. While few are known, what has run
        for long is taken to go on for longer, but none for sure."""
        longer = bisect.bisect_right(self._ordered, tokens)
        left = len(self._ordered) - longer
        if left < FEWEST:
            return max(SOON, tokens // LINDY)
        return self._ordered[longer + int(EARLY_SHARE * left)] - tokens


@dataclass(slots=True, eq=False)
class Pass:
    """One forward pass of `requests` (one per segment). Layers [0, cursor) have been launched, `in_flight` steps of it run."""

    id: int
    lane: int
    requests: list[Request]
    segments: tuple[Segment, ...]
    work: BatchShape  # of all layers
    next_layer: int = 0
    in_flight: int = 0

    @property
    def alive(self) -> bool:
        return any(request.phase is not DONE for request in self.requests)


@dataclass(slots=True, eq=False)
class LaneState:
    lane: Lane
    in_flight: list[tuple[Step, Pass]] = field(default_factory=list)  # in order of launch
    open_pass: Pass | None = None  # a pass whose last layer has not been launched
    suspended: Pass | None = None  # an open pass that another one overtook

    @property
    def has_room(self) -> bool:
        return len(self.in_flight) < self.lane.depth

    @property
    def units(self) -> int:
        """Units that its steps in flight take."""
        return max([step.units for step, _ in self.in_flight], default=0)


class EngineState:
    """The engine's running side, as a policy sees it. `units`: of the device. `overlap`: steps of two lanes may share units."""

    def __init__(self, lanes: tuple[Lane, ...], units: int, layers: int, overlap: bool) -> None:
        self.units = units
        self.layers = layers
        self.overlap = overlap
        self.lanes = {lane.id: LaneState(lane) for lane in lanes}
        self.running: dict[str, Request] = {}  # by order of admission: holds a slot and pages
        self.prefilling: dict[str, Request] = {}  # those in Phase.PREFILL, in the same order
        self.output_lengths = OutputLengths()
        self._decoding = 0  # requests in Phase.DECODE

    def set_phase(self, request: Request, phase: Phase) -> None:
        """The one way in which a request's phase changes (the engine's)."""
        self._decoding += (phase is DECODE) - (request.phase is DECODE)
        request.phase = phase
        if phase is PREFILL:
            self.prefilling[request.id] = request
        else:
            self.prefilling.pop(request.id, None)

    def schedulable_prefills(self, lane: Lane) -> list[Request]:
        """Requests whose prompt has tokens to schedule on `lane`, in order of admission."""
        return [
            r
            for r in self.prefilling.values()
            if r.scheduled_tokens < r.prefill_target
            and not r.preempt_pending
            and (not r.open_passes or r.lane == lane.id)
        ]

    def schedulable_decodes(self, lane: Lane) -> list[Request]:
        """Requests whose next token may be scheduled on `lane`, in order of admission: nothing of them is in flight, or one step of
        the same lane is, the next token does not wait for that one's, and the answer is not sure to end with it."""
        id = lane.id
        return [
            r
            for r in self.running.values()
            if r.phase is DECODE
            and (
                r.scheduled_tokens == r.computed_tokens
                or (
                    r.scheduled_tokens == r.computed_tokens + 1
                    and r.lane == id
                    and len(r.output) < r.lookahead_limit
                )
            )
            and not r.preempt_pending
        ]

    @property
    def has_prefill(self) -> bool:
        return bool(self.prefilling)

    @property
    def has_decode(self) -> bool:
        return self._decoding > 0

    def free_units(self, lane: Lane) -> int:
        """Units that no other lane's step in flight takes (all of them where lanes may overlap)."""
        free = self.units
        if not self.overlap:
            for id, other in self.lanes.items():
                if id != lane.id and other.in_flight:
                    free -= other.units
        return free

    @property
    def in_flight(self) -> bool:
        return any(lane.in_flight for lane in self.lanes.values())
