"""The nouns every room shares, as frozen structs of plain numbers.

Owns: what crosses a seam. Events enter the core, commands leave it, outputs go to the client.
Promises: no clock, no tensor, no behaviour beyond small derived properties; every struct serialises with msgspec
(so the wire, the event log and the replay share one format).
Must not: import anything of this package.

Vocabulary. A *unit* is the device's smallest schedulable compute share: an SM on a GPU, a core on a CPU.
A *slot* is a row of the executor's per-request tables. A *pass* is one forward pass of some segments through all layers;
a pass may be cut into *steps* of consecutive layers (a layer group each). All intervals are half-open, [a, b).
"""

from __future__ import annotations

import enum

import msgspec


class Role(enum.StrEnum):
    """What a lane may run. One lane of role BOTH is chunked serving; PREFILL beside DECODE is multiplexing."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Lane(msgspec.Struct, frozen=True):
    """One voice: an ordered queue of steps on a device.

    `depth` is how many steps may be in flight at once (1: the next step is made when the last has come back; 2: one is
    queued behind the running one, so that the device never waits for the host).
    """

    id: int
    role: Role
    depth: int = 1


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Latency targets of one request, in seconds; None is no target. `ttft_s`: arrival to first token. `tpot_s`: mean time
    per output token after the first. `itl_s`: longest gap between two tokens."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None

    def with_defaults(self, others: Slo) -> Slo:
        """These targets, and `others` where there is none."""
        return Slo(
            others.ttft_s if self.ttft_s is None else self.ttft_s,
            others.tpot_s if self.tpot_s is None else self.tpot_s,
            others.itl_s if self.itl_s is None else self.itl_s,
        )


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's tokens are chosen and when it ends. Validated by whoever makes it (`serve`), trusted by the core.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is always set (unseeded requests get a random
    one at arrival): the n-th token of a request depends on (seed, n) and the logits alone, never on what shares the batch.
    `stop_token_ids` end the request beside the model's own end-of-sequence ids (which `ignore_eos` switches off);
    before `min_tokens` output tokens, neither can be sampled. `logprobs`: how many alternatives to report beside the sampled
    token's own log-probability (0: only its own), None: none at all. Log-probabilities are those of the raw logits.

    `grammar`, where there is one, is what the answer's text must obey, as text that executors understand (device/grammar.py). It
    goes before everything else: a token that it forbids is never sampled, and where it allows only the end, the answer ends,
    `ignore_eos` and `min_tokens` or not.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""

    @property
    def is_synchronous(self) -> bool:
        """Its next token can't be sampled before the host knows the last one."""
        return bool(self.grammar)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability (natural log) of one token, and the `top` alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


# ---------------------------------------------------------------- events: what enters the core


class DisaggRole(enum.StrEnum):
    """Which part of a request an engine has. PREFILL: the prompt and the token after it; its pages stay until Release, so that
    others may read them. DECODE: what follows that token; its pages are set aside for others to write, until Adopt."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """A request enters. `id` is unique among the living (serve makes it so). `salt` separates prefix caches: pages are shared
    only between requests of one salt. Higher `priority` goes first. `resumed`: tokens of the answer that the client has from
    elsewhere; the request goes on behind them."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    slo: Slo = Slo()
    priority: int = 0
    salt: str = ""
    generated_prefix: tuple[int, ...] = ()
    disagg_role: DisaggRole = DisaggRole.WHOLE


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client no longer wants request `id` (gone, timed out, or a stop string matched). Unknown ids are ignored."""

    id: str


NOT_FINITE, NO_GRAMMAR = -1, -2
UNSAMPLED_REASONS = {
    NOT_FINITE: "the model gave no finite logits for this request",
    NO_GRAMMAR: "the grammar of this request could not be followed: it costs too much",
}


class StepDone(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A step has left the device. `tokens`: one sampled id per segment with `sample`, in segment order, in the step that holds
    the pass's last layer; else empty. An id below 0 says that the row could not be sampled, and why (types.UNSAMPLED): that
    request fails, alone. `error` fails every request of the step. Times are the device's own, on the inbox's clock, in seconds.
    `units` are those the step really ran on; `active_units`: how many of them had work, on average (0: not known)."""

    step: int
    lane: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    started_s: float = 0.0
    ended_s: float = 0.0
    units: int = 0
    active_units: float = 0.0
    error: str = ""


