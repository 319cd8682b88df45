"""Simulated workers that hand requests over to each other."""

from __future__ import annotations

import dataclasses

import pytest
from sim_builders import Constant

from counterpoint.bench.workload import Lengths, PrefixGroups, Query, SyntheticLoad
from counterpoint.config import Config
from counterpoint.simulator.machine import Machine, kv_token_bytes
from counterpoint.simulator.simulate import SimResult, SimRun, simulate
from counterpoint.spec.device import device_spec
from counterpoint.spec.presets import PRESETS
from counterpoint.types import FinishReason

H200 = Machine(PRESETS["llama-3.1-8b"], device_spec("h200"))
SECOND = dataclasses.replace(
    H200, physics=Constant(1.0), host_s=0.0, depth=1
)  # every step takes a second
PLAIN = {"policy": "serial", "prefix_cache": False}
ONE_ONE = {"prefill": 1, "decode": 1, "local_tokens": 0}


def load(count: int, rate: float, prompt: int = 400, output: int = 40) -> list[Query]:
    groups = PrefixGroups(5, 0.5)
    return SyntheticLoad(
        count,
        Lengths(prompt, "lognormal", 0.8),
        Lengths(output, "lognormal", 0.8),
        rate=rate,
        groups=groups,
    ).queries()


def check_whole(queries: list[Query], came: SimResult) -> None:
    assert not came.errors
    for query, record in zip(queries, came.records, strict=True):
        assert (
            record.id == query.id
            and record.finish_reason is FinishReason.LENGTH
            and len(record.token_s) == query.output_tokens
        )
        assert (
            record.admitted_s is not None
            and query.arrival_s <= record.admitted_s < record.token_s[0]
        )
        assert (
            list(record.token_s) == sorted(record.token_s)
            and record.finished_s == record.token_s[-1]
        )
    for name, stats in came.workers:
        assert stats.waiting == stats.running == 0, name
        assert stats.pages_free + stats.pages_cached == stats.pages_total, f"{name} has lost a page"


def tokens_by_kind(came: SimResult) -> dict[str, set[str]]:
    return {
        name: {kind for kind, _, _, seconds in stats.step_s if seconds}
        for name, stats in came.workers
    }


@pytest.mark.parametrize("policy", ["serial", "chunked", "multiplex", "auto"])
@pytest.mark.parametrize(
    "pools",
    [{"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 3, "local_tokens": 0}, {"replicas": 3}],
    ids=str,
)
def test_every_request_gets_all_of_its_answer(policy, pools):
    queries = load(120, rate=60)
    config = Config().replace(policy=policy, ttft_s=1.0, tpot_s=0.03, **pools)
    came = simulate(H200, queries, config)
    check_whole(queries, came)
    assert came == simulate(H200, queries, config)


def test_a_handoff_costs_its_transfer_and_a_word():
    """A prompt of one step, its KV behind it over a link that takes three seconds, and a step for
    each token after the first."""
    prompt = 1000  # 63 pages
    link = kv_token_bytes(H200.model, H200.device, Config()) * 63 * 16 / 3.0
    config = Config().replace(**PLAIN, **ONE_ONE, kv_grain="prompt", link_bytes_per_s=link)
    came = simulate(SECOND, [Query(0, 0.0, prompt, 4)], config)
    first, *rest = came.records[0].token_s
    assert first == pytest.approx(1.0)
    assert rest == pytest.approx(
        [5.002, 6.002, 7.002]
    )  # 1 + 3 for the KV, 2 ms for the word, and a second each


def test_layers_leave_while_the_rest_is_computed():
    link = kv_token_bytes(H200.model, H200.device, Config()) * 63 * 16 / 0.8
    config = Config().replace(
        **PLAIN, **ONE_ONE, layer_group=8, kv_grain="layer", link_bytes_per_s=link
    )
    came = simulate(SECOND, [Query(0, 0.0, 1000, 2)], config)
    first, second = came.records[0].token_s
    assert first == pytest.approx(4.0)  # four groups of a second
    assert second == pytest.approx(
        first + 0.2 + 0.002 + 1.0
    )  # only the last group's fifth of a second is left


def test_each_worker_keeps_to_its_part():
    came = simulate(H200, load(60, rate=60), Config().replace(**ONE_ONE, policy="chunked"))
    assert tokens_by_kind(came) == {"prefill-0": {"prefill"}, "decode-0": {"decode"}}
    came = simulate(
        H200,
        load(60, rate=60),
        Config().replace(prefill=1, decode=1, local_tokens=1 << 20, policy="chunked"),
    )
    assert not tokens_by_kind(came)["prefill-0"], (
        "what is short enough is prefilled where it is decoded"
    )


def test_replicas_share_the_load():
    queries = load(200, rate=60)
    came = simulate(H200, queries, Config().replace(replicas=2, policy="chunked"))
    shares = [stats.generated_tokens for _, stats in came.workers]
    assert sum(shares) == sum(q.output_tokens for q in queries) and min(shares) > 0.3 * sum(shares)


def test_what_the_decode_worker_has_no_room_for_goes_on_all_the_same():
    """Sixty answers at once take all of its pages: some are decoded where they were prefilled."""
    queries = [Query(i, 0.0, 300, 400) for i in range(60)]
    came = simulate(SECOND, queries, Config().replace(**PLAIN, **ONE_ONE, kv_pages=300))
    check_whole(queries, came)
    assert "decode" in tokens_by_kind(came)["prefill-0"]


@pytest.mark.parametrize("pools", [{"replicas": 2}, ONE_ONE], ids=str)
def test_a_prompt_that_fills_a_pool_is_answered_and_one_that_no_pool_holds_is_refused(pools):
    queries = [Query(i, 0.0, 16 * 50 - 2, 2) for i in range(3)]
    config = Config().replace(**PLAIN, **pools, kv_pages=50)
    check_whole(queries, simulate(SECOND, queries, config))
    came = simulate(SECOND, [*queries, Query(3, 0.0, 16 * 50 + 1, 2)], config)
    assert came.errors == {"q3": "no worker can take the request"}


def test_a_worker_without_a_free_slot_is_not_waited_for():
    """Of two alike, each may run eight; forty that come at once are answered by both."""
    queries = [Query(i, 0.01 * i, 100, 30) for i in range(40)]
    came = simulate(SECOND, queries, Config().replace(**PLAIN, prefill=1, decode=1, max_running=8))
    check_whole(queries, came)
    shares = [stats.generated_tokens for _, stats in came.workers]
    assert min(shares) > 0.3 * sum(shares)


def test_what_belongs_to_one_engine_is_refused():
    with pytest.raises(ValueError, match="--timeline"):
        simulate(
            H200,
            load(2, rate=1),
            Config().replace(**ONE_ONE),
            run=SimRun(timeline="trace.json"),
        )
