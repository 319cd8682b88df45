"""Log-probabilities on the CPU, as the client gets them.

Promises: rows that do not ask cost nothing. At most BLOCK rows of a prompt's logits exist at once.

Shapes: B sampled rows, R of them that ask, V vocabulary, T tokens of the pass, D hidden, S
segments.
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
    sampling: SamplingTables, slot_B: Tensor, logits_BV: Tensor, ids_B: Tensor
) -> tuple[TokenLogprobs | None, ...]:
    """Of the sampled ids, one per sampled row. None where not asked for or not sampled; () if no
    row asks."""
    if not sampling.stages(slot_B) & SamplingStage.LOGPROBS:
        return ()
    rows_R = sampling.rows_with(slot_B, SamplingStage.LOGPROBS)
    counts = sampling.rows["logprobs"][slot_B[rows_R].numpy()].tolist()
    found = _token_logprobs(logits_BV[rows_R], ids_B[rows_R], counts, sampling.vocab)
    result: list[TokenLogprobs | None] = [None] * len(slot_B)
    for row, token, one in zip(rows_R.tolist(), ids_B[rows_R].tolist(), found, strict=True):
        result[row] = one if token >= 0 else None
    return tuple(result)


def prompt_logprobs(
    decoder: Decoder, tables: SlotTables, rows: PassRows, batch: PassTensors, x_TD: Tensor
) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
    """One entry per segment: of the prompt tokens at positions [start + 1, start + tokens], up to
    the prompt's end. None where not asked for; () if no segment asks. `x_TD`: hidden states after
    the last layer."""
    sampling = tables.sampling
    if not sampling.stages(rows.slot_S) & SamplingStage.PROMPT_LOGPROBS:
        return ()
    result: list[tuple[TokenLogprobs, ...] | None] = [None] * len(rows.slot_S)
    first_S = rows.tokens_S.cumsum(0) - rows.tokens_S
    asking_R = sampling.rows_with(rows.slot_S, SamplingStage.PROMPT_LOGPROBS)
    slot_R, start_R = rows.slot_S[asking_R], rows.start_S[asking_R]
    params_R = sampling.rows[slot_R.numpy()]
    last_prompt_R = tensor_column(params_R, "prompt_tokens") - 1
    last_R = torch.minimum(start_R + rows.tokens_S[asking_R], last_prompt_R)
    asked = (asking_R, slot_R, start_R, first_S[asking_R], last_R)
    counts = params_R["prompt_logprobs"].tolist()
    for segment, slot, start, first, last, count in zip(
        *(each.tolist() for each in asked), counts, strict=True
    ):
        if last <= start:
            continue  # a decode
        found: list[TokenLogprobs] = []
        for at in range(start, last, BLOCK):
            end = min(at + BLOCK, last)
            wanted = torch.arange(first + at - start, first + end - start)
            logits_RV = decoder.logits(x_TD, batch, wanted)
            ids_R = tables.tokens[slot, at + 1 : end + 1].long()
            found += _token_logprobs(logits_RV, ids_R, [count] * (end - at), sampling.vocab)
        result[segment] = tuple(found)
    return tuple(result)


def _token_logprobs(
    logits_RV: Tensor, ids_R: Tensor, counts: list[int], vocab: int
) -> list[TokenLogprobs]:
    """Of `ids_R`, each with its row's number of alternatives (`counts`)."""
    chosen, top_ids, top_values = (
        each.tolist() for each in logprobs(logits_RV, ids_R, max(counts), vocab)
    )
    return [
        TokenLogprobs(value, tuple(ids[:count]), tuple(values[:count]))
        for value, ids, values, count in zip(chosen, top_ids, top_values, counts, strict=True)
    ]
