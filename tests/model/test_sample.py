"""The sampler against slow references, one row at a time."""

from __future__ import annotations

import math

import pytest
import torch

from counterpoint.device.sampling_tables import SamplingTables
from counterpoint.model.sample import (
    DrawParams,
    Filters,
    SamplerInputs,
    filter_floor,
    logprobs,
    sample,
    uniform,
)
from counterpoint.types import Sampling

VOCAB = 50


def logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draw(
    rows: int,
    n: int = 0,
    temperature: float = 1.0,
    min_p: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
) -> DrawParams:
    """The same settings for all rows, seed = row."""
    filters = None
    if top_k or top_p < 1:
        filters = Filters(
            torch.arange(rows),
            torch.full((rows,), top_k),
            torch.full((rows,), top_p),
            max(top_k, 4),
        )
    return DrawParams(
        None,
        torch.arange(rows),
        torch.full((rows,), n),
        torch.full((rows,), temperature),
        None if min_p is None else torch.full((rows,), min_p),
        filters,
    )


def kept_by_reference(
    row: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float
) -> set[int]:
    """Min-p, then top-k, then top-p of the rest, over a sorted list."""
    p = (row.double() / temperature).softmax(0).tolist()
    ranked = sorted(range(len(p)), key=lambda i: -p[i])
    ranked = [i for i in ranked if p[i] >= min_p * p[ranked[0]]]
    ranked = ranked[:top_k] if top_k else ranked
    mass, before, kept = sum(p[i] for i in ranked), 0.0, set()
    for i in ranked:
        if before < top_p * mass or not kept:
            kept.add(i)
        before += p[i]
    return kept


def drawn_often(row: torch.Tensor, times: int, **settings) -> torch.Tensor:
    """How often each id is drawn with `times` different seeds."""
    ids = sample(row.expand(times, -1), SamplerInputs(draw=draw(times, **settings)))
    return torch.bincount(ids, minlength=row.shape[0])


def test_greedy_takes_the_best():
    x = logits(9)
    assert sample(x, SamplerInputs()).tolist() == x.argmax(1).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 1.7},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 0.8, "min_p": 0.02, "top_k": 12, "top_p": 0.9},
    ],
    ids=str,
)
def test_drawn_ids_follow_the_distribution(settings):
    row = logits(1, seed=3)[0]
    times = 40_000
    kept = sorted(
        kept_by_reference(
            row,
            settings.get("temperature", 1.0),
            settings.get("min_p", 0.0),
            settings.get("top_k", 0),
            settings.get("top_p", 1.0),
        )
    )
    counts = drawn_often(row, times, **settings)
    assert counts.sum() == counts[kept].sum(), "an id that a filter removes was drawn"
    expected = (row[kept].double() / settings.get("temperature", 1.0)).softmax(0) * times
    often = expected >= 5
    chi_square = ((counts[kept] - expected).square() / expected)[often].sum().item()
    freedom = int(often.sum()) - 1
    assert (
        chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4
    )  # 4 standard deviations; the seeds are fixed
    assert counts[kept][~often].sum() < 5 * (~often).sum() + 30


@pytest.mark.parametrize("seed", range(6))
def test_filters_leave_what_the_reference_leaves(seed):
    generator = torch.Generator().manual_seed(seed)
    x = logits(40, 200, seed, scale=1.0 + seed)
    top_k = torch.randint(0, 60, (40,), generator=generator)
    top_p = torch.rand(40, generator=generator) * 1.1
    x0 = x - x.amax(1, keepdim=True)
    for width in (0, 64, 128, 500):
        floor = filter_floor(x0, top_k, top_p.clamp(max=1.0), width)
        for row in range(40):
            kept = set((x0[row] >= floor[row]).nonzero()[:, 0].tolist())
            assert kept == kept_by_reference(
                x[row], 1.0, 0.0, int(top_k[row]), min(float(top_p[row]), 1.0)
            ), (width, row)


def test_ties_at_the_floor_all_stay():
    row = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])
    counts = drawn_often(row, 4000, top_k=2)
    assert (counts[:4] > 0).all() and counts[4] == 0


def test_top_p_of_a_flat_row_reaches_past_the_first_sorted_logits():
    vocab = 5000
    row = torch.linspace(0, 1e-3, vocab)
    floor = filter_floor(row[None] - row.max(), torch.tensor([0]), torch.tensor([0.9]), 16)
    kept = int((row - row.max() >= floor).sum())
    assert abs(kept - 0.9 * vocab) < 5


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-4])
def test_tiny_temperatures_are_greedy(temperature):
    x = logits(20) * 50
    ids = sample(
        x, SamplerInputs(draw=draw(20, temperature=temperature, min_p=0.1, top_k=5, top_p=0.9))
    )
    assert ids.tolist() == x.argmax(1).tolist()


