"""SM partitions: sizes are checked early, and the hardware reports the SMs asked for."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from counterpoint.config import Config, ConfigError
from counterpoint.device.cuda.green_contexts import (
    PartitionError,
    PartitionPair,
    Partitions,
    check_levels,
    granularity,
)
from counterpoint.device.cuda.kernels.nvcc import KernelError, load_library
from counterpoint.device.cuda.partition_setup import split_device

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def test_granularity_follows_the_compute_capability():
    assert granularity((9, 0)) == (8, 8)
    assert granularity((8, 0)) == (4, 2)
    with pytest.raises(PartitionError, match=r"6\.1"):
        granularity((6, 1))


@pytest.mark.parametrize("level", [0, 4, 12, 25, 128, 132, 200])
def test_a_level_off_the_granularity_is_rejected(level):
    with pytest.raises(ValueError, match=f"{level} decode SMs"):
        check_levels([level], 132, (9, 0))


def test_valid_levels_are_accepted():
    check_levels([8, 16, 64, 124 // 8 * 8], 132, (9, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so():
    with pytest.raises(RuntimeError, match="need a CUDA GPU"):
        Partitions([16])


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A GPU on a system with neither cuda-bindings nor a compiler."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr("counterpoint.device.cuda.kernels.nvcc.CACHE", tmp_path)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)


def test_an_unwritable_kernel_cache_raises_kernel_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: "nvcc")
    with pytest.raises(KernelError, match="/dev/null/kernels"):
        load_library("smid", "90a", cache=Path("/dev/null/kernels"))


@pytest.mark.usefixtures("bare")
class TestWithoutACompiler:
    def test_an_unsplit_device_needs_no_compiler(self):
        assert split_device(Config().replace(policy="chunked"))[1] == ()

    def test_a_device_without_partitions_uses_plain_streams(self):
        with pytest.warns(RuntimeWarning, match="NO SM PARTITIONS"):
            partitions, notes = split_device(Config().replace(policy="auto"))
        assert not partitions.isolated and "plain streams" in notes[0]

    def test_a_split_that_cannot_be_checked_raises_config_error(
        self, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(
            Partitions,
            "_split",
            lambda self, level: PartitionPair(self.full, self.full_high_priority),
        )
        with pytest.raises(ConfigError, match=r"nvcc.*policy to chunked"):
            split_device(Config().replace(policy="auto"))


@gpu
@needs_gpu
class TestOnTheDevice:
    def test_measured_sm_sets_are_disjoint_and_nested(self):
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

    def test_plain_streams_share_the_device(self):
        partitions = Partitions([32], isolate=False)
        assert not partitions.isolated
        assert partitions.pair(32).decode.sms == partitions.total_sms
        assert len(partitions.check()[32].decode) == partitions.total_sms

    def test_wrong_sm_sets_raise_partition_error(self):
        partitions = Partitions([16, 32])
        pair = partitions._pairs[16]
        partitions._pairs[16] = type(pair)(prefill=pair.prefill, decode=partitions.pair(32).decode)
        with pytest.raises(PartitionError, match="both run on"):
            partitions.check()
        part = type(pair.decode)
        partitions._pairs[16] = type(pair)(
            prefill=pair.prefill, decode=part(partitions.pair(32).decode.stream, 16)
        )
        with pytest.raises(PartitionError, match="should run on 16 SMs, but ran on 32"):
            partitions.check()

    def test_an_unknown_level_raises_value_error(self):
        with pytest.raises(ValueError, match="no split with 24"):
            Partitions([16]).pair(24)
