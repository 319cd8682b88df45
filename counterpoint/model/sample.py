"""The sampler: one token per row of logits.

Owns: how logits, a request's settings and its seed become a token. The n-th token is a function of
its own logits, settings, seed and n; rows are independent. Padding ids (`limit` and above) and
masked ids are never sampled. No Python loop over rows, and no host synchronisation where
`Filters.width` is 0. Must not: hold state, use torch's generators, or change its input.

Order: penalties, logit bias (banned stop tokens too), grammar masks, temperature, min-p, top-k,
top-p (of the renormalised rest). A filter is a floor on the scaled logits; ties at the floor stay,
so it does not matter how a sort breaks ties.

Shapes: B rows, V vocabulary, K bytes of a mask, L tokens of the longest row, N biases per row,
R rows of a stage, F rows with top-k or top-p.
Formulas: repetition penalty arXiv:1909.05858 section 4.1; top-p arXiv:1904.09751 section 3.1;
min-p arXiv:2407.01082 section 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from counterpoint.types import NO_GRAMMAR, NOT_FINITE


@dataclasses.dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of the rows `rows_R` (None: all). `tokens_RL` holds each row's prompt [0, prompt)
    and output [prompt, length); entries beyond `length_R` are ignored. Repetition counts both,
    presence and frequency the output alone."""

    rows_R: Tensor | None
    tokens_RL: Tensor
    prompt_R: Tensor
    length_R: Tensor
    repetition_R: Tensor
    presence_R: Tensor
    frequency_R: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class LogitBias:
    """Adds `values_RN` to the logits `ids_RN` of the rows `rows_R` (None: all). A padding entry
    adds 0 to id 0."""

    rows_R: Tensor | None
    ids_RN: Tensor
    values_RN: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarMasks:
    """The ids that the rows `rows_R` may have: set bits of `bits_RK`, uint8, lowest bit first."""

    rows_R: Tensor
    bits_RK: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Filters:
    """Top-k and top-p of the rows `rows_F` of R. `top_k_F` 0 and `top_p_F` 1 are off; `top_p_F`
    None: off in all rows. `width`: how many of the largest logits to sort first, at least every
    top-k in use; 0: all, which avoids a host synchronisation on a GPU. `floor` replaces
    `filter_floor`."""

    rows_F: Tensor
    top_k_F: Tensor
    top_p_F: Tensor | None
    width: int = 0
    floor: Callable[[Tensor, Tensor, Tensor | None, int], Tensor] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DrawParams:
    """The rows `rows_R` (None: all) are drawn at random; the others are greedy.

    `n_R` is the index of the token in its request's output. `temperature_R` is above 0. `min_p_R` 0
    is off; None: off in all rows.
    """

    rows_R: Tensor | None
    seed_R: Tensor
    n_R: Tensor
    temperature_R: Tensor
    min_p_R: Tensor | None = None
    filters: Filters | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SamplerInputs:
    """How the rows of one batch are sampled. A stage that no row uses is None or empty, and
    free."""

    penalties: Penalties | None = None
    logit_bias: tuple[LogitBias, ...] = ()
    masks: GrammarMasks | None = None
    draw: DrawParams | None = None


def sample(logits_BV: Tensor, inputs: SamplerInputs, limit: int | None = None) -> Tensor:
    """One id per row, int64 [B], below `limit` (None: V). NOT_FINITE where a logit is not finite,
    NO_GRAMMAR where a mask allows no id."""
    logits_BV = logits_BV[:, :limit]
    finite_B = logits_BV.sum(1).isfinite()  # a sum is finite only if all its terms are
    allowed_R = None
    if inputs.penalties is not None or inputs.logit_bias or inputs.masks is not None:
        logits_BV = logits_BV.clone()
        if inputs.penalties is not None:
            apply_penalties_(logits_BV, inputs.penalties)
        for bias in inputs.logit_bias:
            apply_logit_bias_(logits_BV, bias)
        if inputs.masks is not None:
            allowed_R = apply_grammar_masks_(logits_BV, inputs.masks)
    draw = inputs.draw
    if draw is None:
        ids_B = logits_BV.argmax(1)
    elif draw.rows_R is None:
        ids_B = draw_tokens(logits_BV, draw)
    else:
        ids_B = logits_BV.argmax(1)
        ids_B[draw.rows_R] = draw_tokens(logits_BV[draw.rows_R], draw)
    if inputs.masks is not None and allowed_R is not None:
        ids_B[inputs.masks.rows_R] = torch.where(allowed_R, ids_B[inputs.masks.rows_R], NO_GRAMMAR)
    return torch.where(finite_B, ids_B, NOT_FINITE)


