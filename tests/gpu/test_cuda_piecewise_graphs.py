"""Passes as piecewise graphs against eager passes: on a GPU or, without one, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from cuda_rig import HAS_GPU, PAGE, TINY, VOCAB, StepRig, make_parts, rig
from cuda_service import EngineService, random_requests

from counterpoint.core.policy import Chunked, Multiplex
from counterpoint.device.cuda.attention import group_for_gather
from counterpoint.device.cuda.piecewise_graphs import GRAPH_SIZES, graph_sizes_for
from counterpoint.spec.presets import PRESETS
from counterpoint.types import DiscardPass, Sampling, Segment, StepDone

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = (4, 8, 12, 24, 48, 96)
ASKING = Sampling(max_tokens=16, temperature=0.0, logprobs=4)
SPLIT = (4, 2) if not HAS_GPU else (100, 116)  # prefill units


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(
        2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def pages(slot: int, tokens: int, first: int = 0) -> tuple[int, ...]:
    """The slot's own pages from `first` on, enough for `tokens`."""
    return tuple(range(16 * slot + first, 16 * slot + -(-tokens // PAGE)))


Script = Callable[[StepRig], list[StepDone]]


def run_script(
    script: Script, sizes: Sequence[int], **how: Any
) -> tuple[list[tuple[int, ...]], torch.Tensor, int]:
    """Tokens of the script's steps, all their log-probabilities, and the number of graphs."""
    with rig(sizes=sizes, pages=160, **how) as r:
        dones = script(r)
        assert not any(done.error for done in dones)
        numbers = [
            n
            for done in dones
            for one in done.logprobs
            if one is not None
            for n in (one.logprob, *one.top_logprobs)
        ]
        prompts = [
            one.logprob
            for done in dones
            for each in done.prompt_logprobs
            if each is not None
            for one in each
        ]
        return (
            [done.tokens for done in dones],
            torch.tensor(numbers + prompts),
            r.parts.piecewise_graphs.num_graphs,
        )


def assert_alike(
    script: Script, sizes: Sequence[int] = SMALL, bound: float = 1e-4, **how: Any
) -> None:
    tokens, numbers, graphs = run_script(script, sizes, **how)
    wanted, truth, none = run_script(script, (), **how)
    assert graphs and not none
    assert numbers.numel() and numbers.isfinite().all()
    assert (numbers - truth).abs().max() <= bound
    if bound < 1e-3:
        assert tokens == wanted


# ---------------------------------------------------------------- sizes


def edges(sizes: Sequence[int]) -> list[int]:
    return sorted({n for size in sizes for n in (size - 1, size, size + 1)})


def prompts_of(lengths: Sequence[int], units: int | None = None) -> Script:
    def script(r: StepRig) -> list[StepDone]:
        dones = []
        for length in lengths:
            r.open(0, prompt(length, length), ASKING)
            dones.append(
                r.run([Segment(0, 0, length, True, pages(0, length))], lane=1, units=units)
            )
        return dones

    return script


@pytest.mark.parametrize("units", [None, *SPLIT])
def test_prompts_around_every_graph_size_equal_eager(units: int | None):
    assert_alike(prompts_of(edges(SMALL), units))


def mixed_passes(r: StepRig) -> list[StepDone]:
    """Decodes, the middle and end of a prompt, whole prompts and one with a cached prefix, in
    passes of at least 8 rows. The first and last passes are larger than any graph of SMALL."""
    lengths = {0: 20, 1: 33, 2: 90, 3: 17, 4: 5}
    for slot, length in lengths.items():
        r.open(slot, prompt(length, slot), ASKING)
    r.open(5, prompt(40, 2), ASKING, pages=pages(2, 32))  # begins as slot 2 does
    dones = [
        r.run([Segment(s, 0, lengths[s], True, pages(s, lengths[s])) for s in (0, 1, 4)], lane=1)
    ]
    decodes = [lambda n, s=s: Segment(s, lengths[s] + n, 1, True) for s in (0, 1, 4)]
    segments = [
        [Segment(2, 0, 37, False, pages(2, 90))],
        [Segment(2, 37, 1, False)],  # one token of a prompt, as a decode would be
        [Segment(2, 38, 11, False), Segment(3, 0, 17, True, pages(3, 20))],
        [Segment(2, 49, 41, True), Segment(5, 32, 8, True, pages(5, 60, 2))],
    ]
    for n, more in enumerate(segments):
        dones.append(r.run([*(decode(n) for decode in decodes), *more]))
    for slot in (6, 7):
        r.open(slot, prompt(100, slot), ASKING)
    dones.append(r.run([Segment(s, 0, 100, True, pages(s, 110)) for s in (6, 7)], lane=1))
    return dones


def test_mixed_passes_equal_eager():
    assert_alike(mixed_passes)


# ---------------------------------------------------------------- stops


def stopping_passes(r: StepRig) -> list[StepDone]:
    """Two passes in turns, layer by layer and from partition to partition, while other passes need
    new graphs there. One pass is discarded."""
    for slot, length in enumerate((30, 44, 9, 60)):
        r.open(slot, prompt(length, slot), ASKING)
    one, other = (Segment(0, 0, 30, True, pages(0, 32)),), (Segment(1, 0, 44, True, pages(1, 48)),)
    steps, unit_counts = [], (*SPLIT, r.parts.units, SPLIT[0])
    r.submit_step([Segment(3, 0, 60, True, pages(3, 64))], lane=1, layers=(0, 2), pass_id=103)
    for layer, units in enumerate(unit_counts):
        for batch, segments in ((101, one), (102, other)):
            steps.append(
                r.submit_step(
                    list(segments), lane=1, layers=(layer, layer + 1), pass_id=batch, units=units
                )
            )
        if layer == 1:
            r.submit(DiscardPass(103))
            steps.append(r.submit_step([Segment(2, 0, 9, True, pages(2, 16))], lane=1, units=units))
    return [r.wait(step) for step in steps]


def test_passes_resumed_on_another_partition_equal_eager():
    assert_alike(stopping_passes)


def test_stopping_after_any_layer_changes_no_bit():
    def cut(groups: Sequence[tuple[int, int]]) -> Script:
        def script(r: StepRig) -> list[StepDone]:
            r.open(0, prompt(45), ASKING)
            made = [
                r.submit_step(
                    [Segment(0, 0, 45, True, pages(0, 45))], lane=1, layers=group, pass_id=9
                )
                for group in groups
            ]
            return [r.wait(step) for step in made]

        return script

    whole = run_script(cut([(0, 4)]), SMALL)[1]
    for groups in ([(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 3), (3, 4)], [(0, 1), (1, 4)]):
        assert torch.equal(run_script(cut(groups), SMALL)[1], whole), groups


# ---------------------------------------------------------------- outputs of the last layer


def test_prompt_logprobs_and_unsampled_chunks_equal_eager():
    def script(r: StepRig) -> list[StepDone]:
        r.open(0, prompt(40), msgspec.structs.replace(ASKING, prompt_logprobs=1))
        dones = [
            r.run([Segment(0, 0, 20, False, pages(0, 40))], lane=1),
            r.run([Segment(0, 20, 20, True)], lane=1),
        ]
        r.open(1, prompt(40), ASKING)
        dones.append(r.run([Segment(1, 0, 20, False, pages(1, 40))], lane=1))
        return [*dones, r.run([Segment(1, 20, 20, True)], lane=1)]

    assert_alike(script)


def test_nan_in_the_padding_page_changes_nothing():
    def script(r: StepRig) -> list[StepDone]:
        for pool in (*r.parts.kv.k, *r.parts.kv.v):
            pool[-1].fill_(float("nan"))
        torch.cuda.synchronize() if HAS_GPU else None
        r.open(0, prompt(25), ASKING)
        return r.generate(0, 25, 4)

    assert_alike(script)


# ---------------------------------------------------------------- under the engine


@pytest.mark.parametrize("name", ["chunked", "multiplex, layer by layer"])
def test_policies_give_the_same_tokens_with_and_without_graphs(name: str):
    answers = []
    for sizes in (SMALL, ()):
        parts = make_parts(pages=40, sizes=sizes)
        policy = (
            Chunked(40, parts.units, depth=2)
            if name == "chunked"
            else Multiplex(160, parts.units, 16 if HAS_GPU else 2, layer_group=1, depth=2)
        )
        service = EngineService(parts, policy, overlap=HAS_GPU)
        answers.append([dict(service.run_requests(random_requests())) for _ in range(2)])
        service.close()
        parts.close()
    assert answers[0] == answers[1]


# ---------------------------------------------------------------- on a GPU

WIDE = dataclasses.replace(
    TINY, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1024, max_context_tokens=2200
)
BF16 = {"spec": WIDE, "dtype": torch.bfloat16, "std": 0.04}
# Of a log-probability: products of other row counts round differently, in bfloat16, four layers.
NEAR = 0.06


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")
@pytest.mark.parametrize("units", [None, *SPLIT])
def test_default_graph_sizes_equal_eager(units: int | None):
    lengths = edges(GRAPH_SIZES) if units is None else edges(GRAPH_SIZES[::3])
    assert_alike(prompts_of(lengths, units), GRAPH_SIZES, NEAR, **BF16)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")
@pytest.mark.parametrize("script", [mixed_passes, stopping_passes])
@pytest.mark.parametrize(
    "how",
    [
        BF16,
        {**BF16, "kv_dtype": torch.float8_e4m3fn},
        {**BF16, "kv_dtype": torch.float8_e4m3fn, "quantise": True},
    ],
)
def test_16_and_8_bit_graphs_equal_eager(script: Script, how: dict[str, Any]):
    assert_alike(script, SMALL, NEAR * (4 if "quantise" in how else 1), **how)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")
@pytest.mark.parametrize(
    "script", [mixed_passes, stopping_passes, prompts_of(edges(SMALL), SPLIT[0])]
)
def test_batch_invariant_graphs_equal_eager_bit_for_bit(script: Script):
    how = {**BF16, "invariant": True}
    ours, theirs = run_script(script, SMALL, **how), run_script(script, (), **how)
    assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])


def test_large_layers_need_fewer_graphs():
    small, large = PRESETS["llama-3.1-8b"], PRESETS["llama-3.1-70b"]
    assert graph_sizes_for(8192, small) == GRAPH_SIZES
    assert graph_sizes_for(8192, large) == tuple(size for size in GRAPH_SIZES if size <= 640)
    assert graph_sizes_for(100, small) == graph_sizes_for(100, large) == (16, 32, 48, 64, 96, 128)
    assert graph_sizes_for(8192, dataclasses.replace(large, ffn=1 << 30)) == GRAPH_SIZES[:1], (
        "the smallest passes always have theirs"
    )


def test_gathering_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    """Decodes, chunked prompts, and one prompt longer than the limit, for several limits."""

    def script(r: StepRig) -> list[StepDone]:
        lengths = (30, 7, 96, 41, 2)
        for slot, length in enumerate(lengths):
            r.open(slot, prompt(length, length), ASKING)
        dones = [
            r.run(
                [Segment(slot, 0, n // 2, False, pages(slot, n)) for slot, n in enumerate(lengths)],
                lane=1,
            )
        ]
        dones.append(
            r.run(
                [Segment(slot, n // 2, n - n // 2, True) for slot, n in enumerate(lengths)], lane=1
            )
        )
        decodes = [Segment(slot, lengths[slot], 1, True) for slot in (0, 1)]
        r.open(5, prompt(50, 50), ASKING)
        return [*dones, r.run([*decodes, Segment(5, 0, 50, True, pages(5, 50))], lane=1)]

    truth = run_script(script, ())
    for most in (1, 40, 100):
        monkeypatch.setattr("counterpoint.device.cuda.attention.MAX_GATHERED_TOKENS", most)
        tokens, numbers, _ = run_script(script, SMALL)
        assert tokens == truth[0] and (numbers - truth[1]).abs().max() <= 1e-4, most


def test_gather_groups_stay_below_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("counterpoint.device.cuda.attention.MAX_GATHERED_TOKENS", 100)
    assert group_for_gather([100, 1, 99, 1]) == [(0, 1), (1, 3), (3, 4)]
    assert group_for_gather([500, 500]) == [(0, 1), (1, 2)]
