"""SmolLM2 against transformers' own loading of the same GGUF file. Takes about half a minute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from model_builders import PAGE, load
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from counterpoint.model import Decoder, KVPool, PassSegments, make_batch
from counterpoint.spec.source import DEFAULT_CACHE, find_pulled, resolve_model

CACHE = Path(os.environ.get("COUNTERPOINT_CACHE") or DEFAULT_CACHE).expanduser()

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Why is the sky blue?",
    "def fibonacci(n):",
    "List three fruits and one vegetable.",
]
NEW_TOKENS = 24


class Oracle(NamedTuple):
    model: PreTrainedModel
    prompts: list[Tensor]
    answers: list[list[int]]


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    path = find_pulled("smollm2", CACHE)
    if path is None:
        pytest.skip("SmolLM2 is not fetched: run `counterpoint pull smollm2`")
    folder, file = str(Path(path).parent), Path(path).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    prompts, answers = [], []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            whole = model.generate(
                prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
            )
        prompts.append(prompt[0])
        answers.append(whole[0, prompt.shape[1] :].tolist())
    return Oracle(model, prompts, answers)


def greedy(decoder: Decoder, prompts: list[Tensor]) -> list[list[int]]:
    """All prompts prefilled in one pass, then decoded as one batch, without end of sequence as in
    the oracle."""
    size = len(prompts)
    width = -(-(max(map(len, prompts)) + NEW_TOKENS) // PAGE)
    kv = KVPool(decoder.spec, size * width, PAGE, decoder.kv_dtype)
    table = torch.randperm(size * width, generator=torch.Generator().manual_seed(0)).view(
        size, width
    )
    tokens_T, tokens_S = torch.cat(prompts), torch.tensor([len(prompt) for prompt in prompts])
    start_S = torch.zeros(size, dtype=torch.int64)
    answers = []
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            sample_S = torch.ones(size, dtype=torch.bool)
            segments = PassSegments(start_S, tokens_S, sample_S, table)
            batch = make_batch(tokens_T, segments, PAGE, decoder.ops)
            x_TD = decoder.run_layers(decoder.embed(batch), batch, kv, 0, decoder.spec.layers)
            logits_BV = decoder.logits(x_TD, batch)
            logits_BV[:, list(decoder.spec.eos_token_ids)] = -torch.inf
            start_S, tokens_T, tokens_S = (
                start_S + tokens_S,
                logits_BV.argmax(-1),
                torch.ones_like(tokens_S),
            )
            answers.append(tokens_T)
    return torch.stack(answers, 1).tolist()


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [("float32", CACHE), ("auto", CACHE), ("auto", None)],
    ids=["float32", "auto", "auto, torch"],
)
def test_the_same_greedy_tokens(oracle: Oracle, dtype: str, cache: Path | None):
    decoder = load(resolve_model("smollm2", CACHE), dtype, cache=cache)
    assert greedy(decoder, oracle.prompts) == oracle.answers


def test_the_same_logits(oracle: Oracle):
    decoder = load(resolve_model("smollm2", CACHE), cache=CACHE)
    prompt = oracle.prompts[2]
    kv = KVPool(decoder.spec, 64, PAGE, decoder.kv_dtype)
    ones = torch.ones(1, dtype=torch.bool)
    table = torch.arange(64)[None]
    segments = PassSegments(torch.tensor([0]), torch.tensor([len(prompt)]), ones, table)
    batch = make_batch(prompt, segments, PAGE, decoder.ops)
    x_TD = decoder.run_layers(decoder.embed(batch), batch, kv, 0, decoder.spec.layers)
    ours = decoder.logits(x_TD, batch, torch.arange(len(prompt)))
    with torch.no_grad():
        theirs = oracle.model(prompt[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
