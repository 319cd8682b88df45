"""A device made of dictionaries, to check the engine's commands against.

It keeps what a real device keeps (slots, block tables, page contents), and checks every command and
completion. Its "model" reads all earlier tokens from the pages; the next token is a hash of them.
So a wrong page, a page reused too early or a half-computed shared page changes the output.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from counterpoint.config import SchedulerConfig
from counterpoint.core.engine import Engine
from counterpoint.core.limits import DeviceShape, EngineLimits
from counterpoint.core.policy import make_policy
from counterpoint.core.request import Phase
from counterpoint.interfaces import Estimator, Policy
from counterpoint.types import (
    AddRequest,
    DiscardPass,
    FreeSlot,
    InitSlot,
    OutputDelta,
    Progress,
    RequestTiming,
    Sampling,
    Step,
    StepDone,
)

VOCAB = 50


def next_token(tokens: list[int]) -> int:
    return hashlib.blake2b(repr(tokens).encode(), digest_size=2).digest()[0] % VOCAB


def answer(prompt: tuple[int, ...], max_tokens: int, stops: tuple[int, ...] = ()) -> list[int]:
    """What a request must get, however it is scheduled."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


@dataclass
class Row:
    tokens: list[int]
    pages: list[int]
    computed: int
    broken: bool = False  # a step failed: whatever follows is not checked


