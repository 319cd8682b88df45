"""A tiny random model, a CPU executor for it, and steps as an engine would make them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from counterpoint.device.cpu import CpuExecutor
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.slot_tables import SlotTables
from counterpoint.model.checkpoint import RandomCheckpoint
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.model.ops import Ops
from counterpoint.model.ops_cpu import cpu_ops
from counterpoint.model.weights import build_decoder
from counterpoint.spec import ModelSpec
from counterpoint.types import (
    BatchShape,
    Command,
    InitSlot,
    Lane,
    Role,
    Sampling,
    Segment,
    Step,
    StepDone,
)

PAGE = 4
TINY = ModelSpec(
    name="tiny",
    family="llama",
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=128,
    vocab=310,
    max_context_tokens=128,
    tied_embeddings=True,
    eos_token_ids=(1,),
)
VOCAB = 300  # of the tokenizer
LANES = (Lane(0, Role.DECODE, 2), Lane(1, Role.PREFILL, 2))
GREEDY = Sampling(max_tokens=16, temperature=0.0)


def tiny_decoder(ops: Ops | None = None) -> Decoder:
    return build_decoder(TINY, RandomCheckpoint(3, deviation=0.15), ops or cpu_ops("float32"))


@dataclasses.dataclass
class Rig:
    executor: CpuExecutor
    inbox: WallClockEventQueue
    ids: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))
    finished: dict[int, StepDone] = dataclasses.field(default_factory=dict)

    def open(
        self, slot: int, tokens: list[int], sampling: Sampling = GREEDY, pages: tuple[int, ...] = ()
    ) -> None:
        self.submit(InitSlot(slot, tuple(tokens), len(tokens), pages, sampling))

    def submit(self, command: Command) -> None:
        self.executor.submit(command)

    def step(
        self,
        segments: list[Segment],
        lane: int = 0,
        units: int = 1,
        layers: tuple[int, int] = (0, TINY.layers),
        batch: int | None = None,
    ) -> int:
        step = next(self.ids)
        self.submit(
            Step(
                step,
                lane,
                step if batch is None else batch,
                *layers,
                units,
                tuple(segments),
                BatchShape(),
            )
        )
        return step

    def wait(self, step: int) -> StepDone:
        while step not in self.finished:
            got = self.inbox.get()
            assert got is not None
            for event in got[1]:
                assert isinstance(event, StepDone)
                self.finished[event.step] = event
        return self.finished[step]

    def run(self, segments: list[Segment], **how: Any) -> StepDone:
        done = self.wait(self.step(segments, **how))
        assert not done.error
        return done


def make_rig(
    decoder: Decoder, cores: tuple[int, ...], lanes: tuple[Lane, ...] = LANES, slots: int = 8
) -> Rig:
    inbox = WallClockEventQueue()
    kv = KVPool(TINY, 64, PAGE, decoder.kv_dtype)
    tables = SlotTables(slots, TINY.max_context_tokens, PAGE, VOCAB, TINY.eos_token_ids)
    return Rig(CpuExecutor(decoder, kv, tables, lanes, cores, inbox), inbox)
