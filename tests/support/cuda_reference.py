"""The plain decoder on the CPU in float32, as the reference of the CUDA executor."""

from __future__ import annotations

import torch
from cuda_rig import PAGE, VOCAB

from counterpoint.model.batch import PassSegments, make_batch
from counterpoint.model.checkpoint import RandomCheckpoint
from counterpoint.model.kv import KVPool
from counterpoint.model.ops import Ops, reference_ops
from counterpoint.model.weights import build_decoder

PROMPT = [7 * n % VOCAB for n in range(1, 40)]


def reference_logits(
    spec, tokens: list[int], deviation: float = 0.15, ops: Ops | None = None
) -> torch.Tensor:
    """Logits at every position, by the plain decoder (or `ops`): [tokens, vocab]."""
    decoder = build_decoder(spec, RandomCheckpoint(3, deviation=deviation), ops or reference_ops())
    pages = -(-len(tokens) // PAGE)
    kv = KVPool(spec, pages, PAGE)
    sizes = torch.tensor([0]), torch.tensor([len(tokens)])
    segments = PassSegments(*sizes, torch.tensor([True]), torch.arange(pages)[None])
    batch = make_batch(torch.tensor(tokens), segments, PAGE, decoder.ops)
    x_TD = decoder.run_layers(decoder.embed(batch), batch, kv, 0, spec.layers)
    return decoder.logits(x_TD, batch, torch.arange(len(tokens)))


def greedy_by_reference(
    spec, prompt: list[int], count: int, vocab: int = VOCAB, deviation: float = 0.15
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(spec, tokens, deviation)[-1, :vocab].argmax()))
    return tokens[len(prompt) :]


def tokens_of(dones) -> list[int]:
    return [token for done in dones for token in done.tokens]
