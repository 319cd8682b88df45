"""LogitsProcessors: penalties, logit bias and `min_tokens`, on the device.

Owns: per slot, the token counts, the bias and the stop tokens held back.
Promises: `apply` equals model/sample.py's penalties and bias, from these rows alone, so it can be
captured. Tokens are counted where they are sampled. Slots without such settings are unchanged.
Must not: choose a token.

Memory: 9 bytes per slot and vocabulary token (BYTES_PER_TOKEN).

Shapes: B rows, V vocabulary, L tokens of a request, N pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROMPT_FLAG = 1 << 30  # added to the count of a token in the output
BYTES_PER_TOKEN = 9


class LogitsProcessors:
    """`counts` int32: occurrences in the output, plus PROMPT_FLAG if the token is in the prompt.
    `bias` float32 is added. `stop_mask` bool: tokens forbidden before `min_tokens`."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # so that it is writable in any mode
            # The last column counts all ids from `vocab` on.
            self.counts = torch.zeros(slots, vocab + 1, dtype=torch.int32, device=device)
            self.bias = torch.zeros(slots, vocab, dtype=torch.float32, device=device)
            self.stop_mask = torch.zeros(slots, vocab, dtype=torch.bool, device=device)

    def init_slot(
        self,
        slot: int,
        tokens_L: Tensor,
        prompt_tokens: int,
        bias_N: tuple[Tensor, Tensor],
        ends_N: Tensor,
    ) -> None:
        """Start a slot with the tokens so far; the first `prompt_tokens` are the prompt."""
        counts_V = self.counts[slot]
        ids_L = tokens_L.long().clamp(max=counts_V.shape[0] - 1)
        answer_L = ids_L[prompt_tokens:]
        counts_V.zero_()
        counts_V.index_fill_(0, ids_L[:prompt_tokens], PROMPT_FLAG)
        counts_V.index_add_(0, answer_L, torch.ones_like(answer_L, dtype=torch.int32))
        self.bias[slot].zero_().index_add_(0, *bias_N)
        self.stop_mask[slot].zero_().index_fill_(0, ends_N, True)

    def count_tokens(self, slot_B: Tensor, ids_B: Tensor) -> None:
        """Count sampled ids (below 0: not sampled). Slots are distinct, except the padding slot."""
        ids_B = ids_B.clamp(min=0)
        self.counts[slot_B, ids_B] += 1

    def apply(
        self,
        logits_BV: Tensor,
        slot_B: Tensor,
        num_generated_B: Tensor,
        penalties: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Logits to sample from, of rows with `num_generated_B` output tokens. `penalties`:
        repetition, presence and frequency penalty, and min_tokens, of each row."""
        vocab = logits_BV.shape[1]
        repetition_B, presence_B, frequency_B, least_B = penalties
        counts_BV = self.counts[slot_B, :vocab]
        answered_BV = counts_BV & (PROMPT_FLAG - 1)
        repetition_B1 = repetition_B[:, None]
        repeated_BV = torch.where(
            logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1
        )
        logits_BV = torch.where(counts_BV > 0, repeated_BV, logits_BV)
        logits_BV = logits_BV - (
            presence_B[:, None] * (answered_BV > 0) + frequency_B[:, None] * answered_BV
        )
        logits_BV += self.bias[slot_B, :vocab]
        held_back_BV = self.stop_mask[slot_B, :vocab] & (num_generated_B < least_B)[:, None]
        return logits_BV.masked_fill_(held_back_BV, -torch.inf)
