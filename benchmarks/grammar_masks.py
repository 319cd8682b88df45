"""What grammars cost on the host, with a model's own vocabulary.

    python benchmarks/grammar_masks.py [MODEL]

Walks random answers. Times each bitmask, and the sampling of a batch with and without bitmasks.
Times are CPU time of the thread, so a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from counterpoint.builder import system_builder
from counterpoint.config import Config
from counterpoint.device.grammar import Grammars, make_tokenizer
from counterpoint.device.sampling_tables import SamplingTables
from counterpoint.model.sample import sample
from counterpoint.serve.structured_output.grammar import (
    JSON_OBJECT,
    from_choice,
    from_json_schema,
    from_regex,
    make_vocabulary,
)
from counterpoint.serve.text.tokenizer_loader import load_tokenizer
from counterpoint.spec.source import load_spec
from counterpoint.types import Sampling

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": [f"tag {i}" for i in range(100)]}},
    },
    "required": ["name", "age", "email", "born", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "JSON object": from_json_schema(JSON_OBJECT),
    "schema of five": from_json_schema(PERSON),
    "300 properties": from_json_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}}
    ),
    "pattern": from_regex(r"[a-z]+@[a-z]{3,50}\.(com|org)( [0-9]{1,3}){1,200}"),
    "choice of 1,000": from_choice([f"choice number {i}" for i in range(1000)]),
}


Result = TypeVar("Result")


def cpu_us(work: Callable[[], Result]) -> tuple[float, Result]:
    """Microseconds of this thread's CPU time, and the result."""
    began_ns = time.thread_time_ns()
    result = work()
    return (time.thread_time_ns() - began_ns) / 1e3, result


def time_masks(grammars: Grammars, grammar: str, tokens: int, ends: set[int]) -> list[float]:
    """Of each bitmask, in microseconds, along random answers."""
    rng, spent_us = random.Random(1), []
    sampling = Sampling(max_tokens=tokens, grammar=grammar)
    grammars.init_slot(0, sampling)
    for count in range(tokens):
        us, bits = cpu_us(lambda n=count: grammars.compute_bitmasks([0], [n]))
        spent_us.append(us)
        allowed = np.flatnonzero(np.unpackbits(bits[0], bitorder="little")).tolist()
        others = [id for id in allowed if id not in ends]
        if others:
            grammars.accept_tokens([0], [rng.choice(others)])
        else:
            grammars.init_slot(0, sampling)
    return spent_us


def time_sampling(tables: SamplingTables, rows: int) -> float:
    logits_BV = torch.randn(rows, tables.vocab)
    slot_B, end_B = torch.arange(rows), torch.full((rows,), 4)
    tokens = torch.zeros(rows, 8)
    return cpu_us(
        lambda: sample(logits_BV, tables.sampler_inputs(slot_B, end_B, tokens), tables.vocab)
    )[0]


def show_masks(tables: SamplingTables, tokens: int) -> None:
    print("grammar            compile ms   mask us: mean   p99   max")
    for name, grammar in GRAMMARS.items():
        compile_us, _ = cpu_us(lambda g=grammar: tables.grammars.compile(g))
        ends = set(tables.eos_token_ids)
        spent_us = sorted(time_masks(tables.grammars, grammar, tokens, ends))
        p99_us = spent_us[int(0.99 * len(spent_us))]
        print(
            f"{name:18} {compile_us / 1e3:10.1f} {statistics.mean(spent_us):14.0f} "
            f"{p99_us:5.0f} {spent_us[-1]:5.0f}"
        )


def show_sampling(tables: SamplingTables) -> None:
    print(
        "rows   greedy us   drawn us   greedy, masked us   drawn, masked us   "
        "(the masks themselves included)"
    )
    for rows in (1, 8, 32):
        spent_us = []
        for grammar in ("", GRAMMARS["JSON object"]):
            for temperature in (0.0, 1.0):
                sampling = Sampling(max_tokens=99, temperature=temperature, grammar=grammar)
                for slot in range(rows):
                    tables.set_row(slot, sampling, 4)
                spent_us.append(statistics.median(time_sampling(tables, rows) for _ in range(20)))
        greedy, drawn, greedy_masked, drawn_masked = spent_us
        print(f"{rows:4} {greedy:11.0f} {drawn:10.0f} {greedy_masked:19.0f} {drawn_masked:18.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    source = system_builder.find_model(Config().replace(model=asked.model))
    spec = load_spec(source, None)
    us, vocabulary = cpu_us(lambda: make_vocabulary(load_tokenizer(source)))
    more_us, _ = cpu_us(lambda: make_tokenizer(vocabulary, spec.vocab, spec.eos_token_ids))
    print(
        f"{source.name}, vocabulary of {spec.vocab:,}: read in {us / 1e3:.0f} ms, "
        f"made ready in {more_us / 1e3:.0f} ms"
    )
    tables = SamplingTables(64, spec.vocab, spec.eos_token_ids)
    tables.grammars.set_vocabulary_loader(lambda: vocabulary)
    tables.grammars.compile(from_choice(["warm"]))
    show_masks(tables, asked.tokens)
    show_sampling(tables)


if __name__ == "__main__":
    main()
