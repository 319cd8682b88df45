"""Every metric, against small cases computed by hand."""

from __future__ import annotations

import json
import math

import pytest

from counterpoint.bench.report import ReplayResult, bubble_shares, summarise, wilson_interval
from counterpoint.stats import PolicyReport, Stats
from counterpoint.types import FinishReason, Slo


def summary(records, slo: Slo | dict[str, Slo] = Slo(), detailed=False, **fields):
    return summarise(ReplayResult(records, **fields), slo, detailed)


@pytest.fixture
def three(record):
    """Two answers (four tokens, with one delivery of two; one token) and a failure."""
    return [
        record(
            "a",
            0.0,
            (0.5, 0.6, 0.6, 1.1),
            finished_s=1.25,
            prompt_tokens=100,
            cached_tokens=25,
            preemptions=1,
        ),
        record("b", 1.0, (1.2,), finished_s=1.2, prompt_tokens=60, finish=FinishReason.STOP),
        record("c", 1.5, (1.6, 1.7), finished_s=2.0, finish=FinishReason.ERROR, prompt_tokens=40),
    ]


def test_counts_and_rates_are_of_what_completed(three):
    result = summary(three)
    assert (result["num_prompts"], result["completed"], result["failed"]) == (3, 2, 1)
    assert result["duration"] == 2.0  # first arrival to last end, the failure's too
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (160, 5)
    assert result["request_throughput"] == 1.0
    assert result["output_throughput"] == 2.5
    assert result["total_token_throughput"] == 82.5
    assert result["prefix_hit_share"] == 25 / 160
    assert result["preemptions"] == 1


def test_latencies(three):
    result = summary(three)
    assert result["mean_ttft_ms"] == pytest.approx((500 + 200) / 2)
    assert result["mean_tpot_ms"] == pytest.approx(
        200
    )  # (1.1 - 0.5) / 3; the one-token reply has none
    # gaps between deliveries: 0.1 and 0.5; the two tokens of one instant are one delivery
    assert result["mean_itl_ms"] == pytest.approx(300)
    assert result["max_itl_ms"] == pytest.approx(500)
    assert result["mean_longest_gap_ms"] == pytest.approx(500)
    assert result["mean_e2el_ms"] == pytest.approx((1250 + 200) / 2)
    assert result["std_ttft_ms"] == pytest.approx(150)


def test_percentiles_are_linear_between_ranks(record):
    result = summary([record(str(i), 0.0, (i / 1000,)) for i in range(1, 102)])
    assert [round(result[f"p{p}_ttft_ms"], 6) for p in (50, 90, 95, 99)] == [51, 91, 96, 100]
    assert result["median_ttft_ms"] == result["p50_ttft_ms"]
    assert result["max_ttft_ms"] == pytest.approx(101)


def test_what_is_undefined_is_none_and_the_result_is_plain_json(record):
    result = summary([record("a", 0.0, (), finish=FinishReason.ERROR)], slo=Slo(ttft_s=1.0))
    assert result["mean_ttft_ms"] is None
    assert result["p99_itl_ms"] is None
    assert result["request_throughput"] is None
    assert result["prefix_hit_share"] is None
    assert result["slo_attainment"] == 0.0
    json.dumps(result, allow_nan=False)
    assert summary([])["completed"] == 0


def test_result_is_plain_json(three):
    stats = Stats(split_s=((1, 1, 2.0),))
    result = summary(three, slo=Slo(ttft_s=1.0), after=stats, lag_s=(0.1, 0.2, 0.3), detailed=True)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_concurrency_and_busiest_second(record):
    records = [
        record("a", 10.0, (10.1, 10.2, 11.3), finished_s=11.3),
        record("b", 10.5, (11.1, 11.2), finished_s=11.2),
        record("c", 11.3, (11.9,), finished_s=11.9),  # arrives as a ends
    ]
    result = summary(records)
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == 4  # 11.1, 11.2, 11.3, 11.9


