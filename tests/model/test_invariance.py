"""Batch invariance: a request's logits are the same to the bit whatever shares its passes, however
its prompt is chunked, and with any number of threads.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from counterpoint.config import Config, ConfigError
from counterpoint.model import Decoder, PassSegments, cpu_ops, make_batch
from counterpoint.model.checkpoint import RandomCheckpoint
from counterpoint.model.invariance import require_invariant_gemms
from counterpoint.model.kv import KVPool
from counterpoint.model.weights import build_decoder
from counterpoint.spec import ModelSpec

PAGE, PAGES = 16, 256
SPEC = ModelSpec(
    name="narrow",
    family="llama",
    layers=2,
    hidden=192,
    heads=6,
    kv_heads=2,
    head_dim=32,
    ffn=352,
    vocab=3000,
    max_context_tokens=512,
    tied_embeddings=True,
    eos_token_ids=(1,),
)
WIDE = dataclasses.replace(
    SPEC,
    name="wide",
    layers=1,
    hidden=1024,
    heads=8,
    kv_heads=4,
    head_dim=128,
    ffn=2816,
    qk_norm=True,
)
PROMPT, ANSWER = 130, 6


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def decoder_of(spec: ModelSpec, dtype: str) -> Decoder:
    try:
        ops = cpu_ops(dtype, spec.head_dim, invariant=True)
    except ConfigError as error:
        pytest.skip(str(error))
    return build_decoder(spec, RandomCheckpoint(3, deviation=0.08), ops)


class Passes:
    """Request 0 is compared; the others are random. Each pass has a part of some of them."""

    def __init__(self, decoder: Decoder, company: int, seed: int) -> None:
        self.decoder = decoder
        self.chance = random.Random(seed)
        self.kv = KVPool(decoder.spec, PAGES, PAGE, decoder.kv_dtype)
        fixed = random.Random(0)
        self.tokens = [[fixed.randrange(decoder.spec.vocab) for _ in range(PROMPT + ANSWER)]]
        for _ in range(company):
            self.tokens.append(
                [
                    self.chance.randrange(decoder.spec.vocab)
                    for _ in range(self.chance.randrange(1, 120))
                ]
            )
        free = list(range(PAGES))
        self.chance.shuffle(free)
        self.pages = [
            [free.pop() for _ in range(-(-len(tokens) // PAGE))] for tokens in self.tokens
        ]
        self.done = [0] * len(self.tokens)

    def logits(self, chunk: int) -> Tensor:
        """Logits of request 0 after its prompt, read in chunks, and after each token of its
        answer."""
        found = []
        while self.done[0] < PROMPT + ANSWER:
            count = min(chunk, PROMPT - self.done[0]) if self.done[0] < PROMPT else 1
            pieces = [(0, count)]
            for other in range(1, len(self.tokens)):
                left = len(self.tokens[other]) - self.done[other]
                if left and self.chance.random() < 0.7:
                    pieces.append((other, min(left, self.chance.choice([1, 1, 2, 5, 33]))))
            self.chance.shuffle(pieces)
            rows = self._run(pieces)
            if self.done[0] >= PROMPT:
                found.append(rows[pieces.index((0, count))])
        return torch.stack(found)

    @torch.inference_mode()
    def _run(self, pieces: list[tuple[int, int]]) -> Tensor:
        torch.set_num_threads(self.chance.choice([1, 2]))
        start = [self.done[request] for request, _ in pieces]
        tokens = [
            t
            for request, n in pieces
            for t in self.tokens[request][self.done[request] : self.done[request] + n]
        ]
        table_SP = torch.zeros(len(pieces), max(map(len, self.pages)), dtype=torch.int64)
        for row, (request, count) in enumerate(pieces):
            table_SP[row, : len(self.pages[request])] = torch.tensor(self.pages[request])
            self.done[request] += count
        ops, layers = self.decoder.ops, self.decoder.spec.layers
        counts, all_sampled = (
            torch.tensor([n for _, n in pieces]),
            torch.ones(len(pieces), dtype=torch.bool),
        )
        segments = PassSegments(torch.tensor(start), counts, all_sampled, table_SP)
        batch = make_batch(torch.tensor(tokens), segments, PAGE, ops)
        x_TD = self.decoder.run_layers(self.decoder.embed(batch), batch, self.kv, 0, layers)
        return self.decoder.logits(x_TD, batch)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=lambda spec: spec.name)
def test_logits_are_the_same_to_the_bit(spec: ModelSpec, dtype: str):
    decoder = decoder_of(spec, dtype)
    require_invariant_gemms(decoder)
    alone = Passes(decoder, 0, seed=0).logits(PROMPT)
    for seed, (company, chunk) in enumerate([(0, 7), (1, PROMPT), (9, 29)], 1):
        assert torch.equal(Passes(decoder, company, seed).logits(chunk), alone), (company, chunk)


def test_products_that_depend_on_their_rows_are_found():
    """With an artificial product; MKL's float32 products vary on most CPUs anyway."""
    honest = decoder_of(SPEC, "float16")

    def linear(x: Tensor, packed: object) -> Tensor:
        out = honest.ops.linear(x, packed)
        return out * (1 + 2**-20) if x.shape[0] == 17 else out

    varying = Decoder(SPEC, dataclasses.replace(honest.ops, linear=linear), honest.weights)
    with pytest.raises(ConfigError, match=r"batch_invariant.*qkv.*17 rows"):
        require_invariant_gemms(varying)


def test_what_cannot_be_invariant_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ConfigError, match="batch_invariant needs dtype float16 or bfloat16"):
        cpu_ops("float32", invariant=True)
    with pytest.raises(ConfigError, match="batch_invariant and fp8"):
        Config().replace(batch_invariant=True, quantization="fp8")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"batch_invariant needs the C kernels.*compiler"):
        cpu_ops("float16", cache=tmp_path, invariant=True)