@dataclass
class Device:
    """Executes steps when told to (`finish`), lane by lane."""

    page_tokens: int
    layers: int
    units: int
    rows: dict[int, Row] = field(default_factory=dict)
    content: dict[tuple[int, int], int] = field(default_factory=dict)  # (page, offset) -> token
    queue: dict[int, list[Step]] = field(default_factory=dict)  # lane -> steps in flight
    cursor: dict[int, int] = field(default_factory=dict)  # pass -> layers launched

    def submit(self, command: InitSlot | Step | DiscardPass | FreeSlot) -> None:
        if isinstance(command, InitSlot):
            assert command.slot not in self.rows
            there = min(len(command.pages) * self.page_tokens, len(command.tokens) - 1)
            self.rows[command.slot] = Row(list(command.tokens), list(command.pages), there)
        elif isinstance(command, FreeSlot):
            assert command.slot not in {
                s.slot for steps in self.queue.values() for step in steps for s in step.segments
            }
            del self.rows[command.slot]
        elif isinstance(command, DiscardPass):
            assert command.pass_id not in {
                step.pass_id for steps in self.queue.values() for step in steps
            }
            del self.cursor[command.pass_id]
        else:
            self._launch(command)

    def _launch(self, step: Step) -> None:
        assert step.segments and 0 <= step.first_layer < step.last_layer <= self.layers
        assert self.cursor.get(step.pass_id, 0) == step.first_layer
        in_use = sum(
            max(s.units for s in steps)
            for lane, steps in self.queue.items()
            if steps and lane != step.lane
        )
        assert 0 < step.units <= self.units - in_use, "lanes overlap on units"
        self.cursor[step.pass_id] = step.last_layer
        if step.first_layer == 0:
            for segment in step.segments:
                row = self.rows[segment.slot]
                row.pages += segment.pages
                assert len(row.pages) * self.page_tokens >= segment.start + segment.tokens
        if step.last_layer == self.layers:
            del self.cursor[step.pass_id]
        self.queue.setdefault(step.lane, []).append(step)

    def busy(self) -> list[int]:
        return sorted(lane for lane, steps in self.queue.items() if steps)

    def finish(self, lane: int, now: float, error: str = "", took_s: float = 1.0) -> StepDone:
        step = self.queue[lane].pop(0)
        for segment in step.segments if error else ():
            self.rows[segment.slot].broken = True
        tokens = (
            []
            if error or step.last_layer < self.layers
            else [t for s in step.segments if (t := self._compute(s)) is not None]
        )
        return StepDone(
            step.id,
            lane,
            tuple(tokens),
            started_s=now - took_s,
            ended_s=now,
            units=step.units,
            error=error,
        )

    def _compute(self, segment) -> int | None:
        row, end = self.rows[segment.slot], segment.start + segment.tokens
        if row.broken:
            return 0 if segment.sample else None
        assert row.computed == segment.start, "segments of a request must follow each other"
        where = [(row.pages[i // self.page_tokens], i % self.page_tokens) for i in range(end)]
        assert [self.content.get(w) for w in where[: segment.start]] == row.tokens[
            : segment.start
        ], "the KV cache was overwritten"
        for position in range(segment.start, end):
            self.content[where[position]] = row.tokens[position]
        row.computed = end
        if not segment.sample:
            assert end < len(row.tokens)
            return None
        assert end == len(row.tokens)
        row.tokens.append(next_token(row.tokens))
        return row.tokens[-1]


class Harness:
    """An engine on a Device, with every invariant checked after every event."""

    def __init__(self, policy: Policy, price: Estimator | None = None, **limits) -> None:
        """`price`: how long steps take; None: a second each."""
        self.price = price
        defaults = {
            "pages": 64,
            "page_tokens": 4,
            "max_running": 8,
            "max_context_tokens": 200,
            "max_pass_tokens": 48,
            "eos_token_ids": (),
            "units": 4,
            "layers": 6,
        }
        self.limits = EngineLimits(**{**defaults, **limits})
        self.engine = Engine(self.limits, policy)
        self.device = Device(self.limits.page_tokens, self.limits.layers, self.limits.units)
        self.now = 0.0
        self.sent: dict[str, AddRequest] = {}
        self.got: dict[str, list[int]] = {}
        self.ends: dict[str, OutputDelta] = {}
        self.records: dict[str, RequestTiming] = {}
        self.commands: list = []
        self.progress: list[Progress] = []

    def arrive(self, id: str, prompt, max_tokens: int = 4, **kwargs) -> None:
        arrive_only = {
            k: kwargs.pop(k)
            for k in ("priority", "salt", "slo", "disagg_role", "generated_prefix")
            if k in kwargs
        }
        arrive = AddRequest(
            id=id,
            prompt=tuple(prompt),
            sampling=Sampling(max_tokens=max_tokens, temperature=0, **kwargs),
            **arrive_only,
        )
        self.sent[id] = arrive
        self.event(arrive)

    def event(self, event, after_s: float = 1.0) -> None:
        self.now += after_s
        self.engine.on_event(self.now, event)
        commands = self.engine.schedule(self.now)
        self.commands.append(commands)
        for command in commands:
            self.device.submit(command)
        for output in self.engine.take_outputs():
            self.take(output)
        self.progress += self.engine.take_progress()
        self.check()

    def take(self, output: OutputDelta | RequestTiming) -> None:
        if isinstance(output, RequestTiming):
            assert output.id not in self.records, "two records"
            self.records[output.id] = output
            return
        assert output.id not in self.ends, "tokens after the end"
        self.got.setdefault(output.id, []).extend(output.tokens)
        if output.finish_reason is not None:
            self.ends[output.id] = output

    def step(self, choice: int = 0, error: str = "") -> bool:
        busy = self.device.busy()
        if busy:
            lane = busy[choice % len(busy)]
            step = self.device.queue[lane][0]
            took_s = self.price.seconds(step.work, step.units) if self.price else 1.0
            self.event(self.device.finish(lane, self.now + took_s, error, took_s), took_s)
        return bool(busy)

    def drain(self, limit: int = 20000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        assert self.engine.idle, f"stuck: {list(self.engine.requests.values())}"
        assert not self.engine.state.running and not self.device.rows
        assert self.engine.page_pool.available == self.limits.pages, "a page leaked"

    def check(self) -> None:
        engine = self.engine
        held: dict[int, int] = {}
        for request in engine.state.running.values():
            for page in request.pages:
                held[page] = held.get(page, 0) + 1
        engine.page_pool.check(held)
        assert {r.slot for r in engine.state.running.values() if r.slot_initialised} == set(
            self.device.rows
        )
        for request in engine.requests.values():
            assert 0 <= request.computed_tokens <= request.scheduled_tokens
            if request.input.sampling.is_synchronous:
                assert request.scheduled_tokens <= len(request.tokens), (
                    "a token is to be computed that nobody knows yet"
                )
            if request.phase is Phase.WAITING:
                assert (
                    not request.pages and request.slot < 0 and request in engine.admission.waiting
                )
        if not self.device.busy():
            assert engine.idle or any(r.pinned for r in engine.requests.values()), (
                "work waits and nothing runs"
            )

    def check_answers(self) -> None:
        for id, arrive in self.sent.items():
            end = self.ends[id]
            stops = arrive.sampling.stop_token_ids
            want = answer(arrive.prompt, arrive.sampling.max_tokens, stops)
            if end.finish_reason in ("stop", "length"):
                assert self.got[id] == want, id
            else:
                assert self.got[id] == want[: len(self.got[id])], id
            assert len(self.records[id].token_s) == len(self.got[id])


POLICIES = ["serial", "serial in groups", "chunked", "multiplex", "auto"]


class TickEstimator:
    """A device whose steps take a tick per token and unit, and a little for the batch."""

    def seconds(self, work, units, co_running=None) -> float:
        layers = (work.last_layer - work.first_layer) / work.layers
        tokens = (
            work.prefill_tokens
            + 0.01 * work.prefill_reused
            + 2 * work.decode_batch
            + 0.01 * work.decode_context
        )
        return layers * (1.0 + tokens / units) * (1.2 if co_running else 1.0)


def make_test_policy(name: str, units: int = 4, layers: int = 6, depth: int = 1, **scheduler):
    name, _, groups = name.partition(" in ")
    scheduler = {
        "chunk_tokens": 16,
        "max_pass_tokens": 48,
        "layer_group": 2 if groups else None,
    } | scheduler
    settings = SchedulerConfig(policy=name, **scheduler)
    return make_policy(
        settings, DeviceShape(units, layers, depth, tuple(range(1, units))), TickEstimator()
    )


def make_harness(name: str, depth: int = 1, layer_group: int | None = None, **limits) -> Harness:
    return Harness(
        make_test_policy(name, limits.get("units", 4), depth=depth, layer_group=layer_group),
        **limits,
    )
