"""Watch: every command held against what the device was told before.

Owns: a shadow of the executor's tables. Promises: raises Violation at the first command or completion that breaks the contract of
`types` and `ports.Executor`, naming it; passes everything on unchanged. Must not: be needed for anything to run.

It stands on both sides of an executor, as an Executor and as an Inbox:

    watch = Watch(executor, inbox, ...);  run(engine, watch, watch, deliver)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from counterpoint.interfaces import EventQueue, Executor
from counterpoint.types import (
    Command,
    DiscardPass,
    Event,
    FreeSlot,
    InitSlot,
    Lane,
    Segment,
    Step,
    StepDone,
)

UNKNOWN = -1  # a token that is still being sampled


class ContractViolation(AssertionError):
    """The engine broke its contract with the device."""


@dataclass(slots=True, eq=False)
class SlotRow:
    """A slot. Positions [0, computed) are in the cache, [computed, scheduled) in flight; the first `shared` pages are only read.
    `names` are chained hashes of its full computed pages."""

    tokens: list[int]
    pages: list[int]
    shared: int
    scheduled: int
    computed: int
    names: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)  # batches that are not complete


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A pass under way: layers [0, cursor) were launched, `in_flight` steps of it are on the device."""

    lane: int
    segments: tuple[Segment, ...]
    cursor: int = 0
    in_flight: int = 0


