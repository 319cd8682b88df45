"""Warmup: passes run before the first request, for what CUDA creates on first use.

Owns: the list of warmup passes.
Promises: afterwards, the kernels of greedy passes of any size are loaded, and every stream has the
memory of the largest pass. Only the padding page is written, and no slot stays open.
Must not: measure. Other sampling settings run with one row only, and prompt log-probabilities not
at every length, so a first such request may still load something.

CUDA loads a kernel at its first launch, and gets memory from the driver when its pool is empty.
Both wait until the device is idle (CUDA C++ Programming Guide: Lazy Loading, Implicit
Synchronization). While serving, such a launch takes as long as the running step and stalls every
request: 80 to 330 ms beside steps of 80 ms on an H200.
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
MAX_IN_FLIGHT = 4  # passes at once: each needs an attention plan and pinned memory
SHORT_PROMPT_TOKENS = 2  # a prompt of one token would be a decode row
PROMPT_TOKENS = 512  # of each prompt in a large pass, where only the row count matters
ALL_SAMPLING = Sampling(
    max_tokens=1,
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.1,
    logit_bias=((0, -1.0),),
    logprobs=2,
    prompt_logprobs=2,
)


def warm_up(
    make_executor: Callable[[Sequence[Lane], WallClockEventQueue], CudaExecutor],
    partitions: Sequence[tuple[Role, StreamPartition]],
    max_tokens: int,
) -> str:
    """Run all warmup passes on these partitions; `max_tokens`: of the largest pass. Returns a note
    for the log."""
    began_s, inbox = time.perf_counter(), WallClockEventQueue()
    executor = make_executor(LANES, inbox)
    runner = WarmupRunner(executor, inbox)
    try:
        for role, partition in partitions:
            for segments, layers in warmup_passes(executor, max_tokens):
                runner.submit(role, partition, segments, layers)
        runner.wait_until_at_most(0)
        runner.submit_sampled(*partitions[0])
    finally:
        executor.close()
    return f"{runner.num_passes} warmup passes in {time.perf_counter() - began_s:.1f} s"


def warmup_passes(executor: CudaExecutor, tokens: int) -> Iterator[tuple[list[Segment], int]]:
    """Segments of each pass, and how many layers to run. First the largest, so that later ones
    reuse its memory; then eager passes; then every number of sampled rows after graphs; then the
    longest contexts."""
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
    """Padded row counts of passes that are not graphs, largest first."""
    sizes, rows = list[int](), captured + 1
    while rows <= tokens:
        sizes.append(min(next_larger(rows), tokens))
        rows = next_larger(rows) + 1
    return sizes[::-1]


def prompt_segments(rows: int, context: int) -> list[Segment]:
    """`rows` rows, as prompts of up to `context` tokens. They may share a slot: nobody reads the
    results."""
    return [Segment(0, 0, min(context, rows - at), False) for at in range(0, rows, context)]


def long_context_segments(tokens: int, context: int) -> list[Segment]:
    """The last tokens of the longest prompts, as many prompts as are gathered at once."""
    few = min(SHORT_PROMPT_TOKENS, tokens, context)
    return [Segment(0, context - few, few, False)] * max(
        1, min(MAX_GATHERED_TOKENS // context, tokens // few)
    )


class WarmupRunner:
    """Submits steps, several in flight. A failed step is only logged: serving then creates what it
    needs."""

    def __init__(self, executor: CudaExecutor, inbox: WallClockEventQueue) -> None:
        self.executor = executor
        self.inbox = inbox
        self.num_passes = 0
        self._step_ids = itertools.count(1)
        self._running: dict[int, bool] = {}  # by step: its pass is unfinished

    def submit(
        self, role: Role, partition: StreamPartition, segments: Sequence[Segment], layers: int
    ) -> None:
        """Submit the first `layers` layers of a pass, once at most MAX_IN_FLIGHT - 1 others are in
        flight."""
        self.wait_until_at_most(MAX_IN_FLIGHT - 1)
        lane = next(lane.id for lane in LANES if lane.role is role)
        number = next(self._step_ids)
        self._running[number] = layers < self.executor.decoder.spec.layers
        work = BatchShape(prefill_tokens=sum(segment.tokens for segment in segments))
        self.executor.submit(
            Step(number, lane, number, 0, layers, partition.units, tuple(segments), work)
        )
        self.num_passes += 1

    def submit_sampled(self, role: Role, partition: StreamPartition) -> None:
        """A pass with every sampling setting."""
        tokens = min(SHORT_PROMPT_TOKENS, self.executor.tables.tokens.shape[1] - 1)
        self.executor.submit(InitSlot(0, (0,) * tokens, tokens, (), ALL_SAMPLING))
        self.submit(
            role,
            partition,
            [Segment(0, 0, tokens, True, (self.executor.tables.padding_page,))],
            self.executor.decoder.spec.layers,
        )
        self.wait_until_at_most(0)
        self.executor.submit(FreeSlot(0))

    def wait_until_at_most(self, few: int) -> None:
        """Wait until at most `steps` steps are in flight."""
        while len(self._running) > few:
            got = self.inbox.get()
            for done in got[1] if got else ():
                assert isinstance(done, StepDone)
                if done.error:
                    log.warning("a warmup pass failed: %s", done.error)
                if self._running.pop(done.step):
                    self.executor.submit(DiscardPass(done.step))
