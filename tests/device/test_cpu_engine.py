"""Engine and CPU executor together: the same answers under every policy."""

from __future__ import annotations

import pytest
from cpu_rig import TINY, tiny_decoder
from cpu_service import CORES, MAX_TOKENS, Service, make_requests, policies
from msgspec import structs

from counterpoint.config import ConfigError
from counterpoint.core.policy import Serial
from counterpoint.model.decoder import Decoder
from counterpoint.model.ops_cpu import cpu_ops


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder()


@pytest.fixture(scope="module")
def truth(decoder: Decoder) -> dict[str, list[int]]:
    """Of each request alone on the machine."""
    service = Service(decoder, Serial(160, len(CORES)), 256)
    answers = {}
    for request in make_requests():
        answers |= service.serve([request])
    service.close()
    return answers


@pytest.mark.parametrize("name", policies())
@pytest.mark.parametrize("pages", [1024, 90], ids=["much memory", "little memory"])
def test_answers_do_not_depend_on_the_policy(
    decoder: Decoder, truth: dict[str, list[int]], name: str, pages: int
):
    service = Service(decoder, policies()[name], pages)
    for round in ("cold", "with prefix hits"):
        assert service.serve(make_requests()) == truth, round
    stats = service.engine.stats()
    assert stats.prefix_hits_tokens > 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    if pages < 1024:
        assert stats.preemptions > 0
    service.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_answers_are_the_same_to_the_bit(dtype: str):
    """All log-probabilities are the same alone and in any batch, under every policy, with prefixes
    read or computed, with preemptions."""
    try:
        exact = tiny_decoder(cpu_ops(dtype, TINY.head_dim, invariant=True))
    except ConfigError as error:
        pytest.skip(str(error))
    asked = [
        structs.replace(request, sampling=structs.replace(request.sampling, logprobs=4))
        for request in make_requests()
    ]
    service = Service(exact, Serial(160, len(CORES)), 256)
    truth = {}
    for request in asked:
        service.serve([request])
        truth[request.id] = service.answers[request.id], service.logprobs[request.id]
    service.close()
    for name in policies():
        service = Service(exact, policies()[name], 90)
        for round in ("cold", "with prefix hits"):
            service.serve(asked)
            assert {id: (service.answers[id], service.logprobs[id]) for id in truth} == truth, (
                name,
                round,
            )
        assert service.engine.stats().prefix_hits_tokens and service.engine.stats().preemptions
        service.close()


def test_answers_are_short_and_differ(truth: dict[str, list[int]]):
    assert all(0 < len(tokens) <= MAX_TOKENS for tokens in truth.values())
    assert len({tuple(tokens) for tokens in truth.values()}) > 25
