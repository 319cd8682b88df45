"""The HTTP client of a replay: sends one query, reads one stream of tokens.

Owns: the request body, server-sent events, the time of each token, and what counts as a failure.
Every query ends in exactly one RequestTiming; a failure keeps its message.
Must not: decide when a query is sent (replay.py), or judge latencies (report.py).

It works with any server of the OpenAI API. Common extensions: `ignore_eos` fixes the length of the
answer, `continuous_usage_stats` puts the token count into every chunk. `slo`, the query's targets,
is our own; other servers ignore it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from counterpoint.bench.workload import Query, TokenRange, prompt_ids
from counterpoint.stats import PolicyReport, Stats
from counterpoint.types import FinishReason, RequestTiming


@dataclasses.dataclass(frozen=True, slots=True)
class HttpTarget:
    """A server. `url` with or without /v1. `extensions`: send the extensions above, and require the
    exact output length."""

    url: str
    model: str
    api_key: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    extensions: bool = True
    temperature: float = 0.0
    timeout_s: float = 600.0

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def path(self) -> str:
        return f"{self.root}/v1/{'chat/completions' if self.endpoint == 'chat' else 'completions'}"

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, query: Query, tokens: TokenRange, seed: int) -> bytes:
        """The request as JSON. A synthetic prompt is sent as token ids, which only completions
        accept."""
        body: dict[str, object] = {"model": self.model}
        if self.endpoint == "chat":
            messages = query.messages or (("user", query.prompt),)
            if query.prompt is None or query.ids is not None:
                raise ValueError(
                    f"query {query.number} is token ids: the chat endpoint takes texts; use "
                    "completions"
                )
            body["messages"] = [{"role": role, "content": content} for role, content in messages]
        elif query.messages:
            raise ValueError(f"query {query.number} is chat messages: send it with --endpoint chat")
        else:
            body["prompt"] = (
                query.prompt if isinstance(query.prompt, str) else prompt_ids(query, tokens, seed)
            )
        body |= {"max_tokens": query.output_tokens, "temperature": self.temperature, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.extensions:
            body["ignore_eos"] = True
            if targets := {
                name: value
                for name, value in msgspec.structs.asdict(query.slo).items()
                if value is not None
            }:
                body["slo"] = targets
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return msgspec.json.encode(body)


# ---------------------------------------------------------------- /metrics

# Stats fields by metric name.
METRIC_FIELDS = {
    "counterpoint_requests_waiting": "waiting",
    "counterpoint_requests_running": "running",
    "counterpoint_kv_pages_total": "pages_total",
    "counterpoint_kv_pages_free": "pages_free",
    "counterpoint_kv_pages_cached": "pages_cached",
    "counterpoint_kv_page_tokens": "page_tokens",
    "counterpoint_prefix_queries_tokens_total": "prefix_queries_tokens",
    "counterpoint_prefix_hits_tokens_total": "prefix_hits_tokens",
    "counterpoint_prompt_tokens_total": "prompt_tokens",
    "counterpoint_generated_tokens_total": "generated_tokens",
    "counterpoint_preemptions_total": "preemptions",
    "counterpoint_steps_total": "steps",
    "counterpoint_resplits_total": "resplits",
    "counterpoint_overtakes_total": "overtakes",
    "counterpoint_units": "units_total",
}
PREFIX = "counterpoint_"


def read_stats(text: str) -> Stats | None:
    """The engine's Stats from a /metrics page; None if the page is another engine's."""
    found: dict[str, Any] = {}
    tables: dict[str, list[tuple[dict[str, str], float]]] = collections.defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in METRIC_FIELDS:
                found[METRIC_FIELDS[sample.name]] = found.get(METRIC_FIELDS[sample.name], 0) + int(
                    sample.value
                )
            elif sample.name.startswith(PREFIX):
                tables[sample.name.removeprefix(PREFIX)].append((sample.labels, sample.value))
    if "pages_total" not in found:
        return None
    return Stats(
        **found,
        split_s=tuple(
            (int(at["prefill_units"]), int(at["decode_units"]), s)
            for at, s in tables["split_seconds_total"]
        ),
        lane_s=tuple((at["lane"], at["state"], s) for at, s in tables["lane_seconds_total"]),
        step_s=tuple(
            (at["kind"], int(at["units"]), int(at["realised_units"]), s)
            for at, s in tables["step_seconds_total"]
        ),
        active_unit_s=sum(s for _, s in tables["active_unit_seconds_total"]),
        policy=read_policy(tables),
    )


def read_policy(tables: Mapping[str, list[tuple[dict[str, str], float]]]) -> PolicyReport:
    quantiles = {
        (at["kind"], at["quantile"]): value for at, value in tables["prediction_error_ratio"]
    }
    steps = {at["kind"]: int(value) for at, value in tables["prediction_steps"]}
    guards = {at["cell"]: value for at, value in tables["prediction_guard"]}
    return PolicyReport(
        errors=tuple(
            (kind, quantiles[kind, "0.5"], quantiles[kind, "0.95"], count)
            for kind, count in steps.items()
        ),
        cells=tuple(
            (at["cell"], ratio, guards[at["cell"]]) for at, ratio in tables["prediction_ratio"]
        ),
        decisions={at["decision"]: int(count) for at, count in tables["decisions_total"]},
        fallbacks={at["reason"]: int(count) for at, count in tables["fallbacks_total"]},
    )


async def scrape(http: httpx.AsyncClient, target: HttpTarget) -> Stats | None:
    """The Stats of the server at `target`, or None if it has none."""
    try:
        response = await http.get(f"{target.root}/metrics", timeout=10.0)
    except httpx.HTTPError:
        return None
    return read_stats(response.text) if response.status_code == 200 else None


# ---------------------------------------------------------------- the stream


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Text | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        if self.delta is None:
            return bool(self.text)
        return bool(self.delta.content or self.delta.reasoning or self.delta.reasoning_content)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class StreamedReply:
    """What one stream has returned. `deliveries`: (time, tokens) of each chunk that had any."""

    def __init__(self) -> None:
        self.deliveries: list[tuple[float, int]] = []
        self.total_tokens: int | None = None  # as counted by the server
        self.prompt_tokens: int | None = None
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.error = ""
        self._num_delivered = 0
        self._has_uncounted_chunk = False
        self._partial_line = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Takes bytes that arrived at `now_s`; events may be cut anywhere."""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload != b"[DONE]":
                    self._on_chunk(_decode(payload), now_s)

    def _on_chunk(self, chunk: _Chunk, now_s: float) -> None:
        if chunk.error is not None:
            self.error = f"error event: {str(chunk.error)[:300]}"
        had_output = False
        for choice in chunk.choices:
            had_output = had_output or choice.has_output
            self.finish_reason = choice.finish_reason or self.finish_reason
        usage = chunk.usage
        if usage is None or usage.completion_tokens is None:
            if had_output:
                self._has_uncounted_chunk = True
                self._deliver(now_s, 1)
            return
        self.total_tokens, self.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        new = usage.completion_tokens - self._num_delivered
        if self._has_uncounted_chunk:
            new = int(had_output)
        if new > 0:
            self._deliver(now_s, new)

    def _deliver(self, now_s: float, tokens: int) -> None:
        self.deliveries.append((now_s, tokens))
        self._num_delivered += tokens

    @property
    def times_are_estimated(self) -> bool:
        """Chunks came without token counts, and not with one token each."""
        total = self.total_tokens
        return total is not None and total != self._num_delivered and bool(self.deliveries)

    def token_times(self) -> tuple[float, ...]:
        """One time per token. If estimated, the total is divided evenly among the chunks."""
        if not self.times_are_estimated:
            return tuple(time_s for time_s, tokens in self.deliveries for _ in range(tokens))
        total, chunks = self.total_tokens or 0, len(self.deliveries)
        return tuple(self.deliveries[i * chunks // total][0] for i in range(total))


class EncodedQuery(NamedTuple):
    query: Query
    body: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class QueryResult:
    """The end of one query. `lag_s`: how late it was sent."""

    record: RequestTiming
    error: str
    lag_s: float
    times_are_estimated: bool


async def send_query(
    http: httpx.AsyncClient,
    target: HttpTarget,
    request: EncodedQuery,
    due_s: float,
    clock: Callable[[], float],
) -> QueryResult:
    """Send `request` now and read its stream to the end. `clock` gives seconds; `due_s` is when it
    should have been sent."""
    query, body = request
    reply = StreamedReply()
    sent_s = clock()
    try:
        headers = {"Content-Type": "application/json"}
        async with http.stream("POST", target.path, content=body, headers=headers) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                reply.error = f"HTTP {response.status_code}: {text[:300]}"
            else:
                async for data in response.aiter_bytes():
                    reply.feed(data, clock())
    except (httpx.HTTPError, OSError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    except msgspec.DecodeError as error:
        reply.error = f"an event is not JSON of the API: {error}"
    ended_s = clock()
    error = reply.error or _incomplete_reason(target, query, reply)
    record = RequestTiming(
        id=query.id,
        arrival_s=sent_s,
        admitted_s=None,
        finished_s=ended_s,
        prompt_tokens=query.prompt_tokens if reply.prompt_tokens is None else reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        token_s=reply.token_times(),
        finish_reason=FinishReason.ERROR
        if error
        else FinishReason.STOP
        if reply.finish_reason == "stop"
        else FinishReason.LENGTH,
        preemptions=0,
    )
    return QueryResult(record, error, max(0.0, sent_s - due_s), reply.times_are_estimated)


def _incomplete_reason(target: HttpTarget, query: Query, reply: StreamedReply) -> str:
    """Why a stream that ended without an error is not a complete answer; empty if it is."""
    if reply.finish_reason is None:
        return "the stream ended without a finish_reason"
    got = len(reply.token_times())
    if target.extensions and got != query.output_tokens:
        return f"asked for {query.output_tokens} tokens with ignore_eos, got {got}"
    if got == 0:
        return "the answer is empty"
    return ""
