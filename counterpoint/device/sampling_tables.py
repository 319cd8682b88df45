"""The sampling settings of the open slots.

Owns: the way from a request's Sampling to the sampler's Choice. Promises: all of it is on the host, so that a stage which no row of
a step asks for is left out without a look at the device; no Python loop over rows.
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

FIRST_WIDTH = 128  # logits that are sorted at first for top-p


class SamplingStage(enum.IntFlag):
    """What a slot asks of the sampler beyond the best logit."""

    NONE = 0
    DRAW = 1
    MIN_P = 2
    TOP_K = 4
    TOP_P = 8
    PENALTIES = 16
    BIAS = 32
    MIN_TOKENS = 64  # min_tokens
    LOGPROBS = 128
    PROMPT_LOGPROBS = 256
    GRAMMAR = 512


ROW = np.dtype(
    [
        *(
            (name, "f4")
            for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
        ),
        *(
            (name, "i8")
            for name in (
                "top_k",
                "seed",
                "prompt_tokens",
                "min_tokens",
                "stages",
                "logprobs",
                "prompt_logprobs",
            )
        ),
    ],
    align=True,
)

PAIR = np.dtype(
    [("id", "i8"), ("value", "f4")], align=True
)  # torch takes no strides that are odd for the element


class SamplingTables:
    """One row per slot. `rows` is a structured array, `bias` and `ends` the values added to single logits: the request's
    logit_bias, and -inf for what would end it before `min_tokens`. Ids of `vocab` and beyond are left out: they have no logit.
    Where there is a grammar, `grammars` knows what may end it, and when."""

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
        """`output`: tokens of the answer that are there already."""
        s = sampling
        keep_on = s.min_tokens > 0 and not s.grammar
        self.grammars.init_slot(slot, s, output)
        ends = s.stop_token_ids if s.ignore_eos else (*s.stop_token_ids, *self.eos_token_ids)
        self.logit_bias.set_row(
            slot, [(id, value) for id, value in s.logit_bias if id < self.vocab]
        )
        self.end_bias.set_row(
            slot,
            [(id, -np.inf) for id in dict.fromkeys(ends) if id < self.vocab] if keep_on else [],
        )
        asked = {
            SamplingStage.DRAW: np.float32(s.temperature) > 0,
            SamplingStage.MIN_P: s.min_p > 0,
            SamplingStage.TOP_K: s.top_k > 0,
            SamplingStage.TOP_P: s.top_p < 1,
            SamplingStage.PENALTIES: (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
            != (1, 0, 0),
            SamplingStage.BIAS: bool(s.logit_bias),
            SamplingStage.MIN_TOKENS: keep_on,
            SamplingStage.LOGPROBS: s.logprobs is not None,
            SamplingStage.PROMPT_LOGPROBS: s.prompt_logprobs is not None,
            SamplingStage.GRAMMAR: bool(s.grammar),
        }
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
            sum(stage for stage, wanted in asked.items() if wanted),
            s.logprobs or 0,
            s.prompt_logprobs or 0,
        )

    def stages(self, slot_B: Tensor) -> SamplingStage:
        """What any of the rows asks for."""
        return SamplingStage(
            int(np.bitwise_or.reduce(self.rows["stages"][slot_B.numpy()], initial=0))
        )

    def rows_with(self, slot_B: Tensor, stage: SamplingStage) -> Tensor:
        """Indices of the rows that ask for `stage`."""
        return torch.from_numpy(np.flatnonzero(self.rows["stages"][slot_B.numpy()] & stage))

    def sampler_inputs(self, slot_B: Tensor, end_B: Tensor, tokens: Tensor) -> SamplerInputs:
        """How rows are sampled whose new token stands at position `end_B`. `tokens` [slots, context]: the token table."""
        asked = self.stages(slot_B)
        if not asked & ~(SamplingStage.LOGPROBS | SamplingStage.PROMPT_LOGPROBS):
            return SamplerInputs()
        return SamplerInputs(
            penalties=self._penalties(slot_B, end_B, tokens)
            if asked & SamplingStage.PENALTIES
            else None,
            logit_bias=self._added(slot_B, end_B, asked),
            masks=self._masks(slot_B, end_B) if asked & SamplingStage.GRAMMAR else None,
            draw=self._draw(slot_B, end_B) if asked & SamplingStage.DRAW else None,
        )

    def _penalties(self, slot_B: Tensor, end_B: Tensor, tokens: Tensor) -> Penalties:
        rows_R = self.rows_with(slot_B, SamplingStage.PENALTIES)
        slot_R, length_R = slot_B[rows_R], end_B[rows_R]
        row = self.rows[slot_R.numpy()]
        tokens_RL = tokens[:, : int(length_R.max())][slot_R].long()
        settings = (tensor_column(row, name) for name in ("repetition", "presence", "frequency"))
        return Penalties(
            rows_R, tokens_RL, tensor_column(row, "prompt_tokens"), length_R, *settings
        )

    def _added(self, slot_B: Tensor, end_B: Tensor, asked: SamplingStage) -> tuple[LogitBias, ...]:
        added = []
        if asked & SamplingStage.BIAS:
            rows_R = self.rows_with(slot_B, SamplingStage.BIAS)
            added.append(LogitBias(rows_R, *self.logit_bias.gather(slot_B[rows_R])))
        if asked & SamplingStage.MIN_TOKENS:
            rows_R = self.rows_with(slot_B, SamplingStage.MIN_TOKENS)
            row = self.rows[slot_B[rows_R].numpy()]
            short = end_B[rows_R] - tensor_column(row, "prompt_tokens") < tensor_column(
                row, "min_tokens"
            )
            rows_R = rows_R[short]
            added.append(LogitBias(rows_R, *self.end_bias.gather(slot_B[rows_R])))
        return tuple(each for each in added if len(each.rows_R))

    def _masks(self, slot_B: Tensor, end_B: Tensor) -> GrammarMasks:
        rows_R = self.rows_with(slot_B, SamplingStage.GRAMMAR)
        slot_R = slot_B[rows_R]
        n_R = end_B[rows_R] - tensor_column(self.rows[slot_R.numpy()], "prompt_tokens")
        return GrammarMasks(
            rows_R, torch.from_numpy(self.grammars.compute_bitmasks(slot_R.tolist(), n_R.tolist()))
        )

    def _draw(self, slot_B: Tensor, end_B: Tensor) -> DrawParams:
        rows_R = self.rows_with(slot_B, SamplingStage.DRAW)
        slot_R = slot_B[rows_R]
        row = self.rows[slot_R.numpy()]
        asked = self.stages(slot_R)
        return DrawParams(
            rows_R=rows_R if len(rows_R) < len(slot_B) else None,
            seed_R=tensor_column(row, "seed"),
            n_R=end_B[rows_R] - tensor_column(row, "prompt_tokens"),
            temperature_R=tensor_column(row, "temperature"),
            min_p_R=tensor_column(row, "min_p") if asked & SamplingStage.MIN_P else None,
            filters=self._filters(slot_R, asked)
            if asked & (SamplingStage.TOP_K | SamplingStage.TOP_P)
            else None,
        )

    def _filters(self, slot_R: Tensor, asked: SamplingStage) -> Filters:
        rows_F = self.rows_with(slot_R, SamplingStage.TOP_K | SamplingStage.TOP_P)
        row = self.rows[slot_R[rows_F].numpy()]
        top_k_F = tensor_column(row, "top_k")
        only_top_p = bool((top_k_F == 0).any())
        width = max(int(top_k_F.max()), FIRST_WIDTH if only_top_p else 0)
        return Filters(
            rows_F,
            top_k_F,
            tensor_column(row, "top_p") if asked & SamplingStage.TOP_P else None,
            width,
        )


class RaggedRows:
    """A few (id, value) pairs per slot, padded with (0, 0.0) to the most that any slot has had. One array, replaced when it
    grows: a thread that reads has the old or the new one, and its own rows are the same in both."""

    def __init__(self, slots: int) -> None:
        self.pairs = np.zeros((slots, 0), PAIR)

    def set_row(self, slot: int, pairs: Sequence[tuple[int, float]]) -> None:
        missing = len(pairs) - self.pairs.shape[1]
        if missing > 0:
            self.pairs = np.concatenate(
                [self.pairs, np.zeros((len(self.pairs), missing), self.pairs.dtype)], 1
            )
        self.pairs[slot] = np.zeros((), self.pairs.dtype)
        self.pairs[slot, : len(pairs)] = np.array(list(pairs), self.pairs.dtype)

    def gather(self, slot_R: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and values [R, N]."""
        pairs = self.pairs[slot_R.numpy()]
        return tensor_column(pairs, "id"), tensor_column(pairs, "value")


def tensor_column(rows: np.ndarray, name: str) -> Tensor:
    """One field of structured rows, as a tensor of its own."""
    return torch.from_numpy(
        rows[name].copy()
    )  # what has one element counts as contiguous, whatever its strides