def test_a_row_that_is_not_finite_is_refused_alone():
    x = logits(5)
    whole = sample(x, SamplerInputs(draw=draw(5)))
    x[1, 7], x[3, 0] = torch.nan, torch.inf
    ids = sample(x, SamplerInputs(draw=draw(5, top_p=0.999999)))
    assert ids[1] == ids[3] == -1
    ids = sample(x, SamplerInputs(draw=draw(5)))
    assert ids[[0, 2, 4]].tolist() == whole[[0, 2, 4]].tolist()
    assert sample(x, SamplerInputs()).tolist()[1] == -1


def test_padding_of_the_vocabulary_is_never_sampled():
    x = logits(64)
    x[:, 40:] += 100
    assert sample(x, SamplerInputs(), 40).max() < 40
    assert sample(x, SamplerInputs(draw=draw(64)), 40).max() < 40
    _, top_ids, _ = logprobs(x, torch.zeros(64, dtype=torch.int64), 5, 40)
    assert top_ids.max() < 40


def test_the_argument_is_not_changed():
    x = logits(3)
    before = x.clone()
    settings = SamplingTables(3, VOCAB)
    for slot in range(3):
        settings.set_row(
            slot,
            Sampling(max_tokens=9, frequency_penalty=1.0, logit_bias=((3, 5.0),), top_p=0.5),
            2,
        )
    tokens = torch.zeros(3, 16, dtype=torch.int32)
    sample(x, settings.sampler_inputs(torch.arange(3), torch.tensor([4, 5, 6]), tokens))
    assert torch.equal(x, before)


def test_uniform_numbers_are_even_and_do_not_repeat():
    seeds, n = torch.meshgrid(torch.arange(-50, 50), torch.arange(1000), indexing="ij")
    u = uniform(seeds.flatten(), n.flatten())
    assert u.min() >= 0 and u.max() < 1
    assert len(u.unique()) == len(u)
    counts = torch.histc(u.float(), 100, 0, 1)
    assert ((counts - 1000).square() / 1000).sum() < 99 + 4 * math.sqrt(2 * 99)
    series = u.view(100, 1000)
    neighbours = torch.corrcoef(torch.stack([series[:, :-1].flatten(), series[:, 1:].flatten()]))[
        0, 1
    ]
    seeds_apart = torch.corrcoef(torch.stack([series[:-1].flatten(), series[1:].flatten()]))[0, 1]
    assert abs(neighbours) < 0.02 and abs(seeds_apart) < 0.02


def test_uniform_matches_python_integers():
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    for seed, n in [(0, 0), (1, 5), (-3, 7), (2**63 - 1, 100_000)]:
        expected = (mix((mix((seed + gamma) % 2**64) + n * gamma) % 2**64) >> 11) * 2.0**-53
        assert uniform(torch.tensor([seed]), torch.tensor([n])).item() == expected


# ---------------------------------------------------------------- through the settings of slots

MIXED = [
    Sampling(max_tokens=99, temperature=0.0),
    Sampling(max_tokens=99, seed=11),
    Sampling(max_tokens=99, seed=12, temperature=0.7, top_p=0.9),
    Sampling(max_tokens=99, seed=2**64 - 5, temperature=1.3, top_k=5),
    Sampling(max_tokens=99, seed=14, min_p=0.2, frequency_penalty=0.7),
    Sampling(max_tokens=99, temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5),
    Sampling(max_tokens=99, seed=16, logit_bias=((3, 4.0), (9, -100.0), (10_000, 3.0))),
    Sampling(max_tokens=99, temperature=0.0, min_tokens=6, stop_token_ids=(4,)),
    Sampling(
        max_tokens=99, seed=18, temperature=0.9, top_k=20, top_p=0.7, min_p=0.01, min_tokens=3
    ),
    Sampling(max_tokens=99, seed=19, temperature=1e-6),
]
PROMPT = 4
TOKENS = torch.randint(
    VOCAB, (len(MIXED), 32), generator=torch.Generator().manual_seed(5), dtype=torch.int32
)


def mixed_settings() -> SamplingTables:
    settings = SamplingTables(len(MIXED), VOCAB, eos_token_ids=(2, 60_000))
    for slot, sampling in enumerate(MIXED):
        settings.set_row(slot, sampling, PROMPT)
    return settings


def reference_row(
    row: torch.Tensor, s: Sampling, tokens: list[int], eos: tuple[int, ...] = (2,)
) -> int:
    """One request's next token, step by step."""
    x = row.clone().float()
    output = tokens[PROMPT:]
    for id in set(tokens):
        x[id] = x[id] / s.repetition_penalty if x[id] > 0 else x[id] * s.repetition_penalty
    for id in set(output):
        x[id] -= s.presence_penalty + s.frequency_penalty * output.count(id)
    for id, value in s.logit_bias:
        if id < len(x):
            x[id] += value
    if len(output) < s.min_tokens:
        x[list(s.stop_token_ids) + list(eos if not s.ignore_eos else ())] = -math.inf
    if s.temperature == 0:
        return int(x.argmax())
    kept = kept_by_reference(x, s.temperature, s.min_p, s.top_k, s.top_p)
    p = (x.double() / s.temperature).softmax(0)
    p = torch.tensor([float(v) if i in kept else 0.0 for i, v in enumerate(p)], dtype=torch.float64)
    seed = (s.seed + 2**63) % 2**64 - 2**63
    u = uniform(torch.tensor([seed]), torch.tensor([len(output)])).item()
    return int((p.cumsum(0) > u * p.sum()).nonzero()[0])


