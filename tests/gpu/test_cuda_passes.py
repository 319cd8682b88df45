"""Passes with prompt tokens as graphs, against the same passes launched operation by operation; without a GPU, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from cuda_rig import HAS_GPU, PAGE, TINY, VOCAB, Rig, Service, make_parts, requests, rig

from counterpoint.core.policy import Chunked, Multiplex
from counterpoint.device.cuda.attention import gathered_at_once
from counterpoint.device.cuda.piecewise_graphs import SIZES, sizes_for
from counterpoint.spec.presets import PRESETS
from counterpoint.types import DiscardPass, Sampling, Segment, StepDone

SMALL = (4, 8, 12, 24, 48, 96)
ASKING = Sampling(max_tokens=16, temperature=0.0, logprobs=4)
SPLIT = (4, 2) if not HAS_GPU else (100, 116)  # prefill units


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(
        2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def pages(slot: int, tokens: int, first: int = 0) -> tuple[int, ...]:
    """The slot's own pages `first` and on, as far as so many tokens go."""
    return tuple(range(16 * slot + first, 16 * slot + -(-tokens // PAGE)))


Script = Callable[[Rig], list[StepDone]]


def told(
    script: Script, sizes: Sequence[int], **how: Any
) -> tuple[list[tuple[int, ...]], torch.Tensor, int]:
    """Tokens of the script's steps, all log-probabilities that they told, and the number of graphs."""
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
            r.parts.passes.count,
        )


def assert_alike(
    script: Script, sizes: Sequence[int] = SMALL, bound: float = 1e-4, **how: Any
) -> None:
    tokens, numbers, graphs = told(script, sizes, **how)
    wanted, truth, none = told(script, (), **how)
    assert graphs and not none
    assert numbers.numel() and numbers.isfinite().all()
    assert (numbers - truth).abs().max() <= bound
    if bound < 1e-3:
        assert tokens == wanted


# ---------------------------------------------------------------- sizes


def edges(sizes: Sequence[int]) -> list[int]:
    return sorted({n for size in sizes for n in (size - 1, size, size + 1)})


def prompts_of(lengths: Sequence[int], units: int | None = None) -> Script:
    def script(r: Rig) -> list[StepDone]:
        dones = []
        for length in lengths:
            r.open(0, prompt(length, length), ASKING)
            dones.append(
                r.run([Segment(0, 0, length, True, pages(0, length))], lane=1, units=units)
            )
        return dones

    return script


@pytest.mark.parametrize("units", [None, *SPLIT])
def test_prompts_of_every_size_and_beside_it(units: int | None):
    assert_alike(prompts_of(edges(SMALL), units))


def mixed(r: Rig) -> list[StepDone]:
    """Decodes, the middle and the end of a prompt, whole prompts and one whose beginning is in the cache, in passes of 8 rows and
    more; the first and the last ones are larger than any graph of SMALL."""
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


def test_decodes_chunks_and_prefix_hits_in_one_pass():
    assert_alike(mixed)


# ---------------------------------------------------------------- stops


def stops(r: Rig) -> list[StepDone]:
    """Two passes in turns, layer by layer and from place to place, while other passes need new graphs there; one is dropped."""
    for slot, length in enumerate((30, 44, 9, 60)):
        r.open(slot, prompt(length, slot), ASKING)
    one, other = (Segment(0, 0, 30, True, pages(0, 32)),), (Segment(1, 0, 44, True, pages(1, 48)),)
    steps, places = [], (*SPLIT, r.parts.units, SPLIT[0])
    r.step([Segment(3, 0, 60, True, pages(3, 64))], lane=1, layers=(0, 2), batch=103)
    for layer, units in enumerate(places):
        for batch, segments in ((101, one), (102, other)):
            steps.append(
                r.step(list(segments), lane=1, layers=(layer, layer + 1), batch=batch, units=units)
            )
        if layer == 1:
            r.submit(DiscardPass(103))
            steps.append(r.step([Segment(2, 0, 9, True, pages(2, 16))], lane=1, units=units))
    return [r.wait(step) for step in steps]


def test_passes_that_stop_and_go_on_elsewhere():
    assert_alike(stops)


def test_a_stop_behind_any_layer_changes_no_bit():
    def cut(groups: Sequence[tuple[int, int]]) -> Script:
        def script(r: Rig) -> list[StepDone]:
            r.open(0, prompt(45), ASKING)
            made = [
                r.step([Segment(0, 0, 45, True, pages(0, 45))], lane=1, layers=group, batch=9)
                for group in groups
            ]
            return [r.wait(step) for step in made]

        return script

    whole = told(cut([(0, 4)]), SMALL)[1]
    for groups in ([(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 3), (3, 4)], [(0, 1), (1, 4)]):
        assert torch.equal(told(cut(groups), SMALL)[1], whole), groups


# ---------------------------------------------------------------- what behind the last layer is wanted


def test_all_rows_none_and_some():
    def script(r: Rig) -> list[StepDone]:
        r.open(0, prompt(40), msgspec.structs.replace(ASKING, prompt_logprobs=1))
        dones = [
            r.run([Segment(0, 0, 20, False, pages(0, 40))], lane=1),
            r.run([Segment(0, 20, 20, True)], lane=1),
        ]
        r.open(1, prompt(40), ASKING)
        dones.append(r.run([Segment(1, 0, 20, False, pages(1, 40))], lane=1))
        return [*dones, r.run([Segment(1, 20, 20, True)], lane=1)]

    assert_alike(script)


def test_nobody_is_harmed_by_the_rows_that_fill_up():
    """The spare page has them, also when what stood there before was not a number."""

    def script(r: Rig) -> list[StepDone]:
        for pool in (*r.parts.kv.k, *r.parts.kv.v):
            pool[-1].fill_(float("nan"))
        torch.cuda.synchronize() if HAS_GPU else None
        r.open(0, prompt(25), ASKING)
        return r.generate(0, 25, 4)

    assert_alike(script)


# ---------------------------------------------------------------- under the engine


@pytest.mark.parametrize("name", ["chunked", "multiplex, layer by layer"])
def test_policies_answer_as_without_graphs(name: str):
    answers = []
    for sizes in (SMALL, ()):
        parts = make_parts(pages=40, sizes=sizes)
        policy = (
            Chunked(40, parts.units, depth=2)
            if name == "chunked"
            else Multiplex(160, parts.units, 16 if HAS_GPU else 2, layer_group=1, depth=2)
        )
        service = Service(parts, policy, overlap=HAS_GPU)
        answers.append([dict(service.ask(requests())) for _ in range(2)])
        service.close()
        parts.close()
    assert answers[0] == answers[1]


# ---------------------------------------------------------------- on a GPU

WIDE = dataclasses.replace(
    TINY, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1024, max_context_tokens=2200
)
BF16 = {"spec": WIDE, "dtype": torch.bfloat16, "deviation": 0.04}
NEAR = 0.06  # of a log-probability: products of other numbers of rows round otherwise, in bfloat16 and through four layers


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")
@pytest.mark.parametrize("units", [None, *SPLIT])
def test_all_sizes_that_serve(units: int | None):
    lengths = edges(SIZES) if units is None else edges(SIZES[::3])
    assert_alike(prompts_of(lengths, units), SIZES, NEAR, **BF16)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")
@pytest.mark.parametrize("script", [mixed, stops])
@pytest.mark.parametrize(
    "how",
    [
        BF16,
        {**BF16, "kv_dtype": torch.float8_e4m3fn},
        {**BF16, "kv_dtype": torch.float8_e4m3fn, "quantise": True},
    ],
)
def test_kernels_of_a_real_model(script: Script, how: dict[str, Any]):
    assert_alike(script, SMALL, NEAR * (4 if "quantise" in how else 1), **how)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")
@pytest.mark.parametrize("script", [mixed, stops, prompts_of(edges(SMALL), SPLIT[0])])
def test_batch_invariant_to_the_bit(script: Script):
    how = {**BF16, "fixed": True}
    ours, theirs = told(script, SMALL, **how), told(script, (), **how)
    assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])


