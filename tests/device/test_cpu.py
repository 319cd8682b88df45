"""The CPU executor on a tiny random model, step by step."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from cpu_rig import GREEDY, LANES, PAGE, VOCAB, Rig, make_rig, tiny_decoder

from counterpoint.device.cores import usable_cores
from counterpoint.model.batch import PassTensors
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.types import DiscardPass, Lane, Role, Sampling, Segment

CORES = usable_cores()
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="two lanes side by side need two cores")
DECODE, PREFILL = LANES
PROMPT = list(range(10, 33))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder()


@pytest.fixture
def rig(decoder: Decoder) -> Iterator[Rig]:
    # Always two units. With one core both are that core; tests that need two at once are skipped.
    rig = make_rig(decoder, CORES[:2] if len(CORES) > 1 else CORES * 2)
    yield rig
    rig.executor.close()


def pages(first: int, tokens: int) -> tuple[int, ...]:
    return tuple(range(first, first + -(-tokens // PAGE)))


def generate(
    rig: Rig,
    slot: int,
    prompt: list[int],
    count: int,
    sampling: Sampling = GREEDY,
    first_page: int = 0,
) -> list[int]:
    """The whole prompt, then one token at a time, in the decode lane."""
    rig.open(slot, prompt, sampling)
    done = rig.run([Segment(slot, 0, len(prompt), True, pages(first_page, len(prompt) + count))])
    tokens = list(done.tokens)
    for position in range(len(prompt), len(prompt) + count - 1):
        tokens += rig.run([Segment(slot, position, 1, True)]).tokens
    return tokens


def test_tokens_with_a_cache_are_those_without(rig: Rig):
    """Each token equals the first one generated after all tokens before it."""
    answer = generate(rig, 0, PROMPT, 8)
    for n in range(8):
        assert generate(rig, 1, PROMPT + answer[:n], 1, first_page=32) == [answer[n]]
    assert len(set(answer)) > 1


def test_layer_groups_on_changing_units_equal_a_whole_pass(rig: Rig):
    expected = generate(rig, 0, PROMPT, 6)
    rig.open(1, PROMPT)
    segments = [Segment(1, 0, len(PROMPT), True, pages(40, 30))]
    steps = [
        rig.step(segments, lane=PREFILL.id, units=units, layers=layers, batch=77)
        for units, layers in ((1, (0, 1)), (2, (1, 3)), (1, (3, 4)))
    ]
    *early, last = [rig.wait(step) for step in steps]
    assert [done.tokens for done in early] == [(), ()]
    assert [done.units for done in (*early, last)] == [1, 2, 1]
    assert list(last.tokens) == expected[:1]
    assert (
        early[0].started_s
        <= early[0].ended_s
        <= early[1].started_s
        <= early[1].ended_s
        <= last.started_s
    )
    for n in range(5):
        assert rig.run([Segment(1, len(PROMPT) + n, 1, True)]).tokens == (expected[n + 1],)


def test_chunks_prefix_pages_and_mixed_batches_equal_a_whole_prompt(rig: Rig):
    expected = generate(rig, 0, PROMPT, 6)
    other = generate(rig, 1, PROMPT[::-1], 6, first_page=8)
    rig.open(2, PROMPT)  # in chunks, with another request's decodes in the same passes
    rig.open(3, PROMPT[::-1])
    assert rig.run([Segment(3, 0, 23, True, pages(30, 30))]).tokens == (other[0],)
    done = rig.run([Segment(3, 23, 1, True), Segment(2, 0, 9, False, pages(20, 9))])
    assert done.tokens == (other[1],)
    done = rig.run([Segment(3, 24, 1, True), Segment(2, 9, 14, True, pages(23, 20))])
    assert done.tokens == (other[2], expected[0])
    done = rig.run([Segment(2, 23, 1, True), Segment(3, 25, 1, True)])
    assert done.tokens == (expected[1], other[3])
    rig.open(4, PROMPT, pages=(0, 1, 2))  # shares the first three pages of slot 0
    done = rig.run([Segment(4, 3 * PAGE, len(PROMPT) - 3 * PAGE, True, pages(50, 12))])
    assert done.tokens == (expected[0],)


def test_queued_steps_need_nothing_from_the_host(rig: Rig):
    """Depth 2: the second decode is submitted before the first has come back."""
    expected = generate(rig, 0, PROMPT, 8)
    rig.open(1, PROMPT)
    steps = [rig.step([Segment(1, 0, 23, True, pages(40, 31))])]
    steps += [rig.step([Segment(1, 23 + n, 1, True)], units=1 + n % 2) for n in range(7)]
    assert [rig.wait(step).tokens[0] for step in steps] == expected


def test_a_seeded_request_gets_the_same_tokens_in_any_batch(rig: Rig):
    sampling = Sampling(max_tokens=9, temperature=1.5, seed=99, top_p=0.95)
    alone = generate(rig, 0, PROMPT, 6, sampling)
    for slot in range(1, 7):
        rig.open(
            slot,
            PROMPT[slot:],
            Sampling(max_tokens=9, temperature=slot / 3, seed=slot, presence_penalty=0.5),
        )
    rig.open(7, PROMPT, sampling)
    together = [Segment(slot, 0, 23 - slot, True, pages(slot * 8, 30)) for slot in range(1, 7)]
    tokens = [rig.run([*together, Segment(7, 0, 23, True, pages(56, 30))]).tokens[-1]]
    for n in range(5):
        together = [Segment(slot, 23 - slot + n, 1, True) for slot in range(1, 7)]
        tokens.append(rig.run([Segment(7, 23 + n, 1, True), *together]).tokens[0])
    assert tokens == alone
    assert max(alone) < VOCAB


def test_logprobs_of_tokens_and_prompt(rig: Rig, decoder: Decoder):
    rig.open(0, PROMPT, Sampling(max_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=1))
    rig.open(1, PROMPT, GREEDY)
    first = rig.run(
        [Segment(0, 0, 10, False, pages(0, 10)), Segment(1, 0, 23, True, pages(20, 23))]
    )
    second = rig.run([Segment(0, 10, 13, True, pages(4, 20))])
    assert first.logprobs == () and first.tokens == second.tokens
    (chosen,) = second.logprobs
    assert chosen is not None
    assert (
        chosen.top_ids[0] == second.tokens[0]
        and chosen.top_logprobs[0] == chosen.logprob > chosen.top_logprobs[1]
    )
    assert first.prompt_logprobs[1] is None
    prompt = [*(first.prompt_logprobs[0] or ()), *(second.prompt_logprobs[0] or ())]
    assert len(prompt) == len(PROMPT) - 1
    for n in range(1, len(PROMPT)):  # the same, from a request that ends there
        rig.open(2, PROMPT[:n], Sampling(max_tokens=1, temperature=0.0, logprobs=VOCAB))
        (found,) = rig.run([Segment(2, 0, n, True, pages(40, n))]).logprobs
        assert found is not None
        assert prompt[n - 1].logprob == pytest.approx(
            found.top_logprobs[found.top_ids.index(PROMPT[n])], abs=1e-4
        )
        assert prompt[n - 1].top_ids == found.top_ids[:1]


# ---------------------------------------------------------------- cores


@two_cores
def test_measured_cores_are_those_asked_for(rig: Rig):
    threads = set(os.listdir("/proc/self/task")) if sys.platform == "linux" else set()
    rig.open(0, PROMPT)
    for lane, units in ((PREFILL, 1), (DECODE, 1), (PREFILL, 2), (DECODE, 2)):
        rig.run(
            [Segment(0, 0, 23, True, pages(0, 23) if lane is PREFILL and units == 1 else ())],
            lane=lane.id,
            units=units,
        )
    measured = {(r.lane, r.units): r.cores for r in rig.executor.measured_cores()}
    low, high = CORES[:2]
    if sys.platform != "linux":
        assert set(measured.values()) == {None}
        return
    assert measured == {
        (PREFILL.id, 1): (low,),
        (DECODE.id, 1): (high,),
        (PREFILL.id, 2): (low, high),
        (DECODE.id, 2): (low, high),
    }
    # The lanes' threads, and those that OpenMP started for them.
    for task in set(os.listdir("/proc/self/task")) - threads:
        assert os.sched_getaffinity(int(task)) in ({low}, {high}, {low, high})
    assert os.sched_getaffinity(0) > {low}, "the caller's own thread is left alone"


class HookedDecoder(Decoder):
    """Calls `on_layers` inside run_layers, in its thread."""

    __slots__ = ("on_layers",)

    def __init__(self, like: Decoder, on_layers: Callable[[PassTensors], None]) -> None:
        super().__init__(like.spec, like.ops, like.weights)
        self.on_layers = on_layers

    def run_layers(
        self, x_TD: torch.Tensor, batch: PassTensors, kv: KVPool, first_layer: int, last_layer: int
    ) -> torch.Tensor:
        self.on_layers(batch)
        return super().run_layers(x_TD, batch, kv, first_layer, last_layer)


@two_cores
def test_two_lanes_run_at_the_same_time_with_their_own_thread_counts(decoder: Decoder):
    meeting = threading.Barrier(2)
    seen: dict[str, int] = {}

    def meet(batch: PassTensors) -> None:
        meeting.wait(60)  # breaks, and fails the step, unless both lanes are inside
        seen[threading.current_thread().name] = torch.get_num_threads()

    rig = make_rig(HookedDecoder(decoder, meet), CORES[:2])
    rig.open(0, PROMPT)
    rig.open(1, PROMPT[::-1])
    steps = [
        rig.step([Segment(0, 0, 23, True, pages(0, 23))], lane=PREFILL.id),
        rig.step([Segment(1, 0, 23, True, pages(20, 23))], lane=DECODE.id),
    ]
    done = [rig.wait(step) for step in steps]
    assert [d.error for d in done] == ["", ""]
    assert max(d.started_s for d in done) < min(d.ended_s for d in done)
    assert sorted(seen.values()) == [1, 1] and len(seen) == 2
    rig.executor.close()


@two_cores
def test_steps_that_would_share_a_core_are_refused(decoder: Decoder):
    inside, leave = threading.Event(), threading.Event()

    def hold(batch: PassTensors) -> None:
        inside.set()
        assert leave.wait(60)

    rig = make_rig(HookedDecoder(decoder, hold), CORES[:2])
    for slot in range(3):
        rig.open(slot, PROMPT)
    first = rig.step([Segment(0, 0, 23, True, pages(0, 23))], lane=PREFILL.id, units=1)
    assert inside.wait(60)
    refused = rig.wait(rig.step([Segment(1, 0, 23, True, pages(20, 23))], lane=DECODE.id, units=2))
    assert "share cores" in refused.error and refused.tokens == ()
    other = rig.step([Segment(2, 0, 23, True, pages(40, 23))], lane=DECODE.id, units=1)
    leave.set()
    assert rig.wait(first).tokens == rig.wait(other).tokens != ()
    again = rig.run([Segment(1, 0, 23, True)], lane=DECODE.id, units=2)
    assert again.tokens == rig.finished[first].tokens
    rig.executor.close()


def test_units_that_do_not_exist_are_refused(rig: Rig):
    rig.open(0, PROMPT)
    for units in (0, 3):
        assert "units" in rig.wait(rig.step([Segment(0, 0, 23, True, ())], units=units)).error


# ---------------------------------------------------------------- errors


def test_an_error_fails_its_step_alone(decoder: Decoder):
    def fail_on_7(batch: PassTensors) -> None:
        if 7 in batch.tokens_T:
            raise RuntimeError("seven")

    rig = make_rig(HookedDecoder(decoder, fail_on_7), CORES[:1])
    expected = generate(rig, 0, PROMPT, 4)
    rig.open(1, [5, 6, 7])
    broken = [Segment(1, 0, 3, True, pages(20, 8))]
    steps = [rig.step(broken, layers=(0, 2), batch=50), rig.step(broken, layers=(2, 4), batch=50)]
    first, second = (rig.wait(step) for step in steps)
    assert "seven" in first.error and "RuntimeError" in first.error
    assert "no hidden states" in second.error
    assert generate(rig, 2, PROMPT, 4, first_page=30) == expected
    rig.executor.close()


def test_a_discarded_pass_is_forgotten(rig: Rig):
    rig.open(0, PROMPT)
    segments = [Segment(0, 0, 23, True, pages(0, 23))]
    rig.run(segments, layers=(0, 2), batch=9)
    rig.submit(DiscardPass(9))
    assert "no hidden states" in rig.wait(rig.step(segments, layers=(2, 4), batch=9)).error
    rig.submit(DiscardPass(9))


class NanDecoder(Decoder):
    """Token 7 has an embedding that is not finite."""

    __slots__ = ()

    def embed(self, batch: PassTensors) -> torch.Tensor:
        return super().embed(batch).index_fill(0, (batch.tokens_T == 7).nonzero()[:, 0], torch.nan)


def test_logits_that_are_not_finite_fail_their_row_alone(decoder: Decoder):
    rig = make_rig(NanDecoder(decoder.spec, decoder.ops, decoder.weights), CORES[:1])
    expected = generate(rig, 0, PROMPT, 3)
    short = generate(rig, 3, PROMPT[:2], 3, first_page=50)
    rig.open(1, PROMPT)
    rig.open(2, [3, 4, 7])
    done = rig.run([Segment(2, 0, 3, True, pages(40, 8)), Segment(1, 0, 23, True, pages(20, 26))])
    assert done.tokens == (-1, expected[0])
    # A decode of both was already queued: the failed row does not change the other.
    done = rig.run([Segment(1, 23, 1, True), Segment(2, 3, 1, True)])
    assert done.tokens[0] == expected[1]
    # Its keys and values, in the unused rest of the page, do not change the page's next owner.
    rig.open(2, PROMPT[:2])
    done = rig.run([Segment(2, 0, 2, True, pages(40, 8)), Segment(1, 24, 1, True)])
    assert done.tokens == (short[0], expected[2])
    for n in (1, 2):
        assert rig.run([Segment(2, 1 + n, 1, True)]).tokens == (short[n],)
    rig.executor.close()


def test_close_leaves_no_thread_and_no_memory(decoder: Decoder):
    before = set(threading.enumerate())
    rig = make_rig(decoder, CORES[:1])
    generate(rig, 0, PROMPT, 2)
    assert set(threading.enumerate()) - before
    rig.executor.close()
    assert set(threading.enumerate()) == before
    assert not rig.executor.kv.k and not rig.executor.kv.v


def test_one_lane_of_both_roles(decoder: Decoder, rig: Rig):
    expected = generate(rig, 0, PROMPT, 3)
    both = make_rig(decoder, CORES, (Lane(0, Role.BOTH),))
    both.open(0, PROMPT)
    assert both.run([Segment(0, 0, 23, True, pages(0, 23))], units=len(CORES)).tokens == (
        expected[0],
    )
    both.executor.close()
