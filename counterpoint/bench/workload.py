"""The load: which requests arrive when, and with which tokens.

Owns: Query, the synthetic generators (arrivals, lengths, prefix groups), the tokens of a prompt.
Everything follows from a seed, on every machine. Two prompts share a prefix exactly as far as their
blocks do. Must not: read a file or a clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from counterpoint.types import Slo

Message = tuple[str, str]  # role, content
NO_SLO = Slo()
Arrivals = Literal["poisson", "gamma", "constant", "once"]
MAX_LENGTH_TOKENS = 2**24  # above any context


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """One request of a load, sent `arrival_s` seconds after its start.

    `prompt_tokens` is the prompt's length. Its content is `prompt`, if given: a text, token ids, or
    chat messages as (role, content) pairs; except for ids, `prompt_tokens` is then an estimate.
    Otherwise `prompt_ids` generates it: `prefix_ids` identify its first blocks of `block_tokens`
    tokens, where equal leading ids mean equal tokens. Tokens after them are unique to this query.

    `number` identifies a query within the load and survives transforms. `session` is its
    conversation.
    """

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    prompt: str | tuple[int, ...] | tuple[Message, ...] | None = None
    session: str = ""
    slo: Slo = NO_SLO

    def __post_init__(self) -> None:
        for name, tokens in (
            ("prompt_tokens", self.prompt_tokens),
            ("output_tokens", self.output_tokens),
        ):
            if not 1 <= tokens <= MAX_LENGTH_TOKENS:
                raise ValueError(
                    f"query {self.number}: {name} is {tokens}: it must be 1 to {MAX_LENGTH_TOKENS}"
                )
        if self.prefix_ids and not 1 <= self.block_tokens <= MAX_LENGTH_TOKENS:
            given = f"prefix_ids, and block_tokens is {self.block_tokens}"
            raise ValueError(
                f"query {self.number}: {given}: say how many tokens a block has, 1 to "
                f"{MAX_LENGTH_TOKENS}"
            )

    @property
    def id(self) -> str:
        return f"q{self.number}"

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The token ids, if the prompt is given as such."""
        if self.prompt is None or isinstance(self.prompt, str):
            return None
        ids = tuple(part for part in self.prompt if isinstance(part, int))
        return ids if len(ids) == len(self.prompt) else None

    @property
    def messages(self) -> tuple[Message, ...] | None:
        """The chat messages, if the prompt is given as such."""
        if self.prompt is None or isinstance(self.prompt, str):
            return None
        return tuple(part for part in self.prompt if not isinstance(part, int)) or None


# ---------------------------------------------------------------- arrivals


def arrival_times(
    count: int, kind: Arrivals, rate: float, rng: np.random.Generator, burstiness: float = 1.0
) -> NDArray[np.float64]:
    """Times of `count` arrivals in seconds, ascending, the first at 0.

    Gaps are gamma distributed with shape `burstiness`, so their coefficient of variation is
    1/sqrt(burstiness). poisson is shape 1, constant the limit of large shapes. Gaps are scaled to a
    mean of exactly 1/rate, so that all seeds offer the same load. once: all at 0."""
    if kind == "once" or count < 2 or np.isinf(rate):
        return np.zeros(count)
    if not rate > 0:
        raise ValueError(f"rate is {rate}: it must be more than 0 requests per second")
    if not burstiness > 0:
        raise ValueError(
            f"burstiness is {burstiness}: it must be more than 0 (1: Poisson, smaller: burstier)"
        )
    if kind == "constant":
        gaps = np.ones(count - 1)
    else:
        gaps = rng.gamma(1.0 if kind == "poisson" else burstiness, size=count - 1)
    times = np.concatenate(([0.0], np.cumsum(gaps)))
    if not times[-1]:
        raise ValueError(
            f"burstiness is {burstiness}: it makes all gaps between {count} arrivals 0: raise it"
        )
    return times * ((count - 1) / rate / times[-1])


# ---------------------------------------------------------------- lengths


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: constant `mean`; uniform in mean·(1 ± spread); or
    lognormal with that mean and standard deviation `spread` of the logarithm. Every draw is at
    least 1 and at most `max_tokens`."""

    mean: float
    kind: Literal["constant", "uniform", "lognormal"] = "constant"
    spread: float = 0.5
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.mean < 1:
            raise ValueError(f"mean length is {self.mean}: it must be 1 token or more")
        if not self.spread >= 0 or (self.kind == "uniform" and self.spread > 1):
            raise ValueError(
                f"spread is {self.spread}: it must be 0 or more, and at most 1 for uniform lengths"
            )

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        if self.kind == "constant":
            values = np.full(count, self.mean)
        elif self.kind == "uniform":
            values = rng.uniform(
                self.mean * (1 - self.spread), self.mean * (1 + self.spread), size=count
            )
        else:
            values = rng.lognormal(np.log(self.mean) - self.spread**2 / 2, self.spread, size=count)
        return np.clip(np.rint(values), 1, self.max_tokens).astype(np.int64)


# ---------------------------------------------------------------- prefix groups

GROUP_BLOCK_TOKENS = 16  # a KV page, so that a prefix cache can find shared blocks


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixGroups:
    """`count` groups. A request belongs to a random one; the first `share` of its prompt, in whole
    blocks of 16 tokens, is a prefix of the group's common text."""

    count: int
    share: float

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"prefix groups: {self.count}: there must be 1 or more")
        if not 0 <= self.share <= 1:
            raise ValueError(f"prefix share is {self.share}: it must be 0 to 1")

    def blocks(self, prompt_tokens: int, group: int) -> tuple[int, ...]:
        whole = int(prompt_tokens * self.share) // GROUP_BLOCK_TOKENS
        return tuple(range(group << 32, (group << 32) + whole))