def logprobs(
    logits_BV: Tensor, ids_B: Tensor, top: int, limit: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the raw logits: of `ids_B` [B], then the `top` best ids and their values
    [B, top], best first. An id of -1 is read as 0."""
    logprobs_BV = logits_BV[:, :limit].log_softmax(1)
    chosen_B = logprobs_BV.gather(1, ids_B.clamp(min=0)[:, None])[:, 0]
    best = logprobs_BV.topk(min(top, logprobs_BV.shape[1]), 1)
    return chosen_B, best.indices, best.values


def uniform(seed_R: Tensor, n_R: Tensor) -> Tensor:
    """A number in [0, 1) per row, float64 with 53 bits, from (seed, n) alone.

    It is draw n of the SplitMix64 stream that starts at the mixed seed (Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", OOPSLA 2014, section 5), used as a
    counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
    """
    bits_R = _mix(_mix(seed_R + _GAMMA) + n_R * _GAMMA)
    return _shift(bits_R, 11).to(torch.float64) * 2.0**-53


def apply_penalties_(logits_BV: Tensor, penalties: Penalties) -> None:
    rows = penalties.rows_R
    logits_RV = logits_BV if rows is None else logits_BV[rows]
    tokens_RL = penalties.tokens_RL
    at_L = torch.arange(tokens_RL.shape[1], device=tokens_RL.device)
    present_RL = at_L < penalties.length_R[:, None]
    output_RL = present_RL & (at_L >= penalties.prompt_R[:, None])
    tokens_RL = tokens_RL.masked_fill(~present_RL, 0)
    zeros_RV = torch.zeros_like(logits_RV)
    seen_RV = zeros_RV.scatter_add(1, tokens_RL, present_RL.to(logits_RV.dtype)) > 0
    counts_RV = zeros_RV.scatter_add_(1, tokens_RL, output_RL.to(logits_RV.dtype))
    repetition_R1 = penalties.repetition_R[:, None]
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where(seen_RV, repeated_RV, logits_RV)
    logits_RV -= (
        penalties.presence_R[:, None] * (counts_RV > 0) + penalties.frequency_R[:, None] * counts_RV
    )
    logits_BV[slice(None) if rows is None else rows] = logits_RV


def apply_logit_bias_(logits_BV: Tensor, bias: LogitBias) -> None:
    if bias.rows_R is None:
        logits_BV.scatter_add_(1, bias.ids_RN, bias.values_RN)
    else:
        logits_BV.index_put_((bias.rows_R[:, None], bias.ids_RN), bias.values_RN, accumulate=True)


def apply_grammar_masks_(logits_BV: Tensor, masks: GrammarMasks) -> Tensor:
    """Masks forbidden ids with -inf. Returns, per masked row, whether any id is allowed."""
    bit_8 = torch.arange(8, dtype=torch.uint8, device=logits_BV.device)
    allowed_RV = (masks.bits_RK[:, :, None] >> bit_8 & 1).flatten(1)[:, : logits_BV.shape[1]].bool()
    logits_BV[masks.rows_R] = logits_BV[masks.rows_R].masked_fill_(~allowed_RV, -torch.inf)
    return allowed_RV.any(1)


def draw_tokens(logits_RV: Tensor, draw: DrawParams) -> Tensor:
    """One id per row by inverse CDF: the first id whose cumulative probability exceeds the row's
    random number."""
    x_RV = logits_RV - logits_RV.amax(1, keepdim=True)
    # The best is exactly 0, so even the smallest temperature gives no inf - inf.
    x_RV /= draw.temperature_R[:, None]
    if draw.min_p_R is not None:
        x_RV.masked_fill_(x_RV < draw.min_p_R.log()[:, None], -torch.inf)
    if draw.filters is not None:
        x_FV = x_RV[draw.filters.rows_F]
        floor = draw.filters.floor or filter_floor
        floor_F = floor(x_FV, draw.filters.top_k_F, draw.filters.top_p_F, draw.filters.width)
        x_RV[draw.filters.rows_F] = x_FV.masked_fill_(x_FV < floor_F[:, None], -torch.inf)
    cdf_RV = x_RV.softmax(1).cumsum_(1)
    total_R = cdf_RV[:, -1]
    target_R = (uniform(draw.seed_R, draw.n_R) * total_R).to(cdf_RV.dtype)
    # Below the total, so that some id exceeds it. A filtered id adds 0 and is skipped.
    target_R = torch.minimum(target_R, total_R.nextafter(torch.zeros_like(total_R)))
    ids_R1 = torch.searchsorted(cdf_RV, target_R[:, None], right=True).clamp_(
        max=cdf_RV.shape[1] - 1
    )
    if draw.min_p_R is not None or draw.filters is not None:
        # A parallel scan may round two equal sums apart: replace a filtered id by the best one.
        ids_R1 = torch.where(
            x_RV.gather(1, ids_R1) > -torch.inf, ids_R1, x_RV.argmax(1, keepdim=True)
        )
    return ids_R1[:, 0]


def filter_floor(x_FV: Tensor, top_k_F: Tensor, top_p_F: Tensor | None, width: int) -> Tensor:
    """The smallest scaled logit that top-k and top-p keep in each row; the best of `x_FV` is 0.

    With a `width`, only so many of the largest are sorted first, then 16 times more for rows whose
    top-p needs more. That costs a host synchronisation.
    """
    size = x_FV.shape[1]
    sort_all = not 0 < width < size
    best_FK = x_FV.sort(1, descending=True).values if sort_all else x_FV.topk(width, 1).values
    last_k_F = (top_k_F.clamp(max=best_FK.shape[1]) - 1).clamp(min=0)
    top_k_floor_F1 = best_FK.gather(1, last_k_F[:, None]).masked_fill(
        top_k_F[:, None] <= 0, -torch.inf
    )
    if top_p_F is None:
        return top_k_floor_F1[:, 0]
    mass_F1 = x_FV.exp().masked_fill_(x_FV < top_k_floor_F1, 0.0).sum(1, keepdim=True)
    share_FK = best_FK.exp().masked_fill_(best_FK < top_k_floor_F1, 0.0)
    before_FK = share_FK.cumsum(1) - share_FK
    wanted_F1 = top_p_F[:, None] * mass_F1
    kept_F1 = (before_FK < wanted_F1).sum(1, keepdim=True).clamp(min=1)
    top_p_floor_F1 = best_FK.gather(1, kept_F1 - 1).masked_fill(top_p_F[:, None] >= 1, -torch.inf)
    floor_F = torch.maximum(top_k_floor_F1, top_p_floor_F1)[:, 0]
    if not sort_all:
        reached_F = (
            (before_FK[:, -1:] >= wanted_F1)[:, 0]
            | (top_p_F >= 1)
            | (best_FK[:, -1] <= top_k_floor_F1[:, 0])
        )
        if not bool(reached_F.all()):
            short = (~reached_F).nonzero()[:, 0]
            floor_F[short] = filter_floor(x_FV[short], top_k_F[short], top_p_F[short], 16 * width)
    return floor_F


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant."""
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)