class ContractChecker:
    """Of a device with `units` units, for a model of `layers` layers and a pool of `pages` pages of `page_tokens` tokens.
    `overlap`: steps of two lanes may share units. `lanes`, if given, bounds the steps in flight per lane."""

    def __init__(
        self,
        executor: Executor,
        inbox: EventQueue,
        *,
        units: int,
        layers: int,
        pages: int,
        page_tokens: int,
        overlap: bool = False,
        lanes: Sequence[Lane] = (),
    ) -> None:
        self.executor, self.inbox = executor, inbox
        self.units, self.layers, self.overlap = units, layers, overlap
        self.pages, self.page_tokens = pages, page_tokens
        self.depth = {lane.id: lane.depth for lane in lanes}
        self.rows: dict[int, SlotRow] = {}
        self.batches: dict[int, OpenBatch] = {}
        self.in_flight: dict[int, list[Step]] = {}  # by lane, oldest first
        self.writer: dict[int, int] = {}  # page -> the open slot that may write it
        self.readers: dict[int, int] = {}  # page -> open slots that share it
        self.content: dict[int, int] = {}  # page -> name of the whole page it holds

    # ------------------------------------------------------------ both sides

    def submit(self, command: Command) -> None:
        if isinstance(command, Step):
            self._step(command)
        elif isinstance(command, InitSlot):
            self._open(command)
        elif isinstance(command, FreeSlot):
            self._close(command.slot)
        else:
            self._drop(command)
        self.executor.submit(command)

    def get(self) -> tuple[float, Sequence[Event]] | None:
        got = self.inbox.get()
        for event in got[1] if got else ():
            if isinstance(event, StepDone):
                self._done(event)
        return got

    def close(self) -> None:
        self.executor.close()

    def check_idle(self) -> None:
        """Raise unless nothing is open and nothing in flight."""
        for name, left in (("slots are open", self.rows), ("passes are unfinished", self.batches)):
            if left:
                raise ContractViolation(f"at the end {name}: {sorted(left)}")
        if self.writer or self.readers:
            raise ContractViolation(
                f"at the end pages are held: {sorted({*self.writer, *self.readers})}"
            )

    # ------------------------------------------------------------ slots and pages

    def _open(self, command: InitSlot) -> None:
        slot, size = command.slot, self.page_tokens
        self._must(slot not in self.rows, f"slot {slot} is opened but is open already")
        cached = len(command.pages) * size
        self._must(
            cached < len(command.tokens),
            f"slot {slot}: all {len(command.tokens)} tokens are cached, none is left to compute",
        )
        row = SlotRow(list(command.tokens), list(command.pages), len(command.pages), cached, cached)
        self._name(row, cached)
        for page, name in zip(command.pages, row.names, strict=True):
            self._must(
                self.content.get(page) == name,
                f"slot {slot} shares page {page}, which does not hold that prefix",
            )
            self.readers[page] = self.readers.get(page, 0) + 1
        self.rows[slot] = row

    def _close(self, slot: int) -> None:
        row = self._row(slot, "closed")
        self._must(not row.passes, f"slot {slot} is closed while passes {row.passes} name it")
        for index, page in enumerate(row.pages):
            if index >= row.shared:
                del self.writer[page]
                continue
            self.readers[page] -= 1
            if not self.readers[page]:
                del self.readers[page]
        del self.rows[slot]

    def _take(self, slot: int, row: SlotRow, page: int) -> None:
        """`page` becomes the slot's own, to write."""
        self._must(
            0 <= page < self.pages, f"slot {slot} is given page {page}; there are {self.pages}"
        )
        self._must(
            page not in self.writer,
            f"page {page} is given to slot {slot} but slot {self.writer.get(page)} writes it",
        )
        self._must(
            page not in self.readers,
            f"page {page} is given to slot {slot} but other slots share it",
        )
        self.writer[page] = slot
        self.content.pop(page, None)
        row.pages.append(page)

    def _name(self, row: SlotRow, computed: int) -> None:
        """Extend the names of `row` to all full pages of [0, computed)."""
        size = self.page_tokens
        for index in range(len(row.names), computed // size):
            before = row.names[-1] if row.names else 0
            row.names.append(hash((before, *row.tokens[index * size : (index + 1) * size])))

    # ------------------------------------------------------------ steps

    def _step(self, step: Step) -> None:
        where = f"step {step.id}"
        self._must(bool(step.segments), f"{where} has no segments")
        self._must(
            0 <= step.first_layer < step.last_layer <= self.layers,
            f"{where}: layers [{step.first_layer}, {step.last_layer})",
        )
        self._fits(step)
        batch = self.batches.get(step.pass_id)
        if batch is None:
            self._must(
                step.first_layer == 0,
                f"{where} starts pass {step.pass_id} at layer {step.first_layer}",
            )
            self._priced(step)
            batch = self.batches[step.pass_id] = OpenBatch(step.lane, step.segments)
            for segment in step.segments:
                self._segment(step, segment)
        self._must(
            step.first_layer == batch.cursor,
            f"{where}: pass {step.pass_id} stands at layer {batch.cursor}",
        )
        self._must(
            step.lane == batch.lane, f"{where}: pass {step.pass_id} belongs to lane {batch.lane}"
        )
        self._must(
            step.segments == batch.segments, f"{where} changes the segments of pass {step.pass_id}"
        )
        batch.cursor = step.last_layer
        batch.in_flight += 1
        self.in_flight.setdefault(step.lane, []).append(step)

    def _fits(self, step: Step) -> None:
        here = self.in_flight.get(step.lane, [])
        self._must(
            1 <= step.units <= self.units, f"step {step.id} asks {step.units} of {self.units} units"
        )
        depth = self.depth.get(step.lane, len(here) + 1)
        self._must(
            len(here) < depth,
            f"step {step.id} makes {len(here) + 1} in flight on lane {step.lane}, which holds {depth}",
        )
        if self.overlap:
            return
        taken = sum(
            max(s.units for s in steps)
            for lane, steps in self.in_flight.items()
            if steps and lane != step.lane
        )
        self._must(
            taken + step.units <= self.units,
            f"step {step.id} on {step.units} units overlaps other lanes, which hold {taken}",
        )

    def _priced(self, step: Step) -> None:
        """The work that is priced is the work that is done."""
        work, segments = step.work, step.segments
        tokens, samples = sum(s.tokens for s in segments), sum(s.sample for s in segments)
        self._must(
            work.prefill_tokens + work.decode_batch == tokens,
            f"step {step.id}: work says other tokens than its segments",
        )
        self._must(
            work.samples == samples,
            f"step {step.id}: work says {work.samples} samples, segments {samples}",
        )
        self._must(
            work.prefill_requests + work.decode_batch == len(segments),
            f"step {step.id}: work says other requests",
        )
        layers = (work.first_layer, work.last_layer, work.layers)
        self._must(
            layers == (step.first_layer, step.last_layer, self.layers),
            f"step {step.id}: work says layers {layers}",
        )

    def _segment(self, step: Step, segment: Segment) -> None:
        slot, end = segment.slot, segment.start + segment.tokens
        row = self._row(slot, f"named by step {step.id}")
        where = f"step {step.id}, slot {slot}"
        self._must(segment.tokens > 0, f"{where}: no tokens")
        self._must(
            segment.start == row.scheduled,
            f"{where}: starts at {segment.start}, but {row.scheduled} tokens were scheduled",
        )
        self._must(
            end <= len(row.tokens),
            f"{where}: ends at {end}, but there are {len(row.tokens)} tokens",
        )
        self._must(
            not segment.sample or end == len(row.tokens),
            f"{where}: samples after {end} of {len(row.tokens)} known tokens",
        )
        for earlier in row.passes:
            before = self.batches[earlier]
            follows = before.lane == step.lane and before.cursor == self.layers
            self._must(
                follows,
                f"{where}: pass {earlier} of lane {before.lane} has not computed what comes before",
            )
        for page in segment.pages:
            self._take(slot, row, page)
        room = len(row.pages) * self.page_tokens
        self._must(end <= room, f"{where}: ends at {end}, but its block table holds {room} tokens")
        row.scheduled = end
        row.passes.append(step.pass_id)
        if segment.sample:
            row.tokens.append(UNKNOWN)

    def _drop(self, command: DiscardPass) -> None:
        batch = self.batches.get(command.pass_id)
        if batch is None:
            raise ContractViolation(f"pass {command.pass_id} is dropped but is not under way")
        self._must(
            not batch.in_flight,
            f"pass {command.pass_id} is dropped with {batch.in_flight} steps in flight",
        )
        del self.batches[command.pass_id]
        for segment in batch.segments:
            row = self.rows[segment.slot]
            row.passes.remove(command.pass_id)
            row.scheduled = segment.start
            if segment.sample:
                row.tokens.pop()

    def _done(self, done: StepDone) -> None:
        oldest = self.in_flight.get(done.lane, [])
        self._must(
            bool(oldest) and oldest[0].id == done.step,
            f"step {done.step} came back, which is not lane {done.lane}'s oldest",
        )
        step = oldest.pop(0)
        batch = self.batches[step.pass_id]
        batch.in_flight -= 1
        if step.last_layer < self.layers:
            self._must(not done.tokens, f"step {step.id} has tokens before the last layer")
            return
        del self.batches[step.pass_id]
        sampled = sum(s.sample for s in step.segments)
        self._must(
            bool(done.error) or len(done.tokens) == sampled,
            f"step {step.id}: {len(done.tokens)} tokens of {sampled}",
        )
        tokens = iter(done.tokens)
        for segment in step.segments:
            row, end = self.rows[segment.slot], segment.start + segment.tokens
            row.passes.remove(step.pass_id)
            row.computed = end
            if segment.sample and not done.error:
                row.tokens[end] = next(tokens)
            if not done.error:
                self._name(row, end)
                for index in range(row.shared, len(row.names)):
                    self.content[row.pages[index]] = row.names[index]

    def _row(self, slot: int, doing: str) -> SlotRow:
        if slot not in self.rows:
            raise ContractViolation(f"slot {slot} is {doing} but is not open")
        return self.rows[slot]

    def _must(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise ContractViolation(otherwise)
