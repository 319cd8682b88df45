"""The workload flags that `bench` and `simulate` share, and the trace they make.

Owns: every flag of a load, its default and help, and the order in which a trace is changed. Flags
that contradict each other are a ValueError with their names. The same flags give the same queries.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from counterpoint.bench import transform
from counterpoint.bench.trace import read_trace
from counterpoint.bench.trace_formats import Format, Tokenize, Trace
from counterpoint.bench.workload import (
    Arrivals,
    Lengths,
    PrefixGroups,
    Query,
    SyntheticLoad,
    offered_rate,
)
from counterpoint.types import Slo

TRACE = Group("Workload from a trace", sort_key=1)
SYNTHETIC = Group("Synthetic workload", sort_key=2)
SHAPE = Group("Shape of the workload", sort_key=3)

SYNTHETIC_REQUESTS = 64
SYNTHETIC_RATE = 1.0
MAX_INT = 2**63
TRACE_ONLY = ("trace_format", "tokenizer", "thin", "length_scale", "time_scale", "jitter")
SYNTHETIC_ONLY = (
    *("prompt_tokens", "prompt_lengths", "prompt_spread"),
    *("output_tokens", "output_lengths", "output_spread"),
    *("prefix_groups", "prefix_share"),
)


def flag(help: str, group: Group) -> Parameter:
    return Parameter(help=help, group=group)


def json_flag(group: Group) -> Parameter:
    return Parameter(
        help="write the result to this file; - : standard output, which then has JSON alone",
        group=group,
        allow_leading_hyphen=True,
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Which requests arrive when. Without a trace, a synthetic workload."""

    trace: Annotated[
        str | None,
        flag(
            "file of requests: Azure, BurstGPT or lengths CSV, Mooncake or our JSONL, ShareGPT",
            TRACE,
        ),
    ] = None
    trace_format: Annotated[Format | None, flag("its format; unset: detected", TRACE)] = None
    tokenizer: Annotated[
        str | None,
        flag("tokenizer.json to turn ShareGPT's texts into tokens; unset: estimates", TRACE),
    ] = None
    thin: Annotated[
        float | None, flag("keep about this share of the trace, in whole prefix groups", TRACE)
    ] = None
    length_scale: Annotated[
        float | None,
        flag("multiply prompt and output lengths (blocks of common prefixes too)", TRACE),
    ] = None
    time_scale: Annotated[
        float | None, flag("multiply the trace's times: 0.1 plays ten times as fast", TRACE)
    ] = None
    jitter: Annotated[
        float | None,
        flag(
            "spread equal arrival times over so many seconds; unset: over a coarse clock's tick; "
            "0: never",
            TRACE,
        ),
    ] = None

    prompt_tokens: Annotated[int, flag("mean prompt length", SYNTHETIC)] = 256
    prompt_lengths: Annotated[
        Literal["constant", "uniform", "lognormal"], flag("its distribution", SYNTHETIC)
    ] = "lognormal"
    prompt_spread: Annotated[
        float, flag("uniform: ± share of the mean; lognormal: sigma", SYNTHETIC)
    ] = 0.5
    output_tokens: Annotated[int, flag("mean output length", SYNTHETIC)] = 32
    output_lengths: Annotated[
        Literal["constant", "uniform", "lognormal"], flag("its distribution", SYNTHETIC)
    ] = "lognormal"
    output_spread: Annotated[
        float, flag("uniform: ± share of the mean; lognormal: sigma", SYNTHETIC)
    ] = 0.5
    prefix_groups: Annotated[
        int, flag("groups of requests whose prompts share a prefix; 0: none", SYNTHETIC)
    ] = 0
    prefix_share: Annotated[float, flag("share of a prompt that its group shares", SYNTHETIC)] = 0.5

    skip: Annotated[
        int, flag("skip so many requests, to use another part of the same trace", SHAPE)
    ] = 0
    requests: Annotated[
        int | None,
        flag("how many; unset: the whole trace, or 64 synthetic ones (plan: 1,000)", SHAPE),
    ] = None
    arrivals: Annotated[
        Literal["trace", "poisson", "gamma", "constant", "once"] | None,
        flag("when they arrive; unset: as in the trace, or poisson. once: all at the start", SHAPE),
    ] = None
    rate: Annotated[
        float | None,
        flag(
            "requests per second on average; unset: the trace's own, or 1. inf: all at once", SHAPE
        ),
    ] = None
    burstiness: Annotated[
        float, flag("of gamma arrivals: the variation of gaps is 1/sqrt of it; 1: poisson", SHAPE)
    ] = 1.0
    max_prompt_tokens: Annotated[int | None, flag("cut longer prompts", SHAPE)] = None
    max_output_tokens: Annotated[int | None, flag("cut longer outputs", SHAPE)] = None
    seed: Annotated[int, flag("seed of everything random in the workload", SHAPE)] = 0

    def build_trace(self) -> Trace:
        """The queries. Raises ValueError with the flag, or TraceError with the place in the
        file."""
        self._check_ranges()
        self._check_combination()
        if self.trace is None:
            trace = Trace(tuple(self._synthetic()), timed=False)
        else:
            trace = read_trace(
                self.trace,
                self.trace_format,
                tokenize=self._tokenize(),
                jitter_s=self.jitter,
                seed=self.seed,
            )
        queries = self._select_and_resize(list(trace.queries))
        if not queries:
            raise ValueError(
                "no request is left of the workload: raise --max-prompt-tokens or --thin"
            )
        return Trace(tuple(self._set_arrivals(queries, trace.timed)), True, trace.notes)

    def _check_ranges(self) -> None:
        """Ranges whose errors would not name the flag later on."""
        given = {
            "prompt-tokens": (self.prompt_tokens, 1),
            "output-tokens": (self.output_tokens, 1),
            "prefix-groups": (self.prefix_groups, 0),
            "requests": (self.requests, 1),
            "jitter": (self.jitter, 0),
            "seed": (self.seed, 0),
        }
        for name, (value, low) in given.items():
            if value is not None and not low <= value < MAX_INT:
                raise ValueError(
                    f"--{name} is {value}: it must be {low} or more, and less than 2**63"
                )
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"--rate is {self.rate}: it must be more than 0 requests per second")

    def _check_combination(self) -> None:
        """Refuses flags that have no effect beside the others."""
        idle = TRACE_ONLY if self.trace is None else SYNTHETIC_ONLY
        for field in fields(self):
            if field.name in idle and getattr(self, field.name) != field.default:
                why = (
                    "changes a trace: give one with --trace"
                    if self.trace is None
                    else "makes a workload: leave it out, or --trace"
                )
                raise ValueError(f"--{field.name.replace('_', '-')} {why}")
        if self.burstiness != 1.0 and self.arrivals != "gamma":
            raise ValueError("--burstiness is of gamma arrivals: give --arrivals gamma, too")
        if self.arrivals == "once" and self.rate not in (None, float("inf")):
            raise ValueError(
                "--arrivals once sends all at the start, whatever --rate says: leave one of them "
                "out"
            )

    def _synthetic(self) -> list[Query]:
        groups = PrefixGroups(self.prefix_groups, self.prefix_share) if self.prefix_groups else None
        return SyntheticLoad(
            self.requests or SYNTHETIC_REQUESTS,
            Lengths(self.prompt_tokens, self.prompt_lengths, self.prompt_spread),
            Lengths(self.output_tokens, self.output_lengths, self.output_spread),
            arrivals="once",
            groups=groups,
            seed=self.seed,
        ).queries()

    def _select_and_resize(self, queries: list[Query]) -> list[Query]:
        """Fewer requests and other lengths; times stay."""
        if self.thin is not None:
            queries = transform.thin(queries, self.thin, self.seed)
        if self.length_scale is not None:
            queries = transform.scale_lengths(queries, self.length_scale)
        queries = transform.clip_lengths(queries, self.max_prompt_tokens, self.max_output_tokens)
        if self.skip:
            queries = transform.skip_first(queries, self.skip)
        return queries if self.requests is None else transform.take_first(queries, self.requests)

    def _set_arrivals(self, queries: list[Query], timed: bool) -> list[Query]:
        if self.arrivals == "trace" and not timed:
            raise ValueError(
                "--arrivals trace: the workload has no times of its own; choose poisson, gamma, "
                "constant or once"
            )
        kind: Arrivals | Literal["trace"] = self.arrivals or ("trace" if timed else "poisson")
        if self.rate == float("inf"):
            kind = "once"
        if kind != "trace":
            if self.time_scale is not None:
                raise ValueError(
                    f"--time-scale stretches the trace's own times, --arrivals {kind} replaces "
                    "them: give one of them"
                )
            rate = offered_rate(queries) if timed else SYNTHETIC_RATE
            return transform.replace_arrivals(
                queries, kind, rate if self.rate is None else self.rate, self.burstiness, self.seed
            )
        if self.rate is not None and self.time_scale is not None:
            raise ValueError("--rate and --time-scale both set the clock: give one of them")
        if self.rate is not None:
            return transform.scale_to_rate(queries, self.rate)
        return (
            transform.stretch_time(queries, self.time_scale)
            if self.time_scale is not None
            else queries
        )

    def _tokenize(self) -> Tokenize | None:
        if self.tokenizer is None:
            return None
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(self.tokenizer)
        except Exception as error:
            raise ValueError(f"--tokenizer {self.tokenizer}: {error}") from None
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def parse_slo(text: str) -> Slo:
    """Targets as "ttft=1.0,tpot=0.05,itl=200ms", in seconds or with a unit. Raises ValueError with
    the wrong part."""
    found: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = part.partition("=")
        if name not in ("ttft", "tpot", "itl") or not equals:
            raise ValueError(
                f"--slo {part!r}: write ttft=SECONDS, tpot=SECONDS or itl=SECONDS, joined by commas"
            )
        scale = 1e-3 if value.endswith("ms") else 1.0
        try:
            seconds = float(value.removesuffix("ms").removesuffix("s")) * scale
        except ValueError:
            raise ValueError(f"--slo {part!r}: {value!r} is no number of seconds") from None
        if not seconds > 0:
            raise ValueError(f"--slo {part!r}: it must be more than 0")
        found[f"{name}_s"] = seconds
    return Slo(**found)
