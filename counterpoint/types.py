"""The data every room shares: frozen structs of plain numbers.

Events enter the core, commands leave it, outputs go to the client. The wire, the event log and the
replay share one format: every struct serialises with msgspec. This module knows no clock and no
tensor, has no behaviour beyond small derived properties, and imports nothing of this package.

A *unit* is the smallest share of compute that a device can schedule: an SM on a GPU, a core on a
CPU. A *slot* is a row of the executor's per-request tables. A *pass* is one forward pass of some
segments through all layers. A pass may be cut into *steps* of consecutive layers (a layer group
each). All intervals are half-open: [a, b).
"""

from __future__ import annotations

import enum

import msgspec


class Role(enum.StrEnum):
    """What a lane may run. BOTH is chunked serving; PREFILL and DECODE lanes are multiplexing."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Lane(msgspec.Struct, frozen=True):
    """An ordered queue of steps on a device. `depth` is how many steps may be in flight at once. At
    1, the next step is built when the last has come back. At 2, one step is queued behind the
    running one, so the device never waits for the host."""

    id: int
    role: Role
    depth: int = 1


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Latency targets of one request, in seconds; None is no target. `ttft_s`: arrival to first
    token. `tpot_s`: mean time per output token after the first. `itl_s`: longest gap between two
    tokens."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None

    def with_defaults(self, defaults: Slo) -> Slo:
        """These targets, completed by `defaults` where there is none."""
        return Slo(
            defaults.ttft_s if self.ttft_s is None else self.ttft_s,
            defaults.tpot_s if self.tpot_s is None else self.tpot_s,
            defaults.itl_s if self.itl_s is None else self.itl_s,
        )


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's tokens are chosen and when it ends. `serve` validates it; the core trusts
    it. `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is always set:
    serve draws one for a request without. The n-th token of a request depends on (seed, n) and the
    logits alone, never on the rest of the batch. `stop_token_ids` end the request, as do the
    model's own end-of-sequence ids unless `ignore_eos` is set. Neither can be sampled before
    `min_tokens` output tokens. `logprobs`: how many alternatives to report with the sampled token's
    log-probability (0: only its own; None: none at all). Log-probabilities are those of the raw
    logits. `grammar` constrains the text, in a form that executors understand (device/grammar.py).
    It goes before everything else: a forbidden token is never sampled. Where the grammar allows
    only the end, the answer ends, whatever `ignore_eos` and `min_tokens` say."""

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
        """Its next token can only be sampled once the host knows the last one."""
        return bool(self.grammar)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability (natural log) of one token, and of the `top` alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


# ---------------------------------------------------------------- events: what enters the core


