"""Names and labels of /metrics: what the dashboard queries, and what the docs say, is there."""

from __future__ import annotations

import json
import re

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_process import ROOT

from counterpoint.cost_model.roofline import Roofline
from counterpoint.disagg.handoff_events import HandoffEnded, HandoffOutcome, HandoffTimes
from counterpoint.disagg.load_tracker import LoadTracker, WorkerShape
from counterpoint.disagg.messages import HandoffId
from counterpoint.disagg.router import Router
from counterpoint.disagg.routing_feedback import MIN_TRANSFERS, LinkBandwidth
from counterpoint.serve.observability.metrics import DISTRIBUTIONS, Metrics
from counterpoint.serve.observability.pool_metrics import PoolMetrics, WorkerState
from counterpoint.serve.worker.wire import EngineInfo, HandoffStats
from counterpoint.spec.device import device_spec
from counterpoint.spec.presets import PRESETS
from counterpoint.stats import PolicyReport, Stats
from counterpoint.types import AddRequest, DisaggRole, FinishReason, RequestTiming, Role, Sampling

RECORD = RequestTiming(
    id="a",
    arrival_s=1.0,
    admitted_s=1.5,
    finished_s=3.5,
    prompt_tokens=70,
    cached_tokens=16,
    token_s=(2.0, 2.002, 3.5),
    finish_reason=FinishReason.LENGTH,
    preemptions=1,
)
STATS = Stats(
    pages_total=10,
    page_tokens=16,
    split_s=((1, 1, 2.0),),
    lane_s=(("decode", "busy", 1.0),),
    step_s=(("decode", 2, 1, 0.75),),
    policy=PolicyReport(
        errors=(("decode", 0.1, 0.25, 40),),
        cells=(("decode on 2", 1.5, 1.25),),
        decisions={"split": 7},
        fallbacks={"no gain": 6},
    ),
)
HELLO = EngineInfo(
    pid=1,
    policy="auto",
    lanes="two",
    roles=(Role.DECODE, Role.PREFILL),
    vocab=9,
    max_context_tokens=9,
    page_tokens=16,
    kv_tokens=160,
    eos_token_ids=(),
)


TIMES = HandoffTimes(0.1, 0.2, 0.3, 0.4, 0.5, page_layers=10, sending_s=0.1)


def page() -> str:
    metrics = Metrics("some-model")
    metrics.stats, metrics.engine_info = STATS, HELLO
    metrics.observe(RECORD)
    return metrics.render().decode()


def pool_page() -> str:
    """A pool of two workers that have handed one request on."""
    census = HandoffStats(states={"streaming": 1}, pages={"sending": 3}, links={"tcp": 1})
    workers = [WorkerState(name, name, True, 1, 1, STATS, census) for name in ("prefill", "decode")]
    routing = LoadTracker(
        Router(Roofline(PRESETS["qwen3-0.6b"], device_spec("h200")), LinkBandwidth(1e9, 1000))
    )
    for role in (Role.PREFILL, Role.DECODE):
        routing.add_worker(
            role.value, role, WorkerShape(units=1, layers=1, page_tokens=16, pages_total=1000)
        )
    routing.choose_route(
        AddRequest(id="a", prompt=tuple(range(900)), sampling=Sampling(max_tokens=1)), "", ""
    )
    routing.on_first_token("a", 0.5)
    for _ in range(MIN_TRANSFERS):
        routing.on_transfer("prefill", "decode", TIMES)
    metrics = PoolMetrics(lambda: workers, lambda: routing)
    metrics.observe(
        HandoffEnded(
            HandoffId("a", 1),
            DisaggRole.PREFILL,
            HandoffOutcome.SENT,
            times=TIMES,
            decode_worker="decode",
        )
    )
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics)
    return prometheus_client.generate_latest(registry).decode()


