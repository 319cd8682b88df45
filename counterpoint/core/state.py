"""What a policy may look at: running requests, lanes, passes, units in use.

The engine alone changes it; its queries are cheap.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from counterpoint.core.request import DECODE, DONE, PREFILL, Phase, Request
from counterpoint.types import BatchShape, Lane, Segment, Step

MAX_LENGTHS = 256  # latest finished outputs that count
MIN_LENGTHS = 8  # with fewer longer outputs, the guess below is used instead
DEFAULT_LENGTH = 64  # tokens of an output, while too few have finished
# The guess for what remains: a fourth of the length so far, and at least this many tokens.
REMAINING_DIVISOR, MIN_REMAINING = 4, 8
EARLY_SHARE = 0.2  # of the longer outputs, those that may end sooner than predicted


class OutputLengths:
    """Lengths of the latest finished outputs, to predict what remains of a running one."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._ordered: list[int] = []
        # Cached until the next length is added.
        self.likely_remaining: Callable[[int], int] = cache(self._likely_remaining)
        self.mean_tokens: float = DEFAULT_LENGTH

    def add(self, tokens: int) -> None:
        if len(self._latest) == MAX_LENGTHS:
            del self._ordered[bisect.bisect_left(self._ordered, self._latest.popleft())]
        self._latest.append(tokens)
        bisect.insort(self._ordered, tokens)
        self.likely_remaining = cache(self._likely_remaining)
        if len(self._ordered) >= MIN_LENGTHS:
            self.mean_tokens = sum(self._ordered) / len(self._ordered)

    def _likely_remaining(self, tokens: int) -> int:
        """Tokens that 80 % of the outputs longer than `tokens` had beyond it; at least 1.

        While few longer outputs are known, what remains is guessed from the length so far.
        """
        longer = bisect.bisect_right(self._ordered, tokens)
        count = len(self._ordered) - longer
        if count < MIN_LENGTHS:
            return max(MIN_REMAINING, tokens // REMAINING_DIVISOR)
        return self._ordered[longer + int(EARLY_SHARE * count)] - tokens


@dataclass(slots=True, eq=False)
class Pass:
    """One forward pass of `requests`, one per segment.

    Layers [0, next_layer) have been launched; `in_flight` steps of it run.
    """

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
    suspended: Pass | None = None  # an open pass that waits while another one runs

    @property
    def has_room(self) -> bool:
        return len(self.in_flight) < self.lane.depth

    @property
    def units(self) -> int:
        """Units that its steps in flight take."""
        return max([step.units for step, _ in self.in_flight], default=0)


class EngineState:
    """`units`: of the device. `overlap`: steps of two lanes may share units."""

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
        """The only place that changes a request's phase."""
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
        """Requests whose next token may be scheduled on `lane`, in order of admission.

        Either nothing of a request is in flight, or one step of the same lane is. In the latter
        case the next token must not depend on the host, nor the output be sure to end before it.
        """
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
