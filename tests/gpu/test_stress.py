"""Ten thousand mixed requests, three in ten aborted, while the split moves every few steps; and a short run for compute-sanitizer.

    pytest tests/gpu/test_stress.py
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python -m pytest tests/gpu/test_stress.py -k short

Without a GPU some hundred requests go through the same executor in place.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from cuda_rig import HAS_GPU, LEVELS, VOCAB, Parts, Service, make_parts
from test_cuda_gpu import LLAMA

from counterpoint.core.policy import Chunked, Multiplex, Serial
from counterpoint.interfaces import Policy
from counterpoint.model.fp8 import FP8
from counterpoint.types import Abort, AddRequest, FinishReason, Lane, Role, Sampling

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")
SPLITS = LEVELS if HAS_GPU else (2, 4)
REQUESTS = 10_000 if HAS_GPU else 120
SLOTS = 48
MOST_PASS = 400


class Restless(Multiplex):
    """Multiplex whose split is another one every five decode steps, and whose prefills go layer by layer."""

    def __init__(self, units: int) -> None:
        super().__init__(MOST_PASS, units, SPLITS[0], layer_group=1, depth=2)
        self.turns = itertools.count()

    def next_batch(self, lane: Lane, state, now: float):
        if lane.role is Role.DECODE:
            self.split = SPLITS[next(self.turns) // 5 % len(SPLITS)]
        return super().next_batch(lane, state, now)


def mixed(count: int, seed: int = 5) -> list[AddRequest]:
    """Short and long prompts, half of them with a common beginning; every way of sampling."""
    chance = random.Random(seed)
    beginning = [chance.randrange(VOCAB) for _ in range(50)]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.8},
        {"temperature": 1.1, "top_p": 0.8, "top_k": 40},
        {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.9, "min_p": 0.05, "logit_bias": ((7, 2.0), (9, -2.0))},
        {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": (11,)},
        {"temperature": 0.0, "logprobs": 2},
    ]
    arrivals = []
    for n in range(count):
        prompt = [chance.randrange(VOCAB) for _ in range(chance.choice((3, 17, 40, 120)))]
        sampling = Sampling(max_tokens=chance.randrange(4, 16), seed=n, **chance.choice(kinds))
        arrivals.append(
            AddRequest(id=f"r{n}", prompt=tuple(beginning * (n % 2) + prompt), sampling=sampling)
        )
    return arrivals


def served(
    parts: Parts,
    policy: Policy,
    arrivals: list[AddRequest],
    share: float,
    timeout_s: float,
    overlap: bool,
) -> Service:
    """The service when all have ended. A `share` is aborted: at once, or after some tokens."""
    chance = random.Random(7)
    service = Service(parts, policy, slots=SLOTS, max_pass_tokens=MOST_PASS, overlap=overlap)
    service.abort_after = {a.id: chance.randrange(8) for a in arrivals if chance.random() < share}
    events = [
        event
        for a in arrivals
        for event in (a, *[Abort(a.id)] * (service.abort_after.get(a.id) == 7))
    ]
    service.ask(events, expected=len(arrivals), timeout_s=timeout_s)
    service.close()
    return service


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_ten_thousand_requests_while_the_split_moves():
    """No answer but the right one, no page lost, no memory taken that was not there before. How attention is cut depends on the
    partition, so sums differ in the last bits, and of a hundred thousand tokens drawn one or two stand so near a border that they
    fall on the other side: at most one answer in a thousand may."""
    arrivals = mixed(REQUESTS)
    parts = make_parts(pages=400, slots=SLOTS)
    truth = served(
        parts, Serial(MOST_PASS, parts.units, depth=2), arrivals, 0.0, 300, False
    ).answers
    service = served(parts, Restless(parts.units), arrivals, 0.3, 300, HAS_GPU)
    assert all(finish is not FinishReason.ERROR for finish in service.finishes.values())
    other = []
    for arrive in arrivals:
        answer = service.answers.get(arrive.id, [])
        wanted = (
            truth[arrive.id][: len(answer)]
            if arrive.id in service.abort_after
            else truth[arrive.id]
        )
        other += [(arrive.id, answer, wanted)] * (answer != wanted)
    assert len(other) <= len(arrivals) / 1000, other[:5]
    print(
        f"{len(arrivals)} requests, {len(service.abort_after)} to be aborted, {len(other)} answers differ: {other}"
    )
    if HAS_GPU:
        held, graphs = torch.cuda.memory_allocated(), parts.graphs.count
        served(parts, Restless(parts.units), arrivals[:2000], 0.3, 300, HAS_GPU)
        taken, made = torch.cuda.memory_allocated() - held, parts.graphs.count - graphs
        assert taken < (1 + made) << 20, (
            f"{taken} bytes more after 2,000 requests of the same kind, {made} graphs among them"
        )
    parts.close()


KINDS = {"bfloat16": {}, "fp8": {"kv_dtype": FP8, "quantise": True}}


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_short_run_of_every_kernel(kind: str):
    """For compute-sanitizer: few requests through the kernels that serve, in 16 bits and in 8, chunked and multiplexed."""
    arrivals = mixed(24)
    for policy in (
        lambda units: Chunked(96, units, depth=2),
        lambda units: Restless(units),
    ):
        parts = make_parts(
            spec=LLAMA, pages=300, slots=SLOTS, dtype=torch.bfloat16, deviation=0.05, **KINDS[kind]
        )
        service = served(parts, policy(parts.units), arrivals, 0.3, 800, True)
        assert all(finish is not FinishReason.ERROR for finish in service.finishes.values())
        parts.close()
