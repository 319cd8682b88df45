"""The decoder against transformers, family by family, on tiny random models."""

from __future__ import annotations

import pytest
import torch
from model_builders import Run, expected, load, prompts
from transformers import PreTrainedModel

from counterpoint.model import Decoder
from counterpoint.spec.source import ModelSource


@pytest.fixture(scope="module", params=["C kernels", "torch"])
def pair(
    request: pytest.FixtureRequest, family: tuple[PreTrainedModel, ModelSource]
) -> tuple[PreTrainedModel, Decoder]:
    model, source = family
    return model, load(source) if request.param == "C kernels" else load(source, cache=None)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_whole_prompt(pair: tuple[PreTrainedModel, Decoder]):
    model, decoder = pair
    (tokens,) = prompts(decoder.spec.vocab, 90)
    close(Run(decoder, [tokens]).step((0, 0, 90)), expected(model, tokens)[-1:])


def test_every_position_has_its_logits(pair: tuple[PreTrainedModel, Decoder]):
    model, decoder = pair
    (tokens,) = prompts(decoder.spec.vocab, 21)
    run = Run(decoder, [tokens])
    logits = [run.step((0, at, at + 1)) for at in range(21)]
    close(torch.cat(logits), expected(model, tokens))


def test_a_prompt_in_chunks(pair: tuple[PreTrainedModel, Decoder]):
    model, decoder = pair
    (tokens,) = prompts(decoder.spec.vocab, 120)
    run, theirs = Run(decoder, [tokens]), expected(model, tokens)
    for start, stop in [(0, 7), (7, 8), (8, 77), (77, 79), (79, 120)]:
        close(run.step((0, start, stop)), theirs[stop - 1 : stop])


def test_prefills_and_decodes_in_one_pass(pair: tuple[PreTrainedModel, Decoder]):
    model, decoder = pair
    requests = prompts(decoder.spec.vocab, 50, 9, 34, 70)
    run, theirs = Run(decoder, requests), [expected(model, tokens) for tokens in requests]
    run.step((0, 0, 49), (2, 0, 33))
    run.step((1, 0, 5), (3, 0, 40))
    logits = run.step((0, 49, 50), (3, 40, 70), (1, 5, 9), (2, 33, 34))
    close(logits, torch.stack([theirs[0][-1], theirs[3][-1], theirs[1][-1], theirs[2][-1]]))


def test_a_shared_prefix(pair: tuple[PreTrainedModel, Decoder]):
    model, decoder = pair
    first, second = prompts(decoder.spec.vocab, 30, 30)
    second[:16] = first[:16]
    run = Run(decoder, [first, second])
    run.step((0, 0, 30))
    run.table[1, :4] = run.table[0, :4]
    close(
        run.step((1, 16, 30), (0, 29, 30)),
        torch.stack([expected(model, second)[-1], expected(model, first)[-1]]),
    )


def test_the_parameter_count(pair: tuple[PreTrainedModel, Decoder]):
    model, decoder = pair
    assert decoder.spec.parameters == sum(parameter.numel() for parameter in model.parameters())