def test_mixed_rows_match_the_reference():
    settings = mixed_settings()
    slots = torch.arange(len(MIXED))
    for end in range(PROMPT, 31):
        x = logits(len(MIXED), seed=end)
        ids = sample(x, settings.sampler_inputs(slots, torch.full_like(slots, end), TOKENS))
        expected = [reference_row(x[i], MIXED[i], TOKENS[i, :end].tolist()) for i in slots.tolist()]
        assert ids.tolist() == expected, end


def test_a_row_does_not_depend_on_its_batch():
    settings = mixed_settings()
    end = torch.tensor([4, 5, 9, 30, 12, 28, 7, 8, 6, 5])
    x = logits(len(MIXED), 3000, seed=8)[:, :VOCAB].contiguous()
    slots = torch.arange(len(MIXED))
    together = sample(x, settings.sampler_inputs(slots, end, TOKENS))
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(1))
    assert (
        sample(x[order], settings.sampler_inputs(order, end[order], TOKENS)).tolist()
        == together[order].tolist()
    )
    for i in range(len(MIXED)):
        one = torch.tensor([i])
        assert sample(x[one], settings.sampler_inputs(one, end[one], TOKENS)).tolist() == [
            together[i]
        ]


def test_the_nth_token_depends_on_seed_and_n():
    settings = SamplingTables(3, VOCAB)
    for slot, seed in enumerate((7, 7, 8)):
        settings.set_row(slot, Sampling(max_tokens=99, seed=seed), prompt_tokens=(3, 10, 3)[slot])
    row = logits(1, scale=0.1)
    drawn = [
        sample(
            row.expand(3, -1),
            settings.sampler_inputs(torch.arange(3), torch.tensor([3 + n, 10 + n, 3 + n]), TOKENS),
        ).tolist()
        for n in range(20)
    ]
    first, second, other = zip(*drawn, strict=True)
    assert first == second, "the same seed and n, whatever the prompt's length"
    assert first != other
    assert len(set(first)) > 5


def test_min_tokens_keeps_a_request_going():
    settings = SamplingTables(2, VOCAB, eos_token_ids=(2,))
    settings.set_row(
        0, Sampling(max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=(5,)), 3
    )
    settings.set_row(
        1,
        Sampling(max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=(5,), ignore_eos=True),
        3,
    )
    x = torch.zeros(2, VOCAB)
    x[:, 2], x[:, 5], x[:, 8] = 9.0, 10.0, 5.0
    slots = torch.arange(2)
    sampled = [
        sample(x, settings.sampler_inputs(slots, torch.full((2,), 3 + n), TOKENS)).tolist()
        for n in range(4)
    ]
    assert sampled == [[8, 2], [8, 2], [5, 5], [5, 5]]


def test_a_slot_forgets_its_last_request():
    settings = SamplingTables(2, VOCAB)
    settings.set_row(
        0, Sampling(max_tokens=9, temperature=0.0, logit_bias=((3, 50.0), (4, 40.0))), 1
    )
    settings.set_row(0, Sampling(max_tokens=9, temperature=0.0, logit_bias=((7, 30.0),)), 1)
    settings.set_row(1, Sampling(max_tokens=9, temperature=0.0), 1)
    slots = torch.arange(2)
    assert sample(
        torch.zeros(2, VOCAB), settings.sampler_inputs(slots, slots + 1, TOKENS)
    ).tolist() == [
        7,
        0,
    ]


def test_one_bias_of_one_row():
    """The smallest case: torch allows a view of it only if its elements are contiguous."""
    settings = SamplingTables(1, VOCAB)
    settings.set_row(0, Sampling(max_tokens=9, temperature=0.0, logit_bias=((7, 30.0),)), 1)
    one = torch.zeros(1, dtype=torch.int64)
    assert sample(
        torch.zeros(1, VOCAB), settings.sampler_inputs(one, one + 1, TOKENS)
    ).tolist() == [7]


def test_logprobs_are_those_of_the_raw_logits():
    x = logits(4)
    ids = torch.tensor([3, 1, 4, -1])
    chosen, top_ids, top_values = logprobs(x, ids, 3)
    expected = x.double().log_softmax(1)
    assert torch.allclose(chosen[:3].double(), expected[torch.arange(3), ids[:3]], atol=1e-5)
    assert top_ids.tolist() == x.argsort(1, descending=True)[:, :3].tolist()
    assert torch.allclose(top_values.double(), expected.gather(1, top_ids), atol=1e-5)
    assert logprobs(x, ids, 0)[1].shape == (4, 0)
