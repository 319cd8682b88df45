"""Record event logs, and the commands that follow from them, before a change.

    python record.py [NAME ...]

Loads that hold all that a rename could break are played against simulated devices: the engines,
policies and prices of the simulator, with a device that also reports log-probabilities, rows that
could not be sampled and steps that fail. What each engine hears and what it commands is written to
`recorded/`, which test_replay.py replays. Fails if a situation that a case is there for did not
come about.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import random
import re
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from counterpoint.cluster.nouns import handoff_of
from counterpoint.cluster.virtual import VirtualPool
from counterpoint.core.policy.ablated import ABLATIONS
from counterpoint.machine import make_pool, make_rig
from counterpoint.serve.intake import SEED_MASK, SEED_STEP
from test_replay import RECORDED, Case, machine_of, named, plain

from counterpoint import machine as machines
from counterpoint.config import Config
from counterpoint.core.engine import Engine
from counterpoint.core.loop import run
from counterpoint.core.request import Phase, Request
from counterpoint.device.sim import Running, SimExecutor, VirtualInbox
from counterpoint.types import (
    NO_GRAMMAR,
    NOT_FINITE,
    Abort,
    Arrive,
    Command,
    Event,
    Open,
    Output,
    Part,
    Progress,
    Sampling,
    Segment,
    Slo,
    Stats,
    Step,
    StepDone,
    TokenLogprobs,
    Work,
)

# ------------------------------------------------------------ the device

BAD_ROW, BAD_GRAMMAR = 7001, 7002  # seeds of requests whose fourth token can't be sampled
BAD_AT = 3
FAIL_AFTER = (60, 200)  # the first small step of a higher number than each of these fails


def token_at(seed: int, position: int) -> int:
    """What the request of `seed` has at `position`: few different ids, so that logs are small."""
    return 1_000 + (seed * 13 + position) % 97


def told_of(token: int, position: int, top: int) -> TokenLogprobs:
    chosen = -((token * 7 + position) % 64) / 16
    return TokenLogprobs(
        chosen, tuple(token + n for n in range(top)), tuple(chosen - n for n in range(top))
    )


class ShortTimes(VirtualInbox):
    """Tells times to the microsecond, so that logs are small."""

    def move(self) -> tuple[float, Sequence[Event]] | None:
        told = super().move()
        return None if told is None else (round(told[0], 6), told[1])


class Telling(SimExecutor):
    """Reports what the simulated device leaves out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: dict[int, Open] = {}
        self._failures = list(FAIL_AFTER)

    def submit(self, command: Command) -> None:
        if isinstance(command, Open):
            self._rows[command.slot] = command
        super().submit(command)

    def _sampled(self, step: Step) -> tuple[int, ...]:
        return tuple([self._token(s) for s in step.segments if s.sample])

    def _token(self, segment: Segment) -> int:
        row, position = self._rows[segment.slot], segment.start + segment.tokens
        if position - row.prompt_tokens == BAD_AT:
            bad = {BAD_ROW: NOT_FINITE, BAD_GRAMMAR: NO_GRAMMAR}.get(row.sampling.seed)
            if bad is not None:
                return bad
        return token_at(row.sampling.seed, position)

    def _end(self, running: Running, turn: int) -> StepDone | None:
        done, step = super()._end(running, turn), running.step
        if done is None:
            return None
        done = msgspec.structs.replace(
            done,
            started_s=round(done.started_s, 6),
            ended_s=round(done.ended_s, 6),
            active_units=round(done.active_units, 2),
        )
        if self._failures and step.id > self._failures[0] and len(step.segments) <= 3:
            del self._failures[0]
            return msgspec.structs.replace(done, tokens=(), error="RuntimeError: out of luck")
        if step.last_layer < self.layers:
            return done
        sampled = [s for s in step.segments if s.sample]
        chosen = [self._chosen(s, token) for s, token in zip(sampled, done.tokens, strict=True)]
        prompts = [self._prompt(s) for s in step.segments]
        return msgspec.structs.replace(
            done,
            logprobs=tuple(chosen) if any(chosen) else (),
            prompt_logprobs=tuple(prompts) if any(prompts) else (),
        )

    def _chosen(self, segment: Segment, token: int) -> TokenLogprobs | None:
        top = self._rows[segment.slot].sampling.logprobs
        if top is None or token < 0:
            return None
        return told_of(token, segment.start + segment.tokens, top)

    def _prompt(self, segment: Segment) -> tuple[TokenLogprobs, ...] | None:
        row = self._rows[segment.slot]
        top = row.sampling.prompt_logprobs
        last = min(segment.start + segment.tokens, row.prompt_tokens - 1)
        if top is None or last <= segment.start:
            return None
        return tuple(told_of(row.tokens[n + 1], n + 1, top) for n in range(segment.start, last))


