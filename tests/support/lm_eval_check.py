"""lm-eval against the server and against transformers: `python tests/support/lm_eval_check.py`.

The embedded model is written as a Hugging Face folder in float32. lm-eval runs two tasks made here
(capitals by log-likelihood, sequences by generation) with `hf`, and with `local-completions` over
`counterpoint serve` of that folder. Scores and generated texts must be equal, each log-likelihood
within 0.01. lm-eval gets an environment of its own, in `out/clients`, unless `--python` names one
that has it. Takes some minutes and 2 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from serve_process import ROOT, Running

OUT = ROOT / "out" / "clients"
REQUIREMENTS = ["torch==2.13.0", "lm-eval[api]==0.4.13", "transformers>=5", "accelerate"]
CLOSE = 0.01  # nats
CAPITALS = """
France Paris,
Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna, Greece Athens,
Poland Warsaw, Hungary Budapest,
Sweden Stockholm, Norway Oslo, Finland Helsinki, Denmark Copenhagen, Ireland Dublin, Russia Moscow,
Ukraine Kyiv, Turkey Ankara,
Egypt Cairo, Kenya Nairobi, Japan Tokyo, China Beijing, Thailand Bangkok, Vietnam Hanoi,
Canada Ottawa,
Cuba Havana, Peru Lima,
Chile Santiago, Brazil Brasília, Australia Canberra, Ghana Accra, Nepal Kathmandu, Iran Tehran
"""
SEQUENCES = """
1, 2, 3, 4,;
2, 4, 6, 8,; 10, 20, 30,; A, B, C, D,;
Monday, Tuesday,; January, February,; red, green,; north, south,;
5, 4, 3,;
one, two, three,; spring, summer,; 1, 4, 9,
"""
TASKS = {
    "capitals": {"output_type": "multiple_choice",
                 "doc_to_choice": "choices",
                 "doc_to_target": "answer",
                 "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
    "sequences": {"output_type": "generate_until",
                  "doc_to_target": "{{target}}",
                  "metric_list": [{"metric": "exact_match"}],
                  "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 16}},
}  # fmt: skip


def write_tasks(folder: Path) -> None:
    """The tasks as lm-eval reads them: a YAML (JSON is YAML) and a file of lines each."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [pair.split() for pair in CAPITALS.strip().split(",")]
    rows: dict[str, list[dict[str, Any]]] = {"capitals": [], "sequences": []}
    for at, (country, capital) in enumerate(pairs):
        choices = [pairs[(at + step) % len(pairs)][1] for step in (5, 11, 17)]
        choices.insert(at % 4, capital)
        rows["capitals"].append(
            {"text": f"The capital of {country} is", "choices": choices, "answer": at % 4}
        )
    sequences = [text.strip() for text in SEQUENCES.split(";")]
    rows["sequences"] = [
        {"text": f"Go on with the sequence.\n{text}", "target": ""} for text in sequences
    ]
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(common | {"doc_to_text": "text"} | task))


def write_model(folder: Path) -> None:
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from counterpoint.builder.system_builder import find_model
    from counterpoint.config import Config

    file = Path(find_model(Config()).path)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    del (
        read.config.quantization_config
    )  # it is no longer that: a fresh model of the same weights may be written
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)


def environment(folder: Path) -> str:
    """A Python that has lm-eval."""
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        (folder / ".installed").touch()
    return str(python)


def evaluate(
    python: str, name: str, model: str, options: dict[str, Any]
) -> tuple[dict[str, float], dict[tuple[str, int], list[Any]]]:
    """The scores, and each sample's answers."""
    into = OUT / "results" / name
    told = ",".join(f"{key}={value}" for key, value in options.items())
    command = [
        python,
        "-m",
        "lm_eval",
        "--model",
        model,
        "--model_args",
        told,
        "--tasks",
        ",".join(TASKS),
    ]
    command += [
        "--include_path",
        str(OUT / "tasks"),
        "--output_path",
        str(into),
        "--log_samples",
        "--batch_size",
        "1",
    ]
    subprocess.run(
        command,
        check=True,
        env=os.environ | {"HF_DATASETS_CACHE": str(OUT / "datasets"), "OPENAI_API_KEY": "none"},
    )
    newest = max(into.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    results = json.loads(newest.read_text())["results"]
    scores = {
        f"{task} {key}": value
        for task, row in results.items()
        for key, value in row.items()
        if isinstance(value, float)
    }
    samples: dict[tuple[str, int], list[Any]] = {}
    for task in TASKS:
        file = max(into.rglob(f"samples_{task}_*.jsonl"), key=lambda path: path.stat().st_mtime)
        for line in file.read_text().splitlines():
            sample = json.loads(line)
            samples[task, sample["doc_id"]] = sample["resps"]
    return scores, samples


def likelihood(response: Any) -> float | None:
    """Of a choice; None for a generated text."""
    while isinstance(response, list) and len(response) == 1:
        response = response[0]
    return float(response[0]) if isinstance(response, list) else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", help="a Python that has lm-eval")
    asked = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    write_tasks(OUT / "tasks")
    write_model(OUT / "model")
    python = asked.python or environment(OUT / "lm-eval")
    theirs, their_samples = evaluate(
        python, "transformers", "hf", {"pretrained": OUT / "model", "dtype": "float32"}
    )
    counterpoint = str(Path(sys.executable).with_name("counterpoint"))
    command = [
        counterpoint,
        "serve",
        str(OUT / "model"),
        "--dtype",
        "float32",
        "--port",
        "0",
        "--served-name",
        "m",
    ]
    server = Running(OUT / "server.log", command=command).wait_ready()
    try:
        url = f"{server.url}/v1/completions"
        options = {
            "model": "m",
            "base_url": url,
            "tokenizer_backend": "huggingface",
            "tokenizer": OUT / "model",
            "num_concurrent": 4,
        }
        ours, our_samples = evaluate(python, "counterpoint", "local-completions", options)
    finally:
        server.stop()
    apart, texts = 0.0, 0
    for key, theirs_one in their_samples.items():
        for left, right in zip(theirs_one, our_samples[key], strict=True):
            known = likelihood(left)
            if known is None:
                texts += left != right
            else:
                apart = max(apart, abs(known - (likelihood(right) or 0.0)))
    print(f"{'score':32} {'transformers':>14} {'counterpoint':>14}")
    for name, value in theirs.items():
        print(f"{name:32} {value:14.4f} {ours[name]:14.4f}")
    print(
        f"log-likelihoods: at most {apart:.5f} apart; "
        f"generated texts that differ: {texts} of {SEQUENCES.count(';') + 1}"
    )
    same = all(value == ours[name] or value != value for name, value in theirs.items())
    return 0 if same and apart < CLOSE and not texts else 1


if __name__ == "__main__":
    sys.exit(main())
