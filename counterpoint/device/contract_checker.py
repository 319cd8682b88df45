"""ContractChecker: checks every command against what the device was sent before.

Owns: a shadow of the executor's tables.
Promises: raises ContractViolation, naming the fault, at the first command or completion that breaks
the contract of types.py and interfaces.Executor. Passes everything on unchanged.
Must not: be needed for anything to run.

It wraps both sides of a device, as an Executor and as an EventQueue:

    checker = ContractChecker(executor, inbox, limits)
    run(engine, checker, checker, deliver)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from counterpoint.core.limits import EngineLimits
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
    """A slot. Positions [0, computed) are in the cache, [computed, scheduled) in flight. The first
    `shared` pages are only read. `hashes`: chained, of its full computed pages."""

    tokens: list[int]
    pages: list[int]
    shared: int
    scheduled: int
    computed: int
    hashes: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)  # those not complete


@dataclass(slots=True, eq=False)
class OpenPass:
    """Layers [0, cursor) were launched; `in_flight` of its steps are on the device."""

    lane: int
    segments: tuple[Segment, ...]
    cursor: int = 0
    in_flight: int = 0


class ContractChecker:
    """Of a device and model as `limits` has them. `lanes`, if given, bound the steps in flight."""

    def __init__(
        self,
        executor: Executor,
        inbox: EventQueue,
        limits: EngineLimits,
        lanes: Sequence[Lane] = (),
    ) -> None:
        self.executor, self.inbox, self.limits = executor, inbox, limits
        self.depth = {lane.id: lane.depth for lane in lanes}
        self.rows: dict[int, SlotRow] = {}
        self.passes: dict[int, OpenPass] = {}
        self.in_flight: dict[int, list[Step]] = {}  # by lane, oldest first
        self.writer: dict[int, int] = {}  # page -> the open slot that may write it
        self.readers: dict[int, int] = {}  # page -> open slots that share it
        self.page_hash: dict[int, int] = {}  # page -> hash of the full page it holds

    # ------------------------------------------------------------ both sides

    def submit(self, command: Command) -> None:
        if isinstance(command, Step):
            self._on_step(command)
        elif isinstance(command, InitSlot):
            self._on_init_slot(command)
        elif isinstance(command, FreeSlot):
            self._on_free_slot(command.slot)
        else:
            self._on_discard(command)
        self.executor.submit(command)

    def get(self) -> tuple[float, Sequence[Event]] | None:
        got = self.inbox.get()
        for event in got[1] if got else ():
            if isinstance(event, StepDone):
                self._on_done(event)
        return got

    def close(self) -> None:
        self.executor.close()

    def check_idle(self) -> None:
        """Raise unless no slot is open and nothing is in flight."""
        open_things = (("slots are open", self.rows), ("passes are unfinished", self.passes))
        for what, numbers in open_things:
            if numbers:
                raise ContractViolation(f"at the end {what}: {sorted(numbers)}")
        if self.writer or self.readers:
            pages = sorted({*self.writer, *self.readers})
            raise ContractViolation(f"at the end pages are held: {pages}")

    # ------------------------------------------------------------ slots and pages

    def _on_init_slot(self, command: InitSlot) -> None:
        slot = command.slot
        require(slot not in self.rows, f"slot {slot} is opened but is open already")
        cached = len(command.pages) * self.limits.page_tokens
        require(
            cached < len(command.tokens),
            f"slot {slot}: all {len(command.tokens)} tokens are cached, none is left to compute",
        )
        row = SlotRow(list(command.tokens), list(command.pages), len(command.pages), cached, cached)
        self._extend_hashes(row, cached)
        for page, hashed in zip(command.pages, row.hashes, strict=True):
            require(
                self.page_hash.get(page) == hashed,
                f"slot {slot} shares page {page}, which does not hold that prefix",
            )
            self.readers[page] = self.readers.get(page, 0) + 1
        self.rows[slot] = row

    def _on_free_slot(self, slot: int) -> None:
        row = self._row(slot, "closed")
        require(not row.passes, f"slot {slot} is closed while passes {row.passes} name it")
        for index, page in enumerate(row.pages):
            if index >= row.shared:
                del self.writer[page]
                continue
            self.readers[page] -= 1
            if not self.readers[page]:
                del self.readers[page]
        del self.rows[slot]

    def _append_page(self, slot: int, row: SlotRow, page: int) -> None:
        """The slot may write it from now on."""
        pages, given = self.limits.pages, f"page {page} is given to slot {slot}"
        require(0 <= page < pages, f"slot {slot} is given page {page}; there are {pages}")
        require(page not in self.writer, f"{given} but slot {self.writer.get(page)} writes it")
        require(page not in self.readers, f"{given} but other slots share it")
        self.writer[page] = slot
        self.page_hash.pop(page, None)
        row.pages.append(page)

    def _extend_hashes(self, row: SlotRow, computed: int) -> None:
        """To all full pages of [0, computed)."""
        size = self.limits.page_tokens
        for index in range(len(row.hashes), computed // size):
            before = row.hashes[-1] if row.hashes else 0
            row.hashes.append(hash((before, *row.tokens[index * size : (index + 1) * size])))

    # ------------------------------------------------------------ steps

    def _on_step(self, step: Step) -> None:
        where, first = f"step {step.id}", step.first_layer
        require(bool(step.segments), f"{where} has no segments")
        require(
            0 <= first < step.last_layer <= self.limits.layers,
            f"{where}: layers [{first}, {step.last_layer})",
        )
        self._check_units(step)
        current = self.passes.get(step.pass_id)
        if current is None:
            require(first == 0, f"{where} starts pass {step.pass_id} at layer {first}")
            self._check_work(step)
            current = self.passes[step.pass_id] = OpenPass(step.lane, step.segments)
            for segment in step.segments:
                self._add_segment(step, segment)
        number = step.pass_id
        require(first == current.cursor, f"{where}: pass {number} stands at layer {current.cursor}")
        require(step.lane == current.lane, f"{where}: pass {number} belongs to lane {current.lane}")
        require(step.segments == current.segments, f"{where} changes the segments of pass {number}")
        current.cursor = step.last_layer
        current.in_flight += 1
        self.in_flight.setdefault(step.lane, []).append(step)

    def _check_units(self, step: Step) -> None:
        here, total = self.in_flight.get(step.lane, []), self.limits.units
        require(1 <= step.units <= total, f"step {step.id} asks {step.units} of {total} units")
        count = len(here) + 1
        depth = self.depth.get(step.lane, count)
        require(
            count <= depth,
            f"step {step.id} makes {count} in flight on lane {step.lane}, which holds {depth}",
        )
        if self.limits.overlap:
            return
        taken = sum(
            max(s.units for s in steps)
            for lane, steps in self.in_flight.items()
            if steps and lane != step.lane
        )
        require(
            taken + step.units <= total,
            f"step {step.id} on {step.units} units overlaps other lanes, which hold {taken}",
        )

    def _check_work(self, step: Step) -> None:
        """`work` must be the shape of the segments."""
        work, segments, where = step.work, step.segments, f"step {step.id}: work says"
        tokens, samples = sum(s.tokens for s in segments), sum(s.sample for s in segments)
        require(
            work.prefill_tokens + work.decode_batch == tokens,
            f"{where} other tokens than its segments",
        )
        require(
            work.samples == samples,
            f"{where} {work.samples} samples, segments {samples}",
        )
        require(
            work.prefill_requests + work.decode_batch == len(segments),
            f"{where} other requests",
        )
        layers = (work.first_layer, work.last_layer, work.layers)
        expected = (step.first_layer, step.last_layer, self.limits.layers)
        require(layers == expected, f"{where} layers {layers}")

    def _add_segment(self, step: Step, segment: Segment) -> None:
        slot, end = segment.slot, segment.start + segment.tokens
        row = self._row(slot, f"named by step {step.id}")
        where, known = f"step {step.id}, slot {slot}", len(row.tokens)
        require(segment.tokens > 0, f"{where}: no tokens")
        require(
            segment.start == row.scheduled,
            f"{where}: starts at {segment.start}, but {row.scheduled} tokens were scheduled",
        )
        require(end <= known, f"{where}: ends at {end}, but there are {known} tokens")
        require(
            not segment.sample or end == known,
            f"{where}: samples after {end} of {known} known tokens",
        )
        for earlier in row.passes:
            before = self.passes[earlier]
            require(
                before.lane == step.lane and before.cursor == self.limits.layers,
                f"{where}: pass {earlier} of lane {before.lane} has not computed what comes before",
            )
        for page in segment.pages:
            self._append_page(slot, row, page)
        room = len(row.pages) * self.limits.page_tokens
        require(end <= room, f"{where}: ends at {end}, but its block table holds {room} tokens")
        row.scheduled = end
        row.passes.append(step.pass_id)
        if segment.sample:
            row.tokens.append(UNKNOWN)

    def _on_discard(self, command: DiscardPass) -> None:
        dropped = self.passes.get(command.pass_id)
        if dropped is None:
            raise ContractViolation(f"pass {command.pass_id} is dropped but is not under way")
        require(
            not dropped.in_flight,
            f"pass {command.pass_id} is dropped with {dropped.in_flight} steps in flight",
        )
        del self.passes[command.pass_id]
        for segment in dropped.segments:
            row = self.rows[segment.slot]
            row.passes.remove(command.pass_id)
            row.scheduled = segment.start
            if segment.sample:
                row.tokens.pop()

    def _on_done(self, done: StepDone) -> None:
        oldest = self.in_flight.get(done.lane, [])
        require(
            bool(oldest) and oldest[0].id == done.step,
            f"step {done.step} came back, which is not lane {done.lane}'s oldest",
        )
        step = oldest.pop(0)
        self.passes[step.pass_id].in_flight -= 1
        if step.last_layer < self.limits.layers:
            require(not done.tokens, f"step {step.id} has tokens before the last layer")
            return
        del self.passes[step.pass_id]
        sampled = sum(s.sample for s in step.segments)
        require(
            bool(done.error) or len(done.tokens) == sampled,
            f"step {step.id}: {len(done.tokens)} tokens of {sampled}",
        )
        tokens = iter(done.tokens)
        for segment in step.segments:
            row, end = self.rows[segment.slot], segment.start + segment.tokens
            row.passes.remove(step.pass_id)
            row.computed = end
            if done.error:
                continue
            if segment.sample:
                row.tokens[end] = next(tokens)
            self._extend_hashes(row, end)
            for index in range(row.shared, len(row.hashes)):
                self.page_hash[row.pages[index]] = row.hashes[index]

    def _row(self, slot: int, doing: str) -> SlotRow:
        if slot not in self.rows:
            raise ContractViolation(f"slot {slot} is {doing} but is not open")
        return self.rows[slot]


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContractViolation(otherwise)
