"""Sampling on the CUDA executor: on a GPU or, without one, in place on the CPU."""

from __future__ import annotations

import msgspec
import pytest
import torch
from cuda_reference import PROMPT, greedy_by_reference, reference_logits, tokens_of
from cuda_rig import GREEDY, HAS_GPU, TINY, VOCAB, rig

from counterpoint.device.cuda.sampling import MAX_TOP_LOGPROBS, SamplingMode, sampling_mode_for
from counterpoint.device.sampling_tables import SamplingStage
from counterpoint.types import InitSlot, Sampling, Segment

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return greedy_by_reference(TINY, PROMPT, 12)


SETTINGS = {
    "drawn": Sampling(max_tokens=9, temperature=0.9, seed=5),
    "min-p": Sampling(max_tokens=9, temperature=1.2, min_p=0.1, seed=6),
    "top-k": Sampling(max_tokens=9, temperature=1.2, top_k=5, seed=7),
    "top-p": Sampling(max_tokens=9, temperature=1.1, top_p=0.6, seed=8),
    "penalties": Sampling(
        max_tokens=9,
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.5,
    ),
    "bias": Sampling(max_tokens=9, temperature=0.7, seed=1, logit_bias=((5, 3.0), (9, 3.0))),
    "min tokens": Sampling(max_tokens=9, temperature=0.0, min_tokens=5, stop_token_ids=(3, 4)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_sampling_is_the_same_alone_and_in_a_batch(name: str):
    """In a pass with others, a request takes another sampling path."""
    with rig() as r:
        r.open(0, PROMPT, SETTINGS[name])
        alone = tokens_of(r.generate(0, len(PROMPT), 9))
    with rig() as r:
        for slot, sampling in enumerate([SETTINGS[name], GREEDY, *SETTINGS.values()][:8]):
            r.open(slot, PROMPT, sampling)
        pages = [tuple(range(4 * s, 4 * s + 4)) for s in range(8)]
        got = [
            r.run([Segment(s, 0, len(PROMPT), True, pages[s]) for s in range(8)], lane=1).tokens[0]
        ]
        got += [
            r.run([Segment(s, len(PROMPT) + n, 1, True) for s in range(8)], decode=True).tokens[0]
            for n in range(8)
        ]
    assert got == alone
    assert all(token < VOCAB for token in got)


def test_logprobs_equal_the_reference(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT, Sampling(max_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=1))
        dones = r.generate(0, len(PROMPT), 4)
    truth = reference_logits(TINY, PROMPT + wanted[:4])[:, :VOCAB].log_softmax(1)
    for n, done in enumerate(dones):
        (one,) = done.logprobs
        row = truth[len(PROMPT) - 1 + n]
        assert one is not None
        assert one.logprob == pytest.approx(float(row[wanted[n]]), abs=1e-3)
        assert one.top_ids == tuple(row.topk(2).indices.tolist())
    (prompt,) = dones[0].prompt_logprobs
    assert prompt is not None
    assert [one.logprob for one in prompt] == pytest.approx(
        [float(truth[i, PROMPT[i + 1]]) for i in range(len(PROMPT) - 1)], abs=1e-3
    )


def test_a_row_without_finite_logits_fails_alone(wanted: list[int]):
    with rig() as r:
        for slot in (0, 1):
            r.open(slot, PROMPT)
        r.run(
            [Segment(s, 0, len(PROMPT), True, tuple(range(4 * s, 4 * s + 4))) for s in (0, 1)],
            lane=1,
        )
        torch.cuda.synchronize() if HAS_GPU else None
        r.parts.kv.v[1][5].fill_(float("nan"))  # a page of slot 1
        torch.cuda.synchronize() if HAS_GPU else None
        done = r.run([Segment(s, len(PROMPT), 1, True) for s in (0, 1)], decode=True)
        assert done.tokens == (wanted[1], -1)


def test_every_sampling_stage_has_its_mode():
    assert sampling_mode_for(SamplingStage.NONE) is SamplingMode.GREEDY
    assert (
        sampling_mode_for(SamplingStage.TOP_K) is SamplingMode.GREEDY
    )  # of rows that are not drawn
    assert sampling_mode_for(SamplingStage.DRAW | SamplingStage.MIN_P) is SamplingMode.RANDOM
    assert (
        sampling_mode_for(SamplingStage.DRAW | SamplingStage.TOP_P)
        == SamplingMode.RANDOM | SamplingMode.FILTERED
    )
    for stage in (SamplingStage.PENALTIES, SamplingStage.BIAS, SamplingStage.MIN_TOKENS):
        assert (
            sampling_mode_for(SamplingStage.DRAW | stage)
            == SamplingMode.RANDOM | SamplingMode.PROCESSED
        )
        assert sampling_mode_for(stage) is SamplingMode.PROCESSED
    assert (
        sampling_mode_for(SamplingStage.LOGPROBS | SamplingStage.PROMPT_LOGPROBS)
        is SamplingMode.LOGPROBS
    )
    assert sampling_mode_for(1 << 40) is SamplingMode.EAGER, (
        "what a graph does not know is done outside"
    )


HARD = Sampling(
    max_tokens=9,
    temperature=0.7,
    seed=11,
    min_tokens=6,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.6,
    logit_bias=((5, 3.0), (9, 3.0), (5, 1.0)),
    stop_token_ids=(3, 4),
    logprobs=3,
)


@pytest.mark.parametrize("sampling", [*SETTINGS.values(), HARD], ids=[*SETTINGS, "everything"])
def test_graph_sampling_equals_eager_sampling(sampling: Sampling):
    """More alternatives than a graph computes make sampling eager."""
    answers = []
    for top in (3, MAX_TOP_LOGPROBS + 1):
        with rig() as r:
            r.open(0, PROMPT, msgspec.structs.replace(sampling, logprobs=top))
            answers.append(r.generate(0, len(PROMPT), 9))
    assert tokens_of(answers[0]) == tokens_of(answers[1])
    for ours, theirs in zip(*answers, strict=True):
        (one,), (other,) = ours.logprobs, theirs.logprobs
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_ids == other.top_ids[:3] and len(other.top_ids) == MAX_TOP_LOGPROBS + 1


def test_request_that_starts_with_a_decode_uses_its_settings():
    """Its KV came from elsewhere, so a decode step is the first to name the slot."""
    with rig() as r:
        r.open(0, PROMPT, HARD)
        whole = tokens_of(r.generate(0, len(PROMPT), 3))
    with rig() as r:
        r.open(0, PROMPT, GREEDY)
        r.run([Segment(0, 0, len(PROMPT), True, (0, 1, 2))], lane=1)
        r.submit(InitSlot(1, (*PROMPT, whole[0]), len(PROMPT), (0, 1, 2), HARD))
        done = r.run([Segment(1, len(PROMPT), 1, True)], decode=True)
        assert list(done.tokens) == whole[1:2] and done.logprobs[0] is not None


def test_penalty_state_is_reset_between_requests():
    """A slot with penalties, bias and min_tokens is reused by a request without them, beside one
    with them. A resumed request counts its earlier output tokens."""
    plain = Sampling(max_tokens=9, temperature=0.0)
    with rig() as r:
        r.open(0, PROMPT, plain)
        alone = tokens_of(r.generate(0, len(PROMPT), 9))
        r.open(1, PROMPT, HARD)
        whole = tokens_of(r.generate(1, len(PROMPT), 9, first_page=4))
        r.open(1, PROMPT, plain)
        r.open(0, PROMPT, HARD)
        pages = [tuple(range(4 * s, 4 * s + 4)) for s in range(2)]
        r.run([Segment(s, 0, len(PROMPT), True, pages[s]) for s in range(2)], lane=1)
        dones = [
            r.run([Segment(s, len(PROMPT) + n, 1, True) for s in range(2)], decode=True)
            for n in range(8)
        ]
        assert [done.tokens[1] for done in dones] == alone[1:]
        assert [done.tokens[0] for done in dones] == whole[1:]
        assert all(done.logprobs[0] is not None and done.logprobs[1] is None for done in dones)
        tokens = (*PROMPT, *whole[:5])
        r.submit(InitSlot(2, tokens, len(PROMPT), (), HARD))
        resumed = [r.run([Segment(2, 0, len(tokens), True, (9, 10, 11, 12))], lane=1).tokens[0]]
        resumed += [
            r.run([Segment(2, len(tokens) + n, 1, True)], decode=True).tokens[0] for n in range(3)
        ]
    assert resumed == whole[5:]
