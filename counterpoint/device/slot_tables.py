"""SlotTables: one row per slot of the CPU executor, with what a step needs beyond its integers.

Owns: token ids and block tables of the open slots, as tensors; their sampling parameters.
Promises: no Python loop over tokens, and over segments only to read their integers. A step reads
only positions before its end, so a table may grow under a step in flight.

Memory: 4 bytes per slot and position, 8 MiB for 256 slots of 8,192 tokens.

Shapes: S segments, T tokens of the pass, P pages of the longest segment, B sampled segments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoint.device.sampling_tables import SamplingTables
from counterpoint.model.batch import PassSegments, PassTensors, make_batch
from counterpoint.model.ops import Ops
from counterpoint.model.sample import SamplerInputs
from counterpoint.types import InitSlot, Segment


@dataclasses.dataclass(frozen=True, slots=True)
class PassRows:
    """The integers of a pass, on the host, int64: of each segment its slot, first position and
    number of tokens; of each sampled one its slot and the position of the new token."""

    slot_S: Tensor
    start_S: Tensor
    tokens_S: Tensor
    sampled_B: Tensor  # indices of the sampled segments
    slot_B: Tensor
    end_B: Tensor


def make_pass_rows(segments: Sequence[Segment]) -> PassRows:
    integers_S4 = torch.tensor(
        [(s.slot, s.start, s.tokens, s.sample) for s in segments], dtype=torch.int64
    )
    slot_S, start_S, tokens_S, sample_S = integers_S4.unbind(1)
    sampled_B = sample_S.nonzero()[:, 0]
    end_B = (start_S + tokens_S)[sampled_B]
    return PassRows(slot_S, start_S, tokens_S, sampled_B, slot_S[sampled_B], end_B)


class SlotTables:
    """`tokens` [slots, context + 1] and `pages` [slots, pages of a context], int32."""

    def __init__(
        self,
        slots: int,
        max_context_tokens: int,
        page_tokens: int,
        vocab: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`vocab`: ids from there on are never sampled."""
        self.page_tokens = page_tokens
        # One more position: the last sampled token of a full context.
        self.tokens = torch.zeros(slots, max_context_tokens + 1, dtype=torch.int32)
        self.pages = torch.zeros(slots, -(-max_context_tokens // page_tokens), dtype=torch.int32)
        self.sampling = SamplingTables(slots, vocab, eos_token_ids)
        self._pages_used = [0] * slots

    def init_slot(self, command: InitSlot) -> None:
        """Fill a row. Raises ValueError or IndexError if it does not fit."""
        slot, tokens = command.slot, command.tokens
        self.tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self._pages_used[slot] = 0
        self._append(slot, command.pages)
        output = tokens[command.prompt_tokens :]
        self.sampling.set_row(slot, command.sampling, command.prompt_tokens, output)

    def free_slot(self, slot: int) -> None:
        """Free the slot's grammar; the next `init_slot` overwrites the rest."""
        self.sampling.grammars.free_slot(slot)

    def append_pages(self, segments: Sequence[Segment]) -> None:
        """Append the segments' new pages to their block tables: once per pass, before its first
        step."""
        for segment in segments:
            if segment.pages:
                self._append(segment.slot, segment.pages)

    def pass_tensors(self, rows: PassRows, ops: Ops) -> PassTensors:
        """The pass as tensors, with the token ids and pages that its segments have now."""
        total = int(rows.tokens_S.sum())
        first_S = rows.tokens_S.cumsum(0) - rows.tokens_S
        segment_T = torch.repeat_interleave(rows.tokens_S, output_size=total)
        position_T = torch.arange(total) + (rows.start_S - first_S)[segment_T]
        tokens_T = self.tokens[rows.slot_S[segment_T], position_T].long()
        width = -(-int((rows.start_S + rows.tokens_S).max()) // self.page_tokens)
        # Entries beyond a request's own pages are 0 or an earlier request's: nothing reads them.
        pages_SP = self.pages[:, :width][rows.slot_S].long()
        segments = PassSegments(rows.start_S, rows.tokens_S, rows.sampled_B, pages_SP)
        return make_batch(tokens_T, segments, self.page_tokens, ops)

    def sampler_inputs(self, rows: PassRows) -> SamplerInputs:
        """How the sampled segments of a pass are sampled."""
        return self.sampling.sampler_inputs(rows.slot_B, rows.end_B, self.tokens)

    def put_sampled(self, rows: PassRows, ids_B: Tensor) -> None:
        """Write the sampled ids after their segments. A row that could not be sampled (-1) gets id
        0, since a step already queued may still run over it."""
        self.tokens[rows.slot_B, rows.end_B] = ids_B.clamp(min=0).to(torch.int32)

    def _append(self, slot: int, pages: Sequence[int]) -> None:
        used = self._pages_used[slot]
        self.pages[slot, used : used + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._pages_used[slot] = used + len(pages)
