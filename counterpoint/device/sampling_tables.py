"""SamplingTables: the sampling parameters of the open slots.

Owns: the way from a request's Sampling to the sampler's SamplerInputs.
Promises: all of it is on the host, so a stage that no row of a step asks for is skipped without
asking the device. No Python loop over rows.
Must not: sample.

Shapes: B sampled rows, R and F some of them, N values added per row, L tokens of the longest row.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from counterpoint.device.grammar import Grammars
from counterpoint.model.sample import (
    DrawParams,
    Filters,
    GrammarMasks,
    LogitBias,
    Penalties,
    SamplerInputs,
)
from counterpoint.types import Sampling

TOP_P_WIDTH = 128  # logits that are sorted at first for top-p


class SamplingStage(enum.IntFlag):
    """What a slot asks of the sampler beyond the best logit."""

    NONE = 0
    DRAW = 1
    MIN_P = 2
    TOP_K = 4
    TOP_P = 8
    PENALTIES = 16
    BIAS = 32
    MIN_TOKENS = 64
    LOGPROBS = 128
    PROMPT_LOGPROBS = 256
    GRAMMAR = 512


FLOAT_FIELDS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
INT_FIELDS = (
    "top_k",
    "seed",
    "prompt_tokens",
    "min_tokens",
    "stages",
    "logprobs",
    "prompt_logprobs",
)
# Aligned, since torch takes no strides that are odd for the element.
ROW = np.dtype(
    [*((name, "f4") for name in FLOAT_FIELDS), *((name, "i8") for name in INT_FIELDS)], align=True
)
PAIR = np.dtype([("id", "i8"), ("value", "f4")], align=True)


class SamplingTables:
    """One row per slot. `rows` is a structured array (ROW). `logit_bias` and `end_bias` are added
    to single logits: the request's logit_bias, and -inf for tokens that would end it before
    `min_tokens`. Ids from `vocab` on are left out, as they have no logit. Where there is a grammar,
    `grammars` decides what may end the request."""

    def __init__(self, slots: int, vocab: int, eos_token_ids: Sequence[int] = ()) -> None:
        self.vocab = vocab
        self.eos_token_ids = tuple(eos_token_ids)
        self.rows = np.zeros(slots, ROW)
        self.logit_bias = RaggedRows(slots)
        self.end_bias = RaggedRows(slots)
        self.grammars = Grammars(vocab, eos_token_ids)

    def set_row(
        self, slot: int, sampling: Sampling, prompt_tokens: int, output: Sequence[int] = ()
    ) -> None:
        """`output`: tokens of the answer that exist already."""
        s = sampling
        self.grammars.init_slot(slot, s, output)
        stages = requested_stages(s)
        bias = [(id, value) for id, value in s.logit_bias if id < self.vocab]
        self.logit_bias.set_row(slot, bias)
        ends = s.stop_token_ids if s.ignore_eos else (*s.stop_token_ids, *self.eos_token_ids)
        if not stages & SamplingStage.MIN_TOKENS:
            ends = ()
        self.end_bias.set_row(
            slot, [(id, -np.inf) for id in dict.fromkeys(ends) if id < self.vocab]
        )
        self.rows[slot] = (
            s.temperature,
            s.top_p,
            s.min_p,
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
            s.top_k,
            (s.seed + (1 << 63)) % (1 << 64) - (1 << 63),
            prompt_tokens,
            s.min_tokens,
            stages,
            s.logprobs or 0,
            s.prompt_logprobs or 0,
        )

    def stages(self, slot_B: Tensor) -> SamplingStage:
        """What any of the rows asks for."""
        stages_B = self.rows["stages"][slot_B.numpy()]
        return SamplingStage(int(np.bitwise_or.reduce(stages_B, initial=0)))

    def rows_with(self, slot_B: Tensor, stage: SamplingStage) -> Tensor:
        """Indices of the rows that ask for `stage`."""
        return torch.from_numpy(np.flatnonzero(self.rows["stages"][slot_B.numpy()] & stage))

    def sampler_inputs(self, slot_B: Tensor, end_B: Tensor, tokens: Tensor) -> SamplerInputs:
        """How rows are sampled whose new token is at position `end_B`. `tokens` [slots,
        context]: the token table."""
        asked = self.stages(slot_B)
        if not asked & ~(SamplingStage.LOGPROBS | SamplingStage.PROMPT_LOGPROBS):
            return SamplerInputs()
        penalties = masks = draw = None
        if asked & SamplingStage.PENALTIES:
            penalties = self._penalties(slot_B, end_B, tokens)
        bias = self._bias(slot_B, end_B, asked)
        if asked & SamplingStage.GRAMMAR:
            masks = self._masks(slot_B, end_B)
        if asked & SamplingStage.DRAW:
            draw = self._draw(slot_B, end_B)
        return SamplerInputs(penalties, bias, masks, draw)

    def _penalties(self, slot_B: Tensor, end_B: Tensor, tokens: Tensor) -> Penalties:
        rows_R = self.rows_with(slot_B, SamplingStage.PENALTIES)
        slot_R, length_R = slot_B[rows_R], end_B[rows_R]
        row = self.rows[slot_R.numpy()]
        tokens_RL = tokens[:, : int(length_R.max())][slot_R].long()
        penalties = (tensor_column(row, name) for name in ("repetition", "presence", "frequency"))
        prompt_R = tensor_column(row, "prompt_tokens")
        return Penalties(rows_R, tokens_RL, prompt_R, length_R, *penalties)

    def _bias(self, slot_B: Tensor, end_B: Tensor, asked: SamplingStage) -> tuple[LogitBias, ...]:
        found = []
        if asked & SamplingStage.BIAS:
            rows_R = self.rows_with(slot_B, SamplingStage.BIAS)
            found.append(LogitBias(rows_R, *self.logit_bias.gather(slot_B[rows_R])))
        if asked & SamplingStage.MIN_TOKENS:
            rows_R = self.rows_with(slot_B, SamplingStage.MIN_TOKENS)
            row = self.rows[slot_B[rows_R].numpy()]
            output_R = end_B[rows_R] - tensor_column(row, "prompt_tokens")
            rows_R = rows_R[output_R < tensor_column(row, "min_tokens")]
            found.append(LogitBias(rows_R, *self.end_bias.gather(slot_B[rows_R])))
        return tuple(each for each in found if len(each.rows_R))

    def _masks(self, slot_B: Tensor, end_B: Tensor) -> GrammarMasks:
        rows_R = self.rows_with(slot_B, SamplingStage.GRAMMAR)
        slot_R = slot_B[rows_R]
        n_R = end_B[rows_R] - tensor_column(self.rows[slot_R.numpy()], "prompt_tokens")
        masks = self.grammars.compute_bitmasks(slot_R.tolist(), n_R.tolist())
        return GrammarMasks(rows_R, torch.from_numpy(masks))

    def _draw(self, slot_B: Tensor, end_B: Tensor) -> DrawParams:
        rows_R = self.rows_with(slot_B, SamplingStage.DRAW)
        slot_R = slot_B[rows_R]
        row = self.rows[slot_R.numpy()]
        asked = self.stages(slot_R)
        filtered = asked & (SamplingStage.TOP_K | SamplingStage.TOP_P)
        return DrawParams(
            rows_R=rows_R if len(rows_R) < len(slot_B) else None,
            seed_R=tensor_column(row, "seed"),
            n_R=end_B[rows_R] - tensor_column(row, "prompt_tokens"),
            temperature_R=tensor_column(row, "temperature"),
            min_p_R=tensor_column(row, "min_p") if asked & SamplingStage.MIN_P else None,
            filters=self._filters(slot_R, asked) if filtered else None,
        )

    def _filters(self, slot_R: Tensor, asked: SamplingStage) -> Filters:
        rows_F = self.rows_with(slot_R, SamplingStage.TOP_K | SamplingStage.TOP_P)
        row = self.rows[slot_R[rows_F].numpy()]
        top_k_F = tensor_column(row, "top_k")
        top_p_F = tensor_column(row, "top_p") if asked & SamplingStage.TOP_P else None
        only_top_p = bool((top_k_F == 0).any())
        width = max(int(top_k_F.max()), TOP_P_WIDTH if only_top_p else 0)
        return Filters(rows_F, top_k_F, top_p_F, width)


def requested_stages(s: Sampling) -> SamplingStage:
    penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    requested = {
        SamplingStage.DRAW: np.float32(s.temperature) > 0,
        SamplingStage.MIN_P: s.min_p > 0,
        SamplingStage.TOP_K: s.top_k > 0,
        SamplingStage.TOP_P: s.top_p < 1,
        SamplingStage.PENALTIES: penalties != (1, 0, 0),
        SamplingStage.BIAS: bool(s.logit_bias),
        SamplingStage.MIN_TOKENS: s.min_tokens > 0 and not s.grammar,
        SamplingStage.LOGPROBS: s.logprobs is not None,
        SamplingStage.PROMPT_LOGPROBS: s.prompt_logprobs is not None,
        SamplingStage.GRAMMAR: bool(s.grammar),
    }
    return SamplingStage(sum(stage for stage, wanted in requested.items() if wanted))


class RaggedRows:
    """A few (id, value) pairs per slot, padded with (0, 0.0) to the most that any slot has had. One
    array, replaced when it grows: a thread that reads has the old or the new one, and its own rows
    are the same in both."""

    def __init__(self, slots: int) -> None:
        self.pairs = np.zeros((slots, 0), PAIR)

    def set_row(self, slot: int, pairs: Sequence[tuple[int, float]]) -> None:
        missing = len(pairs) - self.pairs.shape[1]
        if missing > 0:
            padding = np.zeros((len(self.pairs), missing), PAIR)
            self.pairs = np.concatenate([self.pairs, padding], 1)
        self.pairs[slot] = np.zeros((), PAIR)
        self.pairs[slot, : len(pairs)] = np.array(list(pairs), PAIR)

    def gather(self, slot_R: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and values [R, N]."""
        pairs = self.pairs[slot_R.numpy()]
        return tensor_column(pairs, "id"), tensor_column(pairs, "value")


def tensor_column(rows: np.ndarray, name: str) -> Tensor:
    """One field of structured rows, as a tensor of its own. (A view of one element counts as
    contiguous whatever its strides, so it is copied.)"""
    return torch.from_numpy(rows[name].copy())
