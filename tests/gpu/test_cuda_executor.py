"""The CUDA executor against the reference: on a GPU or, without one, in place on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from cuda_reference import PROMPT, greedy_by_reference, tokens_of
from cuda_rig import HAS_GPU, TINY, make_parts, rig
from cuda_service import EngineService, random_requests

from counterpoint.core.policy import Chunked, Multiplex, Serial
from counterpoint.device.cuda.attention import reference_decode
from counterpoint.device.cuda.device_tables import buckets_for
from counterpoint.device.cuda.stream_partitions import StreamPartition, StreamPartitions
from counterpoint.interfaces import Policy
from counterpoint.types import DiscardPass, Role, Segment

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return greedy_by_reference(TINY, PROMPT, 12)


# ---------------------------------------------------------------- passes


def test_greedy_tokens_equal_the_reference(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        assert tokens_of(r.generate(0, len(PROMPT), 12)) == wanted


@pytest.mark.parametrize("units", [2, 4] if not HAS_GPU else [16, 32])
def test_greedy_tokens_in_a_partition_equal_the_reference(wanted: list[int], units: int):
    with rig() as r:
        r.open(0, PROMPT)
        dones = r.generate(0, len(PROMPT), 12, units=units)
        assert tokens_of(dones) == wanted
        assert {done.units for done in dones[1:]} == {units}


def test_layer_groups_may_move_between_partitions(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        pages = tuple(range(10, 14))
        small = r.parts.units - (4 if not HAS_GPU else 32)
        for first, units in enumerate([small, r.parts.units, small, r.parts.units]):
            step = r.submit_step(
                [Segment(0, 0, len(PROMPT), True, pages)],
                lane=1,
                layers=(first, first + 1),
                pass_id=99,
                units=units,
            )
        assert list(r.wait(step).tokens) == wanted[:1]


def test_chunked_prompt_equals_the_reference(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        r.run([Segment(0, 0, 13, False, (5, 9, 2))], lane=1)
        r.run([Segment(0, 13, 1, False)], lane=1)
        assert list(r.run([Segment(0, 14, len(PROMPT) - 14, True)], lane=1).tokens) == wanted[:1]


def test_mixed_pass_equals_the_reference(wanted: list[int]):
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


def test_steps_queued_ahead_of_the_host_decode_correctly(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        length = len(PROMPT)
        r.run([Segment(0, 0, length, True, (0, 1, 2, 3))], lane=1)
        units = [r.parts.units, 4 if not HAS_GPU else 32]
        steps = [
            r.submit_step([Segment(0, length + n, 1, True)], decode=True, units=units[n % 2])
            for n in range(8)
        ]
        assert [r.wait(step).tokens[0] for step in steps] == wanted[1:9]


def test_shared_prefix_pages_are_reused(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        r.run([Segment(0, 0, len(PROMPT), True, (0, 1, 2))], lane=1)
        r.open(1, PROMPT, pages=(0, 1))
        assert (
            list(r.run([Segment(1, 32, len(PROMPT) - 32, True, (3,))], lane=1).tokens) == wanted[:1]
        )
        r.submit(DiscardPass(1234))  # of a pass that is over


def test_padded_batch_equals_the_reference(wanted: list[int]):
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


# ---------------------------------------------------------------- failures and choices


def test_failed_step_reports_its_error_and_the_next_runs(wanted: list[int]):
    with rig() as r:
        r.open(0, PROMPT)
        done = r.wait(
            r.submit_step([Segment(0, 0, 8, False, (0, 1, 2))], lane=1, layers=(2, 4), pass_id=77)
        )
        assert "no hidden states" in done.error and not done.tokens
        assert (
            list(r.run([Segment(0, 0, len(PROMPT), True, (0, 1, 2))], lane=1).tokens) == wanted[:1]
        )


def test_prompt_longer_than_the_table_is_rejected():
    with rig() as r, pytest.raises(ValueError, match="do not fit"):
        r.open(0, [1] * (TINY.max_context_tokens + 1))


def test_step_times_are_ordered():
    with rig() as r:
        r.open(0, PROMPT)
        before_s = r.inbox.clock()
        dones = r.generate(0, len(PROMPT), 6)
        after_s = r.inbox.clock()
    times = [time for done in dones for time in (done.started_s, done.ended_s)]
    assert times == sorted(times)
    assert before_s - 1e-3 <= times[0] and times[-1] <= after_s


def test_a_partition_is_never_larger_than_granted():
    def make_partition(name: str, units: int) -> StreamPartition:
        unused: Any = None
        return StreamPartition(f"{name} {units}", None, units, reference_decode, unused, unused)

    stream_partitions = StreamPartitions(
        {n: make_partition("decode", n) for n in (16, 32, 132)},
        {n: make_partition("prefill", n) for n in (100, 116, 132)},
    )
    assert [stream_partitions.choose(Role.DECODE, n).units for n in (132, 131, 32, 20, 8)] == [
        132,
        32,
        32,
        16,
        16,
    ]
    assert [stream_partitions.choose(Role.PREFILL, n).units for n in (132, 116, 110, 50)] == [
        132,
        116,
        100,
        100,
    ]
    assert stream_partitions.choose(Role.BOTH, 132).name == "prefill 132"


def test_buckets_cover_every_batch_size():
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
        "multiplex": Multiplex(160, units, split, depth=2),
        "multiplex, layer by layer": Multiplex(160, units, small, layer_group=1, depth=2),
    }


@pytest.fixture(scope="module")
def truth() -> dict[str, list[int]]:
    """Each request alone on the device."""
    parts = make_parts(pages=128)
    service = EngineService(parts, Serial(160, parts.units))
    answers = {}
    for arrive in random_requests():
        answers |= service.run_requests([arrive])
    service.close()
    parts.close()
    return answers


@pytest.mark.parametrize("name", policies(132 if HAS_GPU else 8))
@pytest.mark.parametrize("pages", [256, 30], ids=["much memory", "little memory"])
def test_tokens_do_not_depend_on_the_policy(truth: dict[str, list[int]], name: str, pages: int):
    parts = make_parts(pages=pages)
    service = EngineService(parts, policies(parts.units)[name], overlap=HAS_GPU)
    for round in ("cold", "with prefix hits"):
        assert service.run_requests(random_requests()) == truth, round
    service.close()
    parts.close()