@dataclasses.dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """`count` queries with random lengths. `rate`: arrivals per second."""

    count: int
    prompt: Lengths
    output: Lengths
    arrivals: Arrivals = "poisson"
    rate: float = 1.0
    groups: PrefixGroups | None = None
    seed: int = 0

    def queries(self) -> list[Query]:
        rng, groups = np.random.default_rng(self.seed), self.groups
        times = arrival_times(self.count, self.arrivals, self.rate, rng)
        prompts, outputs = self.prompt.draw(self.count, rng), self.output.draw(self.count, rng)
        group = rng.integers(groups.count if groups else 1, size=self.count)
        return [
            Query(
                number=i,
                arrival_s=float(times[i]),
                prompt_tokens=int(prompts[i]),
                output_tokens=int(outputs[i]),
                prefix_ids=groups.blocks(int(prompts[i]), int(group[i])) if groups else (),
                block_tokens=GROUP_BLOCK_TOKENS if groups else 0,
                session=f"group{group[i]}" if groups else "",
            )
            for i in range(self.count)
        ]


# ---------------------------------------------------------------- tokens


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRange:
    """The token ids [first, last) of synthetic prompts. The default range has ordinary tokens in
    every common vocabulary: control tokens are below 1,000 or above 30,000."""

    first: int = 1_000
    last: int = 30_000

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ValueError(f"token ids {self.first}:{self.last}: the range is empty or negative")

    @classmethod
    def within(cls, vocab: int) -> TokenRange:
        """The default range cut to `vocab` ids; of a small vocabulary, its upper three quarters."""
        return cls(min(1_000, vocab // 4), min(30_000, vocab))


def prompt_ids(query: Query, tokens: TokenRange = TokenRange(), seed: int = 0) -> tuple[int, ...]:
    """The prompt of `query` as token ids. Raises ValueError for a text or messages.

    The token at position p is a hash of (seed, block id, offset in the block), or of (seed, query
    number, p) after the blocks: nothing is stored, and equal blocks give equal tokens. The hash is
    SplitMix64's (Steele, Lea, Flood, OOPSLA 2014, section 5)."""
    if query.ids is not None:
        return query.ids
    if query.prompt is not None:
        raise ValueError(f"query {query.number} is a text: it must be tokenised first")
    position = np.arange(query.prompt_tokens, dtype=np.uint64)
    known = min(query.prompt_tokens, len(query.prefix_ids) * query.block_tokens)
    stream = np.full(query.prompt_tokens if known else 1, np.uint64(2 * query.number + 1))
    if known:
        blocks = np.asarray(
            query.prefix_ids[: -(-known // query.block_tokens)], dtype=np.uint64
        ) * np.uint64(2)
        stream[:known] = np.repeat(blocks, query.block_tokens)[:known]
        position[:known] %= np.uint64(query.block_tokens)
    word = _mix(_mix(stream ^ _mix(np.array([seed], dtype=np.uint64))) + position)
    return tuple(_ids(tokens)[word % np.uint64(tokens.last - tokens.first)].tolist())


@lru_cache(4)
def _ids(tokens: TokenRange) -> NDArray[np.object_]:
    """Every id of the range as a Python int, which prompts then share."""
    return np.array(range(tokens.first, tokens.last), dtype=object)


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def offered_rate(queries: Sequence[Query]) -> float:
    """Requests per second between the first and the last arrival; infinite if all arrive at
    once."""
    if len(queries) < 2:
        return float("inf")
    span_s = queries[-1].arrival_s - queries[0].arrival_s
    return (len(queries) - 1) / span_s if span_s > 0 else float("inf")


def reusable_prefix_share(queries: Sequence[Query]) -> float:
    """Share of all prompt tokens in a block of an earlier query: the hits of an unlimited prefix
    cache."""
    seen: set[int] = set()
    hits = 0
    for query in queries:
        if query.prefix_ids:
            known = next(
                (i for i, block in enumerate(query.prefix_ids) if block not in seen),
                len(query.prefix_ids),
            )
            hits += min(known * query.block_tokens, query.prompt_tokens)
            seen.update(query.prefix_ids)
    return hits / sum(q.prompt_tokens for q in queries) if queries else 0.0


def describe_load(queries: Sequence[Query]) -> dict[str, Any]:
    gaps = np.diff([q.arrival_s for q in queries])
    result: dict[str, Any] = {
        "requests": len(queries),
        "span_s": float(gaps.sum()),
        "rate": offered_rate(queries) if gaps.sum() > 0 else "inf",
        "gap_cv": float(gaps.std() / gaps.mean()) if gaps.sum() > 0 else None,
        "reusable_share": reusable_prefix_share(queries),
    }
    for name, lengths in (
        ("prompt", [q.prompt_tokens for q in queries]),
        ("output", [q.output_tokens for q in queries]),
    ):
        p50, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
        result[f"{name}_tokens"] = {
            "mean": float(np.mean(lengths)),
            "p50": p50,
            "p90": p90,
            "p99": p99,
            "max": max(lengths),
        }
    return result
