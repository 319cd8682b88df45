"""What a pool refuses before any worker is started, and how a machine is dealt out."""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any

import pytest

from counterpoint.config import Config, ConfigError
from counterpoint.disagg.peer_connection import Address
from counterpoint.serve.observability.merge_stats import merge, without_gauges
from counterpoint.serve.worker.pool import make_rebalancer
from counterpoint.serve.worker.registry import shared_token
from counterpoint.serve.worker.supervisor import ProcessLauncher, Supervisor, divide_cores
from counterpoint.types import Stats
from counterpoint.worker_setup import (
    claim_gpu,
    link_bytes_per_s,
    make_transports,
    workers_on_gpu,
)


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


def test_cores_are_dealt_out_among_workers():
    assert divide_cores((0, 1, 2, 3), 2) == [(0, 1), (2, 3)]
    assert divide_cores((0, 1, 2), 2) == [(0,), (1, 2)]
    assert divide_cores((4, 6), 4) == [(4,), (6,), (4,), (6,)]
    assert divide_cores((0, 1), 0) == []


def test_a_worker_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    """The machine has no process, file or memory left for a moment."""

    async def full(*command: str, **settings: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def work() -> list[str]:
        ended: asyncio.Queue[str] = asyncio.Queue()
        crew = Supervisor(
            Config().replace(replicas=1),
            "",
            ProcessLauncher(1),
            lambda name, how: ended.put_nowait(how),
        )
        await crew.open()
        crew.start(Address("127.0.0.1", 1), "token")
        hows = [await asyncio.wait_for(ended.get(), 10) for _ in range(2)]
        await crew.close()
        return hows

    monkeypatch.setattr("counterpoint.serve.worker.supervisor.PAUSE_S", (0.01, 0.01))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    assert all("Resource temporarily unavailable" in how for how in asyncio.run(work()))


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


def test_counters_do_not_fall_when_a_worker_goes():
    a = Stats(
        running=1,
        steps=5,
        generated_tokens=7,
        pages_total=10,
        page_tokens=16,
        finished={"stop": 2},
        split_s=((1, 0, 2.0),),
    )
    b = Stats(
        running=2,
        steps=1,
        generated_tokens=3,
        pages_total=10,
        page_tokens=16,
        finished={"stop": 1},
        split_s=((1, 0, 1.0),),
    )
    both, left = merge([a, b]), merge([without_gauges(a), b])
    assert (both.steps, both.generated_tokens, both.finished, both.split_s) == (
        6,
        10,
        {"stop": 3},
        ((1, 0, 3.0),),
    )
    assert (left.steps, left.generated_tokens, left.finished, left.split_s) == (
        6,
        10,
        {"stop": 3},
        ((1, 0, 3.0),),
    )
    assert (both.running, left.running, both.pages_total, left.pages_total) == (3, 2, 20, 10)