# ------------------------------------------------------------ what an engine hears and says


class Recorder:
    """Of one engine: its turns, and how often each situation came about."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.turns: list[tuple[float, list[Event], list[Command], list[Any]]] = []
        self.met: Counter[str] = Counter()
        self._heard: list[Event] = []
        self._prompts: dict[tuple[int, ...], int] = {}
        self._handle, self._pump = engine.handle, engine.pump
        self._outputs, self._progress = engine.take_outputs, engine.take_progress
        engine.handle, engine.pump = self.handle, self.pump
        engine.take_outputs = lambda: self._kept(self._outputs())
        engine.take_progress = lambda: self._kept(self._progress())

    def handle(self, now: float, event: Event) -> None:
        self._heard.append(event)
        self._meet(event)
        self._handle(now, event)

    def pump(self, now: float) -> list[Command]:
        commands = self._pump(now)
        self.turns.append((now, self._heard, commands, []))
        self.met["drops"] += sum(type(each).__name__ == "Drop" for each in commands)
        self._heard = []
        return commands

    def _kept(self, said: list[Any]) -> list[Any]:
        self.turns[-1][3].extend(said)
        return said

    def _meet(self, event: Event) -> None:
        living = self.engine.living
        if isinstance(event, Arrive):
            self._arrives(event)
        elif isinstance(event, StepDone):
            self.met["steps"] += 1
            self.met["failed steps"] += bool(event.error)
            self.met["rows not sampled"] += sum(token < 0 for token in event.tokens)
            self.met["logprobs"] += any(event.logprobs)
            self.met["prompt logprobs"] += any(event.prompt_logprobs)
        else:
            request = living.get(event.id)
            phase = "nobody" if request is None else request.phase.value
            if request is not None and request.phase is Phase.PREFILL and not started(request):
                phase = "admitted"
            if request is not None and request.preemptions and request.phase is Phase.WAITING:
                phase = "preempted"
            self.met[f"{type(event).__name__.lower()} of {phase}"] += 1

    def _arrives(self, arrive: Arrive) -> None:
        sampling = arrive.sampling
        same = self._prompts.get(arrive.prompt)
        if same is not None and same != sampling.seed and arrive.id.endswith(("-1", "-2")):
            self.met["further choices of a prompt"] += 1
        self._prompts[arrive.prompt] = sampling.seed
        self.met["arrivals"] += 1
        self.met["with priority"] += arrive.priority != 0
        self.met["with targets"] += arrive.slo != Slo()
        self.met["with salt"] += arrive.salt != ""
        self.met["resumed"] += bool(arrive.resumed)
        self.met["with grammar"] += sampling.grammar != ""
        self.met["part prefill"] += arrive.part is Part.PREFILL
        self.met["part decode"] += arrive.part is Part.DECODE

    def holds(self) -> dict[str, int]:
        """What came about, by the recorder's and the engine's own counts."""
        stats = self.engine.stats()
        ends = {f"finished {end}": times for end, times in stats.finished.items()}
        counted = {
            "preemptions": stats.preemptions,
            "prefix hits, tokens": stats.prefix_hits_tokens,
            "overtakes": stats.overtakes,
            "resplits": stats.resplits,
        }
        found = {**self.met, **ends, **counted}
        return {what: times for what, times in sorted(found.items()) if times}


def started(request: Request) -> bool:
    """Some of its prompt is computed or in flight."""
    return request.passes > 0 or request.computed > request.cached_tokens


# ------------------------------------------------------------ the loads


class Size(NamedTuple):
    """Of a load. `requests` come at first, `rate` of them a second, whose prompts have up to
    `pages` pages in common with others and `own` tokens of their own, and whose answers have
    `answer` tokens (at least, at most); then a `crowd` comes at once that wants many tokens, and
    prompts of `long` tokens. `tempo`: seconds of a short while."""

    requests: int
    rate: float
    crowd: int
    long: int
    tempo: float
    tpot_s: float
    ttft_s: float
    pages: int = 8
    own: tuple[int, int] = (5, 90)
    answer: tuple[int, int] = (6, 40)


H200 = Size(requests=50, rate=60.0, crowd=15, long=1400, tempo=0.01, tpot_s=0.02, ttft_s=0.15)
SMALL = H200._replace(requests=20, crowd=6)
LONG = H200._replace(requests=10, crowd=4, long=8000)
BUSY = H200._replace(
    requests=40,
    rate=30.0,
    crowd=6,
    long=6000,
    tpot_s=0.012,
    pages=20,
    own=(300, 3000),
    answer=(8, 60),
)
CPU = Size(requests=30, rate=1.0, crowd=10, long=500, tempo=0.3, tpot_s=0.4, ttft_s=3.0)


def ids(stream: int, count: int) -> tuple[int, ...]:
    """Tokens of which each stream has others; few different ones, so that logs are small."""
    first = 2_000 + stream * 11 % 20_000
    return tuple([first + position % 8 for position in range(count)])


class Load:
    """Requests by the time at which they come; those of one time come together."""

    def __init__(self, size: Size, seed: int) -> None:
        self.size = size
        self.dice = random.Random(seed)
        self.made = 0
        self.arrivals: list[tuple[float, Arrive]] = []

    def add(
        self, at_s: float, prompt: tuple[int, ...], tokens: int, n: int = 1, **more: Any
    ) -> None:
        """`n` choices of one prompt with seeds of their own, as the server makes them."""
        about = {k: more.pop(k) for k in ("priority", "salt", "slo", "resumed") if k in more}
        seed = more.pop("seed", 100 + self.made)
        for choice in range(n):
            own = (seed + choice * SEED_STEP) & SEED_MASK
            sampling = Sampling(max_tokens=tokens, seed=own, **{"ignore_eos": True, **more})
            arrive = Arrive(id=f"q{self.made}-{choice}", prompt=prompt, sampling=sampling, **about)
            self.arrivals.append((at_s, arrive))
        self.made += 1

    def prompt(self, group: int, common: int, own: int) -> tuple[int, ...]:
        return ids(group, common) + ids(100 + self.made, own)

    def mixed(self) -> Load:
        """All kinds of requests, one after another, some of them together."""
        size, dice, at_s = self.size, self.dice, 0.0
        for number in range(size.requests):
            at_s += dice.expovariate(size.rate)
            group, kind = number % 4, number % 10
            common = 16 * dice.randint(1, size.pages)
            prompt = self.prompt(group, common, dice.randint(*size.own))
            tokens = dice.randint(*size.answer)
            if kind == 1:
                how: dict[str, Any] = {"temperature": 0.5, "top_p": 0.75}
                how |= {"top_k": 40, "min_p": 0.125}
                self.add(at_s, prompt, tokens, n=3, **how)
            elif kind == 2:
                self.add(at_s, prompt, tokens, priority=1 if number % 20 == 2 else -1)
            elif kind == 3:
                slo = Slo(size.ttft_s / 2, size.tpot_s / 2, size.tpot_s * 4)
                self.add(at_s, prompt, tokens, slo=slo)
            elif kind == 4:
                salt = "x" if number % 20 == 4 else "y"
                bias = ((5, 1.5), (6, -2.0))
                self.add(at_s, prompt, tokens, salt=salt, stop_token_ids=(3, 4), logit_bias=bias)
            elif kind == 5:
                before = tuple([token_at(100 + self.made, n) for n in range(5)])
                self.add(at_s, prompt, tokens + 5, resumed=before)
            elif kind == 6:
                short = self.prompt(group, 32, 20)
                asked = {"logprobs": 2, "prompt_logprobs": 1 if number % 20 == 6 else None}
                self.add(at_s, short, 8, **asked)
            elif kind == 7:
                how = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
                how["repetition_penalty"] = 1.5
                self.add(at_s, prompt, tokens, grammar='start: "a"+', **how)
            elif kind == 8:
                stop = token_at(100 + self.made, len(prompt) + 4)
                how = {"ignore_eos": False, "min_tokens": 2}
                self.add(at_s, prompt, tokens, stop_token_ids=(stop,), **how)
            else:
                self.add(at_s, prompt, tokens, slo=Slo(tpot_s=size.tpot_s))
        return self.crowded(at_s).long_and_short(at_s + 150 * size.tempo)

    def crowded(self, at_s: float) -> Load:
        """Many who come at once, and want more pages than there are; some can't be answered."""
        for _ in range(self.size.crowd):
            self.add(at_s, self.prompt(5, 32, 20), 120)
        self.add(at_s, self.prompt(6, 16, 9), 20, seed=BAD_ROW)
        self.add(at_s, self.prompt(6, 16, 9), 20, seed=BAD_GRAMMAR, grammar="start: /./")
        self.add(at_s, (), 5)
        self.add(at_s, self.prompt(6, 16, 9), 10**6)
        return self

    def long_and_short(self, at_s: float) -> Load:
        """Long prompts, and short ones that come while they are computed."""
        size = self.size
        for number in range(4):
            own = size.long - 320 * number // 2
            self.add(at_s, self.prompt(7, 16, own), 12, slo=Slo(ttft_s=30 * size.ttft_s))
            for after in range(3):
                late_s = at_s + (after + 1) * size.tempo
                self.add(late_s, self.prompt(8, 16, 20), 12, slo=Slo(ttft_s=size.ttft_s))
            at_s += 40 * size.tempo
        return self


