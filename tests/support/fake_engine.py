"""An engine for the server's tests: the real core, and a device that echoes its prompt.

Tokens are bytes, as for a model without tokenizer files. The answer to a chat is its last user
message; to a completion, its prompt. Then the turn ends, or the text repeats under ignore_eos. With
a temperature and "random" in the prompt, each token is a letter drawn from (seed, position). Some
words in a prompt make the device fail or wait: see EchoExecutor.submit and run_lane.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.builder.system import System, make_limits
from counterpoint.builder.system_builder import cpu_policy
from counterpoint.config import Config, ConfigError
from counterpoint.core.engine import Engine
from counterpoint.core.limits import DeviceShape
from counterpoint.core.policy import make_policy
from counterpoint.cost_model.calibration import CalibrationKey, shape_key
from counterpoint.cost_model.roofline import Roofline
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.spec.device import cpu_device
from counterpoint.spec.model import ModelSpec
from counterpoint.spec.source import ModelSource
from counterpoint.types import (
    Command,
    InitSlot,
    Lane,
    Sampling,
    Segment,
    Step,
    StepDone,
    TokenLogprobs,
)

BYTES, TURN, END, VOCAB = 256, 256, 257, 260
STEP_S = 0.001
LONG_STEP_S = 5.0
SPEC = ModelSpec(
    name="echo",
    family="llama",
    layers=1,
    hidden=64,
    heads=1,
    kv_heads=1,
    head_dim=64,
    ffn=64,
    vocab=VOCAB,
    max_context_tokens=4096,
    eos_token_ids=(END,),
)


def system(config: Config, event_queue: WallClockEventQueue, progress: object = None) -> System:
    pages = config.device.kv_pages or 1024
    limits = make_limits(config, SPEC, pages, units=1)
    policy = make_policy(config.scheduler, DeviceShape(1, SPEC.layers))
    return System(
        engine=Engine(limits, policy),
        executor=EchoExecutor(event_queue, policy.lanes),
        spec=SPEC,
        source=ModelSource("spec", "", "echo"),
        limits=limits,
        lanes="one lane that echoes",
    )


def two_lane_system(
    config: Config, event_queue: WallClockEventQueue, progress: object = None
) -> System:
    """Two units and four layers, enough for every policy."""
    spec = dataclasses.replace(SPEC, layers=4)
    limits = make_limits(config, spec, config.device.kv_pages or 1024, units=2)
    key = CalibrationKey(
        device="echo",
        units=2,
        model=shape_key(spec),
        dtype="float16",
        kv_dtype="float16",
        kernels="none",
    )
    policy, _ = cpu_policy(config, spec, key, Roofline(spec, cpu_device(2), "float16", "float16"))
    executor = EchoExecutor(event_queue, policy.lanes, spec.layers)
    return System(
        Engine(limits, policy),
        executor,
        spec,
        ModelSource("spec", "", "echo"),
        limits,
        "lanes that echo",
    )


@dataclass
class Row:
    tokens: tuple[int, ...]
    prompt_tokens: int
    sampling: Sampling

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.prompt_tokens]

    def echo_tokens(self) -> list[int]:
        """The tokens to echo: the content of the last complete turn, or the prompt."""
        prompt = list(self.prompt)
        if TURN not in prompt or END not in prompt[prompt.index(TURN) :]:
            return prompt
        end = len(prompt) - 1 - prompt[::-1].index(END)
        begin = max(i for i in range(end) if prompt[i] == TURN)
        text = prompt[begin + 1 : end]
        return text[text.index(ord("\n")) + 1 :] if ord("\n") in text else text

    def contains(self, word: str) -> bool:
        return word.encode() in bytes(t for t in self.prompt if t < BYTES)

    @property
    def hold_file(self) -> str:
        """A prompt "HOLD UNTIL path" waits for that file."""
        return self._path_after("HOLD UNTIL ")

    @property
    def block_file(self) -> str:
        """A prompt "STICK UNTIL path" blocks the engine's loop until that file exists."""
        return self._path_after("STICK UNTIL ")

    def _path_after(self, words: str) -> str:
        text = bytes(t for t in self.prompt if t < BYTES).decode(errors="replace")
        return text.partition(words)[2].partition(" ")[0]

    def token(self, position: int) -> int:
        sampling, n = self.sampling, position - self.prompt_tokens
        forced = [token for token, bias in sampling.logit_bias if bias >= 100]
        if forced:
            return forced[0]
        if sampling.temperature and self.contains("random"):
            return ord("a") + hashlib.blake2b(f"{sampling.seed} {n}".encode()).digest()[0] % 26
        text = [*self.echo_tokens(), END]
        token = text[n % len(text)]
        if token == END and (n < sampling.min_tokens or sampling.ignore_eos):
            token = ord(".")
        while dict(sampling.logit_bias).get(token, 0) <= -100:
            token = (token + 1) % BYTES
        return token

    def logprobs(self, token: int, top: int) -> TokenLogprobs:
        unspelled = (
            [VOCAB - 2, VOCAB - 1] if self.contains("ALIKE") else []
        )  # two ids without any text
        others = [token, *unspelled, *((token + i) % BYTES for i in range(1, top))][:top]
        return TokenLogprobs(-0.25, tuple(others), tuple(-0.25 * (i + 1) for i in range(top)))