def samples(text: str = "") -> dict[str, dict[str, float]]:
    """By name: the value of each set of labels."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text or page()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[json.dumps(sample.labels)] = sample.value
    return found


def test_the_dashboard_queries_what_there_is():
    board = json.loads((ROOT / "docs" / "grafana" / "counterpoint.json").read_text())
    there = samples() | samples(pool_page())
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    queries = [target["expr"] for target in targets] + [
        v["query"] for v in board["templating"]["list"] if v["type"] == "query"
    ]
    assert len(queries) > 30
    for query in queries:
        names = re.findall(r"\b(?:counterpoint_|vllm:)\w+", query)
        assert names and set(names) <= there.keys(), query
        wanted = {
            label.strip()
            for labels in re.findall(r"by \(([^)]*)\)", query)
            for label in labels.split(",")
        }
        wanted |= set(re.findall(r'(\w+)=~?"', query))
        for name in names:
            assert all(wanted <= json.loads(labels).keys() for labels in there[name]), query
    for target in targets:
        (first, *_) = re.findall(r"\bcounterpoint_\w+", target["expr"])
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert all(shown <= json.loads(labels).keys() for labels in there[first]), target
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert (
        len({panel["id"] for panel in board["panels"]}) == len(set(places)) == len(board["panels"])
    )


def test_every_name_is_in_the_docs():
    told = set(
        re.findall(r"`((?:counterpoint_|vllm:)\w+)`", (ROOT / "docs" / "metrics.md").read_text())
    )
    there = set(re.findall(r"^# TYPE (\S+) \w+$", page() + pool_page(), re.MULTILINE))
    assert told == there


def test_labels_of_a_pools_figures_are_in_the_docs():
    docs = (ROOT / "docs" / "metrics.md").read_text()
    for family in text_string_to_metric_families(pool_page()):
        sample = family.samples[0]
        labels = sorted(sample.labels.keys() - {"le"})
        row = next(line for line in docs.splitlines() if f"`{family.name}" in line)
        assert sorted(re.findall(r"`(\w+)`", row.partition("; by ")[2])) == labels, row


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("requests_running", "num_requests_running"),
        ("requests_waiting", "num_requests_waiting"),
        ("kv_usage_ratio", "kv_cache_usage_perc"),
        ("kv_usage_ratio", "gpu_cache_usage_perc"),
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generated_tokens_total", "generation_tokens_total"),
        ("preemptions_total", "num_preemptions_total"),
        ("requests_finished_total", "request_success_total"),
        ("requests_refused_total", "admission_rejections_total"),
        ("inter_token_latency_seconds_bucket", "inter_token_latency_seconds_bucket"),
        ("inter_token_latency_seconds_sum", "time_per_output_token_seconds_sum"),
        ("request_latency_seconds_bucket", "e2e_request_latency_seconds_bucket"),
        ("request_queue_seconds_sum", "request_queue_time_seconds_sum"),
        ("request_prefill_seconds_sum", "request_prefill_time_seconds_sum"),
        ("request_decode_seconds_sum", "request_decode_time_seconds_sum"),
        ("request_inference_seconds_sum", "request_inference_time_seconds_sum"),
        ("request_prompt_tokens_bucket", "request_prompt_tokens_bucket"),
        ("request_generated_tokens_bucket", "request_generation_tokens_bucket"),
    ],
)
def test_other_engines_names_have_the_same_values(ours: str, theirs: str):
    there = samples()
    assert list(there[f"counterpoint_{ours}"].values()) == list(there[f"vllm:{theirs}"].values())
    assert all(
        {"model_name", "engine"} <= json.loads(labels).keys() for labels in there[f"vllm:{theirs}"]
    )


def test_a_requests_times():
    there = {
        name: next(iter(values.values()))
        for name, values in samples().items()
        if name.endswith("_sum")
    }
    times = {
        "time_to_first_token": 1.0,
        "request_queue": 0.5,
        "request_prefill": 0.5,
        "request_decode": 1.5,
    }
    times |= {
        "request_inference": 2.0,
        "request_latency": 2.5,
        "inter_token_latency": 1.5,
        "time_per_output_token": 0.75,
    }
    for name, seconds in times.items():
        assert there[f"counterpoint_{name}_seconds_sum"] == pytest.approx(seconds), name


def test_gaps_are_told_apart_from_one_millisecond_on():
    assert DISTRIBUTIONS["inter_token_latency_seconds"].buckets[:4] == (
        0.001,
        0.0025,
        0.005,
        0.0075,
    )
    buckets = samples()["counterpoint_inter_token_latency_seconds_bucket"]
    counts = {json.loads(labels)["le"]: value for labels, value in buckets.items()}
    assert (counts["0.001"], counts["0.0025"], counts["+Inf"]) == (0, 1, 2), (
        "gaps of 2 ms and 1.498 s"
    )