def test_the_busiest_second_of_a_load_of_many_years(record):
    records = [record("a", 0.0, (0.1, 0.2)), record("b", 1e300, (1e300,))]
    assert summary(records)["max_output_tokens_per_s"] == 2


# ---------------------------------------------------------------- SLO


def test_goodput_and_attainment_are_over_everything_sent(three):
    result = summary(three, slo=Slo(ttft_s=0.3))
    assert (
        result["slo_attainment"] == 1 / 3
    )  # b; a is late, c failed though its first token was early
    assert result["request_goodput"] == 0.5
    assert result["slo_attainment_ttft"] == 1 / 3
    assert result["slo_attainment_tpot"] == 2 / 3
    low, high = result["slo_attainment_ci95"]
    assert low < 1 / 3 < high


def test_each_target_is_held(record):
    records = [record("a", 0.0, (0.5, 0.6, 1.1))]  # ttft 0.5, tpot 0.3, longest gap 0.5

    def attained(**targets: float) -> float:
        return summary(records, slo=Slo(**targets))["slo_attainment"]

    assert attained(ttft_s=0.5, tpot_s=0.31, itl_s=0.51) == 1
    assert attained(ttft_s=0.49) == 0
    assert attained(tpot_s=0.29) == 0
    assert attained(itl_s=0.49) == 0


def test_one_token_replies_meet_targets_between_tokens(record):
    result = summary([record("a", 0.0, (0.5,))], slo=Slo(tpot_s=0.001, itl_s=0.001))
    assert result["slo_attainment"] == 1
    assert result["mean_tpot_ms"] is None


def test_aborted_requests_are_misses(record):
    records = [
        record("a", 0.0, (0.1, 0.2), finish=FinishReason.ABORT),
        record("b", 0.0, (0.1, 0.2)),
    ]
    result = summary(records, slo=Slo(ttft_s=1.0))
    assert (result["failed"], result["slo_attainment"]) == (1, 0.5)


def test_targets_may_differ_by_request(record):
    records = [record("a", 0.0, (0.5,)), record("b", 0.0, (0.5,)), record("c", 0.0, (0.5,))]
    result = summary(records, slo={"a": Slo(ttft_s=0.4), "b": Slo(ttft_s=0.6)})
    assert result["slo_attainment"] == 2 / 3  # c has no target: answered is good


def test_without_targets_there_is_no_goodput(record):
    result = summary([record("a", 0.0, (0.5,))])
    assert result["request_goodput"] is None
    assert result["slo_attainment"] is None


def test_wilson_interval():
    # by the formula of Wilson 1927 for 8 of 10: centre (0.8 + z²/20) / (1 + z²/10)
    z2 = 1.959963984540054**2
    centre = (0.8 + z2 / 20) / (1 + z2 / 10)
    half = math.sqrt(z2) / (1 + z2 / 10) * math.sqrt(0.8 * 0.2 / 10 + z2 / 400)
    assert wilson_interval(8, 10) == pytest.approx((centre - half, centre + half))
    assert wilson_interval(8, 10) == pytest.approx((0.49016, 0.94330), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.72247, 1.0), abs=1e-4)
    assert wilson_interval(0, 0) is None
    narrow, wide = wilson_interval(900, 1000), wilson_interval(9, 10)
    assert narrow and wide and narrow[1] - narrow[0] < wide[1] - wide[0]


# ---------------------------------------------------------------- engine and load generator


def test_split_shares_are_of_this_run_only(record):
    before = Stats(split_s=((2, 0, 5.0), (1, 1, 1.0)), preemptions=3, resplits=10)
    after = Stats(
        split_s=((2, 0, 5.0), (1, 1, 3.0), (0, 1, 1.0), (0, 2, 1.0)), preemptions=5, resplits=14
    )
    result = summary([record("a", 0.0, (0.5,))], after=after, before=before)
    shares = {
        (s["prefill_units"], s["decode_units"]): (s["share"], s["share_while_both"])
        for s in result["split_share"]
    }
    assert shares == {(1, 1): (0.5, 1.0), (0, 1): (0.25, None), (0, 2): (0.25, None)}
    assert (result["preemptions"], result["resplits"]) == (2, 4)