class ResumeDecode(msgspec.Struct, frozen=True, tag=True):
    """The pages of request `id` (Part.DECODE) now hold the KV of all tokens so far, and `token` follows them: decode from there.
    From here on it is a request like any other."""

    id: str
    token: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Nobody outside reads or writes the pages of request `id` (Part.PREFILL, or Part.DECODE before Adopt) any more: forget it,
    wherever it stands, without a word to the client."""

    id: str


Event = AddRequest | Abort | StepDone | ResumeDecode | Release


# ---------------------------------------------------------------- commands: what leaves the core


class BatchShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step costs, as sums over its segments, so that pricing it takes no loop.

    Prefill segments (n new tokens after r reused or already computed ones): `prefill_tokens` = sum n, `prefill_squares` = sum n*n,
    `prefill_reused` = sum n*r, `prefill_requests`. Decode segments: `decode_batch`, `decode_context` = sum of context lengths
    (tokens read from the KV cache, the new one included). `samples`: rows that reach the LM head.
    [first_layer, last_layer) of `layers`.
    """

    prefill_tokens: int = 0
    prefill_squares: int = 0
    prefill_reused: int = 0
    prefill_requests: int = 0
    decode_batch: int = 0
    decode_context: int = 0
    samples: int = 0
    first_layer: int = 0
    last_layer: int = 0
    layers: int = 0

    @property
    def kind(self) -> str:
        """prefill, decode or mixed."""
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decode_batch else "prefill"


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions [start, start + tokens) of the request in `slot` are computed. `pages` are appended to the slot's block table
    before that. `sample`: the logits of the last position are sampled, and the token becomes position start + tokens."""

    slot: int
    start: int
    tokens: int
    sample: bool
    pages: tuple[int, ...] = ()


class InitSlot(msgspec.Struct, frozen=True, tag=True):
    """Fill row `slot`: `tokens` (prompt, and after a preemption what was generated), of which the first `prompt_tokens` are the
    prompt, and `pages` (shared prefix pages) as the start of its block table."""

    slot: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    pages: tuple[int, ...]
    sampling: Sampling


class Step(msgspec.Struct, frozen=True, tag=True):
    """Run layers [first_layer, last_layer) of pass `batch` on `units` units of lane `lane`.

    The steps of one pass carry the same segments and come in layer order; hidden states wait in the executor under `batch`
    between them. On the way, PREFILL lanes take their units from the low end of the device and DECODE lanes from the high
    end, so that splits nest; role BOTH takes the low end.
    """

    id: int
    lane: int
    pass_id: int
    first_layer: int
    last_layer: int
    units: int
    segments: tuple[Segment, ...]
    work: BatchShape


class DiscardPass(msgspec.Struct, frozen=True, tag=True):
    """Forget the hidden states of pass `batch`: it will not be continued. None of its steps is in flight."""

    pass_id: int


class FreeSlot(msgspec.Struct, frozen=True, tag=True):
    """Row `slot` is free again. No step in flight names it."""

    slot: int


Command = InitSlot | Step | DiscardPass | FreeSlot


# ---------------------------------------------------------------- outputs: what goes to the client


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token was sampled
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"
    ERROR = "error"


class OutputDelta(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """New tokens of one request. The last one has `finish`; `error` explains Finish.ERROR. `cached_tokens`: prompt tokens served
    from the prefix cache, set with the first token. A stop token is the last of `tokens` and `stopped_by` names it."""

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    error: str = ""


class RequestTiming(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The life of one finished request, on the inbox's clock, in seconds: bench, metrics and simulator all read this.
    `admitted_s` is None if it never ran. `token_s` has the time of each output token."""

    id: str
    arrival_s: float
    admitted_s: float | None
    finished_s: float
    prompt_tokens: int
    cached_tokens: int
    token_s: tuple[float, ...]
    finish_reason: FinishReason
    preemptions: int


Output = OutputDelta | RequestTiming


# ---------------------------------------------------------------- progress: what goes to whoever moves KV


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """Request `id`, of which this engine has a part, holds `pages` for all tokens so far. The first `cached` of them hold their
    content already and are shared: nobody may write them."""

    id: str
    pages: tuple[int, ...]
    cached_pages: int


class Computed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Of request `id` (Part.PREFILL), the KV of tokens [0, tokens) is in its pages in every layer, and that of [tokens, ahead)
    in the first `layers` layers."""

    id: str
    tokens: int
    partial_tokens: int = 0
    partial_layers: int = 0


Progress = Admitted | Computed


class PolicyReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a policy knows of itself. `errors`: (kind of step, median and 95th percentile of |predicted - actual| / actual over its
    latest steps, how many those are). `cells`: (name of a cell of corrections, mean ratio of actual to predicted, guard on top).
    `decisions` and `fallbacks` (reasons why the device was not split while both phases had work) are counts by name."""

    errors: tuple[tuple[str, float, float, int], ...] = ()
    cells: tuple[tuple[str, float, float], ...] = ()
    decisions: dict[str, int] = {}
    fallbacks: dict[str, int] = {}


class LaneStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step for whoever watches: on lane `lane` it had `units` in [started_s, ended_s), on the inbox's clock; `ended_s` 0: it
    still runs. The steps of one forward pass have one `batch`, and each of them says the whole pass's tokens."""

    lane: int
    pass_id: int
    started_s: float
    ended_s: float
    units: int
    prefill_tokens: int
    decode_batch: int


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine's gauges and counters now. Pages: free + cached (unreferenced, evictable) + in use = total.
    `split_s` is the time each (prefill units, decode units) pair was in force, as [[prefill, decode, seconds], ...];
    0 units: that side had no step in flight. `lane_s`: what each lane did with its time, as (role, what, seconds): busy, launch
    (a step is in flight and the device has not begun it) and, with none in flight, why (core/metrics.py: Idle).
    `step_s`: device time by (prefill, decode or mixed; units asked for; units it ran on). `active_unit_s`: units with work times
    seconds, as the device or a model of it tells. `overtakes`: prefills put aside between two layer groups for a shorter one.
    `playing`: the step that each busy lane runs; `recent`: the latest of the `steps` that have come back, oldest first."""

    waiting: int = 0
    running: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    page_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = {}
    steps: int = 0
    split_s: tuple[tuple[int, int, float], ...] = ()
    lane_s: tuple[tuple[str, str, float], ...] = ()
    step_s: tuple[tuple[str, int, int, float], ...] = ()
    active_unit_s: float = 0.0
    units_total: int = 0
    resplits: int = 0
    overtakes: int = 0
    policy: PolicyReport = PolicyReport()
    running_steps: tuple[LaneStep, ...] = ()
    recent_steps: tuple[LaneStep, ...] = ()
