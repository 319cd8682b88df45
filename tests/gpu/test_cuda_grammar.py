"""Grammars on the CUDA executor: on a GPU or, without one, in place on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import pytest
import torch
from cuda_rig import GREEDY, HAS_GPU, PAGE, TINY, VOCAB, StepRig, make_parts, rig
from cuda_service import EngineService, random_requests

from counterpoint.core.policy import Chunked, Multiplex, Serial
from counterpoint.device.cuda.sampling import SamplingMode, sampling_mode_for
from counterpoint.device.grammar import Vocabulary
from counterpoint.device.sampling_tables import SamplingStage
from counterpoint.interfaces import Policy
from counterpoint.serve.structured_output.grammar import from_choice, from_regex
from counterpoint.types import NO_GRAMMAR, AddRequest, InitSlot, Sampling, Segment

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = 10  # the id of byte 0
(EOS,) = TINY.eos_token_ids
PROMPT = [7 * n % VOCAB for n in range(1, 40)]
PATTERN, NEVER = from_regex("([0-9]{2},){3}([a-z]+(;| )){2,}"), from_regex("[^\\s\\S]")
PREFIX = re.compile(r"([0-9]{2},){0,3}[0-9]?[0-9]?[a-z;, ]*")


def vocabulary() -> Vocabulary:
    tokens = [b""] * FIRST + [bytes([byte]) for byte in range(256)]
    tokens[EOS] = b"<end>"
    return Vocabulary(tokens, [EOS], lambda text: [FIRST + byte for byte in text.encode()])


def decode(tokens: list[int]) -> str:
    return bytes(token - FIRST for token in tokens if token != EOS).decode()


@pytest.fixture
def device() -> Iterator[StepRig]:
    with rig() as made:
        made.parts.tables.sampling.grammars.set_vocabulary_loader(vocabulary)
        yield made


def said(device: StepRig, slot: int, sampling: Sampling, count: int) -> list[int]:
    device.open(slot, PROMPT, sampling)
    dones = device.generate(slot, len(PROMPT), count, first_page=slot * 6)
    return [token for done in dones for token in done.tokens]


def test_grammar_sampling_is_eager():
    assert (
        sampling_mode_for(SamplingStage.GRAMMAR) is SamplingMode.EAGER
        and sampling_mode_for(SamplingStage.GRAMMAR | SamplingStage.DRAW | SamplingStage.BIAS)
        is SamplingMode.EAGER
    )


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 2.0, "top_k": 5, "seed": 4},
        {
            "temperature": 1.0,
            "top_p": 0.5,
            "frequency_penalty": 1.0,
            "logit_bias": ((FIRST, 100.0),),
            "seed": 5,
        },
    ],
)
def test_the_output_matches_its_grammar(device: StepRig, how: dict):
    tokens = said(
        device, 0, Sampling(max_tokens=16, grammar=from_regex("[0-9]{4}-[a-f]{2}"), **how), 8
    )
    assert re.fullmatch("[0-9]{4}-[a-f]{2}", decode(tokens[:7])) and tokens[7] == EOS
    assert tokens == said(
        device, 1, Sampling(max_tokens=16, grammar=from_regex("[0-9]{4}-[a-f]{2}"), **how), 8
    )


def test_grammars_in_one_batch_do_not_affect_each_other(device: StepRig):
    """Two different grammars, no grammar, and one that cannot be followed, in one step."""
    samplings = [
        Sampling(max_tokens=16, temperature=0.0, grammar=from_regex("[0-9]{6,}")),
        GREEDY,
        Sampling(max_tokens=16, temperature=0.0, grammar=from_choice(["abcdefgh", "hgfedcba"])),
        Sampling(max_tokens=16, temperature=0.0, grammar=NEVER, logprobs=1),
    ]
    alone = [said(device, slot, sampling, 6) for slot, sampling in enumerate(samplings)]
    for slot, sampling in enumerate(samplings):
        device.open(slot, PROMPT, sampling)
    size, held = len(PROMPT), -(-len(PROMPT) // PAGE)
    first = device.run(
        [
            Segment(slot, 0, size, True, tuple(range(slot * 6, slot * 6 + held)))
            for slot in range(4)
        ],
        lane=1,
    )
    dones = [first]
    for at in range(size, size + 5):
        more = held == at // PAGE
        pages = [(slot * 6 + held,) if more else () for slot in range(4)]
        held += more
        dones.append(
            device.run([Segment(slot, at, 1, True, pages[slot]) for slot in range(4)], decode=True)
        )
    assert [[done.tokens[row] for done in dones] for row in range(4)] == alone
    assert (
        alone[3] == [NO_GRAMMAR] * 6 and decode(alone[0]).isdigit() and dones[0].logprobs[3] is None
    )


def test_the_grammar_continues_a_partial_output(device: StepRig):
    sampling = Sampling(
        max_tokens=16, temperature=0.0, grammar=from_choice(["abcdefgh", "hgfedcba"])
    )
    begun = [FIRST + byte for byte in b"hgf"]
    device.submit(InitSlot(0, (*PROMPT, *begun), len(PROMPT), (), sampling))
    tokens = [t for done in device.generate(0, len(PROMPT) + 3, 3) for t in done.tokens]
    assert decode(tokens) == "edc"


# ---------------------------------------------------------------- under the engine


def asks() -> list[AddRequest]:
    """Every other one of these is bound."""
    arrivals = []
    for n, arrive in enumerate(random_requests(max_tokens=40)):
        arrivals.append(
            msgspec.structs.replace(
                arrive, sampling=msgspec.structs.replace(arrive.sampling, grammar=PATTERN * (n % 2))
            )
        )
    return arrivals


def answers(policy: Policy, pages: int) -> tuple[dict[str, list[int]], int]:
    parts = make_parts(pages=pages)
    parts.tables.sampling.grammars.set_vocabulary_loader(vocabulary)
    service = EngineService(parts, policy, overlap=HAS_GPU)
    found = service.run_requests(asks())
    service.close()
    parts.close()
    return found, service.engine.stats().preemptions


def policies(units: int) -> dict[str, Policy]:
    split = 32 if HAS_GPU else 4
    return {
        "serial, two in flight": Serial(160, units, depth=2),
        "chunked": Chunked(40, units, depth=2),
        "multiplex": Multiplex(160, units, split, depth=2),
        "multiplex, layer by layer": Multiplex(160, units, split, layer_group=1, depth=2),
    }


UNITS = torch.cuda.get_device_properties(0).multi_processor_count if HAS_GPU else 8


@pytest.fixture(scope="module")
def truth() -> dict[str, list[int]]:
    return answers(Serial(160, UNITS), 256)[0]


@pytest.mark.parametrize("name", policies(UNITS))
@pytest.mark.parametrize("pages", [256, 20], ids=["much memory", "little memory"])
def test_grammars_hold_under_every_policy(truth: dict[str, list[int]], name: str, pages: int):
    found, preemptions = answers(policies(UNITS)[name], pages)
    assert found == truth
    assert preemptions or pages == 256
    for arrive in asks():
        if arrive.sampling.grammar:
            assert found[arrive.id] and PREFIX.fullmatch(decode(found[arrive.id]))