# ------------------------------------------------------------ those who leave

LEAVERS: tuple[Callable[[Request], bool], ...] = (
    lambda r: r.phase is Phase.WAITING and r.preemptions > 0,
    lambda r: r.phase is Phase.PREFILL and started(r),
    lambda r: r.phase is Phase.WAITING,
    lambda r: r.phase is Phase.DECODE and len(r.output) > 2,
)
Leave = Callable[[str], Event | None]


def leavers(inbox: VirtualInbox, engines: list[Engine], size: Size, leave: Leave) -> None:
    """Again and again, someone leaves who has been preempted, is being prefilled, waits or
    decodes: as far as there is one, of each kind in turn, some of each."""
    kinds, tries = list(LEAVERS) * max(3, size.requests // 12), 4_000

    def alarm() -> Event | None:
        nonlocal tries
        tries -= 1
        if not kinds or not tries:
            return None
        living = [request for engine in engines for request in engine.living.values()]
        for kind in kinds:
            found = [request.id for request in living if kind(request)]
            if found:
                kinds.remove(kind)  # those of the same kind stand behind the others
                inbox.call(inbox.now + 5 * size.tempo, alarm)
                return leave(found[-1])
        inbox.call(inbox.now + size.tempo, alarm)
        return None

    inbox.call(10 * size.tempo, alarm)


# ------------------------------------------------------------ cases


class Plan(NamedTuple):
    """A case to be recorded. `needs`: situations that must be in it."""

    case: Case
    size: Size
    needs: tuple[str, ...]
    hiccups: float = 0.0


ALWAYS = (
    "preemptions",
    "prefix hits, tokens",
    "further choices of a prompt",
    "with priority",
    "with targets",
    "with salt",
    "with grammar",
    "resumed",
    "logprobs",
    "prompt logprobs",
    "finished length",
    "finished stop",
    "finished abort",
    "finished error",
    "failed steps",
    "rows not sampled",
    "abort of decode",
    "abort of prefill",
    "abort of waiting",
    "abort of nobody",
)
FEW = ("prefix hits, tokens", "further choices of a prompt", "finished abort")
TIGHT = {
    "kv_pages": 100,
    "max_running": 20,
    "max_pass_tokens": 1024,
    "max_bypass_s": 0.2,
    "max_preemptions": 2,
}
TARGETS = {"ttft_s": H200.ttft_s, "tpot_s": H200.tpot_s}


def plan(
    settings: dict[str, Any],
    size: Size = H200,
    needs: tuple[str, ...] = ALWAYS,
    without: str | None = None,
    hiccups: float = 0.0,
    belief_error: float = 0.0,
) -> Plan:
    """`hiccups`, `belief_error`: shares of steps that take longer for once, and by which the
    policy's prices are off at first, so that there is something to learn."""
    cpu = size is CPU
    case = Case(
        model="smollm2-135m" if cpu else "llama-3.1-8b",
        device="cpu-2" if cpu else "h200",
        depth=1 if cpu else 2,
        calibrated=not cpu,
        without=without,
        belief_error=belief_error,
        settings={**TIGHT, **settings},
        limits=[],
    )
    return Plan(case, size, needs, hiccups)


def plans() -> dict[str, Plan]:
    auto = {"policy": "auto", **TARGETS}
    busy = {**auto, "tpot_s": BUSY.tpot_s, "kv_pages": 1500, "max_pass_tokens": 4096}
    cpu = {"kv_pages": 60, "ttft_s": CPU.ttft_s, "tpot_s": CPU.tpot_s, "chunk_tokens": 64}
    found = {
        "serial": plan({"policy": "serial"}),
        "serial-groups": plan({"policy": "serial", "layer_group": 5}, needs=(*ALWAYS, "drops")),
        "chunked": plan({"policy": "chunked", "chunk_tokens": 256}),
        "multiplex": plan({"policy": "multiplex"}, needs=(*ALWAYS, "drops", "resplits")),
        "auto": plan(auto, needs=(*ALWAYS, "resplits"), hiccups=0.05),
        "auto-busy": plan(busy, BUSY, FEW, hiccups=0.1, belief_error=0.2),
        "auto-long": plan(
            {**auto, "kv_pages": 600, "max_pass_tokens": 8192}, LONG, (*FEW, "overtakes")
        ),
        "cpu-chunked": plan({"policy": "chunked", **cpu}, CPU),
        "cpu-multiplex": plan({"policy": "multiplex", **cpu}, CPU),
        "cpu-auto": plan({"policy": "auto", **cpu}, CPU, (*ALWAYS, "overtakes")),
        "no-prefix-cache": plan(
            {**auto, "prefix_cache": False},
            SMALL._replace(crowd=13),
            ("preemptions", "finished abort"),
        ),
    }
    for part in ABLATIONS:
        found[f"auto-without-{part}"] = plan(
            busy, BUSY._replace(requests=20), FEW, without=part, hiccups=0.1, belief_error=0.2
        )
    pools = {"kv_pages": 100, "local_tokens": 0, "prefill": 1}
    handed = ("part prefill", "part decode", "adopt of held", "release of held", "abort of prefill")
    found["pool-1-1"] = plan(
        {**auto, **pools, "decode": 1, "local_tokens": 60}, SMALL._replace(requests=30), handed
    )
    found["pool-1-2"] = plan(
        {"policy": "serial", "layer_group": 8, **pools, "decode": 2}, SMALL, handed
    )
    return found


def record(name: str, planned: Plan) -> Iterator[tuple[str, Case, Recorder]]:
    """One log, or one of each worker of a pool."""
    case, size = planned.case, planned.size
    config = Config().replace(**case.settings)
    machine = dataclasses.replace(machine_of(case, config), hiccups=planned.hiccups)
    load = Load(size, seed=len(name)).mixed()
    if not config.cluster.workers:
        recorder = one_engine(machine, config, load)
        yield name, noted(case, recorder), recorder
        return
    pool, recorders = pool_of_engines(machine, config, load)
    for worker, recorder in recorders.items():
        yield f"{name}-{worker}", noted(case, recorder), recorder
    assert not any(worker.engine.living for worker in pool.workers.values()), "it did not end"


def one_engine(machine: machines.Machine, config: Config, load: Load) -> Recorder:
    engine, executor, inbox = make_rig(machine, config)
    recorder = Recorder(engine)
    for at_s, arrive in load.arrivals:
        inbox.post(at_s, arrive)
    inbox.post(load.arrivals[3][0], Abort("nobody"))
    inbox.post(load.arrivals[5][0], load.arrivals[4][1])  # an id that is there already
    leavers(inbox, [engine], load.size, Abort)
    run(engine, inbox, executor, lambda outputs, engine: None)
    assert engine.idle, "it did not end"
    return recorder


def pool_of_engines(
    machine: machines.Machine, config: Config, load: Load
) -> tuple[VirtualPool, dict[str, Recorder]]:
    ended: list[str] = []
    pool = make_pool(machine, config, lambda record, error: ended.append(record.id))
    recorders = {name: Recorder(worker.engine) for name, worker in pool.workers.items()}
    for at_s, arrive in load.arrivals:
        pool.post(at_s, lambda arrive=arrive: arrive)
    engines = [worker.engine for worker in pool.workers.values()]

    def leave(id: str) -> None:
        known = handoff_of(id)
        if known is not None:
            pool.front.withdraw(known[0].request)
            pool._flow()

    leavers(pool.door, engines, load.size, leave)
    pool.run()
    assert len(ended) > load.made // 2, "hardly anyone was answered"
    return pool, recorders


def noted(case: Case, recorder: Recorder) -> Case:
    engine = recorder.engine
    prices = "the table that ships" if case.calibrated else "the roofline"
    return msgspec.structs.replace(
        case,
        limits=plain(engine.limits),
        turns=len(recorder.turns),
        holds=recorder.holds(),
        about=f"policy {type(engine.policy).__name__}, prices of {prices}",
    )


# ------------------------------------------------------------ files


def write_lines(path: Path, rows: Iterable[Any]) -> int:
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return path.stat().st_size


def write(name: str, recorder: Recorder) -> int:
    turns, size = recorder.turns, 0
    heard = ([now, [msgspec.to_builtins(event) for event in events]] for now, events, *_ in turns)
    for kind, rows in (
        ("events", heard),
        ("commands", (named(turn[2]) for turn in turns)),
        ("outputs", (named(turn[3]) for turn in turns)),
        ("stats", [plain(recorder.engine.stats())]),
    ):
        size += write_lines(RECORDED / f"{name}.{kind}.jsonl.xz", rows)
    return size


def write_json(name: str, value: Any) -> None:
    """Lists of plain values on one line each."""
    whole = json.dumps(value, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), whole)
    (RECORDED / name).write_text(text + "\n", encoding="utf-8")


