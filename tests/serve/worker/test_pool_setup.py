"""What a pool refuses before any worker is started, and how a machine is dealt out."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

from counterpoint.builder.worker_setup import (
    claim_gpu,
    link_bytes_per_s,
    make_transports,
    workers_on_gpu,
)
from counterpoint.config import Config, ConfigError
from counterpoint.serve.worker.pool_setup import make_rebalancer, shared_token


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prefill": 1}, "decode is 0"),
        ({"decode": 2}, "prefill is 0"),
        ({"replicas": -1}, "replicas is -1"),
        ({"cluster_listen": "7000"}, "HOST:PORT"),
        ({"cluster_listen": "host:port"}, "HOST:PORT"),
        ({"worker_lost_s": 0.0}, "worker_lost_s"),
        ({"worker_lost_s": math.nan}, "worker_lost_s"),
        ({"ttft_weight": math.nan}, "ttft_weight"),
        ({"chunk_tokens": 1}, "chunk_tokens is 1"),
        ({"transport": "pigeon"}, "transport"),
        ({"cluster_token": "a", "cluster_token_file": "b"}, "give one"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        Config().replace(**settings)


def test_other_machines_need_a_token(tmp_path):
    with pytest.raises(ConfigError, match="token"):
        shared_token(Config(), "0.0.0.0")
    assert shared_token(Config().replace(cluster_token="a secret"), "0.0.0.0") == "a secret"
    assert shared_token(Config(), "127.0.0.1") != shared_token(Config(), "127.0.0.1"), (
        "a token that could be known"
    )
    (tmp_path / "token").write_text("from a file\n")
    assert (
        shared_token(Config().replace(cluster_token_file=str(tmp_path / "token")), "10.0.0.1")
        == "from a file"
    )
    with pytest.raises(ConfigError, match="cluster_token_file"):
        shared_token(Config().replace(cluster_token_file=str(tmp_path / "none")), "127.0.0.1")


def test_the_token_is_never_shown():
    assert "hush" not in repr(Config().replace(cluster_token="hush"))


def test_roles_need_targets_to_follow():
    with pytest.raises(ConfigError, match="ttft_s and tpot_s"):
        make_rebalancer(Config().replace(replicas=2, elastic=True))
    assert make_rebalancer(Config().replace(replicas=2)) is None


def test_gpus_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch):
    assert [workers_on_gpu(rank, 5, 2) for rank in range(5)] == [3, 2, 3, 2, 3]
    assert [workers_on_gpu(rank, 2, 4) for rank in range(2)] == [1, 1]
    taken = []
    for rank in (0, 1, 2, None):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
        claim_gpu(Config(), rank, 3)
        taken.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert taken == ["2", "5", "2", "2,5"], "one that was given its GPU chooses none"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert claim_gpu(Config().replace(device="cpu"), 1, 3) == ("cpu", 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,5"


def test_a_transport_fits_its_device():
    with pytest.raises(ConfigError, match="cuda-ipc, which does not carry KV of device cpu"):
        make_transports(Config().replace(transport="cuda-ipc"), lambda: None)
    with pytest.raises(ConfigError, match="nixl, which does not carry KV of device cuda"):
        make_transports(Config().replace(transport="nixl"), lambda: None, "cuda")


def test_a_link_is_priced_by_its_transport():
    set_by_hand = Config().replace(link_bytes_per_s=5e9)
    assert [link_bytes_per_s(config, "NVIDIA H200") for config in (Config(), set_by_hand)] == [
        1e11,
        5e9,
    ]
    assert (
        link_bytes_per_s(Config(), "")
        == link_bytes_per_s(Config().replace(transport="tcp"), "NVIDIA H200")
        == 1e9
    )
