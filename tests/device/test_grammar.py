"""Grammars: bitmasks, the gate, answers of the CPU executor and of the engine under every
policy."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from cpu_rig import TINY, VOCAB, Rig, make_rig, tiny_decoder
from cpu_service import Service, make_requests, policies

from counterpoint.core.policy import Serial
from counterpoint.device.cores import usable_cores
from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.device.grammar import CACHE_CHARACTERS, GrammarGate, Grammars, Vocabulary
from counterpoint.interfaces import Policy
from counterpoint.serve.structured_output.grammar import (
    from_choice,
    from_json_schema,
    from_lark,
    from_regex,
)
from counterpoint.types import NO_GRAMMAR, Abort, AddRequest, Event, Sampling, Segment

FIRST = 10  # the id of byte 0: the vocabulary is the bytes, the end of sequence, a control token
(EOS,) = TINY.eos_token_ids
CONTROL = 2


def encode(text: str) -> list[int]:
    return [FIRST + byte for byte in text.encode()]


def decode(tokens: Sequence[int]) -> str:
    return bytes(token - FIRST for token in tokens if token not in (EOS, CONTROL)).decode()


def vocabulary() -> Vocabulary:
    tokens = [b""] * FIRST + [bytes([byte]) for byte in range(256)]
    tokens[EOS], tokens[CONTROL] = b"<end>", b"<control>"
    return Vocabulary(tokens, [EOS, CONTROL], encode)


def make_grammars() -> Grammars:
    grammars = Grammars(VOCAB, TINY.eos_token_ids)
    grammars.set_vocabulary_loader(vocabulary)
    return grammars


def allowed(grammars: Grammars, slot: int, count: int) -> set[int]:
    (row,) = grammars.compute_bitmasks([slot], [count])
    return set(np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist())


def constrained(grammar: str, **options) -> Sampling:
    return Sampling(max_tokens=64, temperature=0.0, grammar=grammar, **options)


DIGITS = set(encode("0123456789"))


def test_bitmasks_follow_the_answer():
    grammars = make_grammars()
    grammars.init_slot(3, constrained(from_regex("[0-9]{1,3}")))
    assert allowed(grammars, 3, 0) == DIGITS
    grammars.accept_tokens([5, 3], [encode("x")[0], encode("7")[0]])
    assert allowed(grammars, 3, 1) == DIGITS | {EOS}
    assert allowed(grammars, 3, 1) == DIGITS | {EOS}, "asked again"
    grammars.accept_tokens([3], encode("1"))
    grammars.accept_tokens([3], encode("2"))
    assert allowed(grammars, 3, 3) == {EOS}
    grammars.init_slot(3, constrained(from_regex("x")))
    assert allowed(grammars, 3, 0) == set(encode("x")), "the next request begins anew"


def test_a_matcher_starts_after_output_that_exists():
    grammars = make_grammars()
    grammars.init_slot(0, constrained(from_choice(["left", "right"])), encode("ri"))
    assert allowed(grammars, 0, 2) == set(encode("g"))


def test_ends_are_forbidden_while_anything_else_is_allowed():
    stop = encode("5")[0]
    grammars = make_grammars()
    grammars.init_slot(
        0, constrained(from_regex("[0-9]{1,3}"), min_tokens=3, stop_token_ids=(stop,)), encode("1")
    )
    assert allowed(grammars, 0, 1) == DIGITS - {stop}
    assert allowed(grammars, 0, 3) == DIGITS | {EOS}
    grammars.init_slot(
        1, constrained(from_regex("5{1,3}"), min_tokens=9, stop_token_ids=(stop,)), encode("5")
    )
    assert allowed(grammars, 1, 1) == {stop, EOS}, "nothing else is left"
    grammars.init_slot(2, constrained(from_regex("[0-9]*"), ignore_eos=True))
    assert allowed(grammars, 2, 0) == DIGITS
    grammars.init_slot(2, constrained(from_regex("[0-9]"), ignore_eos=True), encode("1"))
    assert allowed(grammars, 2, 1) == {EOS}


def test_control_tokens_are_no_text():
    grammars = make_grammars()
    grammars.init_slot(0, constrained(from_regex("(?s:.)*")))
    free = allowed(grammars, 0, 0)
    assert CONTROL not in free and EOS in free and set(encode("a<e")) <= free
    assert not any(id >= FIRST + 256 or 2 < id < FIRST for id in free), "ids that are no token"
    grammars.init_slot(0, constrained(from_lark('start: "a" <[2]> "b"')), encode("a"))
    assert allowed(grammars, 0, 1) == {CONTROL}


@pytest.mark.parametrize(
    "grammar",
    ["nonsense", from_regex("("), from_regex("[^\\s\\S]"), from_regex("a{100}{100}{100}{100}")],
)
def test_a_bad_grammar_allows_nothing(grammar: str):
    grammars = make_grammars()
    grammars.init_slot(0, constrained(grammar))
    grammars.init_slot(1, constrained(from_regex("[0-9]")))
    allowed(grammars, 0, 0)
    grammars.accept_tokens([0], encode("b"))
    assert allowed(grammars, 0, 1) == set()
    assert allowed(grammars, 1, 0) == DIGITS


def test_without_a_vocabulary_nothing_is_allowed():
    grammars = Grammars(VOCAB, TINY.eos_token_ids)
    grammars.init_slot(0, constrained(from_regex("a")))
    assert allowed(grammars, 0, 0) == set()


def test_the_cache_of_compiled_grammars_is_bounded():
    grammars = make_grammars()
    large = [from_choice([f"{n}", "x" * (CACHE_CHARACTERS // 3)]) for n in range(4)]
    grammars.compile(large[0])
    grammars.init_slot(0, constrained(large[0]))
    for grammar in large[1:]:
        grammars.compile(grammar)
    assert [grammars.is_compiled(grammar) for grammar in large] == [False, False, True, True]
    assert allowed(grammars, 0, 0) == set(encode("0x")), "a slot keeps its own"
    assert not grammars.is_compiled(large[0])
    grammars.free_slot(0)
    grammars.init_slot(0, constrained(large[1]))
    assert allowed(grammars, 0, 0) == set(encode("1x")) and grammars.is_compiled(large[1]), (
        "an evicted grammar is compiled again"
    )


# ---------------------------------------------------------------- the gate


def next_events(inbox: WallClockEventQueue) -> Sequence[Event]:
    got = inbox.get()
    assert got is not None
    return got[1]


def add_request(id: str, grammar: str = "") -> AddRequest:
    return AddRequest(id=id, prompt=(1,), sampling=constrained(grammar))


def test_the_gate_keeps_a_requests_order_and_delays_no_other():
    loaded, inbox = threading.Event(), WallClockEventQueue()

    def slow() -> Vocabulary:
        loaded.wait(30)
        return vocabulary()

    grammars = Grammars(VOCAB, TINY.eos_token_ids)
    grammars.set_vocabulary_loader(slow)
    gate = GrammarGate(grammars, inbox)
    first = [
        add_request("constrained", from_regex("a")),
        add_request("free"),
        Abort("constrained"),
        Abort("free"),
    ]
    for event in first:
        gate.put(event)
    assert next_events(inbox) == [first[1], first[3]]
    loaded.set()
    gate.close()
    assert next_events(inbox) == [first[0], first[2]]
    gate.put(add_request("known", from_regex("a")))
    assert next_events(inbox) == [add_request("known", from_regex("a"))], (
        "a compiled grammar passes at once"
    )


def test_the_gate_lets_a_bad_grammar_in():
    inbox = WallClockEventQueue()
    gate = GrammarGate(Grammars(VOCAB, TINY.eos_token_ids), inbox)
    gate.put(add_request("a", from_regex("a")))
    gate.close()
    assert next_events(inbox) == [add_request("a", from_regex("a"))]


# ---------------------------------------------------------------- the executor


@pytest.fixture(scope="module")
def rig():
    rig = make_rig(tiny_decoder(), tuple(usable_cores(None))[:1])
    rig.executor.tables.sampling.grammars.set_vocabulary_loader(vocabulary)
    yield rig
    rig.executor.close()


def generate(
    rig: Rig, slot: int, sampling: Sampling, prompt: list[int], most: int = 40
) -> list[int]:
    rig.open(slot, prompt, sampling)
    pages = range(slot * 16, slot * 16 + 16)
    done = rig.run([Segment(slot, 0, len(prompt), True, tuple(pages))], lane=1)
    tokens = list(done.tokens)
    while tokens[-1] >= 0 and tokens[-1] != EOS and len(tokens) < most:
        tokens += rig.run([Segment(slot, len(prompt) + len(tokens) - 1, 1, True)]).tokens
    return tokens


@pytest.mark.parametrize(
    "how",
    [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 2.0, "min_p": 0.01}],
)
def test_answers_obey_the_schema(rig: Rig, how):
    schema = {
        "type": "object",
        "properties": {
            "a": {"enum": ["yes", "no"]},
            "b": {"type": "integer", "minimum": 0, "maximum": 99},
        },
    }
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    for seed in range(5):
        tokens = generate(
            rig,
            0,
            Sampling(max_tokens=64, grammar=from_json_schema(schema), seed=seed, **how),
            encode(f"q{seed}"),
            60,
        )
        if tokens[-1] == EOS:
            found = json.loads(decode(tokens))
            assert (
                found.keys() == {"a", "b"} and found["a"] in ("yes", "no") and 0 <= found["b"] <= 99
            )
        else:
            assert decode(tokens).strip().startswith("{")


def test_the_grammar_goes_before_biases_and_penalties(rig: Rig):
    (x,) = encode("x")
    bias = ((x, 100.0), *((token, -100.0) for token in DIGITS))
    sampling = constrained(
        from_regex("[0-9]{5}"), logit_bias=bias, repetition_penalty=5.0, frequency_penalty=2.0
    )
    tokens = generate(rig, 0, sampling, encode("xx"))
    assert len(decode(tokens)) == 5 and decode(tokens).isdigit() and tokens[-1] == EOS


def test_a_bad_grammar_fails_its_request_alone(rig: Rig):
    lost, free = constrained(from_regex("[^\\s\\S]")), Sampling(max_tokens=8, temperature=0.0)
    alone = generate(rig, 1, free, encode("hello"), 1)
    rig.open(0, encode("hello"), lost)
    rig.open(1, encode("hello"), free)
    segments = [
        Segment(slot, 0, 5, True, tuple(range(slot * 16, slot * 16 + 2))) for slot in (0, 1)
    ]
    assert rig.run(segments, lane=1).tokens == (NO_GRAMMAR, alone[0])


def test_answers_are_one_of_the_choices(rig: Rig):
    rng = random.Random(1)
    for _ in range(20):
        choices = list(
            {"".join(rng.choices('ab"\\\n é漢{}', k=rng.randrange(1, 6))) for _ in range(5)}
        )
        tokens = generate(
            rig,
            0,
            Sampling(max_tokens=64, grammar=from_choice(choices), seed=rng.randrange(99)),
            encode("?"),
        )
        assert tokens[-1] == EOS and decode(tokens) in choices


# ---------------------------------------------------------------- the engine


def constrained_requests() -> list[AddRequest]:
    """Every other request has a grammar, one in six a grammar that nothing satisfies."""
    found = []
    for n, request in enumerate(make_requests()):
        grammar = ["", PATTERN, "", PATTERN, "", NEVER][n % 6]
        sampling = msgspec.structs.replace(request.sampling, grammar=grammar)
        found.append(msgspec.structs.replace(request, sampling=sampling))
    return found


PATTERN, NEVER = from_regex("([0-9]{2},){3}([a-z]+(;| )){2,}"), from_regex("[^\\s\\S]")
PREFIX = re.compile(r"([0-9]{2},){0,3}[0-9]?[0-9]?[a-z;, ]*")


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    return answers(Serial(160, 1), 256)[0]


def answers(policy: Policy, pages: int) -> tuple[dict[str, list[int]], int]:
    service = Service(tiny_decoder(), policy, pages)
    service.grammars.set_vocabulary_loader(vocabulary)
    found = service.serve(
        constrained_requests(),
        errors=sum(request.sampling.grammar == NEVER for request in constrained_requests()),
    )
    service.close()
    return found, service.engine.stats().preemptions


@pytest.mark.parametrize("name", policies())
@pytest.mark.parametrize("pages", [1024, 60], ids=["much memory", "little memory"])
def test_answers_obey_under_every_policy(alone: dict[str, list[int]], name: str, pages: int):
    found, preemptions = answers(policies()[name], pages)
    assert found == alone
    assert preemptions or pages == 1024
    for request in constrained_requests():
        if request.sampling.grammar == PATTERN:
            assert PREFIX.fullmatch(decode(found[request.id])) and found[request.id]
        elif request.sampling.grammar == NEVER:
            assert not found[request.id]