def kinds() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """The structs of the logs: what the places in commands and outputs were called."""
    for union in (Event, Command, Output, Progress):
        yield from ((kind.__name__, kind) for kind in typing.get_args(union))
    yield from ((kind.__name__, kind) for kind in (Sampling, Slo, Segment, Work, TokenLogprobs))
    yield Stats.__name__, Stats


def main(wanted: list[str]) -> None:
    machines.SimExecutor, machines.VirtualInbox = Telling, ShortTimes
    RECORDED.mkdir(exist_ok=True)
    done: dict[str, Case] = {}
    for name, planned in plans().items():
        if wanted and name not in wanted:
            continue
        held: Counter[str] = Counter()
        for log, case, recorder in record(name, planned):
            size = write(log, recorder)
            done[log] = case
            held.update(case.holds)
            print(f"{log}: {case.turns} turns, {size / 1000:.0f} kB, {case.holds}", flush=True)
        missing = [what for what in planned.needs if not held[what]]
        assert not missing, f"{name} is to hold what did not come about: {', '.join(missing)}"
    if not wanted:
        write_json("cases.json", msgspec.to_builtins(done))
        write_json("fields.json", {name: kind.__struct_fields__ for name, kind in kinds()})


if __name__ == "__main__":
    main(sys.argv[1:])