def test_large_layers_need_fewer_graphs():
    small, large = PRESETS["llama-3.1-8b"], PRESETS["llama-3.1-70b"]
    assert sizes_for(8192, small) == SIZES
    assert sizes_for(8192, large) == tuple(size for size in SIZES if size <= 640)
    assert sizes_for(100, small) == sizes_for(100, large) == (16, 32, 48, 64, 96, 128)
    assert sizes_for(8192, dataclasses.replace(large, ffn=1 << 30)) == SIZES[:1], (
        "the smallest passes always have theirs"
    )


def test_prompts_of_one_pass_may_be_gathered_in_parts(monkeypatch: pytest.MonkeyPatch):
    """However many are gathered at once: decodes, prompts in pieces, and one that alone is longer than the bound."""

    def script(r: Rig) -> list[StepDone]:
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

    truth = told(script, ())
    for most in (1, 40, 100):
        monkeypatch.setattr("counterpoint.device.cuda.attention.MOST_GATHERED", most)
        tokens, numbers, _ = told(script, SMALL)
        assert tokens == truth[0] and (numbers - truth[1]).abs().max() <= 1e-4, most


def test_how_many_are_gathered_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("counterpoint.device.cuda.attention.MOST_GATHERED", 100)
    assert gathered_at_once([100, 1, 99, 1]) == [(0, 1), (1, 3), (3, 4)]
    assert gathered_at_once([500, 500]) == [(0, 1), (1, 2)]
