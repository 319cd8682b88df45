"""The CUDA executor: the same answers as the reference, on a GPU or, without one, in place on the CPU."""

from __future__ import annotations

import msgspec
import pytest
import torch
from cuda_rig import GREEDY, HAS_GPU, PAGE, TINY, VOCAB, Service, make_parts, requests, rig

from counterpoint.core.policy import Chunked, Multiplex, Serial
from counterpoint.device.cuda.attention import decode_by_torch
from counterpoint.device.cuda.device_tables import buckets_for
from counterpoint.device.cuda.sampling import MOST_TOP, SamplingMode, tail_for
from counterpoint.device.cuda.stream_partitions import StreamPartition, StreamPartitions
from counterpoint.device.sampling_tables import SamplingStage
from counterpoint.interfaces import Policy
from counterpoint.model.batch import PassSegments, make_batch
from counterpoint.model.checkpoint import RandomCheckpoint
from counterpoint.model.kv import KVPool
from counterpoint.model.ops import Ops, reference_ops
from counterpoint.model.weights import build_decoder
from counterpoint.types import DiscardPass, InitSlot, Role, Sampling, Segment


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small gain nothing from more threads, and wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


PROMPT = [7 * n % VOCAB for n in range(1, 40)]


def reference_logits(
    spec, tokens: list[int], deviation: float = 0.15, ops: Ops | None = None
) -> torch.Tensor:
    """Logits behind every position, by the plain decoder (or `ops`) on the CPU in float32: [tokens, vocab]."""
    decoder = build_decoder(spec, RandomCheckpoint(3, deviation=deviation), ops or reference_ops())
    pages = -(-len(tokens) // PAGE)
    kv = KVPool(spec, pages, PAGE)
    sizes = torch.tensor([0]), torch.tensor([len(tokens)])
    segments = PassSegments(*sizes, torch.tensor([True]), torch.arange(pages)[None])
    batch = make_batch(torch.tensor(tokens), segments, PAGE, decoder.ops)
    x_TD = decoder.run_layers(decoder.embed(batch), batch, kv, 0, spec.layers)
    return decoder.logits(x_TD, batch, torch.arange(len(tokens)))


def greedy_by_reference(
    spec, prompt: list[int], count: int, vocab: int = VOCAB, deviation: float = 0.15
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(spec, tokens, deviation)[-1, :vocab].argmax()))
    return tokens[len(prompt) :]


def tokens_of(dones) -> list[int]:
    return [token for done in dones for token in done.tokens]


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return greedy_by_reference(TINY, PROMPT, 12)


# ---------------------------------------------------------------- passes


