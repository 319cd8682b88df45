"""Sampling of a pass on the device.

Owns: the sampler's device tensors from the host's settings, and TokenLogprobs from the device.
Promises: launching never waits. Results for the host are a LogprobsDownload, to be read when the
step's event has completed.
Must not: run the model, except the LM head for prompt log-probabilities.

Shapes: B sampled rows, R of them with log-probabilities, V vocabulary, T tokens of the pass, D
hidden, S segments.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterpoint.device.cuda.device_tables import PROCESSOR_STAGES, DeviceTables
from counterpoint.device.cuda.driver import Driver
from counterpoint.device.sampling_tables import SamplingStage, SamplingTables, tensor_column
from counterpoint.device.slot_tables import PassRows
from counterpoint.model.decoder import Decoder
from counterpoint.model.sample import (
    DrawParams,
    Filters,
    SamplerInputs,
    draw_tokens,
    logprobs,
    sample,
)
from counterpoint.types import TokenLogprobs

PROMPT_BLOCK_ROWS = 512  # rows of a prompt's logits computed at once
MAX_TOP_LOGPROBS = 20  # alternatives per token that a graph computes


class SamplingMode(enum.Flag):
    """What the rows of a decode step need at most. GREEDY: argmax. EAGER: sampled outside the
    graph."""

    GREEDY = 0
    RANDOM = enum.auto()
    FILTERED = enum.auto()  # top-k, top-p
    PROCESSED = enum.auto()  # penalties, bias, min_tokens
    LOGPROBS = enum.auto()  # and at most MAX_TOP_LOGPROBS alternatives
    EAGER = enum.auto()


GRAPH_STAGES = (
    SamplingStage.DRAW
    | SamplingStage.MIN_P
    | SamplingStage.TOP_K
    | SamplingStage.TOP_P
    | PROCESSOR_STAGES
    | SamplingStage.LOGPROBS
    | SamplingStage.PROMPT_LOGPROBS
)


@functools.cache  # called for every step, and flags are slow
def sampling_mode_for(stages: int) -> SamplingMode:
    """`stages`: the union of the rows' SamplingStage flags."""
    if stages & ~int(GRAPH_STAGES):  # includes unknown stages
        return SamplingMode.EAGER
    mode = SamplingMode.GREEDY
    if stages & SamplingStage.DRAW:
        mode |= SamplingMode.RANDOM | (
            SamplingMode.FILTERED
            if stages & (SamplingStage.TOP_K | SamplingStage.TOP_P)
            else SamplingMode.GREEDY
        )
    if stages & PROCESSOR_STAGES:
        mode |= SamplingMode.PROCESSED
    return mode | SamplingMode.LOGPROBS if stages & SamplingStage.LOGPROBS else mode


def sample_in_graph(
    logits_BV: Tensor, slot_B: Tensor, end_B: Tensor, tables: DeviceTables, mode: SamplingMode
) -> Tensor:
    """Ids by the device's settings of each slot. Also counts tokens for penalties. Capturable. Not
    for SamplingMode.EAGER."""
    logits_BV = logits_BV[:, : tables.sampling.vocab]
    if not mode & (SamplingMode.RANDOM | SamplingMode.PROCESSED):
        return sample(logits_BV, SamplerInputs())
    temperature_B, top_p_B, min_p_B, *penalties = tables.floats[slot_B].unbind(1)
    top_k_B, seed_B, prompt_tokens_B, min_tokens_B = tables.integers[slot_B].unbind(1)
    made_B = end_B - prompt_tokens_B
    finite_B = logits_BV.sum(1).isfinite()
    if mode & SamplingMode.PROCESSED:
        repetition_B, presence_B, frequency_B = penalties
        settings = (repetition_B, presence_B, frequency_B, min_tokens_B)
        logits_BV = tables.logits_processors.apply(logits_BV, slot_B, made_B, settings)
    ids_B = logits_BV.argmax(1)
    if mode & SamplingMode.RANDOM:
        filters = None
        if mode & SamplingMode.FILTERED:
            every_B = torch.arange(slot_B.shape[0], device=slot_B.device)
            filters = Filters(every_B, top_k_B, top_p_B, floor=tables.filter_floor)
        draws_B = temperature_B > 0
        draw = DrawParams(
            None, seed_B, made_B, torch.where(draws_B, temperature_B, 1.0), min_p_B, filters
        )
        ids_B = torch.where(draws_B, draw_tokens(logits_BV, draw), ids_B)
    ids_B = torch.where(finite_B, ids_B, -1)
    if mode & SamplingMode.PROCESSED:
        tables.logits_processors.count_tokens(slot_B, ids_B)
    return ids_B


def sample_eagerly(logits_BV: Tensor, rows: PassRows, tables: DeviceTables) -> Tensor:
    """Ids by all settings that the host has of each slot."""
    settings = tables.sampling
    if not len(rows.slot_B) or not settings.stages(rows.slot_B) & ~(
        SamplingStage.LOGPROBS | SamplingStage.PROMPT_LOGPROBS
    ):
        return sample(logits_BV, SamplerInputs(), settings.vocab)
    # The settings index a token table on the host; below, the device's replaces it.
    placeholder = torch.zeros(1, 1, dtype=torch.int64).expand(
        settings.rows.shape[0], int(rows.end_B.max())
    )
    choice = settings.sampler_inputs(rows.slot_B, rows.end_B, placeholder)
    penalties, draw = choice.penalties, choice.draw
    if penalties is not None:
        slot_R = rows.slot_B if penalties.rows_R is None else rows.slot_B[penalties.rows_R]
        length = penalties.tokens_RL.shape[1]
        penalties = dataclasses.replace(penalties, tokens_RL=penalties.tokens_RL[:, :0])
        penalties = upload_tensors(penalties, tables.driver)
        tokens_RL = tables.tokens[:, :length][tables.driver.upload(slot_R.numpy())].long()
        penalties = dataclasses.replace(penalties, tokens_RL=tokens_RL)
    if draw is not None and draw.filters is not None:
        draw = dataclasses.replace(
            draw, filters=dataclasses.replace(draw.filters, width=0, floor=tables.filter_floor)
        )
    added, masks, draw = (
        upload_tensors(part, tables.driver) for part in (choice.logit_bias, choice.masks, draw)
    )
    return sample(logits_BV, SamplerInputs(penalties, added, masks, draw), settings.vocab)


