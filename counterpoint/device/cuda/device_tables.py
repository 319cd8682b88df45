"""DeviceTables: token ids, block tables and sampling settings of the open slots, on the device.

Owns: these tensors and their uploads.
Promises: a decode step needs only slots, positions and new pages from the host. Sampled tokens stay
on the device. Nothing here waits for the device. Decode batches are padded to few sizes (BUCKETS).
Must not: run a model.

`init_slot` keeps its data on the host until a step names the slot. It is uploaded on that step's
stream, so no stream waits for another. The tables have one slot more than asked for, and the KV
pool one page more: padding rows write there, and nobody reads them.

Memory: 4 bytes per slot and position (128 MiB for 256 slots of 131,072 tokens), plus 9 bytes per
slot and vocabulary token (283 MiB for 256 slots of 128,256 tokens; logits_processors.py).

Shapes: S segments, T tokens of the pass, L context tokens of its prefill segments, B sampled
segments or rows of a decode step, P pages of a block-table row, N rows of a bucket.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from counterpoint.device.cuda.attention import (
    AttentionPlan,
    AttentionPlanner,
    DecodeKernel,
    PromptRows,
    group_for_gather,
)
from counterpoint.device.cuda.driver import Driver
from counterpoint.device.cuda.kernels.floor import FilterFloor
from counterpoint.device.cuda.logits_processors import LogitsProcessors
from counterpoint.device.sampling_tables import SamplingStage, SamplingTables
from counterpoint.device.slot_tables import PassRows
from counterpoint.model.batch import PassTensors
from counterpoint.types import InitSlot, Segment

FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
INTEGERS = ("top_k", "seed", "prompt_tokens", "min_tokens")
PROCESSOR_STAGES = SamplingStage.PENALTIES | SamplingStage.BIAS | SamplingStage.MIN_TOKENS
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def buckets_for(max_rows: int) -> tuple[int, ...]:
    """Bucket sizes up to `max_rows`; beyond the largest of BUCKETS, multiples of 64."""
    sizes = [*BUCKETS, *range(BUCKETS[-1] + 64, max_rows + 64, 64)]
    return tuple(sizes[: bisect.bisect_left(sizes, max_rows) + 1])


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """Sampled tokens go to position `end_B` of slot `slot_B`."""

    slot_B: Tensor
    end_B: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PassInputs:
    """`slot_position_2T`: slot and position of each row; padding rows name the padding slot.
    `last_rows_N`: the rows to sample from, padded to a bucket by repeating the first."""

    slot_position_2T: Tensor
    last_rows_N: Tensor
    sampled: SampledRows
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class TableShape:
    """`vocab`: ids from there on are never sampled. `padding_page`: used by no request."""

    slots: int
    max_context_tokens: int
    page_tokens: int
    vocab: int
    padding_page: int


class DeviceTables:
    """`tokens` [slots + 1, context + 1] and `pages` [slots + 1, pages of a context], int32.
    `floats` and `integers`: sampling settings per slot, with columns FLOATS and INTEGERS.
    `logits_processors`: the settings that need a row of the vocabulary. `sampling`: all settings,
    on the host."""

    def __init__(
        self,
        shape: TableShape,
        eos_token_ids: Sequence[int],
        driver: Driver,
        filter_floor: FilterFloor | None = None,
    ) -> None:
        """`filter_floor`: the kernel that replaces sorting in top-k and top-p."""
        device, slots, context = driver.device, shape.slots, shape.max_context_tokens
        self.driver = driver
        self.page_tokens = shape.page_tokens
        self.padding_slot, self.padding_page = slots, shape.padding_page
        self.tokens = torch.zeros(slots + 1, context + 1, dtype=torch.int32, device=device)
        self.pages = torch.full(
            (slots + 1, -(-context // shape.page_tokens)),
            shape.padding_page,
            dtype=torch.int32,
            device=device,
        )
        self.floats = torch.zeros(slots + 1, len(FLOATS), dtype=torch.float32, device=device)
        self.integers = torch.zeros(slots + 1, len(INTEGERS), dtype=torch.int64, device=device)
        self.floats[:, FLOATS.index("repetition")] = 1.0
        self.sampling = SamplingTables(slots + 1, shape.vocab, eos_token_ids)
        self.logits_processors = LogitsProcessors(slots + 1, shape.vocab, device)
        self._processed_slots: set[int] = set()  # slots with such settings
        self.filter_floor = filter_floor
        self._empty_tables = self.pages[:0], torch.zeros(0, dtype=torch.int32, device=device)
        self.buckets = buckets_for(slots)
        self._pending_slots: dict[int, InitSlot] = {}
        self._num_pages = [0] * slots

    def pad_to_bucket(self, rows: int) -> int:
        """The bucket size for so many rows."""
        return self.buckets[bisect.bisect_left(self.buckets, rows)] if rows else 0

    def init_slot(self, command: InitSlot) -> None:
        """Raises ValueError if the tokens do not fit a row."""
        slot = command.slot
        if len(command.tokens) >= self.tokens.shape[1]:
            raise ValueError(
                f"slot {slot}: {len(command.tokens)} tokens do not fit a context of "
                f"{self.tokens.shape[1] - 1}: raise max_context_tokens"
            )
        self._num_pages[slot] = 0
        self.sampling.set_row(
            slot, command.sampling, command.prompt_tokens, command.tokens[command.prompt_tokens :]
        )
        self._pending_slots[slot] = command

    def free_slot(self, slot: int) -> None:
        self._pending_slots.pop(slot, None)
        self.sampling.grammars.free_slot(slot)

    def upload_pending(self, segments: Sequence[Segment]) -> None:
        """Upload newly initialised slots and new pages of these segments. Call it once per pass,
        before its first step, on that step's stream."""
        opened = (
            [self._pending_slots.pop(s.slot) for s in segments if s.slot in self._pending_slots]
            if self._pending_slots
            else []
        )
        entries: list[tuple[int, int, int]] = []  # slot, index in its block table, page
        for command in opened:
            tokens = self.driver.upload(np.array(command.tokens, np.int32))
            self.tokens[command.slot, : len(command.tokens)] = tokens
            self._init_processors(command, tokens)
            entries += self._append_pages(command.slot, command.pages)
        for segment in segments:
            if segment.pages:
                entries += self._append_pages(segment.slot, segment.pages)
        if entries:
            slot_N, index_N, page_N = self.driver.upload(np.array(entries, np.int64).T.copy())
            self.pages[slot_N, index_N] = page_N.to(torch.int32)
        if opened:
            slots = np.array([command.slot for command in opened], np.int64)
            rows = self.sampling.rows[slots]
            at = self.driver.upload(slots)
            self.floats[at] = self.driver.upload(np.stack([rows[name] for name in FLOATS], 1))
            self.integers[at] = self.driver.upload(np.stack([rows[name] for name in INTEGERS], 1))

    def fill_decode_inputs(self, segments: Sequence[Segment], inputs_3B: np.ndarray) -> None:
        """Fill in slot, position and new page (-1: none) of each row of a decode step; rows beyond
        the segments name the padding slot. The graph itself writes the new pages to the block
        table. If a slot is not uploaded yet, or pages are not simply the next one, `upload_pending`
        does it all."""
        count = len(segments)
        inputs_3B[0, :count] = slots = [s.slot for s in segments]
        inputs_3B[1, :count] = [s.start for s in segments]
        inputs_3B[0, count:], inputs_3B[1, count:], inputs_3B[2] = self.padding_slot, 0, -1
        paged = [(row, s) for row, s in enumerate(segments) if s.pages]
        used, page_tokens = self._num_pages, self.page_tokens
        plain = all(len(s.pages) == 1 and used[s.slot] == s.start // page_tokens for _, s in paged)
        if not plain or (self._pending_slots and not self._pending_slots.keys().isdisjoint(slots)):
            self.upload_pending(segments)
            return
        for row, segment in paged:
            inputs_3B[2, row] = segment.pages[0]
            used[segment.slot] += 1

    def make_inputs(
        self,
        rows: PassRows,
        planner: AttentionPlanner,
        decode: DecodeKernel,
        pad_rows: Callable[[int], int],
    ) -> PassInputs:
        """Start uploading what the host knows of a pass. `pad_rows`: padded row count."""
        slot_S, start_S, tokens_S = rows.slot_S.numpy(), rows.start_S.numpy(), rows.tokens_S.numpy()
        first_S = np.cumsum(tokens_S) - tokens_S
        total = int(tokens_S.sum())
        slot_position_2T = np.zeros((2, pad_rows(total)), np.int64)
        slot_position_2T[0, :total] = np.repeat(slot_S, tokens_S)
        slot_position_2T[0, total:] = self.padding_slot
        slot_position_2T[1, :total] = np.arange(total) + np.repeat(start_S - first_S, tokens_S)
        last_S = first_S + tokens_S - 1
        count = len(rows.slot_B)
        sampled_3N = np.zeros((3, self.pad_to_bucket(count)), np.int64)
        sampled_3N[:, :count] = (
            last_S[rows.sampled_B.numpy()],
            rows.slot_B.numpy(),
            rows.end_B.numpy(),
        )
        sampled_3N[0, count:] = sampled_3N[0, :1]
        last_rows_N, slot_N, end_N = self.driver.upload(sampled_3N)
        plan = self._plan_attention(slot_S, start_S + tokens_S, tokens_S, planner, decode)
        return PassInputs(
            self.driver.upload(slot_position_2T),
            last_rows_N,
            SampledRows(slot_N[:count], end_N[:count]),
            plan,
        )

    def lookup_tokens(self, slot_position_2T: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of rows given by slot and position, and their K and V rows in the pool.
        Capturable."""
        slot_T, position_T = slot_position_2T
        return self.tokens[slot_T, position_T], self._kv_rows(slot_T, position_T)

    def make_batch(self, inputs: PassInputs) -> PassTensors:
        """The pass as device tensors, read from the tables in stream order."""
        tokens_T, kv_rows_T = self.lookup_tokens(inputs.slot_position_2T)
        return PassTensors(
            tokens_T, inputs.slot_position_2T[1], kv_rows_T, inputs.last_rows_N, inputs.plan
        )

    def write_sampled(self, sampled: SampledRows, ids_B: Tensor) -> None:
        """Write the sampled ids. A row that could not be sampled (-1) gets id 0, since a step
        already queued may still read it."""
        self.tokens[sampled.slot_B, sampled.end_B] = ids_B.clamp(min=0).to(torch.int32)
        if self._processed_slots:
            self.logits_processors.count_tokens(sampled.slot_B, ids_B)

    def _init_processors(self, command: InitSlot, tokens_L: Tensor) -> None:
        """Fill the slot's row of the logits processors, if this request or the slot's last one uses
        any."""
        slot, settings = command.slot, self.sampling
        asks = bool(settings.rows["stages"][slot] & PROCESSOR_STAGES)
        if not asks and slot not in self._processed_slots:
            return
        bias, ends = settings.logit_bias.pairs[slot], settings.end_bias.pairs[slot]
        bias_N = (self.driver.upload(bias["id"].copy()), self.driver.upload(bias["value"].copy()))
        ends_N = self.driver.upload(ends["id"][ends["value"] < 0])
        self.logits_processors.init_slot(slot, tokens_L, command.prompt_tokens, bias_N, ends_N)
        self._processed_slots = (
            self._processed_slots | {slot} if asks else self._processed_slots - {slot}
        )

    def _plan_attention(
        self,
        slot_S: np.ndarray,
        end_S: np.ndarray,
        tokens_S: np.ndarray,
        planner: AttentionPlanner,
        decode: DecodeKernel,
    ) -> AttentionPlan:
        longer = np.flatnonzero(tokens_S != 1)
        decodes = int(longer[0]) if len(longer) else len(tokens_S)
        table_BP, length_B = self._empty_tables
        if decodes:
            width = -(-int(end_S[:decodes].max()) // self.page_tokens)
            table_BP = self.pages[:, :width][self.driver.upload(slot_S[:decodes])]
            length_B = self.driver.upload(end_S[:decodes].astype(np.int32))
        if decodes == len(slot_S):
            return AttentionPlan(table_BP, length_B, decode)
        prompts, row = list[PromptRows](), decodes
        for first, last in group_for_gather(end_S[decodes:].tolist()):
            part = slice(decodes + first, decodes + last)
            prefill = planner.plan(tokens_S[part].tolist(), end_S[part].tolist())
            until = row + int(tokens_S[part].sum())
            prompts.append(
                PromptRows(row, until, prefill, self._context_rows(slot_S[part], end_S[part]))
            )
            row = until
        return AttentionPlan(table_BP, length_B, decode, tuple(prompts))

    def _context_rows(self, slot_S: np.ndarray, context_S: np.ndarray) -> Tensor:
        """Pool rows of the contexts, concatenated: int32 [L]."""
        total = int(context_S.sum())
        integers = self.driver.upload(
            np.stack([slot_S, np.cumsum(context_S) - context_S, context_S])
        )
        segment_L = torch.repeat_interleave(
            self._arange(len(context_S)), integers[2], output_size=total
        )
        position_L = self._arange(total) - integers[1][segment_L]
        return self._kv_rows(integers[0][segment_L], position_L).to(torch.int32)

    def _kv_rows(self, slot_T: Tensor, position_T: Tensor) -> Tensor:
        size = self.page_tokens
        return self.pages[slot_T, position_T // size].long() * size + position_T % size

    def _arange(self, size: int) -> Tensor:
        return torch.arange(size, device=self.driver.device)

    def _append_pages(self, slot: int, pages: Sequence[int]) -> list[tuple[int, int, int]]:
        used = self._num_pages[slot]
        self._num_pages[slot] = used + len(pages)
        return [(slot, used + i, page) for i, page in enumerate(pages)]