def test_greedy_answer(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        assert tokens_of(r.generate(0, len(PROMPT), 12)) == wanted


@pytest.mark.parametrize("units", [2, 4] if not HAS_GPU else [16, 32])
def test_greedy_answer_in_a_partition(wanted: list[int], units: int):
    with rig() as r:
        r.open(0, PROMPT)
        dones = r.generate(0, len(PROMPT), 12, units=units)
        assert tokens_of(dones) == wanted
        assert {done.units for done in dones[1:]} == {units}


def test_a_prefill_in_layer_groups_whose_place_changes(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        pages = tuple(range(10, 14))
        small = r.parts.units - (4 if not HAS_GPU else 32)
        for first, units in enumerate([small, r.parts.units, small, r.parts.units]):
            step = r.step(
                [Segment(0, 0, len(PROMPT), True, pages)],
                lane=1,
                layers=(first, first + 1),
                batch=99,
                units=units,
            )
        assert list(r.wait(step).tokens) == wanted[:1]


def test_a_prompt_in_chunks(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        r.run([Segment(0, 0, 13, False, (5, 9, 2))], lane=1)
        r.run([Segment(0, 13, 1, False)], lane=1)
        assert list(r.run([Segment(0, 14, len(PROMPT) - 14, True)], lane=1).tokens) == wanted[:1]


def test_decodes_and_a_chunk_in_one_pass(wanted: list[int]):
    with rig() as r:
        for slot in (0, 1):
            r.open(slot, PROMPT)
        first = r.run([Segment(0, 0, len(PROMPT), True, (0, 1, 2))], lane=1).tokens
        mixed = r.run(
            [Segment(0, len(PROMPT), 1, True), Segment(1, 0, 30, False, (3, 4, 5))], lane=0
        )
        last = r.run(
            [Segment(0, len(PROMPT) + 1, 1, True), Segment(1, 30, len(PROMPT) - 30, True)], lane=0
        )
        assert [*first, *mixed.tokens, last.tokens[0]] == wanted[:3]
        assert last.tokens[1] == wanted[0]


def test_two_steps_ahead_of_the_host(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        length = len(PROMPT)
        r.run([Segment(0, 0, length, True, (0, 1, 2, 3))], lane=1)
        units = [r.parts.units, 4 if not HAS_GPU else 32]
        steps = [
            r.step([Segment(0, length + n, 1, True)], decode=True, units=units[n % 2])
            for n in range(8)
        ]
        assert [r.wait(step).tokens[0] for step in steps] == wanted[1:9]


def test_a_shared_prefix(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        r.run([Segment(0, 0, len(PROMPT), True, (0, 1, 2))], lane=1)
        r.open(1, PROMPT, pages=(0, 1))
        assert (
            list(r.run([Segment(1, 32, len(PROMPT) - 32, True, (3,))], lane=1).tokens) == wanted[:1]
        )
        r.submit(DiscardPass(1234))  # of a pass that is over


def test_a_batch_of_odd_size_with_neighbours(wanted: list[int]):
    with rig() as r:
        for slot in range(5):
            r.open(slot, PROMPT[slot:])
        segments = [
            Segment(s, 0, len(PROMPT) - s, True, tuple(range(4 * s, 4 * s + 4))) for s in range(5)
        ]
        r.run(segments, lane=1)
        for n in range(1, 4):
            done = r.run(
                [Segment(s, len(PROMPT) - s + n - 1, 1, True) for s in range(5)], decode=True
            )
            assert done.tokens[0] == wanted[n]


# ---------------------------------------------------------------- sampling

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
def test_a_request_is_sampled_alike_alone_and_in_company(name: str):
    """In one pass with others it takes another way of sampling, and must get the same tokens."""
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


def test_logprobs_are_those_of_the_reference(wanted: list[int]):
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


def test_every_way_of_sampling_has_its_tail():
    assert tail_for(SamplingStage.NONE) is SamplingMode.GREEDY
    assert tail_for(SamplingStage.TOP_K) is SamplingMode.GREEDY  # of rows that are not drawn
    assert tail_for(SamplingStage.DRAW | SamplingStage.MIN_P) is SamplingMode.DRAWN
    assert (
        tail_for(SamplingStage.DRAW | SamplingStage.TOP_P)
        == SamplingMode.DRAWN | SamplingMode.FILTERED
    )
    for stage in (SamplingStage.PENALTIES, SamplingStage.BIAS, SamplingStage.MIN_TOKENS):
        assert tail_for(SamplingStage.DRAW | stage) == SamplingMode.DRAWN | SamplingMode.ADJUSTED
        assert tail_for(stage) is SamplingMode.ADJUSTED
    assert tail_for(SamplingStage.LOGPROBS | SamplingStage.PROMPT_LOGPROBS) is SamplingMode.LOGPROBS
    assert tail_for(1 << 40) is SamplingMode.ANY, "what a graph does not know is done outside"


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
def test_a_graph_samples_as_the_host_would(sampling: Sampling):
    """More alternatives than a graph has send a row through the host's settings: the same tokens, the same log-probabilities."""
    answers = []
    for top in (3, MOST_TOP + 1):
        with rig() as r:
            r.open(0, PROMPT, msgspec.structs.replace(sampling, logprobs=top))
            answers.append(r.generate(0, len(PROMPT), 9))
    assert tokens_of(answers[0]) == tokens_of(answers[1])
    for ours, theirs in zip(*answers, strict=True):
        (one,), (other,) = ours.logprobs, theirs.logprobs
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_ids == other.top_ids[:3] and len(other.top_ids) == MOST_TOP + 1


def test_a_request_that_begins_with_a_decode():
    """Its cache came from elsewhere: the step that decodes is the first to hear of the slot's settings."""
    with rig() as r:
        r.open(0, PROMPT, HARD)
        whole = tokens_of(r.generate(0, len(PROMPT), 3))
    with rig() as r:
        r.open(0, PROMPT, GREEDY)
        r.run([Segment(0, 0, len(PROMPT), True, (0, 1, 2))], lane=1)
        r.submit(InitSlot(1, (*PROMPT, whole[0]), len(PROMPT), (0, 1, 2), HARD))
        done = r.run([Segment(1, len(PROMPT), 1, True)], decode=True)
        assert list(done.tokens) == whole[1:2] and done.logprobs[0] is not None


def test_what_was_counted_is_forgotten_with_its_request():
    """A slot that had penalties, a bias and held-back ends is given to a request that asks for none, beside one that does; and a
    request that comes back with a part of its answer is counted on from there."""
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


# ---------------------------------------------------------------- failures and choices


def test_a_failing_step_says_so_and_the_next_runs(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        done = r.wait(r.step([Segment(0, 0, 8, False, (0, 1, 2))], lane=1, layers=(2, 4), batch=77))
        assert "no hidden states" in done.error and not done.tokens
        assert (
            list(r.run([Segment(0, 0, len(PROMPT), True, (0, 1, 2))], lane=1).tokens) == wanted[:1]
        )


def test_a_prompt_longer_than_the_table_is_refused():
    with rig() as r, pytest.raises(ValueError, match="do not fit"):
        r.open(0, [1] * (TINY.max_context_tokens + 1))


def test_times_are_in_order():
    with rig() as r:
        r.open(0, PROMPT)
        before_s = r.inbox.clock()
        dones = r.generate(0, len(PROMPT), 6)
        after_s = r.inbox.clock()
    times = [time for done in dones for time in (done.started_s, done.ended_s)]
    assert times == sorted(times)
    assert before_s - 1e-3 <= times[0] and times[-1] <= after_s


def test_a_place_is_never_larger_than_granted():
    def place(name: str, units: int) -> StreamPartition:
        return StreamPartition(f"{name} {units}", None, units, decode_by_torch, None, None)  # pyright: ignore[reportArgumentType]

    places = StreamPartitions(
        {n: place("decode", n) for n in (16, 32, 132)},
        {n: place("prefill", n) for n in (100, 116, 132)},
    )
    assert [places.choose(Role.DECODE, n).units for n in (132, 131, 32, 20, 8)] == [
        132,
        32,
        32,
        16,
        16,
    ]
    assert [places.choose(Role.PREFILL, n).units for n in (132, 116, 110, 50)] == [
        132,
        116,
        100,
        100,
    ]
    assert places.choose(Role.BOTH, 132).name == "prefill 132"


def test_buckets_hold_every_batch():
    for most in (1, 3, 64, 256, 300, 1000):
        sizes = buckets_for(most)
        assert (
            sizes == tuple(sorted(sizes))
            and sizes[-1] >= most
            and (len(sizes) == 1 or sizes[-2] < most)
        )


# ---------------------------------------------------------------- under the engine


def policies(units: int) -> dict[str, Policy]:
    split = 4 if not HAS_GPU else 32
    small = 2 if not HAS_GPU else 16
    return {
        "serial": Serial(160, units),
        "serial, two in flight": Serial(160, units, depth=2),
        "chunked": Chunked(40, units, depth=2),
        "multiplex": Multiplex(160, units, split, TINY.layers, depth=2),
        "multiplex, layer by layer": Multiplex(
            160, units, small, TINY.layers, layer_group=1, depth=2
        ),
    }


@pytest.fixture(scope="module")
def truth() -> dict[str, list[int]]:
    """Each request alone on the device."""
    parts = make_parts(pages=128)
    service = Service(parts, Serial(160, parts.units))
    answers = {}
    for arrive in requests():
        answers |= service.ask([arrive])
    service.close()
    parts.close()
    return answers


@pytest.mark.parametrize("name", policies(132 if HAS_GPU else 8))
@pytest.mark.parametrize("pages", [256, 30], ids=["much memory", "little memory"])
def test_answers_do_not_depend_on_the_policy(truth: dict[str, list[int]], name: str, pages: int):
    parts = make_parts(pages=pages)
    service = Service(parts, policies(parts.units)[name], overlap=HAS_GPU)
    for round in ("cold", "with prefix hits"):
        assert service.ask(requests()) == truth, round
    service.close()
    parts.close()
