"""Event logs that were recorded before a change give the same commands after it.

Each case of `recorded/cases.json` has files of JSON lines, one line per turn of the loop:

    NAME.events.jsonl.xz    [now, [{"type": "Arrive", "id": ..., ...}, ...]]
    NAME.commands.jsonl.xz  [["Step", [field values in the order of their declaration]], ...]
    NAME.outputs.jsonl.xz   the same of what the engine said to clients, and to whoever moves KV
    NAME.stats.jsonl.xz     one line: the values of what the engine had counted in the end

So only names of classes and of the events' fields can go out of date; migrate.py renames them.

A case also says how its engine is made: a model and a device by their names in the presets, and
settings. The engine and its policy are those that the simulator makes, so prices are real ones.
No torch is needed.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import lzma
import traceback
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from counterpoint.config import Config
from counterpoint.core.engine import Engine
from counterpoint.cost_model.calibration_store import shipped_calibration
from counterpoint.simulator.machine import Machine, dtypes, make_engine
from counterpoint.spec.device import device_spec
from counterpoint.spec.presets import PRESETS
from counterpoint.types import Event

RECORDED = Path(__file__).parent / "recorded"
Events = list[tuple[float, list[dict[str, Any]]]]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine of a log is made, and what is known of it. `limits`: the engine's, in order of
    declaration. `holds`: how often each situation occurs in the log. `about`: for readers only."""

    model: str
    device: str
    depth: int
    calibrated: bool
    without: str | None = None
    belief_error: float = 0.0
    settings: dict[str, Any] = {}
    limits: list[Any]
    turns: int = 0
    holds: dict[str, int] = {}
    about: str = ""


class Turn(NamedTuple):
    """What an engine gave in a turn, as plain values."""

    commands: list[Any]
    outputs: list[Any]


class Difference(NamedTuple):
    turn: int
    now: float
    expected: list[Any]
    got: list[Any]


# ------------------------------------------------------------ plain values


def plain(value: Any) -> Any:
    """Numbers, texts and lists alone: of a struct, the values in the order of their declaration."""
    if isinstance(value, msgspec.Struct):
        return [plain(getattr(value, name)) for name in value.__struct_fields__]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return value


def named(values: Sequence[Any]) -> list[Any]:
    return [[type(value).__name__, plain(value)] for value in values]


def event_of(raw: dict[str, Any]) -> Event:
    """Raises ValueError if a recorded field is unknown: it would be passed over in silence."""
    event = msgspec.convert(raw, Event)
    check_names(raw, event)
    return event


def check_names(raw: dict[str, Any], made: msgspec.Struct) -> None:
    unknown = set(raw) - {"type"} - set(made.__struct_fields__)
    if unknown:
        raise ValueError(f"{type(made).__name__} has no field {', '.join(sorted(unknown))}")
    for name, value in raw.items():
        inner = getattr(made, name, None)
        if isinstance(value, dict) and isinstance(inner, msgspec.Struct):
            check_names(value, inner)


# ------------------------------------------------------------ cases


@cache
def cases() -> dict[str, Case]:
    return msgspec.json.decode((RECORDED / "cases.json").read_bytes(), type=dict[str, Case])


