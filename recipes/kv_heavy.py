"""A load heavy in KV reads: 128 answers over contexts of 8,000 tokens, beside prompts of 4,000.

    python recipes/kv_heavy.py > kv_heavy.jsonl

The 128 answers share sixteen contexts, in turn. So the contexts are computed once, and each answer
reads a whole one from the KV cache. (With a single context, a GPU's own cache would hold a layer of
it.) Their TTFT target is 8 s. Arguments: the number of prompts, which arrive from the 10th
second on; a seed; the mean length of the 128 answers (shorter answers make a shorter run).
"""

from __future__ import annotations

import json
import random
import sys

READERS, CONTEXTS, CONTEXT, ANSWER = 128, 16, 8000, 1500
PROMPT, REPLY = 4000, 32
BLOCK = 16


def main(arriving: int = 200, seed: int = 0, answer: int = ANSWER) -> None:
    dice = random.Random(seed)
    for reader in range(READERS):
        first = reader % CONTEXTS * CONTEXT // BLOCK
        blocks = list(range(first, first + CONTEXT // BLOCK))
        row = {
            "arrival_s": 0.0,
            "prompt_tokens": CONTEXT + 8,
            "output_tokens": dice.randint(answer * 2 // 3, answer * 4 // 3),
        }
        print(json.dumps(row | {"prefix_ids": blocks, "block_tokens": BLOCK, "ttft_s": 8.0}))
    at_s = 10.0
    for _ in range(arriving):
        at_s += dice.expovariate(1.0)
        print(
            json.dumps(
                {
                    "arrival_s": at_s,
                    "prompt_tokens": dice.randint(PROMPT // 2, PROMPT * 3 // 2),
                    "output_tokens": REPLY,
                }
            )
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