def upload_tensors(value: Any, driver: Driver) -> Any:
    """The same record with its tensors on the device."""
    if isinstance(value, Tensor):
        return driver.upload(value.numpy())
    if isinstance(value, tuple):
        return tuple(upload_tensors(each, driver) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: upload_tensors(getattr(value, f.name), driver)
            for f in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **fields)
    return value


# ---------------------------------------------------------------- log-probabilities


@dataclass(frozen=True, slots=True)
class LogprobsDownload:
    """Log-probabilities on their way to the host, of R tokens, with the `top_R` best alternatives
    of each. `rows`: for sampled tokens, the row of each; for a prompt, the segment of all.
    `whole_step`: the tensors hold all rows of the step, and only `rows` are wanted."""

    own_R: Tensor
    ids_RN: Tensor
    values_RN: Tensor
    top_R: tuple[int, ...]
    rows: tuple[int, ...]
    whole_step: bool = False

    def read(self) -> list[TokenLogprobs]:
        tensors = (self.own_R, self.ids_RN, self.values_RN)
        own_R, ids_RN, values_RN = (
            (x[list(self.rows)] for x in tensors) if self.whole_step else tensors
        )
        lists = (own_R.tolist(), ids_RN.tolist(), values_RN.tolist(), self.top_R)
        return [
            TokenLogprobs(own, tuple(ids[:top]), tuple(values[:top]))
            for own, ids, values, top in zip(*lists, strict=True)
        ]


def download_logprobs(
    logits_BV: Tensor, ids_B: Tensor, rows: PassRows, settings: SamplingTables, driver: Driver
) -> LogprobsDownload | None:
    """Log-probabilities of the sampled ids, for rows that ask for them."""
    if not settings.stages(rows.slot_B) & SamplingStage.LOGPROBS:
        return None
    rows_R = settings.rows_with(rows.slot_B, SamplingStage.LOGPROBS)
    top_R = settings.rows["logprobs"][rows.slot_B[rows_R].numpy()].tolist()
    at_R = driver.upload(rows_R.numpy())
    own_R, ids_RN, values_RN = map(
        driver.download, logprobs(logits_BV[at_R], ids_B[at_R], max(top_R), settings.vocab)
    )
    return LogprobsDownload(own_R, ids_RN, values_RN, tuple(top_R), tuple(rows_R.tolist()))


def select_logprobs(
    chosen: tuple[Tensor, Tensor, Tensor], slot_B: np.ndarray, settings: SamplingTables
) -> LogprobsDownload:
    """The same from a graph's host buffers, which hold all rows."""
    rows = settings.rows[slot_B]
    (asking,) = np.nonzero(rows["stages"] & SamplingStage.LOGPROBS)
    return LogprobsDownload(
        *chosen, tuple(rows["logprobs"][asking].tolist()), tuple(asking.tolist()), whole_step=True
    )


def wants_prompt_logprobs(tables: DeviceTables, rows: PassRows) -> bool:
    """Whether a segment asks for prompt log-probabilities, which need all rows' hidden states."""
    return bool(tables.sampling.stages(rows.slot_S) & SamplingStage.PROMPT_LOGPROBS)


def download_prompt_logprobs(
    decoder: Decoder, tables: DeviceTables, rows: PassRows, x_TD: Tensor
) -> list[LogprobsDownload]:
    """Per asking segment and block: log-probabilities of the prompt tokens at positions start + 1
    to start + tokens, up to the prompt's end. `x_TD`: hidden states after the last layer."""
    settings, driver = tables.sampling, tables.driver
    downloads = []
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
        for at in range(start, last, PROMPT_BLOCK_ROWS):
            end = min(at + PROMPT_BLOCK_ROWS, last)
            hidden_RD = x_TD[first + at - start : first + end - start]
            logits_RV, ids_R = decoder.head(hidden_RD), tables.tokens[slot, at + 1 : end + 1].long()
            own_R, ids_RN, values_RN = map(
                driver.download, logprobs(logits_RV, ids_R, top, settings.vocab)
            )
            downloads.append(
                LogprobsDownload(own_R, ids_RN, values_RN, (top,) * (end - at), (segment,))
            )
    return downloads


def read_chosen(
    download: LogprobsDownload | None, ids_B: np.ndarray
) -> tuple[TokenLogprobs | None, ...]:
    """One entry per sampled row, as in StepDone."""
    if download is None:
        return ()
    result: list[TokenLogprobs | None] = [None] * len(ids_B)
    for row, one in zip(download.rows, download.read(), strict=True):
        result[row] = one if ids_B[row] >= 0 else None
    return tuple(result)


def read_prompts(
    downloads: list[LogprobsDownload], segments: int
) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
    """One entry per segment, as in StepDone."""
    if not downloads:
        return ()
    result: list[tuple[TokenLogprobs, ...] | None] = [None] * segments
    for download in downloads:
        result[download.rows[0]] = (result[download.rows[0]] or ()) + tuple(download.read())
    return tuple(result)