def lines(name: str, kind: str) -> list[Any]:
    with lzma.open(RECORDED / f"{name}.{kind}.jsonl.xz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def machine_of(case: Case, config: Config) -> Machine:
    model, device = PRESETS[case.model], device_spec(case.device)
    table = shipped_calibration(device, model, *dtypes(config, device)) if case.calibrated else None
    assert (table is not None) == case.calibrated, "the table that ships is not found"
    return Machine(
        model,
        device,
        depth=case.depth,
        belief_error=case.belief_error,
        calibration=table,
        without=case.without,
    )


def engine_of(case: Case) -> Engine:
    """A fresh engine, as the simulator makes it."""
    config = Config().replace(**case.settings)
    machine = machine_of(case, config)
    return make_engine(machine, config, machine.estimators(config)[1])


def played(engine: Engine, turns: Events) -> Iterator[Turn]:
    """What the engine gives for each recorded turn."""
    for now, events in turns:
        for raw in events:
            engine.on_event(now, event_of(raw))
        commands = named(engine.schedule(now))
        yield Turn(commands, named([*engine.take_outputs(), *engine.take_progress()]))


class Replayed(NamedTuple):
    """What came of a log. `broke`: the error that ended the replay, after the last of `turns`: a
    step comes back that this engine has not launched, say."""

    events: Events
    turns: list[Turn]
    broke: str
    limits: list[Any]
    stats: list[Any]


def replay(case: Case, events: Events) -> Replayed:
    engine, turns, broke = engine_of(case), list[Turn](), ""
    try:
        turns.extend(played(engine, events))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        broke = f"{type(error).__name__}: {error} (line {where.lineno} of {where.filename})"
    return Replayed(events, turns, broke, plain(engine.limits), plain(engine.stats()))


@cache
def replayed(name: str) -> Replayed:
    return replay(cases()[name], lines(name, "events"))


def first_difference(again: Replayed, expected: list[Any], got: list[Any]) -> Difference | None:
    for index, (want, have) in enumerate(zip(expected, got, strict=False)):
        if want != have:
            return Difference(index, again.events[index][0], want, have)
    return None


def complaint(name: str, kind: str, again: Replayed, got: list[Any]) -> str:
    """The first turn that differs from what was recorded, in words; empty if none does."""
    expected = lines(name, kind)
    found = first_difference(again, expected, got)
    if found is not None:
        pairs = zip_longest(found.expected, found.got)
        want, have = next(pair for pair in pairs if pair[0] != pair[1])
        told = (
            f"{name}: {kind} differ in turn {found.turn} of {len(expected)}, at {found.now} s",
            f"  expected: {cut(want)}",
            f"  got:      {cut(have)}",
            f"  all that was expected: {cut(found.expected)}",
            f"  all that was got:      {cut(found.got)}",
            f"  events of the turn:    {cut(again.events[found.turn][1])}",
        )
        return "\n".join(told)
    if again.broke:
        return f"{name}: the replay ended in turn {len(again.turns)}: {again.broke}"
    if len(expected) != len(got):
        return f"{name}: {kind} of {len(expected)} turns are there, and {len(got)} were played"
    return ""


def cut(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 1000 else f"{text[:1000]} ..."


def check(name: str, kind: str, again: Replayed, got: list[Any]) -> None:
    found = complaint(name, kind, again, got)
    if found:
        pytest.fail(found, pytrace=False)


# ------------------------------------------------------------ tests

SITUATIONS = (
    "abort of decode",
    "abort of nobody",
    "abort of prefill",
    "abort of preempted",
    "abort of waiting",
    "adopt of held",
    "drops",
    "failed steps",
    "finished abort",
    "finished error",
    "finished length",
    "finished stop",
    "further choices of a prompt",
    "logprobs",
    "overtakes",
    "part decode",
    "part prefill",
    "preemptions",
    "prefix hits, tokens",
    "prompt logprobs",
    "release of done",
    "release of held",
    "resplits",
    "resumed",
    "rows not sampled",
    "with grammar",
    "with priority",
    "with salt",
    "with targets",
)


@pytest.mark.parametrize("name", sorted(cases()))
def test_a_recorded_log_gives_the_same_commands(name: str) -> None:
    again = replayed(name)
    assert again.limits == cases()[name].limits, "the engine is made with other limits"
    check(name, "commands", again, [turn.commands for turn in again.turns])


@pytest.mark.parametrize("name", sorted(cases()))
def test_clients_are_told_the_same(name: str) -> None:
    again = replayed(name)
    check(name, "outputs", again, [turn.outputs for turn in again.turns])


@pytest.mark.parametrize("name", sorted(cases()))
def test_the_engine_counts_the_same(name: str) -> None:
    (expected,) = lines(name, "stats")
    assert replayed(name).stats == expected


@pytest.mark.parametrize("name", sorted(cases()))
def test_one_lost_event_is_noticed(name: str) -> None:
    """The proof that these tests can fail."""
    events = lines(name, "events")
    del events[0][1][0]
    again = replay(cases()[name], events)
    assert complaint(name, "commands", again, [turn.commands for turn in again.turns])


def test_the_logs_hold_every_situation() -> None:
    """As record.py counted them."""
    met = {what for case in cases().values() for what in case.holds}
    assert not set(SITUATIONS) - met