class DisaggRole(enum.StrEnum):
    """Which part of a request an engine runs in disaggregated serving. PREFILL: the prompt and the
    token after it. Its pages stay until Release, so that others may read them. DECODE: what follows
    that token. Its pages are reserved for others to write, until ResumeDecode. WHOLE: the engine
    runs all of the request."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """A request enters. `serve` makes `id` unique among the requests that have not finished. `salt`
    separates prefix caches: only requests of one salt share pages. Higher `priority` goes first.
    `generated_prefix`: tokens of the answer that the client already has; the request continues
    after them."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    slo: Slo = Slo()
    priority: int = 0
    salt: str = ""
    generated_prefix: tuple[int, ...] = ()
    disagg_role: DisaggRole = DisaggRole.WHOLE


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client no longer wants request `id` (disconnect, timeout or stop string). Unknown ids are
    ignored."""

    id: str


NOT_FINITE, NO_GRAMMAR = -1, -2
UNSAMPLED_REASONS = {
    NOT_FINITE: "the model gave no finite logits for this request",
    NO_GRAMMAR: "the grammar of this request could not be followed: it costs too much",
}


class StepDone(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A step has left the device. `tokens`: in the step with the pass's last layer, one sampled id
    per segment with `sample`, in segment order; else empty. An id below 0 is a key of
    UNSAMPLED_REASONS: that row could not be sampled, and its request fails alone. `error` fails
    every request of the step. Times are the device's own, on the event queue's clock, in seconds.
    `units`: those the step ran on. `active_units`: how many of them had work on average (0: not
    known)."""

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
    """Decode request `id` (DisaggRole.DECODE) from here on, like any other request. Its pages now
    hold the KV of all tokens so far, and `token` follows them."""

    id: str
    token: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Nobody outside reads or writes the pages of request `id` any more: forget it. Meant for
    DisaggRole.PREFILL, or DisaggRole.DECODE before ResumeDecode. Valid in every phase; the client
    is told nothing."""

    id: str


Event = AddRequest | Abort | StepDone | ResumeDecode | Release


# ---------------------------------------------------------------- commands: what leaves the core


class BatchShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Size of a step, as sums over its segments, so that an estimator needs no loop. Of prefill
    segments with n new tokens after r reused or already computed ones: `prefill_tokens` = sum n,
    `prefill_squares` = sum n*n, `prefill_reused` = sum n*r, `prefill_requests`. Of decode segments:
    `decode_batch`, and `decode_context` = sum of context lengths (tokens read from the KV cache,
    the new one included). `samples`: rows that reach the LM head. The step runs layers
    [first_layer, last_layer) of `layers`."""

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

    @classmethod
    def prefill(
        cls,
        new_tokens: int,
        context_tokens: int,
        layers: int,
        prompts: int = 1,
        sampled: bool = True,
    ) -> BatchShape:
        """`prompts` prompts, each of `new_tokens` after `context_tokens`, in all `layers` layers.
        `sampled`: each prompt ends here and yields a token."""
        return cls(
            prefill_tokens=prompts * new_tokens,
            prefill_squares=prompts * new_tokens * new_tokens,
            prefill_reused=prompts * new_tokens * context_tokens,
            prefill_requests=prompts,
            samples=prompts if sampled else 0,
            last_layer=layers,
            layers=layers,
        )

    @classmethod
    def decode(cls, batch: int, context_tokens: int, layers: int) -> BatchShape:
        """One token of `batch` requests, whose contexts sum to `context_tokens`, in all layers."""
        return cls(
            decode_batch=batch,
            decode_context=context_tokens,
            samples=batch,
            last_layer=layers,
            layers=layers,
        )

    def __add__(self, other: BatchShape) -> BatchShape:
        """Both in one step. Raises ValueError if they run different layers and neither is empty."""
        if not other.prefill_tokens and not other.decode_batch:
            return self
        if not self.prefill_tokens and not self.decode_batch:
            return other
        layers = (self.first_layer, self.last_layer, self.layers)
        if layers != (other.first_layer, other.last_layer, other.layers):
            raise ValueError(f"cannot add shapes over different layers: {self} and {other}")
        return BatchShape(
            self.prefill_tokens + other.prefill_tokens,
            self.prefill_squares + other.prefill_squares,
            self.prefill_reused + other.prefill_reused,
            self.prefill_requests + other.prefill_requests,
            self.decode_batch + other.decode_batch,
            self.decode_context + other.decode_context,
            self.samples + other.samples,
            *layers,
        )

    def over_layers(self, first_layer: int, last_layer: int) -> BatchShape:
        """The same batch in layers [first_layer, last_layer)."""
        if (first_layer, last_layer) == (self.first_layer, self.last_layer):
            return self
        return msgspec.structs.replace(self, first_layer=first_layer, last_layer=last_layer)

    @property
    def kind(self) -> str:
        """prefill, decode or mixed."""
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decode_batch else "prefill"


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute positions [start, start + tokens) of the request in `slot`. The executor first
    appends `pages` to the slot's block table. `sample`: it samples the logits of the last position,
    and the token becomes position start + tokens."""

    slot: int
    start: int
    tokens: int
    sample: bool
    pages: tuple[int, ...] = ()


class InitSlot(msgspec.Struct, frozen=True, tag=True):
    """Fill row `slot`. `tokens`: the prompt (`prompt_tokens` of them), then what was generated
    already. `pages`: start of the block table (shared prefix pages)."""

    slot: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    pages: tuple[int, ...]
    sampling: Sampling


class Step(msgspec.Struct, frozen=True, tag=True):
    """Run layers [first_layer, last_layer) of pass `pass_id` on `units` units of lane `lane`. The
    steps of one pass carry the same segments and come in layer order. Between them, the executor
    keeps the hidden states under `pass_id`. PREFILL lanes take their units from the low end of the
    device and DECODE lanes from the high end, so that splits nest. Role BOTH takes the low end."""

    id: int
    lane: int
    pass_id: int
    first_layer: int
    last_layer: int
    units: int
    segments: tuple[Segment, ...]
    work: BatchShape


class DiscardPass(msgspec.Struct, frozen=True, tag=True):
    """Forget the hidden states of pass `pass_id`: it will not continue. None of its steps is in
    flight."""

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
    """New tokens of one request. The last delta has `finish_reason`; `error` explains
    FinishReason.ERROR. `cached_tokens`: prompt tokens served from the prefix cache, sent with the
    first token. A stop token is the last of `tokens`, and `stop_reason` is its id."""

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    error: str = ""


class RequestTiming(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Timestamps of one finished request, on the event queue's clock, in seconds. Bench, metrics
    and simulator read this. `admitted_s` is None if it never ran. `token_s`: time of each output
    token."""

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


# ---------------------------------------------------------------- progress: for KV transfer


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """Request `id`, of which this engine runs a part, holds `pages` for all tokens so far. The
    first `cached_pages` of them hold their KV already and are shared: nobody may write them."""

    id: str
    pages: tuple[int, ...]
    cached_pages: int


class Computed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """KV of request `id` (DisaggRole.PREFILL) that its pages hold. Tokens [0, tokens) in every
    layer; tokens [tokens, partial_tokens) in the first `partial_layers`."""

    id: str
    tokens: int
    partial_tokens: int = 0
    partial_layers: int = 0


Progress = Admitted | Computed
