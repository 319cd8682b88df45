"""The load: what is asked, when, and with which tokens.

Owns: Query, the synthetic generators (arrivals, lengths, prefix groups) and the tokens of a prompt.
Promises: everything follows from a seed, on every machine; two prompts begin alike exactly as far as their prefix blocks do.
Must not: read a file, keep a clock, know who will answer.
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
MAX_LENGTH_TOKENS = 2**24  # beyond any context: a longer prompt is not made


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """One request of a load, sent `arrival_s` seconds after its start, whether or not others have been answered.

    `prompt_tokens` is the prompt's length. What stands in it is, by what is given:
    * `prompt`: a text, token ids, or chat messages as (role, content) pairs; if not ids, `prompt_tokens` is an estimate.
    * else ids made by `prompt_ids`: `prefix_ids` name its first blocks of `block_tokens` tokens (equal ids in front, equal
      tokens), and what is beyond them is this query's alone.
    `number` tells the queries of a load apart and stays when others are left out. `session` names the conversation it belongs to.
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
                f"query {self.number}: {given}: say how many tokens a block has, 1 to {MAX_LENGTH_TOKENS}"
            )

    @property
    def id(self) -> str:
        return f"q{self.number}"

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The given token ids, if the prompt is given so."""
        if self.prompt is None or isinstance(self.prompt, str):
            return None
        ids = tuple(part for part in self.prompt if isinstance(part, int))
        return ids if len(ids) == len(self.prompt) else None

    @property
    def messages(self) -> tuple[Message, ...] | None:
        """The given chat messages, if the prompt is given so."""
        if self.prompt is None or isinstance(self.prompt, str):
            return None
        return tuple(part for part in self.prompt if not isinstance(part, int)) or None


# ---------------------------------------------------------------- arrivals


def arrival_times(
    count: int, kind: Arrivals, rate: float, rng: np.random.Generator, burstiness: float = 1.0
) -> NDArray[np.float64]:
    """Times of `count` arrivals in seconds, ascending, the first at 0.

    Gaps are gamma-distributed of shape `burstiness`, so their coefficient of variation is 1/sqrt(burstiness); poisson is shape 1,
    constant its limit. They are scaled so that the mean gap is exactly 1/rate: two seeds offer the same load. once: all at 0.
    """
    if kind == "once" or count < 2 or np.isinf(rate):
        return np.zeros(count)
    if not rate > 0:
        raise ValueError(f"rate is {rate}: it must be more than 0 requests per second")
    if not burstiness > 0:
        raise ValueError(
            f"burstiness is {burstiness}: it must be more than 0 (1 is Poisson, smaller is burstier)"
        )
    if kind == "constant":
        gaps = np.ones(count - 1)
    else:
        gaps = rng.gamma(1.0 if kind == "poisson" else burstiness, size=count - 1)
    times = np.concatenate(([0.0], np.cumsum(gaps)))
    if not times[-1]:
        raise ValueError(
            f"burstiness is {burstiness}: all gaps between {count} arrivals are 0 by it: raise it"
        )
    return times * ((count - 1) / rate / times[-1])


# ---------------------------------------------------------------- lengths


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: constant `mean`; uniform in mean·(1 ± spread); or lognormal of that mean, whose
    logarithm has standard deviation `spread`. Every draw is at least 1 and at most `most`."""

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

GROUP_BLOCK_TOKENS = 16  # a page, so that what is common can be found in a page-wise prefix cache


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixGroups:
    """`count` groups; a request belongs to one at random, and the first `share` of its prompt (in whole blocks of 16 tokens) is a
    beginning of that group's common text."""

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


def synthetic_queries(
    count: int,
    prompt: Lengths,
    output: Lengths,
    *,
    arrivals: Arrivals = "poisson",
    rate: float = 1.0,
    groups: PrefixGroups | None = None,
    seed: int = 0,
) -> list[Query]:
    """A made load of `count` queries, in order of arrival."""
    rng = np.random.default_rng(seed)
    times = arrival_times(count, arrivals, rate, rng)
    prompts, outputs = prompt.draw(count, rng), output.draw(count, rng)
    group = rng.integers(groups.count if groups else 1, size=count)
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
        for i in range(count)
    ]


# ---------------------------------------------------------------- tokens


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRange:
    """The token ids [first, last) that made prompts are drawn from. The default holds ordinary tokens of every common vocabulary:
    control tokens stand below 1,000 or above 30,000."""

    first: int = 1_000
    last: int = 30_000

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ValueError(f"token ids {self.first}:{self.last}: the range is empty or negative")

    @classmethod
    def within(cls, vocab: int) -> TokenRange:
        """The default range cut to a vocabulary of `vocab` ids; of a small one, the upper three quarters."""
        return cls(min(1_000, vocab // 4), min(30_000, vocab))


def prompt_ids(query: Query, tokens: TokenRange = TokenRange(), seed: int = 0) -> tuple[int, ...]:
    """The prompt of `query` as token ids. Explicit ids are given as they are; a text or messages raise ValueError.

    The token at position p is a hash of (seed, block id, offset in the block), or of (seed, query number, p) beyond the blocks:
    nothing is stored, and equal blocks give equal tokens. The hash is SplitMix64's (Steele, Lea, Flood, OOPSLA 2014, section 5).
    """
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
    """Every id of the range as a Python number, of which prompts then hold no copies."""
    return np.array(range(tokens.first, tokens.last), dtype=object)


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def offered_rate(queries: Sequence[Query]) -> float:
    """Requests per second between the first and the last arrival; infinite when all arrive at once."""
    if len(queries) < 2:
        return float("inf")
    span_s = queries[-1].arrival_s - queries[0].arrival_s
    return (len(queries) - 1) / span_s if span_s > 0 else float("inf")


def reusable_prefix_share(queries: Sequence[Query]) -> float:
    """Share of all prompt tokens that stand in a block seen in an earlier query: what an endless prefix cache would hit."""
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
    """What a load is: how many, how fast, how uneven, how long, how much in common."""
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
