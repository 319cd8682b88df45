"""The rehearsal: passes that run before the first request, for what CUDA makes when it is first needed.

Owns: which passes these are. Promises: afterwards the kernels of greedy passes of any size are loaded, and every place has had the
memory of the largest; only the spare page is written, and no row stays open. Other ways of sampling are tried with one row, and
log-probabilities of prompts not at every length: for these something may still have to be made. Must not: measure.

A kernel is loaded when it is first launched, and memory is got from the driver when there is none left. Both wait until the device
has nothing to do (CUDA C++ Programming Guide: Lazy Loading, Implicit Synchronization), so in the midst of serving such a launch
takes as long as the step that runs, and no answer gets on meanwhile: 80 to 330 ms beside steps of 80 ms on an H200.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from counterpoint.device.cuda.attention import MAX_GATHERED_TOKENS
from counterpoint.device.cuda.executor import CudaExecutor
from counterpoint.device.cuda.piecewise_graphs import next_larger
from counterpoint.device.cuda.stream_partitions import StreamPartition
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.types import (
    BatchShape,
    DiscardPass,
    FreeSlot,
    InitSlot,
    Lane,
    Role,
    Sampling,
    Segment,
    Step,
    StepDone,
)

log = logging.getLogger(__name__)

LANES = (Lane(0, Role.DECODE), Lane(1, Role.PREFILL))
MAX_IN_FLIGHT = 4  # passes on their way at once: each needs a plan and pinned memory of its own
SHORT_PROMPT_TOKENS = 2  # tokens of a prompt: one alone is a decode's row
PROMPT_TOKENS = 512  # tokens of the prompts of a large pass, where its rows are what matters
ALL_SAMPLING = Sampling(
    max_tokens=1, temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.1, logit_bias=((0, -1.0),), logprobs=2,
    prompt_logprobs=2,
)  # fmt: skip


def warm_up(
    make_executor: Callable[[Sequence[Lane], WallClockEventQueue], CudaExecutor],
    places: Sequence[tuple[Role, StreamPartition]],
    max_tokens: int,
) -> str:
    """Play all passes in these places; `tokens`: of the largest. What was played, as a note."""
    began_s, inbox = time.perf_counter(), WallClockEventQueue()
    executor = make_executor(LANES, inbox)
    player = WarmupRunner(executor, inbox)
    try:
        for role, place in places:
            for segments, layers in warmup_passes(executor, max_tokens):
                player.submit(role, place, segments, layers)
        player.wait_until_at_most(0)
        player.submit_sampled(*places[0])
    finally:
        executor.close()
    return f"{player.num_passes} passes rehearsed in {time.perf_counter() - began_s:.1f} s"


def warmup_passes(executor: CudaExecutor, tokens: int) -> Iterator[tuple[list[Segment], int]]:
    """The segments of each pass, and how many layers of it are played. First the largest, so that the others find its memory; then
    those launched operation by operation; then any number of sampled rows behind graphs; then the longest contexts."""
    tables, layers = executor.tables, executor.decoder.spec.layers
    context = tables.tokens.shape[1] - 1
    captured = max(executor.piecewise_graphs.sizes, default=0)
    for rows in eager_sizes(captured, tokens):
        yield prompt_segments(rows, context if rows == tokens else min(context, PROMPT_TOKENS)), 1
    for bucket in tables.buckets:
        decodes = min(bucket, tables.padding_slot, tokens) - 1
        prompt = min(SHORT_PROMPT_TOKENS, tokens - decodes, context)
        yield (
            [
                *(Segment(slot, 0, 1, True) for slot in range(decodes)),
                Segment(decodes, 0, prompt, True),
            ],
            layers,
        )
    yield long_context_segments(tokens, context), 1


def eager_sizes(captured: int, tokens: int) -> list[int]:
    """Numbers of rows of passes that are no graphs, the largest first."""
    sizes, rows = list[int](), captured + 1
    while rows <= tokens:
        sizes.append(min(next_larger(rows), tokens))
        rows = next_larger(rows) + 1
    return sizes[::-1]


def prompt_segments(rows: int, context: int) -> list[Segment]:
    """So many rows, as prompts as long as a context may be. A slot may have several: nobody reads what they compute."""
    return [Segment(0, 0, min(context, rows - at), False) for at in range(0, rows, context)]


def long_context_segments(tokens: int, context: int) -> list[Segment]:
    """The ends of the longest prompts, as many as are gathered at once."""
    few = min(SHORT_PROMPT_TOKENS, tokens, context)
    return [Segment(0, context - few, few, False)] * max(
        1, min(MAX_GATHERED_TOKENS // context, tokens // few)
    )


class WarmupRunner:
    """Steps by hand, some at once. A step that fails is logged: what it was to make ready is made when it is needed."""

    def __init__(self, executor: CudaExecutor, inbox: WallClockEventQueue) -> None:
        self.executor = executor
        self.inbox = inbox
        self.num_passes = 0
        self._step_ids = itertools.count(1)
        self._running: dict[int, bool] = {}  # by step: whether its pass is left unfinished

    def submit(
        self, role: Role, place: StreamPartition, segments: Sequence[Segment], layers: int
    ) -> None:
        """Submit the first `layers` layers of a pass, once few enough others are on their way."""
        self.wait_until_at_most(MAX_IN_FLIGHT - 1)
        lane = next(lane.id for lane in LANES if lane.role is role)
        number = next(self._step_ids)
        self._running[number] = layers < self.executor.decoder.spec.layers
        work = BatchShape(prefill_tokens=sum(segment.tokens for segment in segments))
        self.executor.submit(
            Step(number, lane, number, 0, layers, place.units, tuple(segments), work)
        )
        self.num_passes += 1

    def submit_sampled(self, role: Role, place: StreamPartition) -> None:
        """A pass of which everything is asked that can be asked of a token."""
        tokens = min(SHORT_PROMPT_TOKENS, self.executor.tables.tokens.shape[1] - 1)
        self.executor.submit(InitSlot(0, (0,) * tokens, tokens, (), ALL_SAMPLING))
        self.submit(
            role,
            place,
            [Segment(0, 0, tokens, True, (self.executor.tables.padding_page,))],
            self.executor.decoder.spec.layers,
        )
        self.wait_until_at_most(0)
        self.executor.submit(FreeSlot(0))

    def wait_until_at_most(self, few: int) -> None:
        """Until no more than so many are on their way."""
        while len(self._running) > few:
            got = self.inbox.get()
            for done in got[1] if got else ():
                assert isinstance(done, StepDone)
                if done.error:
                    log.warning("a pass could not be rehearsed: %s", done.error)
                if self._running.pop(done.step):
                    self.executor.submit(DiscardPass(done.step))
