"""Log-probabilities, as the client sees them.

Owns: the way from logits to TokenLogprobs. Promises: rows that do not ask cost nothing; no more than BLOCK rows of logits of a
prompt exist at once.
Must not: sample.

Shapes: B sampled rows, R of them that ask, V vocabulary, T tokens of the pass, D hidden, S segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoint.device.sampling_tables import SamplingStage, SamplingTables, tensor_column
from counterpoint.device.slot_tables import PassRows, SlotTables
from counterpoint.model.batch import PassTensors
from counterpoint.model.decoder import Decoder
from counterpoint.model.sample import logprobs
from counterpoint.types import TokenLogprobs

BLOCK = 64  # rows of logits at a time


def chosen_logprobs(
    settings: SamplingTables, slot_B: Tensor, logits_BV: Tensor, ids_B: Tensor
) -> tuple[TokenLogprobs | None, ...]:
    """Of the sampled ids, one per sampled row; None where not asked for or not sampled; () if no row asks."""
    if not settings.stages(slot_B) & SamplingStage.LOGPROBS:
        return ()
    rows_R = settings.rows_with(slot_B, SamplingStage.LOGPROBS)
    tops = settings.rows["logprobs"][slot_B[rows_R].numpy()].tolist()
    told = _told(logits_BV[rows_R], ids_B[rows_R], tops, settings.vocab)
    result: list[TokenLogprobs | None] = [None] * len(slot_B)
    for row, token, one in zip(rows_R.tolist(), ids_B[rows_R].tolist(), told, strict=True):
        result[row] = one if token >= 0 else None
    return tuple(result)


def prompt_logprobs(
    decoder: Decoder, tables: SlotTables, rows: PassRows, batch: PassTensors, x_TD: Tensor
) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
    """One entry per segment: of the prompt tokens at positions start + 1 to start + tokens, as far as the prompt goes; None where
    not asked for; () if no segment asks. `x_TD` are the hidden states behind the last layer."""
    settings = tables.sampling
    if not settings.stages(rows.slot_S) & SamplingStage.PROMPT_LOGPROBS:
        return ()
    result: list[tuple[TokenLogprobs, ...] | None] = [None] * len(rows.slot_S)
    first_S = rows.tokens_S.cumsum(0) - rows.tokens_S
    asking_R = settings.rows_with(rows.slot_S, SamplingStage.PROMPT_LOGPROBS)
    settings_R = settings.rows[rows.slot_S[asking_R].numpy()]
    last_R = torch.minimum(
        rows.start_S[asking_R] + rows.tokens_S[asking_R],
        tensor_column(settings_R, "prompt_tokens") - 1,
    )
    for segment, last, top in zip(
        asking_R.tolist(), last_R.tolist(), settings_R["prompt_logprobs"].tolist(), strict=True
    ):
        slot, start, first = (
            int(rows.slot_S[segment]),
            int(rows.start_S[segment]),
            int(first_S[segment]),
        )
        if last <= start:
            continue  # a decode
        told: list[TokenLogprobs] = []
        for at in range(start, last, BLOCK):
            end = min(at + BLOCK, last)
            logits = decoder.logits(
                x_TD, batch, torch.arange(first + at - start, first + end - start)
            )
            ids = tables.tokens[slot, at + 1 : end + 1].long()
            told += _told(logits, ids, [top] * (end - at), settings.vocab)
        result[segment] = tuple(told)
    return tuple(result)


def _told(logits_RV: Tensor, ids_R: Tensor, tops: list[int], vocab: int) -> list[TokenLogprobs]:
    chosen, top_ids, top_values = (
        each.tolist() for each in logprobs(logits_RV, ids_R, max(tops), vocab)
    )
    return [
        TokenLogprobs(value, tuple(ids[:top]), tuple(values[:top]))
        for value, ids, values, top in zip(chosen, top_ids, top_values, tops, strict=True)
    ]
