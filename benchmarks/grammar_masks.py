"""What grammars cost on the host: `python benchmarks/grammar_masks.py [MODEL]`, with the model's own vocabulary.

Walks random answers, and times each mask, and the sampling of a batch with masks against the same without. Times are of the
thread's own CPU, so that a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import numpy as np
import torch

from counterpoint import build
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


def cpu_us(work) -> tuple[float, object]:
    begun = time.thread_time_ns()
    result = work()
    return (time.thread_time_ns() - begun) / 1e3, result


def walk(grammars: Grammars, grammar: str, tokens: int, ends: set[int]) -> list[float]:
    chance, spent = random.Random(1), []
    sampling = Sampling(max_tokens=tokens, grammar=grammar)
    grammars.init_slot(0, sampling)
    for count in range(tokens):
        us, bits = cpu_us(lambda n=count: grammars.compute_bitmasks([0], [n]))
        spent.append(us)
        allowed = np.flatnonzero(np.unpackbits(bits[0], bitorder="little")).tolist()  # type: ignore[index]
        going_on = [id for id in allowed if id not in ends]
        if going_on:
            grammars.accept_tokens([0], [chance.choice(going_on)])
        else:
            grammars.init_slot(0, sampling)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    source = build.find_model(Config().replace(model=asked.model))
    spec = load_spec(source, None)
    us, vocabulary = cpu_us(lambda: make_vocabulary(load_tokenizer(source)))
    more_us, _ = cpu_us(lambda: make_tokenizer(vocabulary, spec.vocab, spec.eos_token_ids))  # type: ignore[arg-type]
    print(
        f"{source.name}, vocabulary of {spec.vocab:,}: read in {us / 1e3:.0f} ms, made ready in {more_us / 1e3:.0f} ms"
    )
    settings = SamplingTables(64, spec.vocab, spec.eos_token_ids)
    settings.grammars.set_vocabulary_loader(lambda: vocabulary)  # type: ignore[arg-type,return-value]
    settings.grammars.compile(from_choice(["warm"]))
    print("grammar            compile ms   mask us: mean   p99   max")
    for name, grammar in GRAMMARS.items():
        compile_us, _ = cpu_us(lambda g=grammar: settings.grammars.compile(g))
        spent = sorted(walk(settings.grammars, grammar, asked.tokens, set(spec.eos_token_ids)))
        p99 = spent[int(0.99 * len(spent))]
        print(
            f"{name:18} {compile_us / 1e3:10.1f} {statistics.mean(spent):14.0f} {p99:5.0f} {spent[-1]:5.0f}"
        )
    print(
        "rows   greedy us   drawn us   greedy, masked us   drawn, masked us   (the masks themselves included)"
    )
    for rows in (1, 8, 32):
        spent = []
        for grammar in ("", GRAMMARS["JSON object"]):
            for temperature in (0.0, 1.0):
                for slot in range(rows):
                    settings.set_row(
                        slot, Sampling(max_tokens=99, temperature=temperature, grammar=grammar), 4
                    )
                spent.append(
                    statistics.median(sampled_us(settings, rows, spec.vocab) for _ in range(20))
                )
        print(f"{rows:4} {spent[0]:11.0f} {spent[1]:10.0f} {spent[2]:19.0f} {spent[3]:18.0f}")


def sampled_us(settings: SamplingTables, rows: int, vocab: int) -> float:
    logits_BV = torch.randn(rows, vocab)
    slot_B, end_B = torch.arange(rows), torch.full((rows,), 4)
    return cpu_us(
        lambda: sample(
            logits_BV, settings.sampler_inputs(slot_B, end_B, torch.zeros(rows, 8)), vocab
        )
    )[0]


if __name__ == "__main__":
    main()
