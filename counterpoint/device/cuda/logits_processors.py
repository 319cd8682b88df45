"""What a request's settings do to its logits before a token is drawn, on the device: penalties, logit bias, ends held back.

Owns: a row per slot of what has been counted, what is added, what may not be chosen yet. Promises: `adjust` does what
model/sample.py does with Penalties and Added, from the rows alone, so that it can be captured; a token is counted where it was
sampled, and the host is not asked. Rows of slots that ask for nothing of this change nothing.
Must not: choose a token.

Memory: 9 bytes per slot and token of the vocabulary (ELEMENT_BYTES).

Shapes: B rows, V vocabulary, L tokens of a request, N pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROMPT_FLAG = 1 << 30  # beside the count of a token in the answer
BYTES_PER_TOKEN = 9


class LogitsProcessors:
    """`counts` int32: how often a token is in the answer, and IN_PROMPT if it is in the prompt. `bias` float32 is added. `ends`
    bool: tokens that may not be chosen before `min_tokens`."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # also written outside it
            self.counts = torch.zeros(
                slots, vocab + 1, dtype=torch.int32, device=device
            )  # the last: of all ids from `vocab` on
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
        """Begin a row with the tokens so far, of which the first `prompt_tokens` are the prompt."""
        counts_V = self.counts[slot]
        ids_L = tokens_L.long().clamp(max=counts_V.shape[0] - 1)
        answer_L = ids_L[prompt_tokens:]
        counts_V.zero_()
        counts_V.index_fill_(0, ids_L[:prompt_tokens], PROMPT_FLAG)
        counts_V.index_add_(0, answer_L, torch.ones_like(answer_L, dtype=torch.int32))
        self.bias[slot].zero_().index_add_(0, *bias_N)
        self.stop_mask[slot].zero_().index_fill_(0, ends_N, True)

    def count_tokens(self, slot_B: Tensor, ids_B: Tensor) -> None:
        """These were sampled (an id below 0 was not). Slots are distinct, but for the spare one's."""
        ids_B = ids_B.clamp(min=0)
        self.counts[slot_B, ids_B] += 1

    def apply(
        self,
        logits_BV: Tensor,
        slot_B: Tensor,
        num_generated_B: Tensor,
        penalties: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Logits as they are to be sampled, of rows that have `made_B` tokens of their answer. `settings`: repetition, presence and
        frequency penalty and min_tokens of each row."""
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