class EchoExecutor:
    """One thread per lane."""

    def __init__(
        self, event_queue: WallClockEventQueue, lanes: Sequence[Lane], layers: int = SPEC.layers
    ) -> None:
        self.event_queue = event_queue
        self.layers = layers
        self.rows: dict[int, Row] = {}
        self.closed = threading.Event()
        self.steps: dict[int, queue.SimpleQueue[Step | None]] = {
            lane.id: queue.SimpleQueue() for lane in lanes
        }
        self.threads = [
            threading.Thread(target=self.run_lane, args=(steps,), daemon=True)
            for steps in self.steps.values()
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, command: Command) -> None:
        if isinstance(command, InitSlot):
            row = Row(command.tokens, command.prompt_tokens, command.sampling)
            if row.contains("LOSE THE DEVICE"):
                raise RuntimeError("the device is lost, as asked")
            # A real executor must not block here.
            while row.block_file and not os.path.exists(row.block_file):
                time.sleep(STEP_S)
            self.rows[command.slot] = row
        elif isinstance(command, Step):
            self.steps[command.lane].put(command)

    def close(self) -> None:
        self.closed.set()
        for steps in self.steps.values():
            steps.put(None)
        for thread in self.threads:
            thread.join()

    def run_lane(self, steps: queue.SimpleQueue[Step | None]) -> None:
        while (step := steps.get()) is not None:
            started_s = self.event_queue.clock()
            slow = any(
                self.rows[segment.slot].contains("TAKE LONG") and not segment.start
                for segment in step.segments
            )
            self.closed.wait(LONG_STEP_S if slow else STEP_S)
            for path in {
                row.hold_file for row in (self.rows[s.slot] for s in step.segments) if row.hold_file
            }:
                while not os.path.exists(path) and not self.closed.wait(STEP_S):
                    pass
            self.event_queue.put(self.run_step(step, started_s))

    def run_step(self, step: Step, started_s: float) -> StepDone:
        """An exception in a step becomes its error, as in the real executors."""
        try:
            return self.compute(step, started_s)
        except Exception as error:
            return StepDone(
                step.id,
                step.lane,
                started_s=started_s,
                ended_s=self.event_queue.clock(),
                units=step.units,
                error=repr(error),
            )

    def compute(self, step: Step, started_s: float) -> StepDone:
        if step.last_layer < self.layers:
            return StepDone(
                step.id,
                step.lane,
                started_s=started_s,
                ended_s=self.event_queue.clock(),
                units=step.units,
            )
        rows = [(segment, self.rows[segment.slot]) for segment in step.segments]
        sampled = [(s, row) for s, row in rows if s.sample]
        tokens = tuple(
            -1 if row.contains("GIVE NAN") else row.token(s.start + s.tokens) for s, row in sampled
        )
        return StepDone(
            step=step.id,
            lane=step.lane,
            tokens=tokens,
            logprobs=tuple(
                None
                if row.sampling.logprobs is None
                else row.logprobs(token, row.sampling.logprobs)
                for token, (_, row) in zip(tokens, sampled, strict=True)
            ),
            prompt_logprobs=tuple(self.prompt_logprobs(s, row) for s, row in rows),
            started_s=started_s,
            ended_s=self.event_queue.clock(),
            units=step.units,
            error="a failed step, as asked"
            if any(row.contains("FAIL THE STEP") for _, row in rows)
            else "",
        )

    def prompt_logprobs(self, segment: Segment, row: Row) -> tuple[TokenLogprobs, ...] | None:
        top = row.sampling.prompt_logprobs
        if top is None or segment.start >= row.prompt_tokens:
            return None
        last = min(segment.start + segment.tokens, row.prompt_tokens - 1)
        return tuple(row.logprobs(token, top) for token in row.tokens[segment.start + 1 : last + 1])


def waiting_system(
    config: Config, event_queue: WallClockEventQueue, progress: object = None
) -> System:
    """Loads until the file `timeline` exists."""
    while not os.path.exists(config.server.timeline or ""):
        time.sleep(0.02)
    return system(config, event_queue)


def refusing_system(
    config: Config, event_queue: WallClockEventQueue, progress: object = None
) -> System:
    raise ConfigError("page_tokens is 16: it must be something else, says the test")


def broken_system(
    config: Config, event_queue: WallClockEventQueue, progress: object = None
) -> System:
    raise RuntimeError("a fault, as asked")
