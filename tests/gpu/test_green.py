"""SM partitions: sizes are checked early, and what the hardware reports is what was asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

from counterpoint.device.cuda.green import PartitionError, Partitions, check_levels, granularity

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def test_granularity_follows_the_compute_capability():
    assert granularity((9, 0)) == (8, 8)
    assert granularity((8, 0)) == (4, 2)
    with pytest.raises(PartitionError, match=r"6\.1"):
        granularity((6, 1))


@pytest.mark.parametrize("level", [0, 4, 12, 25, 128, 132, 200])
def test_a_level_off_the_grid_is_refused(level):
    with pytest.raises(ValueError, match=f"{level} decode SMs"):
        check_levels([level], 132, (9, 0))


def test_levels_on_the_grid_are_taken():
    check_levels([8, 16, 64, 124 // 8 * 8], 132, (9, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so():
    with pytest.raises(RuntimeError, match="need a CUDA GPU"):
        Partitions([16])


@gpu
@needs_gpu
class TestOnTheDevice:
    def test_realised_sets_are_disjoint_and_nest(self):
        partitions = Partitions([16, 24, 32, 64])
        assert partitions.isolated
        report = partitions.check()
        total = partitions.total_sms
        for level, sets in report.items():
            assert len(sets.decode) == level and len(sets.prefill) == total - level
            assert not set(sets.decode) & set(sets.prefill)
        levels = sorted(report)
        for small, large in itertools.pairwise(levels):
            assert set(report[small].decode) <= set(report[large].decode)
        partitions.close()

    def test_plain_streams_share_the_device_and_say_so(self):
        partitions = Partitions([32], isolate=False)
        assert not partitions.isolated
        assert partitions.pair(32).decode.sms == partitions.total_sms
        assert len(partitions.check()[32].decode) == partitions.total_sms

    def test_a_lie_is_refused(self):
        partitions = Partitions([16, 32])
        pair = partitions._pairs[16]
        partitions._pairs[16] = type(pair)(prefill=pair.prefill, decode=partitions.pair(32).decode)
        with pytest.raises(PartitionError, match="both run on"):
            partitions.check()
        part = type(pair.decode)
        partitions._pairs[16] = type(pair)(prefill=pair.prefill, decode=part(partitions.pair(32).decode.stream, 16))
        with pytest.raises(PartitionError, match="should run on 16 SMs, but ran on 32"):
            partitions.check()

    def test_an_unknown_level_is_named(self):
        with pytest.raises(ValueError, match="no split with 24"):
            Partitions([16]).pair(24)