def test_a_late_generator_says_so(record):
    records = [record("a", 0.0, (0.5,))]
    punctual = summary(records, lag_s=[0.001] * 100)
    assert punctual["degraded"] is False
    assert punctual["p50_send_lag_ms"] == pytest.approx(1)
    late = summary(records, lag_s=[0.001] * 95 + [0.2] * 5)
    assert late["degraded"] is True
    assert late["p99_send_lag_ms"] == pytest.approx(200)


def test_details_keep_one_entry_per_request(three):
    result = summary(three, errors={"c": "HTTP 500"}, detailed=True)
    assert result["ids"] == ["a", "b", "c"]
    assert result["errors"] == ["", "", "HTTP 500"]
    assert result["output_lens"] == [4, 1, 2]
    assert result["itls"][0] == pytest.approx([0.1, 0.5])
    assert result["ttfts"] == pytest.approx([0.5, 0.2, 0.1])
    assert "ids" not in summary(three)


def test_the_engines_inside_is_of_this_run_only(record):
    before = Stats(
        lane_s=(("decode", "busy", 1.0),),
        step_s=(("decode", 2, 2, 1.0),),
        policy=PolicyReport(decisions={"split": 4, "fused": 1}),
    )
    after = Stats(
        units_total=2,
        split_s=((0, 2, 4.0),),
        lane_s=(("decode", "busy", 4.0), ("decode", "memory", 1.0)),
        step_s=(("decode", 2, 2, 1.0), ("decode", 2, 1, 3.0)),
        active_unit_s=6.0,
        resplits=2,
        policy=PolicyReport(
            errors=(("decode", 0.1, 0.2, 9),),
            cells=(("decode on 2", 1.1, 1.3),),
            decisions={"split": 6, "fused": 1},
            fallbacks={"fused gains more": 1},
        ),
    )
    result = summary([record("a", 0.0, (0.5,))], after=after, before=before)
    assert [(part["state"], part["seconds"], part["share"]) for part in result["lane_share"]] == [
        ("busy", 3.0, 0.75),
        ("memory", 1.0, 0.25),
    ]
    assert result["unit_seconds"] == [
        {"kind": "decode", "units": 2, "realised_units": 1, "seconds": 3.0}
    ]
    assert (result["active_share"], result["resplits_per_s"]) == (0.75, 0.5)
    assert result["prediction_error"] == {"decode": {"p50": 0.1, "p95": 0.2, "steps": 9}}
    assert result["prediction_cells"] == [{"cell": "decode on 2", "ratio": 1.1, "guard": 1.3}]
    assert result["decisions"] == {"split": 2} and result["fallbacks"] == {"fused gains more": 1}


def test_bubbles_are_idle_units_while_a_request_is_present(record):
    """Requests are present in [0, 2), [1, 4) and [6, 7): 5 s. One engine uses all its 10 units
    for 2 s, and 4 and 2 of them for 1 s; the other, of the same size, runs mixed steps on all
    for 5 s."""
    there = [
        record("b", 1.0, (3.0,), finished_s=4.0),
        record("a", 0.0, (1.0,), finished_s=2.0),
        record("c", 6.0, (7.0,), finished_s=7.0),
    ]
    one = Stats(units_total=10, split_s=((0, 10, 2.0), (4, 2, 1.0)))
    two = Stats(units_total=10, split_s=((10, 10, 5.0),))
    assert bubble_shares([("one", one), ("two", two)], there) == pytest.approx(
        {"one": 1 - 26 / 50, "two": 0.0, "all": 0.24}
    )
    assert bubble_shares([("one", one)], []) == {"one": None, "all": None}
